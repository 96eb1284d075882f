// SPDX-License-Identifier: Apache-2.0
#include "tools/cli/exit_codes.h"

namespace weightd::cli {

ExitCode exit_code(StatusCode code) {
  switch (code) {
    case StatusCode::kOk:
      return ExitCode::kOk;
    case StatusCode::kInvalidArgument:
      return ExitCode::kUsage;
    case StatusCode::kCorruption:
      return ExitCode::kDifference;
    case StatusCode::kPermissionDenied:
      return ExitCode::kPermission;
    case StatusCode::kNotFound:
      return ExitCode::kNotFound;
    case StatusCode::kUnsupported:
      return ExitCode::kUnsupported;
    case StatusCode::kUnavailable:
      return ExitCode::kUnavailable;
    case StatusCode::kDeadlineExceeded:
      return ExitCode::kTimedOut;
    case StatusCode::kResourceExhausted:
      return ExitCode::kExhausted;
    case StatusCode::kAlreadyExists:
    case StatusCode::kFailedPrecondition:
    case StatusCode::kCancelled:
    case StatusCode::kRevoked:
    case StatusCode::kForked:
    case StatusCode::kLost:
      return ExitCode::kRefused;
    case StatusCode::kIo:
    case StatusCode::kCuda:
    case StatusCode::kInternal:
      return ExitCode::kFailed;
  }
  return ExitCode::kFailed;
}

std::string exit_codes_help() {
  std::string text = "Exit codes:\n";
  for (const ExitCodeInfo& info : kExitCodes) {
    const std::string number = std::to_string(static_cast<int>(info.code));
    text += "  " + number + std::string(5 - number.size(), ' ') + std::string(info.meaning) + "\n";
  }
  return text;
}

}  // namespace weightd::cli
