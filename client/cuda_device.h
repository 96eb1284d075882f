// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "client/compute.h"
#include "client/fork_guard.h"
#include "ipc/cuda_driver.h"
#include "ipc/vmm.h"
#include "kernels/blas.h"
#include "kernels/f12_cuda.h"
#include "weightd/status.h"

namespace weightd::detail {

/// One arena in a GPU's address space of this process. Which transport it came by is known here only.
struct CudaArena {
  ipc::VmmArena chunks;
  ipc::LegacyArena allocation;
  const std::byte* base = nullptr;
  uint64_t mapped_bytes = 0;
  std::string identity;
};

/// What this process keeps for one GPU: the primary context, the arenas in it, and what kernels need there. Thread-safe. Everything
/// but the context is made at its first use.
class CudaDevice {
 public:
  /// kUnsupported: this build has no code for the GPU. Makes the primary context if the process has none yet.
  [[nodiscard]] static Result<std::unique_ptr<CudaDevice>> open(const ipc::CudaDriver& driver, const ipc::GpuDevice& gpu);
  ~CudaDevice();
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  [[nodiscard]] const ipc::PrimaryContext& context() const { return context_; }
  [[nodiscard]] const std::string& uuid() const { return uuid_; }

  /// The arena of `source.identity`: the one that is mapped already, or mapped now.
  [[nodiscard]] Result<std::shared_ptr<CudaArena>> share(ArenaSource source);
  /// Gives up one share. The last one gets the arena back, for whoever calls to unmap: nobody can share it any more.
  [[nodiscard]] std::shared_ptr<CudaArena> leave(std::shared_ptr<CudaArena> arena);

  /// CUDA has ended with the process's exit: calling it is of no use any more.
  [[nodiscard]] bool shut_down() const;
  /// kFailedPrecondition while a stream that synchronizes with the legacy stream is being captured, by any thread. Streams made as
  /// non-blocking are not seen. Disturbs no capture. In the context.
  [[nodiscard]] Status refuse_during_capture() const;
  /// Until the GPU has done all that this process gave it. kFailedPrecondition: a stream is being captured (CUDA then ends a
  /// capture that refuse_during_capture() does not see). kCuda: what was given failed. In the context.
  [[nodiscard]] Status wait() const;

  // In the context:
  [[nodiscard]] Result<kernels::GemmDevice> gemm();
  /// cuBLASLt, opened when it is first asked for. kUnavailable: not on this machine.
  [[nodiscard]] Result<std::shared_ptr<kernels::Blas>> blas();
  /// The same for those who can do without: after one failure it is not looked for again. Null: none.
  [[nodiscard]] std::shared_ptr<kernels::Blas> blas_if_there();
  /// Runs `work` with `bytes` of scratch that belongs to `stream` until it has passed the work.
  Status with_scratch(uint64_t bytes, cudaStream_t stream, const std::function<Status(std::byte* scratch)>& work);
  /// Gives back what the pool of scratch holds and nobody uses.
  void trim();

 private:
  CudaDevice(const ipc::CudaDriver& driver, const ipc::GpuDevice& gpu, ipc::PrimaryContext context);
  [[nodiscard]] Result<std::shared_ptr<CudaArena>> map(ArenaSource source) const;
  [[nodiscard]] Result<cudaMemPool_t> pool();

  const ipc::CudaDriver& driver_;
  const CUdevice handle_;
  const std::string uuid_;
  ipc::PrimaryContext context_;
  std::mutex mutex_;  // of what follows
  std::map<std::string, std::weak_ptr<CudaArena>, std::less<>> arenas_;
  std::optional<kernels::GemmDevice> gemm_;
  std::shared_ptr<kernels::Blas> blas_;
  bool blas_missed_ = false;
  cudaMemPool_t pool_ = nullptr;
};

/// The GPUs that this process has used.
class CudaDevices {
 public:
  explicit CudaDevices(const ipc::CudaDriver& driver) : driver_(driver) {}

  /// Those of this machine's driver, as long as the process lives: a context that CUDA's runtime has used is not made anew safely,
  /// so the library keeps it, as the runtime keeps its own. kUnavailable: no driver.
  [[nodiscard]] static Result<CudaDevices*> of_process();

  /// kUnavailable: not among the visible ones. kForked: the parent of this process has used CUDA, so that this one cannot.
  [[nodiscard]] Result<CudaDevice*> open(std::string_view uuid);

 private:
  const HomeProcess home_;
  const ipc::CudaDriver driver_;
  std::mutex mutex_;
  std::map<std::string, std::unique_ptr<CudaDevice>, std::less<>> devices_;
};

}  // namespace weightd::detail
