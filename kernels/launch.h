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

/// A BF16 matrix of `rows` x `cols` whose rows lie `stride` elements apart. Rows may not overlap if `written`.
[[nodiscard]] Status check_bf16(const uint16_t* data, uint64_t rows, uint64_t cols, int64_t stride, bool written, const char* call,
                                const char* name);

[[nodiscard]] inline bool vector_aligned(const uint16_t* data, int64_t stride) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % 8 == 0;
}

}  // namespace weightd::kernels
