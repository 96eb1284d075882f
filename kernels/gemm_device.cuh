// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/f12_cuda.h"
#include "kernels/gemm_shared.h"
#include "kernels/ptx.cuh"
#include "kernels/tile.cuh"

/// What the GEMM kernels share: the swizzled x tile, the product of one tile, the sum over slices, the store.
/// A warp's accumulators are acc[i][4], token tile i of 8: [0] row g, token 2q; [1] row g, token 2q + 1; [2], [3] the same of row g
/// + 8.
namespace weightd::kernels {

struct GemmArgs {
  F12DeviceMatrix w;  // raw16: only codes
  GemmPlan plan;
  uint32_t units, tiles, groups;
  uint32_t token_blocks;
  uint64_t m;
  const uint16_t* x;
  int64_t x_stride;
  uint16_t* y;
  int64_t y_stride;
  bool vector_x, vector_y;
  BulkShared bulk;
  DirectShared direct;
  WgmmaShared wgmma;
};

/// One block's share: token block innermost, so that blocks with the same weights run together.
struct BlockWork {
  uint32_t unit_begin, unit_end;
  uint64_t token_begin;

  __device__ explicit BlockWork(const GemmArgs& args) {
    const uint32_t block = blockIdx.x / args.token_blocks;
    unit_begin = block * args.plan.units_per_block;
    unit_end = min(unit_begin + args.plan.units_per_block, args.units);
    token_begin = uint64_t{blockIdx.x % args.token_blocks} * args.plan.token_block;
  }
};

/// Byte offset of 16-byte piece `piece` (8 columns) of `token` in an x tile [tokens][64]: the 128-byte swizzle of the tensor copy.
__device__ __forceinline__ uint32_t x_piece_offset(uint32_t token, uint32_t piece) {
  return token * kXRowBytes + ((piece ^ (token % 8)) * 16);
}

/// acc[16 rows, 8 * kTokenTiles tokens] += tile[16, 64] · x_tile[tokens, 64]ᵀ, kSteps of the four k16 steps at a time.
template <int kTokenTiles, int kSteps>
__device__ __forceinline__ void multiply_tile(Fragments f, uint32_t x_tile, uint32_t lane, float (&acc)[kTokenTiles][4]) {
  uint32_t b[4];
  if constexpr (kTokenTiles == 1) {
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {  // b: low and high columns of step 2 half, then of step 2 half + 1
      ptx::load_matrix_x4(x_tile + x_piece_offset(lane % 8, half * 4 + lane / 8), b);
      ptx::mma_m16n8k16(acc[0], f.a[2 * half], b[0], b[1]);
      ptx::mma_m16n8k16(acc[0], f.a[2 * half + 1], b[2], b[3]);
    }
  } else {
    // Within an iteration ptxas starts all x loads first: with eight token tiles, four steps of them are more than there are
    // registers.
#pragma unroll kSteps
    for (uint32_t step = 0; step < 4; ++step) {
#pragma unroll
      for (int i = 0; i < kTokenTiles; i += 2) {  // b: low and high columns of token tile i, then of i + 1
        ptx::load_matrix_x4(
            x_tile + x_piece_offset(static_cast<uint32_t>(i) * 8 + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2), b);
        ptx::mma_m16n8k16(acc[i], f.a[0], b[0], b[1]);
        ptx::mma_m16n8k16(acc[i + 1], f.a[0], b[2], b[3]);
      }
#pragma unroll
      for (uint32_t r = 0; r < 12; ++r) f.a[r / 4][r % 4] = f.a[r / 4 + 1][r % 4];  // no code where the loop is unrolled
    }
  }
}

/// acc of slice 0 += acc of slices 1, 2, ... in that order. `partials` is shared memory that no one else uses; all `threads`
/// threads of the consumer warps call this, with barrier 1 theirs.
template <int kTokenTiles>
__device__ __forceinline__ void sum_slices(const GemmPlan& plan, uint32_t unit, uint32_t slice, float* partials, uint32_t lane,
                                           uint32_t threads, float (&acc)[kTokenTiles][4]) {
  if (plan.slices == 1) return;
  const auto place = [&](uint32_t from) {
    return partials + ((from - 1) * plan.units_per_pass + unit) * (kTokenTiles * 128) + lane;
  };
  ptx::barrier_sync(1, threads);  // the memory under the partial sums is idle
  if (slice > 0) {
    float* mine = place(slice);
#pragma unroll
    for (int i = 0; i < kTokenTiles * 4; ++i) mine[32 * i] = acc[i / 4][i % 4];
  }
  ptx::barrier_sync(1, threads);
  if (slice > 0) return;
  for (uint32_t from = 1; from < plan.slices; ++from) {
    const float* theirs = place(from);
#pragma unroll
    for (int i = 0; i < kTokenTiles * 4; ++i) acc[i / 4][i % 4] += theirs[32 * i];
  }
}

template <int kTokenTiles>
__device__ __forceinline__ void store_outputs(const GemmArgs& args, uint32_t unit, uint64_t token_begin, uint32_t lane,
                                              const float (&acc)[kTokenTiles][4]) {
  const uint64_t row = uint64_t{unit} * f12::kUnitRows + lane / 4;
  const auto tokens = static_cast<uint32_t>(min(args.m - token_begin, uint64_t{8 * kTokenTiles}));
  const bool upper = row < args.w.n;  // row g
  const bool lower = row + 8 < args.w.n;
  uint32_t token = 2 * (lane % 4);
  uint16_t* y = args.y + static_cast<int64_t>(token_begin + token) * args.y_stride + static_cast<int64_t>(row);
  const auto word = [](float sum) { return __bfloat16_as_ushort(__float2bfloat16_rn(sum)); };
#pragma unroll
  for (int i = 0; i < kTokenTiles; ++i) {
    if (token < tokens && upper) y[0] = word(acc[i][0]);
    if (token + 1 < tokens && upper) y[args.y_stride] = word(acc[i][1]);
    if (token < tokens && lower) y[8] = word(acc[i][2]);
    if (token + 1 < tokens && lower) y[args.y_stride + 8] = word(acc[i][3]);
    token += 8;
    y += 8 * args.y_stride;
  }
}

template <int kTokenTiles>
__device__ __forceinline__ void clear(float (&acc)[kTokenTiles][4]) {
#pragma unroll
  for (int i = 0; i < kTokenTiles * 4; ++i) acc[i / 4][i % 4] = 0.0F;
}

}  // namespace weightd::kernels
