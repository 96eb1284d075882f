// SPDX-License-Identifier: Apache-2.0
// Workers in processes of their own compute from one copy. Built for both backends.
#include <gtest/gtest.h>
#include <unistd.h>

#include "tests/e2e/system.h"
#include "tests/support/programs.h"
#include "tests/support/safetensors_builder.h"

namespace weightd::e2e {
namespace {

constexpr uint32_t kFirstUser = 61'000;

/// Options for the n-th of several workers: each another user, which only root can arrange.
WorkerOptions user(uint32_t number) {
  WorkerOptions options;
  options.uid = kFirstUser + number;
  return options;
}

/// Workers of different users, each attached to `model`.
std::vector<WorkerProcess> attached_workers(System& system, uint32_t count, const std::string& model) {
  std::vector<WorkerProcess> workers;
  for (uint32_t i = 0; i < count; ++i) workers.push_back(system.worker(user(i)));
  for (WorkerProcess& worker : workers) worker.send("acquire " + model + " 0");
  for (WorkerProcess& worker : workers) {
    const Answer answer = worker.answer();
    if (!answer.ok) throw test_failure("a worker's acquire: " + answer.text);
  }
  return workers;
}

/// `count` workers of different users push the same random activations, and each some of its own, through every layer.
void compute_from_one_copy(uint32_t count) {
  if (::geteuid() != 0) throw test_failure("needs root: the workers are of different users");
  System system;
  system.make_small("m", 3);
  system.must_load("m");
  std::vector<WorkerProcess> workers = attached_workers(system, count, "m");
  EXPECT_EQ(system.status().lease_count, count);
  std::vector<std::string> traces;
  for (uint32_t i = 0; i < count; ++i) {
    traces.push_back("trace" + std::to_string(i));
    workers[i].send("trace " + system.scratch(traces.back()) + " " + std::to_string(100 + i) + " " + std::to_string(1 + 5 * i));
  }
  for (WorkerProcess& worker : workers) {
    const Answer answer = worker.answer();
    ASSERT_TRUE(answer.ok) << answer.text;
  }
  EXPECT_EQ(system.check_traces("m", traces), "");
  // All at once, the same input: the same bits.
  for (WorkerProcess& worker : workers) worker.send("compute 7 8");
  const std::string digest = workers.front().answer().at("digest");
  for (uint32_t i = 1; i < count; ++i) EXPECT_EQ(workers[i].answer().at("digest"), digest) << "worker " << i;
  const auto leases = system.leases();
  ASSERT_EQ(leases.size(), count);
  for (const ipc::LeaseSummary& lease : leases) EXPECT_GE(lease.uid, kFirstUser);
  for (WorkerProcess& worker : workers) EXPECT_EQ(worker.finish(), 0);
  system.wait_for_leases(0);
  EXPECT_EQ(system.verify("m"), "");
  system.must_unload("m");
  EXPECT_EQ(system.device().owned_bytes, 0U);
}

TEST(GpuSharing, TwoWorkersOfDifferentUsersComputeFromOneCopy) { compute_from_one_copy(2); }

TEST(GpuSharing, EightWorkersOfDifferentUsersComputeFromOneCopy) { compute_from_one_copy(8); }

TEST(GpuSharing, ExactModeGivesTheBitsOfTheUncodedModel) {
  System system;
  system.make_small("coded", 5);
  system.make_small("uncoded", 5, true);
  system.must_load("coded");
  system.must_load("uncoded");
  WorkerProcess coded = system.worker(), uncoded = system.worker();
  coded.must("acquire coded 0");
  uncoded.must("acquire uncoded 0");
  for (const char* tokens : {"1", "2", "8", "16", "17", "100", "256", "300"}) {
    const std::string request = std::string("exact 9 ") + tokens;
    const Answer want = uncoded.must(request);
    EXPECT_EQ(coded.must(request).at("digest"), want.at("digest")) << tokens << " tokens";
    EXPECT_EQ(want.number("layers"), 16U);
  }
}

TEST(GpuSharing, BothRoutesStayWithinTheBoundAtEveryBatchSize) {
  System system;
  system.make_small("m", 6);
  system.must_load("m");
  WorkerProcess worker = system.worker();
  worker.must("acquire m 0");
  std::vector<std::string> traces;
  for (const int tokens : {1, 3, 16, 17, 64, 129, 257, 513}) {
    if (!kGpu && tokens > 64) continue;
    traces.push_back("t" + std::to_string(tokens));
    worker.must("trace " + system.scratch(traces.back()) + " 4 " + std::to_string(tokens));
  }
  EXPECT_EQ(system.check_traces("m", traces), "");
}

TEST(GpuSharing, CO_094_OneCopyInEveryAccount) {
  System system;
  system.make_small("small", 1);
  const uint64_t mib = kGpu ? 1500 : 64;
  system.make_big("big", mib);
  system.must_load("small");
  // Contexts exist before the first measurement, and stay.
  std::vector<WorkerProcess> workers;
  for (int i = 0; i < 3; ++i) workers.push_back(system.worker());
  for (WorkerProcess& worker : workers) worker.must("acquire small 0");
  for (WorkerProcess& worker : workers) worker.must("compute 1 8");
  system.wait_for_no_loader();
  const uint64_t owned_before = system.device().owned_bytes, used_before = system.used_bytes();

  system.must_load("big");
  system.wait_for_no_loader();
  const uint64_t rise = system.device().owned_bytes - owned_before;
  EXPECT_GE(rise, mib * kMiB);
  const uint64_t chunks = 2 + mib / 1024;
  // The loader's own memory goes with its process, in the driver's time.
  system.wait_for_used(used_before + rise + chunks * 2 * kMiB, "the loader's memory comes back");
  EXPECT_GE(system.used_bytes() + chunks * 2 * kMiB, used_before + rise);

  for (WorkerProcess& worker : workers) {
    const Answer answer = worker.must("acquire big 0");
    EXPECT_EQ(answer.number("shared"), rise);
    EXPECT_EQ(answer.number("resident"), rise);
    EXPECT_LT(answer.number("private"), kMiB);
  }
  EXPECT_LT(system.used_bytes(), used_before + rise + mib * kMiB / 2) << "three workers, one copy";
  EXPECT_EQ(system.device().leased_bytes, rise);
  for (WorkerProcess& worker : workers) EXPECT_EQ(worker.finish(), 0);
  system.wait_for_leases(0);
  system.must_unload("big");
  system.must_unload("small");
  EXPECT_EQ(system.device().owned_bytes, 0U);
}

/// A worker that writes through its mapping has an error, and nobody else has.
void write_through_the_mapping(const std::string& command) {
  System system;
  system.make_small("m", 8);
  system.must_load("m");
  WorkerProcess writer = system.worker(), other = system.worker();
  writer.must("acquire m 0");
  other.must("acquire m 0");
  const std::string digest = other.must("compute 3 8").at("digest");
  other.must("background 3 8");
  if (kGpu) {
    const Answer answer = writer.ask(command);
    EXPECT_EQ(answer.code, "cuda") << answer.text;
    EXPECT_EQ(writer.ask("compute 3 8").ok, command == "write_memset" && answer.text.find("InvalidValue") != std::string::npos)
        << "a fault ends the writer's context; a refused memset does not";
  } else {
    writer.send(command);
    EXPECT_EQ(writer.wait() == -SIGSEGV, !testing::kSanitized) << "a sanitizer makes an exit status of the signal";
  }
  EXPECT_EQ(other.must("join").at("digest"), digest);
  EXPECT_EQ(other.must("compute 3 8").at("digest"), digest);
  EXPECT_EQ(system.verify("m"), "") << "nothing has changed";
  if (kGpu) writer.kill();
  system.wait_for_leases(1);
  WorkerProcess next = system.worker();
  next.must("acquire m 0");
  EXPECT_EQ(next.must("compute 3 8").at("digest"), digest);
}

TEST(GpuSharing, CO_067_AMemsetThroughTheMappingHurtsTheWriterAlone) { write_through_the_mapping("write_memset"); }

TEST(GpuSharing, CO_067_AKernelThatWritesThroughTheMappingHurtsTheWriterAlone) { write_through_the_mapping("write_kernel"); }

TEST(GpuSharing, CO_060_AMappingReachesNoOtherModel) {
  System system;
  system.make_pattern("one", "<=ONE==>");
  system.make_pattern("two", "<=TWO==>");
  system.must_load("one");
  system.must_load("two");
  WorkerProcess worker = system.worker();
  worker.must("acquire one 0");
  const Answer own = worker.must("scan <=ONE==>");
  EXPECT_EQ(own.number("count"), 8192U);
  EXPECT_LE(own.number("end"), 65'536U) << "what is behind the payload is zero";
  EXPECT_EQ(worker.must("scan <=TWO==>").number("count"), 0U);
}

TEST(GpuSharing, CO_062_AcquireReleaseCyclesLeaveNothing) {
  System system;
  system.make_small("m", 2);
  system.must_load("m");
  WorkerProcess worker = system.worker();
  worker.must("cycles m 80 8");  // what is allocated once is not a leak
  const uint64_t used = system.used_bytes();
  const int count = kGpu ? 2000 : 500;
  worker.must("cycles m " + std::to_string(count) + " 1", std::chrono::seconds(300));
  worker.must("cycles m " + std::to_string(count) + " 8", std::chrono::seconds(300));
  system.wait_for_leases(0);
  system.wait_for_used(used + 2 * kMiB, "the memory after the cycles");
  system.must_unload("m");
  EXPECT_EQ(system.device().owned_bytes, 0U);
  EXPECT_EQ(worker.finish(), 0);
}

TEST(GpuSharing, CO_063_TwentyThousandTensorsAreFewMappings) {
  System system;
  testing::SafetensorsBuilder builder;
  for (int i = 0; i < 20'000; ++i) builder.add("t" + std::to_string(i), "U8", {16}, std::string(16, 'x'));
  builder.add_bf16("w", {16, 16}, std::vector<uint16_t>(256, 0x3f80)).write(system.daemon / "many/model.safetensors");
  std::string output;
  ASSERT_EQ(run_program({testing::program("weightpack", WEIGHTD_WEIGHTPACK), "pack", "--quiet", system.daemon / "many",
                         system.daemon / "many.wpk"},
                        &output),
            0)
      << output;
  system.make_small("small", 1);
  system.must_load("small");
  system.must_load("many");
  WorkerProcess worker = system.worker();
  worker.must("acquire small 0");
  worker.must("compute 1 1");
  const Answer before = worker.must("maps");
  worker.must("acquire many 0");
  worker.must("compute 1 1");
  const Answer after = worker.must("maps");
  EXPECT_LT(after.number("count"), before.number("count") + 100);
  EXPECT_LT(after.number("kib"), before.number("kib") + (uint64_t{1} << 20)) << "no more than a GiB of addresses";
}

TEST(GpuSharing, CO_064_WhoWaitsForAModelNeverSeesHalfOfIt) {
  System system;
  system.make_small("m", 12);
  system.must_load("m");
  WorkerProcess worker = system.worker(), checker = system.worker();
  checker.must("acquire m 0");
  const std::string digest = checker.must("exact 5 4").at("digest");
  checker.must("release");
  for (int round = 0; round < (kGpu ? 10 : 5); ++round) {
    system.must_unload("m");
    worker.send("acquire m 30000");
    system.must_load("m");
    ASSERT_TRUE(worker.answer().ok);
    EXPECT_EQ(worker.must("exact 5 4").at("digest"), digest) << "round " << round;
    worker.must("release");
  }
}

TEST(GpuSharing, CO_065_AForkedChildLeavesTheParentsLeaseAlone) {
  System system;
  system.make_small("m", 4);
  system.must_load("m");
  WorkerProcess worker = system.worker();
  worker.must("acquire m 0");
  const std::string digest = worker.must("compute 1 8").at("digest");
  const Answer child = worker.must("fork");
  for (const char* call : {"tensor", "list", "acquire", "release"}) EXPECT_EQ(child.at(call), "forked") << call;
  EXPECT_EQ(child.at("exit"), "0");
  EXPECT_EQ(worker.must("compute 1 8").at("digest"), digest);
  EXPECT_EQ(system.status().lease_count, 1U);
}

TEST(GpuSharing, CO_066_ReleaseWaitsForTheWorkInFlight) {
  System system;
  system.make_small("m", 4);
  system.must_load("m");
  WorkerProcess worker = system.worker();
  for (int round = 0; round < 3; ++round) {
    worker.must("acquire m 0");
    const Answer answer = worker.must("release_busy 3 " + std::string(kGpu ? "20000" : "3"));
    EXPECT_EQ(answer.at("after"), "revoked");
    system.wait_for_leases(0);
  }
  system.must_unload("m");
  system.must_load("m");
  worker.must("acquire m 0");
  worker.must("compute 1 8");
  EXPECT_EQ(worker.finish(), 0);
}

TEST(GpuSharing, CO_042_CO_054_CO_055_CO_058_WrongCallsAreRefusedBeforeAnythingIsLaunched) {
  System system;
  system.make_small("coded", 4);
  system.make_small("uncoded", 4, true);
  for (const char* name : {"coded", "uncoded"}) {
    system.must_load(name);
    WorkerProcess worker = system.worker();
    worker.must(std::string("acquire ") + name + " 0");
    const std::string digest = worker.must("compute 1 8").at("digest");
    worker.must("bad_calls");
    EXPECT_EQ(worker.must("compute 1 8").at("digest"), digest);
    EXPECT_EQ(system.verify(name), "");
  }
}

}  // namespace
}  // namespace weightd::e2e
