// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/fd.h"
#include "ipc/cuda_driver.h"
#include "weightd/status.h"

/// GPU memory that processes share: the `fd` transport (chunks of CUDA virtual memory, exported as POSIX descriptors) and the
/// `legacy` one (one allocation and a cudaIpcMemHandle_t). The counterpart of memfd.h.
namespace weightd::ipc {

/// The size that chunks must be multiples of on this device (2 MiB in practice).
[[nodiscard]] Result<uint64_t> chunk_granularity(const CudaDriver& driver, CUdevice device);

/// Chunks of one arena, mapped side by side at one base address of the device's address space. Owns the mapping, the address range
/// and its handles, and gives them back in this order: unmap, free the range, release the handles. Moving keeps the base.
/// Destruction waits for nothing: nobody may be reading any more (an unmap under a running kernel kills the context).
///
/// No call needs a current context, and none makes one. On failure nothing stays allocated, mapped or reserved.
class VmmArena {
 public:
  /// New chunks, mapped read-write, content undefined. Sizes are positive multiples of the granularity (kInvalidArgument). An arena
  /// of no chunks is empty and valid. kResourceExhausted: the device has no room (retrying is the caller's business).
  [[nodiscard]] static Result<VmmArena> create(const CudaDriver& driver, CUdevice device, const std::vector<uint64_t>& chunk_bytes);
  /// Chunks that another process exported, mapped with read access only. The descriptors are closed once imported, also on failure.
  /// kCorruption: a descriptor that is no chunk, a chunk smaller than told, or one that lies on another GPU.
  [[nodiscard]] static Result<VmmArena> import(const CudaDriver& driver, CUdevice device, std::vector<UniqueFd> chunks,
                                               const std::vector<uint64_t>& chunk_bytes);

  VmmArena() = default;
  VmmArena(VmmArena&& other) noexcept;
  VmmArena& operator=(VmmArena&& other) noexcept;
  ~VmmArena();

  [[nodiscard]] CUdeviceptr base() const { return base_; }
  [[nodiscard]] uint64_t size_bytes() const { return size_bytes_; }

  /// One descriptor per chunk, close-on-exec, for another process; each keeps its chunk's memory alive. kResourceExhausted: no room
  /// for so many descriptors.
  [[nodiscard]] Result<std::vector<UniqueFd>> export_chunks() const;
  /// From now on this mapping only reads, too.
  Status make_read_only();

 private:
  struct Chunk {
    CUmemGenericAllocationHandle handle = 0;
    uint64_t bytes = 0;
    bool mapped = false;
  };
  Status reserve_and_map(uint64_t granularity, bool imported);
  Status set_access(CUmemAccess_flags access);
  void give_back();

  const CudaDriver* driver_ = nullptr;
  CUdevice device_ = 0;
  CUdeviceptr base_ = 0;
  uint64_t size_bytes_ = 0;
  std::vector<Chunk> chunks_;
};

/// The legacy transport: one allocation of the whole arena. It dies with the process that made it, whoever has it open.
class LegacyArena {
 public:
  /// In the current context (a legacy allocation belongs to one). The base is a multiple of 512 bytes, the content undefined.
  /// kInvalidArgument: `size_bytes` is no positive multiple of 2 MiB (a smaller one shares its block, and so its handle, with
  /// others).
  [[nodiscard]] static Result<LegacyArena> create(const CudaDriver& driver, uint64_t size_bytes);
  /// Another process's allocation, opened in the current context: mapped read-write, at an address that the driver chooses.
  /// kLost: its owner is gone. kInvalidArgument: the handle is of this process, or no handle. kCorruption: smaller than told.
  [[nodiscard]] static Result<LegacyArena> open(const CudaDriver& driver, std::span<const std::byte> handle, uint64_t size_bytes);

  LegacyArena() = default;
  LegacyArena(LegacyArena&& other) noexcept;
  LegacyArena& operator=(LegacyArena&& other) noexcept;
  ~LegacyArena();  // in the context of create() or open()

  [[nodiscard]] CUdeviceptr base() const { return base_; }
  [[nodiscard]] uint64_t size_bytes() const { return size_bytes_; }
  /// The 64 bytes that open() takes in another process.
  [[nodiscard]] Result<std::vector<std::byte>> handle() const;

 private:
  void give_back();

  const CudaDriver* driver_ = nullptr;
  CUdeviceptr base_ = 0;
  uint64_t size_bytes_ = 0;
  bool opened_ = false;
};

}  // namespace weightd::ipc
