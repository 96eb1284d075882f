// SPDX-License-Identifier: Apache-2.0
// For builds without CUDA.
#include "base/text.h"
#include "daemon/loader/gpu.h"

namespace weightd::loader {

Result<std::unique_ptr<Backend>> make_gpu_backend(const ipc::Job& job) {
  return Status::unsupported("backend '" + printable(job.backend) + "': this loader was built without CUDA");
}

ipc::ProbeReply probe_gpus(bool) {
  ipc::ProbeReply reply;
  reply.problem = "this loader was built without CUDA";
  return reply;
}

}  // namespace weightd::loader
