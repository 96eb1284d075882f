// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/f12_cuda.h"
#include "store/tile_layout.h"
#include "tests/gpu/device_memory.h"

namespace weightd::testing {

/// BF16 words of a matrix [n, k], row-major without gaps.
struct Words {
  uint64_t n = 0, k = 0;
  std::vector<uint16_t> words;
  [[nodiscard]] uint16_t at(uint64_t row, uint64_t column) const { return words[row * k + column]; }
};

[[nodiscard]] uint16_t bf16_from(float value);  // to nearest even
[[nodiscard]] double value_of(uint16_t bf16);

/// Normal numbers with a scale of its own in each row, as trained weights have; every cell is, with probability `wild`, one of all
/// 65,536 patterns instead, and every pattern may be NaN or infinite unless `finite`.
[[nodiscard]] Words random_weights(uint64_t n, uint64_t k, double wild, bool finite, uint64_t seed);
/// Every pattern once and more, in a scrambled order.
[[nodiscard]] Words all_patterns(uint64_t n, uint64_t k);
/// Activations around 1.
[[nodiscard]] Words random_activations(uint64_t m, uint64_t k, uint64_t seed);

/// f12 planes made by the CPU encoder.
struct HostF12 {
  f12::Geometry geometry;
  std::vector<std::byte> codes, windows, records, pool;
  uint64_t escapes = 0, listed_groups = 0, dense_groups = 0;
};
[[nodiscard]] HostF12 encode(const Words& words);

/// The planes on the device.
class DeviceF12 {
 public:
  explicit DeviceF12(const HostF12& host);
  [[nodiscard]] kernels::F12DeviceMatrix matrix() const;
  [[nodiscard]] bool fences_intact() const;

  DeviceMemory codes, windows, records, pool;

 private:
  f12::Geometry geometry_;
};

/// "" if equal; else the first difference with its coordinates.
[[nodiscard]] std::string first_difference(const std::vector<uint16_t>& got, const std::vector<uint16_t>& want, uint64_t columns);

}  // namespace weightd::testing
