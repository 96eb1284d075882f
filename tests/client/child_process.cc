// SPDX-License-Identifier: Apache-2.0
#include "tests/client/child_process.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

#include "weightd/status.h"

namespace {

// LeakSanitizer's question at exit. What only threads of the parent point to looks leaked in a forked child, and is not.
bool is_forked_child = false;

}  // namespace

extern "C" int __lsan_is_turned_off() { return is_forked_child ? 1 : 0; }  // NOLINT(bugprone-reserved-identifier)

namespace weightd::test {

int in_forked_child(const std::function<int()>& child) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    is_forked_child = true;
    std::exit(child());
  }
  int status = 0;
  WEIGHTD_CHECK(::waitpid(pid, &status, 0) == pid);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

}  // namespace weightd::test
