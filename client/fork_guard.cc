// SPDX-License-Identifier: Apache-2.0
#include "client/fork_guard.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

namespace weightd::detail {

// One for the process: fork() is an event of the process, and its hooks take no argument. Never destroyed, since a child may be
// made during exit.
struct ForkState {
  std::mutex mutex;  // held across fork(), so that the child finds `open` whole
  std::vector<const ClosedInChild*> open;
  std::vector<std::shared_ptr<void>> abandoned;
  std::atomic<uint32_t> forks{0};

  static ForkState& get() {
    static ForkState* state = [] {
      auto* made = new ForkState;
      ::pthread_atfork([] { get().mutex.lock(); }, [] { get().mutex.unlock(); }, [] { get().in_child(); });
      return made;
    }();
    return *state;
  }

  // Between fork() and exec() of a threaded process only async-signal-safe calls are allowed: close() is one.
  void in_child() {
    for (const ClosedInChild* entry : open) ::close(entry->fd_);
    open.clear();
    forks.fetch_add(1, std::memory_order_relaxed);
    mutex.unlock();
  }
};

HomeProcess::HomeProcess() : forks_(&ForkState::get().forks), born_(forks_->load(std::memory_order_relaxed)), pid_(::getpid()) {}

bool HomeProcess::surely_left() const { return left() || ::getpid() != pid_; }

ClosedInChild::ClosedInChild(int fd) : fd_(fd) {
  ForkState& state = ForkState::get();
  const std::lock_guard lock(state.mutex);
  state.open.push_back(this);
}

ClosedInChild::~ClosedInChild() {
  ForkState& state = ForkState::get();
  const std::lock_guard lock(state.mutex);
  std::erase(state.open, this);
}

void abandon(std::shared_ptr<void> object) {
  ForkState& state = ForkState::get();
  const std::lock_guard lock(state.mutex);
  state.abandoned.push_back(std::move(object));
}

}  // namespace weightd::detail
