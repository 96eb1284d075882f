// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "weightd/status.h"

namespace weightd::store {

/// One thread that does one task at a time beside its owner: reading ahead, writing behind, hashing. What a task uses must outlive
/// it: declare the Worker after it. The destructor waits for the task.
class Worker {
 public:
  Worker() : thread_([this] { loop(); }) {}
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  ~Worker() {
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  /// Begins `task`; the one before must have been waited for.
  void start(std::function<Status()> task) {
    {
      const std::lock_guard lock(mutex_);
      WEIGHTD_CHECK(!task_);
      task_ = std::move(task);
    }
    changed_.notify_all();
  }

  /// Waits for the task and gives its result, once; success when there is none.
  Status wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !task_; });
    return std::exchange(result_, {});
  }

 private:
  void loop() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return ending_ || task_; });
      if (!task_) return;
      lock.unlock();
      Status result = task_();
      lock.lock();
      if (result_.ok()) result_ = std::move(result);
      task_ = nullptr;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<Status()> task_;
  Status result_;
  bool ending_ = false;
  std::thread thread_;  // last: it uses the rest
};

}  // namespace weightd::store
