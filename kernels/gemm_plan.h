// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "weightd/status.h"

/// The launch configuration of a fused GEMM as data: pure, made and printed without a GPU.
namespace weightd::kernels {

struct DeviceTraits {
  uint32_t sm_count = 0;
  uint32_t shared_bytes = 0;   // the most shared memory one block can opt in to
  bool bulk_copy = false;      // cp.async.bulk, mbarrier and tensor maps: compute capability 9.0 and up
  bool wgmma = false;          // warpgroup products: compute capability 9.0, in a build for sm_90a
  uint32_t clusters_of_4 = 0;  // of such blocks, at once; fewer than sm_count / 4, as a cluster lives inside one group of them
};

enum class GemmKernel : uint8_t {
  kDirect = 0,  // sm_80 and up: weights from global memory straight into registers; x of any alignment
  kBulk = 1,    // sm_90 and up: weights, records and x through a ring of bulk copies; x as allows_tensor_copy says
  kWgmma = 2,   // sm_90a: as kBulk with warpgroup products, for more tokens
};

/// How kWgmma cuts a product over warps and clusters.
struct WgmmaCut {
  uint32_t warpgroups = 4;       // that multiply; one more loads
  uint32_t units_per_warp = 1;   // warpgroups x units_per_warp: 4 x 1, 2 x 2 or 2 x 1
  uint32_t splits = 1;           // blocks of a cluster that cut K, with the same rows; their sums meet in distributed shared memory
  uint32_t sharing = 1;          // blocks of a cluster with different rows and the same x, which each loads a part of for all
  uint32_t tiles_per_stage = 0;  // 0: chosen
  uint32_t stages = 0;           // 0: as many as fit
  uint32_t token_block = 0;      // 0: the smallest for m, or the largest
  bool tensor_weights = true;    // a stage's weights by one tensor copy, where every pass of a block has the same number of units
  bool token_blocks_at_once = false;  // blocks get so many rows that those of all tokens run at once; else those of one token block
};

/// A block owns whole 16-row units over the full K, so that nothing is combined across blocks. Its warps are units_per_pass x
/// slices; warp (r, s) takes unit r and column tiles s, s + slices, ...; the slices' partial sums meet in shared memory, in order.
/// kWgmma: the same for each of `splits` blocks of a cluster, over its part of K; warpgroups take the place of warps, each of
/// whose warps brings units_per_warp units.
struct GemmPlan {
  GemmKernel kernel = GemmKernel::kDirect;
  uint64_t n = 0, k = 0;
  uint32_t blocks = 0;           // along the units; kWgmma launches splits for each
  uint32_t units_per_block = 0;  // the last block may have fewer
  uint32_t units_per_pass = 0;   // units in flight at a time; a block makes ceil(units_per_block / units_per_pass) passes over x
  uint32_t slices = 1;           // cuts of K over warps and clusters; more than one only with a single pass
  uint32_t tiles_per_stage = 0;  // column tiles that one stage holds of each unit; kDirect, kBulk: a multiple of slices
  uint32_t stages = 0;           // of the ring (2 = double buffering in kDirect); kWgmma: a multiple of warp_slices()
  uint32_t token_block = 8;      // tokens of one block: 8, 16, 32 or 64; kWgmma: 64, 128 or 256
  uint32_t shared_bytes = 0;
  uint32_t splits = 1, sharing = 1;             // kWgmma, see WgmmaCut; the cluster has splits x sharing blocks
  uint32_t warpgroups = 0, units_per_warp = 0;  // kWgmma
  bool tensor_weights = false;                  // kWgmma, see WgmmaCut
  bool overlap_previous = false;                // see plan_gemm

  [[nodiscard]] constexpr uint32_t passes() const {
    return units_per_pass == 0 ? 0 : (units_per_block + units_per_pass - 1) / units_per_pass;
  }
  /// kWgmma: the slices of one block, each taken by warpgroups of its own.
  [[nodiscard]] constexpr uint32_t warp_slices() const { return slices / splits; }
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
  std::optional<GemmKernel> kernel = std::nullopt;  // this one or none; left open: the fastest that the device and x allow
};

/// The plan for one matrix shape. Pure. With a given kernel, `slices`, and with it every bit of the result, depends on n, k and the
/// SM count only, and is the same for kDirect and kBulk.
/// kInvalidArgument: n, k or m past 2^32 - 1, a device without SMs. kUnsupported: the device's shared memory holds no legal plan,
/// or the kernel asked for cannot run there, or not with such an x.
[[nodiscard]] Result<GemmPlan> plan_gemm(const DeviceTraits& device, const GemmRequest& request);

/// The kWgmma plan with this cut, for measuring. kUnsupported: it is not legal for the device and shape.
[[nodiscard]] Result<GemmPlan> plan_wgmma(const DeviceTraits& device, const GemmRequest& request, const WgmmaCut& cut);

}  // namespace weightd::kernels
