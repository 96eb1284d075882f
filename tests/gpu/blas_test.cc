// SPDX-License-Identifier: Apache-2.0
#include "kernels/blas.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <thread>

#include "tests/gpu/test_matrix.h"

namespace weightd::kernels {
namespace {

using testing::DeviceF12;
using testing::DeviceMemory;
using testing::Words;

constexpr uint16_t kPoison = 0xA5A5;

std::shared_ptr<Blas> blas_or_die() {
  Result<std::shared_ptr<Blas>> blas = Blas::open();
  if (!blas.ok()) {
    std::fprintf(stderr, "Blas::open: %s\n", blas.status().to_string().c_str());
    std::abort();
  }
  return *blas;
}

/// A matrix on the device: rows `stride` elements apart, `before` elements into its memory. What lies between the rows is NaN.
class DeviceMatrix {
 public:
  DeviceMatrix(const Words& words, uint64_t stride, uint64_t before) : memory_(place(words, stride, before)) {
    view_ = {memory_.as<uint16_t>() + before, words.n, words.k, static_cast<int64_t>(stride)};
  }
  explicit DeviceMatrix(const Words& words) : DeviceMatrix(words, words.k, 0) {}
  [[nodiscard]] ConstBf16Matrix view() const { return view_; }

 private:
  static DeviceMemory place(const Words& words, uint64_t stride, uint64_t before) {
    std::vector<uint16_t> memory(before + (words.n - 1) * stride + words.k, 0x7fff);
    for (uint64_t row = 0; row < words.n; ++row) {
      std::copy_n(words.words.begin() + static_cast<int64_t>(row * words.k), words.k,
                  memory.begin() + static_cast<int64_t>(before + row * stride));
    }
    return testing::to_device(memory);
  }
  DeviceMemory memory_;
  ConstBf16Matrix view_;
};

/// Poisoned memory for y, and what came out of it.
class Output {
 public:
  Output(uint64_t m, uint64_t n, uint64_t stride, uint64_t before)
      : m_(m), n_(n), stride_(stride), before_(before), memory_((before + (m - 1) * stride + n) * 2) {}
  [[nodiscard]] Bf16Matrix view() const { return {memory_.as<uint16_t>() + before_, m_, n_, static_cast<int64_t>(stride_)}; }
  /// The rows of y; checks that nothing else was written.
  [[nodiscard]] std::vector<uint16_t> take() const {
    EXPECT_TRUE(memory_.fences_intact());
    const std::vector<uint16_t> memory = testing::from_device<uint16_t>(memory_);
    std::vector<uint16_t> y;
    for (uint64_t i = 0; i < memory.size(); ++i) {
      if (i >= before_ && (i - before_) % stride_ < n_) {
        y.push_back(memory[i]);
      } else {
        EXPECT_EQ(memory[i], kPoison) << "outside the rows of y, word " << i;
      }
    }
    return y;
  }

 private:
  uint64_t m_, n_, stride_, before_;
  DeviceMemory memory_;
};

/// "" if every element is as near to the exact product as fp32 sums, in any order and with truncated additions, rounded once,
/// allow.
std::string check_bound(const Words& w, const Words& x, const std::vector<uint16_t>& y) {
  const double additions = static_cast<double>(w.k) / 4 + 64;
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

std::string name_of(const Case& c) {
  return "n " + std::to_string(c.n) + " k " + std::to_string(c.k) + " m " + std::to_string(c.m);
}

TEST(Blas, NamesItsVersionAndFile) {
  const std::string version = blas_or_die()->version();
  EXPECT_NE(version.find("(libcublasLt"), std::string::npos) << version;
  EXPECT_GE(version.front(), '1') << version;
}

TEST(Blas, CO_051_WithinTheBoundOfTheExactProduct) {
  const auto blas = blas_or_die();
  const DeviceMemory workspace(Blas::kWorkspaceBytes);
  for (const Case& c : {Case{64, 64, 1},
                        {256, 512, 1},
                        {17, 65, 8},
                        {33, 200, 9},
                        {100, 333, 16},
                        {1, 7, 3},
                        {256, 1000, 17},
                        {48, 4104, 64},
                        {130, 640, 300},
                        {4096, 264, 5}}) {
    SCOPED_TRACE(name_of(c));
    const Words w = testing::random_weights(c.n, c.k, 1e-2, true, c.n + c.k);
    const Words x = testing::random_activations(c.m, c.k, c.n);
    const DeviceMatrix device_w(w), device_x(x);
    for (std::byte* scratch : {workspace.data(), static_cast<std::byte*>(nullptr)}) {
      const Output y(c.m, c.n, c.n, 0);
      const Status status = blas->multiply(device_w.view(), device_x.view(), y.view(), scratch, nullptr);
      ASSERT_TRUE(status.ok()) << status.to_string();
      EXPECT_EQ(check_bound(w, x, y.take()), "") << (scratch == nullptr ? "without workspace" : "");
    }
  }
  EXPECT_TRUE(workspace.fences_intact());
}

TEST(Blas, CO_055_AnyStrideAndAlignment) {
  const auto blas = blas_or_die();
  const DeviceMemory workspace(Blas::kWorkspaceBytes);
  const Words w = testing::random_weights(90, 336, 1e-3, true, 4);
  const Words x = testing::random_activations(19, 336, 4);
  for (const uint64_t gap : {0U, 8U, 1U, 6U}) {
    for (const uint64_t before : {0U, 8U, 1U, 3U, 4U}) {
      SCOPED_TRACE("gap " + std::to_string(gap) + " before " + std::to_string(before));
      const DeviceMatrix device_w(w, 336 + gap, before), device_x(x, 336 + gap, before);
      const Output y(19, 90, 90 + gap, before);
      const Status status = blas->multiply(device_w.view(), device_x.view(), y.view(), workspace.data(), nullptr);
      ASSERT_TRUE(status.ok()) << status.to_string();
      EXPECT_EQ(check_bound(w, x, y.take()), "");
    }
  }
}

TEST(Blas, OneTokenNeedsNoStride) {
  const auto blas = blas_or_die();
  const DeviceMemory workspace(Blas::kWorkspaceBytes);
  const Words w = testing::random_weights(64, 128, 0, true, 5);
  const Words x = testing::random_activations(1, 128, 5);
  const DeviceMatrix device_w(w), device_x(x);
  const Output y(1, 64, 64, 0);
  ConstBf16Matrix from = device_x.view();
  Bf16Matrix to = y.view();
  from.row_stride = 0;
  to.row_stride = 0;
  ASSERT_TRUE(blas->multiply(device_w.view(), from, to, workspace.data(), nullptr).ok());
  EXPECT_EQ(check_bound(w, x, y.take()), "");
}

TEST(Blas, EqualCallsGiveEqualBitsAlsoFromTwoThreads) {
  const auto blas = blas_or_die();
  const Words w = testing::random_weights(512, 4096, 0, true, 6);
  const Words x = testing::random_activations(33, 4096, 6);
  const DeviceMatrix device_w(w), device_x(x);
  const auto run = [&](std::vector<uint16_t>& got) {
    const DeviceMemory workspace(Blas::kWorkspaceBytes);
    cudaStream_t stream = nullptr;
    testing::require_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    const Output y(33, 512, 512, 0);
    for (int i = 0; i < 20; ++i) {
      const Status status = blas->multiply(device_w.view(), device_x.view(), y.view(), workspace.data(), stream);
      ASSERT_TRUE(status.ok()) << status.to_string();
    }
    testing::require_cuda(cudaStreamSynchronize(stream), "products");
    got = y.take();
    testing::require_cuda(cudaStreamDestroy(stream), "destroy");
  };
  std::vector<uint16_t> first, second, third;
  std::thread one([&] { run(first); }), two([&] { run(second); });
  one.join();
  two.join();
  run(third);
  EXPECT_EQ(testing::first_difference(first, second, 512), "");
  EXPECT_EQ(testing::first_difference(first, third, 512), "");
  EXPECT_EQ(check_bound(w, x, first), "");
}

TEST(Blas, EmptyExtents) {
  const auto blas = blas_or_die();
  const DeviceMemory y(3 * 50 * 2);
  const Bf16Matrix out{y.as<uint16_t>(), 3, 40, 50};
  ASSERT_TRUE(blas->multiply({nullptr, 40, 0, 0}, {nullptr, 0, 0, 0}, {y.as<uint16_t>(), 0, 40, 40}, nullptr, nullptr).ok());
  ASSERT_TRUE(blas->multiply({nullptr, 0, 64, 64}, {y.as<uint16_t>(), 2, 64, 64}, {nullptr, 2, 0, 0}, nullptr, nullptr).ok());
  EXPECT_EQ(testing::from_device<uint16_t>(y), std::vector<uint16_t>(150, kPoison));
  const Status status = blas->multiply({nullptr, 40, 0, 0}, {nullptr, 3, 0, 0}, out, nullptr, nullptr);
  ASSERT_TRUE(status.ok()) << status.to_string();
  const auto memory = testing::from_device<uint16_t>(y);
  for (uint64_t i = 0; i < memory.size(); ++i) ASSERT_EQ(memory[i], i % 50 < 40 ? 0 : kPoison) << i;
}

TEST(Blas, CO_054_CO_058_RefusesWhatItsContractForbids) {
  const auto blas = blas_or_die();
  const DeviceMemory workspace(Blas::kWorkspaceBytes);
  const DeviceMatrix w(testing::random_weights(64, 128, 0, true, 8)), x(testing::random_activations(4, 128, 8));
  const Output y(4, 64, 64, 0);
  const auto code = [&](ConstBf16Matrix from_w, ConstBf16Matrix from_x, Bf16Matrix to, std::byte* scratch) {
    return blas->multiply(from_w, from_x, to, scratch, nullptr).code();
  };
  const auto shorter = [](ConstBf16Matrix matrix, uint64_t rows, uint64_t cols) {
    return ConstBf16Matrix{matrix.data, rows, cols, matrix.row_stride};
  };
  const auto strided = [](ConstBf16Matrix matrix, int64_t stride) {
    return ConstBf16Matrix{matrix.data, matrix.rows, matrix.cols, stride};
  };
  const Bf16Matrix out = y.view();
  auto* inside_w = const_cast<uint16_t*>(w.view().data);
  auto* inside_x = const_cast<uint16_t*>(x.view().data);
  EXPECT_EQ(code(shorter(w.view(), 64, 127), x.view(), out, workspace.data()), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(shorter(w.view(), 63, 128), x.view(), out, workspace.data()), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(w.view(), shorter(x.view(), 3, 128), out, workspace.data()), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(strided(w.view(), 127), x.view(), out, workspace.data()), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(w.view(), strided(x.view(), -128), out, workspace.data()), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(w.view(), x.view(), {out.data, 4, 64, 63}, workspace.data()), StatusCode::kInvalidArgument);
  EXPECT_EQ(code({nullptr, 64, 128, 128}, x.view(), out, workspace.data()), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(w.view(), x.view(), {nullptr, 4, 64, 64}, workspace.data()), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(w.view(), x.view(), {inside_w, 4, 64, 64}, workspace.data()), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(w.view(), x.view(), {inside_x, 4, 64, 64}, workspace.data()), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(w.view(), x.view(), out, workspace.data() + 128), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(w.view(), x.view(), {reinterpret_cast<uint16_t*>(workspace.data()), 4, 64, 64}, workspace.data()),
            StatusCode::kInvalidArgument);
  const DeviceF12 coded(testing::encode(testing::random_weights(64, 128, 0, true, 8)));
  EXPECT_EQ(multiply_exact(*blas, coded.matrix(), x.view(), out, nullptr, nullptr).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(multiply_exact(*blas, coded.matrix(), x.view(), out, workspace.data() + 2, nullptr).code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(multiply_exact(*blas, coded.matrix(), shorter(x.view(), 4, 100), out, workspace.data(), nullptr).code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(multiply_exact(*blas, coded.matrix(), {reinterpret_cast<uint16_t*>(workspace.data()), 4, 128, 128}, out,
                           workspace.data(), nullptr)
                .code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(y.take(), std::vector<uint16_t>(4 * 64, kPoison));
  EXPECT_EQ(workspace.download(), std::vector<std::byte>(Blas::kWorkspaceBytes, std::byte{0xA5}));
}

/// Exact mode gives the bits of the product with the original matrix, NaNs and infinities included.
TEST(ExactMode, CO_057_BitsOfTheOriginalMatrix) {
  const auto blas = blas_or_die();
  const DeviceMemory blas_workspace(Blas::kWorkspaceBytes);
  for (const auto& [n, k] :
       {std::pair<uint64_t, uint64_t>{64, 64}, {17, 65}, {100, 333}, {256, 512}, {75, 2056}, {4096, 1024}, {1030, 4096}}) {
    for (const double wild : {0.0, 1e-3, 0.3}) {
      const Words words = testing::random_weights(n, k, wild, false, n * 3 + k);
      const DeviceF12 coded(testing::encode(words));
      const DeviceMatrix raw(words);
      const DeviceMemory workspace(exact_workspace_bytes(n, k));
      for (const uint64_t m : {1U, 2U, 3U, 7U, 8U, 16U, 33U, 64U, 100U, 128U, 200U, 255U, 300U}) {
        SCOPED_TRACE(name_of({n, k, m}) + " wild " + std::to_string(wild));
        const DeviceMatrix x(testing::random_activations(m, k, m));
        const Output want(m, n, n, 0), got(m, n, n, 0);
        Status status = blas->multiply(raw.view(), x.view(), want.view(), blas_workspace.data(), nullptr);
        ASSERT_TRUE(status.ok()) << status.to_string();
        status = multiply_exact(*blas, coded.matrix(), x.view(), got.view(), workspace.data(), nullptr);
        ASSERT_TRUE(status.ok()) << status.to_string();
        ASSERT_EQ(testing::first_difference(got.take(), want.take(), n), "");
      }
      ASSERT_TRUE(workspace.fences_intact());
      ASSERT_TRUE(coded.fences_intact());
    }
  }
}

TEST(ExactMode, StridesAndAlignmentsOfXAndY) {
  const auto blas = blas_or_die();
  const DeviceMemory blas_workspace(Blas::kWorkspaceBytes);
  const Words words = testing::random_weights(90, 328, 1e-3, true, 14);
  const Words x = testing::random_activations(21, 328, 14);
  const DeviceF12 coded(testing::encode(words));
  const DeviceMatrix raw(words);
  const DeviceMemory workspace(exact_workspace_bytes(90, 328));
  for (const uint64_t gap : {0U, 8U, 3U}) {
    for (const uint64_t before : {0U, 1U, 8U}) {
      SCOPED_TRACE("gap " + std::to_string(gap) + " before " + std::to_string(before));
      const DeviceMatrix device_x(x, 328 + gap, before);
      const Output want(21, 90, 90 + gap, before), got(21, 90, 90 + gap, before);
      Status status = blas->multiply(raw.view(), device_x.view(), want.view(), blas_workspace.data(), nullptr);
      ASSERT_TRUE(status.ok()) << status.to_string();
      status = multiply_exact(*blas, coded.matrix(), device_x.view(), got.view(), workspace.data(), nullptr);
      ASSERT_TRUE(status.ok()) << status.to_string();
      ASSERT_EQ(testing::first_difference(got.take(), want.take(), 90), "");
    }
  }
}

TEST(ExactMode, EmptyExtents) {
  const auto blas = blas_or_die();
  const DeviceMemory workspace(exact_workspace_bytes(40, 64));
  const DeviceMemory y(3 * 40 * 2);
  const DeviceF12 coded(testing::encode(testing::random_weights(40, 64, 0, true, 3)));
  ASSERT_TRUE(multiply_exact(*blas, coded.matrix(), {nullptr, 0, 64, 64}, {nullptr, 0, 40, 40}, workspace.data(), nullptr).ok());
  EXPECT_EQ(testing::from_device<uint16_t>(y), std::vector<uint16_t>(120, kPoison));
  const F12DeviceMatrix none{nullptr, nullptr, nullptr, nullptr, 0, 40, 0};
  const Status status = multiply_exact(*blas, none, {nullptr, 3, 0, 0}, {y.as<uint16_t>(), 3, 40, 40}, workspace.data(), nullptr);
  ASSERT_TRUE(status.ok()) << status.to_string();
  EXPECT_EQ(testing::from_device<uint16_t>(y), std::vector<uint16_t>(120, 0));
}

/// Layers one after the other through one workspace, in a stream and in a graph: a decompression may not start to write while the
/// product before still reads.
TEST(ExactMode, LayersShareAWorkspace) {
  constexpr uint64_t kWidth = 1024, kM = 40;
  constexpr size_t kLayers = 24;
  const auto blas = blas_or_die();
  const DeviceMemory blas_workspace(Blas::kWorkspaceBytes);
  const DeviceMemory workspace(exact_workspace_bytes(kWidth, kWidth));
  const DeviceMatrix x(testing::random_activations(kM, kWidth, 3));
  std::vector<DeviceF12> layers;
  std::vector<Output> got;
  std::vector<std::vector<uint16_t>> want;
  for (size_t i = 0; i < kLayers; ++i) {
    const Words words = testing::random_weights(kWidth, kWidth, i % 2 == 0 ? 0 : 1e-2, true, 50 + i);
    const Output y(kM, kWidth, kWidth, 0);
    ASSERT_TRUE(blas->multiply(DeviceMatrix(words).view(), x.view(), y.view(), blas_workspace.data(), nullptr).ok());
    want.push_back(y.take());
    layers.emplace_back(testing::encode(words));
    got.emplace_back(kM, kWidth, kWidth, 0);
  }
  cudaStream_t stream = nullptr;
  testing::require_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  const auto launch_all = [&] {
    for (size_t i = 0; i < kLayers; ++i) {
      const Status status = multiply_exact(*blas, layers[i].matrix(), x.view(), got[i].view(), workspace.data(), stream);
      ASSERT_TRUE(status.ok()) << status.to_string();
    }
  };
  const auto check = [&] {
    testing::require_cuda(cudaStreamSynchronize(stream), "layers");
    for (size_t i = 0; i < kLayers; ++i) ASSERT_EQ(testing::first_difference(got[i].take(), want[i], kWidth), "") << "layer " << i;
  };
  for (int repeat = 0; repeat < 5; ++repeat) {
    launch_all();
    check();
  }
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  testing::require_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  launch_all();
  testing::require_cuda(cudaStreamEndCapture(stream, &graph), "capture");
  testing::require_cuda(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
  for (int repeat = 0; repeat < 5; ++repeat) {
    testing::require_cuda(cudaGraphLaunch(executable, stream), "replay");
    check();
  }
  testing::require_cuda(cudaGraphExecDestroy(executable), "destroy");
  testing::require_cuda(cudaGraphDestroy(graph), "destroy");
  testing::require_cuda(cudaStreamDestroy(stream), "destroy");
}

/// Captured once, replayed with other activations.
TEST(ExactMode, InAGraph) {
  constexpr uint64_t kN = 512, kK = 1024, kM = 48;
  const auto blas = blas_or_die();
  const DeviceMemory blas_workspace(Blas::kWorkspaceBytes);
  const Words words = testing::random_weights(kN, kK, 1e-3, true, 31);
  const DeviceF12 coded(testing::encode(words));
  const DeviceMatrix raw(words);
  const DeviceMemory workspace(exact_workspace_bytes(kN, kK));
  const DeviceMemory x(kM * kK * 2);
  const ConstBf16Matrix from{x.as<uint16_t>(), kM, kK, kK};
  const Output got(kM, kN, kN, 0);
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  testing::require_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  testing::require_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  const Status status = multiply_exact(*blas, coded.matrix(), from, got.view(), workspace.data(), stream);
  testing::require_cuda(cudaStreamEndCapture(stream, &graph), "capture");
  ASSERT_TRUE(status.ok()) << status.to_string();
  testing::require_cuda(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
  for (uint64_t round = 0; round < 5; ++round) {
    const Words activations = testing::random_activations(kM, kK, round);
    x.upload(std::as_bytes(std::span(activations.words)));
    testing::require_cuda(cudaGraphLaunch(executable, stream), "replay");
    testing::require_cuda(cudaStreamSynchronize(stream), "replay");
    const Output want(kM, kN, kN, 0);
    ASSERT_TRUE(blas->multiply(raw.view(), from, want.view(), blas_workspace.data(), nullptr).ok());
    ASSERT_EQ(testing::first_difference(got.take(), want.take(), kN), "") << "replay " << round;
  }
  testing::require_cuda(cudaGraphExecDestroy(executable), "destroy");
  testing::require_cuda(cudaGraphDestroy(graph), "destroy");
  testing::require_cuda(cudaStreamDestroy(stream), "destroy");
}

/// Damaged planes give wrong numbers and write nothing else.
TEST(ExactMode, DamagedPlanesStayInside) {
  const auto blas = blas_or_die();
  testing::HostF12 host = testing::encode(testing::random_weights(50, 1100, 1e-2, false, 9));
  const DeviceMatrix x(testing::random_activations(5, 1100, 9));
  const DeviceMemory workspace(exact_workspace_bytes(50, 1100));
  for (uint64_t round = 0; round < 10; ++round) {
    for (uint64_t i = 0; i < host.records.size(); ++i) {
      host.records[i] = static_cast<std::byte>((i + round) * 0x9e3779b97f4a7c15U >> 56);
    }
    const DeviceF12 coded(host);
    const Output y(5, 50, 53, 1);
    ASSERT_TRUE(multiply_exact(*blas, coded.matrix(), x.view(), y.view(), workspace.data(), nullptr).ok());
    EXPECT_EQ(y.take().size(), 250U);
    EXPECT_TRUE(workspace.fences_intact());
    EXPECT_TRUE(coded.fences_intact());
  }
}

}  // namespace
}  // namespace weightd::kernels
