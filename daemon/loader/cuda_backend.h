// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "daemon/loader/backend.h"
#include "ipc/cuda_driver.h"
#include "kernels/f12_cuda.h"
#include "weightd/status.h"

namespace weightd::loader {

/// What the device computes; launches on `stream` of the current context. The contracts are those of kernels/block_hash.h and
/// kernels/f12_check.h.
struct DeviceWork {
  std::function<Status(const std::byte* arena, uint64_t blocks, uint64_t* hashes, cudaStream_t stream)> block_hashes;
  std::function<Status(const kernels::F12DeviceMatrix& w, uint64_t pool_base, uint64_t* first_damaged_unit, cudaStream_t stream)>
      check_f12;
};

struct CudaBackendOptions {
  bool legacy = false;                     // one allocation and a cudaIpcMemHandle_t instead of chunks
  uint32_t max_pieces = 64;                // of a ring of pinned memory, kPieceBytes each; fewer for a small arena
  int attempts = 40;                       // of an allocation: the driver takes its time to give back what a killed process held
  std::function<void()> between_attempts;  // empty: 50 ms
};

/// Chunks in the memory of one GPU. Makes (or joins) the device's primary context; one stream. kUnsupported: the GPU cannot share
/// memory in the way asked for.
[[nodiscard]] Result<std::unique_ptr<Backend>> make_cuda_backend(const ipc::CudaDriver& driver, const ipc::GpuDevice& gpu,
                                                                 DeviceWork work, CudaBackendOptions options = {});

}  // namespace weightd::loader
