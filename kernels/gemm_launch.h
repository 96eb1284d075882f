// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include "kernels/f12_cuda.h"

/// The host half of the fused GEMM, over a table of kernels, so that the oracle's kernels (raw16) launch by the same code.
namespace weightd::kernels {

struct GemmArgs;

/// Kernels by token block. Addresses of __global__ functions; null where there is none.
struct GemmKernels {
  const void* direct[4];  // 8, 16, 32, 64 tokens; (GemmArgs)
  const void* bulk[4];    // likewise; (GemmArgs, CUtensorMap x)
  const void* wgmma[3]
                   [3];  // warpgroups x units a warp: 4x1, 2x2, 2x1; 64, 128, 256 tokens; (GemmArgs, CUtensorMap x, CUtensorMap w)
  uint32_t tile_bytes;
};

/// Raises the shared-memory limit of all kernels of the table on the current device to what it offers.
[[nodiscard]] Status raise_shared_limits(const GemmKernels& kernels, uint32_t shared_bytes);

/// launch_gemm for any table.
[[nodiscard]] Status launch_gemm_kernels(const GemmKernels& kernels, const GemmDevice& device, const GemmPlan& plan,
                                         const F12DeviceMatrix& w, ConstBf16Matrix x, Bf16Matrix y, cudaStream_t stream);

[[nodiscard]] GemmKernels f12_gemm_kernels();

}  // namespace weightd::kernels
