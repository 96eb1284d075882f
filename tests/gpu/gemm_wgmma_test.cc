// SPDX-License-Identifier: Apache-2.0
// The warpgroup kernel under every way to cut a product. What a product must be whatever the kernel is in gemm_test.cc.
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "tests/gpu/gemm_runner.h"
#include "tests/gpu/raw16.h"
#include "tests/gpu/test_matrix.h"

namespace weightd::kernels {
namespace {

using testing::check_bound;
using testing::DeviceF12;
using testing::DeviceMemory;
using testing::DeviceX;
using testing::exact_product;
using testing::HostF12;
using testing::Runner;
using testing::small_integers;
using testing::Words;

WgmmaCut make_cut(uint32_t warpgroups, uint32_t units_per_warp, uint32_t splits, uint32_t sharing, bool tensor_weights = true) {
  WgmmaCut cut;
  cut.warpgroups = warpgroups;
  cut.units_per_warp = units_per_warp;
  cut.splits = splits;
  cut.sharing = sharing;
  cut.tensor_weights = tensor_weights;
  return cut;
}

const WgmmaCut kCuts[] = {make_cut(4, 1, 1, 1), make_cut(4, 1, 1, 1, false), make_cut(4, 1, 2, 1), make_cut(4, 1, 2, 1, false),
                          make_cut(4, 1, 4, 1), make_cut(4, 1, 1, 2),        make_cut(4, 1, 2, 2), make_cut(4, 1, 1, 4),
                          make_cut(2, 2, 1, 1), make_cut(2, 2, 2, 1),        make_cut(2, 2, 4, 1), make_cut(2, 2, 1, 2),
                          make_cut(2, 2, 2, 2), make_cut(2, 1, 1, 1),        make_cut(2, 1, 2, 1), make_cut(2, 1, 4, 1),
                          make_cut(2, 1, 1, 2), make_cut(2, 1, 2, 2, false)};

/// Few multiprocessors give blocks of small matrices many units.
DeviceTraits small_device(const Runner& runner, uint32_t sm_count) {
  DeviceTraits traits = runner.device.traits;
  traits.sm_count = sm_count;
  traits.clusters_of_4 = sm_count / 4;
  return traits;
}

/// The plans of all cuts that are legal for the shape.
std::vector<GemmPlan> legal_plans(const Runner& runner, uint32_t sm_count, uint64_t n, uint64_t k, uint64_t m,
                                  uint32_t tile_bytes) {
  const DeviceTraits traits = small_device(runner, sm_count);
  std::vector<GemmPlan> plans;
  for (const WgmmaCut& cut : kCuts) {
    const Result<GemmPlan> plan = plan_wgmma(traits, {n, k, m, true, false, tile_bytes}, cut);
    if (plan.ok()) plans.push_back(*plan);
  }
  EXPECT_GE(plans.size(), 4U);
  return plans;
}

/// What decides the order of the sum.
std::tuple<uint32_t, uint32_t, uint32_t> order_of(const GemmPlan& plan) {
  return {plan.splits, plan.slices, plan.warp_slices() > 1 ? plan.tiles_per_stage : 0};
}

GemmPlan same_cut(const std::vector<GemmPlan>& plans, const GemmPlan& like) {
  for (const GemmPlan& plan : plans) {
    if (order_of(plan) == order_of(like) && plan.sharing == like.sharing && plan.warpgroups == like.warpgroups &&
        plan.units_per_warp == like.units_per_warp && plan.tensor_weights == like.tensor_weights) {
      return plan;
    }
  }
  ADD_FAILURE() << "the oracle has no plan like " << like.to_string();
  return like;
}

struct Case {
  uint32_t sm_count;
  uint64_t n, k, m;
};
const Case kCases[] = {{132, 1, 1, 1},       {132, 16, 64, 33},     {132, 17, 65, 8},    {16, 500, 200, 40},
                       {16, 1000, 512, 64},  {16, 2040, 1000, 65},  {16, 4100, 330, 32}, {132, 640, 2056, 130},
                       {16, 900, 4160, 128}, {132, 4096, 520, 100}, {16, 1500, 700, 200}};

TEST(GemmWgmma, SameBitsAsTheUncodedOracleUnderEveryCutAndEscapeRate) {
  const Runner runner;
  for (const Case& c : kCases) {
    const auto plans = legal_plans(runner, c.sm_count, c.n, c.k, c.m, 1536);
    const auto raw_plans = legal_plans(runner, c.sm_count, c.n, c.k, c.m, 2048);
    for (const double wild : {0.0, 2e-4, 1e-2, 0.2, 1.0}) {
      const Words w = testing::random_weights(c.n, c.k, wild, false, c.n * 7 + c.k);
      const Words x = testing::random_activations(c.m, c.k, c.n);
      const DeviceF12 coded(testing::encode(w));
      const DeviceMemory raw(testing::pack_raw16(w));
      const F12DeviceMatrix raw_matrix{raw.data(), nullptr, nullptr, nullptr, 0, c.n, c.k};
      const DeviceX device_x(x, static_cast<int64_t>((c.k + 7) / 8 * 8), 0);
      std::map<std::tuple<uint32_t, uint32_t, uint32_t>, std::vector<uint16_t>> by_order;
      for (const GemmPlan& plan : plans) {
        SCOPED_TRACE(plan.to_string() + " m " + std::to_string(c.m) + " wild " + std::to_string(wild));
        const auto y = runner.run(f12_gemm_kernels(), plan, coded.matrix(), device_x.view(), c.n);
        const auto oracle = runner.run(testing::raw16_gemm_kernels(), same_cut(raw_plans, plan), raw_matrix, device_x.view(), c.n);
        ASSERT_EQ(testing::first_difference(y, oracle, c.n), "");
        auto& first = by_order[order_of(plan)];
        if (first.empty()) first = y;
        ASSERT_EQ(testing::first_difference(y, first, c.n), "") << "two cuts with the same order of the sum";
      }
      ASSERT_TRUE(coded.fences_intact());
    }
  }
}

TEST(GemmWgmma, WithinTheStatedBoundUnderEveryCut) {
  const Runner runner;
  for (const Case& c : {Case{16, 1000, 512, 64}, {16, 700, 4104, 33}, {132, 300, 1000, 128}}) {
    const Words w = testing::random_weights(c.n, c.k, 1e-2, true, c.n * 11 + c.k);
    const Words x = testing::random_activations(c.m, c.k, c.n);
    const DeviceF12 coded(testing::encode(w));
    const DeviceX device_x(x, static_cast<int64_t>(c.k), 0);
    for (const GemmPlan& plan : legal_plans(runner, c.sm_count, c.n, c.k, c.m, 1536)) {
      const auto y = runner.run(f12_gemm_kernels(), plan, coded.matrix(), device_x.view(), c.n);
      ASSERT_EQ(check_bound(w, x, y, plan.slices), "") << plan.to_string();
    }
  }
}

/// Short rings, long stages, last stages that are not full: integers, so that the right answer is known to the last bit.
TEST(GemmWgmma, EveryRingGivesExactIntegers) {
  const Runner runner;
  constexpr uint64_t kRows = 16 * 16 * 14;
  for (const uint64_t k : {64, 1088, 1472}) {
    const Words w = small_integers(kRows, k, k);
    const DeviceF12 coded(testing::encode(w));
    for (const uint64_t m : {20, 100, 180}) {
      const Words x = small_integers(m, k, m);
      const DeviceX device_x(x, static_cast<int64_t>(k), 0);
      std::vector<uint16_t> want(m * kRows);
      for (uint64_t i = 0; i < want.size(); ++i) want[i] = exact_product(w, x, i / kRows, i % kRows);
      // On few multiprocessors a block has 14 units, on many 2, whose warpgroups then take turns with the stages.
      const DeviceTraits traits = small_device(runner, m == 100 ? 132 : 16);
      for (WgmmaCut cut : kCuts) {
        for (const uint32_t tiles : {1, 2, 3}) {
          for (const uint32_t stages : {2, 4, 5, 8}) {
            cut.tiles_per_stage = tiles;
            cut.stages = stages;
            const Result<GemmPlan> plan = plan_wgmma(traits, {kRows, k, m, true}, cut);
            if (!plan.ok()) continue;
            const auto y = runner.run(f12_gemm_kernels(), *plan, coded.matrix(), device_x.view(), kRows);
            ASSERT_EQ(testing::first_difference(y, want, kRows), "") << plan->to_string() << " m " << m;
          }
        }
      }
    }
  }
}

TEST(GemmWgmma, CO_059_AnyBatchGivesTheBitsOfBatchOneUnderEveryCut) {
  const Runner runner;
  constexpr uint64_t kRows = 2000;
  constexpr uint64_t kMost = 300;
  const Words w = testing::random_weights(kRows, 1500, 1e-3, true, 3);
  const Words x = testing::random_activations(kMost, 1500, 3);
  const DeviceF12 coded(testing::encode(w));
  const DeviceX device_x(x, 1504, 0);
  for (const WgmmaCut& cut : kCuts) {
    const DeviceTraits traits = small_device(runner, 16);
    const auto run = [&](uint64_t begin, uint64_t end) {
      const Result<GemmPlan> plan = plan_wgmma(traits, {kRows, 1500, end - begin, true}, cut);
      EXPECT_TRUE(plan.ok()) << plan.status().to_string();
      return runner.run(f12_gemm_kernels(), *plan, coded.matrix(), device_x.rows(begin, end), kRows);
    };
    if (!plan_wgmma(traits, {kRows, 1500, 1, true}, cut).ok()) continue;
    const auto together = run(0, kMost);
    for (const auto& [begin, end] : {std::pair<uint64_t, uint64_t>{0, 1}, {299, 300}, {3, 20}, {20, 60}, {100, 220}}) {
      const std::vector<uint16_t> want(together.begin() + static_cast<int64_t>(begin * kRows),
                                       together.begin() + static_cast<int64_t>(end * kRows));
      ASSERT_EQ(testing::first_difference(run(begin, end), want, kRows), "") << "tokens " << begin << ".." << end;
    }
  }
}

TEST(GemmWgmma, CO_055_AnyStrideAndAlignmentOfTheOutput) {
  const Runner runner;
  const Words w = small_integers(1000, 320, 4);
  const DeviceF12 coded(testing::encode(w));
  for (const uint64_t m : {33, 70}) {
    const Words x = small_integers(m, 320, 4);
    std::vector<uint16_t> want(m * 1000);
    for (uint64_t i = 0; i < want.size(); ++i) want[i] = exact_product(w, x, i / 1000, i % 1000);
    for (const int64_t x_stride : {320, 336, 1024}) {
      const DeviceX device_x(x, x_stride, 8);
      for (const GemmPlan& plan : legal_plans(runner, 16, 1000, 320, m, 1536)) {
        for (const uint64_t y_stride : {1000, 1001, 1008}) {
          const auto y = runner.run(f12_gemm_kernels(), plan, coded.matrix(), device_x.view(), y_stride);
          ASSERT_EQ(testing::first_difference(y, want, 1000), "") << plan.to_string() << " y stride " << y_stride;
        }
        const DeviceMemory y(m * 1000 * 2, 6);  // 2-byte aligned only
        ASSERT_TRUE(
            launch_gemm(runner.device, plan, coded.matrix(), device_x.view(), {y.as<uint16_t>(), m, 1000, 1000}, nullptr).ok());
        ASSERT_EQ(testing::first_difference(testing::from_device<uint16_t>(y), want, 1000), "");
        ASSERT_TRUE(y.fences_intact());
      }
    }
  }
}

TEST(GemmWgmma, RowsOfASliceAndOfManyPasses) {
  const Runner runner;
  const Words w = small_integers(6000, 128, 14);
  const Words x = small_integers(40, 128, 14);
  const DeviceF12 coded(testing::encode(w));
  const DeviceX device_x(x, 128, 0);
  for (const auto& [begin, end] : {std::pair<uint64_t, uint64_t>{0, 6000}, {48, 5003}}) {
    const uint64_t rows = end - begin;
    std::vector<uint16_t> want(40 * rows);
    for (uint64_t i = 0; i < want.size(); ++i) want[i] = exact_product(w, x, i / rows, begin + i % rows);
    for (const uint32_t sm_count : {4, 5, 8}) {
      for (const GemmPlan& plan : legal_plans(runner, sm_count, rows, 128, 40, 1536)) {
        const auto y = runner.run(f12_gemm_kernels(), plan, slice_rows(coded.matrix(), begin, end), device_x.view(), rows);
        ASSERT_EQ(testing::first_difference(y, want, rows), "") << plan.to_string();
      }
    }
  }
}

/// A chain of layers, each overlapped with the one before it, captured into a graph and replayed; the layers use different cuts.
TEST(GemmWgmma, OverlappedChainInAGraphGivesTheSameBits) {
  const Runner runner;
  constexpr uint64_t kWidth = 2048;
  constexpr uint64_t kTokens = 48;
  constexpr size_t kLayers = 12;
  std::vector<DeviceF12> layers;
  for (size_t i = 0; i < kLayers; ++i) {
    layers.emplace_back(testing::encode(testing::random_weights(kWidth, kWidth, 0, true, 100 + i)));
  }
  const Words x = testing::random_activations(kTokens, kWidth, 5);
  const DeviceX input(x, kWidth, 0);
  const DeviceMemory first(kTokens * kWidth * 2);
  const DeviceMemory second(kTokens * kWidth * 2);
  cudaStream_t stream = nullptr;
  testing::require_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  const auto plans = legal_plans(runner, 64, kWidth, kWidth, kTokens, 1536);

  const auto launch_all = [&](bool overlap) {
    ConstBf16Matrix from = input.view();
    for (size_t i = 0; i < kLayers; ++i) {
      GemmPlan plan = plans[i % plans.size()];
      plan.overlap_previous = overlap;
      uint16_t* to = (i % 2 == 0 ? first : second).as<uint16_t>();
      const Status status = launch_gemm(runner.device, plan, layers[i].matrix(), from, {to, kTokens, kWidth, kWidth}, stream);
      ASSERT_TRUE(status.ok()) << status.to_string();
      from = {to, kTokens, kWidth, kWidth};
    }
  };
  launch_all(false);
  testing::require_cuda(cudaStreamSynchronize(stream), "chain");
  const auto want = testing::from_device<uint16_t>(second);
  ASSERT_FALSE(std::all_of(want.begin(), want.end(), [&](uint16_t v) { return v == want[0]; }));

  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  testing::require_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  launch_all(true);
  testing::require_cuda(cudaStreamEndCapture(stream, &graph), "capture");
  testing::require_cuda(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
  for (int repeat = 0; repeat < 50; ++repeat) {
    testing::require_cuda(cudaMemsetAsync(first.data(), 0xA5, first.bytes(), stream), "poison");
    testing::require_cuda(cudaMemsetAsync(second.data(), 0xA5, second.bytes(), stream), "poison");
    testing::require_cuda(cudaGraphLaunch(executable, stream), "replay");
    testing::require_cuda(cudaStreamSynchronize(stream), "replay");
    ASSERT_EQ(testing::first_difference(testing::from_device<uint16_t>(second), want, kWidth), "") << "replay " << repeat;
  }
  EXPECT_TRUE(first.fences_intact());
  EXPECT_TRUE(second.fences_intact());
  testing::require_cuda(cudaGraphExecDestroy(executable), "destroy");
  testing::require_cuda(cudaGraphDestroy(graph), "destroy");
  testing::require_cuda(cudaStreamDestroy(stream), "destroy");
}

TEST(GemmWgmma, DamagedPlanesStayInside) {
  const Runner runner;
  const Words w = testing::random_weights(500, 1100, 1e-2, false, 9);
  const Words x = testing::random_activations(40, 1100, 1);
  const DeviceX device_x(x, 1104, 0);
  for (uint64_t round = 0; round < 4; ++round) {
    HostF12 host = testing::encode(w);
    const Words noise = testing::random_weights(1, host.records.size(), 1.0, false, round);
    for (size_t i = 0; i < host.records.size(); ++i) host.records[i] = static_cast<std::byte>(noise.words[i]);
    const DeviceF12 coded(host);
    for (const GemmPlan& plan : legal_plans(runner, 16, 500, 1100, 40, 1536)) {
      const auto y = runner.run(f12_gemm_kernels(), plan, coded.matrix(), device_x.view(), 500);
      EXPECT_EQ(y.size(), 40U * 500U);
    }
  }
}

TEST(GemmWgmma, RefusesAnXThatAllowsNoTensorCopy) {
  const Runner runner;
  const Words w = testing::random_weights(64, 128, 0, false, 8);
  const DeviceF12 coded(testing::encode(w));
  const Words x = testing::random_activations(40, 128, 1);
  const DeviceX odd(x, 129, 0);
  const DeviceMemory y(40 * 64 * 2);
  const GemmPlan plan = runner.plan(GemmKernel::kWgmma, 64, 128, 40, 1536);
  EXPECT_EQ(launch_gemm(runner.device, plan, coded.matrix(), odd.view(), {y.as<uint16_t>(), 40, 64, 64}, nullptr).code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(testing::from_device<uint16_t>(y), std::vector<uint16_t>(40 * 64, testing::kPoison));
}

}  // namespace
}  // namespace weightd::kernels
