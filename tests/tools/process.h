// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace weightd::testing {

/// What a program left behind.
struct Outcome {
  int exit_code = -1;  // -1 when a signal ended it
  int signal = 0;
  std::string out, err;
};

struct RunOptions {
  std::string folder;                    // working directory; empty: this one
  std::vector<std::string> environment;  // "NAME=value", added to ours
  int out_fd = -1;                       // standard output goes there instead of into Outcome::out
  int err_fd = -1;
};

/// A program that runs. Aborts when it cannot be started. Kills it and waits at the end.
class Process {
 public:
  explicit Process(const std::vector<std::string>& command, const RunOptions& options = {});
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;
  ~Process();

  [[nodiscard]] pid_t pid() const { return pid_; }
  void send(int signal) const;
  /// Once.
  Outcome wait();

 private:
  pid_t pid_ = -1;
  int out_ = -1, err_ = -1;  // unlinked files
};

inline Outcome run(const std::vector<std::string>& command, const RunOptions& options = {}) {
  return Process(command, options).wait();
}

}  // namespace weightd::testing
