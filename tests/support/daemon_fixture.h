// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/fd.h"
#include "tests/support/safetensors_builder.h"

namespace weightd::testing {

/// Sanitizers keep freed memory back, so that sizes of processes mean nothing.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

struct DaemonOptions {
  std::string config;  // TOML lines, put behind the sockets' paths
  std::string backend = "host";
  std::vector<std::string> arguments;              // behind --config FILE
  std::map<std::string, std::string> environment;  // beside this process's own
  uint64_t max_open_files = 0;                     // both limits; 0: as they are
  uint32_t uid = 0, gid = 0;                       // not 0: runs as this user (needs root)
  bool any_user = false;                           // workers of every user may reach it, and lease
  bool start = true;
};

/// The real weightd (programs.h says which), on the host backend unless told otherwise, with its own folder, sockets and
/// configuration. Waits for READY=1 on a notification socket, never by sleeping. A test that cannot start its daemon aborts with
/// the daemon's log. The process ends with the fixture at the latest.
class DaemonFixture {
 public:
  explicit DaemonFixture(const DaemonOptions& options = {});
  DaemonFixture(const DaemonFixture&) = delete;
  DaemonFixture& operator=(const DaemonFixture&) = delete;
  ~DaemonFixture();

  [[nodiscard]] const std::string& folder() const { return folder_.path(); }  // a model folder of the daemon
  [[nodiscard]] std::string operator/(std::string_view name) const { return folder_ / name; }
  [[nodiscard]] std::string data_socket() const { return folder_ / "data.sock"; }
  [[nodiscard]] std::string control_socket() const { return folder_ / "control.sock"; }
  [[nodiscard]] std::string config_file() const { return folder_ / "weightd.toml"; }
  [[nodiscard]] pid_t pid() const { return pid_; }
  [[nodiscard]] bool running() const;
  [[nodiscard]] const std::string& backend() const { return options_.backend; }

  /// Rewrites the configuration file; the daemon reads it at its next start or SIGHUP.
  void write_config(const std::string& lines);

  void start();                                                                 // and waits until it is ready
  void spawn();                                                                 // without waiting
  bool wait_ready(std::chrono::milliseconds limit = std::chrono::seconds(30));  // false: it ended, or time is up
  void signal(int number) const;
  int stop();   // SIGTERM; the exit status, or minus the signal that ended it
  void kill();  // SIGKILL, and reaped
  int wait();   // for an end that comes by itself; as stop()

  /// What it has written to stderr, all starts together.
  [[nodiscard]] std::string log() const;
  /// Reads the log until it holds `text`; aborts after 30 s.
  void wait_for_log(const std::string& text) const;

  [[nodiscard]] uint64_t open_files() const;  // of the daemon
  [[nodiscard]] uint64_t rss_bytes() const;
  [[nodiscard]] std::chrono::milliseconds cpu_time() const;
  [[nodiscard]] std::vector<pid_t> children() const;

 private:
  [[noreturn]] void become_daemon() const;
  void remember_end(int wait_status);

  TempDir folder_;
  DaemonOptions options_;
  UniqueFd notify_;
  pid_t pid_ = 0;
  int exit_status_ = 0;
};

/// Asks `condition` again and again until it holds; aborts with `what` after 30 s. For conditions that other processes bring about.
template <typename Condition>
void eventually(const std::string& what, Condition condition) {
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!condition()) require(std::chrono::steady_clock::now() < limit, "not within 30 s: " + what);
}

}  // namespace weightd::testing
