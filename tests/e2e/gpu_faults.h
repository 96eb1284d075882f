// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace weightd::e2e {

/// Launches on the default stream a kernel of one thread that writes a byte to `address`.
[[nodiscard]] cudaError_t launch_store(std::byte* address);
/// ... that ends with a trap.
[[nodiscard]] cudaError_t launch_trap();

}  // namespace weightd::e2e
