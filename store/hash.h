// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "weightd/status.h"

/// The hashes of the formats: XXH3-128 for sections (every load), SHA-256 for deep verification and identity, XXH3-64 for
/// the 1 MiB blocks of an arena (a GPU computes it at memory speed: the stripes of a block are independent sums).
namespace weightd::store {

struct Xxh128 {
  uint64_t low = 0, high = 0;
  bool operator==(const Xxh128&) const = default;
};
using Sha256 = std::array<unsigned char, 32>;
[[nodiscard]] std::string to_hex(const Xxh128& hash);  // high then low, 32 digits
[[nodiscard]] std::string to_hex(const Sha256& hash);

[[nodiscard]] Xxh128 xxh128(std::span<const std::byte> data);
[[nodiscard]] Sha256 sha256(std::span<const std::byte> data);

/// Incremental forms. update() in any cut gives the same digest. Not thread-safe.
class Xxh128Stream {
 public:
  Xxh128Stream();
  ~Xxh128Stream();
  Xxh128Stream(Xxh128Stream&&) noexcept;
  Xxh128Stream& operator=(Xxh128Stream&&) noexcept;
  void update(std::span<const std::byte> data);
  [[nodiscard]] Xxh128 digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};
class Sha256Stream {
 public:
  Sha256Stream();
  ~Sha256Stream();
  Sha256Stream(Sha256Stream&&) noexcept;
  Sha256Stream& operator=(Sha256Stream&&) noexcept;
  void update(std::span<const std::byte> data);
  [[nodiscard]] Sha256 finish();  // once

 private:
  struct State;
  std::unique_ptr<State> state_;
};

inline constexpr uint64_t kBlockBytes = uint64_t{1} << 20;  // an arena is a whole number of blocks, zero-padded

/// XXH3-64 (seed 0) of one whole block.
[[nodiscard]] uint64_t block_hash(std::span<const std::byte, kBlockBytes> block);
/// Of every block of `arena`, whose size is a multiple of kBlockBytes, with `threads` threads (<= 0: one per core).
[[nodiscard]] std::vector<uint64_t> block_hashes(std::span<const std::byte> arena, int threads);

/// Hashes an arena that arrives as pieces at ascending offsets; the gaps between them are zeros.
class BlockHasher {
 public:
  /// `offset_bytes` must not be below the end of the piece before (WEIGHTD_CHECK).
  void add(uint64_t offset_bytes, std::span<const std::byte> piece);
  /// Pads with zeros to `arena_bytes` (a multiple of kBlockBytes) and returns one hash per block.
  [[nodiscard]] std::vector<uint64_t> finish(uint64_t arena_bytes);

 private:
  void zeros(uint64_t count);
  std::vector<std::byte> block_;
  uint64_t position_ = 0;
  std::vector<uint64_t> hashes_;
};

}  // namespace weightd::store
