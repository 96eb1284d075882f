// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm_plan.h"

#include <gtest/gtest.h>

#include "kernels/gemm_shared.h"

namespace weightd::kernels {
namespace {

constexpr DeviceTraits kH200{132, 232448, true};
constexpr DeviceTraits kA100{108, 166912, false};
constexpr DeviceTraits kSmall{58, 101376, false};
constexpr DeviceTraits kBlackwell{188, 101376, true};

GemmPlan plan_or_fail(const DeviceTraits& device, const GemmRequest& request) {
  Result<GemmPlan> plan = plan_gemm(device, request);
  EXPECT_TRUE(plan.ok()) << plan.status().to_string();
  return plan.ok() ? *plan : GemmPlan{};
}

void expect_legal(const DeviceTraits& device, const GemmRequest& request) {
  const GemmPlan plan = plan_or_fail(device, request);
  SCOPED_TRACE(plan.to_string());
  const uint64_t units = (request.n + 15) / 16;
  EXPECT_GE(uint64_t{plan.blocks} * plan.units_per_block, units);
  EXPECT_LT(uint64_t{plan.blocks - 1} * plan.units_per_block, units) << "the last block has work";
  EXPECT_LE(plan.blocks, device.sm_count);
  EXPECT_LE(plan.units_per_pass * plan.slices, kMaxConsumerWarps);
  EXPECT_GE(plan.units_per_pass, 1U);
  EXPECT_TRUE(plan.slices == 1 || plan.passes() == 1);
  EXPECT_EQ(plan.tiles_per_stage % plan.slices, 0U);
  EXPECT_GE(plan.stages, 2U);
  EXPECT_LE(2 * plan.stages + 4, kMaxBarriers);
  EXPECT_LE(plan.shared_bytes, device.shared_bytes);
  EXPECT_LE(plan.tiles_per_stage, 32U) << "one lane of the producer starts each x tile";
  EXPECT_LE(plan.token_block, kMaxTokenBlock);
  EXPECT_TRUE(plan.kernel == GemmKernel::kDirect || (device.bulk_copy && request.tensor_copy));
}

TEST(GemmPlan, EveryShapeHasALegalPlanOnEveryDevice) {
  for (const DeviceTraits& device : {kH200, kA100, kSmall, kBlackwell}) {
    for (const uint64_t n : {1, 16, 17, 500, 2048, 4096, 6144, 8192, 14336, 28672, 128256, 256000, 1000000}) {
      for (const uint64_t k : {1, 64, 65, 512, 2000, 4096, 8192, 14336, 28672, 200000}) {
        for (const uint64_t m : {1, 8, 9, 16, 32, 33, 64, 65, 4096}) {
          for (const bool tensor_copy : {false, true}) {
            for (const uint32_t tile_bytes : {1536, 2048}) {
              GemmRequest request{n, k, m, tensor_copy, false, tile_bytes};
              expect_legal(device, request);
            }
          }
        }
      }
    }
  }
}

TEST(GemmPlan, TheOrderOfTheSumIsAFunctionOfTheShape) {
  for (const uint64_t n : {100, 4096, 6144, 14336, 128256}) {
    for (const uint64_t k : {64, 700, 4096, 14336}) {
      const uint32_t slices = plan_or_fail(kH200, {n, k, 1, true}).slices;
      for (const uint64_t m : {2, 16, 33, 64, 5000}) {
        EXPECT_EQ(plan_or_fail(kH200, {n, k, m, true}).slices, slices);
        EXPECT_EQ(plan_or_fail(kH200, {n, k, m, false}).slices, slices);
        EXPECT_EQ(plan_or_fail(kH200, {n, k, m, true, true, 2048}).slices, slices);
      }
    }
  }
}

TEST(GemmPlan, UsesTheBulkKernelWhereItCan) {
  EXPECT_EQ(plan_or_fail(kH200, {4096, 4096, 16, true}).kernel, GemmKernel::kBulk);
  EXPECT_EQ(plan_or_fail(kH200, {4096, 4096, 16, false}).kernel, GemmKernel::kDirect);
  EXPECT_EQ(plan_or_fail(kA100, {4096, 4096, 16, true}).kernel, GemmKernel::kDirect);
  EXPECT_EQ(plan_or_fail(kH200, {4096, 0, 16, true}).kernel, GemmKernel::kDirect);
}

TEST(GemmPlan, SpreadsWholeUnitsOverTheBlocks) {
  const GemmPlan plan = plan_or_fail(kH200, {14336, 4096, 1, true});
  EXPECT_EQ(plan.units_per_block, 7U);  // 896 units over 132
  EXPECT_EQ(plan.blocks, 128U);
  EXPECT_EQ(plan.slices, 2U);
  EXPECT_EQ(plan.passes(), 1U);
  const GemmPlan head = plan_or_fail(kH200, {128256, 4096, 1, true});
  EXPECT_EQ(head.units_per_block, 61U);
  EXPECT_EQ(head.passes(), 5U);
  EXPECT_EQ(head.units_per_pass, 13U);
}

TEST(GemmPlan, PrintsItself) {
  const GemmPlan plan = plan_or_fail(kA100, {4096, 4096, 5, true});
  EXPECT_EQ(plan.to_string(), "direct 4096x4096: 86 blocks x 3 units, 3x5 warps, 10 tiles x 2 stages, 8 tokens, 35 KiB");
}

TEST(GemmPlan, RefusesWhatCannotBe) {
  EXPECT_EQ(plan_gemm(kH200, {uint64_t{1} << 32, 64, 1, true}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(plan_gemm(kH200, {64, uint64_t{1} << 32, 1, true}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(plan_gemm(DeviceTraits{}, {64, 64, 1, true}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(plan_gemm(DeviceTraits{4, 1024, false}, {64, 64, 1, true}).status().code(), StatusCode::kUnsupported);
}

}  // namespace
}  // namespace weightd::kernels
