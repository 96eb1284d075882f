// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm_table.cuh"
#include "tests/gpu/raw16.h"

namespace weightd::testing {

kernels::GemmKernels raw16_gemm_kernels() { return kernels::kernel_table<kernels::Raw16Tile>(); }

}  // namespace weightd::testing
