// SPDX-License-Identifier: Apache-2.0
// The loader on the GPUs of this machine.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "daemon/loader/gpu.h"
#include "ipc/cuda_driver.h"
#include "ipc/messages.h"
#include "ipc/vmm.h"
#include "store/hash.h"
#include "tests/daemon/backend_contract.h"
#include "tests/daemon/loader_peer.h"
#include "tests/support/test_bundle.h"

namespace weightd::testing {
namespace {

using ::testing::IsEmpty;
using ::testing::Not;

ipc::Job job_on_first_gpu() {
  ipc::Job job;
  job.backend = "cuda";
  const auto driver = ipc::cuda_driver();
  if (driver.ok()) {
    const auto gpus = ipc::visible_gpus(**driver);
    if (gpus.ok() && !gpus->empty()) job.device = gpus->front().uuid;
  }
  return job;
}

BackendKind cuda() {
  return {[] { return loader::make_gpu_backend(job_on_first_gpu()); }};
}

INSTANTIATE_TEST_SUITE_P(Cuda, BackendContract, ::testing::Values(NamedKind{"cuda", cuda}));

TEST(GpuBackend, LegacyArenaIsResidentAndHasAHandle) {
  ipc::Job job = job_on_first_gpu();
  job.transport = "legacy";
  const auto backend = loader::make_gpu_backend(job);
  ASSERT_TRUE(backend.ok()) << backend.status().to_string();
  const CodedPlanes coded = make_coded_planes(64, 512, 1, 3);
  const uint64_t granularity = (*backend)->granularity_bytes();
  ASSERT_TRUE((*backend)->allocate({(coded.arena.size() + granularity - 1) / granularity * granularity}).ok());
  ASSERT_TRUE(upload_all(**backend, coded.arena).ok());
  const auto shares = (*backend)->seal();
  ASSERT_TRUE(shares.ok()) << shares.status().to_string();
  EXPECT_THAT(shares->chunks, IsEmpty());
  EXPECT_EQ(shares->ipc_handle.size(), ipc::kIpcHandleBytes);
  const auto hashes = (*backend)->hash_blocks(coded.arena.size(), 1, [](uint64_t) {});
  ASSERT_TRUE(hashes.ok()) << hashes.status().to_string();
  EXPECT_EQ(*hashes, store::block_hashes(coded.arena, 1));
  EXPECT_TRUE((*backend)->check_f12(coded.planes, 1, [](uint64_t) {}).ok());
}

TEST(GpuBackend, CO_144_UnknownGpuIsNamed) {
  ipc::Job job = job_on_first_gpu();
  job.device = "GPU-00000000-0000-0000-0000-000000000000";
  const auto backend = loader::make_gpu_backend(job);
  EXPECT_EQ(backend.status().code(), StatusCode::kNotFound) << backend.status().to_string();
}

TEST(GpuProbe, CO_046_CO_068_EveryGpuSharesAGranule) {
  const ipc::ProbeReply reply = loader::probe_gpus(true);
  EXPECT_EQ(reply.problem, "");
  EXPECT_GE(reply.cuda_version, 13000U);
  ASSERT_THAT(reply.gpus, Not(IsEmpty()));
  for (const ipc::GpuSummary& gpu : reply.gpus) {
    EXPECT_EQ(gpu.problem, "");
    EXPECT_EQ(gpu.uuid.substr(0, 4), "GPU-");
    EXPECT_TRUE(gpu.vmm && gpu.fd_handles);
    EXPECT_EQ(gpu.read_only_map, 1);
    EXPECT_EQ(gpu.granularity_bytes, uint64_t{2} << 20);
    EXPECT_GT(gpu.total_bytes, uint64_t{1} << 30);
    if (reply.nvml_problem.empty()) {
      EXPECT_TRUE(gpu.nvml_known);
      EXPECT_GE(gpu.minor, 0);
      EXPECT_GT(gpu.free_bytes, 0U);
    }
  }
}

/// A bundle with a section of several pieces, and a tensor that is not coded.
std::string packed(const TempDir& folder) {
  make_bundle(folder / "m.wpk", {4, 3, 2048, 2048, Encoding::kF12});
  return folder / "m.wpk";
}

ipc::Job load_job(const std::string& path) {
  ipc::Job job = make_job(path);
  job.backend = "cuda";
  job.device = job_on_first_gpu().device;
  job.chunk_bytes = uint64_t{8} << 20;
  job.threads = 8;
  return job;
}

TEST(GpuLoader, LoadedChunksPassALaterVerification) {
  const TempDir folder;
  const std::string path = packed(folder);
  LoaderProgram loader(WEIGHTD_LOADER_PROGRAM);
  Outcome loaded = loader.run(load_job(path), opened(path));
  ASSERT_TRUE(loaded.status.ok()) << loaded.status.to_string();
  EXPECT_EQ(loader.wait(), 0);
  EXPECT_GE(loaded.chunks.size(), 3U);
  EXPECT_EQ(loaded.chunks.size(), loaded.result.chunk_bytes.size());

  // Its maker is gone; the memory is not.
  std::vector<UniqueFd> fds;
  fds.push_back(std::move(loaded.table));
  for (UniqueFd& chunk : loaded.chunks) fds.push_back(std::move(chunk));
  ipc::Job job = load_job(path);
  job.kind = ipc::VerifyJob{loaded.result.chunk_bytes, loaded.plan.arena_bytes};
  job.fd_count = static_cast<uint32_t>(fds.size());
  LoaderProgram verifier(WEIGHTD_LOADER_PROGRAM);
  const Outcome verified = verifier.run(job, std::move(fds));
  ASSERT_TRUE(verified.status.ok()) << verified.status.to_string();
  EXPECT_EQ(verified.verified.blocks, loaded.plan.arena_bytes >> 20);
  EXPECT_THAT(verified.verified.bad_blocks, IsEmpty());
  EXPECT_EQ(verifier.wait(), 0);
}

TEST(GpuLoader, LegacyOwnerStaysUntilTheDaemonLetsGo) {
  const TempDir folder;
  const std::string path = packed(folder);
  ipc::Job job = load_job(path);
  job.transport = "legacy";
  LoaderProgram loader(WEIGHTD_LOADER_PROGRAM);
  const Outcome loaded = loader.run(job, opened(path));
  ASSERT_TRUE(loaded.status.ok()) << loaded.status.to_string();
  EXPECT_THAT(loaded.chunks, IsEmpty());
  EXPECT_EQ(loaded.result.ipc_handle.size(), ipc::kIpcHandleBytes);
  ASSERT_EQ(loaded.result.chunk_bytes.size(), 1U);
  {
    const auto driver = ipc::cuda_driver();
    ASSERT_TRUE(driver.ok());
    const auto gpu = ipc::find_gpu(**driver, job.device);
    ASSERT_TRUE(gpu.ok());
    const auto context = ipc::PrimaryContext::retain(**driver, gpu->handle);
    ASSERT_TRUE(context.ok());
    const ipc::PrimaryContext::Current current(*context);
    const auto view = ipc::LegacyArena::open(**driver, loaded.result.ipc_handle, loaded.result.chunk_bytes.front());
    EXPECT_TRUE(view.ok()) << view.status().to_string();
  }
  EXPECT_TRUE(loader.runs());
  loader.hang_up();
  EXPECT_EQ(loader.wait(), 0);
}

TEST(GpuLoader, CO_103_DamagedFileIsRefusedBeforeAnythingIsHandedOver) {
  const TempDir folder;
  const std::string path = packed(folder);
  std::string bytes = read_file(path);
  bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 1);
  write_file(path, bytes);
  LoaderProgram loader(WEIGHTD_LOADER_PROGRAM);
  const Outcome outcome = loader.run(load_job(path), opened(path));
  EXPECT_EQ(outcome.status.code(), StatusCode::kCorruption) << outcome.status.to_string();
  EXPECT_THAT(outcome.chunks, IsEmpty());
  EXPECT_EQ(loader.wait(), 1);
}

}  // namespace
}  // namespace weightd::testing
