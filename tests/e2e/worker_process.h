// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/fd.h"

namespace weightd::e2e {

/// A failure that ends the test, not the other tests of the program.
[[nodiscard]] std::runtime_error test_failure(const std::string& what);
/// Asks `condition` again and again until it holds; throws with `what` after a minute. For what other processes bring about.
void wait_until(const std::string& what, const std::function<bool()>& condition);

struct WorkerOptions {
  uint32_t uid = 0;                                // not 0: runs as this user, in the group of the same number (needs root)
  std::map<std::string, std::string> environment;  // beside this process's own
  int namespaces = 0;                              // CLONE_NEW...: new ones for it alone
  std::function<bool()> before_exec;               // in the child, before it changes its user; false: it ends
};

/// What a worker answered: "ok" with values by key, or "error" with a code's name and a message.
struct Answer {
  bool ok = false;
  std::string code, text;
  std::map<std::string, std::string> values;
  [[nodiscard]] const std::string& at(const std::string& key) const;  // throws: not there
  [[nodiscard]] uint64_t number(const std::string& key) const;
};

/// A gpu_worker as a process, driven line by line. Every wait has a limit, after which the process is killed and the test fails.
/// The destructor kills it.
class WorkerProcess {
 public:
  explicit WorkerProcess(const std::string& socket, const WorkerOptions& options = {});
  WorkerProcess(WorkerProcess&& other) noexcept;
  WorkerProcess(const WorkerProcess&) = delete;
  WorkerProcess& operator=(const WorkerProcess&) = delete;
  ~WorkerProcess();

  [[nodiscard]] pid_t pid() const { return pid_; }
  void send(const std::string& line);
  [[nodiscard]] Answer answer(std::chrono::seconds limit = std::chrono::seconds(120));
  /// Sends and waits for the answer.
  Answer ask(const std::string& line, std::chrono::seconds limit = std::chrono::seconds(120));
  /// The same; throws unless the answer is ok.
  Answer must(const std::string& line, std::chrono::seconds limit = std::chrono::seconds(120));

  void signal(int number) const;
  void kill(bool reap = true);  // SIGKILL
  /// Ends its input and waits for its end: the exit status, or minus the signal that ended it.
  int finish(std::chrono::seconds limit = std::chrono::seconds(60));
  /// For an end that comes by itself.
  int wait(std::chrono::seconds limit = std::chrono::seconds(60));

 private:
  [[noreturn]] void give_up(const std::string& why);

  pid_t pid_ = 0;
  UniqueFd input_, output_, end_;  // end_: a pidfd
  std::string read_;
  std::string last_line_;
};

/// Whether the kernel lets this process make these namespaces (CLONE_NEW...).
[[nodiscard]] bool may_unshare(int namespaces);
/// Runs a program to its end, killed after `limit`: its exit status, or minus a signal; both outputs go to `output` if that is
/// given.
int run_program(const std::vector<std::string>& words, std::string* output = nullptr,
                std::chrono::seconds limit = std::chrono::seconds(300));

}  // namespace weightd::e2e
