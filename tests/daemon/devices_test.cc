// SPDX-License-Identifier: Apache-2.0
#include "daemon/devices.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include "tests/support/safetensors_builder.h"

namespace weightd::daemon {
namespace {

constexpr uint64_t kGiB = uint64_t{1} << 30;

Config config_with(const std::string& backend, uint64_t budget = 0) {
  Config config;
  config.backend = backend;
  config.budget_bytes = budget;
  return config;
}

ipc::GpuSummary a_gpu(const std::string& uuid, const std::string& problem = "") {
  ipc::GpuSummary gpu;
  gpu.uuid = uuid;
  gpu.name = "A100";
  gpu.total_bytes = 80 * kGiB;
  gpu.vmm = gpu.fd_handles = true;
  gpu.read_only_map = 1;
  gpu.problem = problem;
  return gpu;
}

ipc::ProbeReply a_probe(std::vector<ipc::GpuSummary> gpus, const std::string& problem = "") {
  ipc::ProbeReply probe;
  probe.gpus = std::move(gpus);
  probe.problem = problem;
  return probe;
}

TEST(Devices, TheHostIsOneDevice) {
  const auto set = choose_devices(config_with("host", 5 * kGiB), Status::internal("not looked at"));
  ASSERT_TRUE(set.ok());
  EXPECT_EQ(set->backend, "host");
  EXPECT_EQ(set->why, "");
  ASSERT_EQ(set->devices.size(), 1U);
  EXPECT_EQ(set->devices[0].uuid, "host");
  EXPECT_EQ(set->devices[0].budget_bytes, 5 * kGiB);
  EXPECT_EQ(set->gpu("host"), nullptr);
}

TEST(Devices, EveryUsableGpuIsServedOnce) {
  const auto probe = a_probe({a_gpu("GPU-a"), a_gpu("GPU-b", "broken"), a_gpu("GPU-c"), a_gpu("GPU-a"), a_gpu("")});
  const auto set = choose_devices(config_with("cuda"), probe);
  ASSERT_TRUE(set.ok());
  EXPECT_EQ(set->backend, "cuda");
  EXPECT_EQ(set->why, "") << "no choice was made";
  ASSERT_EQ(set->devices.size(), 2U);
  EXPECT_EQ(set->devices[0].uuid, "GPU-a");
  EXPECT_EQ(set->devices[1].uuid, "GPU-c");
  EXPECT_EQ(set->devices[1].budget_bytes, 79 * kGiB);
  ASSERT_NE(set->gpu("GPU-c"), nullptr);
  EXPECT_EQ(choose_devices(config_with("auto"), probe)->why, "auto: 2 usable GPUs");
}

TEST(Devices, WithoutAGpuTheReasonIsNamed) {
  const std::vector<std::pair<Result<ipc::ProbeReply>, std::string>> cases = {
      {a_probe({}, "no driver\x1b[2J"), "no driver\\x1b[2J"},
      {a_probe({}), "the driver knows none"},
      {a_probe({a_gpu("GPU-b", "broken")}), "A100 (GPU-b): broken"},
      {Status::deadline_exceeded("no answer"), "the loader could not tell: no answer"},
  };
  for (const auto& [probe, reason] : cases) {
    const auto refused = choose_devices(config_with("cuda"), probe);
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.status().code(), StatusCode::kUnavailable);
    EXPECT_EQ(refused.status().message(), "backend 'cuda': no usable GPU: " + reason);
    const auto host = choose_devices(config_with("auto"), probe);
    ASSERT_TRUE(host.ok());
    EXPECT_EQ(host->backend, "host");
    EXPECT_EQ(host->why, "auto: no usable GPU: " + reason);
    EXPECT_EQ(host->probe_failure.ok(), probe.ok());
  }
}

TEST(Devices, TheBudgetOfAGpu) {
  EXPECT_EQ(gpu_budget(config_with("cuda"), 80 * kGiB), 79 * kGiB);
  EXPECT_EQ(gpu_budget(config_with("cuda"), kGpuHeadroomBytes), 0U);
  EXPECT_EQ(gpu_budget(config_with("cuda"), 1), 0U);
  EXPECT_EQ(gpu_budget(config_with("cuda", 10 * kGiB), 80 * kGiB), 10 * kGiB);
  EXPECT_EQ(gpu_budget(config_with("cuda", 90 * kGiB), 80 * kGiB), 80 * kGiB);
}

TEST(Devices, WhatATransportNeeds) {
  ipc::GpuSummary no_vmm = a_gpu("GPU-b"), no_fd = a_gpu("GPU-c"), no_map = a_gpu("GPU-d"), untried = a_gpu("GPU-e");
  no_vmm.vmm = no_fd.fd_handles = false;
  no_map.read_only_map = 0;
  untried.read_only_map = -1;
  const auto set = choose_devices(config_with("cuda"), a_probe({a_gpu("GPU-a"), no_vmm, no_fd, no_map, untried}));
  ASSERT_TRUE(set.ok());
  for (const char* good : {"GPU-a", "GPU-e"}) EXPECT_TRUE(check_transport(*set, good, "fd").ok()) << good;
  for (const char* bad : {"GPU-b", "GPU-c", "GPU-d"}) {
    const Status refused = check_transport(*set, bad, "fd");
    EXPECT_EQ(refused.code(), StatusCode::kUnsupported) << bad;
    EXPECT_NE(refused.message().find(bad), std::string::npos) << refused.message();
    EXPECT_TRUE(check_transport(*set, bad, "legacy").ok()) << bad;
  }
  const auto host = choose_devices(config_with("host"), ipc::ProbeReply{});
  EXPECT_TRUE(check_transport(*host, "host", "fd").ok());
  EXPECT_EQ(check_transport(*host, "host", "legacy").code(), StatusCode::kUnsupported);
}

TEST(Devices, TheDeviceFileIsHeldOpen) {
  const ::weightd::testing::TempDir folder;
  ::weightd::testing::write_file(folder / "nvidia3", "");
  const auto held = hold_gpu(3, folder.path());
  ASSERT_TRUE(held.ok()) << held.status().message();
  EXPECT_GE(::fcntl(held->get(), F_GETFD), 0);
  EXPECT_NE(::fcntl(held->get(), F_GETFD) & FD_CLOEXEC, 0) << "no child inherits it";
  EXPECT_EQ(hold_gpu(4, folder.path()).status().code(), StatusCode::kNotFound);
  EXPECT_FALSE(hold_gpu(-1, folder.path()).ok()) << "unknown";
}

}  // namespace
}  // namespace weightd::daemon
