// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/gemm_device.cuh"

/// kDirect: sm_80 and up, no condition on x. Weights go from global memory straight into the registers of the warp that uses them,
/// one tile ahead; x goes through a double buffer in shared memory.
namespace weightd::kernels {

/// x columns of tiles [first_tile, first_tile + tiles_per_stage) for the block's tokens into buffer `x_stage`; zeros past m and K.
template <int kTokenTiles>
__device__ __forceinline__ void fetch_x(const GemmArgs& args, uint64_t token_begin, uint32_t first_tile, uint32_t x_stage) {
  constexpr uint32_t tokens = 8 * kTokenTiles;
  const uint32_t pieces = args.plan.tiles_per_stage * tokens * 8;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < pieces; i += blockDim.x) {
    const uint32_t piece = i % 8;
    const uint32_t token = i / 8 % tokens;
    const uint32_t tile = i / 8 / tokens;
    const uint64_t column = uint64_t{first_tile + tile} * f12::kTileCols + piece * 8;
    const bool inside = token_begin + token < args.m && column < args.w.k;
    const uint32_t count = inside ? static_cast<uint32_t>(min(args.w.k - column, uint64_t{8})) : 0;
    const uint16_t* from = args.x;
    if (inside) from += static_cast<int64_t>(token_begin + token) * args.x_stride + static_cast<int64_t>(column);
    const uint32_t to = x_stage + tile * tokens * kXRowBytes + x_piece_offset(token, piece);
    if (args.vector_x) {
      ptx::copy_async(to, from, count * 2);
    } else {
      uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
      for (uint32_t e = 0; e < 8; ++e) {
        if (e < count) words[e / 2] |= static_cast<uint32_t>(from[e]) << (16 * (e % 2));
      }
      ptx::store_shared(to, {words[0], words[1], words[2], words[3]});
    }
  }
  ptx::copy_async_commit();
}

template <typename Tile, int kTokenTiles>
__global__ void __launch_bounds__(32 * kMaxConsumerWarps, 1) gemm_direct_kernel(const __grid_constant__ GemmArgs args) {
  extern __shared__ __align__(1024) std::byte shared[];
  const GemmPlan& plan = args.plan;
  const uint32_t warp = threadIdx.x / 32;
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t slice = warp % plan.slices;
  const uint32_t unit_in_pass = warp / plan.slices;
  const BlockWork work(args);
  const uint32_t x_base = ptx::shared_address(shared);
  const uint32_t scratch = x_base + args.direct.scratch + warp * kScratchBytes;
  const uint32_t stages = (args.tiles + plan.tiles_per_stage - 1) / plan.tiles_per_stage;  // of one pass
  constexpr uint32_t x_tile_bytes = 8 * kTokenTiles * kXRowBytes;

  uint32_t buffer = 0;
  if (stages > 0) fetch_x<kTokenTiles>(args, work.token_begin, 0, x_base);
  for (uint32_t pass_unit = work.unit_begin; pass_unit < work.unit_end; pass_unit += plan.units_per_pass) {
    const bool last_pass = pass_unit + plan.units_per_pass >= work.unit_end;
    const uint32_t unit = pass_unit + unit_in_pass;
    const bool active = unit < work.unit_end;
    const std::byte* ahead = args.w.codes + (uint64_t{unit} * args.tiles + slice) * Tile::kBytes;  // the tile in `next`
    const uint32_t ahead_step = plan.slices * Tile::kBytes;
    const std::byte* unit_records = args.w.records + uint64_t{unit} * args.groups * f12::kRecordBytes;
    typename Tile::Windows windows;
    uint4 next[Tile::kVectors];
    if (active && slice < args.tiles) {
      windows = Tile::load_windows(args.w, unit, lane);
      load_tile<Tile>(ahead, lane, next);
    }
    float acc[kTokenTiles][4];
    clear(acc);

    for (uint32_t stage = 0; stage < stages; ++stage, buffer ^= 1) {
      ptx::copy_async_wait_all();
      __syncthreads();  // this stage's x is there, and the other buffer is no longer read
      const bool more = stage + 1 < stages || !last_pass;
      const uint32_t following = stage + 1 < stages ? (stage + 1) * plan.tiles_per_stage : 0;
      if (more) fetch_x<kTokenTiles>(args, work.token_begin, following, x_base + (buffer ^ 1) * args.direct.x_stage_bytes);
      if (!active) continue;
      for (uint32_t c = slice; c < plan.tiles_per_stage; c += plan.slices) {
        const uint32_t tile = stage * plan.tiles_per_stage + c;
        if (tile >= args.tiles) break;
        uint4 v[Tile::kVectors];
#pragma unroll
        for (uint32_t i = 0; i < Tile::kVectors; ++i) v[i] = next[i];
        ahead += ahead_step;
        if (tile + plan.slices < args.tiles) load_tile<Tile>(ahead, lane, next);
        const Fragments f = Tile::decode(v, windows, [&](uint4& ha, uint4& hb) {
          const Record record = Record::load(unit_records + uint64_t{tile / f12::kGroupTiles} * f12::kRecordBytes);
          patch_tile(record, tile % f12::kGroupTiles, args.w, scratch, lane, ha, hb);
        });
        multiply_tile<kTokenTiles, kTokenTiles == 8 ? 1 : 4>(f, x_base + buffer * args.direct.x_stage_bytes + c * x_tile_bytes,
                                                             lane, acc);
      }
    }
    sum_slices<kTokenTiles>(plan, unit_in_pass, slice, reinterpret_cast<float*>(shared), lane, blockDim.x, acc);
    if (active && slice == 0) store_outputs<kTokenTiles>(args, unit, work.token_begin, lane, acc);
  }
}

}  // namespace weightd::kernels
