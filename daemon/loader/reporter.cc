// SPDX-License-Identifier: Apache-2.0
#include "daemon/loader/reporter.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

namespace weightd::loader {
namespace {

constexpr std::chrono::milliseconds kReportEvery{50};

/// What the worker tells the thread that owns the channel.
struct Shared {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t bytes = 0;
  bool done = false;
  Status result;
};

}  // namespace

Status send(ipc::Channel& channel, const ipc::LoaderMessage& message, std::vector<UniqueFd> fds) {
  WEIGHTD_RETURN_IF_ERROR(channel.send({ipc::encode(message), std::move(fds)}));
  return channel.flush(kNever);
}

Status run_with_progress(ipc::Channel& channel, const std::function<Status(const Advance&)>& work) {
  Shared shared;
  const std::jthread worker([&] {
    Status result = work([&](uint64_t bytes) {
      const std::lock_guard<std::mutex> lock(shared.mutex);
      shared.bytes += bytes;
    });
    const std::lock_guard<std::mutex> lock(shared.mutex);
    shared.result = std::move(result);
    shared.done = true;
    shared.changed.notify_one();
  });
  Status sent;
  uint64_t reported = 0;
  std::unique_lock<std::mutex> lock(shared.mutex);
  while (!shared.done) {
    // A report is due at intervals, not at every step: the wait is a rate limit.
    shared.changed.wait_for(lock, kReportEvery, [&] { return shared.done; });
    if (shared.bytes == reported || !sent.ok()) continue;
    reported = shared.bytes;
    lock.unlock();
    sent = send(channel, {ipc::LoadProgress{reported}});
    lock.lock();
  }
  return shared.result.ok() ? sent : shared.result;
}

}  // namespace weightd::loader
