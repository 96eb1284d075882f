// SPDX-License-Identifier: Apache-2.0
#include "tools/cli/interrupts.h"

#include <array>

namespace weightd::cli {
namespace {

constexpr std::array<int, 3> kSignals = {SIGINT, SIGTERM, SIGHUP};

}  // namespace

Interrupts::Interrupts() {
  sigemptyset(&signals_);
  for (const int signal : kSignals) sigaddset(&signals_, signal);
  pthread_sigmask(SIG_BLOCK, &signals_, &before_);
}

Interrupts::~Interrupts() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

bool Interrupts::pending() const {
  sigset_t waiting{};
  sigpending(&waiting);
  for (const int signal : kSignals) {
    if (sigismember(&waiting, signal) == 1) return true;
  }
  return false;
}

void ignore_write_signals() {
  std::signal(SIGXFSZ, SIG_IGN);
  std::signal(SIGPIPE, SIG_IGN);
}

}  // namespace weightd::cli
