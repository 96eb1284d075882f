// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <vector>

#include "kernels/gemm_launch.h"
#include "tests/gpu/test_matrix.h"

namespace weightd::testing {

/// The words in fragment order, f12's unit and tile order, 2048 bytes a tile, padding 0: tile (u, t), k16 step j, lane 4g + q holds
/// at 512 j + 16 lane the four registers (rows g, g + 8 of columns 2q and up; the same of columns 8 + 2q and up).
[[nodiscard]] std::vector<std::byte> pack_raw16(const Words& words);

/// The GEMM kernels over such tiles.
[[nodiscard]] kernels::GemmKernels raw16_gemm_kernels();

}  // namespace weightd::testing
