// SPDX-License-Identifier: Apache-2.0
#include "ipc/vmm.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

namespace weightd::ipc {
namespace {

constexpr uint64_t kLegacyBlockBytes = uint64_t{2} << 20;

CUmemAllocationProp chunk_properties(CUdevice device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  return properties;
}

/// Sum of sizes that are positive multiples of the granularity.
Result<uint64_t> check_sizes(const std::vector<uint64_t>& chunk_bytes, uint64_t granularity) {
  uint64_t total = 0;
  for (size_t i = 0; i < chunk_bytes.size(); ++i) {
    const uint64_t bytes = chunk_bytes[i];
    if (bytes == 0 || bytes % granularity != 0 || bytes > std::numeric_limits<uint64_t>::max() - total) {
      return Status::invalid_argument("chunk " + std::to_string(i) + " of " + std::to_string(chunk_bytes.size()) + ": " +
                                      std::to_string(bytes) + " bytes are no positive multiple of " + std::to_string(granularity));
    }
    total += bytes;
  }
  return total;
}

/// What the driver says of a descriptor that is no memory of its, or of less than was told.
bool is_refusal(CUresult result) {
  return result == CUDA_ERROR_INVALID_VALUE || result == CUDA_ERROR_INVALID_HANDLE || result == CUDA_ERROR_INVALID_DEVICE ||
         result == CUDA_ERROR_UNKNOWN;
}

std::string chunk_name(size_t index, size_t count) { return "chunk " + std::to_string(index) + " of " + std::to_string(count); }

/// The driver has no error of its own for a full descriptor table (it says "out of memory").
Status descriptor_limit() {
  const UniqueFd probe(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  return probe.valid() ? Status() : status_from_errno(errno, "exporting a chunk's descriptor");
}

Status check_place(const CudaDriver& driver, CUmemGenericAllocationHandle handle, CUdevice device, const std::string& chunk) {
  CUmemAllocationProp properties{};
  const CUresult result = driver.mem_get_properties(&properties, handle);
  WEIGHTD_RETURN_IF_ERROR(status_from_driver(driver, result, "cuMemGetAllocationPropertiesFromHandle").with_context(chunk));
  if (properties.location.type == CU_MEM_LOCATION_TYPE_DEVICE && properties.location.id == device) return {};
  return Status::corruption(chunk + ": lies on another GPU than the one it was lent for");
}

}  // namespace

Result<uint64_t> chunk_granularity(const CudaDriver& driver, CUdevice device) {
  const CUmemAllocationProp properties = chunk_properties(device);
  size_t granularity = 0;
  WEIGHTD_RETURN_IF_ERROR(
      status_from_driver(driver, driver.mem_get_allocation_granularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
                         "cuMemGetAllocationGranularity"));
  if (granularity == 0) return Status::cuda("cuMemGetAllocationGranularity: the driver says 0 bytes");
  return uint64_t{granularity};
}

Result<VmmArena> VmmArena::create(const CudaDriver& driver, CUdevice device, const std::vector<uint64_t>& chunk_bytes) {
  WEIGHTD_ASSIGN_OR_RETURN(const uint64_t granularity, chunk_granularity(driver, device));
  VmmArena arena;
  WEIGHTD_ASSIGN_OR_RETURN(arena.size_bytes_, check_sizes(chunk_bytes, granularity));
  arena.driver_ = &driver;
  arena.device_ = device;
  arena.chunks_.reserve(chunk_bytes.size());
  const CUmemAllocationProp properties = chunk_properties(device);
  for (const uint64_t bytes : chunk_bytes) {
    Chunk chunk{0, bytes, false};
    const Status status = status_from_driver(driver, driver.mem_create(&chunk.handle, bytes, &properties, 0), "cuMemCreate");
    if (!status.ok()) return status.with_context(chunk_name(arena.chunks_.size(), chunk_bytes.size()));
    arena.chunks_.push_back(chunk);
  }
  WEIGHTD_RETURN_IF_ERROR(arena.reserve_and_map(granularity, false));
  WEIGHTD_RETURN_IF_ERROR(arena.set_access(CU_MEM_ACCESS_FLAGS_PROT_READWRITE));
  return arena;
}

Result<VmmArena> VmmArena::import(const CudaDriver& driver, CUdevice device, std::vector<UniqueFd> chunks,
                                  const std::vector<uint64_t>& chunk_bytes) {
  if (chunks.size() != chunk_bytes.size()) {
    return Status::invalid_argument(std::to_string(chunks.size()) + " descriptors for " + std::to_string(chunk_bytes.size()) +
                                    " chunks");
  }
  WEIGHTD_ASSIGN_OR_RETURN(const uint64_t granularity, chunk_granularity(driver, device));
  VmmArena arena;
  WEIGHTD_ASSIGN_OR_RETURN(arena.size_bytes_, check_sizes(chunk_bytes, granularity));
  arena.driver_ = &driver;
  arena.device_ = device;
  arena.chunks_.reserve(chunks.size());
  for (size_t i = 0; i < chunks.size(); ++i) {
    const std::string name = chunk_name(i, chunks.size());
    Chunk chunk{0, chunk_bytes[i], false};
    void* shared = reinterpret_cast<void*>(static_cast<uintptr_t>(chunks[i].get()));  // the driver's way to take a descriptor
    const CUresult result = driver.mem_import(&chunk.handle, shared, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (is_refusal(result)) {
      return Status::corruption(name + ": its descriptor is no memory of a visible GPU: " +
                                status_from_driver(driver, result, "cuMemImportFromShareableHandle").message());
    }
    WEIGHTD_RETURN_IF_ERROR(status_from_driver(driver, result, "cuMemImportFromShareableHandle").with_context(name));
    chunks[i].reset();
    arena.chunks_.push_back(chunk);
    WEIGHTD_RETURN_IF_ERROR(check_place(driver, chunk.handle, device, name));
  }
  WEIGHTD_RETURN_IF_ERROR(arena.reserve_and_map(granularity, true));
  WEIGHTD_RETURN_IF_ERROR(arena.set_access(CU_MEM_ACCESS_FLAGS_PROT_READ));
  return arena;
}

Status VmmArena::reserve_and_map(uint64_t granularity, bool imported) {
  if (chunks_.empty()) return {};
  const CUresult reserved = driver_->mem_address_reserve(&base_, size_bytes_, granularity, 0, 0);
  if (reserved != CUDA_SUCCESS) base_ = 0;
  WEIGHTD_RETURN_IF_ERROR(status_from_driver(*driver_, reserved, "cuMemAddressReserve"));
  uint64_t offset = 0;
  for (size_t i = 0; i < chunks_.size(); ++i) {
    const CUresult result = driver_->mem_map(base_ + offset, chunks_[i].bytes, 0, chunks_[i].handle, 0);
    if (imported && is_refusal(result)) {
      return Status::corruption(chunk_name(i, chunks_.size()) + ": cannot be mapped with " + std::to_string(chunks_[i].bytes) +
                                " bytes, its memory is smaller: " + status_from_driver(*driver_, result, "cuMemMap").message());
    }
    WEIGHTD_RETURN_IF_ERROR(status_from_driver(*driver_, result, "cuMemMap").with_context(chunk_name(i, chunks_.size())));
    chunks_[i].mapped = true;
    offset += chunks_[i].bytes;
  }
  return {};
}

Status VmmArena::set_access(CUmemAccess_flags access) {
  if (chunks_.empty()) return {};
  CUmemAccessDesc description{};
  description.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  description.location.id = device_;
  description.flags = access;
  return status_from_driver(*driver_, driver_->mem_set_access(base_, size_bytes_, &description, 1), "cuMemSetAccess");
}

void VmmArena::give_back() {
  if (driver_ == nullptr) return;
  uint64_t offset = 0;
  for (const Chunk& chunk : chunks_) {
    if (chunk.mapped) driver_->mem_unmap(base_ + offset, chunk.bytes);
    offset += chunk.bytes;
  }
  if (base_ != 0) driver_->mem_address_free(base_, size_bytes_);
  for (const Chunk& chunk : chunks_) driver_->mem_release(chunk.handle);
  driver_ = nullptr;
  base_ = 0;
  size_bytes_ = 0;
  chunks_.clear();
}

VmmArena::VmmArena(VmmArena&& other) noexcept
    : driver_(std::exchange(other.driver_, nullptr)),
      device_(other.device_),
      base_(std::exchange(other.base_, 0)),
      size_bytes_(std::exchange(other.size_bytes_, 0)),
      chunks_(std::exchange(other.chunks_, {})) {}

VmmArena& VmmArena::operator=(VmmArena&& other) noexcept {
  if (this == &other) return *this;
  give_back();
  driver_ = std::exchange(other.driver_, nullptr);
  device_ = other.device_;
  base_ = std::exchange(other.base_, 0);
  size_bytes_ = std::exchange(other.size_bytes_, 0);
  chunks_ = std::exchange(other.chunks_, {});
  return *this;
}

VmmArena::~VmmArena() { give_back(); }

Result<std::vector<UniqueFd>> VmmArena::export_chunks() const {
  std::vector<UniqueFd> fds;
  fds.reserve(chunks_.size());
  for (const Chunk& chunk : chunks_) {
    int fd = -1;
    const CUresult result = driver_->mem_export(&fd, chunk.handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    if (result != CUDA_SUCCESS) {
      WEIGHTD_RETURN_IF_ERROR(descriptor_limit());
      return status_from_driver(*driver_, result, "cuMemExportToShareableHandle")
          .with_context(chunk_name(fds.size(), chunks_.size()));
    }
    fds.emplace_back(fd);
    if (::fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) return status_from_errno(errno, "exporting a chunk's descriptor");
  }
  return fds;
}

Status VmmArena::make_read_only() { return set_access(CU_MEM_ACCESS_FLAGS_PROT_READ); }

Result<LegacyArena> LegacyArena::create(const CudaDriver& driver, uint64_t size_bytes) {
  if (size_bytes == 0 || size_bytes % kLegacyBlockBytes != 0) {
    return Status::invalid_argument("a legacy allocation of " + std::to_string(size_bytes) + " bytes is no positive multiple of " +
                                    std::to_string(kLegacyBlockBytes));
  }
  LegacyArena arena;
  WEIGHTD_RETURN_IF_ERROR(status_from_driver(driver, driver.mem_alloc(&arena.base_, size_bytes), "cuMemAlloc"));
  arena.driver_ = &driver;
  arena.size_bytes_ = size_bytes;
  return arena;
}

Result<LegacyArena> LegacyArena::open(const CudaDriver& driver, std::span<const std::byte> handle, uint64_t size_bytes) {
  CUipcMemHandle shared{};
  if (handle.size() != sizeof(shared)) {
    return Status::invalid_argument("a handle of " + std::to_string(handle.size()) + " bytes: a CUDA IPC handle has " +
                                    std::to_string(sizeof(shared)));
  }
  std::memcpy(&shared, handle.data(), sizeof(shared));
  LegacyArena arena;
  const CUresult result = driver.ipc_open_mem_handle(&arena.base_, shared, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
  const Status status = status_from_driver(driver, result, "cuIpcOpenMemHandle");
  if (result == CUDA_ERROR_INVALID_CONTEXT) {
    return Status::invalid_argument("the process that made a CUDA IPC handle cannot open it: " + status.message());
  }
  if (is_refusal(result) || result == CUDA_ERROR_MAP_FAILED) {
    return Status::lost("the process that owned this memory is gone: " + status.message());
  }
  WEIGHTD_RETURN_IF_ERROR(status);
  arena.driver_ = &driver;
  arena.size_bytes_ = size_bytes;
  arena.opened_ = true;
  CUdeviceptr base = 0;
  size_t bytes = 0;
  WEIGHTD_RETURN_IF_ERROR(
      status_from_driver(driver, driver.mem_get_address_range(&base, &bytes, arena.base_), "cuMemGetAddressRange"));
  if (base != arena.base_ || bytes < size_bytes) {
    return Status::corruption("the memory behind a CUDA IPC handle has " + std::to_string(bytes) + " bytes, " +
                              std::to_string(size_bytes) + " were told");
  }
  return arena;
}

LegacyArena::LegacyArena(LegacyArena&& other) noexcept
    : driver_(std::exchange(other.driver_, nullptr)),
      base_(std::exchange(other.base_, 0)),
      size_bytes_(std::exchange(other.size_bytes_, 0)),
      opened_(other.opened_) {}

LegacyArena& LegacyArena::operator=(LegacyArena&& other) noexcept {
  if (this == &other) return *this;
  give_back();
  driver_ = std::exchange(other.driver_, nullptr);
  base_ = std::exchange(other.base_, 0);
  size_bytes_ = std::exchange(other.size_bytes_, 0);
  opened_ = other.opened_;
  return *this;
}

void LegacyArena::give_back() {
  if (driver_ == nullptr) return;
  opened_ ? driver_->ipc_close_mem_handle(base_) : driver_->mem_free(base_);
}

LegacyArena::~LegacyArena() { give_back(); }

Result<std::vector<std::byte>> LegacyArena::handle() const {
  WEIGHTD_CHECK(driver_ != nullptr);
  CUipcMemHandle shared{};
  WEIGHTD_RETURN_IF_ERROR(status_from_driver(*driver_, driver_->ipc_get_mem_handle(&shared, base_), "cuIpcGetMemHandle"));
  std::vector<std::byte> bytes(sizeof(shared));
  std::memcpy(bytes.data(), &shared, sizeof(shared));
  return bytes;
}

}  // namespace weightd::ipc
