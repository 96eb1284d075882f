// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/gemm_plan.h"
#include "store/tile_layout.h"

/// Shared-memory maps of the GEMM kernels: one computation for the plan (host) and the kernels (device).
namespace weightd::kernels {

// With the producer 16 warps: one more, and ptxas budgets registers for 20.
inline constexpr uint32_t kMaxConsumerWarps = 15;
inline constexpr uint32_t kMaxTokenBlock = 64;
inline constexpr uint32_t kScratchBytes = 1024;  // high bytes of one tile, for one warp's patches
inline constexpr uint32_t kXRowBytes = 128;      // one token's 64 columns of a tile, swizzled in 16-byte pieces
inline constexpr uint32_t kSwizzleAlign = 1024;  // the swizzle pattern repeats every 8 rows
inline constexpr uint32_t kBarrierBytes = 8;
inline constexpr uint32_t kMaxBarriers = 16;  // full and empty of each stage, full and empty of two record buffers
inline constexpr uint32_t kMaxWgmmaStages = 16;
inline constexpr uint32_t kMinWgmmaTokenBlock = 64;
inline constexpr uint32_t kMaxWgmmaTokenBlock = 256;
inline constexpr uint32_t kSumBytes = 512;  // the sums of a unit and 8 tokens
inline constexpr uint32_t kWarpgroupWarps = 4;
inline constexpr uint32_t kMaxWarpgroups = 4;  // that multiply

/// Partial sums that slices 1.. leave for slice 0: [slices - 1][units][token_block / 8][4][32 lanes] floats.
constexpr uint64_t partial_bytes(const GemmPlan& plan) {
  return uint64_t{plan.slices - 1} * plan.units_per_pass * plan.token_block * 64;
}

/// kBulk, byte offsets. The partial sums overlay the rings, which are idle by then (slices > 1 means one pass).
struct BulkShared {
  uint32_t x_stage_bytes;       // [tiles_per_stage][token_block][64] bf16
  uint32_t weight_stage_bytes;  // [units_per_pass][tiles_per_stage] tiles
  uint32_t record_buffer_bytes;
  uint32_t x;  // 0: the swizzle wants 1 KiB alignment
  uint32_t weights;
  uint32_t records;  // one buffer a pass parity
  uint32_t scratch;
  uint32_t barriers;
  uint64_t total_bytes;

  constexpr BulkShared(const GemmPlan& plan, uint32_t tile_bytes)
      : x_stage_bytes(plan.tiles_per_stage * plan.token_block * kXRowBytes),
        weight_stage_bytes(plan.units_per_pass * plan.tiles_per_stage * tile_bytes),
        record_buffer_bytes(0),
        x(0),
        weights(plan.stages * x_stage_bytes),
        records(0),
        scratch(0),
        barriers(0),
        total_bytes(0) {
    uint64_t end = uint64_t{weights} + uint64_t{plan.stages} * weight_stage_bytes;
    if (end < partial_bytes(plan)) end = partial_bytes(plan);
    records = static_cast<uint32_t>(end);
    const uint64_t groups = f12::Geometry{plan.n, plan.k, 1}.groups();
    const uint64_t buffer = tile_bytes == f12::kTileBytes ? plan.units_per_pass * groups * f12::kRecordBytes : 0;
    record_buffer_bytes = static_cast<uint32_t>(buffer);
    end += buffer * (plan.passes() > 1 ? 2 : 1);
    scratch = static_cast<uint32_t>(end);
    end += uint64_t{plan.units_per_pass} * plan.slices * kScratchBytes;
    barriers = static_cast<uint32_t>(end);
    total_bytes = end + kMaxBarriers * kBarrierBytes;
  }
};

/// kWgmma, byte offsets. Block `split` of a cluster has the column tiles from split * split_tiles on, whole groups. The exchange of
/// partial sums overlays the rings, which are idle by then (slices > 1 means one pass).
///   exchange [slices][units_per_pass][token_block / 8 / splits][32 lanes][4] floats: what the block's tokens get from each slice
struct WgmmaShared {
  uint32_t split_tiles;
  uint32_t x_stage_bytes;       // [tiles_per_stage][token_block][64] bf16
  uint32_t weight_stage_bytes;  // [units_per_pass][tiles_per_stage] tiles
  uint32_t record_unit_bytes;   // [split_tiles / 8] records
  uint32_t record_buffer_bytes;
  uint32_t weights;  // x is at 0
  uint32_t records;  // one buffer a pass parity
  uint32_t scratch;
  uint32_t barriers;
  uint64_t total_bytes;

  constexpr WgmmaShared(const GemmPlan& plan, uint32_t tile_bytes)
      : split_tiles(0),
        x_stage_bytes(plan.tiles_per_stage * plan.token_block * kXRowBytes),
        weight_stage_bytes(plan.units_per_pass * plan.tiles_per_stage * tile_bytes),
        record_unit_bytes(0),
        record_buffer_bytes(0),
        weights(plan.stages * x_stage_bytes),
        records(0),
        scratch(0),
        barriers(0),
        total_bytes(0) {
    const f12::Geometry geometry{plan.n, plan.k, 1};
    const uint64_t split_groups = (geometry.groups() + plan.splits - 1) / plan.splits;
    split_tiles = static_cast<uint32_t>(plan.splits == 1 ? geometry.tiles() : split_groups * f12::kGroupTiles);
    uint64_t end = uint64_t{weights} + uint64_t{plan.stages} * weight_stage_bytes;
    const uint64_t exchange = uint64_t{plan.warp_slices()} * plan.units_per_pass * plan.token_block * 64;
    if (plan.slices > 1 && end < exchange) end = exchange;
    records = static_cast<uint32_t>(end);
    if (tile_bytes == f12::kTileBytes) record_unit_bytes = static_cast<uint32_t>(split_groups * f12::kRecordBytes);
    const uint64_t buffer = uint64_t{plan.units_per_pass} * record_unit_bytes;
    record_buffer_bytes = static_cast<uint32_t>(buffer);
    end += buffer * (plan.passes() > 1 ? 2 : 1);
    scratch = static_cast<uint32_t>(end);
    end += uint64_t{plan.warpgroups} * kWarpgroupWarps * kScratchBytes;
    barriers = static_cast<uint32_t>(end);
    total_bytes = end + (2 * kMaxWgmmaStages + 5) * kBarrierBytes;
  }
};

// --- who waits for whom in kWgmma: for the kernel, and for tests that play it without a GPU ---

/// Of the loading warpgroup: x is loaded by its second warp, weights by its first, and where they come as one copy a unit, by all
/// others in turn.
inline constexpr uint32_t kXLoader = 1;
inline constexpr uint32_t kWeightLoaders = 3;

/// A block's part of K, cut into stages of which its slices take turns: stage i is of slice i % warp_slices.
struct WgmmaPart {
  uint32_t tile_begin = 0, tiles = 0;

  constexpr WgmmaPart() = default;
  constexpr WgmmaPart(uint32_t split, uint32_t split_tiles, uint32_t all_tiles)
      : tile_begin(split * split_tiles < all_tiles ? split * split_tiles : all_tiles),
        tiles(split_tiles < all_tiles - tile_begin ? split_tiles : all_tiles - tile_begin) {}

  [[nodiscard]] constexpr uint32_t stages(const GemmPlan& plan) const {
    return (tiles + plan.tiles_per_stage - 1) / plan.tiles_per_stage;
  }
  [[nodiscard]] constexpr uint32_t stage_tiles(const GemmPlan& plan, uint32_t stage) const {
    const uint32_t left = tiles - stage * plan.tiles_per_stage;
    return left < plan.tiles_per_stage ? left : plan.tiles_per_stage;
  }
  /// Tiles of the stages slice, slice + slices, ..
  [[nodiscard]] constexpr uint32_t slice_tiles(const GemmPlan& plan, uint32_t slice) const {
    const uint32_t all = stages(plan);
    const uint32_t slices = plan.warp_slices();
    if (slice >= all) return 0;
    const uint32_t mine = (all - slice + slices - 1) / slices;
    const bool has_last = slice + (mine - 1) * slices == all - 1;
    return has_last ? (mine - 1) * plan.tiles_per_stage + stage_tiles(plan, all - 1) : mine * plan.tiles_per_stage;
  }
};

/// Where a slice is in the ring, which has the same number of slots for each slice.
struct SlicePosition {
  uint32_t slot = 0, parity = 0;  // parity of the slot's `full`
  constexpr void advance(const GemmPlan& plan) {
    slot += plan.warp_slices();
    if (slot >= plan.stages) {
      slot -= plan.stages;
      parity ^= 1;
    }
  }
};

/// Whether the warpgroups of a row group read the ring: those have units in every full pass. The others only store and exchange.
constexpr bool reads_ring(const GemmPlan& plan, uint32_t row_group) { return row_group * kWarpgroupWarps < plan.units_per_pass; }

constexpr uint32_t full_arrivals(const GemmPlan& plan) { return plan.tensor_weights ? 1 : kWeightLoaders; }

/// A slot holds the stage of one slice: the warps of that slice alone let go of it, in each block that shares x.
constexpr uint32_t empty_arrivals(const GemmPlan& plan) {
  uint32_t warpgroups = 0;
  for (uint32_t group = 0; group < plan.warpgroups / plan.warp_slices(); ++group) warpgroups += reads_ring(plan, group) ? 1 : 0;
  return warpgroups * kWarpgroupWarps * plan.sharing;
}

/// What a loader of weights announces for a stage. A tensor copy counts as its whole box, whatever of it the matrix has. The first
/// loader also announces x.
constexpr uint32_t stage_bytes(const GemmPlan& plan, uint32_t tile_bytes, uint32_t units, uint32_t tiles, uint32_t turn) {
  const uint32_t x = turn == 0 ? tiles * plan.token_block * kXRowBytes : 0;
  if (plan.tensor_weights) return plan.units_per_pass * plan.tiles_per_stage * tile_bytes + x;
  return (units + kWeightLoaders - 1 - turn) / kWeightLoaders * tiles * tile_bytes + x;
}

/// What the slices of all splits send to each block of a cluster, whose rows have `units` units.
constexpr uint32_t sums_bytes(const GemmPlan& plan, uint32_t units) {
  return plan.slices * units * (plan.token_block / 8 / plan.splits) * kSumBytes;
}

/// kDirect, byte offsets. The partial sums overlay the x buffers.
struct DirectShared {
  uint32_t x_stage_bytes;
  uint32_t scratch;
  uint64_t total_bytes;

  constexpr explicit DirectShared(const GemmPlan& plan)
      : x_stage_bytes(plan.tiles_per_stage * plan.token_block * kXRowBytes), scratch(0), total_bytes(0) {
    uint64_t end = uint64_t{plan.stages} * x_stage_bytes;
    if (end < partial_bytes(plan)) end = partial_bytes(plan);
    scratch = static_cast<uint32_t>(end);
    total_bytes = end + uint64_t{plan.units_per_pass} * plan.slices * kScratchBytes;
  }
};

}  // namespace weightd::kernels
