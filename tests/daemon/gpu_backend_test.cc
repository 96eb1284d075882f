// SPDX-License-Identifier: Apache-2.0
// The loader on the GPUs of this machine.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "daemon/loader/gpu.h"
#include "ipc/cuda_driver.h"
#include "ipc/messages.h"
#include "store/hash.h"
#include "tests/daemon/backend_contract.h"

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
  return {"cuda", [] { return loader::make_gpu_backend(job_on_first_gpu()); }};
}

INSTANTIATE_TEST_SUITE_P(Cuda, BackendContract, ::testing::Values(cuda));

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

}  // namespace
}  // namespace weightd::testing
