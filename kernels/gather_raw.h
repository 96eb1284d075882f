// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "weightd/status.h"
#include "weightd/types.h"

namespace weightd::kernels {

/// launch_gather_rows (f12_cuda.h) for an uncoded BF16 matrix: out[i, :] = w[rows[i], :] for i in [0, count). `rows` is on the
/// device; an index outside [0, w.rows) fills its row with NaN (0x7fff). w and out are 2-byte aligned, with row strides of at least
/// w.cols if there is more than one row, and do not overlap. Fast when both are 16-byte aligned and both strides multiples of 8.
/// Allocates nothing, waits for nothing, may be captured. kInvalidArgument: nothing is written. kCuda: the launch was refused.
[[nodiscard]] Status launch_gather_raw(ConstBf16Matrix w, const int32_t* rows, uint64_t count, uint16_t* out, int64_t out_stride,
                                       cudaStream_t stream);
[[nodiscard]] Status launch_gather_raw(ConstBf16Matrix w, const int64_t* rows, uint64_t count, uint16_t* out, int64_t out_stride,
                                       cudaStream_t stream);

}  // namespace weightd::kernels
