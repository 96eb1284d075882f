// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "store/bundle.h"
#include "weightd/status.h"

namespace weightd::store {

/// Reads out.size() bytes of a section.
using SectionRead = std::function<Status(uint32_t section, uint64_t offset_bytes, std::span<std::byte> out)>;
using ByteSink = std::function<Status(std::span<const std::byte>)>;

/// Bytes of source worked on at a time with so many threads (<= 0: one per core). No byte of any output depends on it.
[[nodiscard]] uint64_t slab_bytes(int threads);

/// Units of one matrix that make a slab: at least one.
[[nodiscard]] uint64_t slab_units(const f12::Geometry& geometry, int threads);

/// Streams the original bytes of one storage, wherever its sections are read from. Memory: one slab and its decoded rows, and
/// windows, records and pool of the storage. Borrows the storage.
class StorageDecoder {
 public:
  StorageDecoder(const Storage& storage, uint64_t pool_base, uint64_t pool_bytes, SectionRead read, int threads);

  /// f12: reads windows, records and pool; raw: nothing. Must come first.
  Status load();
  /// All bytes, in order. Reads the codes (or raw) section once, front to back.
  Status stream_all(const ByteSink& sink);
  /// Bytes of rows [row_begin, row_end) of a storage with batch 1; bounds are multiples of 16, or the end.
  Status stream_rows(uint64_t row_begin, uint64_t row_end, const ByteSink& sink);

  [[nodiscard]] std::span<const std::byte> windows() const { return windows_; }
  [[nodiscard]] std::span<const std::byte> records() const { return records_; }
  [[nodiscard]] std::span<const std::byte> pool() const { return pool_; }

 private:
  Status stream_raw(const ByteSink& sink);
  Status stream_matrix(uint64_t matrix, uint64_t row_begin, uint64_t row_end, const ByteSink& sink);

  const Storage& storage_;
  const uint64_t pool_base_, pool_bytes_;
  const SectionRead read_;
  const int threads_;
  std::vector<std::byte> windows_, records_, pool_, slab_, words_;
};

}  // namespace weightd::store
