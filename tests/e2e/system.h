// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "ipc/messages.h"
#include "tests/e2e/nvml.h"
#include "tests/e2e/worker_process.h"
#include "tests/support/daemon_fixture.h"

namespace weightd::e2e {

/// The same tests are built for both backends: WEIGHTD_E2E_BACKEND is "cuda" or "host".
inline constexpr std::string_view kBackend = WEIGHTD_E2E_BACKEND;
inline constexpr bool kGpu = kBackend == "cuda";
inline constexpr uint64_t kMiB = uint64_t{1} << 20;

/// A daemon on the backend under test, its models, and what administrators see of it.
class System {
 public:
  explicit System(const std::string& config = "");

  /// Writes checkpoints and bundles into the daemon's folder. small: a few odd and merged matrices of random weights, checkpoint
  /// `name`, bundle `name`.wpk; `raw`: uncoded. pattern: one U8 tensor "bytes" of 64 KiB made of `word`. big: resident `mib` MiB.
  void make_small(const std::string& name, uint64_t seed, bool raw = false);
  void make_pattern(const std::string& name, const std::string& word);
  void make_big(const std::string& name, uint64_t mib);
  /// Turns one bit of the bundle, in the middle of its largest part.
  void damage(const std::string& name);

  Result<ipc::ModelSummary> load(const std::string& model, const std::string& bundle, const std::string& transport = "fd");
  void must_load(const std::string& model, const std::string& transport = "fd");  // the bundle of that name
  Result<ipc::UnloadedReply> unload(const std::string& model, uint32_t timeout_ms = 20'000);
  void must_unload(const std::string& model);
  [[nodiscard]] ipc::StatusReply status();
  [[nodiscard]] ipc::DeviceSummary device();  // the first: the only one that the tests use
  [[nodiscard]] std::optional<ipc::ModelSummary> model(const std::string& name);
  [[nodiscard]] std::vector<ipc::LeaseSummary> leases();
  /// The daemon's check of resident bytes against the bundle's hashes: "" if good.
  [[nodiscard]] std::string verify(const std::string& model);
  void wait_for_leases(size_t count);
  void wait_for_no_loader();

  /// Memory that is in use on the device: NVML's word on a GPU, the daemon's on the host.
  [[nodiscard]] uint64_t used_bytes();
  /// Waits until it is at most `bytes` (a GPU's memory comes back a while after its process).
  void wait_for_used(uint64_t bytes, const std::string& what);

  /// Where workers of any user may write.
  [[nodiscard]] std::string scratch(const std::string& name) { return daemon / "scratch/" + name; }
  [[nodiscard]] WorkerProcess worker(const WorkerOptions& options = {}) { return WorkerProcess(daemon.data_socket(), options); }
  /// Compares traces, named as for scratch(), with the checkpoint they were made from; the checker's words if it is not satisfied.
  [[nodiscard]] std::string check_traces(const std::string& checkpoint, const std::vector<std::string>& traces);

  testing::DaemonFixture daemon;

 private:
  std::unique_ptr<Nvml> nvml_;
};

/// A load in a thread of its own.
class RunningLoad {
 public:
  RunningLoad(System& system, const std::string& model, const std::string& bundle);
  ~RunningLoad();
  [[nodiscard]] bool done() const { return done_; }
  [[nodiscard]] Status wait();

 private:
  std::atomic<bool> done_{false};
  Status status_;
  std::thread thread_;
};

}  // namespace weightd::e2e
