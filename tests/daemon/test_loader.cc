// SPDX-License-Identifier: Apache-2.0
// A weightd-loader for tests: the real jobs, with a behaviour that $WEIGHTD_TEST_LOADER names.
//   small-chunks   chunks of one page
//   slow           every step of a load takes 40 ms
//   dies           is killed when the daemon has all chunks, before they are verified
#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>

#include "daemon/loader/jobs.h"
#include "tests/daemon/faulty_backend.h"

int main() {
  const char* name = std::getenv("WEIGHTD_TEST_LOADER");
  const std::string behaviour = name == nullptr ? "" : name;
  weightd::ipc::ChannelOptions options;
  options.receive = {1U << 20, weightd::ipc::kMaxFdsPerFrame};
  weightd::ipc::Channel channel(weightd::UniqueFd(3), options);
  auto received = weightd::loader::receive_job(channel);
  if (!received.ok()) return 1;
  constexpr uint64_t kPageBytes = 4096;
  const bool small = behaviour == "small-chunks";
  weightd::testing::FaultyBackend backend(small ? kPageBytes : uint64_t{1} << 20);
  if (small) received->job.chunk_bytes = kPageBytes;
  if (behaviour == "slow") {
    backend.on_upload = [](uint64_t, std::span<std::byte>) {
      std::this_thread::sleep_for(std::chrono::milliseconds(40));
      return weightd::Status();
    };
    received->job.threads = 1;
  }
  if (behaviour == "dies") {
    backend.before_hash = [] {
      ::raise(SIGKILL);
      return weightd::Status();
    };
  }
  const weightd::Status status = weightd::loader::run_job(channel, *std::move(received), backend);
  return status.ok() ? 0 : 1;
}
