// SPDX-License-Identifier: Apache-2.0
#include "weightd/status.h"

#include <cerrno>
#include <system_error>

namespace weightd {

std::string_view status_code_name(StatusCode code) {
  switch (code) {
    case StatusCode::kOk: return "ok";
    case StatusCode::kInvalidArgument: return "invalid_argument";
    case StatusCode::kNotFound: return "not_found";
    case StatusCode::kAlreadyExists: return "already_exists";
    case StatusCode::kPermissionDenied: return "permission_denied";
    case StatusCode::kResourceExhausted: return "resource_exhausted";
    case StatusCode::kFailedPrecondition: return "failed_precondition";
    case StatusCode::kUnavailable: return "unavailable";
    case StatusCode::kDeadlineExceeded: return "deadline_exceeded";
    case StatusCode::kCancelled: return "cancelled";
    case StatusCode::kUnsupported: return "unsupported";
    case StatusCode::kCorruption: return "corruption";
    case StatusCode::kIo: return "io";
    case StatusCode::kCuda: return "cuda";
    case StatusCode::kInternal: return "internal";
    case StatusCode::kRevoked: return "revoked";
    case StatusCode::kForked: return "forked";
    case StatusCode::kLost: return "lost";
  }
  return "unknown";
}

std::string Status::to_string() const {
  if (ok()) return "ok";
  return std::string(status_code_name(code_)) + ": " + message_;
}

Status Status::with_context(std::string_view context) const {
  if (ok()) return *this;
  return {code_, std::string(context) + ": " + message_};
}

Status status_from_errno(int error_number, std::string_view what) {
  std::string message = std::string(what) + ": " + std::generic_category().message(error_number);
  switch (error_number) {
    case ENOSPC: case EDQUOT: case EFBIG: case EMFILE: case ENFILE: case ENOMEM:
      return Status::resource_exhausted(std::move(message));
    case ENOENT: return Status::not_found(std::move(message));
    case EACCES: case EPERM: return Status::permission_denied(std::move(message));
    default: return Status::io(std::move(message));
  }
}

}  // namespace weightd
