// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include "kernels/gemm_bulk.cuh"
#include "kernels/gemm_wgmma_ptx.cuh"

/// kWgmma: sm_90a, for more tokens than mma.sync keeps up with. The weights are A: each warp of a warpgroup decodes the 16-row unit
/// that is its quarter of the 64 rows into registers (the fragment is that of mma.m16n8k16; the units need not adjoin). x is B,
/// read from shared memory where the tensor copy put it. A warpgroup of its own loads: its first warp the weights and records,
/// its second x.
///
/// A cluster has `splits` blocks with the same rows and different parts of K, times `sharing` blocks with different rows and the
/// same x, of which each loads a part for all by multicast. Stage i of a block's part belongs to slice i % warp_slices.
namespace weightd::kernels {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define WEIGHTD_HAS_WGMMA 1
#else
#define WEIGHTD_HAS_WGMMA 0
#endif

/// Registers of the warps that multiply and of those that load. Their sum over all warps is what a launch at the bound that
/// __launch_bounds__ gives allocates (65,536 over the threads, rounded down to 8 registers): more would wait for ever.
template <int kWarpgroups>
struct WgmmaRegisters {
  static_assert(kWarpgroups == 2 || kWarpgroups == 4);
  static constexpr int kMultiply = kWarpgroups == 2 ? 232 : 112;
  static constexpr int kLoad = kWarpgroups == 2 ? 40 : 32;
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  static constexpr int kAtEntry = 65536 / kThreads / 8 * 8;
  static_assert(kWarpgroups * kMultiply + kLoad <= (kWarpgroups + 1) * kAtEntry);
};

#if WEIGHTD_HAS_WGMMA

/// One block's share. Token block innermost, so that clusters with the same weights run together.
struct WgmmaWork {
  uint32_t unit_begin, unit_end;  // may be empty in the last block of a cluster
  uint32_t tile_begin, tiles;
  uint64_t token_begin;
  uint32_t split, share;

  __device__ explicit WgmmaWork(const GemmArgs& args) {
    const uint32_t cluster = args.plan.splits * args.plan.sharing;
    const uint32_t rank = blockIdx.x % cluster;
    const uint32_t index = blockIdx.x / cluster;
    split = rank % args.plan.splits;
    share = rank / args.plan.splits;
    const uint32_t block = index / args.token_blocks * args.plan.sharing + share;
    unit_begin = min(block * args.plan.units_per_block, args.units);
    unit_end = min(unit_begin + args.plan.units_per_block, args.units);
    token_begin = uint64_t{index % args.token_blocks} * args.plan.token_block;
    tile_begin = min(split * args.wgmma.split_tiles, args.tiles);
    tiles = min(args.wgmma.split_tiles, args.tiles - tile_begin);
  }
  __device__ uint32_t pass_units(const GemmPlan& plan, uint32_t pass_unit) const {
    return min(plan.units_per_pass, unit_end - min(pass_unit, unit_end));
  }
  __device__ uint32_t stages(const GemmPlan& plan) const { return (tiles + plan.tiles_per_stage - 1) / plan.tiles_per_stage; }
  __device__ uint32_t stage_tiles(const GemmPlan& plan, uint32_t stage) const {
    return min(plan.tiles_per_stage, tiles - stage * plan.tiles_per_stage);
  }
  /// Rank of the block with this share of the rows and our part of K.
  __device__ uint32_t peer(const GemmPlan& plan, uint32_t of_share) const { return split + plan.splits * of_share; }
};

struct WgmmaBarriers {
  uint32_t base;
  __device__ uint32_t full(uint32_t slot) const { return base + slot * kBarrierBytes; }
  __device__ uint32_t empty(uint32_t slot) const { return base + (kMaxWgmmaStages + slot) * kBarrierBytes; }
  __device__ uint32_t records_full(uint32_t buffer) const { return base + (2 * kMaxWgmmaStages + buffer) * kBarrierBytes; }
  __device__ uint32_t records_empty(uint32_t buffer) const { return base + (2 * kMaxWgmmaStages + 2 + buffer) * kBarrierBytes; }
};

/// How often all threads of a cluster meet after its start: around the exchange of sums; else once, so that no block ends while
/// another still signals its barriers.
__device__ __forceinline__ uint32_t cluster_meetings(const GemmPlan& plan) {
  return plan.splits > 1 ? 2 : plan.sharing > 1 ? 1 : 0;
}

/// The warp that loads weights and records. It touches nothing that the previous kernel of the stream may write, so it does not
/// wait for that kernel.
template <typename Tile>
__device__ __forceinline__ void load_weights(const GemmArgs& args, const WgmmaWork& work, const WgmmaBarriers& barriers,
                                             uint32_t shared, uint32_t lane) {
  const GemmPlan& plan = args.plan;
  const uint64_t policy = ptx::policy_evict_first();
  const uint32_t stages = work.stages(plan);
  RingPosition position;
  RingPosition records;
  for (uint32_t pass = 0, pass_unit = work.unit_begin; pass < plan.passes(); ++pass, pass_unit += plan.units_per_pass) {
    const uint32_t units = work.pass_units(plan, pass_unit);
    if (Tile::kHasRecords) {
      const uint32_t groups = (work.tiles + f12::kGroupTiles - 1) / f12::kGroupTiles;
      ptx::mbarrier_wait(barriers.records_empty(records.slot), records.parity ^ 1);
      if (lane == 0) ptx::mbarrier_arrive_expect(barriers.records_full(records.slot), units * groups * f12::kRecordBytes);
      __syncwarp();
      if (lane < units && groups > 0) {
        const uint64_t first = (uint64_t{pass_unit} + lane) * args.groups + work.tile_begin / f12::kGroupTiles;
        ptx::bulk_copy(
            shared + args.wgmma.records + records.slot * args.wgmma.record_buffer_bytes + lane * args.wgmma.record_unit_bytes,
            args.w.records + first * f12::kRecordBytes, groups * f12::kRecordBytes, barriers.records_full(records.slot), policy);
      }
      records.advance(2);
    }
    const std::byte* from = args.w.codes + ((uint64_t{pass_unit} + lane) * args.tiles + work.tile_begin) * Tile::kBytes;
    const uint32_t to = shared + args.wgmma.weights + lane * plan.tiles_per_stage * Tile::kBytes;
    for (uint32_t stage = 0; stage < stages; ++stage, position.advance(plan.stages)) {
      const uint32_t tiles = work.stage_tiles(plan, stage);
      ptx::mbarrier_wait(barriers.empty(position.slot), position.parity ^ 1);
      if (lane == 0) {
        ptx::mbarrier_arrive_expect(barriers.full(position.slot), tiles * (units * Tile::kBytes + plan.token_block * kXRowBytes));
      }
      __syncwarp();
      if (lane < units) {
        ptx::bulk_copy(to + position.slot * args.wgmma.weight_stage_bytes, from, tiles * Tile::kBytes, barriers.full(position.slot),
                       policy);
      }
      from += plan.tiles_per_stage * Tile::kBytes;
    }
  }
}

/// The warp that loads x: of each tile the block's part of the tokens, for all blocks that share x.
__device__ __forceinline__ void load_x(const GemmArgs& args, uint64_t x_map, const WgmmaWork& work, const WgmmaBarriers& barriers,
                                       uint32_t shared, uint32_t lane) {
  const GemmPlan& plan = args.plan;
  const uint64_t policy = ptx::policy_evict_last();
  const uint32_t stages = work.stages(plan);
  const uint32_t part = plan.token_block / plan.sharing * work.share;
  const auto token = static_cast<uint32_t>(work.token_begin) + part;
  uint32_t ranks = 0;
  for (uint32_t share = 0; share < plan.sharing; ++share) ranks |= 1U << work.peer(plan, share);
  const uint32_t first_to = shared + (lane * plan.token_block + part) * kXRowBytes;
  RingPosition position;
  for (uint32_t pass = 0; pass < plan.passes(); ++pass) {
    uint32_t column = (work.tile_begin + lane) * f12::kTileCols;
    for (uint32_t stage = 0; stage < stages; ++stage, position.advance(plan.stages)) {
      ptx::mbarrier_wait(barriers.empty(position.slot), position.parity ^ 1);
      if (lane < work.stage_tiles(plan, stage)) {
        const uint32_t to = first_to + position.slot * args.wgmma.x_stage_bytes;
        if (plan.sharing > 1) {
          ptx::tensor_copy_2d_multicast(to, x_map, column, token, barriers.full(position.slot), static_cast<uint16_t>(ranks),
                                        policy);
        } else {
          ptx::tensor_copy_2d(to, x_map, column, token, barriers.full(position.slot), policy);
        }
      }
      column += plan.tiles_per_stage * f12::kTileCols;
    }
  }
}

/// Where a warp's scratch holds 8 rows (half 0 or 1) of a token when it turns its sums around; free of bank conflicts both ways.
__device__ __forceinline__ uint32_t turned_offset(uint32_t token, uint32_t half) {
  return token * 32 + (half ^ (token / 4 % 2)) * 16;
}

/// Eight consecutive rows of one token.
__device__ __forceinline__ void store_rows(const GemmArgs& args, uint64_t token, uint64_t row, uint4 v) {
  uint16_t* to = args.y + static_cast<int64_t>(token) * args.y_stride + static_cast<int64_t>(row);
  if (args.vector_y && row + 8 <= args.w.n) {
    *reinterpret_cast<uint4*>(to) = v;
    return;
  }
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) {
    if (row + i < args.w.n) to[i] = static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2)));
  }
}

/// Stores 8 * kTiles tokens of a unit from packed[2i] (rows g of tokens 8i + 2q, + 1) and packed[2i + 1] (rows g + 8).
template <int kTiles>
__device__ __forceinline__ void store_turned(const GemmArgs& args, uint32_t unit, uint64_t token_begin, uint32_t scratch,
                                             uint32_t lane, const uint32_t (&packed)[2 * kTiles]) {
  __syncwarp();  // the scratch is no longer read
  if constexpr (kTiles == 1) {
    ptx::store_matrix_transposed(scratch + turned_offset(lane % 8, lane / 8 % 2), packed[0], packed[1]);
  } else {
#pragma unroll
    for (int i = 0; i < kTiles; i += 2) {
      const uint32_t token = (static_cast<uint32_t>(i) + lane / 16) * 8 + lane % 8;
      ptx::store_matrix_transposed(scratch + turned_offset(token, lane / 8 % 2), packed[2 * i], packed[2 * i + 1],
                                   packed[2 * i + 2], packed[2 * i + 3]);
    }
  }
  __syncwarp();
#pragma unroll
  for (uint32_t piece = 0; piece < 16 * kTiles; piece += 32) {
    const uint32_t token = (piece + lane) / 2;
    const uint32_t half = lane % 2;
    const uint64_t row = uint64_t{unit} * f12::kUnitRows + half * 8;
    if (token < 8 * kTiles && token_begin + token < args.m && row < args.w.n) {
      store_rows(args, token_begin + token, row, ptx::load_shared(scratch + turned_offset(token, half)));
    }
  }
}

__device__ __forceinline__ uint32_t pack_sums(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return static_cast<uint32_t>(__bfloat16_as_ushort(pair.x)) | static_cast<uint32_t>(__bfloat16_as_ushort(pair.y)) << 16;
}

/// Who a warp that multiplies is.
struct WgmmaRole {
  uint32_t warp, lane;
  uint32_t slice;        // of the block
  uint32_t unit;         // of the pass: its first
  uint32_t unit_stride;  // to its next

  template <int kWarpgroups>
  __device__ static WgmmaRole of(const GemmPlan& plan, uint32_t warp, uint32_t lane) {
    const uint32_t warp_slices = plan.warp_slices();
    const uint32_t warpgroup = warp / kWarpgroupWarps;
    return {warp, lane, warpgroup % warp_slices, warpgroup / warp_slices * kWarpgroupWarps + warp % kWarpgroupWarps,
            kWarpgroups / warp_slices * kWarpgroupWarps};
  }
};

/// Sums over all slices, in order, and stores. Each block of a cluster gets the sums of its part of the tokens from the others.
template <int kTokens, int kUnits, int kWarpgroups>
__device__ __forceinline__ void exchange_sums(const GemmArgs& args, const WgmmaWork& work, const WgmmaRole& role, uint32_t shared,
                                              const float (&acc)[kUnits][kTokens / 2]) {
  const GemmPlan& plan = args.plan;
  const uint32_t units = work.pass_units(plan, work.unit_begin);
  const uint32_t owned = kTokens / 8 / plan.splits;  // token tiles of each block
  const auto meet = [&] {
    if (plan.splits > 1) {
      ptx::cluster_arrive();
      ptx::cluster_wait();
    } else {
      ptx::barrier_sync(1, 128 * kWarpgroups);
    }
  };
  const auto place = [&](uint32_t slice, uint32_t unit, uint32_t tile) {
    return shared + (((slice * plan.units_per_pass + unit) * owned + tile) * 32 + role.lane) * 16;
  };
  meet();  // the rings under the sums are idle
#pragma unroll
  for (int p = 0; p < kUnits; ++p) {
    const uint32_t unit = role.unit + static_cast<uint32_t>(p) * role.unit_stride;
    if (unit >= units) continue;
#pragma unroll
    for (uint32_t i = 0; i < kTokens / 8; ++i) {
      const uint32_t to = place(work.split * plan.warp_slices() + role.slice, unit, i % owned);
      const uint32_t mapped = ptx::map_shared(to, i / owned + plan.splits * work.share);
      ptx::store_mapped(mapped, acc[p][4 * i], acc[p][4 * i + 1], acc[p][4 * i + 2], acc[p][4 * i + 3]);
    }
  }
  meet();
  const uint32_t scratch = shared + args.wgmma.scratch + role.warp * kScratchBytes;
  for (uint32_t item = role.warp; item < units * owned; item += kWarpgroupWarps * kWarpgroups) {
    const uint32_t unit = item / owned;
    const uint32_t tile = item % owned;
    const uint64_t token_begin = work.token_begin + 8 * (work.split * owned + tile);
    if (token_begin >= args.m) continue;
    float sum[4] = {0, 0, 0, 0};
    for (uint32_t slice = 0; slice < plan.slices; ++slice) {
      const uint4 bits = ptx::load_shared(place(slice, unit, tile));
      const float part[4] = {__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z), __uint_as_float(bits.w)};
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] = slice == 0 ? part[i] : sum[i] + part[i];
    }
    const uint32_t packed[2] = {pack_sums(sum[0], sum[1]), pack_sums(sum[2], sum[3])};
    store_turned<1>(args, work.unit_begin + unit, token_begin, scratch, role.lane, packed);
  }
}

/// Rounds and stores the sums of a warp's unit where K is not cut.
template <int kTokens>
__device__ __forceinline__ void store_sums(const GemmArgs& args, const WgmmaWork& work, uint32_t unit, uint32_t scratch,
                                           uint32_t lane, const float (&acc)[kTokens / 2]) {
#pragma unroll
  for (uint32_t first = 0; first < kTokens; first += 32) {
    if (work.token_begin + first >= args.m) return;
    uint32_t packed[8];
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) packed[i] = pack_sums(acc[first / 2 + 2 * i], acc[first / 2 + 2 * i + 1]);
    store_turned<4>(args, unit, work.token_begin + first, scratch, lane, packed);
  }
}

template <typename Tile, int kTokens, int kUnits, int kWarpgroups>
__device__ __forceinline__ void multiply_units(const GemmArgs& args, const WgmmaWork& work, const WgmmaBarriers& barriers,
                                               std::byte* memory, uint32_t warp, uint32_t lane) {
  const GemmPlan& plan = args.plan;
  const WgmmaRole role = WgmmaRole::of<kWarpgroups>(plan, warp, lane);
  const uint32_t shared = ptx::shared_address(memory);
  const uint32_t scratch = shared + args.wgmma.scratch + warp * kScratchBytes;
  const uint32_t unit_bytes = plan.tiles_per_stage * Tile::kBytes;
  const uint32_t my_weights = shared + args.wgmma.weights + role.unit * unit_bytes;
  const uint32_t warp_slices = plan.warp_slices();
  const uint32_t stages = work.stages(plan);
  constexpr uint32_t kNone = ~0U;

  RingPosition position{role.slice, 0};
  RingPosition records;
  uint32_t held = kNone;  // the slot that the products in flight read
  const auto give_back = [&] {
    if (held == kNone) return;
    __syncwarp();
    if (plan.sharing == 1) {
      if (lane == 0) ptx::mbarrier_arrive(barriers.empty(held));
    } else if (lane < plan.sharing) {
      ptx::mbarrier_arrive_mapped(ptx::map_shared(barriers.empty(held), work.peer(plan, lane)));
    }
    held = kNone;
  };

  for (uint32_t pass = 0, pass_unit = work.unit_begin; pass < plan.passes(); ++pass, pass_unit += plan.units_per_pass) {
    const uint32_t units = work.pass_units(plan, pass_unit);
    bool active[kUnits];
    typename Tile::Windows windows[kUnits];
    Fragments a[kUnits];
    float acc[kUnits][kTokens / 2];
#pragma unroll
    for (int p = 0; p < kUnits; ++p) {
      const uint32_t unit = role.unit + static_cast<uint32_t>(p) * role.unit_stride;
      active[p] = unit < units;
      if (active[p]) windows[p] = Tile::load_windows(args.w, pass_unit + unit, lane);
      a[p] = {};  // of a warp without a unit
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) acc[p][i] = 0.0F;
    }
    const std::byte* my_records =
        memory + args.wgmma.records + records.slot * args.wgmma.record_buffer_bytes + role.unit * args.wgmma.record_unit_bytes;
    if (Tile::kHasRecords) ptx::mbarrier_wait(barriers.records_full(records.slot), records.parity);

    for (uint32_t stage = role.slice; stage < stages; stage += warp_slices) {
      const uint32_t full = barriers.full(position.slot);
      if (!__all_sync(0xffffffffU, ptx::mbarrier_test(full, position.parity))) {
        ptx::wgmma_wait_all();  // memory is behind: give the slot back before sleeping
        give_back();
        ptx::mbarrier_wait(full, position.parity);
      }
      const uint32_t first_tile = stage * plan.tiles_per_stage;
      const uint32_t tiles = work.stage_tiles(plan, stage);
      const uint32_t my_tiles = my_weights + position.slot * args.wgmma.weight_stage_bytes;
      for (uint32_t c = 0; c < tiles; ++c) {
        // While the products of the tile before run: all of decoding but the merge, which needs their registers.
        typename Tile::Halves halves[kUnits];
#pragma unroll
        for (int p = 0; p < kUnits; ++p) {
          if (!active[p]) continue;
          const uint32_t unit = static_cast<uint32_t>(p) * role.unit_stride;  // from the first
          uint4 v[Tile::kVectors];
          load_tile_shared<Tile>(my_tiles + unit * unit_bytes + c * Tile::kBytes, lane, v);
          halves[p] = Tile::split(v, windows[p], [&](uint4& ha, uint4& hb) {
            const uint32_t tile = first_tile + c;
            const Record record =
                Record::load(my_records + unit * args.wgmma.record_unit_bytes + tile / f12::kGroupTiles * f12::kRecordBytes);
            patch_tile(record, tile % f12::kGroupTiles, args.w, scratch, lane, ha, hb);
          });
        }
        ptx::wgmma_wait_all();
        give_back();
#pragma unroll
        for (int p = 0; p < kUnits; ++p) {
          if (active[p]) a[p] = Tile::merge(halves[p]);
        }
        const uint64_t x_tile =
            ptx::swizzled_descriptor(shared + position.slot * args.wgmma.x_stage_bytes + c * (kTokens * kXRowBytes));
        ptx::wgmma_fence();
#pragma unroll
        for (uint32_t step = 0; step < 4; ++step) {
#pragma unroll
          for (int p = 0; p < kUnits; ++p) ptx::wgmma(acc[p], a[p].a[step], x_tile + 2 * step);
        }
        ptx::wgmma_commit();
      }
      held = position.slot;
      position.slot += warp_slices;  // at most one round: a ring has a slot for each slice
      if (position.slot >= plan.stages) {
        position.slot -= plan.stages;
        position.parity ^= 1;
      }
    }
    ptx::wgmma_wait_all();
    give_back();
    if (Tile::kHasRecords && lane == 0) ptx::mbarrier_arrive(barriers.records_empty(records.slot));
    records.advance(2);
    if (plan.slices > 1) {
      exchange_sums<kTokens, kUnits, kWarpgroups>(args, work, role, shared, acc);
    } else {
#pragma unroll
      for (int p = 0; p < kUnits; ++p) {
        const uint32_t unit = role.unit + static_cast<uint32_t>(p) * role.unit_stride;
        if (active[p]) store_sums<kTokens>(args, work, pass_unit + unit, scratch, lane, acc[p]);
      }
    }
  }
  if (plan.splits == 1 && plan.sharing > 1) {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
}

#endif

/// Where the build has no code for wgmma the body is empty and the bound on the threads says so (see prepare_gemm).
template <typename Tile, int kTokens, int kUnits, int kWarpgroups>
__global__ void __launch_bounds__(WEIGHTD_HAS_WGMMA ? WgmmaRegisters<kWarpgroups>::kThreads : 32, 1)
    gemm_wgmma_kernel(const __grid_constant__ GemmArgs args, const __grid_constant__ CUtensorMap x_map) {
#if WEIGHTD_HAS_WGMMA
  extern __shared__ __align__(1024) std::byte shared[];
  using Registers = WgmmaRegisters<kWarpgroups>;
  const GemmPlan& plan = args.plan;
  const uint32_t warp = __shfl_sync(0xffffffffU, threadIdx.x / 32, 0);
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t base = ptx::shared_address(shared);
  const WgmmaWork work(args);
  const WgmmaBarriers barriers{base + args.wgmma.barriers};
  const bool clustered = plan.splits * plan.sharing > 1;

  if (threadIdx.x == 0) {
    const uint32_t warps = kWarpgroups * kWarpgroupWarps;
    for (uint32_t slot = 0; slot < plan.stages; ++slot) {
      ptx::mbarrier_init(barriers.full(slot), 1);
      ptx::mbarrier_init(barriers.empty(slot), warps / plan.warp_slices() * plan.sharing);
    }
    for (uint32_t buffer = 0; buffer < 2; ++buffer) {
      ptx::mbarrier_init(barriers.records_full(buffer), 1);
      ptx::mbarrier_init(barriers.records_empty(buffer), warps);
    }
    ptx::fence_barrier_init();
    ptx::prefetch_tensor_map(&x_map);
  }
  __syncthreads();
  if (clustered) ptx::cluster_arrive();
  ptx::launch_dependents();
  if (warp >= kWarpgroups * kWarpgroupWarps) {
    ptx::lower_registers<Registers::kLoad>();
    const uint32_t loader = warp - kWarpgroups * kWarpgroupWarps;
    if (loader == 0) load_weights<Tile>(args, work, barriers, base, lane);
    if (clustered) ptx::cluster_wait();
    if (loader == 1) {
      ptx::wait_previous();
      load_x(args, reinterpret_cast<uint64_t>(&x_map), work, barriers, base, lane);
    }
    __syncwarp();
    for (uint32_t i = 0; i < cluster_meetings(plan); ++i) {
      ptx::cluster_arrive();
      ptx::cluster_wait();
    }
  } else {
    ptx::raise_registers<Registers::kMultiply>();
    if (clustered) ptx::cluster_wait();
    ptx::wait_previous();  // y may still be read by the previous kernel
    multiply_units<Tile, kTokens, kUnits, kWarpgroups>(args, work, barriers, shared, warp, lane);
  }
#endif
}

}  // namespace weightd::kernels
