// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include "kernels/gemm_bulk.cuh"
#include "kernels/gemm_wgmma_ptx.cuh"

/// kWgmma: sm_90a, for more tokens than mma.sync keeps up with. The weights are A: each warp of a warpgroup decodes the 16-row unit
/// that is its quarter of the 64 rows into registers (the fragment is that of mma.m16n8k16; the units need not adjoin). x is B,
/// read from shared memory where the tensor copy put it. A warpgroup of its own loads: its second warp x, the others weights and
/// records.
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
struct WgmmaWork : WgmmaPart {
  uint32_t unit_begin, unit_end;  // may be empty in the last block of a cluster
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
    static_cast<WgmmaPart&>(*this) = WgmmaPart(split, args.wgmma.split_tiles, args.tiles);
  }
  __device__ uint32_t pass_units(const GemmPlan& plan, uint32_t pass_unit) const {
    return min(plan.units_per_pass, unit_end - min(pass_unit, unit_end));
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
  /// Counts what the other slices send.
  __device__ uint32_t sums() const { return base + (2 * kMaxWgmmaStages + 4) * kBarrierBytes; }
};

/// Named barriers: all warps that multiply; those of each warpgroup.
inline constexpr uint32_t kMultiplyBarrier = 1;
inline constexpr uint32_t kWarpgroupBarrier = 2;

/// All threads of the cluster. Blocks that share x signal each other's barriers: such signals must have arrived before the block
/// that gets them may end. Other clusters meet where nothing written before is read after.
__device__ __forceinline__ void cluster_meet(const GemmPlan& plan) {
  if (plan.sharing > 1) {
    ptx::cluster_arrive_release();
  } else {
    ptx::cluster_arrive();
  }
  ptx::cluster_wait();
}

/// Starts the records of a pass.
__device__ __forceinline__ void load_records(const GemmArgs& args, const WgmmaWork& work, const WgmmaBarriers& barriers,
                                             uint32_t shared, uint32_t lane, uint32_t pass_unit, const RingPosition& records,
                                             uint64_t policy) {
  const uint32_t units = work.pass_units(args.plan, pass_unit);
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
}

/// A warp that loads weights; the first also loads records and announces what x brings. They touch nothing that the previous kernel
/// of the stream may write, so they do not wait for that kernel. Issuing copies is slow: one tensor copy brings a whole stage where
/// every pass has the same number of units; else each unit takes a copy, and the warps take turns.
template <typename Tile>
__device__ __forceinline__ void load_weights(const GemmArgs& args, uint64_t w_map, const WgmmaWork& work,
                                             const WgmmaBarriers& barriers, uint32_t shared, uint32_t turn, uint32_t lane) {
  const GemmPlan& plan = args.plan;
  const uint64_t policy = ptx::policy_evict_first();
  const uint32_t stages = work.stages(plan);
  const uint32_t unit_bytes = plan.tiles_per_stage * Tile::kBytes;
  RingPosition position;
  RingPosition records;
  for (uint32_t pass = 0, pass_unit = work.unit_begin; pass < plan.passes(); ++pass, pass_unit += plan.units_per_pass) {
    if (Tile::kHasRecords && turn == 0) load_records(args, work, barriers, shared, lane, pass_unit, records, policy);
    records.advance(2);
    const uint32_t units = work.pass_units(plan, pass_unit);
    const uint32_t unit = lane * kWeightLoaders + turn;  // this lane's, where each takes a copy
    const std::byte* from = args.w.codes + ((uint64_t{pass_unit} + unit) * args.tiles + work.tile_begin) * Tile::kBytes;
    for (uint32_t stage = 0; stage < stages; ++stage, position.advance(plan.stages)) {
      const uint32_t tiles = work.stage_tiles(plan, stage);
      const uint32_t full = barriers.full(position.slot);
      const uint32_t to = shared + args.wgmma.weights + position.slot * args.wgmma.weight_stage_bytes;
      ptx::mbarrier_wait(barriers.empty(position.slot), position.parity ^ 1);
      if (lane == 0) ptx::mbarrier_arrive_expect(full, stage_bytes(plan, Tile::kBytes, units, tiles, turn));
      __syncwarp();
      if (plan.tensor_weights) {
        if (lane == 0) {
          ptx::tensor_copy_3d(to, w_map, 0, work.tile_begin + stage * plan.tiles_per_stage, pass_unit, full, policy);
        }
      } else {
        if (unit < units) ptx::bulk_copy(to + unit * unit_bytes, from, tiles * Tile::kBytes, full, policy);
        from += unit_bytes;
      }
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

/// Sums over all slices, in order, and stores. Each block of a cluster gets the sums of its part of the tokens from all blocks; its
/// barrier counts their bytes, which is cheaper than two meetings of the cluster.
template <int kTokens, int kUnits, int kWarpgroups>
__device__ __forceinline__ void exchange_sums(const GemmArgs& args, const WgmmaWork& work, const WgmmaBarriers& barriers,
                                              const WgmmaRole& role, uint32_t shared, const float (&acc)[kUnits][kTokens / 2]) {
  const GemmPlan& plan = args.plan;
  const uint32_t units = work.pass_units(plan, work.unit_begin);
  const uint32_t owned = kTokens / 8 / plan.splits;  // token tiles of each block
  const auto place = [&](uint32_t slice, uint32_t unit, uint32_t tile) {
    return shared + (((slice * plan.units_per_pass + unit) * owned + tile) * 32 + role.lane) * 16;
  };
  // The rings under the sums are idle when all warps, of all blocks that send sums here, are past their last tile.
  if (plan.splits > 1) {
    cluster_meet(plan);
  } else {
    ptx::barrier_sync(kMultiplyBarrier, 128 * kWarpgroups);
  }
#pragma unroll
  for (int p = 0; p < kUnits; ++p) {
    const uint32_t unit = role.unit + static_cast<uint32_t>(p) * role.unit_stride;
    if (unit >= units) continue;
#pragma unroll
    for (uint32_t i = 0; i < kTokens / 8; ++i) {
      const uint32_t to = place(work.split * plan.warp_slices() + role.slice, unit, i % owned);
      const float(&sum)[kTokens / 2] = acc[p];
      if (plan.splits > 1) {
        const uint32_t rank = i / owned + plan.splits * work.share;
        ptx::send_mapped(ptx::map_shared(to, rank), ptx::map_shared(barriers.sums(), rank), sum[4 * i], sum[4 * i + 1],
                         sum[4 * i + 2], sum[4 * i + 3]);
      } else {
        ptx::store_shared(to, {__float_as_uint(sum[4 * i]), __float_as_uint(sum[4 * i + 1]), __float_as_uint(sum[4 * i + 2]),
                               __float_as_uint(sum[4 * i + 3])});
      }
    }
  }
  if (plan.splits > 1) {
    ptx::mbarrier_wait_cluster(barriers.sums(), 0);
  } else {
    ptx::barrier_sync(kMultiplyBarrier, 128 * kWarpgroups);
  }
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

/// Whether a warp has registers for two sets of A fragments: then it decodes a tile while the products of the one before run, and
/// starts its products without waiting for those. With one set, all of decoding but the merge overlaps.
template <int kTokens, int kUnits, int kWarpgroups>
inline constexpr bool kTwoSets = kUnits*(kTokens / 2 + 32) + 40 <= WgmmaRegisters<kWarpgroups>::kMultiply;

/// Bit t of lane i's word: tile t of group first + i has patches.
__device__ __forceinline__ uint32_t patch_mask(const std::byte* records, uint32_t first, uint32_t groups, uint32_t lane) {
  if (first + lane >= groups) return 0;
  const uint2 ends = *reinterpret_cast<const uint2*>(records + (first + lane) * f12::kRecordBytes);
  if (ends.y >> 24 == f12::kDenseEnd) return 255;
  const auto differing = [](uint32_t now, uint32_t before) {
    const uint32_t bytes = __vsetne4(now, before);
    return (bytes | bytes >> 7 | bytes >> 14 | bytes >> 21) & 15;
  };
  return differing(ends.x, ends.x << 8) | differing(ends.y, __funnelshift_l(ends.x, ends.y, 8)) << 4;
}

/// A warp's units in one pass. A unit that the warp does not have is one without records, not another path: all warps of a
/// warpgroup must reach the same wgmma instructions, and a compiler that knows two paths may give each its own.
template <typename Tile, int kUnits>
struct WarpUnits {
  typename Tile::Windows windows[kUnits];
  uint32_t groups[kUnits];    // that have records
  uint32_t masks[kUnits];     // see patch_mask
  uint32_t mask_group = 0;    // the first
  const std::byte* records;   // of the first unit
  uint32_t record_unit_step;  // to the next unit
  uint32_t weight_unit_step = 0;
};

/// The tile that a warp decodes next.
struct WarpTile {
  uint32_t tile = 0;     // of the block's part of K
  uint32_t weights = 0;  // of the warp's first unit
  uint64_t x = 0;        // descriptor
};

template <typename Tile, int kUnits>
__device__ __forceinline__ void split_tile(const GemmArgs& args, const WarpUnits<Tile, kUnits>& units, const WarpTile& at,
                                           uint32_t scratch, uint32_t lane, typename Tile::Halves (&halves)[kUnits]) {
  const uint32_t group = at.tile / f12::kGroupTiles;
  const uint32_t in_group = at.tile % f12::kGroupTiles;
#pragma unroll
  for (int p = 0; p < kUnits; ++p) {
    uint4 v[Tile::kVectors];
    load_tile_shared<Tile>(at.weights + static_cast<uint32_t>(p) * units.weight_unit_step, lane, v);
    halves[p] = Tile::split(v, units.windows[p], [&](uint4& ha, uint4& hb) {
      const uint32_t patched = __shfl_sync(0xffffffffU, units.masks[p], static_cast<int>(group - units.mask_group)) >> in_group & 1;
      if (patched == 0) return;
      const std::byte* records = units.records + static_cast<uint32_t>(p) * units.record_unit_step;
      patch_tile(Record::load(records + group * f12::kRecordBytes), in_group, args.w, scratch, lane, ha, hb);
    });
  }
}

template <int kTokens, int kUnits>
__device__ __forceinline__ void start_products(const WarpTile& at, Fragments (&a)[kUnits], float (&acc)[kUnits][kTokens / 2]) {
#pragma unroll
  for (int p = 0; p < kUnits; ++p) {
#pragma unroll
    for (int step = 0; step < 4; ++step) ptx::wgmma_define(a[p].a[step]);
  }
  __syncwarp();
  ptx::wgmma_fence();
#pragma unroll
  for (uint32_t step = 0; step < 4; ++step) {
#pragma unroll
    for (int p = 0; p < kUnits; ++p) ptx::wgmma(acc[p], a[p].a[step], at.x + 2 * step);
  }
  ptx::wgmma_commit();
}

template <typename Tile, int kTokens, int kUnits, int kWarpgroups>
__device__ __forceinline__ void multiply_units(const GemmArgs& args, const WgmmaWork& work, const WgmmaBarriers& barriers,
                                               std::byte* memory, uint32_t warp, uint32_t lane) {
  const GemmPlan& plan = args.plan;
  const WgmmaRole role = WgmmaRole::of<kWarpgroups>(plan, warp, lane);
  const uint32_t shared = ptx::shared_address(memory);
  const uint32_t scratch = shared + args.wgmma.scratch + warp * kScratchBytes;
  const uint32_t warp_slices = plan.warp_slices();
  // A warpgroup whose units no pass has only takes part in the exchange. Warps without a unit beside such with one repeat the last
  // unit; nobody stores their sums.
  const uint32_t my_tiles = reads_ring(plan, role.unit / kWarpgroupWarps) ? work.slice_tiles(plan, role.slice) : 0;
  const uint32_t source_unit = min(role.unit, plan.units_per_pass - 1);
  const uint32_t unit_step = min(role.unit + role.unit_stride, plan.units_per_pass - 1) - source_unit;  // kUnits is 1 or 2
  const uint32_t groups = (work.tiles + f12::kGroupTiles - 1) / f12::kGroupTiles;
  constexpr uint32_t kNone = ~0U;

  SlicePosition position{role.slice, 0};
  RingPosition records;
  uint32_t held = kNone;  // the slot that only products in flight still read
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
    const uint32_t pass_units = work.pass_units(plan, pass_unit);
    WarpUnits<Tile, kUnits> units;
    units.weight_unit_step = unit_step * plan.tiles_per_stage * Tile::kBytes;
    units.record_unit_step = unit_step * args.wgmma.record_unit_bytes;
    units.records =
        memory + args.wgmma.records + records.slot * args.wgmma.record_buffer_bytes + source_unit * args.wgmma.record_unit_bytes;
    float acc[kUnits][kTokens / 2];
    const auto set_masks = [&](uint32_t first_group) {
      units.mask_group = first_group;
#pragma unroll
      for (int p = 0; p < kUnits; ++p) {
        const std::byte* unit_records = units.records + static_cast<uint32_t>(p) * units.record_unit_step;
        units.masks[p] = Tile::kHasRecords ? patch_mask(unit_records, first_group, units.groups[p], lane) : 0;
      }
    };
#pragma unroll
    for (int p = 0; p < kUnits; ++p) {
      const uint32_t unit = role.unit + static_cast<uint32_t>(p) * role.unit_stride;
      units.windows[p] = Tile::load_windows(args.w, min(pass_unit + unit, args.units - 1), lane);
      units.groups[p] = ptx::opaque(unit < pass_units ? groups : 0);
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) acc[p][i] = ptx::opaque_zero();
    }
    if (Tile::kHasRecords) ptx::mbarrier_wait(barriers.records_full(records.slot), records.parity);
    set_masks(0);

    uint32_t stage = role.slice;
    uint32_t left = 0;  // tiles of the stage from `at` on
    WarpTile at;
    // Moves to the next tile; waits for its stage.
    const auto advance = [&] {
      if (left > 1) {
        --left;
        ++at.tile;
        at.weights += Tile::kBytes;
        at.x += kTokens * kXRowBytes / 16;
        return;
      }
      const uint32_t full = barriers.full(position.slot);
      // Where memory is behind, the slot is given back before sleeping. All warps of the warpgroup must then wait for their
      // products, so they decide together.
      if (!ptx::barrier_all(kWarpgroupBarrier + warp / kWarpgroupWarps, 32 * kWarpgroupWarps,
                            ptx::mbarrier_test(full, position.parity))) {
        ptx::wgmma_wait<0>();
        give_back();
        ptx::mbarrier_wait(full, position.parity);
        __syncwarp();
      }
      at.tile = stage * plan.tiles_per_stage;
      at.weights = shared + args.wgmma.weights + position.slot * args.wgmma.weight_stage_bytes +
                   source_unit * plan.tiles_per_stage * Tile::kBytes;
      at.x = ptx::swizzled_descriptor(shared + position.slot * args.wgmma.x_stage_bytes);
      left = work.stage_tiles(plan, stage);
      if ((at.tile + left - 1) / f12::kGroupTiles - units.mask_group >= 32) set_masks(at.tile / f12::kGroupTiles);
      stage += warp_slices;
    };
    // After the last tile of a stage its slot is held until the products are done.
    const auto leave = [&] {
      if (left > 1) return;
      held = position.slot;
      position.advance(plan);
    };

    if constexpr (kTwoSets<kTokens, kUnits, kWarpgroups>) {
      Fragments even[kUnits];
      Fragments odd[kUnits];
      typename Tile::Halves halves[kUnits];
#pragma unroll 1  // a copy of the loop would move accumulators
      for (uint32_t pair = 0; pair < my_tiles / 2; ++pair) {
        advance();
        split_tile<Tile, kUnits>(args, units, at, scratch, lane, halves);
#pragma unroll
        for (int p = 0; p < kUnits; ++p) even[p] = Tile::merge(halves[p]);
        start_products<kTokens, kUnits>(at, even, acc);
        ptx::wgmma_wait<1>();
        give_back();
        leave();
        advance();
        split_tile<Tile, kUnits>(args, units, at, scratch, lane, halves);
#pragma unroll
        for (int p = 0; p < kUnits; ++p) odd[p] = Tile::merge(halves[p]);
        start_products<kTokens, kUnits>(at, odd, acc);
        ptx::wgmma_wait<1>();
        give_back();
        leave();
      }
      if (my_tiles % 2 != 0) {
        advance();
        split_tile<Tile, kUnits>(args, units, at, scratch, lane, halves);
#pragma unroll
        for (int p = 0; p < kUnits; ++p) even[p] = Tile::merge(halves[p]);
        start_products<kTokens, kUnits>(at, even, acc);
        ptx::wgmma_wait<0>();
        give_back();
        leave();
      }
    } else {
      Fragments a[kUnits];
#pragma unroll 1
      for (uint32_t i = 0; i < my_tiles; ++i) {
        typename Tile::Halves halves[kUnits];
        advance();
        split_tile<Tile, kUnits>(args, units, at, scratch, lane, halves);
        ptx::wgmma_wait<0>();
        give_back();
#pragma unroll
        for (int p = 0; p < kUnits; ++p) a[p] = Tile::merge(halves[p]);
        start_products<kTokens, kUnits>(at, a, acc);
        leave();
      }
    }
    ptx::wgmma_wait<0>();
    give_back();
    if (Tile::kHasRecords && lane == 0) ptx::mbarrier_arrive(barriers.records_empty(records.slot));
    records.advance(2);
    ptx::wait_previous();  // y may still be read by the previous kernel; x has come, so that is over
    if (plan.slices > 1) {
      exchange_sums<kTokens, kUnits, kWarpgroups>(args, work, barriers, role, shared, acc);
    } else {
#pragma unroll
      for (int p = 0; p < kUnits; ++p) {
        const uint32_t unit = role.unit + static_cast<uint32_t>(p) * role.unit_stride;
        if (unit < pass_units) store_sums<kTokens>(args, work, pass_unit + unit, scratch, lane, acc[p]);
      }
    }
  }
  if (plan.splits == 1 && plan.sharing > 1) cluster_meet(plan);  // no block ends while another still signals its barriers
}

#endif

/// Where the build has no code for wgmma the body is empty and the bound on the threads says so (see prepare_gemm).
template <typename Tile, int kTokens, int kUnits, int kWarpgroups>
__global__ void __launch_bounds__(WEIGHTD_HAS_WGMMA ? WgmmaRegisters<kWarpgroups>::kThreads : 32, 1)
    gemm_wgmma_kernel(const __grid_constant__ GemmArgs args, const __grid_constant__ CUtensorMap x_map,
                      const __grid_constant__ CUtensorMap w_map) {
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
  constexpr uint32_t kWarps = kWarpgroups * kWarpgroupWarps;

  if (warp == 0) {
    if (lane < plan.stages) {
      ptx::mbarrier_init(barriers.full(lane), full_arrivals(plan));
      ptx::mbarrier_init(barriers.empty(lane), empty_arrivals(plan));
    }
    if (lane < 2) {
      ptx::mbarrier_init(barriers.records_full(lane), 1);
      ptx::mbarrier_init(barriers.records_empty(lane), kWarps);
    }
    if (lane == 0) {
      ptx::mbarrier_init(barriers.sums(), 1);
      if (plan.splits > 1) {
        ptx::mbarrier_arrive_expect(barriers.sums(), sums_bytes(plan, work.pass_units(plan, work.unit_begin)));
      }
    }
    ptx::fence_barrier_init();
  } else if (warp == kWarps && lane == 0) {
    ptx::prefetch_tensor_map(&x_map);
    if (plan.tensor_weights) ptx::prefetch_tensor_map(&w_map);
  }
  __syncthreads();
  if (clustered) ptx::cluster_arrive();
  ptx::launch_dependents();
  if (warp >= kWarps) {
    ptx::lower_registers<Registers::kLoad>();
    const uint32_t loader = warp - kWarps;
    // Weights go into the block's own memory only, so they need not wait for the cluster.
    if (loader != kXLoader && (loader == 0 || !plan.tensor_weights)) {
      load_weights<Tile>(args, reinterpret_cast<uint64_t>(&w_map), work, barriers, base, loader == 0 ? 0 : loader - 1, lane);
    }
    if (clustered) ptx::cluster_wait();
    if (loader == kXLoader) {
      ptx::wait_previous();
      load_x(args, reinterpret_cast<uint64_t>(&x_map), work, barriers, base, lane);
    }
    __syncwarp();
    if (clustered) cluster_meet(plan);
  } else {
    ptx::raise_registers<Registers::kMultiply>();
    if (clustered) ptx::cluster_wait();
    multiply_units<Tile, kTokens, kUnits, kWarpgroups>(args, work, barriers, shared, warp, lane);
  }
#endif
}

}  // namespace weightd::kernels
