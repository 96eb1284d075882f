// SPDX-License-Identifier: Apache-2.0
// Workers, loaders and daemons that die, memory that runs out, damaged bundles. Built for both backends.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <fstream>

#include "tests/e2e/system.h"

namespace weightd::e2e {
namespace {

/// What the layers of "m" give for one input, by a worker that ends.
std::string digest_by_new_worker(System& system) {
  WorkerProcess worker = system.worker();
  worker.must("acquire m 0");
  std::string digest = worker.must("compute 3 8").at("digest");
  EXPECT_EQ(worker.finish(), 0);
  return digest;
}

class GpuFailures : public ::testing::Test {
 protected:
  GpuFailures() {
    system_.make_small("m", 21);
    system_.must_load("m");
    digest_ = digest_by_new_worker(system_);
    system_.wait_for_leases(0);
    system_.wait_for_no_loader();
  }
  std::vector<WorkerProcess> computing_workers(int count) {
    std::vector<WorkerProcess> workers;
    for (int i = 0; i < count; ++i) workers.push_back(system_.worker());
    for (WorkerProcess& worker : workers) worker.must("acquire m 0");
    for (WorkerProcess& worker : workers) worker.must("background 3 8");
    return workers;
  }
  void expect_right(WorkerProcess& worker) {
    const Answer answer = worker.ask("join");
    ASSERT_TRUE(answer.ok) << answer.text;
    EXPECT_EQ(answer.at("digest"), digest_);
    EXPECT_GE(answer.number("rounds"), 1U);
    EXPECT_EQ(worker.must("compute 3 8").at("digest"), digest_);
  }

  System system_;
  std::string digest_;
};

TEST_F(GpuFailures, CO_069_AKilledWorkersLeaseEndsAndTheOthersComputeOn) {
  std::vector<WorkerProcess> workers = computing_workers(3);
  const uint64_t owned = system_.device().owned_bytes;
  for (int round = 0; round < (kGpu ? 5 : 3); ++round) {
    WorkerProcess victim = system_.worker();
    victim.must("acquire m 0");
    victim.must("background 4 8");
    EXPECT_EQ(system_.status().lease_count, 4U);
    victim.kill();
    system_.wait_for_leases(3);
    EXPECT_EQ(digest_by_new_worker(system_), digest_) << "a new worker attaches at once";
  }
  EXPECT_EQ(system_.device().owned_bytes, owned) << "the weights stay";
  for (WorkerProcess& worker : workers) expect_right(worker);
  EXPECT_EQ(system_.verify("m"), "");
}

TEST_F(GpuFailures, CO_071_AStoppedWorkerKeepsItsLease) {
  std::vector<WorkerProcess> workers = computing_workers(1);
  WorkerProcess& worker = workers.front();
  worker.signal(SIGSTOP);
  const auto unloaded = system_.unload("m", 500);
  ASSERT_TRUE(unloaded.ok()) << unloaded.status().to_string();
  EXPECT_FALSE(unloaded->freed);
  ASSERT_EQ(unloaded->holders.size(), 1U);
  EXPECT_EQ(unloaded->holders.front().pid, worker.pid());
  worker.signal(SIGCONT);
  expect_right(worker);
  EXPECT_EQ(worker.finish(), 0);
  wait_until("the drained model is freed", [&] { return system_.device().owned_bytes == 0; });
}

TEST_F(GpuFailures, CO_072_AZombieHoldsNothing) {
  WorkerProcess worker = system_.worker();
  worker.must("acquire m 0");
  worker.kill(false);
  system_.wait_for_leases(0);
  system_.must_unload("m");
}

TEST_F(GpuFailures, CO_091_ALoaderKilledAtAnyMomentLeavesNothing) {
  std::vector<WorkerProcess> workers = computing_workers(1);
  system_.make_big("big", kGpu ? 1500 : 128);
  const uint64_t owned = system_.device().owned_bytes, used = system_.used_bytes();
  const uint64_t open_files = system_.daemon.open_files();
  // At once, and when bytes have gone up.
  for (const uint64_t progress : {uint64_t{0}, uint64_t{1}}) {
    int killed = 0;
    for (int attempt = 0; attempt < 20 && killed == 0; ++attempt) {
      RunningLoad load(system_, "big", "big");
      // A child of the daemon may also be one that looks at the GPUs before the load is admitted.
      wait_until("a load under way", [&] {
        const auto model = system_.model("big");
        const bool loads =
            model && (model->state == ipc::GenerationState::kLoading || model->state == ipc::GenerationState::kVerifying);
        return load.done() || (loads && model->progress_bytes >= progress && !system_.daemon.children().empty());
      });
      for (const pid_t loader : system_.daemon.children()) ::kill(loader, SIGKILL);
      const Status status = load.wait();
      if (status.ok()) {  // it was quicker than the signal
        system_.must_unload("big");
        continue;
      }
      ++killed;
      EXPECT_NE(status.code(), StatusCode::kInternal) << status.to_string();
      EXPECT_NE(status.message().find("loader"), std::string::npos) << status.to_string();
    }
    EXPECT_EQ(killed, 1) << "no load could be interrupted";
    EXPECT_EQ(system_.device().owned_bytes, owned);
    EXPECT_EQ(system_.device().loading_bytes, 0U);
    system_.wait_for_used(used + 4 * kMiB, "the killed loader's memory comes back");
  }
  wait_until("the daemon's descriptors", [&] { return system_.daemon.open_files() <= open_files; });
  system_.must_load("big");
  EXPECT_EQ(system_.verify("big"), "");
  expect_right(workers.front());
}

TEST_F(GpuFailures, CO_074_WorkersComputeOnWithoutTheDaemonAndANewOneLoadsAgain) {
  std::vector<WorkerProcess> workers = computing_workers(2);
  system_.daemon.kill();
  for (WorkerProcess& worker : workers) expect_right(worker);
  system_.daemon.start();
  // The workers' memory is theirs; the new daemon knows nothing of it.
  EXPECT_FALSE(system_.model("m").has_value());
  system_.must_load("m");
  EXPECT_EQ(digest_by_new_worker(system_), digest_);
  for (WorkerProcess& worker : workers) EXPECT_EQ(worker.must("compute 3 8").at("digest"), digest_);
  for (WorkerProcess& worker : workers) EXPECT_EQ(worker.finish(), 0);
  system_.wait_for_leases(0);
  system_.must_unload("m");
}

TEST_F(GpuFailures, CO_090_ABudgetThatIsTooSmallIsARefusalWithTheArithmetic) {
  const uint64_t owned = system_.device().owned_bytes;
  System small("budget_bytes = \"24MiB\"");
  small.make_small("m", 21);
  small.make_big("big", 64);
  small.must_load("m");
  const uint64_t before = small.device().owned_bytes;
  const auto refused = small.load("big", "big");
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), StatusCode::kResourceExhausted) << refused.status().to_string();
  EXPECT_NE(refused.status().message().find("needs"), std::string::npos) << refused.status().to_string();
  EXPECT_NE(refused.status().message().find("MiB"), std::string::npos) << refused.status().to_string();
  EXPECT_EQ(small.device().owned_bytes, before);
  EXPECT_EQ(small.device().loading_bytes, 0U);
  EXPECT_EQ(digest_by_new_worker(small), digest_);
  EXPECT_EQ(system_.device().owned_bytes, owned) << "another daemon's memory";
}

TEST_F(GpuFailures, CO_085_ADamagedBundleIsRefusedAndNobodyIsHurt) {
  std::vector<WorkerProcess> workers = computing_workers(1);
  system_.make_small("bad", 22);
  system_.damage("bad");
  const uint64_t owned = system_.device().owned_bytes, used = system_.used_bytes();
  const auto refused = system_.load("bad", "bad");
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), StatusCode::kCorruption) << refused.status().to_string();
  EXPECT_NE(refused.status().message().find("bad.wpk"), std::string::npos) << refused.status().to_string();
  EXPECT_EQ(system_.device().owned_bytes, owned);
  system_.wait_for_used(used + 4 * kMiB, "the refused load's memory comes back");
  system_.damage("bad");  // the same bit: whole again
  system_.must_load("bad");
  expect_right(workers.front());
}

TEST_F(GpuFailures, CO_047_ManyDamagedBundlesInARow) {
  const pid_t daemon = system_.daemon.pid();
  system_.make_small("bad", 23);
  const std::string path = system_.daemon / "bad.wpk", whole = testing::read_file(path);
  const int rounds = kGpu ? 25 : 40;
  int refused = 0;
  for (int round = 0; round < rounds; ++round) {
    std::string bytes = whole;
    bytes[bytes.size() * static_cast<size_t>(round) / static_cast<size_t>(rounds)] ^= static_cast<char>(1 << round % 8);
    testing::write_file(path, bytes);
    const auto loaded = system_.load("bad", "bad");
    if (loaded.ok()) {  // the bit was in padding between sections
      system_.must_unload("bad");
      continue;
    }
    ++refused;
    const StatusCode code = loaded.status().code();
    EXPECT_TRUE(code == StatusCode::kCorruption || code == StatusCode::kUnsupported) << loaded.status().to_string();
  }
  EXPECT_GE(refused, rounds * 3 / 4);
  EXPECT_EQ(system_.daemon.pid(), daemon);
  EXPECT_EQ(digest_by_new_worker(system_), digest_);
  EXPECT_EQ(system_.verify("m"), "");
}

}  // namespace
}  // namespace weightd::e2e
