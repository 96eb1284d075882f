// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "weightd/types.h"

/// Counting weights: what `weightpack stats` prints. No float touches a weight.
namespace weightd::tools {

struct SpecialCounts {
  uint64_t inf = 0, nan = 0, zero = 0, subnormal = 0;
  void operator+=(const SpecialCounts& other);
};

/// Whether count_special() knows the dtype: F16, BF16, F32, F64.
[[nodiscard]] bool has_special_values(DType dtype);
/// Of whole little-endian elements of `dtype`, which has_special_values().
[[nodiscard]] SpecialCounts count_special(DType dtype, std::span<const std::byte> elements);

/// How often each of the 65,536 BF16 patterns occurs. Entropies are of order 0 over everything that was added, in bits per weight;
/// NaN when nothing was. Those of few weights are too low: a sample cannot show more than log2(its size).
class Bf16Counts {
 public:
  Bf16Counts() : counts_(65536) {}
  void add(std::span<const uint16_t> words, int threads);
  void operator+=(const Bf16Counts& other);
  [[nodiscard]] uint64_t weights() const;
  [[nodiscard]] double exponent_entropy() const;
  [[nodiscard]] double sign_mantissa_entropy() const;
  [[nodiscard]] double joint_entropy() const;
  [[nodiscard]] SpecialCounts special() const;

 private:
  std::vector<uint64_t> counts_;
};

/// What f12 makes of BF16 matrices (store/FORMAT.md), without coding them: exact, since windows and escapes follow from counts.
struct F12Estimate {
  uint64_t weights = 0;
  uint64_t escapes = 0;  // outside the best window of their row
  uint64_t bytes = 0;    // all planes
  void operator+=(const F12Estimate& other);
};
/// Of `rows` whole rows of one matrix with `k` columns, the first of which is a multiple of 16 from the matrix's start;
/// words.size() is rows * k. Only the last call for a matrix may have a number of rows that 16 does not divide.
[[nodiscard]] F12Estimate estimate_f12(std::span<const uint16_t> words, uint64_t rows, uint64_t k, int threads);

}  // namespace weightd::tools
