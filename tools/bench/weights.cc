// SPDX-License-Identifier: Apache-2.0
#include "tools/bench/weights.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/parallel.h"
#include "store/f12.h"
#include "tools/pack/synth_weights.h"

namespace weightd::tools {
namespace {

constexpr uint64_t kWindow = 56;       // of words without escapes: exponents 112 to 127
constexpr uint64_t kWindowValues = 8;  // high bytes (without the sign) that a window holds
constexpr uint64_t kHighValues = 120;  // all of them below 120: nothing is infinite, and no sum of products is

uint64_t mixed(uint64_t value) {  // splitmix64's finalizer
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ULL;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBULL;
  return value ^ (value >> 31);
}

/// Sign and mantissa at random; the high part of the exponent is inside [56, 64), or, `rate` of the time, outside.
void fill_with_escapes(std::span<uint16_t> words, uint64_t k, double rate, uint64_t seed, int threads) {
  const auto below = static_cast<uint64_t>(std::llround(rate * 0x1p32));
  parallel_ranges(words.size() / k, 1, threads, [&](uint64_t begin, uint64_t end) {
    for (uint64_t i = begin * k; i < end * k; ++i) {
      const uint64_t bits = mixed((seed << 48) + (i + 1) * 0x9E3779B97F4A7C15ULL);
      const uint64_t choice = bits >> 32;
      uint64_t high = kWindow + (bits >> 16 & 3) + (bits >> 18 & 3) + (bits >> 20 & 1);  // the middle ones most often
      if (choice < below) {
        high = mixed(bits) % (kHighValues - kWindowValues);
        if (high >= kWindow) high += kWindowValues;
      }
      words[i] = static_cast<uint16_t>((bits & 0x80FF) | high << 8);
    }
  });
}

Status encode(std::span<const uint16_t> words, int threads, CodedMatrix& coded) {
  const f12::Geometry& geometry = coded.geometry;
  coded.windows_at = f12::align_up(geometry.codes_bytes(), f12::kPlaneAlign);
  coded.records_at = coded.windows_at + f12::align_up(geometry.windows_bytes(), f12::kPlaneAlign);
  coded.pool_at = coded.records_at + f12::align_up(geometry.records_bytes(), f12::kPlaneAlign);
  coded.arena.resize(coded.pool_at);
  const std::span<std::byte> arena(coded.arena);
  std::vector<std::byte> pool;
  store::F12Stats stats;
  WEIGHTD_RETURN_IF_ERROR(store::f12_encode(std::as_bytes(words), geometry, 0, geometry.units(),
                                            arena.subspan(0, geometry.codes_bytes()),
                                            arena.subspan(coded.windows_at, geometry.windows_bytes()),
                                            arena.subspan(coded.records_at, geometry.records_bytes()), pool, 0, threads, &stats));
  coded.arena.insert(coded.arena.end(), pool.begin(), pool.end());
  coded.pool_bytes = pool.size();
  coded.coded_bytes = geometry.codes_bytes() + geometry.windows_bytes() + geometry.records_bytes() + pool.size();
  coded.escapes = stats.escapes;
  return {};
}

}  // namespace

double CodedMatrix::bits_per_weight() const {
  return 8 * static_cast<double>(coded_bytes) / (static_cast<double>(geometry.n) * static_cast<double>(geometry.k));
}

double CodedMatrix::escape_rate() const {
  return static_cast<double>(escapes) / (static_cast<double>(geometry.n) * static_cast<double>(geometry.k));
}

Result<HostMatrix> make_matrix(uint64_t n, uint64_t k, std::optional<double> escape_rate, uint64_t seed, int threads) {
  HostMatrix matrix;
  matrix.words.resize(n * k);
  if (escape_rate.has_value()) {
    fill_with_escapes(matrix.words, k, *escape_rate, seed, threads);
  } else {
    synth_bf16(matrix.words, k, 0, seed, {}, threads);
  }
  matrix.coded.geometry = f12::Geometry{n, k, 1};
  WEIGHTD_RETURN_IF_ERROR(encode(matrix.words, threads, matrix.coded));
  return matrix;
}

void fill_activations(std::span<uint16_t> words, uint64_t columns, uint64_t seed) {
  synth_bf16(words, columns, 0, seed, {.scale = 1, .row_scale_sigma = 0, .outlier_rate = 0}, 0);
}

}  // namespace weightd::tools
