// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/gemm.h"

/// The vector code behind gemm.h: everything is checked, sized and allocated by the caller.
namespace weightd::kernels::cpu {

inline constexpr uint64_t kLanes = 16;  // partial sums of one output
inline constexpr uint64_t kUnitRows = f12::kUnitRows;
inline constexpr uint64_t kBlockSteps = 32;  // steps of 16 columns between visits to the sums in memory: one f12 group
inline constexpr uint64_t kUnitSums = kUnitRows * kLanes;

/// Some tokens' activations as binary32, converted once for all rows. The 16 values of a step stand in the order of the weights'
/// lanes (that of the columns for raw weights); columns past K are -0. Blocks of 32 steps hold all tokens, so that what is
/// multiplied together lies together.
struct Activations {
  const float* values = nullptr;  // [blocks][tokens][32 steps][16], 64-byte aligned
  uint64_t tokens = 0;

  static constexpr uint64_t kTokenStride = kBlockSteps * kLanes;  // floats between tokens of one block
  static constexpr uint64_t blocks(uint64_t k) { return (k + kTokenStride - 1) / kTokenStride; }
  static constexpr uint64_t offset(uint64_t tokens, uint64_t token, uint64_t step) {
    return ((step / kBlockSteps * tokens + token) * kBlockSteps + step % kBlockSteps) * kLanes;
  }
  const float* at(uint64_t token, uint64_t step) const { return values + offset(tokens, token, step); }
};

/// Where the result of one call goes: row `row_begin` of w is column 0 of y.
struct Output {
  uint16_t* y = nullptr;
  int64_t token_stride = 0;
  uint64_t row_begin = 0, row_end = 0;

  void put(uint64_t token, uint64_t row, uint16_t value) const {
    if (row < row_begin || row >= row_end) return;
    y[static_cast<int64_t>(token) * token_stride + static_cast<int64_t>(row - row_begin)] = value;
  }
};

/// Multiplies units [unit_begin, unit_end) of 16 rows with all tokens. `sums` is scratch of tokens * kUnitSums floats, 64-byte
/// aligned.
struct UnitRange {
  uint64_t begin = 0, end = 0;
};
void multiply_units(const F12Matrix& w, UnitRange units, const Activations& x, const Output& out, float* sums);
void multiply_units(const RawMatrix& w, UnitRange units, const Activations& x, const Output& out, float* sums);

/// Decodes rows [begin, end) to tightly packed words.
void decompress_rows(const F12Matrix& w, uint64_t begin, uint64_t end, uint8_t* words);

/// Place of column c (0..15) of a step among the lanes of f12 weights: the order in which a tile's bytes lie (f12_tile-inl.h), so
/// that weights need no permutation. c = 8s + 2q + h is lane 4q + 2s + h.
constexpr uint32_t f12_lane(uint32_t c) { return 4 * ((c >> 1) & 3) + 2 * (c >> 3) + (c & 1); }

}  // namespace weightd::kernels::cpu
