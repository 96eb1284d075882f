// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "weightd/status.h"

namespace weightd::daemon {

enum class LogLevel { kDebug, kInfo, kWarning, kError };
[[nodiscard]] std::string_view log_level_name(LogLevel level);
[[nodiscard]] LogLevel log_level_from_name(std::string_view name);  // kInfo for anything else

/// The daemon's log: one line per call, to stderr or to a file. Writing never throws and never fails the caller (CO-154). No thread
/// of its own (CO-153). Under systemd (JOURNAL_STREAM is set) lines on stderr begin with "<N>", the syslog priority. Thread-safe.
class Log {
 public:
  /// `target`: "stderr", or the absolute path of a file, opened for appending (created with mode 0640). kInvalidArgument when the
  /// path is something else than a regular file; otherwise the error of the system.
  [[nodiscard]] static Result<Log> open(const std::string& target, LogLevel level);
  Log(Log&&) noexcept;
  Log& operator=(Log&&) noexcept;
  ~Log();

  void debug(std::string_view line) { write(LogLevel::kDebug, line); }
  void info(std::string_view line) { write(LogLevel::kInfo, line); }
  void warning(std::string_view line) { write(LogLevel::kWarning, line); }
  void error(std::string_view line) { write(LogLevel::kError, line); }

  void set_level(LogLevel level);
  /// Opens the file again by its name, after a rotation. On failure the old file stays in use.
  Status reopen();

 private:
  struct State;
  explicit Log(std::unique_ptr<State> state);
  void write(LogLevel level, std::string_view line);
  std::unique_ptr<State> state_;
};

}  // namespace weightd::daemon
