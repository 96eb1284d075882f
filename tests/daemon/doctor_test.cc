// SPDX-License-Identifier: Apache-2.0
#include "daemon/doctor.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>

#include "tests/support/safetensors_builder.h"

namespace weightd::daemon {
namespace {

using Level = ipc::CheckSummary::Level;
constexpr uint64_t kGiB = uint64_t{1} << 30;

/// A machine with one GPU on which everything is as it should be.
DoctorFacts healthy() {
  DoctorFacts facts;
  facts.config.backend = "cuda";
  facts.config.model_folders = {"/models"};
  facts.config.loader_path = "/usr/libexec/weightd/weightd-loader";
  ipc::ProbeReply probe;
  probe.driver_version = "580.159.04";
  probe.cuda_version = 13000;
  ipc::GpuSummary gpu;
  gpu.uuid = "GPU-a";
  gpu.name = "H200";
  gpu.total_bytes = 140 * kGiB;
  gpu.used_bytes = 13 * kGiB;
  gpu.nvml_known = gpu.vmm = gpu.fd_handles = true;
  gpu.persistence = gpu.read_only_map = 1;
  probe.gpus = {gpu};
  facts.devices = *choose_devices(facts.config, probe);
  facts.probe.emplace(probe);
  facts.files.emplace();
  facts.files->data = {"/run/weightd/weightd.sock", {}, 0660, "weightd"};
  facts.files->control = {"/run/weightd/control.sock", {}, 0660, "weightd-admin"};
  facts.files->model_folders = {{"/models", {}}};
  facts.held_gpus["GPU-a"] = Status();
  ipc::DeviceSummary device;
  device.uuid = "GPU-a";
  device.budget_bytes = 139 * kGiB;
  device.owned_bytes = 12 * kGiB;
  facts.ledger = {device};
  facts.fd_limit = 524'288;
  facts.fd_count = 30;
  return facts;
}

/// The check of that name, the only one.
ipc::CheckSummary check(const DoctorFacts& facts, const std::string& name) {
  ipc::CheckSummary found;
  int count = 0;
  for (const auto& each : diagnose(facts)) {
    if (each.name != name) continue;
    found = each;
    ++count;
  }
  EXPECT_EQ(count, 1) << name;
  EXPECT_EQ(found.level == Level::kGood, found.advice.empty()) << name;
  return found;
}

TEST(Doctor, AHealthyMachineIsGood) {
  const auto checks = diagnose(healthy());
  for (const auto& each : checks) EXPECT_EQ(each.level, Level::kGood) << each.name << ": " << each.detail;
  EXPECT_EQ(checks.size(), 12U);
  EXPECT_EQ(check(healthy(), "driver").detail, "580.159.04, CUDA 13.0");
}

TEST(Doctor, TheHostBackendIsNotAskedForGpus) {
  DoctorFacts facts = healthy();
  facts.config.backend = "host";
  facts.devices = *choose_devices(facts.config, ipc::ProbeReply{});
  for (const auto& each : diagnose(facts)) {
    EXPECT_EQ(each.level, Level::kGood) << each.name << ": " << each.detail;
    for (const char* gpus_only : {"driver", "nvml", "gpu", "transport", "persistence", "memory"}) EXPECT_NE(each.name, gpus_only);
  }
}

TEST(Doctor, TheLoaderThatDoesNotStartOrHangs) {
  DoctorFacts facts = healthy();
  facts.probe.emplace(Status::not_found("starting '/x': No such file or directory"));
  EXPECT_EQ(check(facts, "loader").level, Level::kFailure);
  EXPECT_NE(check(facts, "loader").advice.find("loader_path"), std::string::npos);
  facts.probe.emplace(Status::deadline_exceeded("no answer"));
  EXPECT_NE(check(facts, "loader").advice.find("driver hangs"), std::string::npos);
  facts.probe.reset();
  EXPECT_EQ(check(facts, "loader").level, Level::kWarning);
}

TEST(Doctor, TheDriverThatIsMissing) {
  DoctorFacts facts = healthy();
  ipc::ProbeReply gone;
  gone.problem = "libcuda.so.1 is missing";
  facts.probe.emplace(gone);
  EXPECT_EQ(check(facts, "driver").level, Level::kFailure);
  EXPECT_EQ(check(facts, "driver").detail, "libcuda.so.1 is missing");
}

TEST(Doctor, AGpuThatIsNotServed) {
  DoctorFacts facts = healthy();
  facts.devices.probe.gpus[0].problem = "no kernel image for compute 9.0";
  EXPECT_EQ(check(facts, "gpu").level, Level::kFailure);
  EXPECT_NE(check(facts, "gpu").detail.find("no kernel image"), std::string::npos);
}

TEST(Doctor, PersistenceModeOrAHeldDeviceFile) {
  DoctorFacts facts = healthy();
  facts.devices.probe.gpus[0].persistence = 0;
  EXPECT_EQ(check(facts, "persistence").level, Level::kGood) << "the file is held";
  facts.held_gpus["GPU-a"] = Status::permission_denied("/dev/nvidia0: Permission denied");
  const auto missing = check(facts, "persistence");
  EXPECT_EQ(missing.level, Level::kWarning);
  EXPECT_NE(missing.detail.find("/dev/nvidia0: Permission denied"), std::string::npos);
  facts.devices.probe.gpus[0].persistence = 1;
  EXPECT_EQ(check(facts, "persistence").level, Level::kGood);
}

TEST(Doctor, MemoryThatNobodyOfOursExplains) {
  DoctorFacts facts = healthy();
  ipc::GpuSummary& gpu = facts.probe->value().gpus[0];
  gpu.used_bytes = 30 * kGiB;
  const auto other = check(facts, "memory");
  EXPECT_EQ(other.level, Level::kWarning);
  EXPECT_NE(other.detail.find("18.0 GiB belong to others"), std::string::npos) << other.detail;
  facts.ledger[0].leased_bytes = 12 * kGiB;
  EXPECT_EQ(check(facts, "memory").level, Level::kGood) << "workers have memory of their own";
  gpu.used_bytes = 11 * kGiB;
  EXPECT_EQ(check(facts, "memory").level, Level::kFailure) << "less than the ledger counts";
  facts.ledger[0].leased_bytes = 0;
  gpu.used_bytes = 15 * kGiB;
  EXPECT_EQ(check(facts, "memory").level, Level::kWarning);
  facts.contexts["GPU-a"] = 2;
  EXPECT_EQ(check(facts, "memory").level, Level::kGood) << "two contexts";
}

TEST(Doctor, TooFewDescriptors) {
  DoctorFacts facts = healthy();
  facts.fd_limit = 1024;
  EXPECT_EQ(check(facts, "descriptors").level, Level::kWarning);
  facts.largest_model_chunks = 1000;
  EXPECT_EQ(check(facts, "descriptors").level, Level::kFailure);
}

TEST(Doctor, SocketsAndFolders) {
  DoctorFacts facts = healthy();
  facts.files->data.status = Status::not_found("/run/weightd/weightd.sock: No such file or directory");
  EXPECT_EQ(check(facts, "data socket").level, Level::kFailure);
  facts.files->control.mode = 0666;
  EXPECT_EQ(check(facts, "control socket").level, Level::kWarning);
  facts.files->model_folders[0].readable = Status::permission_denied("model folder '/models': Permission denied");
  EXPECT_EQ(check(facts, "model folders").level, Level::kFailure);
  facts.files->model_folders.clear();
  facts.config.model_folders.clear();
  EXPECT_EQ(check(facts, "model folders").level, Level::kWarning);
  facts.files.reset();
  EXPECT_EQ(check(facts, "model folders").level, Level::kWarning) << "a mount that hangs";
}

TEST(Doctor, LooksAtFiles) {
  const ::weightd::testing::TempDir folder;
  ::weightd::testing::write_file(folder / "control.sock", "");
  ASSERT_EQ(::chmod((folder / "control.sock").c_str(), 0640), 0);
  Config config;
  config.data_socket = folder / "data.sock";
  config.control_socket = folder / "control.sock";
  config.model_folders = {folder.path(), folder / "none"};
  const FileFacts facts = look_at_files(config);
  EXPECT_EQ(facts.data.status.code(), StatusCode::kNotFound);
  EXPECT_EQ(facts.control.status.code(), StatusCode::kFailedPrecondition) << "not a socket";
  EXPECT_EQ(facts.control.mode, 0640U);
  ASSERT_EQ(facts.model_folders.size(), 2U);
  EXPECT_TRUE(facts.model_folders[0].readable.ok());
  EXPECT_EQ(facts.model_folders[1].readable.code(), StatusCode::kNotFound);
}

}  // namespace
}  // namespace weightd::daemon
