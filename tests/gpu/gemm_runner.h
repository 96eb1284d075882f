// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "tests/gpu/raw16.h"
#include "tests/gpu/test_matrix.h"

/// Runs fused GEMMs on fenced and poisoned memory and knows the right answers.
namespace weightd::testing {

using kernels::F12DeviceMatrix;
using kernels::GemmDevice;
using kernels::GemmKernel;
using kernels::GemmKernels;
using kernels::GemmPlan;
using kernels::GemmRequest;

inline constexpr uint16_t kPoison = 0xA5A5;

inline GemmDevice device_or_die() {
  Result<GemmDevice> device = kernels::prepare_gemm();
  if (!device.ok()) {
    std::fprintf(stderr, "prepare_gemm: %s\n", device.status().to_string().c_str());
    std::abort();
  }
  const Status raised = raise_shared_limits(raw16_gemm_kernels(), device->traits.shared_bytes);
  EXPECT_TRUE(raised.ok()) << raised.to_string();
  return *device;
}

/// x on the device: rows `stride` elements apart, `before` elements into its memory. What lies between the rows is NaN.
class DeviceX {
 public:
  DeviceX(const Words& x, int64_t stride, uint64_t before) : x_(x), stride_(stride), memory_(place(x, stride, before)) {
    view_ = {memory_.as<uint16_t>() + before, x.n, x.k, stride};
  }
  [[nodiscard]] ConstBf16Matrix view() const { return view_; }
  /// The first `m` rows only.
  [[nodiscard]] ConstBf16Matrix rows(uint64_t begin, uint64_t end) const {
    return {view_.data + static_cast<int64_t>(begin) * stride_, end - begin, x_.k, stride_};
  }

 private:
  static DeviceMemory place(const Words& x, int64_t stride, uint64_t before) {
    std::vector<uint16_t> memory(before + (x.n - 1) * static_cast<uint64_t>(stride) + x.k, 0x7fff);
    for (uint64_t row = 0; row < x.n; ++row) {
      const uint64_t at = before + row * static_cast<uint64_t>(stride);
      std::copy_n(x.words.begin() + static_cast<int64_t>(row * x.k), x.k, memory.begin() + static_cast<int64_t>(at));
    }
    return to_device(memory);
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
    GemmRequest request{n, k, m, true, false, tile_bytes};
    request.kernel = kernel;
    Result<GemmPlan> made = plan_gemm(device.traits, request);
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
    const std::vector<uint16_t> memory = from_device<uint16_t>(y);
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
inline std::string check_bound(const Words& w, const Words& x, const std::vector<uint16_t>& y, uint32_t slices) {
  const double additions = static_cast<double>(w.k) / 8 + slices + 4;
  for (uint64_t token = 0; token < x.n; ++token) {
    for (uint64_t row = 0; row < w.n; ++row) {
      double exact = 0;
      double magnitude = 0;
      for (uint64_t c = 0; c < w.k; ++c) {
        const double product = value_of(x.at(token, c)) * value_of(w.at(row, c));
        exact += product;
        magnitude += std::abs(product);
      }
      const double got = value_of(y[token * w.n + row]);
      const double bound = std::ldexp(std::abs(exact), -8) + additions * std::ldexp(magnitude, -22);
      if (!(std::abs(got - exact) <= bound)) {
        return "token " + std::to_string(token) + ", row " + std::to_string(row) + ": got " + std::to_string(got) + ", exact " +
               std::to_string(exact) + ", bound " + std::to_string(bound);
      }
    }
  }
  return "";
}

/// Small integers: every sum is exact in fp32 and in BF16, so the right answer is known to the last bit.
inline Words small_integers(uint64_t rows, uint64_t k, uint64_t seed) {
  Words words{rows, k, std::vector<uint16_t>(rows * k)};
  for (uint64_t i = 0; i < words.words.size(); ++i) {
    const uint64_t hash = (i + seed * 1000003) * 0x9e3779b97f4a7c15U;
    words.words[i] = bf16_from(static_cast<float>(static_cast<int>((hash >> 33) % 3) - 1));
  }
  return words;
}

/// y = x · wᵀ of such matrices, for the tokens and rows given.
inline uint16_t exact_product(const Words& w, const Words& x, uint64_t token, uint64_t row) {
  double sum = 0;
  for (uint64_t c = 0; c < w.k; ++c) sum += value_of(x.at(token, c)) * value_of(w.at(row, c));
  return bf16_from(static_cast<float>(sum));
}

}  // namespace weightd::testing
