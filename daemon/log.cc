// SPDX-License-Identifier: Apache-2.0
#include "daemon/log.h"

#include <fcntl.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <utility>

#include "base/fd.h"
#include "base/text.h"

namespace weightd::daemon {
namespace {

constexpr size_t kMaxLineBytes = 8192;

/// Appends to a descriptor with plain write(). What cannot be written is lost: a full disk or a reader that went away must not stop
/// the service, so errors are dropped and nothing is retried.
class FdSink final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  FdSink(UniqueFd fd, bool owned) : fd_(std::move(fd)), owned_(owned) {}
  FdSink(const FdSink&) = delete;
  FdSink& operator=(const FdSink&) = delete;
  ~FdSink() override {
    if (!owned_) (void)fd_.release();
  }

  void exchange(UniqueFd fd) {
    const std::lock_guard<std::mutex> lock(mutex_);
    fd_ = std::move(fd);
  }

 private:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t line;
    formatter_->format(message, line);
    ssize_t written = 0;
    do {
      written = ::write(fd_.get(), line.data(), line.size());
    } while (written < 0 && errno == EINTR);
  }
  void flush_() override {}

  UniqueFd fd_;
  bool owned_;
};

/// The syslog priority of the line's level, as systemd reads it from the front of a line.
class PriorityFlag final : public spdlog::custom_flag_formatter {
 public:
  void format(const spdlog::details::log_msg& message, const std::tm&, spdlog::memory_buf_t& out) override {
    switch (message.level) {
      case spdlog::level::err:
        out.push_back('3');
        break;
      case spdlog::level::warn:
        out.push_back('4');
        break;
      case spdlog::level::info:
        out.push_back('6');
        break;
      default:
        out.push_back('7');
        break;
    }
  }
  [[nodiscard]] std::unique_ptr<spdlog::custom_flag_formatter> clone() const override { return std::make_unique<PriorityFlag>(); }
};

spdlog::level::level_enum spdlog_level(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
  }
  return spdlog::level::info;
}

std::unique_ptr<spdlog::formatter> make_formatter(bool journal) {
  auto formatter = std::make_unique<spdlog::pattern_formatter>();
  if (journal) {
    formatter->add_flag<PriorityFlag>('*').set_pattern("<%*>%v");
  } else {
    formatter->set_pattern("%Y-%m-%dT%H:%M:%S.%e%z weightd[%P] %l: %v");
  }
  return formatter;
}

Result<UniqueFd> open_file(const std::string& path) {
  // O_NONBLOCK: a FIFO without a reader must not hang the service.
  UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0640));
  const std::string name = "log_target '" + printable(path) + "'";
  if (!fd.valid()) return status_from_errno(errno, name);
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return status_from_errno(errno, name);
  if (!S_ISREG(info.st_mode)) return Status::invalid_argument(name + ": not a regular file");
  return fd;
}

}  // namespace

std::string_view log_level_name(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return "debug";
    case LogLevel::kInfo:
      return "info";
    case LogLevel::kWarning:
      return "warning";
    case LogLevel::kError:
      return "error";
  }
  return "unknown";
}

LogLevel log_level_from_name(std::string_view name) {
  for (const LogLevel level : {LogLevel::kDebug, LogLevel::kWarning, LogLevel::kError}) {
    if (log_level_name(level) == name) return level;
  }
  return LogLevel::kInfo;
}

struct Log::State {
  std::string target;
  std::shared_ptr<FdSink> sink;
  std::shared_ptr<spdlog::logger> logger;
};

Log::Log(std::unique_ptr<State> state) : state_(std::move(state)) {}
Log::Log(Log&&) noexcept = default;
Log& Log::operator=(Log&&) noexcept = default;
Log::~Log() = default;

Result<Log> Log::open(const std::string& target, LogLevel level) {
  const bool to_stderr = target == "stderr";
  UniqueFd fd(STDERR_FILENO);
  if (!to_stderr) {
    (void)fd.release();
    WEIGHTD_ASSIGN_OR_RETURN(fd, open_file(target));
  }
  try {
    auto state = std::make_unique<State>();
    state->target = target;
    state->sink = std::make_shared<FdSink>(std::move(fd), !to_stderr);
    state->sink->set_formatter(make_formatter(to_stderr && std::getenv("JOURNAL_STREAM") != nullptr));
    state->logger = std::make_shared<spdlog::logger>("weightd", state->sink);
    state->logger->set_level(spdlog_level(level));
    state->logger->set_error_handler([](const std::string&) {});
    return Log(std::move(state));
  } catch (const std::exception& error) {
    return Status::internal(std::string("log: ") + error.what());
  }
}

void Log::write(LogLevel level, std::string_view line) {
  // spdlog hands errors of formatting and sinks to the error handler above, which drops them.
  state_->logger->log(spdlog_level(level), spdlog::string_view_t(line.data(), std::min(line.size(), kMaxLineBytes)));
}

void Log::set_level(LogLevel level) { state_->logger->set_level(spdlog_level(level)); }

Status Log::reopen() {
  if (state_->target == "stderr") return {};
  WEIGHTD_ASSIGN_OR_RETURN(UniqueFd fd, open_file(state_->target));
  state_->sink->exchange(std::move(fd));
  return {};
}

}  // namespace weightd::daemon
