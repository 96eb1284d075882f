// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/gemm_bulk.cuh"
#include "kernels/gemm_direct.cuh"
#include "kernels/gemm_launch.h"
#include "kernels/gemm_wgmma.cuh"

namespace weightd::kernels {

/// Instantiates the kernels of one tile format.
template <typename Tile>
GemmKernels kernel_table() {
  const auto address = [](auto* kernel) { return reinterpret_cast<const void*>(kernel); };
  return {{address(gemm_direct_kernel<Tile, 1>), address(gemm_direct_kernel<Tile, 2>), address(gemm_direct_kernel<Tile, 4>),
           address(gemm_direct_kernel<Tile, 8>)},
          {address(gemm_bulk_kernel<Tile, 1>), address(gemm_bulk_kernel<Tile, 2>), address(gemm_bulk_kernel<Tile, 4>),
           address(gemm_bulk_kernel<Tile, 8>)},
          {{address(gemm_wgmma_kernel<Tile, 64, 1, 4>), address(gemm_wgmma_kernel<Tile, 128, 1, 4>), nullptr},
           {address(gemm_wgmma_kernel<Tile, 64, 2, 2>), address(gemm_wgmma_kernel<Tile, 128, 2, 2>), nullptr},
           {address(gemm_wgmma_kernel<Tile, 64, 1, 2>), address(gemm_wgmma_kernel<Tile, 128, 1, 2>),
            address(gemm_wgmma_kernel<Tile, 256, 1, 2>)}},
          Tile::kBytes};
}

}  // namespace weightd::kernels
