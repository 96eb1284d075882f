// SPDX-License-Identifier: Apache-2.0
#include "tools/cli/output.h"

#include <unistd.h>

#include <cerrno>
#include <utility>

namespace weightd::cli {
namespace {

int write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t put = ::write(fd, text.data(), text.size());
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return errno;
    text.remove_prefix(static_cast<size_t>(put));
  }
  return 0;
}

/// Takes the details.
Json error_document(const Status& status, ExitCode code, const std::string& hint, std::unique_ptr<Json> details) {
  Json error = Json::object();
  error.set("code", status_code_name(status.code())).set("message", status.message()).set("exit_code", static_cast<int>(code));
  if (!hint.empty()) error.set("hint", hint);
  if (details != nullptr) error.set("details", std::move(*details));
  Json document = Json::document();
  document.set("error", std::move(error));
  return document;
}

}  // namespace

std::string_view general_advice(StatusCode code) {
  switch (code) {
    case StatusCode::kResourceExhausted:
      return "make room as the message says, then try again";
    case StatusCode::kPermissionDenied:
      return "run as a user who may do this";
    case StatusCode::kUnsupported:
      return "use the release that wrote it, or a newer one";
    case StatusCode::kCorruption:
      return "restore the bytes from where they came from, then try again";
    case StatusCode::kDeadlineExceeded:
      return "give it more time with --timeout";
    case StatusCode::kInternal:
      return "this is a fault of the program: please report it with the line above";
    default:
      return "";
  }
}

void Output::write_out(std::string_view text) {
  if (write_error_ == 0) write_error_ = write_all(STDOUT_FILENO, text);
}

void Output::print(std::string_view text) {
  if (!json && !quiet) write_out(text);
}

void Output::emit(const Json& document) {
  if (json && !quiet) write_out(document.dump());
}

void Output::warning(std::string_view line) {
  if (!quiet) write_all(STDERR_FILENO, program_ + ": warning: " + std::string(line) + "\n");
}

bool Output::progress_wanted() const { return !quiet && ::isatty(STDERR_FILENO) == 1; }

ExitCode Output::finish(const Status& status) {
  if (status.ok() && write_error_ == 0) return ExitCode::kOk;
  if (status.ok() && write_error_ == EPIPE) return ExitCode::kPipeClosed;
  const Status failure = status.ok() ? status_from_errno(write_error_, "standard output") : status;
  const ExitCode code = exit_code(failure.code());
  const std::string hint = hint_.empty() ? std::string(general_advice(failure.code())) : hint_;
  write_all(STDERR_FILENO,
            program_ + ": error: " + failure.message() + "\n" + (hint.empty() ? "" : program_ + ": hint: " + hint + "\n"));
  emit(error_document(failure, code, hint, std::move(details_)));
  return code;
}

}  // namespace weightd::cli
