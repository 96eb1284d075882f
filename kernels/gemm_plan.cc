// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm_plan.h"

#include <algorithm>
#include <limits>

#include "kernels/gemm_shared.h"
#include "store/tile_layout.h"

namespace weightd::kernels {
namespace {

constexpr uint64_t kMaxExtent = std::numeric_limits<uint32_t>::max();
// Measured on Hopper: where K is cut into many slices, one tile a warp and stage is enough and more stages are better than wider
// ones; else stages of about 42 KiB are.
constexpr uint32_t kManySlices = 3;
constexpr uint32_t kMaxStageWeightBytes = 44 * 1024;
constexpr uint32_t kMaxStageTiles = 16;
constexpr uint32_t kMaxStages = 6;

uint64_t ceil_div(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

uint32_t token_block_for(uint64_t m) {
  uint32_t block = 8;
  while (block < kMaxTokenBlock && block < m) block *= 2;
  return block;
}

void cut_units(uint32_t sm_count, uint64_t units, uint64_t tiles, GemmPlan& plan) {
  plan.units_per_block = static_cast<uint32_t>(ceil_div(units, sm_count));
  plan.blocks = static_cast<uint32_t>(ceil_div(units, plan.units_per_block));
  const uint64_t passes = ceil_div(plan.units_per_block, kMaxConsumerWarps);
  plan.units_per_pass = static_cast<uint32_t>(ceil_div(plan.units_per_block, passes));
  if (passes == 1) plan.slices = static_cast<uint32_t>(std::clamp<uint64_t>(tiles, 1, kMaxConsumerWarps / plan.units_per_pass));
}

bool fit_bulk(const DeviceTraits& device, const GemmRequest& request, GemmPlan& plan) {
  const uint64_t tiles = ceil_div(request.k, f12::kTileCols);
  // The widest stage that leaves three of them; else two; else a narrower token block (decided by the caller).
  for (uint32_t wanted_stages : {3U, 2U}) {
    uint32_t widest = plan.slices;
    while (plan.slices < kManySlices && widest * 2 <= kMaxStageTiles && widest < tiles &&
           static_cast<uint64_t>(plan.units_per_pass) * widest * 2 * request.tile_bytes <= kMaxStageWeightBytes) {
      widest *= 2;
    }
    for (uint32_t width = widest; width >= plan.slices; width /= 2) {
      plan.tiles_per_stage = width;
      for (plan.stages = kMaxStages; plan.stages >= wanted_stages; --plan.stages) {
        const uint64_t bytes = BulkShared(plan, request.tile_bytes).total_bytes;
        if (bytes <= device.shared_bytes) {
          plan.shared_bytes = static_cast<uint32_t>(bytes);
          return true;
        }
      }
    }
  }
  return false;
}

bool fit_direct(const DeviceTraits& device, GemmPlan& plan) {
  plan.stages = 2;
  for (uint32_t width : {4 * plan.slices, 2 * plan.slices, plan.slices}) {
    if (width > kMaxStageTiles && width > plan.slices) continue;
    plan.tiles_per_stage = width;
    const uint64_t bytes = DirectShared(plan).total_bytes;
    if (bytes <= device.shared_bytes) {
      plan.shared_bytes = static_cast<uint32_t>(bytes);
      return true;
    }
  }
  return false;
}

}  // namespace

Result<GemmPlan> plan_gemm(const DeviceTraits& device, const GemmRequest& request) {
  if (request.n > kMaxExtent || request.k > kMaxExtent || request.m > kMaxExtent) {
    return Status::invalid_argument("gemm plan: n, k and m must be below 2^32");
  }
  if (device.sm_count == 0) return Status::invalid_argument("gemm plan: the device has no multiprocessor");
  GemmPlan plan;
  plan.n = request.n;
  plan.k = request.k;
  plan.overlap_previous = request.overlap_previous;
  if (request.n == 0) return plan;
  cut_units(device.sm_count, ceil_div(request.n, f12::kUnitRows), ceil_div(request.k, f12::kTileCols), plan);
  const bool bulk = device.bulk_copy && request.tensor_copy && request.k > 0;
  for (plan.token_block = token_block_for(request.m); plan.token_block >= 8; plan.token_block /= 2) {
    plan.kernel = GemmKernel::kBulk;
    if (bulk && fit_bulk(device, request, plan)) return plan;
    plan.kernel = GemmKernel::kDirect;
    if (!bulk && fit_direct(device, plan)) return plan;
  }
  // K so long that a unit's records alone fill the shared memory: the direct kernel reads them where they are.
  plan.token_block = 8;
  if (fit_direct(device, plan)) return plan;
  return Status::unsupported("gemm plan: " + std::to_string(device.shared_bytes) + " bytes of shared memory a block are too few");
}

std::string GemmPlan::to_string() const {
  const std::string name = kernel == GemmKernel::kBulk ? "bulk " : "direct ";
  return name + std::to_string(n) + "x" + std::to_string(k) + ": " + std::to_string(blocks) + " blocks x " +
         std::to_string(units_per_block) + " units, " + std::to_string(units_per_pass) + "x" + std::to_string(slices) + " warps, " +
         std::to_string(tiles_per_stage) + " tiles x " + std::to_string(stages) + " stages, " + std::to_string(token_block) +
         " tokens, " + std::to_string(shared_bytes / 1024) + " KiB" + (overlap_previous ? ", overlapped" : "");
}

}  // namespace weightd::kernels
