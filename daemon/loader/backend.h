// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/fd.h"
#include "store/bundle.h"
#include "weightd/status.h"

namespace weightd::loader {

/// Called from any thread with bytes that were dealt with since the last call.
using Advance = std::function<void(uint64_t bytes)>;

/// Where an arena becomes resident. One object for one arena, filled (allocate, upload, seal) or taken over (import), then hashed.
class Backend {
 public:
  virtual ~Backend() = default;

  [[nodiscard]] virtual uint64_t granularity_bytes() const = 0;  // of a chunk
  /// Reserves all chunks, zeroed. kResourceExhausted: nothing stays allocated.
  virtual Status allocate(const std::vector<uint64_t>& chunk_bytes) = 0;
  /// Memory to read the bytes at `offset_bytes` of the arena into, before upload(). Threads may use disjoint ranges at once.
  [[nodiscard]] virtual std::span<std::byte> staging(uint64_t offset_bytes, uint64_t size_bytes) = 0;
  virtual Status upload(uint64_t offset_bytes, std::span<const std::byte> staged) = 0;
  /// Ends writing for ever; one descriptor per chunk, to be given away.
  [[nodiscard]] virtual Result<std::vector<UniqueFd>> seal() = 0;

  /// Takes over chunks that are sealed already.
  virtual Status import(std::vector<UniqueFd> chunks, const std::vector<uint64_t>& chunk_bytes) = 0;

  /// The hashes of the resident blocks, as they are now. After seal() or import().
  [[nodiscard]] virtual Result<std::vector<uint64_t>> hash_blocks(uint64_t arena_bytes, int threads, const Advance& advance) = 0;
  /// Checks that the resident planes of an f12 storage can be decoded without looking (store::f12_validate).
  struct F12Planes {
    f12::Geometry geometry;
    uint64_t codes_offset = 0, windows_offset = 0, records_offset = 0;
    uint64_t pool_offset = 0, pool_bytes = 0;  // its own part of the pool, in the arena
    uint64_t pool_base = 0;                    // of that part, from the start of the model's pool
  };
  virtual Status check_f12(const F12Planes& planes, int threads, const Advance& advance) = 0;
};

/// Chunks in sealed memfds. `granularity_bytes` is a multiple of the page size.
[[nodiscard]] std::unique_ptr<Backend> make_host_backend(uint64_t granularity_bytes = uint64_t{1} << 20);

}  // namespace weightd::loader
