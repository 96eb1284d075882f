// SPDX-License-Identifier: Apache-2.0
#include "ipc/cuda_driver.h"

#include <dlfcn.h>

#include <cstdlib>
#include <memory>
#include <mutex>
#include <utility>

#include "base/text.h"

namespace weightd::ipc {
namespace {

/// Looks up entry points; remembers the first that is missing.
class Entries {
 public:
  explicit Entries(void* library) : library_(library) {}
  template <typename Function>
  void find(Function*& entry, const char* name) {
    entry = reinterpret_cast<Function*>(::dlsym(library_, name));
    if (entry == nullptr && missing_ == nullptr) missing_ = name;
  }
  const char* missing() const { return missing_; }

 private:
  void* library_;
  const char* missing_ = nullptr;
};

// cuda.h renames functions to the version that its declarations describe (cuMemFree is cuMemFree_v2). The name is looked up after
// that, as a linker would, so the type and the code behind it always agree.
#define WEIGHTD_NAME_(symbol) #symbol
#define WEIGHTD_FIND_(entry, symbol) entries.find(driver.entry, WEIGHTD_NAME_(symbol))

void find_devices(Entries& entries, CudaDriver& driver) {
  WEIGHTD_FIND_(init, cuInit);
  WEIGHTD_FIND_(driver_get_version, cuDriverGetVersion);
  WEIGHTD_FIND_(get_error_name, cuGetErrorName);
  WEIGHTD_FIND_(get_error_string, cuGetErrorString);
  WEIGHTD_FIND_(device_get_count, cuDeviceGetCount);
  WEIGHTD_FIND_(device_get, cuDeviceGet);
  WEIGHTD_FIND_(device_get_name, cuDeviceGetName);
  WEIGHTD_FIND_(device_get_uuid, cuDeviceGetUuid);
  WEIGHTD_FIND_(device_total_mem, cuDeviceTotalMem);
  WEIGHTD_FIND_(device_get_attribute, cuDeviceGetAttribute);
  WEIGHTD_FIND_(primary_ctx_retain, cuDevicePrimaryCtxRetain);
  WEIGHTD_FIND_(primary_ctx_release, cuDevicePrimaryCtxRelease);
  WEIGHTD_FIND_(ctx_push_current, cuCtxPushCurrent);
  WEIGHTD_FIND_(ctx_pop_current, cuCtxPopCurrent);
  WEIGHTD_FIND_(ctx_synchronize, cuCtxSynchronize);
}

void find_memory(Entries& entries, CudaDriver& driver) {
  WEIGHTD_FIND_(mem_get_info, cuMemGetInfo);
  WEIGHTD_FIND_(mem_get_allocation_granularity, cuMemGetAllocationGranularity);
  WEIGHTD_FIND_(mem_create, cuMemCreate);
  WEIGHTD_FIND_(mem_release, cuMemRelease);
  WEIGHTD_FIND_(mem_export, cuMemExportToShareableHandle);
  WEIGHTD_FIND_(mem_import, cuMemImportFromShareableHandle);
  WEIGHTD_FIND_(mem_address_reserve, cuMemAddressReserve);
  WEIGHTD_FIND_(mem_address_free, cuMemAddressFree);
  WEIGHTD_FIND_(mem_map, cuMemMap);
  WEIGHTD_FIND_(mem_unmap, cuMemUnmap);
  WEIGHTD_FIND_(mem_set_access, cuMemSetAccess);
  WEIGHTD_FIND_(mem_get_properties, cuMemGetAllocationPropertiesFromHandle);
  WEIGHTD_FIND_(mem_alloc, cuMemAlloc);
  WEIGHTD_FIND_(mem_free, cuMemFree);
  WEIGHTD_FIND_(mem_get_address_range, cuMemGetAddressRange);
  WEIGHTD_FIND_(ipc_get_mem_handle, cuIpcGetMemHandle);
  WEIGHTD_FIND_(ipc_open_mem_handle, cuIpcOpenMemHandle);
  WEIGHTD_FIND_(ipc_close_mem_handle, cuIpcCloseMemHandle);
  WEIGHTD_FIND_(mem_host_register, cuMemHostRegister);
  WEIGHTD_FIND_(mem_host_unregister, cuMemHostUnregister);
}

void find_streams(Entries& entries, CudaDriver& driver) {
  WEIGHTD_FIND_(memcpy_htod_async, cuMemcpyHtoDAsync);
  WEIGHTD_FIND_(memcpy_dtoh, cuMemcpyDtoH);
  WEIGHTD_FIND_(memset_d8_async, cuMemsetD8Async);
  WEIGHTD_FIND_(stream_create, cuStreamCreate);
  WEIGHTD_FIND_(stream_destroy, cuStreamDestroy);
  WEIGHTD_FIND_(stream_synchronize, cuStreamSynchronize);
  WEIGHTD_FIND_(stream_is_capturing, cuStreamIsCapturing);
  WEIGHTD_FIND_(event_create, cuEventCreate);
  WEIGHTD_FIND_(event_destroy, cuEventDestroy);
  WEIGHTD_FIND_(event_record, cuEventRecord);
  WEIGHTD_FIND_(event_query, cuEventQuery);
  WEIGHTD_FIND_(event_synchronize, cuEventSynchronize);
}

#undef WEIGHTD_FIND_
#undef WEIGHTD_NAME_

/// What hides GPUs from a process more often than anything else.
std::string visibility_hint() {
  const char* restricted = std::getenv("CUDA_VISIBLE_DEVICES");
  return restricted == nullptr ? "" : " (CUDA_VISIBLE_DEVICES is '" + printable(restricted) + "')";
}

Result<std::unique_ptr<const CudaDriver>> load_driver() {
  // Never closed: the driver does not survive being unloaded.
  void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = ::dlerror();
    return Status::unavailable("no CUDA driver: " + printable(why == nullptr ? "libcuda.so.1 cannot be loaded" : why));
  }
  auto driver = std::make_unique<CudaDriver>();
  Entries entries(library);
  find_devices(entries, *driver);
  find_memory(entries, *driver);
  find_streams(entries, *driver);
  if (entries.missing() != nullptr) {
    return Status::unsupported(std::string("the CUDA driver is too old: it has no ") + entries.missing());
  }
  const CUresult started = driver->init(0);
  if (started != CUDA_SUCCESS) {
    return Status::unavailable("the CUDA driver does not start: " + status_from_driver(*driver, started, "cuInit").message() +
                               visibility_hint());
  }
  int count = 0;
  WEIGHTD_RETURN_IF_ERROR(status_from_driver(*driver, driver->device_get_count(&count), "cuDeviceGetCount"));
  if (count == 0) return Status::unavailable("the CUDA driver sees no GPU" + visibility_hint());
  return std::unique_ptr<const CudaDriver>(std::move(driver));
}

std::string format_uuid(const CUuuid& uuid, bool instance) {
  unsigned char bytes[sizeof(uuid.bytes)];
  for (size_t i = 0; i < sizeof(bytes); ++i) bytes[i] = static_cast<unsigned char>(uuid.bytes[i]);
  return std::string(instance ? "MIG-" : "GPU-") + hex(bytes, 4) + "-" + hex(bytes + 4, 2) + "-" + hex(bytes + 6, 2) + "-" +
         hex(bytes + 8, 2) + "-" + hex(bytes + 10, 6);
}

Result<int> attribute(const CudaDriver& driver, CUdevice device, CUdevice_attribute which) {
  int value = 0;
  WEIGHTD_RETURN_IF_ERROR(status_from_driver(driver, driver.device_get_attribute(&value, which, device), "cuDeviceGetAttribute"));
  return value;
}

Result<GpuDevice> describe(const CudaDriver& driver, int ordinal) {
  GpuDevice gpu;
  WEIGHTD_RETURN_IF_ERROR(status_from_driver(driver, driver.device_get(&gpu.handle, ordinal), "cuDeviceGet"));
  char name[256] = {};
  WEIGHTD_RETURN_IF_ERROR(
      status_from_driver(driver, driver.device_get_name(name, static_cast<int>(sizeof(name)) - 1, gpu.handle), "cuDeviceGetName"));
  gpu.name = printable(name);
  CUuuid uuid{};
  WEIGHTD_RETURN_IF_ERROR(status_from_driver(driver, driver.device_get_uuid(&uuid, gpu.handle), "cuDeviceGetUuid"));
  // An instance of a divided GPU is told apart by its name only: "NVIDIA A100-SXM4-40GB MIG 1g.5gb".
  gpu.uuid = format_uuid(uuid, gpu.name.find(" MIG ") != std::string::npos);
  size_t total = 0;
  WEIGHTD_RETURN_IF_ERROR(status_from_driver(driver, driver.device_total_mem(&total, gpu.handle), "cuDeviceTotalMem"));
  gpu.total_bytes = total;
  WEIGHTD_ASSIGN_OR_RETURN(const int major, attribute(driver, gpu.handle, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR));
  WEIGHTD_ASSIGN_OR_RETURN(const int minor, attribute(driver, gpu.handle, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR));
  WEIGHTD_ASSIGN_OR_RETURN(const int vmm, attribute(driver, gpu.handle, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED));
  WEIGHTD_ASSIGN_OR_RETURN(const int fds,
                           attribute(driver, gpu.handle, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED));
  gpu.compute_major = static_cast<uint32_t>(major);
  gpu.compute_minor = static_cast<uint32_t>(minor);
  gpu.vmm = vmm != 0;
  gpu.fd_handles = fds != 0;
  return gpu;
}

}  // namespace

Result<const CudaDriver*> cuda_driver() {
  static std::mutex mutex;
  static const CudaDriver* loaded = nullptr;  // never freed: what ends with the process may still call it
  const std::lock_guard<std::mutex> lock(mutex);
  if (loaded == nullptr) {
    WEIGHTD_ASSIGN_OR_RETURN(std::unique_ptr<const CudaDriver> driver, load_driver());
    loaded = driver.release();
  }
  return loaded;
}

Status status_from_driver(const CudaDriver& driver, CUresult result, std::string_view call) {
  if (result == CUDA_SUCCESS) return {};
  const char* name = nullptr;
  const char* text = nullptr;
  if (driver.get_error_name(result, &name) != CUDA_SUCCESS || name == nullptr) name = "unknown";
  if (driver.get_error_string(result, &text) != CUDA_SUCCESS || text == nullptr) text = "error";
  std::string message = std::string(call) + ": " + text + " (" + name + ", " + std::to_string(static_cast<int>(result)) + ")";
  if (result == CUDA_ERROR_OUT_OF_MEMORY) return Status::resource_exhausted(std::move(message));
  return Status::cuda(std::move(message));
}

Result<std::vector<GpuDevice>> visible_gpus(const CudaDriver& driver) {
  int count = 0;
  WEIGHTD_RETURN_IF_ERROR(status_from_driver(driver, driver.device_get_count(&count), "cuDeviceGetCount"));
  std::vector<GpuDevice> gpus;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    auto gpu = describe(driver, ordinal);
    if (!gpu.ok()) return gpu.status().with_context("GPU " + std::to_string(ordinal));
    gpus.push_back(*std::move(gpu));
  }
  return gpus;
}

Result<GpuDevice> find_gpu(const CudaDriver& driver, std::string_view uuid) {
  WEIGHTD_ASSIGN_OR_RETURN(std::vector<GpuDevice> gpus, visible_gpus(driver));
  std::string listed;
  for (GpuDevice& gpu : gpus) {
    if (gpu.uuid == uuid) return std::move(gpu);
    listed += (listed.empty() ? "" : ", ") + gpu.uuid;
  }
  return Status::not_found("no GPU " + printable(uuid) + " here; visible: " + (listed.empty() ? "none" : listed) +
                           visibility_hint());
}

Result<PrimaryContext> PrimaryContext::retain(const CudaDriver& driver, CUdevice device) {
  PrimaryContext context;
  WEIGHTD_RETURN_IF_ERROR(
      status_from_driver(driver, driver.primary_ctx_retain(&context.context_, device), "cuDevicePrimaryCtxRetain"));
  context.driver_ = &driver;
  context.device_ = device;
  return context;
}

PrimaryContext::PrimaryContext(PrimaryContext&& other) noexcept
    : driver_(std::exchange(other.driver_, nullptr)), device_(other.device_), context_(std::exchange(other.context_, nullptr)) {}

PrimaryContext& PrimaryContext::operator=(PrimaryContext&& other) noexcept {
  if (this == &other) return *this;
  if (driver_ != nullptr) driver_->primary_ctx_release(device_);
  driver_ = std::exchange(other.driver_, nullptr);
  device_ = other.device_;
  context_ = std::exchange(other.context_, nullptr);
  return *this;
}

PrimaryContext::~PrimaryContext() {
  if (driver_ != nullptr) driver_->primary_ctx_release(device_);
}

PrimaryContext::Current::Current(const PrimaryContext& context) : driver_(context.driver_) {
  WEIGHTD_CHECK(driver_ != nullptr);
  status_ = status_from_driver(*driver_, driver_->ctx_push_current(context.context_), "cuCtxPushCurrent");
}

PrimaryContext::Current::~Current() {
  CUcontext popped = nullptr;
  if (status_.ok()) driver_->ctx_pop_current(&popped);
}

}  // namespace weightd::ipc
