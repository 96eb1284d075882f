// SPDX-License-Identifier: Apache-2.0
#include "client/cuda_device.h"

#include <limits>
#include <utility>

#include "base/text.h"
#include "client/gpu_code.h"

namespace weightd::detail {
namespace {

Status status_from_runtime(cudaError_t error, const std::string& call) {
  if (error == cudaSuccess) return {};
  return Status::cuda(call + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

/// While it lives, this thread may do what a capture of its streams would forbid: loading code, making a pool. Nothing of it
/// belongs into a graph.
class OutsideOfCapture {
 public:
  OutsideOfCapture() { swapped_ = cudaThreadExchangeStreamCaptureMode(&mode_) == cudaSuccess; }
  ~OutsideOfCapture() {
    if (swapped_) (void)cudaThreadExchangeStreamCaptureMode(&mode_);
  }
  OutsideOfCapture(const OutsideOfCapture&) = delete;
  OutsideOfCapture& operator=(const OutsideOfCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
  bool swapped_ = false;
};

bool is_capture_error(CUresult result) {
  return result >= CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED && result <= CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
}

const std::byte* address(CUdeviceptr pointer) { return reinterpret_cast<const std::byte*>(static_cast<uintptr_t>(pointer)); }

}  // namespace

Result<std::unique_ptr<CudaDevice>> CudaDevice::open(const ipc::CudaDriver& driver, const ipc::GpuDevice& gpu) {
  if (!has_gpu_code(WEIGHTD_CUDA_ARCHITECTURES, gpu.compute_major, gpu.compute_minor)) {
    return Status::unsupported("GPU " + printable(gpu.uuid) + " has compute capability " + std::to_string(gpu.compute_major) + "." +
                               std::to_string(gpu.compute_minor) + "; this library has code for " WEIGHTD_CUDA_ARCHITECTURES);
  }
  WEIGHTD_ASSIGN_OR_RETURN(ipc::PrimaryContext context, ipc::PrimaryContext::retain(driver, gpu.handle));
  return std::unique_ptr<CudaDevice>(new CudaDevice(driver, gpu, std::move(context)));
}

CudaDevice::CudaDevice(const ipc::CudaDriver& driver, const ipc::GpuDevice& gpu, ipc::PrimaryContext context)
    : driver_(driver), handle_(gpu.handle), uuid_(gpu.uuid), context_(std::move(context)) {}

CudaDevice::~CudaDevice() {
  if (pool_ == nullptr) return;
  const ipc::PrimaryContext::Current current(context_);
  if (current.status().ok()) (void)cudaMemPoolDestroy(pool_);
}

Result<std::shared_ptr<CudaArena>> CudaDevice::share(ArenaSource source) {
  // Held while mapping, so that two threads do not map the same memory twice. It takes less than a millisecond.
  const std::lock_guard lock(mutex_);
  if (const auto known = arenas_.find(source.identity); known != arenas_.end()) {
    if (std::shared_ptr<CudaArena> arena = known->second.lock()) return arena;
    arenas_.erase(known);
  }
  WEIGHTD_ASSIGN_OR_RETURN(std::shared_ptr<CudaArena> arena, map(std::move(source)));
  arenas_.emplace(arena->identity, arena);
  return arena;
}

Result<std::shared_ptr<CudaArena>> CudaDevice::map(ArenaSource source) const {
  auto arena = std::make_shared<CudaArena>();
  if (source.transport == "legacy") {
    uint64_t bytes = 0;
    for (const uint64_t chunk : source.chunk_bytes) bytes += chunk;
    const ipc::PrimaryContext::Current current(context_);
    WEIGHTD_RETURN_IF_ERROR(current.status());
    WEIGHTD_ASSIGN_OR_RETURN(arena->allocation, ipc::LegacyArena::open(driver_, source.ipc_handle, bytes));
    arena->base = address(arena->allocation.base());
    arena->mapped_bytes = arena->allocation.size_bytes();
  } else {
    Result<ipc::VmmArena> chunks = ipc::VmmArena::import(driver_, handle_, std::move(source.chunks), source.chunk_bytes);
    if (chunks.status().code() == StatusCode::kInvalidArgument) return Status::corruption(chunks.status().message());
    WEIGHTD_ASSIGN_OR_RETURN(arena->chunks, std::move(chunks));
    arena->base = address(arena->chunks.base());
    arena->mapped_bytes = arena->chunks.size_bytes();
  }
  arena->identity = std::move(source.identity);
  return arena;
}

std::shared_ptr<CudaArena> CudaDevice::leave(std::shared_ptr<CudaArena> arena) {
  const std::lock_guard lock(mutex_);
  if (arena.use_count() > 1) {  // shares are made under the mutex only, so a count of one stays one
    arena.reset();
    return nullptr;
  }
  const auto known = arenas_.find(arena->identity);
  if (known != arenas_.end() && known->second.lock() == arena) arenas_.erase(known);
  return arena;
}

bool CudaDevice::shut_down() const {
  int count = 0;
  return driver_.device_get_count(&count) == CUDA_ERROR_DEINITIALIZED;
}

Status CudaDevice::refuse_during_capture() const {
  CUstreamCaptureStatus state{};
  if (driver_.stream_is_capturing(CU_STREAM_LEGACY, &state) != CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) return {};
  return Status::failed_precondition("a stream of GPU " + printable(uuid_) +
                                     " is being captured: waiting for the GPU would spoil the capture");
}

Status CudaDevice::wait() const {
  WEIGHTD_RETURN_IF_ERROR(refuse_during_capture());
  const CUresult result = driver_.ctx_synchronize();
  Status status = ipc::status_from_driver(driver_, result, "cuCtxSynchronize");
  return is_capture_error(result)
             ? Status::failed_precondition("a stream of GPU " + printable(uuid_) + " is being captured: " + status.message())
             : status;
}

Result<kernels::GemmDevice> CudaDevice::gemm() {
  const std::lock_guard lock(mutex_);
  if (!gemm_.has_value()) {
    const OutsideOfCapture outside;
    WEIGHTD_ASSIGN_OR_RETURN(gemm_, kernels::prepare_gemm());
  }
  return *gemm_;
}

Result<std::shared_ptr<kernels::Blas>> CudaDevice::blas() {
  const std::lock_guard lock(mutex_);
  if (blas_ == nullptr) {
    const OutsideOfCapture outside;
    Result<std::shared_ptr<kernels::Blas>> opened = kernels::Blas::open();
    blas_missed_ = !opened.ok();
    WEIGHTD_ASSIGN_OR_RETURN(blas_, std::move(opened));
  }
  return blas_;
}

std::shared_ptr<kernels::Blas> CudaDevice::blas_if_there() {
  {
    const std::lock_guard lock(mutex_);
    if (blas_ != nullptr || blas_missed_) return blas_;
  }
  Result<std::shared_ptr<kernels::Blas>> opened = blas();
  return opened.ok() ? *opened : nullptr;
}

Result<cudaMemPool_t> CudaDevice::pool() {
  const std::lock_guard lock(mutex_);
  if (pool_ != nullptr) return pool_;
  const OutsideOfCapture outside;
  cudaMemPoolProps properties{};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location.type = cudaMemLocationTypeDevice;
  WEIGHTD_RETURN_IF_ERROR(status_from_runtime(cudaGetDevice(&properties.location.id), "cudaGetDevice"));
  cudaMemPool_t made = nullptr;
  WEIGHTD_RETURN_IF_ERROR(status_from_runtime(cudaMemPoolCreate(&made, &properties), "cudaMemPoolCreate"));
  // Without it every synchronization would give the scratch back, and the next call would wait for it.
  uint64_t keep = std::numeric_limits<uint64_t>::max();
  const Status kept =
      status_from_runtime(cudaMemPoolSetAttribute(made, cudaMemPoolAttrReleaseThreshold, &keep), "cudaMemPoolSetAttribute");
  if (!kept.ok()) {
    (void)cudaMemPoolDestroy(made);
    return kept;
  }
  return pool_ = made;
}

Status CudaDevice::with_scratch(uint64_t bytes, cudaStream_t stream, const std::function<Status(std::byte*)>& work) {
  if (bytes == 0) return work(nullptr);
  WEIGHTD_ASSIGN_OR_RETURN(const cudaMemPool_t from, pool());
  void* scratch = nullptr;
  const cudaError_t taken = cudaMallocFromPoolAsync(&scratch, bytes, from, stream);
  if (taken == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();  // it is not sticky, and nobody else's business
    return Status::resource_exhausted("GPU " + printable(uuid_) + " has no " + human_bytes(bytes) + " for scratch");
  }
  WEIGHTD_RETURN_IF_ERROR(status_from_runtime(taken, "cudaMallocFromPoolAsync"));
  const Status status = work(static_cast<std::byte*>(scratch));
  const Status freed = status_from_runtime(cudaFreeAsync(scratch, stream), "cudaFreeAsync");
  return status.ok() ? freed : status;
}

void CudaDevice::trim() {
  const std::lock_guard lock(mutex_);
  if (pool_ != nullptr) (void)cudaMemPoolTrimTo(pool_, 0);
}

Result<CudaDevices*> CudaDevices::of_process() {
  WEIGHTD_ASSIGN_OR_RETURN(const ipc::CudaDriver* driver, ipc::cuda_driver());
  static CudaDevices* const devices = new CudaDevices(*driver);
  return devices;
}

Result<CudaDevice*> CudaDevices::open(std::string_view uuid) {
  if (home_.surely_left()) {
    return Status::forked("the parent of this process has used CUDA, which does not survive a fork: start workers with exec");
  }
  const std::lock_guard lock(mutex_);
  if (const auto known = devices_.find(uuid); known != devices_.end()) return known->second.get();
  Result<ipc::GpuDevice> gpu = ipc::find_gpu(driver_, uuid);
  if (gpu.status().code() == StatusCode::kNotFound) return Status::unavailable(gpu.status().message());
  WEIGHTD_RETURN_IF_ERROR(gpu.status());
  WEIGHTD_ASSIGN_OR_RETURN(std::unique_ptr<CudaDevice> device, CudaDevice::open(driver_, *gpu));
  return devices_.emplace(std::string(uuid), std::move(device)).first->second.get();
}

}  // namespace weightd::detail
