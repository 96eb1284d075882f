// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "daemon/loader/cuda_backend.h"
#include "daemon/loader/nvml.h"
#include "ipc/cuda_driver.h"
#include "ipc/messages.h"

namespace weightd::loader {

/// What these two say of the machine; their failures are part of the answer. With `work`, each GPU makes, exports, imports, reads
/// and hashes one granule, which needs a context for a moment.
[[nodiscard]] ipc::ProbeReply probe(const Result<const ipc::CudaDriver*>& driver, const Result<Nvml>& nvml, const DeviceWork& work);

}  // namespace weightd::loader
