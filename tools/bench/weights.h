// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "store/tile_layout.h"
#include "weightd/status.h"

/// Weights to measure with: BF16 words and their f12 planes, in host memory.
namespace weightd::tools {

/// The f12 planes of one matrix in one piece of memory, each at a multiple of 256 bytes, as in an arena.
struct CodedMatrix {
  f12::Geometry geometry;
  std::vector<std::byte> arena;
  uint64_t windows_at = 0, records_at = 0, pool_at = 0;  // codes begin at 0
  uint64_t pool_bytes = 0;
  uint64_t coded_bytes = 0;  // of the planes, without the gaps between them
  uint64_t escapes = 0;

  [[nodiscard]] double bits_per_weight() const;
  [[nodiscard]] double escape_rate() const;
};

struct HostMatrix {
  std::vector<uint16_t> words;  // [n, k]
  CodedMatrix coded;
};

/// A matrix with the exponents of trained weights (synth_bf16), escapes as they come; or, with `escape_rate`, one of which about
/// that share lies outside of its window. No distribution escapes wholly: a window of 8 among 120 catches a fifteenth, so rates end
/// at 0.93. Depends on the arguments alone, not on `threads` (<= 0: one per core).
[[nodiscard]] Result<HostMatrix> make_matrix(uint64_t n, uint64_t k, std::optional<double> escape_rate, uint64_t seed, int threads);

/// Standard normal BF16 words.
void fill_activations(std::span<uint16_t> words, uint64_t columns, uint64_t seed);

}  // namespace weightd::tools
