// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <csignal>

namespace weightd::cli {

/// While one lives, SIGINT, SIGTERM and SIGHUP wait instead of killing, for this thread and the threads it starts from then on;
/// long work asks pending() now and then, stops and cleans up. The destructor lets the waiting signal through, so that a shell sees
/// the process end by it. Make it before any thread, and destroy it last.
class Interrupts {
 public:
  Interrupts();
  ~Interrupts();
  Interrupts(const Interrupts&) = delete;
  Interrupts& operator=(const Interrupts&) = delete;

  [[nodiscard]] bool pending() const;

 private:
  sigset_t signals_{};
  sigset_t before_{};
};

/// Writes past a file-size limit or into a closed pipe come back as errors (CO-099) instead of killing the process.
void ignore_write_signals();

}  // namespace weightd::cli
