// SPDX-License-Identifier: Apache-2.0
#include "tools/pack/weight_counts.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>

#include "base/parallel.h"
#include "store/tile_layout.h"
#include "weightd/status.h"

namespace weightd::tools {
namespace {

constexpr uint64_t kGrainWords = uint64_t{1} << 20;  // below this a thread costs more than it saves

struct FloatLayout {
  uint32_t exponent_bits, mantissa_bits;
};
constexpr FloatLayout layout_of(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return {5, 10};
    case DType::kBF16:
      return {8, 7};
    case DType::kF32:
      return {8, 23};
    case DType::kF64:
      return {11, 52};
    default:
      return {0, 0};
  }
}

void classify(uint64_t bits, const FloatLayout& layout, uint64_t count, SpecialCounts& out) {
  const uint64_t exponent_mask = (uint64_t{1} << layout.exponent_bits) - 1;
  const uint64_t exponent = bits >> layout.mantissa_bits & exponent_mask;
  const uint64_t mantissa = bits & ((uint64_t{1} << layout.mantissa_bits) - 1);
  if (exponent == exponent_mask) (mantissa == 0 ? out.inf : out.nan) += count;
  if (exponent == 0) (mantissa == 0 ? out.zero : out.subnormal) += count;
}

template <typename Word>
SpecialCounts count_words(DType dtype, std::span<const std::byte> elements) {
  SpecialCounts counts;
  const FloatLayout layout = layout_of(dtype);
  for (size_t at = 0; at + sizeof(Word) <= elements.size(); at += sizeof(Word)) {
    Word word;
    std::memcpy(&word, elements.data() + at, sizeof word);
    classify(word, layout, 1, counts);
  }
  return counts;
}

template <typename Counts>
double entropy(const Counts& counts) {
  double total = 0, sum = 0;
  for (const uint64_t count : counts) {
    if (count == 0) continue;
    total += static_cast<double>(count);
    sum += static_cast<double>(count) * std::log2(static_cast<double>(count));
  }
  if (total == 0) return std::numeric_limits<double>::quiet_NaN();
  return std::max(0.0, std::log2(total) - sum / total);  // rounding must not show "-0.000"
}

constexpr uint64_t kHighValues = 128;  // e >> 1
constexpr uint64_t kWindowSize = 8;
constexpr uint64_t kGroupCols = uint64_t{f12::kTileCols} * f12::kGroupTiles;

uint32_t high_of(uint16_t word) { return (word >> 8) & 0x7FU; }

/// The window with the fewest escapes, the smallest of equals.
uint32_t best_window(std::span<const uint16_t> row) {
  std::array<uint64_t, kHighValues> counts{};
  for (const uint16_t word : row) ++counts[high_of(word)];
  uint64_t inside = 0;
  for (uint64_t i = 0; i < kWindowSize; ++i) inside += counts[i];
  uint64_t best = inside;
  uint32_t window = 0;
  for (uint32_t w = 1; w <= f12::kMaxWindow; ++w) {
    inside += counts[w + kWindowSize - 1] - counts[w - 1];
    if (inside > best) {
      best = inside;
      window = w;
    }
  }
  return window;
}

uint64_t pool_bytes_of_group(uint64_t escapes, uint64_t tiles) {
  if (escapes <= f12::kInlineEscapes) return 0;
  if (escapes <= f12::kListEscapes) return f12::align_up(escapes * sizeof(uint32_t), f12::kPoolAlign);
  return tiles * f12::kDenseTileBytes;
}

/// One unit: up to 16 rows.
F12Estimate estimate_unit(std::span<const uint16_t> words, uint64_t rows, uint64_t k) {
  const f12::Geometry unit{rows, k, 1};
  std::vector<uint64_t> group_escapes(unit.groups());
  for (uint64_t r = 0; r < rows; ++r) {
    const std::span<const uint16_t> row = words.subspan(r * k, k);
    const uint32_t window = best_window(row);
    for (uint64_t column = 0; column < k; ++column)
      group_escapes[column / kGroupCols] += high_of(row[column]) - window >= kWindowSize ? 1 : 0;
  }
  F12Estimate estimate;
  estimate.weights = rows * k;
  estimate.bytes = unit.codes_bytes() + unit.windows_bytes() + unit.records_bytes();
  for (uint64_t group = 0; group < group_escapes.size(); ++group) {
    const uint64_t tiles = std::min<uint64_t>(f12::kGroupTiles, unit.tiles() - group * f12::kGroupTiles);
    estimate.escapes += group_escapes[group];
    estimate.bytes += pool_bytes_of_group(group_escapes[group], tiles);
  }
  return estimate;
}

}  // namespace

void SpecialCounts::operator+=(const SpecialCounts& other) {
  inf += other.inf;
  nan += other.nan;
  zero += other.zero;
  subnormal += other.subnormal;
}

bool has_special_values(DType dtype) { return layout_of(dtype).exponent_bits != 0; }

SpecialCounts count_special(DType dtype, std::span<const std::byte> elements) {
  WEIGHTD_CHECK(has_special_values(dtype));
  switch (dtype_bits(dtype)) {
    case 16:
      return count_words<uint16_t>(dtype, elements);
    case 32:
      return count_words<uint32_t>(dtype, elements);
    default:
      return count_words<uint64_t>(dtype, elements);
  }
}

void Bf16Counts::add(std::span<const uint16_t> words, int threads) {
  std::mutex mutex;
  parallel_ranges(words.size(), kGrainWords, threads, [&](uint64_t begin, uint64_t end) {
    std::vector<uint64_t> local(counts_.size());
    for (const uint16_t word : words.subspan(begin, end - begin)) ++local[word];
    const std::lock_guard lock(mutex);
    for (size_t i = 0; i < local.size(); ++i) counts_[i] += local[i];
  });
}

void Bf16Counts::operator+=(const Bf16Counts& other) {
  for (size_t i = 0; i < counts_.size(); ++i) counts_[i] += other.counts_[i];
}

uint64_t Bf16Counts::weights() const {
  uint64_t total = 0;
  for (const uint64_t count : counts_) total += count;
  return total;
}

double Bf16Counts::exponent_entropy() const {
  std::array<uint64_t, 256> exponents{};
  for (size_t word = 0; word < counts_.size(); ++word) exponents[word >> 7 & 0xFF] += counts_[word];
  return entropy(exponents);
}

double Bf16Counts::sign_mantissa_entropy() const {
  std::array<uint64_t, 256> rest{};
  for (size_t word = 0; word < counts_.size(); ++word) rest[(word >> 8 & 0x80) | (word & 0x7F)] += counts_[word];
  return entropy(rest);
}

double Bf16Counts::joint_entropy() const { return entropy(counts_); }

SpecialCounts Bf16Counts::special() const {
  SpecialCounts special;
  for (size_t word = 0; word < counts_.size(); ++word) classify(word, layout_of(DType::kBF16), counts_[word], special);
  return special;
}

void F12Estimate::operator+=(const F12Estimate& other) {
  weights += other.weights;
  escapes += other.escapes;
  bytes += other.bytes;
}

F12Estimate estimate_f12(std::span<const uint16_t> words, uint64_t rows, uint64_t k, int threads) {
  WEIGHTD_CHECK(words.size() == rows * k);
  std::mutex mutex;
  F12Estimate total;
  parallel_ranges(rows, f12::kUnitRows, threads, [&](uint64_t begin, uint64_t end) {
    F12Estimate local;
    for (uint64_t row = begin; row < end; row += f12::kUnitRows) {
      const uint64_t unit_rows = std::min<uint64_t>(f12::kUnitRows, end - row);
      local += estimate_unit(words.subspan(row * k, unit_rows * k), unit_rows, k);
    }
    const std::lock_guard lock(mutex);
    total += local;
  });
  return total;
}

}  // namespace weightd::tools
