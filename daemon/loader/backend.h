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

inline constexpr uint64_t kPieceBytes = uint64_t{1} << 20;  // most bytes of a piece: a core's own cache holds it until it is hashed

/// A range of the arena on its way there, and the memory that its bytes are read into.
struct Piece {
  uint64_t offset_bytes = 0;
  std::span<std::byte> bytes;
  uint32_t slot = 0;  // the backend's own mark
};

/// What a filled arena is given away as.
struct Shares {
  std::vector<UniqueFd> chunks;       // one per chunk; none with the legacy transport
  std::vector<std::byte> ipc_handle;  // legacy transport only
};

/// Where an arena becomes resident. One object for one arena, filled (allocate; stage, upload, retire; seal) or taken over
/// (import), then hashed and checked. stage(), upload() and retire() may be called from several threads at once, for different
/// pieces.
class Backend {
 public:
  virtual ~Backend() = default;

  [[nodiscard]] virtual uint64_t granularity_bytes() const = 0;  // of a chunk
  /// What the device can still give; 0: nobody knows here.
  [[nodiscard]] virtual Result<uint64_t> available_bytes() = 0;
  /// Reserves all chunks, zeroed. kResourceExhausted: nothing stays allocated.
  virtual Status allocate(const std::vector<uint64_t>& chunk_bytes) = 0;

  /// How many pieces may be between stage() and retire() at once; at least 1. After allocate().
  [[nodiscard]] virtual uint32_t max_pieces() const = 0;
  /// Memory to read the arena's bytes [offset, offset + size) into; size is 1 to kPieceBytes. Waits for earlier copies at most,
  /// never for another piece's retire().
  [[nodiscard]] virtual Result<Piece> stage(uint64_t offset_bytes, uint64_t size_bytes) = 0;
  /// The bytes are there and go into the arena; until retire() they are only read.
  virtual Status upload(const Piece& piece) = 0;
  /// The caller is done with the piece's bytes. Once for every stage() (but for the pieces of a load that has failed).
  virtual void retire(const Piece& piece) = 0;
  /// Ends writing for ever, when all that was uploaded has arrived.
  [[nodiscard]] virtual Result<Shares> seal() = 0;

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
