// SPDX-License-Identifier: Apache-2.0
#include "ipc/cuda_driver.h"

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <utility>

#include "tests/support/fake_cuda.h"

namespace weightd::ipc {
namespace {

using ::testing::Contains;
using testing::FakeCuda;
using testing::FakeGpu;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

/// CUDA_VISIBLE_DEVICES for one test.
class VisibleDevices {
 public:
  explicit VisibleDevices(const char* value) { ::setenv("CUDA_VISIBLE_DEVICES", value, 1); }
  ~VisibleDevices() { ::unsetenv("CUDA_VISIBLE_DEVICES"); }
};

TEST(CudaDriver, MachineWithoutDriverSaysSo) {
  void* library = ::dlopen("libcuda.so.1", RTLD_NOW);
  const auto first = cuda_driver();
  if (library != nullptr) {
    EXPECT_TRUE(first.ok() || first.status().code() == StatusCode::kUnavailable) << first.status().to_string();
    return;
  }
  ASSERT_FALSE(first.ok());
  EXPECT_EQ(first.status().code(), StatusCode::kUnavailable);
  EXPECT_THAT(first.status().message(), StartsWith("no CUDA driver: libcuda.so.1"));
  EXPECT_EQ(cuda_driver().status().message(), first.status().message());
}

TEST(CudaDriver, StatusHasCallTextAndName) {
  FakeCuda fake;
  EXPECT_TRUE(status_from_driver(fake.driver(), CUDA_SUCCESS, "cuMemMap").ok());
  const Status memory = status_from_driver(fake.driver(), CUDA_ERROR_OUT_OF_MEMORY, "cuMemCreate");
  EXPECT_EQ(memory.code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(memory.message(), "cuMemCreate: out of memory (CUDA_ERROR_OUT_OF_MEMORY, 2)");
  EXPECT_EQ(status_from_driver(fake.driver(), CUDA_ERROR_ILLEGAL_ADDRESS, "cuCtxSynchronize").code(), StatusCode::kCuda);
  EXPECT_EQ(status_from_driver(fake.driver(), static_cast<CUresult>(998), "cuMemMap").message(), "cuMemMap: error (unknown, 998)");
}

TEST(CudaDriver, GpusAreDescribedWithoutAContext) {
  FakeCuda fake({{"NVIDIA H200", uint64_t{141} << 30, true, true, 9, 0}, {"Old\x1b[31m", uint64_t{2} << 30, false, false, 3, 7}});
  const auto gpus = visible_gpus(fake.driver());
  ASSERT_TRUE(gpus.ok()) << gpus.status().to_string();
  ASSERT_EQ(gpus->size(), 2U);
  EXPECT_EQ((*gpus)[0].uuid, "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f");
  EXPECT_EQ((*gpus)[0].name, "NVIDIA H200");
  EXPECT_EQ((*gpus)[0].total_bytes, uint64_t{141} << 30);
  EXPECT_EQ((*gpus)[0].compute_major, 9U);
  EXPECT_TRUE((*gpus)[0].vmm);
  EXPECT_TRUE((*gpus)[0].fd_handles);
  EXPECT_EQ((*gpus)[1].uuid, "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f");
  EXPECT_EQ((*gpus)[1].name, "Old\\x1b[31m");
  EXPECT_EQ((*gpus)[1].compute_major, 3U);
  EXPECT_EQ((*gpus)[1].compute_minor, 7U);
  EXPECT_FALSE((*gpus)[1].vmm);
  EXPECT_FALSE((*gpus)[1].fd_handles);
  EXPECT_THAT(fake.calls(), Not(Contains(::testing::AnyOf("cuDevicePrimaryCtxRetain", "cuCtxPushCurrent"))));
  EXPECT_EQ(fake.live(), FakeCuda::Live{});
}

TEST(CudaDriver, CO_147_InstanceOfADividedGpuHasItsOwnPrefix) {
  FakeCuda fake({{"NVIDIA A100-SXM4-40GB MIG 1g.5gb", uint64_t{5} << 30, true, true, 8, 0}});
  const auto gpu = find_gpu(fake.driver(), "MIG-00010203-0405-0607-0809-0a0b0c0d0e0f");
  ASSERT_TRUE(gpu.ok()) << gpu.status().to_string();
  EXPECT_FALSE(find_gpu(fake.driver(), FakeCuda::uuid(0)).ok());
}

TEST(CudaDriver, CO_144_GpuIsFoundByUuidWhateverItsNumber) {
  FakeCuda fake({FakeGpu(), FakeGpu()});
  const auto second = find_gpu(fake.driver(), FakeCuda::uuid(1));
  ASSERT_TRUE(second.ok()) << second.status().to_string();
  EXPECT_EQ(second->handle, 1);
}

TEST(CudaDriver, CO_144_HiddenGpuIsNamedWithThoseThatAreVisible) {
  FakeCuda fake({FakeGpu(), FakeGpu()});
  const auto missing = find_gpu(fake.driver(), FakeCuda::uuid(2));
  EXPECT_EQ(missing.status().code(), StatusCode::kNotFound);
  EXPECT_EQ(missing.status().message(),
            "no GPU " + FakeCuda::uuid(2) + " here; visible: " + FakeCuda::uuid(0) + ", " + FakeCuda::uuid(1));
  const VisibleDevices restricted("0,99,\n1");
  EXPECT_THAT(find_gpu(fake.driver(), FakeCuda::uuid(2)).status().message(), HasSubstr("(CUDA_VISIBLE_DEVICES is '0,99,\\n1')"));
}

TEST(CudaDriver, CO_147_NoVisibleGpuIsAnEmptyListNotAGuess) {
  FakeCuda fake(std::vector<FakeGpu>{});
  const auto gpus = visible_gpus(fake.driver());
  ASSERT_TRUE(gpus.ok());
  EXPECT_TRUE(gpus->empty());
  EXPECT_THAT(find_gpu(fake.driver(), "GPU-\x01").status().message(), StartsWith("no GPU GPU-\\x01 here; visible: none"));
}

TEST(CudaDriver, EveryCallOfADescriptionMayFail) {
  FakeCuda fake;
  int n = 0;
  for (bool failed = true; failed;) {
    fake.fail_call(++n, CUDA_ERROR_NOT_SUPPORTED);
    const auto gpus = visible_gpus(fake.driver());
    failed = fake.failed();
    EXPECT_EQ(gpus.ok(), !failed);
    if (failed) {
      EXPECT_THAT(gpus.status().message(), HasSubstr("operation not supported"));
    }
  }
  EXPECT_EQ(n, 10);  // count, device, name, uuid, memory and four attributes; then none fails
}

TEST(PrimaryContext, IsReleasedOnce) {
  FakeCuda fake;
  {
    auto context = PrimaryContext::retain(fake.driver(), 0);
    ASSERT_TRUE(context.ok()) << context.status().to_string();
    EXPECT_EQ(fake.live().contexts, 1);
    PrimaryContext moved = *std::move(context);
    PrimaryContext assigned;
    assigned = std::move(moved);
    EXPECT_EQ(fake.live().contexts, 1);
    auto second = PrimaryContext::retain(fake.driver(), 0);
    ASSERT_TRUE(second.ok());
    assigned = *std::move(second);
    EXPECT_EQ(fake.live().contexts, 1);
  }
  EXPECT_EQ(fake.live(), FakeCuda::Live{});
  EXPECT_THAT(fake.misuse(), ::testing::IsEmpty());
  fake.fail_entry("cuDevicePrimaryCtxRetain", 1, CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(PrimaryContext::retain(fake.driver(), 0).status().code(), StatusCode::kResourceExhausted);
}

TEST(PrimaryContext, IsCurrentWhileAskedFor) {
  FakeCuda fake;
  auto context = PrimaryContext::retain(fake.driver(), 0);
  ASSERT_TRUE(context.ok());
  size_t free_bytes = 0, total_bytes = 0;
  EXPECT_EQ(fake.driver().mem_get_info(&free_bytes, &total_bytes), CUDA_ERROR_INVALID_CONTEXT);
  {
    const PrimaryContext::Current current(*context);
    EXPECT_TRUE(current.status().ok());
    EXPECT_EQ(fake.driver().mem_get_info(&free_bytes, &total_bytes), CUDA_SUCCESS);
    {
      const PrimaryContext::Current again(*context);
      EXPECT_EQ(fake.live().current, 2);
    }
    EXPECT_EQ(fake.driver().mem_get_info(&free_bytes, &total_bytes), CUDA_SUCCESS);
  }
  EXPECT_EQ(fake.live().current, 0);
  fake.fail_entry("cuCtxPushCurrent", 1, CUDA_ERROR_INVALID_CONTEXT);
  {
    const PrimaryContext::Current refused(*context);
    EXPECT_EQ(refused.status().code(), StatusCode::kCuda);
  }
  EXPECT_THAT(fake.misuse(), ::testing::IsEmpty());
}

}  // namespace
}  // namespace weightd::ipc
