// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "store/tile_layout.h"
#include "weightd/status.h"

/// CPU codec of the f12 encoding (store/FORMAT.md). Vectorized (Highway), deterministic: the bytes depend only on the words
/// and the geometry, never on the thread count or the instruction set. Words are integers everywhere; no float touches them.
namespace weightd::store {

struct F12Stats {
  uint64_t escapes = 0;
  uint64_t listed_groups = 0;  // groups whose entries are in a pool list
  uint64_t dense_groups = 0;
  void operator+=(const F12Stats& other);
};

/// Encodes units [unit_begin, unit_end) of one matrix [n, k] (geometry.batch is ignored).
///   words    BF16, little endian, row-major; the rows of these units only, i.e. rows 16*unit_begin .. min(n, 16*unit_end);
///            any alignment (bytes are copied)
///   codes    receives (unit_end - unit_begin) * tiles * 1536 bytes;  windows: * 16;  records: * groups * 32
///   pool     lists and dense blocks are appended, each padded to 16 bytes; `pool_offset_bytes` is where pool[0] lies in the
///            model's pool (a multiple of 16) and goes into the records
/// Uses `threads` threads (<= 0: one per core); allocates a few KiB a thread beside pool, and each thread's part of pool twice. kInvalidArgument for sizes that do not
/// fit, kResourceExhausted when a pool offset passes 2^32 * 16 bytes or memory is out; on failure the outputs are unspecified and pool
/// keeps its size. `stats` is added to.
Status f12_encode(std::span<const std::byte> words, const f12::Geometry& geometry, uint64_t unit_begin, uint64_t unit_end,
                  std::span<std::byte> codes, std::span<std::byte> windows, std::span<std::byte> records,
                  std::vector<std::byte>& pool, uint64_t pool_offset_bytes, int threads, F12Stats* stats = nullptr);

/// Checks everything a decoder relies on: windows <= 120, windows and codes of padding 0, counts monotone, entries sorted and inside the
/// group and the matrix, unused words zero, lists and dense groups inside the pool and, over these units, one after the other without
/// gaps. Spans hold the units [unit_begin, unit_end). kCorruption names unit, group or tile, and rule; kInvalidArgument for spans of
/// the wrong size. `pool` is the whole pool of the model, or the part from pool_offset_bytes on.
Status f12_validate(const f12::Geometry& geometry, uint64_t unit_begin, uint64_t unit_end, std::span<const std::byte> codes,
                    std::span<const std::byte> windows, std::span<const std::byte> records, std::span<const std::byte> pool,
                    uint64_t pool_offset_bytes);

/// Decodes units [unit_begin, unit_end) into `words` (the rows of these units, tightly packed). Validates like f12_validate while
/// decoding: never reads or writes outside the spans, whatever the bytes say; kCorruption then, words unspecified.
Status f12_decode(const f12::Geometry& geometry, uint64_t unit_begin, uint64_t unit_end, std::span<const std::byte> codes,
                  std::span<const std::byte> windows, std::span<const std::byte> records, std::span<const std::byte> pool,
                  uint64_t pool_offset_bytes, std::span<std::byte> words, int threads);

}  // namespace weightd::store
