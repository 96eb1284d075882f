// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "kernels/f12_cuda.h"

/// Checks and conversions that the launch functions share.
namespace weightd::kernels {

/// kCuda with the call's name and the driver's words; success for cudaSuccess.
[[nodiscard]] Status status_from_cuda(cudaError_t error, const char* call);

/// The rules of F12DeviceMatrix; `call` names the caller in the message.
[[nodiscard]] Status check_matrix(const F12DeviceMatrix& w, const char* call);

/// A range of bytes; empty ranges overlap nothing.
struct ByteRange {
  uintptr_t begin = 0, end = 0;
  [[nodiscard]] bool overlaps(const ByteRange& other) const { return begin < other.end && other.begin < end; }
};

/// What rows `stride` elements apart cover, after checking the rules of ConstBf16Matrix.
[[nodiscard]] Result<ByteRange> check_bf16(const uint16_t* data, uint64_t rows, uint64_t cols, int64_t stride, const char* call,
                                           const char* name);

/// Refuses an output that overlaps a plane of w. `tile_bytes` as in GemmRequest.
[[nodiscard]] Status check_no_overlap(const F12DeviceMatrix& w, uint64_t tile_bytes, const ByteRange& out, const char* call);

[[nodiscard]] inline bool vector_aligned(const uint16_t* data, int64_t stride) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % 8 == 0;
}

}  // namespace weightd::kernels
