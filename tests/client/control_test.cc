// SPDX-License-Identifier: Apache-2.0
#include "weightd/control.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "tests/client/fake_daemon.h"

namespace weightd {
namespace {

using std::chrono::milliseconds;
using test::FakeDaemon;
using test::TempFolder;
using testing::ElementsAre;
using testing::HasSubstr;

ipc::ModelSummary a_model() {
  ipc::ModelSummary model;
  model.name = "m";
  model.generation = 4;
  model.state = ipc::GenerationState::kLoading;
  model.content_id = "c1";
  model.tensors_id = "t1";
  model.device = "host";
  model.transport = "fd";
  model.residency = "fast";
  model.source = "/models/m.wpk";
  model.failure = "none yet";
  model.logical_bytes = 10;
  model.resident_bytes = 11;
  model.tensor_count = 12;
  model.progress_bytes = 13;
  model.lease_count = 14;
  model.orphan_count = 15;
  model.encodings = {{"f12", 16, 17, 18}};
  return model;
}

ipc::LeaseSummary a_lease() {
  ipc::LeaseSummary lease;
  lease.id = 21;
  lease.model = "m";
  lease.generation = 4;
  lease.content_id = "c1";
  lease.device = "host";
  lease.command = "worker";
  lease.pid = 22;
  lease.uid = 23;
  lease.age_ms = 24;
  lease.bytes = 25;
  lease.orphan = true;
  return lease;
}

void expect_the_lease(const control::Lease& lease) {
  EXPECT_EQ(lease.id, 21U);
  EXPECT_EQ(lease.model, "m");
  EXPECT_EQ(lease.generation, 4U);
  EXPECT_EQ(lease.content_id, "c1");
  EXPECT_EQ(lease.device, "host");
  EXPECT_EQ(lease.command, "worker");
  EXPECT_EQ(lease.pid, 22);
  EXPECT_EQ(lease.uid, 23U);
  EXPECT_EQ(lease.age_ms, 24U);
  EXPECT_EQ(lease.bytes, 25U);
  EXPECT_TRUE(lease.orphan);
}

void expect_the_model(const control::Model& model) {
  EXPECT_EQ(model.name, "m");
  EXPECT_EQ(model.generation, 4U);
  EXPECT_EQ(model.state, "loading");
  EXPECT_EQ(model.content_id, "c1");
  EXPECT_EQ(model.tensors_id, "t1");
  EXPECT_EQ(model.device, "host");
  EXPECT_EQ(model.transport, "fd");
  EXPECT_EQ(model.residency, "fast");
  EXPECT_EQ(model.source, "/models/m.wpk");
  EXPECT_EQ(model.failure, "none yet");
  EXPECT_EQ(model.logical_bytes, 10U);
  EXPECT_EQ(model.resident_bytes, 11U);
  EXPECT_EQ(model.tensor_count, 12U);
  EXPECT_EQ(model.progress_bytes, 13U);
  EXPECT_EQ(model.lease_count, 14U);
  EXPECT_EQ(model.orphan_count, 15U);
  ASSERT_EQ(model.encodings.size(), 1U);
  EXPECT_EQ(model.encodings[0].encoding, "f12");
  EXPECT_EQ(model.encodings[0].tensors, 16U);
  EXPECT_EQ(model.encodings[0].logical_bytes, 17U);
  EXPECT_EQ(model.encodings[0].resident_bytes, 18U);
}

ipc::StatusReply a_status() {
  ipc::StatusReply status;
  status.version = {"1.2.3 (x)", 1, "host", 5, 77, "auto: no GPU"};
  status.uptime_ms = 31;
  status.rss_bytes = 32;
  status.session_count = 33;
  status.lease_count = 34;
  status.fd_count = 35;
  status.models = {a_model()};
  ipc::DeviceSummary device;
  device.uuid = "host";
  device.name = "main memory";
  device.total_bytes = 41;
  device.budget_bytes = 42;
  device.owned_bytes = 43;
  device.leased_bytes = 44;
  device.draining_bytes = 45;
  device.orphan_bytes = 46;
  device.loading_bytes = 47;
  device.free_bytes = 48;
  device.fd_only_bytes = 49;
  status.devices = {device};
  return status;
}

ipc::GpuSummary a_gpu() {
  ipc::GpuSummary gpu;
  gpu.uuid = "GPU-1";
  gpu.name = "H200";
  gpu.problem = "hot";
  gpu.total_bytes = 71;
  gpu.used_bytes = 72;
  gpu.free_bytes = 73;
  gpu.nvml_known = true;
  gpu.persistence = 1;
  return gpu;
}

/// Answers everything with known values; keeps the last request.
class Control : public testing::Test {
 protected:
  Control()
      : daemon_(folder_ / "c", [this](FakeDaemon& daemon, FakeDaemon::Session& session, const ipc::Request& request) {
          return answer(daemon, session, request);
        }) {}

  bool answer(FakeDaemon& daemon, FakeDaemon::Session& session, const ipc::Request& request) {
    if (std::holds_alternative<ipc::HelloRequest>(request.body)) return false;
    last_ = request;
    if (!refusal_.ok()) {
      daemon.reply(session, request.id, refusal_);
    } else if (std::holds_alternative<ipc::VersionRequest>(request.body)) {
      daemon.reply(session, request.id, ipc::VersionReply{{"1.2.3 (x)", 1, "host", 5, 77}});
    } else if (std::holds_alternative<ipc::StatusRequest>(request.body)) {
      daemon.reply(session, request.id, a_status());
    } else if (std::holds_alternative<ipc::MemoryRequest>(request.body)) {
      daemon.reply(session, request.id, ipc::MemoryReply{a_status(), {a_lease()}, {a_gpu()}, "no NVML"});
    } else if (std::holds_alternative<ipc::DoctorRequest>(request.body)) {
      daemon.reply(session, request.id,
                   ipc::DoctorReply{{{"a", ipc::CheckSummary::Level::kGood, "b", ""},
                                     {"c", ipc::CheckSummary::Level::kWarning, "d", "e"},
                                     {"f", ipc::CheckSummary::Level::kFailure, "g", "h"}}});
    } else if (std::holds_alternative<ipc::LeasesRequest>(request.body)) {
      daemon.reply(session, request.id, ipc::LeasesReply{{a_lease(), a_lease()}});
    } else if (std::holds_alternative<ipc::LoadRequest>(request.body)) {
      daemon.reply(session, request.id, ipc::LoadedReply{a_model()});
    } else if (std::holds_alternative<ipc::UnloadRequest>(request.body)) {
      daemon.reply(session, request.id, ipc::UnloadedReply{true, 51, {a_lease()}});
    } else if (std::holds_alternative<ipc::VerifyRequest>(request.body)) {
      daemon.reply(session, request.id, ipc::VerifiedReply{61, {1, 2}, {"w", "v"}, 62, 63});
    }
    return true;
  }

  [[nodiscard]] control::Client connect() const { return control::Client::connect({folder_ / "c", milliseconds(20'000)}).value(); }

  const TempFolder folder_;
  ipc::Request last_;
  Status refusal_;
  FakeDaemon daemon_;
};

TEST_F(Control, Version) {
  const control::Version version = connect().version().value();
  EXPECT_EQ(version.build, "1.2.3 (x)");
  EXPECT_EQ(version.protocol_version, 1);
  EXPECT_EQ(version.backend, "host");
  EXPECT_EQ(version.pid, 77);
}

TEST_F(Control, Memory) {
  const control::Memory memory = connect().memory().value();
  EXPECT_EQ(memory.status.version.backend_reason, "auto: no GPU");
  ASSERT_EQ(memory.status.devices.size(), 1U);
  EXPECT_EQ(memory.status.devices[0].fd_only_bytes, 49U);
  ASSERT_EQ(memory.status.models.size(), 1U);
  expect_the_model(memory.status.models[0]);
  ASSERT_EQ(memory.leases.size(), 1U);
  expect_the_lease(memory.leases[0]);
  ASSERT_EQ(memory.gpus.size(), 1U);
  EXPECT_EQ(memory.gpus[0].uuid, "GPU-1");
  EXPECT_EQ(memory.gpus[0].name, "H200");
  EXPECT_EQ(memory.gpus[0].problem, "hot");
  EXPECT_EQ(memory.gpus[0].total_bytes, 71U);
  EXPECT_EQ(memory.gpus[0].used_bytes, 72U);
  EXPECT_EQ(memory.gpus[0].free_bytes, 73U);
  EXPECT_TRUE(memory.gpus[0].nvml_known);
  EXPECT_EQ(memory.gpus[0].persistence, 1);
  EXPECT_EQ(memory.problem, "no NVML");
}

TEST_F(Control, Doctor) {
  const std::vector<control::Check> checks = connect().doctor().value();
  ASSERT_EQ(checks.size(), 3U);
  EXPECT_EQ(checks[0].level, "good");
  EXPECT_EQ(checks[1].name, "c");
  EXPECT_EQ(checks[1].level, "warning");
  EXPECT_EQ(checks[1].detail, "d");
  EXPECT_EQ(checks[1].advice, "e");
  EXPECT_EQ(checks[2].level, "failure");
}

TEST_F(Control, LoadTakesATransport) {
  EXPECT_TRUE(connect().load("m", "/m.wpk", "GPU-1", milliseconds(0)).ok());
  EXPECT_EQ(std::get<ipc::LoadRequest>(last_.body).transport, "fd");
  EXPECT_TRUE(connect().load("m", "/m.wpk", "GPU-1", milliseconds(0), "legacy").ok());
  EXPECT_EQ(std::get<ipc::LoadRequest>(last_.body).transport, "legacy");
  EXPECT_EQ(connect().load("m", "/m.wpk", "GPU-1", milliseconds(0), "pigeon").status().code(), StatusCode::kInvalidArgument);
}

TEST_F(Control, Status) {
  const control::DaemonStatus status = connect().status().value();
  EXPECT_EQ(status.version.build, "1.2.3 (x)");
  EXPECT_EQ(status.uptime_ms, 31U);
  EXPECT_EQ(status.rss_bytes, 32U);
  EXPECT_EQ(status.session_count, 33U);
  EXPECT_EQ(status.lease_count, 34U);
  EXPECT_EQ(status.fd_count, 35U);
  ASSERT_EQ(status.models.size(), 1U);
  expect_the_model(status.models[0]);
  ASSERT_EQ(status.devices.size(), 1U);
  const control::Device& device = status.devices[0];
  EXPECT_EQ(device.uuid, "host");
  EXPECT_EQ(device.name, "main memory");
  EXPECT_THAT((std::vector<uint64_t>{device.total_bytes, device.budget_bytes, device.owned_bytes, device.leased_bytes,
                                     device.draining_bytes, device.orphan_bytes, device.loading_bytes, device.free_bytes}),
              ElementsAre(41, 42, 43, 44, 45, 46, 47, 48));
}

TEST_F(Control, Leases) {
  const std::vector<control::Lease> leases = connect().leases().value();
  ASSERT_EQ(leases.size(), 2U);
  expect_the_lease(leases[1]);
}

TEST_F(Control, Load) {
  expect_the_model(connect().load("org/m:v1", "/models/m.wpk", "host", milliseconds(1234)).value());
  const auto& request = std::get<ipc::LoadRequest>(last_.body);
  EXPECT_EQ(request.model, "org/m:v1");
  EXPECT_EQ(request.path, "/models/m.wpk");
  EXPECT_EQ(request.device, "host");
  EXPECT_EQ(request.timeout_ms, 1234U);
}

TEST_F(Control, Unload) {
  const control::Unloaded unloaded = connect().unload("m", "", std::chrono::hours(24 * 365 * 100)).value();
  EXPECT_TRUE(unloaded.freed);
  EXPECT_EQ(unloaded.bytes, 51U);
  ASSERT_EQ(unloaded.holders.size(), 1U);
  expect_the_lease(unloaded.holders[0]);
  EXPECT_EQ(std::get<ipc::UnloadRequest>(last_.body).timeout_ms, 0xffffffffU) << "a hundred years do not wrap";
}

TEST_F(Control, Verify) {
  const control::Verified verified = connect().verify("m", milliseconds(20'000)).value();
  EXPECT_EQ(verified.blocks, 61U);
  EXPECT_EQ(verified.elapsed_ms, 62U);
  EXPECT_EQ(verified.bytes, 63U);
  EXPECT_THAT(verified.bad_blocks, ElementsAre(1, 2));
  EXPECT_THAT(verified.bad_tensors, ElementsAre("w", "v"));
}

TEST_F(Control, RefusalsKeepTheirCodeAndWords) {
  control::Client client = connect();
  refusal_ = Status::resource_exhausted("needs 9.8 GiB, 7.1 free");
  const weightd::Status status = client.load("m", "/m.wpk", "", milliseconds(0)).status();
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(status.message(), "needs 9.8 GiB, 7.1 free");
  refusal_ = {};
  EXPECT_TRUE(client.version().ok()) << "the connection goes on";
}

TEST_F(Control, BadArgumentsAreRefusedHere) {
  control::Client client = connect();
  EXPECT_EQ(client.load("-rf", "/m.wpk", "", milliseconds(0)).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(client.load("m", std::string(5000, 'p'), "", milliseconds(0)).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(client.load("m", "/\xff", "", milliseconds(0)).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(client.unload("", "", milliseconds(0)).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(client.verify("a//b", milliseconds(0)).status().code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(client.version().ok());
}

TEST_F(Control, CO_129_PathTooLong) {
  const weightd::Status status = control::Client::connect({"/" + std::string(107, 'c')}).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("107"));
}

TEST_F(Control, NobodyThere) { EXPECT_EQ(control::Client::connect({folder_ / "none"}).status().code(), StatusCode::kUnavailable); }

TEST_F(Control, TheSocketOfTheEnvironment) {
  ASSERT_EQ(::setenv("WEIGHTD_CONTROL_SOCKET", (folder_ / "c").c_str(), 1), 0);
  EXPECT_TRUE(control::Client::connect().ok());
  ASSERT_EQ(::unsetenv("WEIGHTD_CONTROL_SOCKET"), 0);
}

TEST_F(Control, ALostDaemonIsUnavailable) {
  control::Client client = connect();
  daemon_.hang_up();
  EXPECT_EQ(client.version().status().code(), StatusCode::kUnavailable);
  EXPECT_EQ(client.status().status().code(), StatusCode::kUnavailable);
}

TEST_F(Control, AForkedChildIsRefused) {
  control::Client client = connect();
  const pid_t pid = ::fork();
  if (pid == 0) ::_exit(client.version().status().code() == StatusCode::kForked ? 0 : 1);
  int status = -1;
  ASSERT_EQ(::waitpid(pid, &status, 0), pid);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(client.version().ok());
}

}  // namespace
}  // namespace weightd
