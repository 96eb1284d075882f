// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "weightd/status.h"

/// The CUDA driver, found at run time: programs that include this start on machines without one, and say so.
namespace weightd::ipc {

/// Entry points of libcuda.so.1. Tests make their own.
struct CudaDriver {
  decltype(&::cuInit) init = nullptr;
  decltype(&::cuDriverGetVersion) driver_get_version = nullptr;
  decltype(&::cuGetErrorName) get_error_name = nullptr;
  decltype(&::cuGetErrorString) get_error_string = nullptr;
  decltype(&::cuDeviceGetCount) device_get_count = nullptr;
  decltype(&::cuDeviceGet) device_get = nullptr;
  decltype(&::cuDeviceGetName) device_get_name = nullptr;
  decltype(&::cuDeviceGetUuid) device_get_uuid = nullptr;  // the _v2 entry: a MIG instance has its own
  decltype(&::cuDeviceTotalMem) device_total_mem = nullptr;
  decltype(&::cuDeviceGetAttribute) device_get_attribute = nullptr;
  decltype(&::cuDevicePrimaryCtxRetain) primary_ctx_retain = nullptr;
  decltype(&::cuDevicePrimaryCtxRelease) primary_ctx_release = nullptr;
  decltype(&::cuCtxPushCurrent) ctx_push_current = nullptr;
  decltype(&::cuCtxPopCurrent) ctx_pop_current = nullptr;
  decltype(&::cuCtxSynchronize) ctx_synchronize = nullptr;
  decltype(&::cuMemGetInfo) mem_get_info = nullptr;
  decltype(&::cuMemGetAllocationGranularity) mem_get_allocation_granularity = nullptr;
  decltype(&::cuMemCreate) mem_create = nullptr;
  decltype(&::cuMemRelease) mem_release = nullptr;
  decltype(&::cuMemExportToShareableHandle) mem_export = nullptr;
  decltype(&::cuMemImportFromShareableHandle) mem_import = nullptr;
  decltype(&::cuMemAddressReserve) mem_address_reserve = nullptr;
  decltype(&::cuMemAddressFree) mem_address_free = nullptr;
  decltype(&::cuMemMap) mem_map = nullptr;
  decltype(&::cuMemUnmap) mem_unmap = nullptr;
  decltype(&::cuMemSetAccess) mem_set_access = nullptr;
  decltype(&::cuMemGetAllocationPropertiesFromHandle) mem_get_properties = nullptr;
  decltype(&::cuMemAlloc) mem_alloc = nullptr;
  decltype(&::cuMemFree) mem_free = nullptr;
  decltype(&::cuMemGetAddressRange) mem_get_address_range = nullptr;
  decltype(&::cuIpcGetMemHandle) ipc_get_mem_handle = nullptr;
  decltype(&::cuIpcOpenMemHandle) ipc_open_mem_handle = nullptr;
  decltype(&::cuIpcCloseMemHandle) ipc_close_mem_handle = nullptr;
  decltype(&::cuMemHostRegister) mem_host_register = nullptr;
  decltype(&::cuMemHostUnregister) mem_host_unregister = nullptr;
  decltype(&::cuMemcpyHtoDAsync) memcpy_htod_async = nullptr;
  decltype(&::cuMemcpyDtoH) memcpy_dtoh = nullptr;
  decltype(&::cuMemsetD8Async) memset_d8_async = nullptr;
  decltype(&::cuStreamCreate) stream_create = nullptr;
  decltype(&::cuStreamDestroy) stream_destroy = nullptr;
  decltype(&::cuStreamSynchronize) stream_synchronize = nullptr;
  decltype(&::cuStreamIsCapturing) stream_is_capturing = nullptr;
  decltype(&::cuEventCreate) event_create = nullptr;
  decltype(&::cuEventDestroy) event_destroy = nullptr;
  decltype(&::cuEventRecord) event_record = nullptr;
  decltype(&::cuEventQuery) event_query = nullptr;
  decltype(&::cuEventSynchronize) event_synchronize = nullptr;
};

/// The machine's driver, loaded and initialised (cuInit) at the first call that succeeds; lives as long as the process. Makes no
/// context. kUnavailable: no libcuda.so.1, no GPU, or a driver that does not start; kUnsupported: an entry point is missing (too
/// old). Thread-safe.
[[nodiscard]] Result<const CudaDriver*> cuda_driver();

/// ok() for CUDA_SUCCESS. "cuMemCreate: out of memory (CUDA_ERROR_OUT_OF_MEMORY)". Out of memory is kResourceExhausted,
/// everything else kCuda.
[[nodiscard]] Status status_from_driver(const CudaDriver& driver, CUresult result, std::string_view call);

struct GpuDevice {
  CUdevice handle = 0;
  std::string uuid;  // "GPU-8-4-4-4-12 hexadecimal digits", or "MIG-..." for an instance
  std::string name;
  uint64_t total_bytes = 0;
  uint32_t compute_major = 0, compute_minor = 0;
  bool vmm = false, fd_handles = false;
};
/// The GPUs that this process may see, in the driver's order (CUDA_VISIBLE_DEVICES hides some). No context.
[[nodiscard]] Result<std::vector<GpuDevice>> visible_gpus(const CudaDriver& driver);
/// kNotFound: no GPU of that UUID among the visible ones; the message lists those, and names CUDA_VISIBLE_DEVICES if it is set.
[[nodiscard]] Result<GpuDevice> find_gpu(const CudaDriver& driver, std::string_view uuid);

/// The primary context of a device, retained while this lives (shared with the process's own use of the runtime).
class PrimaryContext {
 public:
  [[nodiscard]] static Result<PrimaryContext> retain(const CudaDriver& driver, CUdevice device);
  PrimaryContext() = default;
  PrimaryContext(PrimaryContext&& other) noexcept;
  PrimaryContext& operator=(PrimaryContext&& other) noexcept;
  ~PrimaryContext();

  /// Current on this thread while it lives; then what was current before is again.
  class Current {
   public:
    explicit Current(const PrimaryContext& context);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    [[nodiscard]] const Status& status() const { return status_; }

   private:
    const CudaDriver* driver_;
    Status status_;
  };

 private:
  const CudaDriver* driver_ = nullptr;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
};

}  // namespace weightd::ipc
