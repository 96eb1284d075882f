// SPDX-License-Identifier: Apache-2.0
#include "tests/support/fake_cuda.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <utility>

#include "base/fd.h"
#include "base/text.h"

// The driver's opaque types are ours to define here.
struct CUctx_st {
  int device = 0;
};
struct CUstream_st {
  struct Operation {
    std::function<void()> run;
    const void* reads = nullptr;  // host memory
  };
  uint64_t done = 0;  // operations that have happened
  std::deque<Operation> pending;
};
struct CUevent_st {
  CUstream_st* stream = nullptr;
  uint64_t position = 0;  // operations of the stream that it stands behind
};

namespace weightd::testing {
namespace {

constexpr size_t kPageBytes = 4096;
constexpr std::string_view kMemfdPrefix = "/memfd:fake-gpu-";

std::vector<unsigned char> uuid_bytes(int ordinal) {
  std::vector<unsigned char> bytes(16);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<unsigned char>(16 * static_cast<size_t>(ordinal) + i);
  return bytes;
}

/// Physical memory. Gone with its last handle, mapping or descriptor, as on a GPU.
struct Memory {
  UniqueFd fd;
  uint64_t bytes = 0;
  int device = 0;
};

struct Mapping {
  std::shared_ptr<Memory> memory;
  uint64_t bytes = 0;
  CUmemAccess_flags access = CU_MEM_ACCESS_FLAGS_PROT_NONE;
};

struct Range {
  uint64_t bytes = 0;
  void* raw = nullptr;
  uint64_t raw_bytes = 0;
};

struct Legacy {
  UniqueFd fd;
  uint64_t bytes = 0;
  int device = 0;
  bool opened = false;
};

struct IpcHandle {
  char magic[8];
  int32_t pid, fd;
  uint64_t bytes;
};
static_assert(sizeof(IpcHandle) <= sizeof(CUipcMemHandle));

struct Failure {
  std::string entry;  // or any
  int in = 0, count = 0;
  CUresult result = CUDA_SUCCESS;
};

thread_local std::vector<CUcontext> current_contexts;

}  // namespace

struct FakeCuda::State {
  mutable std::mutex mutex;
  ipc::CudaDriver driver;
  std::vector<FakeGpu> gpus;
  std::vector<CUctx_st> contexts;
  std::vector<int> retained;
  std::vector<uint64_t> occupied;
  std::map<CUmemGenericAllocationHandle, std::shared_ptr<Memory>> handles;
  std::vector<std::weak_ptr<Memory>> memories;
  std::map<CUdeviceptr, Mapping> mappings;
  std::map<CUdeviceptr, Range> ranges;
  std::map<CUdeviceptr, Legacy> legacy;
  std::map<void*, size_t> host_blocks;
  std::vector<std::unique_ptr<CUstream_st>> streams;
  std::vector<std::unique_ptr<CUevent_st>> events;
  CUmemGenericAllocationHandle next_handle = 1;
  std::atomic<int> pushed = 0;
  std::vector<std::string> calls, misuse;
  Failure failure;
  bool failed = false;
  std::function<void(const std::string&)> hook;

  uint64_t used_bytes(int device) const {
    uint64_t used = occupied[static_cast<size_t>(device)];
    for (const auto& weak : memories) {
      const auto memory = weak.lock();
      if (memory != nullptr && memory->device == device) used += memory->bytes;
    }
    for (const auto& [base, block] : legacy) used += block.device == device && !block.opened ? block.bytes : 0;
    return used;
  }
  bool has_room(int device, uint64_t bytes) const {
    const uint64_t total = gpus[static_cast<size_t>(device)].total_bytes, used = used_bytes(device);
    return used <= total && bytes <= total - used;
  }
  bool is_gpu(int device) const { return device >= 0 && static_cast<size_t>(device) < gpus.size(); }

  CUresult complain(std::string line, CUresult result = CUDA_ERROR_INVALID_VALUE) {
    misuse.push_back(std::move(line));
    return result;
  }

  /// Whether device code could use these bytes.
  bool reachable(CUdeviceptr address, uint64_t bytes, bool write) const {
    const auto block = legacy.upper_bound(address);
    if (block != legacy.begin()) {
      const auto& [base, found] = *std::prev(block);
      if (address + bytes <= base + found.bytes) return true;
    }
    while (bytes > 0) {
      auto next = mappings.upper_bound(address);
      if (next == mappings.begin()) return false;
      const auto& [base, mapping] = *std::prev(next);
      if (address >= base + mapping.bytes) return false;
      if (mapping.access != CU_MEM_ACCESS_FLAGS_PROT_READWRITE && (write || mapping.access != CU_MEM_ACCESS_FLAGS_PROT_READ))
        return false;
      const uint64_t here = std::min<uint64_t>(bytes, base + mapping.bytes - address);
      address += here;
      bytes -= here;
    }
    return true;
  }

  static void run_until(CUstream_st& stream, uint64_t position) {
    while (stream.done < position && !stream.pending.empty()) {
      stream.pending.front().run();
      stream.pending.pop_front();
      ++stream.done;
    }
  }
  static void run_all(CUstream_st& stream) { run_until(stream, stream.done + stream.pending.size()); }

  CUresult enqueue(CUstream_st* stream, std::function<void()> run, const void* reads = nullptr) {
    if (current_contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
    if (stream == nullptr) {
      run();
      return CUDA_SUCCESS;
    }
    if (std::none_of(streams.begin(), streams.end(), [&](const auto& known) { return known.get() == stream; })) {
      return complain("work on a stream that does not exist", CUDA_ERROR_INVALID_HANDLE);
    }
    stream->pending.push_back({std::move(run), reads});
    return CUDA_SUCCESS;
  }

  CUresult check_failure(const std::string& entry, bool gives_back) {
    if (failure.count == 0) return CUDA_SUCCESS;
    if (failure.entry.empty() ? gives_back : failure.entry != entry) return CUDA_SUCCESS;
    if (--failure.in > 0) return CUDA_SUCCESS;
    --failure.count;
    failed = true;
    return failure.result;
  }
};

namespace {

FakeCuda::State* instance = nullptr;

/// One call of an entry point: logged, and failed if a test asked for it. Holds the lock.
class Call {
 public:
  explicit Call(const char* entry, bool gives_back = false) : state_(*instance) {
    std::function<void(const std::string&)> hook;
    {
      const std::lock_guard<std::mutex> lock(state_.mutex);
      hook = state_.hook;
    }
    if (hook) hook(entry);
    lock_ = std::unique_lock<std::mutex>(state_.mutex);
    state_.calls.emplace_back(entry);
    result_ = state_.check_failure(entry, gives_back);
  }
  bool fails() const { return result_ != CUDA_SUCCESS; }
  CUresult result() const { return result_; }
  FakeCuda::State& operator*() const { return state_; }
  FakeCuda::State* operator->() const { return &state_; }

 private:
  FakeCuda::State& state_;
  std::unique_lock<std::mutex> lock_;
  CUresult result_ = CUDA_SUCCESS;
};

constexpr bool kGivesBack = true;

struct ErrorText {
  CUresult result;
  const char* name;
  const char* text;
};
constexpr ErrorText kErrors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
};

CUresult error_name(CUresult result, const char** out) {
  const auto* found = std::find_if(std::begin(kErrors), std::end(kErrors), [&](const ErrorText& e) { return e.result == result; });
  if (found == std::end(kErrors)) return CUDA_ERROR_INVALID_VALUE;
  *out = found->name;
  return CUDA_SUCCESS;
}

CUresult error_string(CUresult result, const char** out) {
  const auto* found = std::find_if(std::begin(kErrors), std::end(kErrors), [&](const ErrorText& e) { return e.result == result; });
  if (found == std::end(kErrors)) return CUDA_ERROR_INVALID_VALUE;
  *out = found->text;
  return CUDA_SUCCESS;
}

CUresult init(unsigned flags) {
  const Call call("cuInit");
  if (call.fails()) return call.result();
  return flags == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult driver_get_version(int* version) {
  const Call call("cuDriverGetVersion");
  if (call.fails()) return call.result();
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult device_get_count(int* count) {
  const Call call("cuDeviceGetCount");
  if (call.fails()) return call.result();
  *count = static_cast<int>(call->gpus.size());
  return CUDA_SUCCESS;
}

CUresult device_get(CUdevice* device, int ordinal) {
  const Call call("cuDeviceGet");
  if (call.fails()) return call.result();
  if (!call->is_gpu(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult device_get_name(char* name, int size, CUdevice device) {
  const Call call("cuDeviceGetName");
  if (call.fails()) return call.result();
  if (!call->is_gpu(device)) return CUDA_ERROR_INVALID_DEVICE;
  const std::string& full = call->gpus[static_cast<size_t>(device)].name;
  const size_t length = std::min(full.size(), static_cast<size_t>(size) - 1);
  std::memcpy(name, full.data(), length);
  name[length] = '\0';
  return CUDA_SUCCESS;
}

CUresult device_get_uuid(CUuuid* uuid, CUdevice device) {
  const Call call("cuDeviceGetUuid");
  if (call.fails()) return call.result();
  if (!call->is_gpu(device)) return CUDA_ERROR_INVALID_DEVICE;
  std::memcpy(uuid->bytes, uuid_bytes(device).data(), sizeof(uuid->bytes));
  return CUDA_SUCCESS;
}

CUresult device_total_mem(size_t* bytes, CUdevice device) {
  const Call call("cuDeviceTotalMem");
  if (call.fails()) return call.result();
  if (!call->is_gpu(device)) return CUDA_ERROR_INVALID_DEVICE;
  *bytes = call->gpus[static_cast<size_t>(device)].total_bytes;
  return CUDA_SUCCESS;
}

CUresult device_get_attribute(int* value, CUdevice_attribute which, CUdevice device) {
  const Call call("cuDeviceGetAttribute");
  if (call.fails()) return call.result();
  if (!call->is_gpu(device)) return CUDA_ERROR_INVALID_DEVICE;
  const FakeGpu& gpu = call->gpus[static_cast<size_t>(device)];
  switch (which) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      *value = gpu.compute_major;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      *value = gpu.compute_minor;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
      *value = gpu.vmm;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
      *value = gpu.fd_handles;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult primary_ctx_retain(CUcontext* context, CUdevice device) {
  const Call call("cuDevicePrimaryCtxRetain");
  if (call.fails()) return call.result();
  if (!call->is_gpu(device)) return CUDA_ERROR_INVALID_DEVICE;
  ++call->retained[static_cast<size_t>(device)];
  *context = &call->contexts[static_cast<size_t>(device)];
  return CUDA_SUCCESS;
}

CUresult primary_ctx_release(CUdevice device) {
  const Call call("cuDevicePrimaryCtxRelease", kGivesBack);
  if (call.fails()) return call.result();
  if (!call->is_gpu(device) || call->retained[static_cast<size_t>(device)] == 0)
    return call->complain("release of a context not retained");
  --call->retained[static_cast<size_t>(device)];
  return CUDA_SUCCESS;
}

CUresult ctx_push_current(CUcontext context) {
  const Call call("cuCtxPushCurrent");
  if (call.fails()) return call.result();
  if (context == nullptr || call->retained[static_cast<size_t>(context->device)] == 0) return CUDA_ERROR_INVALID_CONTEXT;
  current_contexts.push_back(context);
  ++call->pushed;
  return CUDA_SUCCESS;
}

CUresult ctx_pop_current(CUcontext* context) {
  const Call call("cuCtxPopCurrent", kGivesBack);
  if (call.fails()) return call.result();
  if (current_contexts.empty()) return call->complain("pop without a push", CUDA_ERROR_INVALID_CONTEXT);
  *context = current_contexts.back();
  current_contexts.pop_back();
  --call->pushed;
  return CUDA_SUCCESS;
}

CUresult ctx_synchronize() {
  const Call call("cuCtxSynchronize");
  if (call.fails()) return call.result();
  if (current_contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  for (const auto& stream : call->streams) FakeCuda::State::run_all(*stream);
  return CUDA_SUCCESS;
}

CUresult mem_get_info(size_t* free_bytes, size_t* total_bytes) {
  const Call call("cuMemGetInfo");
  if (call.fails()) return call.result();
  if (current_contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  const int device = current_contexts.back()->device;
  *total_bytes = call->gpus[static_cast<size_t>(device)].total_bytes;
  const uint64_t used = call->used_bytes(device);
  *free_bytes = used < *total_bytes ? *total_bytes - used : 0;
  return CUDA_SUCCESS;
}

CUresult mem_get_allocation_granularity(size_t* bytes, const CUmemAllocationProp* properties, CUmemAllocationGranularity_flags) {
  const Call call("cuMemGetAllocationGranularity");
  if (call.fails()) return call.result();
  if (!call->is_gpu(properties->location.id)) return CUDA_ERROR_INVALID_DEVICE;
  *bytes = FakeCuda::kGranularityBytes;
  return CUDA_SUCCESS;
}

/// Not zeroed at its edges: as with real memory, nobody may count on what it holds.
void poison_edges(int fd, uint64_t bytes) {
  const std::vector<unsigned char> junk(kPageBytes, 0xA5);
  for (const uint64_t offset : {uint64_t{0}, bytes - kPageBytes}) {
    if (::pwrite(fd, junk.data(), junk.size(), static_cast<off_t>(offset)) != static_cast<ssize_t>(junk.size())) std::abort();
  }
}

UniqueFd make_memory(int device, uint64_t bytes) {
  const std::string name = "fake-gpu-" + hex(uuid_bytes(device).data(), 16);
  UniqueFd fd(::memfd_create(name.c_str(), MFD_CLOEXEC));
  if (!fd.valid() || ::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) return {};
  poison_edges(fd.get(), bytes);
  return fd;
}

CUresult mem_create(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* properties,
                    unsigned long long flags) {  // NOLINT: the driver's type
  const Call call("cuMemCreate");
  if (call.fails()) return call.result();
  if (!call->is_gpu(properties->location.id)) return CUDA_ERROR_INVALID_DEVICE;
  if (bytes == 0 || bytes % FakeCuda::kGranularityBytes != 0 || flags != 0 || properties->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
      properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
      properties->requestedHandleTypes != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (!call->has_room(properties->location.id, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  auto memory = std::make_shared<Memory>();
  memory->bytes = bytes;
  memory->device = properties->location.id;
  memory->fd = make_memory(memory->device, bytes);
  if (!memory->fd.valid()) return CUDA_ERROR_OUT_OF_MEMORY;
  call->memories.push_back(memory);
  *handle = call->next_handle++;
  call->handles[*handle] = std::move(memory);
  return CUDA_SUCCESS;
}

CUresult mem_release(CUmemGenericAllocationHandle handle) {
  const Call call("cuMemRelease", kGivesBack);
  if (call.fails()) return call.result();
  return call->handles.erase(handle) == 1 ? CUDA_SUCCESS : call->complain("cuMemRelease of no handle");
}

CUresult mem_export(void* shared, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                    unsigned long long flags) {  // NOLINT: the driver's type
  const Call call("cuMemExportToShareableHandle");
  if (call.fails()) return call.result();
  const auto found = call->handles.find(handle);
  if (found == call->handles.end() || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags != 0)
    return CUDA_ERROR_INVALID_VALUE;
  const int fd = ::dup(found->second->fd.get());  // inherited by exec, as the driver's are
  if (fd < 0) return CUDA_ERROR_OUT_OF_MEMORY;
  std::memcpy(shared, &fd, sizeof(fd));
  return CUDA_SUCCESS;
}

/// The GPU whose memory the descriptor is; -1: none.
int device_of(int fd, size_t gpu_count) {
  char target[256] = {};
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  if (::readlink(link.c_str(), target, sizeof(target) - 1) < 0) return -1;
  const std::string_view text(target);
  for (size_t i = 0; i < gpu_count; ++i) {
    const std::string name = std::string(kMemfdPrefix) + hex(uuid_bytes(static_cast<int>(i)).data(), 16);
    if (text.substr(0, name.size()) == name) return static_cast<int>(i);
  }
  return -1;
}

bool is_fake_memory(int fd) {
  char target[256] = {};
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  return ::readlink(link.c_str(), target, sizeof(target) - 1) > 0 &&
         std::string_view(target).substr(0, kMemfdPrefix.size()) == kMemfdPrefix;
}

std::shared_ptr<Memory> known_memory(FakeCuda::State& state, const struct stat& info) {
  for (const auto& weak : state.memories) {
    auto memory = weak.lock();
    struct stat other {};
    if (memory != nullptr && ::fstat(memory->fd.get(), &other) == 0 && other.st_ino == info.st_ino) return memory;
  }
  return nullptr;
}

CUresult mem_import(CUmemGenericAllocationHandle* handle, void* shared, CUmemAllocationHandleType type) {
  const Call call("cuMemImportFromShareableHandle");
  if (call.fails()) return call.result();
  const int fd = static_cast<int>(reinterpret_cast<intptr_t>(shared));
  struct stat info {};
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || ::fstat(fd, &info) != 0 || !is_fake_memory(fd))
    return CUDA_ERROR_INVALID_VALUE;
  const int device = device_of(fd, call->gpus.size());
  if (device < 0) return CUDA_ERROR_INVALID_DEVICE;
  auto memory = known_memory(*call, info);
  if (memory == nullptr) {
    memory = std::make_shared<Memory>();
    memory->fd = UniqueFd(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
    memory->bytes = static_cast<uint64_t>(info.st_size);
    memory->device = device;
    call->memories.push_back(memory);
  }
  *handle = call->next_handle++;
  call->handles[*handle] = std::move(memory);
  return CUDA_SUCCESS;
}

CUresult mem_get_properties(CUmemAllocationProp* properties, CUmemGenericAllocationHandle handle) {
  const Call call("cuMemGetAllocationPropertiesFromHandle");
  if (call.fails()) return call.result();
  const auto found = call->handles.find(handle);
  if (found == call->handles.end()) return CUDA_ERROR_INVALID_VALUE;
  *properties = CUmemAllocationProp{};
  properties->type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties->location.id = found->second->device;
  return CUDA_SUCCESS;
}

CUresult mem_address_reserve(CUdeviceptr* base, size_t bytes, size_t alignment, CUdeviceptr,
                             unsigned long long flags) {  // NOLINT: the driver's type
  const Call call("cuMemAddressReserve");
  if (call.fails()) return call.result();
  if (bytes == 0 || bytes % FakeCuda::kGranularityBytes != 0 || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  const uint64_t step = std::max<uint64_t>(alignment, FakeCuda::kGranularityBytes);
  Range range{bytes, nullptr, bytes + step};
  range.raw = ::mmap(nullptr, range.raw_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range.raw == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *base = (reinterpret_cast<CUdeviceptr>(range.raw) + step - 1) / step * step;
  call->ranges[*base] = range;
  return CUDA_SUCCESS;
}

bool any_mapping_in(const FakeCuda::State& state, CUdeviceptr base, uint64_t bytes) {
  const auto after = state.mappings.lower_bound(base + bytes);
  return after != state.mappings.begin() && std::prev(after)->first + std::prev(after)->second.bytes > base;
}

CUresult mem_address_free(CUdeviceptr base, size_t bytes) {
  const Call call("cuMemAddressFree", kGivesBack);
  if (call.fails()) return call.result();
  const auto found = call->ranges.find(base);
  if (found == call->ranges.end() || found->second.bytes != bytes) return call->complain("cuMemAddressFree of no range");
  if (any_mapping_in(*call, base, bytes)) return call->complain("cuMemAddressFree of a mapped range");
  ::munmap(found->second.raw, found->second.raw_bytes);
  call->ranges.erase(found);
  return CUDA_SUCCESS;
}

bool reserved(const FakeCuda::State& state, CUdeviceptr base, uint64_t bytes) {
  const auto after = state.ranges.upper_bound(base);
  return after != state.ranges.begin() && base + bytes <= std::prev(after)->first + std::prev(after)->second.bytes;
}

CUresult mem_map(CUdeviceptr base, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                 unsigned long long flags) {  // NOLINT: the driver's type
  const Call call("cuMemMap");
  if (call.fails()) return call.result();
  const auto found = call->handles.find(handle);
  if (found == call->handles.end() || offset != 0 || flags != 0 || bytes == 0 || bytes % FakeCuda::kGranularityBytes != 0 ||
      bytes > found->second->bytes) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (!reserved(*call, base, bytes)) return call->complain("cuMemMap outside of a reserved range");
  if (any_mapping_in(*call, base, bytes)) return call->complain("cuMemMap over a mapping");
  call->mappings[base] = {found->second, bytes, CU_MEM_ACCESS_FLAGS_PROT_NONE};
  return CUDA_SUCCESS;
}

CUresult mem_unmap(CUdeviceptr base, size_t bytes) {
  const Call call("cuMemUnmap", kGivesBack);
  if (call.fails()) return call.result();
  const CUdeviceptr end = base + bytes;
  for (CUdeviceptr at = base; at < end;) {
    const auto found = call->mappings.find(at);
    if (found == call->mappings.end() || at + found->second.bytes > end) return call->complain("cuMemUnmap of no mapping");
    void* address = reinterpret_cast<void*>(at);
    if (::mmap(address, found->second.bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) ==
        MAP_FAILED) {
      std::abort();
    }
    at += found->second.bytes;
    call->mappings.erase(found);
  }
  return CUDA_SUCCESS;
}

CUresult mem_set_access(CUdeviceptr base, size_t bytes, const CUmemAccessDesc* descriptions, size_t count) {
  const Call call("cuMemSetAccess");
  if (call.fails()) return call.result();
  if (count != 1 || descriptions->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
  for (CUdeviceptr at = base; at < base + bytes;) {
    const auto found = call->mappings.find(at);
    if (found == call->mappings.end() || at + found->second.bytes > base + bytes)
      return call->complain("cuMemSetAccess of no mapping");
    if (found->second.memory->device != descriptions->location.id) return CUDA_ERROR_INVALID_DEVICE;  // no peer access here
    at += found->second.bytes;
  }
  for (CUdeviceptr at = base; at < base + bytes;) {
    Mapping& mapping = call->mappings[at];
    const int protection = descriptions->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? PROT_READ | PROT_WRITE
                           : descriptions->flags == CU_MEM_ACCESS_FLAGS_PROT_READ    ? PROT_READ
                                                                                     : PROT_NONE;
    void* address = reinterpret_cast<void*>(at);
    if (::mmap(address, mapping.bytes, protection, MAP_SHARED | MAP_FIXED, mapping.memory->fd.get(), 0) == MAP_FAILED) std::abort();
    mapping.access = descriptions->flags;
    at += mapping.bytes;
  }
  return CUDA_SUCCESS;
}

CUresult mem_alloc(CUdeviceptr* base, size_t bytes) {
  const Call call("cuMemAlloc");
  if (call.fails()) return call.result();
  if (current_contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  const int device = current_contexts.back()->device;
  const uint64_t whole = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  if (!call->has_room(device, whole)) return CUDA_ERROR_OUT_OF_MEMORY;
  UniqueFd fd = make_memory(device, whole);
  void* mapped = fd.valid() ? ::mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0) : MAP_FAILED;
  if (mapped == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *base = reinterpret_cast<CUdeviceptr>(mapped);
  call->legacy[*base] = {std::move(fd), whole, device, false};
  return CUDA_SUCCESS;
}

CUresult drop_legacy(FakeCuda::State& state, CUdeviceptr base, bool opened, const char* complaint) {
  const auto found = state.legacy.find(base);
  if (found == state.legacy.end() || found->second.opened != opened) return state.complain(complaint);
  ::munmap(reinterpret_cast<void*>(base), found->second.bytes);
  state.legacy.erase(found);
  return CUDA_SUCCESS;
}

CUresult mem_free(CUdeviceptr base) {
  const Call call("cuMemFree", kGivesBack);
  if (call.fails()) return call.result();
  return drop_legacy(*call, base, false, "cuMemFree of no allocation");
}

CUresult mem_get_address_range(CUdeviceptr* base, size_t* bytes, CUdeviceptr address) {
  const Call call("cuMemGetAddressRange");
  if (call.fails()) return call.result();
  const auto after = call->legacy.upper_bound(address);
  if (after == call->legacy.begin() || address >= std::prev(after)->first + std::prev(after)->second.bytes)
    return CUDA_ERROR_NOT_FOUND;
  *base = std::prev(after)->first;
  *bytes = std::prev(after)->second.bytes;
  return CUDA_SUCCESS;
}

CUresult ipc_get_mem_handle(CUipcMemHandle* handle, CUdeviceptr base) {
  const Call call("cuIpcGetMemHandle");
  if (call.fails()) return call.result();
  const auto found = call->legacy.find(base);
  if (found == call->legacy.end() || found->second.opened) return CUDA_ERROR_INVALID_VALUE;
  IpcHandle shared{{'f', 'a', 'k', 'e', 'c', 'u', 'd', 'a'}, ::getpid(), found->second.fd.get(), found->second.bytes};
  *handle = CUipcMemHandle{};
  std::memcpy(handle->reserved, &shared, sizeof(shared));
  return CUDA_SUCCESS;
}

CUresult ipc_open_mem_handle(CUdeviceptr* base, CUipcMemHandle handle, unsigned flags) {
  const Call call("cuIpcOpenMemHandle");
  if (call.fails()) return call.result();
  IpcHandle shared{};
  std::memcpy(&shared, handle.reserved, sizeof(shared));
  if (std::memcmp(shared.magic, "fakecuda", 8) != 0 || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) return CUDA_ERROR_INVALID_VALUE;
  if (current_contexts.empty() || shared.pid == ::getpid()) return CUDA_ERROR_INVALID_CONTEXT;
  UniqueFd fd(::open(("/proc/" + std::to_string(shared.pid) + "/fd/" + std::to_string(shared.fd)).c_str(), O_RDWR | O_CLOEXEC));
  if (!fd.valid()) return CUDA_ERROR_INVALID_HANDLE;
  void* mapped = ::mmap(nullptr, shared.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (mapped == MAP_FAILED) return CUDA_ERROR_MAP_FAILED;
  *base = reinterpret_cast<CUdeviceptr>(mapped);
  call->legacy[*base] = {std::move(fd), shared.bytes, current_contexts.back()->device, true};
  return CUDA_SUCCESS;
}

CUresult ipc_close_mem_handle(CUdeviceptr base) {
  const Call call("cuIpcCloseMemHandle", kGivesBack);
  if (call.fails()) return call.result();
  return drop_legacy(*call, base, true, "cuIpcCloseMemHandle of no open handle");
}

CUresult mem_host_register(void* block, size_t bytes, unsigned) {
  const Call call("cuMemHostRegister");
  if (call.fails()) return call.result();
  if (current_contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (block == nullptr || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  if (!call->host_blocks.emplace(block, bytes).second) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  std::memset(block, 0x5A, bytes);
  return CUDA_SUCCESS;
}

CUresult mem_host_unregister(void* block) {
  const Call call("cuMemHostUnregister", kGivesBack);
  if (call.fails()) return call.result();
  const auto found = call->host_blocks.find(block);
  if (found == call->host_blocks.end()) return call->complain("cuMemHostUnregister of no block");
  const auto* begin = static_cast<const std::byte*>(block);
  for (const auto& stream : call->streams) {
    for (const auto& operation : stream->pending) {
      const auto* reads = static_cast<const std::byte*>(operation.reads);
      if (reads >= begin && reads < begin + found->second) call->complain("cuMemHostUnregister before the copy from it");
    }
  }
  call->host_blocks.erase(found);
  return CUDA_SUCCESS;
}

CUresult memcpy_htod_async(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  const Call call("cuMemcpyHtoDAsync");
  if (call.fails()) return call.result();
  if (!call->reachable(to, bytes, true)) return call->complain("copy to memory that is not writable", CUDA_ERROR_INVALID_VALUE);
  return call->enqueue(
      stream, [=] { std::memcpy(reinterpret_cast<void*>(to), from, bytes); }, from);
}

CUresult memcpy_dtoh(void* to, CUdeviceptr from, size_t bytes) {
  const Call call("cuMemcpyDtoH");
  if (call.fails()) return call.result();
  if (current_contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (!call->reachable(from, bytes, false)) return call->complain("copy from memory that is not mapped");
  std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
  return CUDA_SUCCESS;
}

CUresult memset_d8_async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
  const Call call("cuMemsetD8Async");
  if (call.fails()) return call.result();
  if (!call->reachable(to, bytes, true)) return call->complain("memset of memory that is not writable", CUDA_ERROR_INVALID_VALUE);
  return call->enqueue(stream, [=] { std::memset(reinterpret_cast<void*>(to), value, bytes); });
}

CUresult stream_create(CUstream* stream, unsigned) {
  const Call call("cuStreamCreate");
  if (call.fails()) return call.result();
  if (current_contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  call->streams.push_back(std::make_unique<CUstream_st>());
  *stream = call->streams.back().get();
  return CUDA_SUCCESS;
}

template <typename T>
CUresult destroy(FakeCuda::State& state, std::vector<std::unique_ptr<T>>& all, T* one, const char* complaint) {
  const auto found = std::find_if(all.begin(), all.end(), [&](const auto& owned) { return owned.get() == one; });
  if (found == all.end()) return state.complain(complaint, CUDA_ERROR_INVALID_HANDLE);
  all.erase(found);
  return CUDA_SUCCESS;
}

CUresult stream_destroy(CUstream stream) {
  const Call call("cuStreamDestroy", kGivesBack);
  if (call.fails()) return call.result();
  return destroy(*call, call->streams, stream, "cuStreamDestroy of no stream");
}

CUresult stream_synchronize(CUstream stream) {
  const Call call("cuStreamSynchronize");
  if (call.fails() && stream != nullptr) stream->pending.clear();  // as after a fault: it never happens
  if (call.fails()) return call.result();
  if (stream != nullptr) FakeCuda::State::run_all(*stream);
  return CUDA_SUCCESS;
}

CUresult stream_is_capturing(CUstream, CUstreamCaptureStatus* status) {
  const Call call("cuStreamIsCapturing");
  if (call.fails()) return call.result();
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

CUresult event_create(CUevent* event, unsigned) {
  const Call call("cuEventCreate");
  if (call.fails()) return call.result();
  if (current_contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  call->events.push_back(std::make_unique<CUevent_st>());
  *event = call->events.back().get();
  return CUDA_SUCCESS;
}

CUresult event_destroy(CUevent event) {
  const Call call("cuEventDestroy", kGivesBack);
  if (call.fails()) return call.result();
  return destroy(*call, call->events, event, "cuEventDestroy of no event");
}

CUresult event_record(CUevent event, CUstream stream) {
  const Call call("cuEventRecord");
  if (call.fails()) return call.result();
  event->stream = stream;
  event->position = stream == nullptr ? 0 : stream->done + stream->pending.size();
  return CUDA_SUCCESS;
}

CUresult event_query(CUevent event) {
  const Call call("cuEventQuery");
  if (call.fails()) return call.result();
  return event->stream == nullptr || event->stream->done >= event->position ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult event_synchronize(CUevent event) {
  const Call call("cuEventSynchronize");
  if (call.fails()) return call.result();
  if (event->stream != nullptr) FakeCuda::State::run_until(*event->stream, event->position);
  return CUDA_SUCCESS;
}

ipc::CudaDriver make_table() {
  ipc::CudaDriver table;
  table.init = init;
  table.driver_get_version = driver_get_version;
  table.get_error_name = error_name;
  table.get_error_string = error_string;
  table.device_get_count = device_get_count;
  table.device_get = device_get;
  table.device_get_name = device_get_name;
  table.device_get_uuid = device_get_uuid;
  table.device_total_mem = device_total_mem;
  table.device_get_attribute = device_get_attribute;
  table.primary_ctx_retain = primary_ctx_retain;
  table.primary_ctx_release = primary_ctx_release;
  table.ctx_push_current = ctx_push_current;
  table.ctx_pop_current = ctx_pop_current;
  table.ctx_synchronize = ctx_synchronize;
  table.mem_get_info = mem_get_info;
  table.mem_get_allocation_granularity = mem_get_allocation_granularity;
  table.mem_create = mem_create;
  table.mem_release = mem_release;
  table.mem_export = mem_export;
  table.mem_import = mem_import;
  table.mem_address_reserve = mem_address_reserve;
  table.mem_address_free = mem_address_free;
  table.mem_map = mem_map;
  table.mem_unmap = mem_unmap;
  table.mem_set_access = mem_set_access;
  table.mem_get_properties = mem_get_properties;
  table.mem_alloc = mem_alloc;
  table.mem_free = mem_free;
  table.mem_get_address_range = mem_get_address_range;
  table.ipc_get_mem_handle = ipc_get_mem_handle;
  table.ipc_open_mem_handle = ipc_open_mem_handle;
  table.ipc_close_mem_handle = ipc_close_mem_handle;
  table.mem_host_register = mem_host_register;
  table.mem_host_unregister = mem_host_unregister;
  table.memcpy_htod_async = memcpy_htod_async;
  table.memcpy_dtoh = memcpy_dtoh;
  table.memset_d8_async = memset_d8_async;
  table.stream_create = stream_create;
  table.stream_destroy = stream_destroy;
  table.stream_synchronize = stream_synchronize;
  table.stream_is_capturing = stream_is_capturing;
  table.event_create = event_create;
  table.event_destroy = event_destroy;
  table.event_record = event_record;
  table.event_query = event_query;
  table.event_synchronize = event_synchronize;
  return table;
}

}  // namespace

FakeCuda::FakeCuda(std::vector<FakeGpu> gpus) : state_(std::make_unique<State>()) {
  WEIGHTD_CHECK(instance == nullptr);
  state_->driver = make_table();
  state_->gpus = std::move(gpus);
  for (size_t i = 0; i < state_->gpus.size(); ++i) state_->contexts.push_back({static_cast<int>(i)});
  state_->retained.resize(state_->gpus.size());
  state_->occupied.resize(state_->gpus.size());
  instance = state_.get();
}

FakeCuda::~FakeCuda() { instance = nullptr; }

const ipc::CudaDriver& FakeCuda::driver() const { return state_->driver; }

std::string FakeCuda::uuid(int ordinal) {
  const std::string digits = hex(uuid_bytes(ordinal).data(), 16);
  return "GPU-" + digits.substr(0, 8) + "-" + digits.substr(8, 4) + "-" + digits.substr(12, 4) + "-" + digits.substr(16, 4) + "-" +
         digits.substr(20);
}

FakeCuda::Live FakeCuda::live() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  Live live;
  live.handles = static_cast<int>(state_->handles.size());
  live.ranges = static_cast<int>(state_->ranges.size());
  live.mappings = static_cast<int>(state_->mappings.size());
  for (const auto& [base, block] : state_->legacy) ++(block.opened ? live.opened : live.allocations);
  for (const int count : state_->retained) live.contexts += count;
  live.current = state_->pushed;
  live.host_blocks = static_cast<int>(state_->host_blocks.size());
  for (const auto& block : state_->host_blocks) live.host_bytes += block.second;
  live.streams = static_cast<int>(state_->streams.size());
  live.events = static_cast<int>(state_->events.size());
  for (size_t i = 0; i < state_->gpus.size(); ++i)
    live.device_bytes += state_->used_bytes(static_cast<int>(i)) - state_->occupied[i];
  return live;
}

std::vector<std::string> FakeCuda::calls() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->calls;
}

void FakeCuda::clear_calls() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->calls.clear();
}

std::vector<std::string> FakeCuda::misuse() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->misuse;
}

void FakeCuda::clear_misuse() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->misuse.clear();
}

void FakeCuda::fail_call(int n, CUresult result) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->failure = {"", n, 1, result};
  state_->failed = false;
}

void FakeCuda::fail_entry(const std::string& entry, int n, CUresult result, int count) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->failure = {entry, n, count, result};
  state_->failed = false;
}

bool FakeCuda::failed() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->failed;
}

void FakeCuda::occupy(int ordinal, uint64_t bytes) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->occupied[static_cast<size_t>(ordinal)] = bytes;
}

void FakeCuda::on_call(std::function<void(const std::string& entry)> hook) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->hook = std::move(hook);
}

}  // namespace weightd::testing
