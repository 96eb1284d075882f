// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "daemon/loader/cuda_backend.h"
#include "tests/support/fake_cuda.h"

namespace weightd::testing {

/// The kernels' answers, computed on the host: a fake driver's device memory is host memory.
[[nodiscard]] loader::DeviceWork fake_device_work(const FakeCuda& fake);

}  // namespace weightd::testing
