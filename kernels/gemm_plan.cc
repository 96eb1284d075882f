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

// --- kWgmma ---

constexpr uint32_t kLargestCluster = 4;
constexpr uint64_t kWgmmaTokens = 32;  // above them warpgroup products are faster
constexpr uint32_t kFewUnits = 8;      // a block with fewer units loads more x than weights at 64 tokens
// Measured at 64 tokens: with at most so many tiles of weights a multiprocessor kBulk is faster (6144 x 4096: 16.3 against 18.1 us,
// 4096 x 4096: 14.3 against 14.5), above them slower (4096 x 14336: 38.1 against 35.4 us).
constexpr uint64_t kFewTiles = 192;
constexpr uint64_t kFewTilesTokens = 64;
constexpr uint32_t kWidestChosenStage = 4;
constexpr uint32_t kWantedStages = 3;
constexpr uint32_t kWantedStagesOfASlice = 2;  // a slice that has one slot decodes or loads, never both

Status not_legal(const std::string& rule) { return Status::unsupported("gemm plan: wgmma: " + rule); }

bool is_power_of_2(uint32_t value, uint32_t least, uint32_t most) {
  return value >= least && value <= most && (value & (value - 1)) == 0;
}

/// Two warpgroups with one unit a warp have the registers for 256 tokens.
uint32_t largest_token_block(const WgmmaCut& cut) { return cut.warpgroups * cut.units_per_warp == 2 ? 256 : 128; }

bool has_kernel(const WgmmaCut& cut) {
  const bool shape = (cut.warpgroups == 4 && cut.units_per_warp == 1) ||
                     (cut.warpgroups == 2 && (cut.units_per_warp == 1 || cut.units_per_warp == 2));
  return shape && is_power_of_2(cut.splits, 1, kLargestCluster) && is_power_of_2(cut.sharing, 1, kLargestCluster) &&
         cut.splits * cut.sharing <= kLargestCluster && cut.tiles_per_stage <= kMaxStageTiles && cut.stages <= kMaxWgmmaStages &&
         (cut.token_block == 0 || is_power_of_2(cut.token_block, kMinWgmmaTokenBlock, largest_token_block(cut)));
}

uint32_t clusters_at_once(const DeviceTraits& device, uint32_t size) {
  return size == 4 ? device.clusters_of_4 : device.sm_count / size;
}

/// The units of the blocks, and how warpgroups share them.
Status cut_units_wgmma(const DeviceTraits& device, const GemmRequest& request, const WgmmaCut& cut, GemmPlan& plan) {
  const uint64_t units = ceil_div(request.n, f12::kUnitRows);
  const uint32_t slots = kWarpgroupWarps * cut.warpgroups * cut.units_per_warp;
  uint64_t places = uint64_t{clusters_at_once(device, cut.splits * cut.sharing)} * cut.sharing;
  if (cut.token_blocks_at_once) places /= std::max<uint64_t>(1, ceil_div(request.m, plan.token_block));
  if (places == 0) return not_legal("the device has too few multiprocessors for the cluster");
  plan.units_per_block = static_cast<uint32_t>(ceil_div(units, places));
  plan.blocks = static_cast<uint32_t>(ceil_div(ceil_div(units, plan.units_per_block), cut.sharing) * cut.sharing);
  const uint64_t passes = ceil_div(plan.units_per_block, slots);
  plan.units_per_pass = static_cast<uint32_t>(ceil_div(plan.units_per_block, passes));
  uint32_t warp_slices = 1;
  if (passes > 1 && cut.splits > 1) return not_legal("K is split, and a block's units do not fit one pass");
  while (passes == 1 && warp_slices < cut.warpgroups && plan.units_per_pass <= slots / (2 * warp_slices)) warp_slices *= 2;
  if (cut.units_per_warp > 1 && plan.units_per_pass * 2 <= slots / warp_slices) {
    return not_legal("no warp would have a second unit");
  }
  plan.slices = cut.splits * warp_slices;
  plan.tensor_weights = cut.tensor_weights && plan.units_per_block % plan.units_per_pass == 0;
  return {};
}

/// Whether a ring of at least `least` and at most `most` stages fits; the longest such. A slot is always of the same slice: one
/// that has not waited for a stage of a slot itself cannot tell by the parity of its barrier whether that stage or the next has
/// come.
bool fit_ring(const DeviceTraits& device, uint32_t tile_bytes, uint32_t least, uint32_t most, GemmPlan& plan) {
  const uint32_t step = plan.warp_slices();
  for (plan.stages = most / step * step; plan.stages >= least; plan.stages -= step) {
    const uint64_t bytes = WgmmaShared(plan, tile_bytes).total_bytes;
    if (bytes <= device.shared_bytes) {
      plan.shared_bytes = static_cast<uint32_t>(bytes);
      return true;
    }
  }
  return false;
}

/// The tiles of a stage. Where slices take turns, the length of a turn is part of the order of the sum, so it must not depend on
/// the tokens or the format: it is what fits with the widest of both.
uint32_t choose_stage_tiles(const DeviceTraits& device, const GemmRequest& request, const WgmmaCut& cut, GemmPlan plan) {
  uint32_t tile_bytes = request.tile_bytes;
  if (plan.warp_slices() > 1) {
    tile_bytes = 2048;
    plan.token_block = largest_token_block(cut);
  }
  const uint32_t least = std::max(kWantedStages, kWantedStagesOfASlice * plan.warp_slices());
  for (plan.tiles_per_stage = kWidestChosenStage; plan.tiles_per_stage > 1; plan.tiles_per_stage /= 2) {
    if (fit_ring(device, tile_bytes, least, kMaxWgmmaStages, plan)) break;
  }
  return plan.tiles_per_stage;
}

bool fit_wgmma(const DeviceTraits& device, const GemmRequest& request, const WgmmaCut& cut, GemmPlan& plan) {
  plan.tiles_per_stage = cut.tiles_per_stage != 0 ? cut.tiles_per_stage : choose_stage_tiles(device, request, cut, plan);
  const uint32_t least = std::max(2U, plan.warp_slices());
  if (cut.stages == 0) return fit_ring(device, request.tile_bytes, least, kMaxWgmmaStages, plan);
  return cut.stages >= least && fit_ring(device, request.tile_bytes, cut.stages, cut.stages, plan);
}

uint64_t units_per_sm(const DeviceTraits& device, const GemmRequest& request) {
  return ceil_div(ceil_div(request.n, f12::kUnitRows), device.sm_count);
}

bool wgmma_is_faster(const DeviceTraits& device, const GemmRequest& request) {
  if (request.m <= kWgmmaTokens) return false;
  const uint64_t tiles = units_per_sm(device, request) * ceil_div(request.k, f12::kTileCols);
  return request.m > kFewTilesTokens || tiles > kFewTiles;
}

WgmmaCut choose_cut(const DeviceTraits& device, const GemmRequest& request) {
  WgmmaCut cut;
  if (units_per_sm(device, request) < kFewUnits && device.sm_count >= 2) cut.splits = 2;
  return cut;
}

// --- kDirect and kBulk ---

Result<GemmPlan> plan_streaming(const DeviceTraits& device, const GemmRequest& request, GemmPlan plan) {
  const bool bulk = device.bulk_copy && request.tensor_copy && request.k > 0 && request.kernel != GemmKernel::kDirect;
  if (request.kernel == GemmKernel::kBulk && !bulk) {
    return Status::unsupported(
        "gemm plan: the bulk kernel wants a device with bulk copies, an x that allows tensor copies, and k > 0");
  }
  cut_units(device.sm_count, ceil_div(request.n, f12::kUnitRows), ceil_div(request.k, f12::kTileCols), plan);
  for (plan.token_block = token_block_for(request.m); plan.token_block >= 8; plan.token_block /= 2) {
    plan.kernel = GemmKernel::kBulk;
    if (bulk && fit_bulk(device, request, plan)) return plan;
    plan.kernel = GemmKernel::kDirect;
    if (!bulk && fit_direct(device, plan)) return plan;
  }
  // K so long that a unit's records alone fill the shared memory: the direct kernel reads them where they are.
  plan.token_block = 8;
  if (request.kernel != GemmKernel::kBulk && fit_direct(device, plan)) return plan;
  return Status::unsupported("gemm plan: " + std::to_string(device.shared_bytes) + " bytes of shared memory a block are too few");
}

Status check_request(const DeviceTraits& device, const GemmRequest& request) {
  if (request.n > kMaxExtent || request.k > kMaxExtent || request.m > kMaxExtent) {
    return Status::invalid_argument("gemm plan: n, k and m must be below 2^32");
  }
  if (device.sm_count == 0) return Status::invalid_argument("gemm plan: the device has no multiprocessor");
  return {};
}

}  // namespace

Result<GemmPlan> plan_wgmma(const DeviceTraits& device, const GemmRequest& request, const WgmmaCut& cut) {
  WEIGHTD_RETURN_IF_ERROR(check_request(device, request));
  if (!device.wgmma || !device.bulk_copy || !request.tensor_copy || request.n == 0 || request.k == 0) {
    return not_legal("it wants an sm_90a device and build, an x that allows tensor copies, and n, k > 0");
  }
  if (!has_kernel(cut)) return not_legal("there is no kernel for this cut");
  GemmPlan plan;
  plan.kernel = GemmKernel::kWgmma;
  plan.n = request.n;
  plan.k = request.k;
  plan.overlap_previous = request.overlap_previous;
  plan.splits = cut.splits;
  plan.sharing = cut.sharing;
  plan.warpgroups = cut.warpgroups;
  plan.units_per_warp = cut.units_per_warp;
  uint32_t block = cut.token_block != 0 ? cut.token_block : kMinWgmmaTokenBlock;
  while (cut.token_block == 0 && block < largest_token_block(cut) && block < request.m) block *= 2;
  const uint32_t narrowest = cut.token_block != 0 ? cut.token_block : kMinWgmmaTokenBlock;
  for (plan.token_block = block; plan.token_block >= narrowest; plan.token_block /= 2) {
    WEIGHTD_RETURN_IF_ERROR(cut_units_wgmma(device, request, cut, plan));
    if (fit_wgmma(device, request, cut, plan)) return plan;
  }
  return not_legal(std::to_string(device.shared_bytes) + " bytes of shared memory a block are too few");
}

Result<GemmPlan> plan_gemm(const DeviceTraits& device, const GemmRequest& request) {
  WEIGHTD_RETURN_IF_ERROR(check_request(device, request));
  GemmPlan plan;
  plan.n = request.n;
  plan.k = request.k;
  plan.overlap_previous = request.overlap_previous;
  if (request.n == 0) return plan;
  if (request.kernel == GemmKernel::kWgmma) return plan_wgmma(device, request, choose_cut(device, request));
  if (!request.kernel.has_value() && wgmma_is_faster(device, request)) {
    Result<GemmPlan> fast = plan_wgmma(device, request, choose_cut(device, request));
    if (fast.ok()) return fast;
  }
  return plan_streaming(device, request, plan);
}

std::string GemmPlan::to_string() const {
  const std::string tail = std::to_string(tiles_per_stage) + " tiles x " + std::to_string(stages) + " stages, " +
                           std::to_string(token_block) + " tokens, " + std::to_string(shared_bytes / 1024) + " KiB" +
                           (overlap_previous ? ", overlapped" : "");
  const std::string shape = std::to_string(n) + "x" + std::to_string(k) + ": " + std::to_string(blocks) + " blocks x " +
                            std::to_string(units_per_block) + " units, ";
  if (kernel == GemmKernel::kWgmma) {
    return "wgmma " + shape + std::to_string(units_per_pass) + " a pass, " + std::to_string(warpgroups) + " warpgroups x " +
           std::to_string(units_per_warp) + ", " + std::to_string(splits) + " splits x " + std::to_string(warp_slices()) +
           " slices, x shared by " + std::to_string(sharing) + ", " + tail + (tensor_weights ? "" : ", copies by unit");
  }
  return (kernel == GemmKernel::kBulk ? "bulk " : "direct ") + shape + std::to_string(units_per_pass) + "x" +
         std::to_string(slices) + " warps, " + tail;
}

}  // namespace weightd::kernels
