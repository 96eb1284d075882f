// SPDX-License-Identifier: Apache-2.0
// load_soak CONTROL_SOCKET MODEL BUNDLE CYCLES
// Loads and unloads the bundle (an absolute path) CYCLES times. Afterwards the daemon's descriptors and sessions must be exactly,
// its resident memory and the memory in use on its device (NVML's word on a GPU) nearly, what they were after a few cycles. Exit
// status 1 names what is not.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>

#include "tests/e2e/nvml.h"
#include "weightd/control.h"

namespace weightd::e2e {
namespace {

constexpr uint64_t kRssSlackBytes = 4U << 20;     // allocator noise of the daemon
constexpr uint64_t kDeviceSlackBytes = 8U << 20;  // the driver's own, beside chunks
constexpr int kWarmUpCycles = 3;
constexpr auto kSettleLimit = std::chrono::seconds(60);
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kMemoryTells = false;  // the sanitizers keep freed memory back and shadow what is in use
#else
constexpr bool kMemoryTells = true;
#endif

template <typename T>
T require(Result<T> result) {
  if (!result.ok()) throw std::runtime_error(result.status().to_string());
  return *std::move(result);
}

struct Level {
  control::DaemonStatus daemon;
  uint64_t owned_bytes = 0, device_bytes = 0;
};

class Soak {
 public:
  Soak(const std::string& socket, std::string model, std::string bundle)
      : control_(require(control::Client::connect({socket, std::chrono::seconds(60)}))),
        model_(std::move(model)),
        bundle_(std::move(bundle)) {
    if (require(control_.version()).backend == "cuda") nvml_ = std::make_unique<Nvml>();
  }

  void cycle(int count) {
    for (int i = 0; i < count; ++i) {
      (void)require(control_.load(model_, bundle_, "", std::chrono::seconds(60)));
      if (!require(control_.unload(model_, "", std::chrono::seconds(60))).freed)
        throw std::runtime_error("the model was not freed");
    }
  }

  Level level() {
    Level now;
    now.daemon = require(control_.status());
    for (const control::Device& device : now.daemon.devices) {
      now.owned_bytes += device.owned_bytes + device.loading_bytes;
      now.device_bytes += nvml_ ? nvml_->used_bytes(device.uuid) : 0;
    }
    return now;
  }

  /// The level once it is no higher than `base`, or when time is up: loaders end, and a GPU's memory comes back, after the answer.
  Level settled(const Level& base) {
    const auto limit = std::chrono::steady_clock::now() + kSettleLimit;
    Level now = level();
    while (!good(base, now) && std::chrono::steady_clock::now() < limit) now = level();
    return now;
  }

  static bool good(const Level& base, const Level& now) {
    const control::DaemonStatus &was = base.daemon, &is = now.daemon;
    return is.version.pid == was.version.pid && is.session_count == was.session_count && is.lease_count == was.lease_count &&
           is.fd_count <= was.fd_count && is.models.size() == was.models.size() && now.owned_bytes == base.owned_bytes &&
           now.device_bytes <= base.device_bytes + kDeviceSlackBytes &&
           (!kMemoryTells || is.rss_bytes <= was.rss_bytes + kRssSlackBytes);
  }

 private:
  control::Client control_;
  std::string model_, bundle_;
  std::unique_ptr<Nvml> nvml_;
};

double mib(uint64_t bytes) { return static_cast<double>(bytes) / 1048576.0; }

int run(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: load_soak CONTROL_SOCKET MODEL BUNDLE CYCLES\n");
    return 2;
  }
  Soak soak(argv[1], argv[2], argv[3]);
  const Level before = soak.level();
  soak.cycle(kWarmUpCycles);  // what the daemon allocates once is not a leak
  // A GPU's memory must come back to what it was before the first load, the rest to what it is after the warm-up.
  Level base = soak.level();
  base.device_bytes = before.device_bytes;
  base.owned_bytes = before.owned_bytes;
  base.daemon.fd_count = std::min(base.daemon.fd_count, soak.settled(base).daemon.fd_count);
  const auto start = std::chrono::steady_clock::now();
  soak.cycle(std::atoi(argv[4]));
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  const Level now = soak.settled(base);
  std::printf(
      "%s load/unload cycles in %.1f s; sessions %u -> %u, descriptors %u -> %u, resident memory %.1f -> %.1f MiB, "
      "owned %.1f -> %.1f MiB, GPU %.1f -> %.1f MiB\n",
      argv[4], elapsed.count(), base.daemon.session_count, now.daemon.session_count, base.daemon.fd_count, now.daemon.fd_count,
      mib(base.daemon.rss_bytes), mib(now.daemon.rss_bytes), mib(base.owned_bytes), mib(now.owned_bytes), mib(base.device_bytes),
      mib(now.device_bytes));
  const bool good = Soak::good(base, now);
  std::printf(good ? "load_soak: back at the base line\n" : "load_soak: NOT back at the base line\n");
  return good ? 0 : 1;
}

}  // namespace
}  // namespace weightd::e2e

int main(int argc, char** argv) {
  try {
    return weightd::e2e::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "load_soak: %s\n", error.what());
    return 1;
  }
}
