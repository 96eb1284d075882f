// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>

/// What the library knows about fork(): objects belong to the process that made them, and a child must neither talk on its
/// parent's connections nor keep them open.
namespace weightd::detail {

/// The process that made it.
class HomeProcess {
 public:
  HomeProcess();
  /// Whether this is another process by now. One load; does not see a child made by a bare clone().
  [[nodiscard]] bool left() const { return forks_->load(std::memory_order_relaxed) != born_; }
  /// The same with a system call, which sees every child. For calls that would reach the daemon.
  [[nodiscard]] bool surely_left() const;

 private:
  const std::atomic<uint32_t>* forks_;
  uint32_t born_;
  pid_t pid_;
};

/// While it lives, a child made by fork() closes `fd` before fork() returns there.
class ClosedInChild {
 public:
  explicit ClosedInChild(int fd);
  ~ClosedInChild();
  ClosedInChild(const ClosedInChild&) = delete;
  ClosedInChild& operator=(const ClosedInChild&) = delete;

 private:
  friend struct ForkState;
  int fd_;
};

/// Keeps `object` alive for the rest of the process, because its destructor would do harm: in a forked child it would close
/// descriptor numbers that the child has closed already and that may be somebody else's by now, or call CUDA, which does not
/// survive a fork; at exit it would call a CUDA that has ended.
void abandon(std::shared_ptr<void> object);

}  // namespace weightd::detail
