// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm_plan.h"

#include <gtest/gtest.h>

#include "kernels/gemm_shared.h"

namespace weightd::kernels {
namespace {

constexpr DeviceTraits kH200{132, 232448, true, true, 30};
constexpr DeviceTraits kA100{108, 166912, false};
constexpr DeviceTraits kSmall{58, 101376, false};
constexpr DeviceTraits kBlackwell{188, 101376, true};

GemmPlan plan_or_fail(const DeviceTraits& device, const GemmRequest& request) {
  Result<GemmPlan> plan = plan_gemm(device, request);
  EXPECT_TRUE(plan.ok()) << plan.status().to_string();
  return plan.ok() ? *plan : GemmPlan{};
}

/// One warp of the loading warpgroup starts the weights of a stage, one lane a unit; registers and barriers are what the kernel
/// has.
void expect_legal_wgmma(const DeviceTraits& device, const GemmRequest& request, const GemmPlan& plan) {
  SCOPED_TRACE(plan.to_string());
  const uint64_t units = (request.n + 15) / 16;
  const uint32_t slots = 4 * plan.warpgroups * plan.units_per_warp;
  ASSERT_EQ(plan.kernel, GemmKernel::kWgmma);
  EXPECT_TRUE(device.wgmma && request.tensor_copy);
  EXPECT_GE(uint64_t{plan.blocks} * plan.units_per_block, units);
  EXPECT_LT((uint64_t{plan.blocks} / plan.sharing - 1) * plan.sharing * plan.units_per_block, units) << "the last cluster has work";
  EXPECT_EQ(plan.blocks % plan.sharing, 0U);
  const uint32_t cluster = plan.splits * plan.sharing;
  ASSERT_TRUE(cluster == 1 || cluster == 2 || cluster == 4);
  const uint32_t at_once = cluster == 4 ? device.clusters_of_4 : device.sm_count / cluster;
  EXPECT_LE(plan.blocks / plan.sharing, at_once) << "more would take a second round";
  EXPECT_EQ(plan.slices % plan.splits, 0U);
  EXPECT_EQ(plan.warpgroups % plan.warp_slices(), 0U);
  EXPECT_LE(plan.units_per_pass, slots / plan.warp_slices());
  EXPECT_LE(plan.units_per_pass, 32U);
  EXPECT_TRUE(plan.slices == 1 || plan.passes() == 1);
  EXPECT_EQ(plan.stages % plan.warp_slices(), 0U) << "a slot is of one slice";
  EXPECT_GE(plan.stages, 2U);
  EXPECT_LE(plan.stages, kMaxWgmmaStages);
  EXPECT_LE(plan.tiles_per_stage, 32U);
  EXPECT_TRUE(plan.token_block == 64 || plan.token_block == 128 || (plan.token_block == 256 && slots == 8));
  EXPECT_TRUE(!plan.tensor_weights || plan.units_per_block % plan.units_per_pass == 0) << "a copy brings whole passes";
  EXPECT_GE(plan.token_block / 8, plan.splits) << "each block of a cluster sums whole token tiles";
  EXPECT_GE(plan.token_block / plan.sharing, 8U) << "the swizzle pattern has 8 rows";
  const WgmmaShared shared(plan, request.tile_bytes);
  EXPECT_EQ(plan.shared_bytes, shared.total_bytes);
  EXPECT_LE(plan.shared_bytes, device.shared_bytes);
  EXPECT_EQ(shared.weights % kSwizzleAlign, 0U);
  EXPECT_EQ(shared.records % 16, 0U);
  EXPECT_EQ(shared.scratch % 16, 0U);
  EXPECT_EQ(shared.barriers % 8, 0U);
  if (plan.slices > 1) {
    EXPECT_GE(shared.records, plan.warp_slices() * plan.units_per_pass * plan.token_block * 64) << "room for the sums";
  }
  EXPECT_LT(plan.tiles_per_stage * (plan.units_per_pass * request.tile_bytes + plan.token_block * kXRowBytes), 1U << 20)
      << "what a barrier can expect";
}

void expect_legal(const DeviceTraits& device, const GemmRequest& request) {
  const GemmPlan plan = plan_or_fail(device, request);
  if (plan.kernel == GemmKernel::kWgmma) return expect_legal_wgmma(device, request, plan);
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

TEST(GemmPlan, EveryLegalCutOfTheWarpgroupKernelIsLegal) {
  int legal = 0;
  for (const uint64_t n : {1, 16, 500, 4096, 6144, 14336, 28672, 128256}) {
    for (const uint64_t k : {1, 64, 520, 4096, 28672}) {
      for (const uint64_t m : {1, 33, 64, 128, 500}) {
        for (const uint32_t units_per_warp : {1, 2}) {
          for (const uint32_t splits : {1, 2, 4}) {
            for (const uint32_t sharing : {1, 2, 4}) {
              for (const uint32_t tiles : {0, 1, 2, 5}) {
                for (const uint32_t warpgroups : {2, 4}) {
                  for (const bool at_once : {false, true}) {
                    const GemmRequest request{n, k, m, true};
                    const Result<GemmPlan> plan =
                        plan_wgmma(kH200, request, {warpgroups, units_per_warp, splits, sharing, tiles, 0, 0, !at_once, at_once});
                    if (!plan.ok()) continue;
                    expect_legal_wgmma(kH200, request, *plan);
                    ++legal;
                  }
                }
              }
            }
          }
        }
      }
    }
  }
  EXPECT_GT(legal, 2000);
}

TEST(GemmPlan, RefusesCutsThatNoKernelHas) {
  const GemmRequest request{4096, 4096, 64, true};
  for (const WgmmaCut& cut : {WgmmaCut{3, 1},
                              {4, 2},
                              {1, 2},
                              {0, 0},
                              {2, 2, 3},
                              {4, 1, 0},
                              {4, 1, 1, 0},
                              {4, 1, 4, 4},
                              {4, 1, 8},
                              WgmmaCut{4, 1, 1, 1, 17},
                              {4, 1, 1, 1, 1, 17},
                              {4, 1, 1, 1, 1, 1},
                              {4, 1, 1, 1, 1, 3},
                              {4, 1, 1, 1, 0, 0, 32},
                              {4, 1, 1, 1, 0, 0, 96},
                              {4, 1, 1, 1, 0, 0, 256},
                              {2, 2, 1, 1, 0, 0, 256},
                              {2, 1, 1, 1, 0, 0, 512}}) {
    EXPECT_EQ(plan_wgmma(kH200, request, cut).status().code(), StatusCode::kUnsupported);
  }
  EXPECT_EQ(plan_wgmma(kBlackwell, request, {}).status().code(), StatusCode::kUnsupported);
  EXPECT_EQ(plan_wgmma(kH200, {4096, 4096, 64, false}, {}).status().code(), StatusCode::kUnsupported);
  EXPECT_EQ(plan_wgmma(kH200, {4096, 0, 64, true}, {}).status().code(), StatusCode::kUnsupported);
  EXPECT_EQ(plan_wgmma(kH200, {128256, 4096, 64, true}, {4, 1, 2}).status().code(), StatusCode::kUnsupported)
      << "a block would make several passes";
}

TEST(GemmPlan, ClustersOf4AreAsManyAsTheDeviceRunsAtOnce) {
  const Result<GemmPlan> plan = plan_wgmma(kH200, {4096, 4096, 64, true}, {4, 1, 4});
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->units_per_block, 9U);  // 256 units over 30
  EXPECT_EQ(plan->blocks, 29U);
  DeviceTraits none = kH200;
  none.clusters_of_4 = 0;
  EXPECT_EQ(plan_wgmma(none, {4096, 4096, 64, true}, {4, 1, 4}).status().code(), StatusCode::kUnsupported);
}

TEST(GemmPlan, BlocksOfAllTokensAtOnceHaveMoreUnits) {
  const GemmRequest request{14336, 4096, 256, true};
  EXPECT_EQ(plan_wgmma(kH200, request, {4, 1})->units_per_block, 7U);
  EXPECT_EQ(plan_wgmma(kH200, request, {4, 1, 1, 1, 0, 0, 128, true, true})->units_per_block, 14U);
}

TEST(GemmPlan, TheOrderOfTheSumIsAFunctionOfTheShape) {
  for (const uint64_t n : {100, 4096, 6144, 14336, 128256}) {
    for (const uint64_t k : {64, 700, 4096, 14336}) {
      GemmRequest request{n, k, 1, true};
      request.kernel = GemmKernel::kBulk;
      const uint32_t streaming = plan_or_fail(kH200, request).slices;
      request.kernel = GemmKernel::kWgmma;
      const GemmPlan wgmma = plan_or_fail(kH200, request);
      for (const uint64_t m : {2, 16, 33, 64, 128, 5000}) {
        for (const uint32_t tile_bytes : {1536, 2048}) {
          GemmRequest other{n, k, m, true, true, tile_bytes};
          other.kernel = GemmKernel::kWgmma;
          EXPECT_EQ(plan_or_fail(kH200, other).slices, wgmma.slices);
          EXPECT_EQ(plan_or_fail(kH200, other).splits, wgmma.splits);
          EXPECT_TRUE(wgmma.warp_slices() == 1 || plan_or_fail(kH200, other).tiles_per_stage == wgmma.tiles_per_stage);
          for (const GemmKernel kernel : {GemmKernel::kDirect, GemmKernel::kBulk}) {
            other.kernel = kernel;
            EXPECT_EQ(plan_or_fail(kH200, other).slices, streaming);
          }
        }
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

TEST(GemmPlan, UsesTheWarpgroupKernelForManyTokens) {
  EXPECT_EQ(plan_or_fail(kH200, {14336, 4096, 32, true}).kernel, GemmKernel::kBulk);
  EXPECT_EQ(plan_or_fail(kH200, {14336, 4096, 33, true}).kernel, GemmKernel::kWgmma);
  EXPECT_EQ(plan_or_fail(kH200, {6144, 4096, 64, true}).kernel, GemmKernel::kBulk) << "a short product: clusters cost more";
  EXPECT_EQ(plan_or_fail(kH200, {6144, 4096, 65, true}).kernel, GemmKernel::kWgmma);
  EXPECT_EQ(plan_or_fail(kH200, {4096, 14336, 64, true}).kernel, GemmKernel::kWgmma);
  EXPECT_EQ(plan_or_fail(kH200, {4096, 4096, 33, false}).kernel, GemmKernel::kDirect);
  EXPECT_EQ(plan_or_fail(kH200, {4096, 0, 33, true}).kernel, GemmKernel::kDirect);
  EXPECT_EQ(plan_or_fail(kBlackwell, {4096, 4096, 128, true}).kernel, GemmKernel::kBulk);
  EXPECT_EQ(plan_or_fail(kH200, {4096, 4000000, 64, true}).kernel, GemmKernel::kDirect) << "the records fill the shared memory";
}

TEST(GemmPlan, UsesWhatWasMeasuredFasterOnLayersOfLargeModels) {
  struct Layer {
    uint64_t n, k;
    GemmKernel at_64;
  };
  for (const Layer& layer : {Layer{4096, 4096, GemmKernel::kBulk},
                             {6144, 4096, GemmKernel::kBulk},
                             {14336, 4096, GemmKernel::kWgmma},
                             {28672, 4096, GemmKernel::kWgmma},
                             {4096, 14336, GemmKernel::kWgmma},
                             {8192, 8192, GemmKernel::kWgmma},
                             {10240, 8192, GemmKernel::kWgmma},
                             {28672, 8192, GemmKernel::kWgmma},
                             {8192, 28672, GemmKernel::kWgmma}}) {
    SCOPED_TRACE(std::to_string(layer.n) + "x" + std::to_string(layer.k));
    EXPECT_EQ(plan_or_fail(kH200, {layer.n, layer.k, 32, true}).kernel, GemmKernel::kBulk);
    for (const uint64_t m : {33, 64}) EXPECT_EQ(plan_or_fail(kH200, {layer.n, layer.k, m, true}).kernel, layer.at_64);
    for (const uint64_t m : {65, 128, 256}) {
      EXPECT_EQ(plan_or_fail(kH200, {layer.n, layer.k, m, true}).kernel, GemmKernel::kWgmma);
    }
  }
}

TEST(GemmPlan, AGivenKernelOrNone) {
  GemmRequest request{4096, 4096, 64, true};
  for (const GemmKernel kernel : {GemmKernel::kDirect, GemmKernel::kBulk, GemmKernel::kWgmma}) {
    request.kernel = kernel;
    EXPECT_EQ(plan_or_fail(kH200, request).kernel, kernel);
  }
  request.kernel = GemmKernel::kWgmma;
  EXPECT_EQ(plan_gemm(kBlackwell, request).status().code(), StatusCode::kUnsupported);
  request.kernel = GemmKernel::kBulk;
  EXPECT_EQ(plan_gemm(kA100, request).status().code(), StatusCode::kUnsupported);
  request.k = 4000000;
  EXPECT_EQ(plan_gemm(kH200, request).status().code(), StatusCode::kUnsupported);
  request = {4096, 4096, 64, false};
  request.kernel = GemmKernel::kBulk;
  EXPECT_EQ(plan_gemm(kH200, request).status().code(), StatusCode::kUnsupported);
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
  const Result<GemmPlan> wgmma = plan_wgmma(kH200, {6144, 4096, 64, true, true}, {4, 1, 2, 1, 1, 10});
  ASSERT_TRUE(wgmma.ok());
  EXPECT_EQ(wgmma->to_string(),
            "wgmma 6144x4096: 64 blocks x 6 units, 6 a pass, 4 warpgroups x 1, 2 splits x 2 slices, x shared by 1, 1 tiles x 10 "
            "stages, 64 tokens, 187 KiB, overlapped");
  const Result<GemmPlan> head = plan_wgmma(kH200, {128256, 4096, 64, true}, {4, 1, 1, 1, 1, 4});
  ASSERT_TRUE(head.ok());
  EXPECT_EQ(
      head->to_string(),
      "wgmma 128256x4096: 132 blocks x 61 units, 16 a pass, 4 warpgroups x 1, 1 splits x 1 slices, x shared by 1, 1 tiles x 4 "
      "stages, 64 tokens, 152 KiB, copies by unit");
}

TEST(GemmPlan, RefusesWhatCannotBe) {
  EXPECT_EQ(plan_gemm(kH200, {uint64_t{1} << 32, 64, 1, true}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(plan_gemm(kH200, {64, uint64_t{1} << 32, 1, true}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(plan_gemm(DeviceTraits{}, {64, 64, 1, true}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(plan_gemm(DeviceTraits{4, 1024, false}, {64, 64, 1, true}).status().code(), StatusCode::kUnsupported);
}

}  // namespace
}  // namespace weightd::kernels
