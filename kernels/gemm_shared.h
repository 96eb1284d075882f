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
