// SPDX-License-Identifier: Apache-2.0
#include "tests/reference/gemm.h"

#include <array>
#include <bit>
#include <cmath>

#include "base/parallel.h"

namespace weightd::reference {
namespace {

float widen(uint16_t word) { return std::bit_cast<float>(static_cast<uint32_t>(word) << 16); }

uint16_t round_to_bf16(float value) {
  if (std::isnan(value)) return 0x7FFF;
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t low = bits & 0xFFFFU;
  const uint32_t high = bits >> 16;
  const bool up = low > 0x8000U || (low == 0x8000U && (high & 1U) != 0);
  return static_cast<uint16_t>(high + (up ? 1U : 0U));
}

}  // namespace

uint16_t dot_bf16(std::span<const uint16_t> x, std::span<const uint16_t> w) {
  std::array<float, 16> p{};
  for (size_t k = 0; k < w.size(); ++k) p[k % 16] = std::fma(widen(x[k]), widen(w[k]), p[k % 16]);
  for (size_t half = 8; half >= 1; half /= 2) {
    for (size_t i = 0; i < half; ++i) p[i] = p[i] + p[i + half];
  }
  return round_to_bf16(p[0]);
}

void gemm_bf16(std::span<const uint16_t> x, std::span<const uint16_t> w, std::span<uint16_t> y, uint64_t m, uint64_t n, uint64_t k) {
  parallel_ranges(n, 1, 0, [&](uint64_t begin, uint64_t end) {
    for (uint64_t row = begin; row < end; ++row) {
      for (uint64_t token = 0; token < m; ++token) y[token * n + row] = dot_bf16(x.subspan(token * k, k), w.subspan(row * k, k));
    }
  });
}

}  // namespace weightd::reference
