// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "daemon/loader/backend.h"
#include "ipc/messages.h"
#include "weightd/status.h"

/// The GPUs of this machine. A build without CUDA has another implementation, which says that it cannot.
namespace weightd::loader {

/// A backend on the GPU that job.device names (by UUID), for job.transport. kUnavailable: no driver; kNotFound: no such GPU here.
[[nodiscard]] Result<std::unique_ptr<Backend>> make_gpu_backend(const ipc::Job& job);

/// What the driver and NVML say. No GPU, or no driver, is an answer too. `deep` tries a chunk on each GPU.
[[nodiscard]] ipc::ProbeReply probe_gpus(bool deep);

}  // namespace weightd::loader
