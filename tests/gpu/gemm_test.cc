// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "tests/gpu/raw16.h"
#include "tests/gpu/test_matrix.h"

namespace weightd::kernels {
namespace {

using testing::DeviceF12;
using testing::DeviceMemory;
using testing::HostF12;
using testing::Words;

constexpr uint16_t kPoison = 0xA5A5;

GemmDevice device_or_die() {
  Result<GemmDevice> device = prepare_gemm();
  if (!device.ok()) {
    std::fprintf(stderr, "prepare_gemm: %s\n", device.status().to_string().c_str());
    std::abort();
  }
  const Status raised = raise_shared_limits(testing::raw16_gemm_kernels(), device->traits.shared_bytes);
  EXPECT_TRUE(raised.ok()) << raised.to_string();
  return *device;
}

/// x on the device: rows `stride` elements apart, `before` elements into its memory. What lies between the rows is NaN.
class DeviceX {
 public:
  DeviceX(const Words& x, int64_t stride, uint64_t before) : x_(x), stride_(stride), memory_(place(x, stride, before)) {
    const uint64_t first = before + (stride < 0 ? (x.n - 1) * static_cast<uint64_t>(-stride) : 0);
    view_ = {memory_.as<uint16_t>() + first, x.n, x.k, stride};
  }
  [[nodiscard]] ConstBf16Matrix view() const { return view_; }
  /// The first `m` rows only.
  [[nodiscard]] ConstBf16Matrix rows(uint64_t begin, uint64_t end) const {
    return {view_.data + static_cast<int64_t>(begin) * stride_, end - begin, x_.k, stride_};
  }

 private:
  static DeviceMemory place(const Words& x, int64_t stride, uint64_t before) {
    const uint64_t magnitude = static_cast<uint64_t>(stride < 0 ? -stride : stride);
    std::vector<uint16_t> memory(before + (x.n - 1) * magnitude + x.k, 0x7fff);
    for (uint64_t row = 0; row < x.n; ++row) {
      const uint64_t at = before + (stride < 0 ? x.n - 1 - row : row) * magnitude;
      std::copy_n(x.words.begin() + static_cast<int64_t>(row * x.k), x.k, memory.begin() + static_cast<int64_t>(at));
    }
    return testing::to_device(memory);
  }
  const Words& x_;
  int64_t stride_;
  DeviceMemory memory_;
  ConstBf16Matrix view_;
};

/// Runs one GEMM with rows of y `y_stride` apart and returns y; checks that nothing else was written.
struct Runner {
  GemmDevice device = device_or_die();

  [[nodiscard]] GemmPlan plan(const GemmKernel kernel, uint64_t n, uint64_t k, uint64_t m, uint32_t tile_bytes) const {
    DeviceTraits traits = device.traits;
    traits.bulk_copy = kernel == GemmKernel::kBulk;
    Result<GemmPlan> made = plan_gemm(traits, {n, k, m, true, false, tile_bytes});
    EXPECT_TRUE(made.ok()) << made.status().to_string();
    return made.ok() ? *made : GemmPlan{};
  }

  [[nodiscard]] std::vector<uint16_t> run(const GemmKernels& kernels, const GemmPlan& made, const F12DeviceMatrix& w,
                                          ConstBf16Matrix x, uint64_t y_stride) const {
    const DeviceMemory y((x.rows - 1) * y_stride * 2 + w.n * 2);
    const Status status =
        launch_gemm_kernels(kernels, device, made, w, x, {y.as<uint16_t>(), x.rows, w.n, static_cast<int64_t>(y_stride)}, nullptr);
    EXPECT_TRUE(status.ok()) << status.to_string();
    EXPECT_TRUE(y.fences_intact());
    const std::vector<uint16_t> memory = testing::from_device<uint16_t>(y);
    std::vector<uint16_t> packed;
    for (uint64_t i = 0; i < memory.size(); ++i) {
      if (i % y_stride < w.n) {
        packed.push_back(memory[i]);
      } else {
        EXPECT_EQ(memory[i], kPoison) << "between the rows of y";
      }
    }
    return packed;
  }
};

/// Counts the elements that differ from the exact product by more than the header's bound.
std::string check_bound(const Words& w, const Words& x, const std::vector<uint16_t>& y, uint32_t slices) {
  const double additions = static_cast<double>(w.k) / 8 + slices + 4;
  for (uint64_t token = 0; token < x.n; ++token) {
    for (uint64_t row = 0; row < w.n; ++row) {
      double exact = 0;
      double magnitude = 0;
      for (uint64_t c = 0; c < w.k; ++c) {
        const double product = testing::value_of(x.at(token, c)) * testing::value_of(w.at(row, c));
        exact += product;
        magnitude += std::abs(product);
      }
      const double got = testing::value_of(y[token * w.n + row]);
      const double bound = std::ldexp(std::abs(exact), -8) + additions * std::ldexp(magnitude, -22);
      if (!(std::abs(got - exact) <= bound)) {
        return "token " + std::to_string(token) + ", row " + std::to_string(row) + ": got " + std::to_string(got) + ", exact " +
               std::to_string(exact) + ", bound " + std::to_string(bound);
      }
    }
  }
  return "";
}

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
      for (const GemmKernel kernel : {GemmKernel::kDirect, GemmKernel::kBulk}) {
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
  for (const GemmKernel kernel : {GemmKernel::kDirect, GemmKernel::kBulk}) {
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

TEST(Gemm, AnyStrideAndAlignment) {
  const Runner runner;
  const Words w = testing::random_weights(90, 333, 1e-3, true, 4);
  const Words x = testing::random_activations(19, 333, 4);
  const DeviceF12 coded(testing::encode(w));
  const GemmPlan plan = runner.plan(GemmKernel::kDirect, 90, 333, 19, 1536);
  const DeviceX plain(x, 336, 0);
  const auto want = runner.run(f12_gemm_kernels(), plan, coded.matrix(), plain.view(), 90);
  for (const int64_t stride : {333, 335, 344, -333, -336, -401}) {
    for (const uint64_t before : {0, 1, 3, 8}) {
      const DeviceX moved(x, stride, before);
      EXPECT_EQ(allows_tensor_copy(moved.view()), stride > 0 && stride % 8 == 0 && before % 8 == 0);
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
  for (const GemmKernel kernel : {GemmKernel::kDirect, GemmKernel::kBulk}) {
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

TEST(Gemm, RefusesWhatItsContractForbids) {
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
  EXPECT_EQ(testing::from_device<uint16_t>(y), std::vector<uint16_t>(4 * 64, kPoison));
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
    for (const GemmKernel kernel : {GemmKernel::kDirect, GemmKernel::kBulk}) {
      const auto y = runner.run(f12_gemm_kernels(), runner.plan(kernel, 50, 1100, 4, 1536), coded.matrix(), device_x.view(), 50);
      EXPECT_EQ(y.size(), 200U);
    }
  }
}

}  // namespace
}  // namespace weightd::kernels
