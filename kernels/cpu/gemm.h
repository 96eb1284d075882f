// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "store/tile_layout.h"
#include "weightd/status.h"
#include "weightd/types.h"

/// Host kernels over the resident forms. Vectorized (Highway), threaded, no allocation that outlives a call.
namespace weightd::kernels::cpu {

/// One f12 matrix [n, k] in an arena. Borrows all pointers; any alignment. `pool` is the start of the model's pool.
/// The planes have passed f12 validation (the loader does that): the kernels still never read outside pool_bytes.
struct F12Matrix {
  const std::byte* codes = nullptr;
  const std::byte* windows = nullptr;
  const std::byte* records = nullptr;
  const std::byte* pool = nullptr;
  uint64_t pool_bytes = 0;
  uint64_t n = 0, k = 0;
};

/// One BF16 matrix [n, k], K contiguous, rows `row_stride` elements apart; any byte alignment.
struct RawMatrix {
  const std::byte* words = nullptr;
  uint64_t n = 0, k = 0;
  uint64_t row_stride = 0;
};

struct RowRange {  // rows [begin, end) of w; begin is a multiple of 16 for F12Matrix
  uint64_t begin = 0, end = 0;
};

/// y[m, end - begin] = x[m, k] · w[begin..end, k]ᵀ, BF16 in and out, fp32 accumulation in this order, which is the contract
/// (kernels/LAYOUT.md, "host GEMM"): for every (token, row) there are 16 partial sums p[0..15], each +0 at first;
/// for k ascending, p[k mod 16] = fma(x[k], w[k], p[k mod 16]) in binary32, round to nearest even, subnormals kept;
/// columns past K add nothing. Then s[i] = p[i] + p[i+8] (i < 8), s[i] = s[i] + s[i+4] (i < 4), s[i] = s[i] + s[i+2] (i < 2),
/// s = s[0] + s[1], rounded to BF16 to nearest even; any NaN becomes 0x7FFF. So the result depends on no other row or token, and
/// not on threads or instruction set; f12 and raw give the same bits for the same weights. The rounding mode and the flush-to-zero
/// bits of the calling thread have no influence.
///   x  [m, k], y  [m, end - begin]; with more than one token, row strides of at least the columns (with one the stride says
///   nothing);
///      addresses at multiples of 2. The bytes from y's first to its last element must not meet those of x or w.
/// threads <= 0: one per core; small products use fewer. m == 0 or an empty range: nothing is written. k == 0: y is +0.
/// kInvalidArgument for wrong shapes, strides, addresses or overlap, kResourceExhausted without memory for the converted x (at most
/// 8 MiB, or 24 k bytes if that is more, and 96 KiB a thread); y untouched then.
Status gemm(const F12Matrix& w, RowRange rows, ConstBf16Matrix x, Bf16Matrix y, int threads);
Status gemm(const RawMatrix& w, RowRange rows, ConstBf16Matrix x, Bf16Matrix y, int threads);

/// Decodes rows [begin, end) (any begin) to BF16 words, tightly packed, into out, which holds exactly (end - begin) * k * 2 bytes.
Status decompress(const F12Matrix& w, uint64_t begin, uint64_t end, std::span<std::byte> out, int threads);

}  // namespace weightd::kernels::cpu
