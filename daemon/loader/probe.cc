// SPDX-License-Identifier: Apache-2.0
#include "daemon/loader/probe.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "ipc/vmm.h"
#include "store/hash.h"

namespace weightd::loader {
namespace {

/// Content that no memory has by chance.
std::vector<std::byte> test_pattern(uint64_t bytes) {
  std::vector<std::byte> pattern(bytes);
  uint64_t state = 0x9E3779B97F4A7C15;
  for (std::byte& byte : pattern) {
    state = state * 6364136223846793005 + 1442695040888963407;
    byte = static_cast<std::byte>(state >> 56);
  }
  return pattern;
}

/// A loader's way with one granule, and a worker's.
Status share_a_granule(const ipc::CudaDriver& driver, const ipc::GpuDevice& gpu, const DeviceWork& work, uint64_t granule) {
  const std::vector<std::byte> pattern = test_pattern(granule);
  const Advance ignore = [](uint64_t) {};
  WEIGHTD_ASSIGN_OR_RETURN(const std::unique_ptr<Backend> backend, make_cuda_backend(driver, gpu, work));
  WEIGHTD_RETURN_IF_ERROR(backend->allocate({granule}));
  for (uint64_t offset = 0; offset < granule; offset += kPieceBytes) {
    WEIGHTD_ASSIGN_OR_RETURN(const Piece piece, backend->stage(offset, std::min(kPieceBytes, granule - offset)));
    std::copy_n(pattern.begin() + static_cast<ptrdiff_t>(offset), piece.bytes.size(), piece.bytes.begin());
    WEIGHTD_RETURN_IF_ERROR(backend->upload(piece));
    backend->retire(piece);
  }
  WEIGHTD_ASSIGN_OR_RETURN(Shares shares, backend->seal());
  WEIGHTD_ASSIGN_OR_RETURN(const std::unique_ptr<Backend> reader, make_cuda_backend(driver, gpu, work));
  WEIGHTD_RETURN_IF_ERROR(reader->import(std::move(shares.chunks), {granule}));
  WEIGHTD_ASSIGN_OR_RETURN(const std::vector<uint64_t> hashes, reader->hash_blocks(granule, 1, ignore));
  if (hashes == store::block_hashes(pattern, 1)) return {};
  return Status::corruption("a chunk that was exported, imported and mapped for reading has another content");
}

void ask_nvml(const Result<Nvml>& nvml, ipc::GpuSummary& summary, std::string& problem) {
  if (!nvml.ok()) return;
  const auto known = nvml->gpu(summary.uuid);
  if (!known.ok()) {
    if (problem.empty()) problem = known.status().message();
    return;
  }
  summary.nvml_known = true;
  summary.used_bytes = known->used_bytes;
  summary.free_bytes = known->free_bytes;
  if (known->minor) summary.minor = static_cast<int32_t>(*known->minor);
  if (known->persistence) summary.persistence = *known->persistence ? 1 : 0;
}

ipc::GpuSummary describe(const ipc::CudaDriver& driver, const ipc::GpuDevice& gpu, const DeviceWork& work) {
  ipc::GpuSummary summary;
  summary.uuid = gpu.uuid;
  summary.name = gpu.name;
  summary.total_bytes = gpu.total_bytes;
  summary.compute_major = gpu.compute_major;
  summary.compute_minor = gpu.compute_minor;
  summary.vmm = gpu.vmm;
  summary.fd_handles = gpu.fd_handles;
  if (!gpu.vmm) {
    summary.problem = "no virtual memory management";
    return summary;
  }
  const auto granularity = ipc::chunk_granularity(driver, gpu.handle);
  if (granularity.ok()) summary.granularity_bytes = *granularity;
  if (!granularity.ok())
    summary.problem = granularity.status().message();
  else if (!gpu.fd_handles)
    summary.problem = "memory cannot be exported as file descriptors";
  if (!summary.problem.empty() || !work.block_hashes) return summary;
  const Status shared = share_a_granule(driver, gpu, work, *granularity);
  summary.read_only_map = shared.ok() ? 1 : 0;
  if (!shared.ok()) summary.problem = shared.message();
  return summary;
}

}  // namespace

ipc::ProbeReply probe(const Result<const ipc::CudaDriver*>& driver, const Result<Nvml>& nvml, const DeviceWork& work) {
  ipc::ProbeReply reply;
  if (nvml.ok())
    reply.driver_version = nvml->driver_version();
  else
    reply.nvml_problem = nvml.status().message();
  if (!driver.ok()) {
    reply.problem = driver.status().message();
    return reply;
  }
  int version = 0;
  if ((*driver)->driver_get_version(&version) == CUDA_SUCCESS) reply.cuda_version = static_cast<uint32_t>(version);
  const auto gpus = ipc::visible_gpus(**driver);
  if (!gpus.ok()) {
    reply.problem = gpus.status().message();
    return reply;
  }
  for (const ipc::GpuDevice& gpu : *gpus) {
    reply.gpus.push_back(describe(**driver, gpu, work));
    ask_nvml(nvml, reply.gpus.back(), reply.nvml_problem);
  }
  bool usable = false;
  for (const ipc::GpuSummary& gpu : reply.gpus) usable = usable || gpu.problem.empty();
  if (reply.gpus.empty()) reply.problem = "the CUDA driver sees no GPU";
  if (!reply.gpus.empty() && !usable) reply.problem = "GPU " + reply.gpus.front().uuid + ": " + reply.gpus.front().problem;
  return reply;
}

}  // namespace weightd::loader
