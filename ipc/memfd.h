// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/fd.h"
#include "weightd/status.h"

/// Host regions: an arena cut into chunks, each a memfd, sealed against every change before it is shared.
namespace weightd::ipc {

/// Cuts arena_bytes into chunk sizes: all of max_chunk_bytes (a multiple of `granularity`) but the last, which is rounded up to it.
[[nodiscard]] std::vector<uint64_t> cut_chunks(uint64_t arena_bytes, uint64_t max_chunk_bytes, uint64_t granularity);

/// An arena being filled: chunks mapped side by side, writable, zeroed. seal() ends writing for everybody, for ever.
class WritableArena {
 public:
  /// Reserves all memory first: kResourceExhausted with needed and available bytes, nothing half-made. `chunk_bytes` are positive
  /// multiples of the page size (kInvalidArgument). `name` shows in /proc and in messages.
  [[nodiscard]] static Result<WritableArena> create(const std::vector<uint64_t>& chunk_bytes, const std::string& name);
  WritableArena(WritableArena&&) noexcept;
  WritableArena& operator=(WritableArena&&) noexcept;
  ~WritableArena();

  [[nodiscard]] std::span<std::byte> bytes();  // all chunks, one range
  /// Unmaps and seals (F_SEAL_WRITE | GROW | SHRINK | SEAL); the descriptors in order, opened for reading only (needs /proc).
  [[nodiscard]] Result<std::vector<UniqueFd>> seal() &&;

 private:
  WritableArena() = default;
  std::vector<UniqueFd> fds_;
  std::byte* base_ = nullptr;
  uint64_t size_ = 0;
};

/// Sealed chunks mapped read-only, side by side, at one base address (page aligned). Checks seals and sizes before mapping
/// (kCorruption: not sealed, or not of the size told), so that no read of the mapping can fault. Closes the descriptors; the mapping keeps
/// the memory. A fork's child inherits the mapping, as with every shared one: its pointers stay valid there, and it holds the memory until
/// it ends or calls exec. Left out of core files. Move-only.
class MappedArena {
 public:
  /// `chunk_bytes` are multiples of the page size. An arena of no chunks is empty and valid.
  [[nodiscard]] static Result<MappedArena> map(std::vector<UniqueFd> fds, const std::vector<uint64_t>& chunk_bytes);
  MappedArena() = default;
  MappedArena(MappedArena&&) noexcept;
  MappedArena& operator=(MappedArena&&) noexcept;
  ~MappedArena();

  [[nodiscard]] const std::byte* base() const { return base_; }
  [[nodiscard]] std::span<const std::byte> bytes() const { return {base_, size_}; }

 private:
  std::byte* base_ = nullptr;
  uint64_t size_ = 0;
};

/// A sealed memfd that holds exactly `bytes`.
[[nodiscard]] Result<UniqueFd> sealed_memfd(std::span<const std::byte> bytes, const std::string& name);
/// Its content, copied out; kCorruption when it is not sealed or its size is not `bytes`; kInvalidArgument over max_bytes.
[[nodiscard]] Result<std::vector<std::byte>> read_sealed_memfd(int fd, uint64_t bytes, uint64_t max_bytes);

}  // namespace weightd::ipc
