// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "weightd/status.h"

namespace weightd::kernels {

inline constexpr uint64_t kHashBlockBytes = uint64_t{1} << 20;

/// hashes[i] = XXH3-64 (seed 0, default secret; store::block_hash) of bytes [i, i + 1) * kHashBlockBytes of `arena`, for i in
/// [0, blocks). `arena` is 16-byte aligned, both pointers are on the current device. Algorithm: XXH3 by Yann Collet, xxHash 0.8
/// (github.com/Cyan4973/xxHash). Launches on `stream`, allocates nothing, waits for nothing. kInvalidArgument, kCuda: nothing
/// written.
[[nodiscard]] Status launch_block_hashes(const std::byte* arena, uint64_t blocks, uint64_t* hashes, cudaStream_t stream);

}  // namespace weightd::kernels
