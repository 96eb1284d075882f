// SPDX-License-Identifier: Apache-2.0
#include "daemon/loader/gpu.h"

#include <utility>

#include "daemon/loader/cuda_backend.h"
#include "daemon/loader/nvml.h"
#include "daemon/loader/probe.h"
#include "kernels/block_hash.h"
#include "kernels/f12_check.h"

namespace weightd::loader {
namespace {

DeviceWork device_work() { return {kernels::launch_block_hashes, kernels::launch_check_f12}; }

}  // namespace

Result<std::unique_ptr<Backend>> make_gpu_backend(const ipc::Job& job) {
  WEIGHTD_ASSIGN_OR_RETURN(const ipc::CudaDriver* driver, ipc::cuda_driver());
  WEIGHTD_ASSIGN_OR_RETURN(const ipc::GpuDevice gpu, ipc::find_gpu(*driver, job.device));
  CudaBackendOptions options;
  options.legacy = job.transport == "legacy";
  return make_cuda_backend(*driver, gpu, device_work(), std::move(options));
}

ipc::ProbeReply probe_gpus(bool deep) { return probe(ipc::cuda_driver(), Nvml::load(), deep ? device_work() : DeviceWork()); }

}  // namespace weightd::loader
