// SPDX-License-Identifier: Apache-2.0
// The real daemon on GPUs that a scripted loader makes up (test_loader.cc): which it serves, what it admits, what it says of them,
// and the legacy transport, whose memory a loader process owns.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <fstream>

#include "tests/support/daemon_fixture.h"
#include "tests/support/raw_peer.h"
#include "tests/support/test_bundle.h"

namespace weightd::daemon {
namespace {

using ::weightd::testing::DaemonFixture;
using ::weightd::testing::DaemonOptions;
using ::weightd::testing::eventually;
using ::weightd::testing::make_bundle;
using ::weightd::testing::RawPeer;
using ::weightd::testing::require;
using ::weightd::testing::TempDir;
using ::weightd::testing::write_file;

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr int kExitNoGpu = 69;

const std::string kOneGpu = "driver 580.1\ncuda 13000\ngpu GPU-a\ntotal 8192\nused 600\nfree 7592\npersistence 1\n";
const std::string kTwoGpus = kOneGpu + "gpu GPU-b\ntotal 4096\nused 100\nfree 3996\n";

/// A daemon whose loaders see the GPUs of a script.
class Scripted {
 public:
  explicit Scripted(const std::string& gpus, const std::string& config = "", const std::string& behaviour = "",
                    const std::string& backend = "auto", bool start = true)
      : daemon_(options(gpus, config, behaviour, backend)) {
    if (start) daemon_.start();
    if (start) make_bundle(daemon_ / "m.wpk");
  }
  DaemonFixture& operator*() { return daemon_; }
  DaemonFixture* operator->() { return &daemon_; }
  void script(const std::string& gpus) const { write_file(folder_ / "gpus", gpus); }

  Result<ipc::ModelSummary> load(const std::string& model, const std::string& device = "", const std::string& transport = "",
                                 const std::string& file = "m.wpk") {
    RawPeer admin(daemon_.control_socket());
    auto reply = admin.get<ipc::LoadedReply>(ipc::LoadRequest{model, daemon_ / file, device, 0, transport});
    if (!reply.ok()) return reply.status();
    return reply->model;
  }
  Result<ipc::UnloadedReply> unload(const std::string& model, uint32_t timeout_ms = 0, const std::string& device = "") {
    return RawPeer(daemon_.control_socket()).get<ipc::UnloadedReply>(ipc::UnloadRequest{model, device, timeout_ms});
  }
  template <typename Reply, typename Request>
  Reply ask() {
    RawPeer admin(daemon_.control_socket());
    auto reply = admin.get<Reply>(Request{});
    require(reply.ok(), "an answer: " + reply.status().to_string());
    return *std::move(reply);
  }
  ipc::StatusReply status() { return ask<ipc::StatusReply, ipc::StatusRequest>(); }
  ipc::MemoryReply memory() { return ask<ipc::MemoryReply, ipc::MemoryRequest>(); }
  ipc::DeviceSummary device(const std::string& uuid = "GPU-a") {
    for (const auto& each : status().devices) {
      if (each.uuid == uuid) return each;
    }
    require(false, "no device " + uuid);
    return {};
  }
  ipc::ModelSummary model(const std::string& name) {
    for (const auto& each : status().models) {
      if (each.name == name) return each;
    }
    require(false, "no model " + name);
    return {};
  }
  std::vector<ipc::CheckSummary> checks(const std::string& name) {
    std::vector<ipc::CheckSummary> found;
    for (auto& check : ask<ipc::DoctorReply, ipc::DoctorRequest>().checks) {
      if (check.name == name) found.push_back(std::move(check));
    }
    return found;
  }
  void no_children() {
    eventually("all loaders are gone", [&] { return daemon_.children().empty(); });
  }

 private:
  DaemonOptions options(const std::string& gpus, const std::string& config, const std::string& behaviour,
                        const std::string& backend) {
    script(gpus);
    DaemonOptions options;
    options.backend = backend;
    options.config = "loader_path = \"" WEIGHTD_TEST_LOADER_PROGRAM "\"\n" + config;
    options.environment["WEIGHTD_TEST_GPUS"] = folder_ / "gpus";
    options.environment["WEIGHTD_TEST_LOADER"] = behaviour;
    options.start = false;
    return options;
  }

  TempDir folder_;
  DaemonFixture daemon_;
};

Result<ipc::AcquiredReply> acquire(RawPeer& worker, const std::string& model, uint32_t wait_ms = 0,
                                   const std::string& device = "") {
  return worker.get<ipc::AcquiredReply>(ipc::AcquireRequest{model, device, wait_ms, ""});
}
bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }
bool exists(const std::string& path) {
  struct stat info {};
  return ::stat(path.c_str(), &info) == 0;
}

// --- which devices -------------------------------------------------------------------------------------------------------

TEST(ScriptedGpus, AutoServesEveryUsableGpuAndSaysSo) {
  Scripted daemon(kTwoGpus + "gpu GPU-c\ntotal 4096\nproblem no virtual memory management\n");
  const ipc::StatusReply status = daemon.status();
  EXPECT_EQ(status.version.backend, "cuda");
  EXPECT_EQ(status.version.backend_reason, "auto: 2 usable GPUs");
  ASSERT_EQ(status.devices.size(), 2U);
  EXPECT_EQ(status.devices[0].uuid, "GPU-a");
  EXPECT_EQ(status.devices[0].name, "Scripted GPU");
  EXPECT_EQ(status.devices[0].total_bytes, 8192 * kMiB);
  EXPECT_EQ(status.devices[0].budget_bytes, (8192 - 1024) * kMiB) << "all of it but the headroom";
  EXPECT_EQ(status.devices[1].uuid, "GPU-b");
  EXPECT_EQ(status.devices[1].budget_bytes, (4096 - 1024) * kMiB);
  EXPECT_TRUE(contains(daemon->log(), "started: backend cuda (auto: 2 usable GPUs), budget 7.0 GiB on GPU-a, 3.0 GiB on GPU-b"))
      << daemon->log();
  RawPeer worker(daemon->data_socket());
  const auto hello = worker.get<ipc::HelloReply>(ipc::HelloRequest{"1", "w"});
  ASSERT_TRUE(hello.ok());
  EXPECT_EQ(hello->backend, "cuda");
  EXPECT_EQ(hello->backend_reason, "") << "for administrators";
}

TEST(ScriptedGpus, TheBudgetIsPerDeviceAndNeverMoreThanItHas) {
  Scripted daemon(kTwoGpus, "budget_bytes = \"6GiB\"\n");
  EXPECT_EQ(daemon.device("GPU-a").budget_bytes, 6 * 1024 * kMiB);
  EXPECT_EQ(daemon.device("GPU-b").budget_bytes, 4096 * kMiB);
}

TEST(ScriptedGpus, AutoWithoutAUsableGpuServesTheHostAndSaysWhy) {
  Scripted daemon("problem no CUDA driver: libcuda.so.1 is missing\n");
  EXPECT_EQ(daemon.status().version.backend, "host");
  EXPECT_TRUE(contains(daemon->log(), "backend host (auto: no usable GPU: no CUDA driver: libcuda.so.1 is missing)"))
      << daemon->log();
  const auto backend = daemon.checks("backend");
  ASSERT_EQ(backend.size(), 1U);
  EXPECT_EQ(backend[0].level, ipc::CheckSummary::Level::kWarning);
  EXPECT_TRUE(contains(backend[0].detail, "libcuda.so.1 is missing"));
}

TEST(ScriptedGpus, CO_068_CO_147_CudaWithoutAUsableGpuRefusesToStart) {
  Scripted daemon(
      "driver 580.1\ncuda 13000\ngpu GPU-c\nproblem memory cannot be exported\ngpu GPU-d\nproblem it fell off the bus\n", "", "",
      "cuda", false);
  daemon->spawn();
  EXPECT_EQ(daemon->wait(), kExitNoGpu);
  EXPECT_TRUE(contains(daemon->log(),
                       "backend 'cuda': no usable GPU: Scripted GPU (GPU-c): memory cannot be exported; Scripted GPU "
                       "(GPU-d): it fell off the bus"))
      << daemon->log();
  EXPECT_FALSE(exists(daemon->data_socket()));
  EXPECT_FALSE(exists(daemon->control_socket()));
}

TEST(ScriptedGpus, AProbeThatHangsIsGivenUpInTime) {
  for (const std::string backend : {"auto", "cuda"}) {
    Scripted daemon("hang\n", "probe_timeout_ms = 200\n", "", backend, false);
    daemon->spawn();
    if (backend == "cuda") {
      EXPECT_EQ(daemon->wait(), kExitNoGpu);
    } else {
      ASSERT_TRUE(daemon->wait_ready());
      EXPECT_EQ(daemon.status().version.backend, "host");
      daemon.no_children();
    }
    EXPECT_TRUE(contains(daemon->log(), "no answer from the GPU driver within 200 ms")) << daemon->log();
  }
}

TEST(ScriptedGpus, ALoaderThatDiesInTheProbeIsSaid) {
  Scripted daemon("die\n", "", "", "cuda", false);
  daemon->spawn();
  EXPECT_EQ(daemon->wait(), kExitNoGpu);
  EXPECT_TRUE(contains(daemon->log(), "the loader was killed (signal 9)")) << daemon->log();
}

TEST(ScriptedGpus, TheHostBackendAsksNobody) {
  Scripted daemon("hang\n", "", "", "host");
  EXPECT_EQ(daemon.status().version.backend, "host");
  EXPECT_TRUE(daemon.load("m").ok());
  const ipc::MemoryReply memory = daemon.memory();
  EXPECT_TRUE(memory.gpus.empty());
  EXPECT_EQ(memory.problem, "");
}

TEST(ScriptedGpus, ADeviceFileThatCannotBeHeldIsAWarning) {
  Scripted daemon(kOneGpu + "minor 4711\npersistence 0\n");
  EXPECT_TRUE(contains(daemon->log(), "GPU-a: its device file is not held open")) << daemon->log();
  const auto persistence = daemon.checks("persistence");
  ASSERT_EQ(persistence.size(), 1U);
  EXPECT_EQ(persistence[0].level, ipc::CheckSummary::Level::kWarning) << persistence[0].detail;
  EXPECT_TRUE(contains(persistence[0].detail, "/dev/nvidia4711")) << persistence[0].detail;
}

// --- loads ---------------------------------------------------------------------------------------------------------------

TEST(ScriptedGpus, CO_144_ModelsAreLoadedAndLeasedByTheUuidOfTheGpu) {
  Scripted daemon(kTwoGpus);
  EXPECT_EQ(daemon.load("m").status().code(), StatusCode::kInvalidArgument) << "two GPUs, none named";
  const auto unknown = daemon.load("m", "GPU-z").status();
  EXPECT_EQ(unknown.code(), StatusCode::kNotFound);
  EXPECT_TRUE(contains(unknown.message(), "GPU-a, GPU-b")) << unknown.message();
  const auto on_b = daemon.load("m", "GPU-b");
  ASSERT_TRUE(on_b.ok()) << on_b.status().message();
  EXPECT_EQ(on_b->device, "GPU-b");
  EXPECT_EQ(on_b->transport, "fd");
  ASSERT_FALSE(on_b->encodings.empty());
  uint64_t tensors = 0;
  for (const auto& sum : on_b->encodings) tensors += sum.tensors;
  EXPECT_GT(tensors, 0U);
  EXPECT_EQ(daemon.device("GPU-a").owned_bytes, 0U);
  const ipc::DeviceSummary b = daemon.device("GPU-b");
  EXPECT_EQ(b.owned_bytes, on_b->resident_bytes);
  EXPECT_EQ(b.fd_only_bytes, on_b->resident_bytes);
  RawPeer worker(daemon->data_socket());
  const auto lease = acquire(worker, "m");
  ASSERT_TRUE(lease.ok()) << lease.status().message();
  EXPECT_EQ(lease->model.device, "GPU-b");
  EXPECT_EQ(lease->fd_count, 1 + lease->chunk_bytes.size());
  EXPECT_TRUE(lease->ipc_handle.empty());
  EXPECT_EQ(daemon.device("GPU-b").leased_bytes, on_b->resident_bytes);
  EXPECT_EQ(daemon.device("GPU-b").fd_only_bytes, 0U);
  ASSERT_TRUE(daemon.load("m", "GPU-a").ok()) << "the same name on another GPU";
  EXPECT_EQ(acquire(worker, "m").status().code(), StatusCode::kInvalidArgument) << "now it must be said which";
  EXPECT_TRUE(acquire(worker, "m", 0, "GPU-a").ok());
}

TEST(ScriptedGpus, CO_090_CO_092_ALoadThatDoesNotFitIsRefusedWithTheArithmetic) {
  Scripted daemon("gpu GPU-a\ntotal 8192\nused 8192\nfree 0\n");
  const auto refused = daemon.load("m");
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), StatusCode::kResourceExhausted);
  EXPECT_TRUE(contains(refused.status().message(), "7.0 GiB free of 7.0 GiB on GPU-a; but only 0 B of it is available there"))
      << refused.status().message();
  EXPECT_EQ(daemon.device().owned_bytes + daemon.device().loading_bytes, 0U);
  daemon.no_children();
  daemon.script(kOneGpu);
  EXPECT_TRUE(daemon.load("m").ok()) << "the others have let go of it";
}

TEST(ScriptedGpus, WhatTheDriverDoesNotTellLimitsNothing) {
  Scripted daemon(kOneGpu + "hang-shallow\n", "nvml_timeout_ms = 50\n");
  const auto loaded = daemon.load("m");
  ASSERT_TRUE(loaded.ok()) << loaded.status().message();
  EXPECT_TRUE(contains(daemon->log(), "free memory of the GPUs is unknown: no answer from the GPU driver within 50 ms"))
      << daemon->log();
  daemon.no_children();
}

TEST(ScriptedGpus, CO_091_AnAllocationThatFailsLeavesEverythingAsItWas) {
  Scripted daemon(kOneGpu, "", "out-of-memory");
  uint64_t files = 0;
  for (int round = 0; round < 20; ++round) {
    const auto refused = daemon.load("m");
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.status().code(), StatusCode::kResourceExhausted);
    EXPECT_TRUE(contains(refused.status().message(), "the scripted GPU has no memory left")) << refused.status().message();
    daemon.no_children();
    const ipc::DeviceSummary device = daemon.device();
    EXPECT_EQ(device.owned_bytes + device.loading_bytes, 0U);
    EXPECT_EQ(device.free_bytes, device.budget_bytes);
    if (round == 0) files = daemon->open_files();
  }
  eventually("no descriptor is left over", [&] { return daemon->open_files() <= files; });
}

TEST(ScriptedGpus, CO_073_ABrokenContextInALoaderFailsItsLoadAlone) {
  Scripted daemon(kOneGpu, "", "sticky");
  const pid_t pid = daemon->pid();
  for (int round = 0; round < 3; ++round) {
    const auto failed = daemon.load("m");
    ASSERT_FALSE(failed.ok());
    EXPECT_EQ(failed.status().code(), StatusCode::kCuda);
    EXPECT_TRUE(contains(failed.status().message(), "illegal memory access")) << failed.status().message();
  }
  daemon.no_children();
  EXPECT_EQ(daemon.model("m").state, ipc::GenerationState::kFailed);
  EXPECT_EQ(daemon.device().free_bytes, daemon.device().budget_bytes);
  EXPECT_EQ(daemon->pid(), pid);
  const auto models = daemon.checks("models");
  ASSERT_EQ(models.size(), 1U);
  EXPECT_EQ(models[0].level, ipc::CheckSummary::Level::kWarning);
}

TEST(ScriptedGpus, ALoaderThatDiesInTheMiddleOfALoadLeavesNothing) {
  Scripted daemon(kOneGpu, "", "dies");
  const auto failed = daemon.load("m");
  ASSERT_FALSE(failed.ok());
  EXPECT_TRUE(contains(failed.status().message(), "signal 9")) << failed.status().message();
  EXPECT_EQ(daemon.device().free_bytes, daemon.device().budget_bytes);
}

TEST(ScriptedGpus, AGpuThatCannotExportDescriptorsServesTheLegacyTransportOnly) {
  Scripted daemon(kOneGpu + "fd-handles 0\n");
  const auto refused = daemon.load("m");
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), StatusCode::kUnsupported);
  EXPECT_TRUE(contains(refused.status().message(), "use transport 'legacy'")) << refused.status().message();
  const auto transport = daemon.checks("transport");
  ASSERT_EQ(transport.size(), 1U);
  EXPECT_EQ(transport[0].level, ipc::CheckSummary::Level::kWarning);
  EXPECT_TRUE(daemon.load("m", "", "legacy").ok());
}

// --- what the driver says ------------------------------------------------------------------------------------------------

TEST(ScriptedGpus, CO_094_MemoryShowsTheLedgerAndTheDriverSideBySide) {
  Scripted daemon(kOneGpu + "gpu GPU-c\ntotal 4096\nproblem broken\n");
  ASSERT_TRUE(daemon.load("m").ok());
  RawPeer first(daemon->data_socket()), second(daemon->data_socket());
  ASSERT_TRUE(acquire(first, "m").ok());
  ASSERT_TRUE(acquire(second, "m").ok());
  const ipc::MemoryReply memory = daemon.memory();
  EXPECT_EQ(memory.problem, "");
  ASSERT_EQ(memory.gpus.size(), 1U) << "those that are served";
  EXPECT_EQ(memory.gpus[0].uuid, "GPU-a");
  EXPECT_EQ(memory.gpus[0].used_bytes, 600 * kMiB);
  ASSERT_EQ(memory.status.devices.size(), 1U);
  EXPECT_EQ(memory.status.devices[0].owned_bytes, memory.status.models[0].resident_bytes) << "two leases, one copy";
  EXPECT_EQ(memory.status.devices[0].leased_bytes, memory.status.models[0].resident_bytes);
  ASSERT_EQ(memory.leases.size(), 2U);
  EXPECT_EQ(memory.leases[0].bytes, memory.status.models[0].resident_bytes);
}

TEST(ScriptedGpus, MemoryAnswersInTimeWhenTheDriverHangsAndHoldsUpNobody) {
  Scripted daemon(kOneGpu + "hang-shallow\n", "nvml_timeout_ms = 400\n");
  RawPeer admin(daemon->control_socket());
  const uint64_t slow = admin.next_id(), slow_too = admin.next_id(), quick = admin.next_id();
  admin.send({slow, ipc::MemoryRequest{}});
  admin.send({slow_too, ipc::MemoryRequest{}});
  admin.send({quick, ipc::StatusRequest{}});
  auto first = admin.receive();
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(first->id, quick) << "status does not wait for the driver";
  EXPECT_LE(daemon->children().size(), 1U) << "both questions share one child";
  for (int i = 0; i < 2; ++i) {
    const auto memory = RawPeer::as<ipc::MemoryReply>(admin.receive());
    ASSERT_TRUE(memory.ok()) << memory.status().message();
    EXPECT_TRUE(memory->gpus.empty());
    EXPECT_TRUE(contains(memory->problem, "no answer from the GPU driver within 400 ms")) << memory->problem;
    EXPECT_EQ(memory->status.devices.size(), 1U) << "the ledger is there all the same";
  }
  daemon.no_children();
}

TEST(ScriptedGpus, AHangIsForgottenOnceTheDriverAnswersAgain) {
  Scripted daemon(kOneGpu + "hang-shallow\n", "nvml_timeout_ms = 100\n");
  EXPECT_NE(daemon.memory().problem, "");
  daemon.script(kOneGpu);
  EXPECT_EQ(daemon.memory().problem, "") << "also right behind the one that was killed";
}

TEST(ScriptedGpus, AStopDoesNotWaitForTheDriver) {
  Scripted daemon(kOneGpu + "hang-shallow\n", "nvml_timeout_ms = 600000\n");
  RawPeer admin(daemon->control_socket());
  admin.send({admin.next_id(), ipc::MemoryRequest{}});
  admin.send({admin.next_id(), ipc::DoctorRequest{}});
  ASSERT_TRUE(RawPeer::as<ipc::StatusReply>(admin.ask(ipc::StatusRequest{})).ok());  // the others have been taken up
  EXPECT_EQ(daemon->stop(), 0);
}

TEST(ScriptedGpus, ALoadThatIsTakenBackWhileTheDriverIsAsked) {
  Scripted daemon(kOneGpu + "hang-shallow\n", "nvml_timeout_ms = 600000\n");
  RawPeer admin(daemon->control_socket());
  const uint64_t load = admin.next_id();
  admin.send({load, ipc::LoadRequest{"m", *daemon / "m.wpk", "", 0}});
  eventually("the driver is asked", [&] { return daemon->children().size() == 2; });
  const auto unloaded = daemon.unload("m", 20'000);
  ASSERT_TRUE(unloaded.ok()) << unloaded.status().message();
  EXPECT_TRUE(unloaded->freed);
  EXPECT_EQ(RawPeer::as<ipc::LoadedReply>(admin.answer_to(load)).status().code(), StatusCode::kCancelled);
  for (const pid_t child : daemon->children()) ::kill(child, SIGKILL);  // the driver's answer, at last: none
  daemon.no_children();
  daemon.script(kOneGpu);
  EXPECT_TRUE(daemon.load("m").ok());
}

TEST(ScriptedGpus, MemorySaysWhenNvmlIsMissing) {
  Scripted daemon(kOneGpu + "nvml 0\n");
  daemon.script("nvml-problem libnvidia-ml.so.1 is missing\n" + kOneGpu + "nvml 0\n");
  EXPECT_EQ(daemon.memory().problem, "libnvidia-ml.so.1 is missing");
  daemon.script("problem the driver was unloaded\n");
  EXPECT_EQ(daemon.memory().problem, "the driver was unloaded");
}

TEST(ScriptedGpus, DoctorFindsNothingOnAHealthyMachine) {
  Scripted daemon(kOneGpu);
  const auto reply = daemon.ask<ipc::DoctorReply, ipc::DoctorRequest>();
  std::vector<std::string> names;
  for (const auto& check : reply.checks) {
    names.push_back(check.name);
    EXPECT_NE(check.level, ipc::CheckSummary::Level::kFailure) << check.name << ": " << check.detail;
    EXPECT_EQ(check.level == ipc::CheckSummary::Level::kGood, check.advice.empty()) << check.name;
  }
  EXPECT_EQ(names, (std::vector<std::string>{"backend", "loader", "driver", "nvml", "gpu", "transport", "persistence", "memory",
                                             "descriptors", "data socket", "control socket", "model folders"}));
}

TEST(ScriptedGpus, DoctorAnswersWhenTheDriverHangs) {
  Scripted daemon(kOneGpu + "hang-shallow\n", "nvml_timeout_ms = 100\n");
  const auto loader = daemon.checks("loader");
  ASSERT_EQ(loader.size(), 1U);
  EXPECT_EQ(loader[0].level, ipc::CheckSummary::Level::kFailure);
  EXPECT_TRUE(contains(loader[0].detail, "within 100 ms")) << loader[0].detail;
  EXPECT_EQ(daemon.checks("model folders").size(), 1U);
}

TEST(ScriptedGpus, WorkersMayNotAskForTheLedger) {
  Scripted daemon(kOneGpu);
  RawPeer worker(daemon->data_socket());
  EXPECT_EQ(worker.get<ipc::MemoryReply>(ipc::MemoryRequest{}).status().code(), StatusCode::kPermissionDenied);
  EXPECT_EQ(worker.get<ipc::DoctorReply>(ipc::DoctorRequest{}).status().code(), StatusCode::kPermissionDenied);
}

// --- the legacy transport ------------------------------------------------------------------------------------------------

/// A model on the legacy transport, and the process that owns its memory.
class Legacy : public ::testing::Test {
 protected:
  explicit Legacy(const std::string& behaviour = "") : daemon(kOneGpu, "", behaviour) {}
  void publish() {
    const auto loaded = daemon.load("m", "", "legacy");
    require(loaded.ok(), "load: " + loaded.status().message());
    // The child that was asked for free memory ends; the owner stays.
    eventually("the owner is the only child", [&] { return daemon->children().size() == 1; });
    owner = daemon->children().front();
    bytes = loaded->resident_bytes;
  }
  void wait_until_lost() {
    eventually("the generation is lost", [&] { return daemon.model("m").state == ipc::GenerationState::kLost; });
  }

  Scripted daemon;
  pid_t owner = 0;
  uint64_t bytes = 0;
};

TEST_F(Legacy, TheLeaseCarriesTheHandleAndTheTableOnly) {
  publish();
  EXPECT_EQ(daemon.model("m").transport, "legacy");
  RawPeer worker(daemon->data_socket());
  const auto lease = acquire(worker, "m");
  ASSERT_TRUE(lease.ok()) << lease.status().message();
  EXPECT_EQ(lease->ipc_handle, std::vector<std::byte>(ipc::kIpcHandleBytes, std::byte{0x5A}));
  EXPECT_EQ(lease->fd_count, 1U);
  EXPECT_EQ(worker.fds().size(), 1U);
  EXPECT_EQ(lease->model.transport, "legacy");
  EXPECT_EQ(daemon.device().owned_bytes, bytes);
}

TEST_F(Legacy, AnUnloadLetsTheOwnerGoBeforeTheMemoryCountsAsFree) {
  publish();
  const auto unloaded = daemon.unload("m");
  ASSERT_TRUE(unloaded.ok()) << unloaded.status().message();
  EXPECT_TRUE(unloaded->freed);
  EXPECT_EQ(unloaded->bytes, bytes);
  EXPECT_NE(::kill(owner, 0), 0) << "freed is said when the process is gone";
  EXPECT_EQ(daemon.device().free_bytes, daemon.device().budget_bytes);
  EXPECT_FALSE(contains(daemon->log(), "lost"));
}

TEST_F(Legacy, TheDeathOfTheOwnerIsToldAndNothingIsServedSilently) {
  publish();
  RawPeer worker(daemon->data_socket());
  const auto lease = acquire(worker, "m");
  ASSERT_TRUE(lease.ok());
  ASSERT_EQ(::kill(owner, SIGKILL), 0);
  const auto event = RawPeer::as<ipc::EventReply>(worker.receive());
  ASSERT_TRUE(event.ok()) << event.status().message();
  ASSERT_TRUE(std::holds_alternative<ipc::LostEvent>(event->event));
  EXPECT_EQ(std::get<ipc::LostEvent>(event->event).model.generation, lease->model.generation);
  EXPECT_EQ(std::get<ipc::LostEvent>(event->event).model.failure, "the process that owned its memory ended");

  const ipc::ModelSummary model = daemon.model("m");
  EXPECT_EQ(model.state, ipc::GenerationState::kLost);
  EXPECT_EQ(model.lease_count, 1U) << "leases stand until they are released";
  EXPECT_TRUE(contains(model.failure, "killed (signal 9)")) << model.failure;
  EXPECT_EQ(daemon.device().owned_bytes, 0U) << "the memory is gone";
  RawPeer other(daemon->data_socket());
  const auto refused = acquire(other, "m", 20'000).status();
  EXPECT_EQ(refused.code(), StatusCode::kLost) << "at once: nobody brings it back";
  EXPECT_TRUE(contains(refused.message(), "unload the model and load it again")) << refused.message();
  const auto models = daemon.checks("models");
  ASSERT_EQ(models.size(), 1U);
  EXPECT_EQ(models[0].level, ipc::CheckSummary::Level::kFailure);

  const auto held = daemon.unload("m", 1);
  ASSERT_TRUE(held.ok()) << held.status().message();
  EXPECT_FALSE(held->freed);
  ASSERT_EQ(held->holders.size(), 1U);
  ASSERT_TRUE(worker.get<ipc::ReleasedReply>(ipc::ReleaseRequest{lease->lease}).ok());
  EXPECT_TRUE(daemon.status().models.empty()) << "forgotten with its last lease";
  publish();
  EXPECT_TRUE(acquire(other, "m").ok());
}

TEST_F(Legacy, ANewLoadTakesThePlaceOfWhatWasLost) {
  publish();
  ASSERT_EQ(::kill(owner, SIGKILL), 0);
  wait_until_lost();
  EXPECT_TRUE(daemon.load("m").ok()) << "for the other transport, too";
  const auto models = daemon.status().models;
  ASSERT_EQ(models.size(), 1U);
  EXPECT_EQ(models[0].state, ipc::GenerationState::kPublished);
  EXPECT_EQ(models[0].transport, "fd");
}

TEST_F(Legacy, AModelHasOneTransportAtATime) {
  publish();
  const auto other = daemon.load("m", "", "fd").status();
  EXPECT_EQ(other.code(), StatusCode::kAlreadyExists);
  EXPECT_TRUE(contains(other.message(), "published for the transport legacy")) << other.message();
  EXPECT_TRUE(daemon.load("m", "", "legacy").ok()) << "the same again is success";
}

TEST_F(Legacy, ItCannotBeVerifiedByAnotherProcess) {
  publish();
  RawPeer admin(daemon->control_socket());
  const auto verified = admin.get<ipc::VerifiedReply>(ipc::VerifyRequest{"m"}).status();
  EXPECT_EQ(verified.code(), StatusCode::kUnsupported);
}

TEST_F(Legacy, OwnersTakeNoPlaceOfAJob) {
  for (const char* name : {"a", "b", "c"}) ASSERT_TRUE(daemon.load(name, "", "legacy").ok());
  eventually("three owners, more than max_jobs", [&] { return daemon->children().size() == 3; });
}

TEST_F(Legacy, AStopEndsTheOwnersAndTellsTheHolders) {
  publish();
  RawPeer worker(daemon->data_socket());
  ASSERT_TRUE(acquire(worker, "m").ok());
  EXPECT_EQ(daemon->stop(), 0);
  EXPECT_NE(::kill(owner, 0), 0);
  std::vector<size_t> kinds;
  for (;;) {
    auto event = RawPeer::as<ipc::EventReply>(worker.receive());
    if (!event.ok()) break;
    kinds.push_back(event->event.index());
  }
  const size_t shutting_down = ipc::EventReply{ipc::ShuttingDownEvent{}}.event.index(),
               lost = ipc::EventReply{ipc::LostEvent{}}.event.index();
  EXPECT_EQ(kinds, (std::vector<size_t>{shutting_down, lost}));
}

TEST_F(Legacy, TheOwnerEndsWithADaemonThatIsKilled) {
  publish();
  daemon->kill();
  eventually("the owner is gone", [&] {
    std::ifstream in("/proc/" + std::to_string(owner) + "/stat");
    std::string pid, name, state;
    return !(in >> pid >> name >> state) || state == "Z";
  });
}

class LegacyFault : public Legacy {
 protected:
  LegacyFault() : Legacy("owner-fails") {}
};

TEST_F(LegacyFault, CO_073_ACudaErrorInTheOwnerLosesTheGenerationNotTheDaemon) {
  (void)daemon.load("m", "", "legacy");
  wait_until_lost();
  EXPECT_TRUE(contains(daemon.model("m").failure, "illegal memory access")) << daemon.model("m").failure;
  daemon.no_children();
  EXPECT_EQ(daemon.device().free_bytes, daemon.device().budget_bytes);
}

TEST(LegacyOnTheHost, IsRefused) {
  Scripted daemon("", "", "", "host");
  const auto refused = daemon.load("m", "", "legacy").status();
  EXPECT_EQ(refused.code(), StatusCode::kUnsupported);
  EXPECT_TRUE(contains(refused.message(), "legacy")) << refused.message();
  EXPECT_TRUE(daemon.load("m", "", "fd").ok());
}

}  // namespace
}  // namespace weightd::daemon
