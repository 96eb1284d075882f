// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/f12_cuda.h"
#include "weightd/status.h"

namespace weightd::kernels {

inline constexpr uint64_t kNoDamage = ~uint64_t{0};

/// Looks for what store::f12_validate refuses in the planes of one matrix: *first_damaged_unit becomes the lowest unit of 16 rows
/// that breaks a rule, or stays kNoDamage; atomically lowered, so several launches may share it. The caller sets it to kNoDamage
/// before. Which rule it is, f12_validate says of that unit's bytes. Reads nothing outside the planes, whatever they hold.
///   w           as f12_cuda.h, but pool and pool_bytes are this storage's own part of the pool;
///   pool_base   bytes from the start of the model's pool (which records count from) to that part
/// Launches on `stream`, allocates nothing, waits for nothing.
[[nodiscard]] Status launch_check_f12(const F12DeviceMatrix& w, uint64_t pool_base, uint64_t* first_damaged_unit,
                                      cudaStream_t stream);

}  // namespace weightd::kernels
