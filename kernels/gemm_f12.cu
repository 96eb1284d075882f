// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm_table.cuh"

namespace weightd::kernels {

GemmKernels f12_gemm_kernels() { return kernel_table<F12Tile>(); }

}  // namespace weightd::kernels
