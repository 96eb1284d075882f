// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>

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
using testing::kPoison;
using testing::Runner;
using testing::small_integers;
using testing::Words;

constexpr GemmKernel kKernels[] = {GemmKernel::kDirect, GemmKernel::kBulk, GemmKernel::kWgmma};

struct Case {
  uint64_t n, k, m;
};

const Case kCases[] = {{1, 1, 1},      {16, 64, 1},    {17, 65, 8},   {33, 200, 9},    {100, 512, 16}, {256, 1000, 17},
                       {48, 2056, 33}, {130, 640, 64}, {75, 330, 65}, {40, 4096, 130}, {4096, 264, 5}, {33000, 136, 3}};

std::string name_of(const Case& c, double wild) {
  return "n " + std::to_string(c.n) + " k " + std::to_string(c.k) + " m " + std::to_string(c.m) + " wild " + std::to_string(wild);
}

/// f12 against the oracle, to the last bit, on both kernels, with NaN and infinities among the weights.
TEST(Gemm, SameBitsAsTheUncodedOracleAtEveryEscapeRate) {
  const Runner runner;
  for (const Case& c : kCases) {
    for (const double wild : {0.0, 2e-4, 1e-2, 0.2, 1.0}) {
      SCOPED_TRACE(name_of(c, wild));
      const Words w = testing::random_weights(c.n, c.k, wild, false, c.n * 7 + c.k);
      const Words x = testing::random_activations(c.m, c.k, c.n);
      const DeviceF12 coded(testing::encode(w));
      const DeviceMemory raw(testing::pack_raw16(w));
      const F12DeviceMatrix raw_matrix{raw.data(), nullptr, nullptr, nullptr, 0, c.n, c.k};
      const DeviceX device_x(x, static_cast<int64_t>((c.k + 7) / 8 * 8), 0);
      std::vector<uint16_t> first;
      for (const GemmKernel kernel : {GemmKernel::kDirect, GemmKernel::kBulk}) {
        const GemmPlan plan = runner.plan(kernel, c.n, c.k, c.m, 1536);
        ASSERT_EQ(plan.kernel, kernel);
        const GemmPlan raw_plan = runner.plan(kernel, c.n, c.k, c.m, 2048);
        ASSERT_EQ(plan.slices, raw_plan.slices);
        const auto y = runner.run(f12_gemm_kernels(), plan, coded.matrix(), device_x.view(), c.n);
        const auto oracle = runner.run(testing::raw16_gemm_kernels(), raw_plan, raw_matrix, device_x.view(), c.n);
        ASSERT_EQ(testing::first_difference(y, oracle, c.n), "") << plan.to_string();
        if (first.empty()) first = y;
        ASSERT_EQ(testing::first_difference(y, first, c.n), "") << "kernels disagree";
      }
      ASSERT_TRUE(coded.fences_intact());
    }
  }
}

TEST(Gemm, WithinTheStatedBoundOfTheExactProduct) {
  const Runner runner;
  for (const Case& c : {Case{17, 65, 8}, {100, 512, 16}, {256, 1000, 17}, {48, 4104, 64}, {130, 640, 65}, {4096, 264, 5}}) {
    for (const double wild : {0.0, 1e-2}) {
      SCOPED_TRACE(name_of(c, wild));
      const Words w = testing::random_weights(c.n, c.k, wild, true, c.n * 11 + c.k);
      const Words x = testing::random_activations(c.m, c.k, c.n);
      const DeviceF12 coded(testing::encode(w));
      const DeviceX device_x(x, static_cast<int64_t>((c.k + 7) / 8 * 8), 0);
      for (const GemmKernel kernel : kKernels) {
        const GemmPlan plan = runner.plan(kernel, c.n, c.k, c.m, 1536);
        const auto y = runner.run(f12_gemm_kernels(), plan, coded.matrix(), device_x.view(), c.n);
        ASSERT_EQ(check_bound(w, x, y, plan.slices), "") << plan.to_string();
      }
    }
  }
}

TEST(Gemm, ATokensResultDoesNotDependOnTheBatch) {
  const Runner runner;
  const Words w = testing::random_weights(500, 1500, 1e-3, true, 3);
  const Words x = testing::random_activations(70, 1500, 3);
  const DeviceF12 coded(testing::encode(w));
  const DeviceX device_x(x, 1504, 0);
  for (const GemmKernel kernel : kKernels) {
    const auto together =
        runner.run(f12_gemm_kernels(), runner.plan(kernel, 500, 1500, 70, 1536), coded.matrix(), device_x.view(), 500);
    for (const auto& [begin, end] : {std::pair<uint64_t, uint64_t>{0, 1}, {69, 70}, {3, 20}, {20, 60}}) {
      const auto apart = runner.run(f12_gemm_kernels(), runner.plan(kernel, 500, 1500, end - begin, 1536), coded.matrix(),
                                    device_x.rows(begin, end), 500);
      const std::vector<uint16_t> want(together.begin() + static_cast<int64_t>(begin * 500),
                                       together.begin() + static_cast<int64_t>(end * 500));
      EXPECT_EQ(testing::first_difference(apart, want, 500), "") << "tokens " << begin << ".." << end;
    }
  }
}

TEST(Gemm, CO_055_AnyStrideAndAlignment) {
  const Runner runner;
  const Words w = testing::random_weights(90, 333, 1e-3, true, 4);
  const Words x = testing::random_activations(19, 333, 4);
  const DeviceF12 coded(testing::encode(w));
  const GemmPlan plan = runner.plan(GemmKernel::kDirect, 90, 333, 19, 1536);
  const DeviceX plain(x, 336, 0);
  const auto want = runner.run(f12_gemm_kernels(), plan, coded.matrix(), plain.view(), 90);
  for (const int64_t stride : {333, 335, 336, 344}) {
    for (const uint64_t before : {0, 1, 3, 8}) {
      const DeviceX moved(x, stride, before);
      EXPECT_EQ(allows_tensor_copy(moved.view()), stride % 8 == 0 && before % 8 == 0);
      const auto y = runner.run(f12_gemm_kernels(), plan, coded.matrix(), moved.view(), 97);
      EXPECT_EQ(testing::first_difference(y, want, 90), "") << "x stride " << stride << ", before " << before;
    }
  }
  const DeviceX wide(x, 1024, 8);
  const auto y = runner.run(f12_gemm_kernels(), runner.plan(GemmKernel::kBulk, 90, 333, 19, 1536), coded.matrix(), wide.view(), 91);
  EXPECT_EQ(testing::first_difference(y, want, 90), "");
}

TEST(Gemm, OneRowOfXNeedsNoStride) {
  const Runner runner;
  const Words w = testing::random_weights(64, 100, 1e-3, true, 4);
  const Words x = testing::random_activations(1, 100, 4);
  const DeviceF12 coded(testing::encode(w));
  const DeviceX device_x(x, 0, 0);
  ASSERT_TRUE(allows_tensor_copy(device_x.view()));
  std::vector<uint16_t> direct =
      runner.run(f12_gemm_kernels(), runner.plan(GemmKernel::kDirect, 64, 100, 1, 1536), coded.matrix(), device_x.view(), 64);
  EXPECT_EQ(check_bound(w, x, direct, 1), "");
  EXPECT_EQ(runner.run(f12_gemm_kernels(), runner.plan(GemmKernel::kBulk, 64, 100, 1, 1536), coded.matrix(), device_x.view(), 64),
            direct);
}

TEST(Gemm, RowsOfASlice) {
  const Runner runner;
  const Words w = testing::random_weights(160, 700, 1e-3, true, 14);
  const Words x = testing::random_activations(6, 700, 14);
  const DeviceF12 coded(testing::encode(w));
  const DeviceX device_x(x, 704, 0);
  const F12DeviceMatrix slice = slice_rows(coded.matrix(), 48, 131);
  Words part{83, 700, {w.words.begin() + 48 * 700, w.words.begin() + 131 * 700}};
  for (const GemmKernel kernel : kKernels) {
    const GemmPlan plan = runner.plan(kernel, 83, 700, 6, 1536);
    EXPECT_EQ(check_bound(part, x, runner.run(f12_gemm_kernels(), plan, slice, device_x.view(), 83), plan.slices), "");
  }
}

/// A chain of layers, each overlapped with the one before it, captured into a graph and replayed.
TEST(Gemm, OverlappedChainInAGraphGivesTheSameBits) {
  const Runner runner;
  constexpr uint64_t kWidth = 2048;
  constexpr int kLayers = 12;
  std::vector<DeviceF12> layers;
  for (int i = 0; i < kLayers; ++i) {
    layers.emplace_back(testing::encode(testing::random_weights(kWidth, kWidth, 0, true, static_cast<uint64_t>(100 + i))));
  }
  const Words x = testing::random_activations(16, kWidth, 5);
  const DeviceX input(x, kWidth, 0);
  const DeviceMemory first(16 * kWidth * 2);
  const DeviceMemory second(16 * kWidth * 2);
  cudaStream_t stream = nullptr;
  testing::require_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");

  const auto launch_all = [&](bool overlap) {
    GemmPlan plan = runner.plan(GemmKernel::kBulk, kWidth, kWidth, 16, 1536);
    plan.overlap_previous = overlap;
    ConstBf16Matrix from = input.view();
    for (int i = 0; i < kLayers; ++i) {
      uint16_t* to = (i % 2 == 0 ? first : second).as<uint16_t>();
      const Status status = launch_gemm(runner.device, plan, layers[static_cast<size_t>(i)].matrix(), from,
                                        {to, 16, kWidth, static_cast<int64_t>(kWidth)}, stream);
      ASSERT_TRUE(status.ok()) << status.to_string();
      from = {to, 16, kWidth, static_cast<int64_t>(kWidth)};
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

TEST(Gemm, EmptyExtents) {
  const Runner runner;
  const F12DeviceMatrix none{nullptr, nullptr, nullptr, nullptr, 0, 40, 0};
  const DeviceMemory y(3 * 40 * 2);
  const Bf16Matrix out{y.as<uint16_t>(), 3, 40, 40};
  const GemmPlan plan = runner.plan(GemmKernel::kDirect, 40, 0, 3, 1536);
  ASSERT_TRUE(launch_gemm(runner.device, plan, none, {nullptr, 0, 0, 0}, {y.as<uint16_t>(), 0, 40, 40}, nullptr).ok());
  EXPECT_EQ(testing::from_device<uint16_t>(y), std::vector<uint16_t>(120, kPoison));
  const Status status = launch_gemm(runner.device, plan, none, {nullptr, 3, 0, 0}, out, nullptr);
  ASSERT_TRUE(status.ok()) << status.to_string();
  EXPECT_EQ(testing::from_device<uint16_t>(y), std::vector<uint16_t>(120, 0));
}

TEST(Gemm, CO_054_CO_058_RefusesWhatItsContractForbids) {
  const Runner runner;
  const Words w = testing::random_weights(64, 128, 0, false, 8);
  const DeviceF12 coded(testing::encode(w));
  const Words x = testing::random_activations(4, 128, 1);
  const DeviceX device_x(x, 128, 0);
  const DeviceMemory y(4 * 64 * 2);
  const GemmPlan bulk = runner.plan(GemmKernel::kBulk, 64, 128, 4, 1536);
  const Bf16Matrix out{y.as<uint16_t>(), 4, 64, 64};
  const auto code = [&](const GemmPlan& plan, const F12DeviceMatrix& matrix, ConstBf16Matrix in, Bf16Matrix to) {
    return launch_gemm(runner.device, plan, matrix, in, to, nullptr).code();
  };
  const ConstBf16Matrix in = device_x.view();
  EXPECT_EQ(code(runner.plan(GemmKernel::kBulk, 65, 128, 4, 1536), coded.matrix(), in, out), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(bulk, coded.matrix(), {in.data, 4, 127, 128}, out), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(bulk, coded.matrix(), {in.data, 3, 128, 128}, out), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(bulk, coded.matrix(), {in.data + 1, 4, 128, 128}, out), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(bulk, coded.matrix(), {in.data, 4, 128, 129}, out), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(bulk, coded.matrix(), {nullptr, 4, 128, 128}, out), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(bulk, coded.matrix(), in, {out.data, 4, 64, 63}), StatusCode::kInvalidArgument);
  const GemmPlan direct = runner.plan(GemmKernel::kDirect, 64, 128, 4, 1536);
  for (const int64_t stride : {127, 0, -128}) {
    EXPECT_EQ(code(direct, coded.matrix(), {in.data, 4, 128, stride}, out), StatusCode::kInvalidArgument);
  }
  uint16_t* x_memory = const_cast<uint16_t*>(in.data);
  EXPECT_EQ(code(direct, coded.matrix(), in, {x_memory, 4, 64, 64}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(direct, coded.matrix(), in, {x_memory + 8, 4, 64, 64}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(direct, coded.matrix(), in, {coded.codes.as<uint16_t>() + 64, 4, 64, 64}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(direct, coded.matrix(), in, {coded.windows.as<uint16_t>(), 4, 64, 64}), StatusCode::kInvalidArgument);
  EXPECT_EQ(testing::from_device<uint16_t>(y), std::vector<uint16_t>(4 * 64, kPoison));
  // With one row a stride means nothing.
  EXPECT_EQ(code(direct, coded.matrix(), {in.data, 1, 128, 127}, {out.data, 1, 64, 0}), StatusCode::kOk);
}

TEST(Gemm, CO_051_OddShapesGiveExactIntegers) {
  const Runner runner;
  for (const uint64_t n : {1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257}) {
    for (const uint64_t k : {1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257}) {
      const Words w = small_integers(n, k, n * 300 + k);
      const DeviceF12 coded(testing::encode(w));
      for (const uint64_t m : {1, 2, 3, 8, 9, 16, 17, 33}) {
        const Words x = small_integers(m, k, m);
        const DeviceX device_x(x, static_cast<int64_t>((k + 7) / 8 * 8), 0);
        std::vector<uint16_t> want(m * n);
        for (uint64_t i = 0; i < want.size(); ++i) want[i] = exact_product(w, x, i / n, i % n);
        for (const GemmKernel kernel : kKernels) {
          const auto y = runner.run(f12_gemm_kernels(), runner.plan(kernel, n, k, m, 1536), coded.matrix(), device_x.view(), n);
          ASSERT_EQ(testing::first_difference(y, want, n), "") << "n " << n << " k " << k << " m " << m;
        }
      }
    }
  }
}

TEST(Gemm, CO_052_VocabularySizedHeads) {
  const Runner runner;
  for (const auto& [n, k] : {std::pair<uint64_t, uint64_t>{50257, 768}, {32001, 4096}, {51865, 384}, {49155, 2048}}) {
    const Words w = testing::random_weights(n, k, 0, true, n);
    const DeviceF12 coded(testing::encode(w));
    const Words last{40, k, {w.words.end() - static_cast<int64_t>(40 * k), w.words.end()}};
    for (const uint64_t m : {1, 5, 64}) {
      const Words x = testing::random_activations(m, k, m);
      const DeviceX device_x(x, static_cast<int64_t>(k), 0);
      for (const GemmKernel kernel : kKernels) {
        const GemmPlan plan = runner.plan(kernel, n, k, m, 1536);
        const auto y = runner.run(f12_gemm_kernels(), plan, coded.matrix(), device_x.view(), n);
        std::vector<uint16_t> tail;
        for (uint64_t token = 0; token < m; ++token) {
          const auto end = y.begin() + static_cast<int64_t>((token + 1) * n);
          tail.insert(tail.end(), end - 40, end);
        }
        ASSERT_EQ(check_bound(last, x, tail, plan.slices), "") << plan.to_string();
      }
    }
  }
}

TEST(Gemm, CO_053_OutputsAndTokensBeyond32Bits) {
  const Runner runner;
  for (const auto& [n, k, m] : {std::tuple<uint64_t, uint64_t, uint64_t>{128256, 64, 16800}, {64, 64, 4200000}}) {
    const Words w = small_integers(n, k, 1);
    const Words x = small_integers(m, k, 2);
    const DeviceF12 coded(testing::encode(w));
    const DeviceX device_x(x, static_cast<int64_t>(k), 0);
    for (const GemmKernel kernel : kKernels) {
      const DeviceMemory y(m * n * 2);
      const Status status = launch_gemm(runner.device, runner.plan(kernel, n, k, m, 1536), coded.matrix(), device_x.view(),
                                        {y.as<uint16_t>(), m, n, static_cast<int64_t>(n)}, nullptr);
      ASSERT_TRUE(status.ok()) << status.to_string();
      testing::require_cuda(cudaDeviceSynchronize(), "gemm");
      for (const uint64_t token : {uint64_t{0}, uint64_t{63}, m / 2, m - 65, m - 1}) {
        std::vector<uint16_t> row(n);
        std::vector<uint16_t> want(n);
        testing::require_cuda(cudaMemcpy(row.data(), y.as<uint16_t>() + token * n, n * 2, cudaMemcpyDeviceToHost), "cudaMemcpy");
        for (uint64_t r = 0; r < n; ++r) want[r] = exact_product(w, x, token, r);
        ASSERT_EQ(testing::first_difference(row, want, n), "") << "token " << token;
      }
    }
  }
}

TEST(Gemm, CO_056_EveryOutputIsWrittenAndNothingElse) {
  const Runner runner;
  for (const uint64_t n : {1440, 1472, 1536, 1537}) {
    const Words w = small_integers(n, 256, n);
    const DeviceF12 coded(testing::encode(w));
    for (const uint64_t m : {1, 63, 64, 65}) {
      const Words x = small_integers(m, 256, m);
      const DeviceX device_x(x, 256, 0);
      std::vector<uint16_t> want(m * n);
      for (uint64_t i = 0; i < want.size(); ++i) want[i] = exact_product(w, x, i / n, i % n);
      for (const GemmKernel kernel : kKernels) {
        const auto y = runner.run(f12_gemm_kernels(), runner.plan(kernel, n, 256, m, 1536), coded.matrix(), device_x.view(), n + 3);
        ASSERT_EQ(testing::first_difference(y, want, n), "");  // run() checks the gaps and the fences
      }
    }
  }
}

TEST(Gemm, CO_057_InfinitiesMeetZeros) {
  const Runner runner;
  Words w{64, 64, std::vector<uint16_t>(64 * 64, 0x3F80)};
  w.words[3 * 64 + 5] = 0x7F80;
  const DeviceF12 coded(testing::encode(w));
  Words x{2, 64, std::vector<uint16_t>(128, 0x3F80)};
  x.words[5] = 0;  // token 0
  const DeviceX device_x(x, 64, 0);
  for (const GemmKernel kernel : kKernels) {
    const auto y = runner.run(f12_gemm_kernels(), runner.plan(kernel, 64, 64, 2, 1536), coded.matrix(), device_x.view(), 64);
    for (uint64_t row = 0; row < 64; ++row) {
      EXPECT_EQ(y[row], row == 3 ? 0x7FFF : testing::bf16_from(63.0F)) << "0 x Inf is NaN";
      EXPECT_EQ(y[64 + row], row == 3 ? 0x7F80 : testing::bf16_from(64.0F));
    }
  }
}

TEST(Gemm, CO_034_EveryPatternTimesTheIdentity) {
  const Runner runner;
  Words w{256, 256, std::vector<uint16_t>(65536)};
  for (uint32_t i = 0; i < 65536; ++i) w.words[i] = static_cast<uint16_t>(i);
  Words x{256, 256, std::vector<uint16_t>(65536, 0)};
  for (uint64_t i = 0; i < 256; ++i) x.words[i * 257] = 0x3F80;
  const DeviceF12 coded(testing::encode(w));
  const DeviceX device_x(x, 256, 0);
  for (const GemmKernel kernel : kKernels) {
    const auto y = runner.run(f12_gemm_kernels(), runner.plan(kernel, 256, 256, 256, 1536), coded.matrix(), device_x.view(), 256);
    for (uint64_t token = 0; token < 256; ++token) {
      for (uint64_t row = 0; row < 256; ++row) {
        // Row r holds the patterns r * 256 ..; rows 0x7f and 0xff hold the infinities and NaNs.
        const uint16_t want = row % 128 == 127 ? 0x7FFF : w.at(row, token) == 0x8000 ? 0 : w.at(row, token);
        ASSERT_EQ(y[token * 256 + row], want) << "row " << row << " token " << token;
      }
    }
  }
}

TEST(Gemm, CO_059_AnyBatchGivesTheBitsOfBatchOne) {
  const Runner runner;
  constexpr uint64_t kMost = 4097;
  const Words w = testing::random_weights(4096, 4096, 0, true, 59);
  const Words x = testing::random_activations(kMost, 4096, 59);
  const DeviceF12 coded(testing::encode(w));
  const DeviceX device_x(x, 4096, 0);
  std::vector<uint64_t> batches;
  for (uint64_t m = 1; m <= 130; ++m) batches.push_back(m);
  for (const uint64_t m : {255, 256, 257, 511, 512, 513, 4095, 4096}) batches.push_back(m);
  for (const GemmKernel kernel : kKernels) {
    const auto most =
        runner.run(f12_gemm_kernels(), runner.plan(kernel, 4096, 4096, kMost, 1536), coded.matrix(), device_x.view(), 4096);
    for (const uint64_t token : {0, 1, 63, 64, 129, 4096}) {
      const auto one = runner.run(f12_gemm_kernels(), runner.plan(kernel, 4096, 4096, 1, 1536), coded.matrix(),
                                  device_x.rows(token, token + 1), 4096);
      ASSERT_TRUE(std::equal(one.begin(), one.end(), most.begin() + static_cast<int64_t>(token * 4096))) << "token " << token;
    }
    for (const uint64_t m : batches) {
      const auto y =
          runner.run(f12_gemm_kernels(), runner.plan(kernel, 4096, 4096, m, 1536), coded.matrix(), device_x.rows(0, m), 4096);
      ASSERT_TRUE(std::equal(y.begin(), y.end(), most.begin())) << "batch " << m;
    }
  }
}

TEST(Gemm, DamagedPlanesStayInside) {
  const Runner runner;
  const Words w = testing::random_weights(50, 1100, 1e-2, false, 9);
  const Words x = testing::random_activations(4, 1100, 1);
  const DeviceX device_x(x, 1104, 0);
  for (uint64_t round = 0; round < 8; ++round) {
    HostF12 host = testing::encode(w);
    const Words noise = testing::random_weights(1, host.records.size(), 1.0, false, round);
    for (size_t i = 0; i < host.records.size(); ++i) host.records[i] = static_cast<std::byte>(noise.words[i]);
    const DeviceF12 coded(host);
    for (const GemmKernel kernel : kKernels) {
      const auto y = runner.run(f12_gemm_kernels(), runner.plan(kernel, 50, 1100, 4, 1536), coded.matrix(), device_x.view(), 50);
      EXPECT_EQ(y.size(), 200U);
    }
  }
}

}  // namespace
}  // namespace weightd::kernels
