// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include "kernels/gemm_device.cuh"

/// kBulk: sm_90 and up. One producer warp keeps a ring of stages filled by bulk copies; the consumer warps decode from shared
/// memory. A stage is ready when its `full` barrier has counted the bytes, and free when every consumer warp has arrived at
/// `empty`. The records of all units of a pass come by one copy before its first stage.
namespace weightd::kernels {

inline constexpr uint32_t kBulkThreads = 32 * (kMaxConsumerWarps + 1);

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

/// Which slot of a ring comes next, and the parity of its barriers.
struct RingPosition {
  uint32_t slot = 0, parity = 0;
  __device__ void advance(uint32_t slots) {
    if (++slot == slots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

struct BulkBarriers {
  uint32_t base, stages;
  __device__ uint32_t full(uint32_t slot) const { return base + slot * kBarrierBytes; }
  __device__ uint32_t empty(uint32_t slot) const { return base + (stages + slot) * kBarrierBytes; }
  __device__ uint32_t records_full(uint32_t buffer) const { return base + (2 * stages + buffer) * kBarrierBytes; }
  __device__ uint32_t records_empty(uint32_t buffer) const { return base + (2 * stages + 2 + buffer) * kBarrierBytes; }
};

/// The producer warp's work. Lanes issue copies of different units and x tiles.
template <typename Tile>
struct Producer {
  const GemmArgs& args;
  uint64_t x_map;  // address of the kernel's parameter
  const BlockWork& work;
  const BulkBarriers& barriers;
  uint32_t shared;
  uint32_t lane;
  uint64_t weight_policy = ptx::policy_evict_first();
  uint64_t x_policy = ptx::policy_evict_last();

  __device__ uint32_t pass_units(uint32_t pass_unit) const { return min(args.plan.units_per_pass, work.unit_end - pass_unit); }
  __device__ uint32_t stage_tiles(uint32_t first_tile) const { return min(args.plan.tiles_per_stage, args.tiles - first_tile); }

  /// Announces the stage's bytes and starts its weights.
  __device__ void start_weights(uint32_t pass_unit, uint32_t first_tile, uint32_t slot) const {
    const uint32_t units = pass_units(pass_unit);
    const uint32_t tiles = stage_tiles(first_tile);
    if (lane == 0) {
      ptx::mbarrier_arrive_expect(barriers.full(slot), tiles * (units * Tile::kBytes + args.plan.token_block * kXRowBytes));
    }
    __syncwarp();
    if (lane < units) {
      const uint64_t first = (uint64_t{pass_unit} + lane) * args.tiles + first_tile;
      const uint32_t to =
          shared + args.bulk.weights + slot * args.bulk.weight_stage_bytes + lane * args.plan.tiles_per_stage * Tile::kBytes;
      ptx::bulk_copy(to, args.w.codes + first * Tile::kBytes, tiles * Tile::kBytes, barriers.full(slot), weight_policy);
    }
  }

  __device__ void start_x(uint32_t first_tile, uint32_t slot) const {
    if (lane < stage_tiles(first_tile)) {
      const uint32_t to = shared + args.bulk.x + slot * args.bulk.x_stage_bytes + lane * args.plan.token_block * kXRowBytes;
      ptx::tensor_copy_2d(to, x_map, (first_tile + lane) * f12::kTileCols, static_cast<uint32_t>(work.token_begin),
                          barriers.full(slot), x_policy);
    }
  }

  __device__ void start_records(uint32_t pass_unit, uint32_t buffer) const {
    if (!Tile::kHasRecords || lane != 0) return;
    const uint32_t bytes = pass_units(pass_unit) * args.groups * f12::kRecordBytes;
    ptx::mbarrier_arrive_expect(barriers.records_full(buffer), bytes);
    ptx::bulk_copy(shared + args.bulk.records + buffer * args.bulk.record_buffer_bytes,
                   args.w.records + uint64_t{pass_unit} * args.groups * f12::kRecordBytes, bytes, barriers.records_full(buffer),
                   weight_policy);
  }

  __device__ void run() const {
    // The weights do not depend on the previous kernel: the first ring of them starts before the wait, x after it.
    start_records(work.unit_begin, 0);
    const uint32_t step = args.plan.tiles_per_stage;
    const uint32_t pass_stages = (args.tiles + step - 1) / step;
    const uint32_t early = min(args.plan.stages, pass_stages);
    for (uint32_t stage = 0; stage < early; ++stage) start_weights(work.unit_begin, stage * step, stage);
    ptx::wait_previous();
    for (uint32_t stage = 0; stage < early; ++stage) start_x(stage * step, stage);

    RingPosition position;
    RingPosition records;
    for (uint32_t pass_unit = work.unit_begin; pass_unit < work.unit_end; pass_unit += args.plan.units_per_pass) {
      const bool first_pass = pass_unit == work.unit_begin;
      if (!first_pass) {
        ptx::mbarrier_wait(barriers.records_empty(records.slot), records.parity ^ 1);
        start_records(pass_unit, records.slot);
      }
      records.advance(2);
      for (uint32_t stage = 0; stage < pass_stages; ++stage, position.advance(args.plan.stages)) {
        if (first_pass && stage < early) continue;
        ptx::mbarrier_wait(barriers.empty(position.slot), position.parity ^ 1);
        start_weights(pass_unit, stage * step, position.slot);
        start_x(stage * step, position.slot);
      }
    }
  }
};

template <typename Tile, int kTokenTiles>
__device__ __forceinline__ void consume(const GemmArgs& args, const BlockWork& work, const BulkBarriers& barriers,
                                        std::byte* shared, uint32_t warp, uint32_t lane) {
  const GemmPlan& plan = args.plan;
  const uint32_t slice = warp % plan.slices;
  const uint32_t unit_in_pass = warp / plan.slices;
  const uint32_t base = ptx::shared_address(shared);
  const uint32_t scratch = base + args.bulk.scratch + warp * kScratchBytes;
  const uint32_t my_tiles = base + args.bulk.weights + unit_in_pass * plan.tiles_per_stage * Tile::kBytes;
  constexpr uint32_t x_tile_bytes = 8 * kTokenTiles * kXRowBytes;
  const uint32_t pass_stages = (args.tiles + plan.tiles_per_stage - 1) / plan.tiles_per_stage;

  RingPosition position;
  RingPosition records;
  for (uint32_t pass_unit = work.unit_begin; pass_unit < work.unit_end; pass_unit += plan.units_per_pass) {
    const uint32_t unit = pass_unit + unit_in_pass;
    const bool active = unit < work.unit_end;
    typename Tile::Windows windows;
    if (active) windows = Tile::load_windows(args.w, unit, lane);
    const std::byte* unit_records =
        shared + args.bulk.records + records.slot * args.bulk.record_buffer_bytes + unit_in_pass * args.groups * f12::kRecordBytes;
    if (Tile::kHasRecords) ptx::mbarrier_wait(barriers.records_full(records.slot), records.parity);
    float acc[kTokenTiles][4];
    clear(acc);

    for (uint32_t stage = 0; stage < pass_stages; ++stage, position.advance(plan.stages)) {
      const uint32_t first_tile = stage * plan.tiles_per_stage;
      const uint32_t tiles = active ? min(plan.tiles_per_stage, args.tiles - first_tile) : 0;
      ptx::mbarrier_wait(barriers.full(position.slot), position.parity);
      for (uint32_t c = slice; c < tiles; c += plan.slices) {
        uint4 v[Tile::kVectors];
        load_tile_shared<Tile>(my_tiles + position.slot * args.bulk.weight_stage_bytes + c * Tile::kBytes, lane, v);
        const Fragments f = Tile::decode(v, windows, [&](uint4& ha, uint4& hb) {
          const uint32_t tile = first_tile + c;
          const Record record = Record::load(unit_records + tile / f12::kGroupTiles * f12::kRecordBytes);
          patch_tile(record, tile % f12::kGroupTiles, args.w, scratch, lane, ha, hb);
        });
        multiply_tile<kTokenTiles, kTokenTiles == 8 ? 2 : 4>(
            f, base + args.bulk.x + position.slot * args.bulk.x_stage_bytes + c * x_tile_bytes, lane, acc);
      }
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(barriers.empty(position.slot));
    }
    if (Tile::kHasRecords && lane == 0) ptx::mbarrier_arrive(barriers.records_empty(records.slot));
    records.advance(2);
    sum_slices<kTokenTiles>(plan, unit_in_pass, slice, reinterpret_cast<float*>(shared), lane, blockDim.x - 32, acc);
    if (active && slice == 0) store_outputs<kTokenTiles>(args, unit, work.token_begin, lane, acc);
  }
}

#endif

template <typename Tile, int kTokenTiles>
__global__ void __launch_bounds__(kBulkThreads, 1)
    gemm_bulk_kernel(const __grid_constant__ GemmArgs args, const __grid_constant__ CUtensorMap x_map) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(1024) std::byte shared[];
  const uint32_t warp = threadIdx.x / 32;
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t consumers = blockDim.x / 32 - 1;
  const uint32_t base = ptx::shared_address(shared);
  const BlockWork work(args);
  const BulkBarriers barriers{base + args.bulk.barriers, args.plan.stages};

  if (threadIdx.x == 0) {
    for (uint32_t slot = 0; slot < args.plan.stages; ++slot) {
      ptx::mbarrier_init(barriers.full(slot), 1);
      ptx::mbarrier_init(barriers.empty(slot), consumers);
    }
    for (uint32_t buffer = 0; buffer < 2; ++buffer) {
      ptx::mbarrier_init(barriers.records_full(buffer), 1);
      ptx::mbarrier_init(barriers.records_empty(buffer), consumers);
    }
    ptx::fence_barrier_init();
    ptx::prefetch_tensor_map(&x_map);
  }
  __syncthreads();
  ptx::launch_dependents();
  if (warp == consumers) {
    Producer<Tile>{args, reinterpret_cast<uint64_t>(&x_map), work, barriers, base, lane}.run();
  } else {
    ptx::wait_previous();  // y may still be read by the previous kernel
    consume<Tile, kTokenTiles>(args, work, barriers, shared, warp, lane);
  }
#endif
}

}  // namespace weightd::kernels
