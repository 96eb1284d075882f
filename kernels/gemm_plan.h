// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "weightd/status.h"

/// The launch configuration of a fused GEMM as data: pure, made and printed without a GPU.
namespace weightd::kernels {

struct DeviceTraits {
  uint32_t sm_count = 0;
  uint32_t shared_bytes = 0;  // the most shared memory one block can opt in to
  bool bulk_copy = false;     // cp.async.bulk, mbarrier and tensor maps: compute capability 9.0 and up
};

enum class GemmKernel : uint8_t {
  kDirect = 0,  // sm_80 and up: weights from global memory straight into registers; x of any alignment
  kBulk = 1,    // sm_90 and up: weights, records and x through a ring of bulk copies; x as allows_tensor_copy says
};

/// A block owns whole 16-row units over the full K, so that nothing is combined across blocks. Its warps are units_per_pass x
/// slices; warp (r, s) takes unit r and column tiles s, s + slices, ...; the slices' partial sums meet in shared memory, in order.
struct GemmPlan {
  GemmKernel kernel = GemmKernel::kDirect;
  uint64_t n = 0, k = 0;
  uint32_t blocks = 0;           // along the units
  uint32_t units_per_block = 0;  // the last block may have fewer
  uint32_t units_per_pass = 0;   // units in flight at a time; a block makes ceil(units_per_block / units_per_pass) passes over x
  uint32_t slices = 1;           // cuts of K over warps; more than one only with a single pass
  uint32_t tiles_per_stage = 0;  // column tiles that one stage holds of each unit, a multiple of slices
  uint32_t stages = 0;           // of the ring (2 = double buffering in kDirect)
  uint32_t token_block = 8;      // tokens of one block: 8, 16, 32 or 64
  uint32_t shared_bytes = 0;
  bool overlap_previous = false;  // see plan_gemm

  [[nodiscard]] constexpr uint32_t passes() const {
    return units_per_pass == 0 ? 0 : (units_per_block + units_per_pass - 1) / units_per_pass;
  }
  /// "bulk 14336x4096: 128 blocks x 7 units, 7x2 warps, 4 tiles x 4 stages, 16 tokens, 201 KiB"
  [[nodiscard]] std::string to_string() const;
};

struct GemmRequest {
  uint64_t n = 0, k = 0;
  uint64_t m = 1;                 // the most tokens of a launch
  bool tensor_copy = false;       // allows_tensor_copy(x) of every launch
  bool overlap_previous = false;  // the weights are older than the previous kernel of the stream: with kBulk, load them while that
                                  // runs (programmatic dependent launch). Weights written by that kernel must not be planned so.
  uint32_t tile_bytes = 1536;     // 1536 f12, 2048 raw16
};

/// The plan for one matrix shape. Pure. `slices`, and with it every bit of the result, depends on n, k and the SM count only.
/// kInvalidArgument: n, k or m past 2^32 - 1, a device without SMs. kUnsupported: the device's shared memory holds no legal plan.
[[nodiscard]] Result<GemmPlan> plan_gemm(const DeviceTraits& device, const GemmRequest& request);

}  // namespace weightd::kernels
