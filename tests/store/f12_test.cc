// SPDX-License-Identifier: Apache-2.0
#include "store/f12.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "tests/kernels/guarded_bytes.h"
#include "tests/kernels/simd_targets.h"
#include "tools/pack/synth_weights.h"

namespace weightd::store {
namespace {

using f12::Geometry;
using Words = std::vector<uint16_t>;

struct Coded {
  Geometry geometry;
  std::vector<std::byte> codes, windows, records, pool;
  F12Stats stats;

  bool operator==(const Coded& other) const {
    return codes == other.codes && windows == other.windows && records == other.records && pool == other.pool;
  }
};

Coded planes_for(uint64_t n, uint64_t k) {
  Coded coded;
  coded.geometry = {n, k, 1};
  // What the encoder must overwrite.
  coded.codes.assign(coded.geometry.codes_bytes(), std::byte{0xA5});
  coded.windows.assign(coded.geometry.windows_bytes(), std::byte{0xA5});
  coded.records.assign(coded.geometry.records_bytes(), std::byte{0xA5});
  return coded;
}

Coded encode(const Words& words, uint64_t n, uint64_t k, int threads = 1) {
  Coded coded = planes_for(n, k);
  const Status status = f12_encode(std::as_bytes(std::span(words)), coded.geometry, 0, coded.geometry.units(), coded.codes,
                                   coded.windows, coded.records, coded.pool, 0, threads, &coded.stats);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return coded;
}

Status decode_into(const Coded& coded, Words& words, int threads = 1) {
  words.assign(coded.geometry.n * coded.geometry.k, 0xDEAD);
  return f12_decode(coded.geometry, 0, coded.geometry.units(), coded.codes, coded.windows, coded.records, coded.pool, 0,
                    std::as_writable_bytes(std::span(words)), threads);
}

Words decode(const Coded& coded, int threads = 1) {
  Words words;
  const Status status = decode_into(coded, words, threads);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return words;
}

Status validate(const Coded& coded) {
  return f12_validate(coded.geometry, 0, coded.geometry.units(), coded.codes, coded.windows, coded.records, coded.pool, 0);
}

// --- the format again, element by element, from its description alone ------------------------------------------------------

uint8_t reference_window(const uint16_t* row, uint64_t k) {
  uint64_t fewest = ~uint64_t{0};
  uint8_t window = 0;
  for (int w = 0; w <= 120; ++w) {
    uint64_t escapes = 0;
    for (uint64_t c = 0; c < k; ++c) {
      const int value = (row[c] >> 8) & 0x7F;
      if (value < w || value > w + 7) ++escapes;
    }
    if (escapes < fewest) {
      fewest = escapes;
      window = static_cast<uint8_t>(w);
    }
  }
  return window;
}

class ReferenceEncoder {
 public:
  ReferenceEncoder(const Words& words, uint64_t n, uint64_t k) : words_(words), n_(n), k_(k), coded_(planes_for(n, k)) {}

  Coded run() {
    const uint64_t units = (n_ + 15) / 16;
    const uint64_t tiles = (k_ + 63) / 64;
    std::fill(coded_.codes.begin(), coded_.codes.end(), std::byte{0});
    for (uint64_t row = 0; row < units * 16; ++row) {
      coded_.windows[row] = static_cast<std::byte>(row < n_ ? reference_window(&words_[row * k_], k_) : 0);
    }
    for (uint64_t u = 0; u < units; ++u) {
      for (uint64_t first = 0; first < tiles; first += 8) group(u, first, std::min(tiles, first + 8), tiles);
    }
    return coded_;
  }

 private:
  using Entries = std::vector<uint32_t>;

  void group(uint64_t u, uint64_t first, uint64_t last, uint64_t tiles) {
    Entries entries;
    std::array<uint64_t, 8> end{};
    std::vector<uint8_t> dense;
    for (uint64_t t = first; t < last; ++t) {
      std::array<uint8_t, 1024> high{};
      tile(u, t, tiles, entries, high);
      dense.insert(dense.end(), high.begin(), high.end());
      for (uint64_t i = t - first; i < 8; ++i) end[i] = entries.size();
    }
    record((u * ((tiles + 7) / 8) + first / 8) * 32, end, entries, dense);
  }

  void tile(uint64_t u, uint64_t t, uint64_t tiles, Entries& entries, std::array<uint8_t, 1024>& high) {
    std::byte* out = &coded_.codes[(u * tiles + t) * 1536];
    for (uint32_t plane = 0; plane < 2; ++plane) {
      for (uint32_t l = 0; l < 32; ++l) {
        for (uint32_t j = 0; j < 4; ++j) {
          uint32_t nibbles = 0;
          for (uint32_t b = 0; b < 4; ++b) {
            const uint64_t row = 16 * u + l / 4 + 8 * plane;
            const uint64_t column = 64 * t + 16 * j + 2 * (l % 4) + 8 * (b / 2) + b % 2;
            if (row >= n_ || column >= k_) continue;
            const uint16_t word = words_[row * k_ + column];
            const uint32_t h = word >> 8;
            const uint32_t pos = plane * 512 + 16 * l + 4 * j + b;
            out[pos] = static_cast<std::byte>(word & 0xFF);
            high[pos] = static_cast<uint8_t>(h);
            const int difference = static_cast<int>(h & 0x7F) - static_cast<int>(coded_.windows[row]);
            const bool escape = difference < 0 || difference > 7;
            nibbles |= ((h & 0x80) | (escape ? 0U : static_cast<uint32_t>(difference))) << (8 * b);
            if (escape) entries.push_back(pos | h << 16);
          }
          uint32_t merged = 0;
          std::memcpy(&merged, out + 1024 + 16 * l + 4 * j, 4);
          merged |= plane == 0 ? nibbles : std::rotr(nibbles, 4);
          std::memcpy(out + 1024 + 16 * l + 4 * j, &merged, 4);
        }
      }
    }
  }

  void record(uint64_t at, const std::array<uint64_t, 8>& end, const Entries& entries, const std::vector<uint8_t>& dense) {
    std::array<uint8_t, 32> bytes{};
    for (size_t i = 0; i < 8; ++i) bytes[i] = static_cast<uint8_t>(entries.size() > 254 ? 255 : end[i]);
    if (entries.size() <= 6) {
      std::copy_n(reinterpret_cast<const uint8_t*>(entries.data()), 4 * entries.size(), &bytes[8]);
    } else {
      const auto offset = static_cast<uint32_t>(coded_.pool.size() / 16);
      std::memcpy(&bytes[8], &offset, 4);
      if (entries.size() <= 254) {
        for (const uint32_t entry : entries) append(&entry, 4);
      } else {
        append(dense.data(), dense.size());
      }
      while (coded_.pool.size() % 16 != 0) coded_.pool.push_back(std::byte{0});
    }
    std::memcpy(&coded_.records[at], bytes.data(), 32);
  }

  void append(const void* data, size_t bytes) {
    const auto* from = static_cast<const std::byte*>(data);
    coded_.pool.insert(coded_.pool.end(), from, from + bytes);
  }

  const Words& words_;
  uint64_t n_, k_;
  Coded coded_;
};

Coded reference_encode(const Words& words, uint64_t n, uint64_t k) { return ReferenceEncoder(words, n, k).run(); }

/// Encodes, compares with the reference, decodes, compares with the source.
void expect_exact(const Words& words, uint64_t n, uint64_t k) {
  SCOPED_TRACE(std::to_string(n) + " x " + std::to_string(k));
  const Coded coded = encode(words, n, k);
  const Coded expected = reference_encode(words, n, k);
  EXPECT_EQ(coded.windows, expected.windows);
  EXPECT_EQ(coded.codes, expected.codes);
  EXPECT_EQ(coded.records, expected.records);
  EXPECT_EQ(coded.pool, expected.pool);
  EXPECT_TRUE(validate(coded).ok()) << validate(coded).to_string();
  EXPECT_EQ(decode(coded), words);
}

void expect_round_trip(const Words& words, uint64_t n, uint64_t k) {
  SCOPED_TRACE(std::to_string(n) + " x " + std::to_string(k));
  EXPECT_EQ(decode(encode(words, n, k)), words);
}

Words random_of(uint64_t count, uint64_t seed) {
  Words words(count);
  tools::random_words(words, seed);
  return words;
}

Words trained_of(uint64_t n, uint64_t k, uint64_t seed) {
  Words words(n * k);
  tools::synth_bf16(words, k, 0, seed, {}, 1);
  return words;
}

// --- values ------------------------------------------------------------------------------------------------------------------

TEST(F12, CO_034_All65536PatternsInOrderAndShuffled) {
  Words words(65536);
  std::iota(words.begin(), words.end(), uint16_t{0});
  expect_exact(words, 256, 256);
  std::shuffle(words.begin(), words.end(), std::mt19937_64(34));
  expect_exact(words, 256, 256);
  expect_exact(words, 1, 65536);
  expect_exact(words, 65536, 1);
}

TEST(F12, CO_035_NanPayloadsKeepTheirBits) {
  const Words nans = {0x7F81, 0x7FA0, 0x7FBF, 0x7FC0, 0x7FFF, 0xFF81, 0xFFA0, 0xFFBF, 0xFFC0, 0xFFFF};
  for (const uint16_t base : {uint16_t{0x0000}, uint16_t{0x3F80}}) {
    Words all(64, base);
    for (size_t i = 0; i < nans.size(); ++i) {
      Words one(64, base);
      one[17] = nans[i];
      expect_exact(one, 1, 64);
      all[3 + 5 * i] = nans[i];
    }
    expect_exact(all, 1, 64);
    expect_exact(all, 64, 1);
  }
}

TEST(F12, CO_036_ZeroKeepsItsSign) {
  Words words(64, 0x8000);
  words[5] = 0x0000;
  const Words decoded = decode(encode(words, 1, 64));
  EXPECT_EQ(decoded[5], 0x0000);
  EXPECT_EQ(decoded[6], 0x8000);
  EXPECT_EQ(decoded, words);
}

TEST(F12, CO_037_ConstantTensors) {
  const uint64_t n = 256, k = 1024;
  struct Case {
    uint16_t word;
    uint8_t window;  // the smallest that holds it
  };
  for (const Case& c :
       {Case{0x0000, 0}, Case{0x8000, 0}, Case{0x3F80, 0x38}, Case{0xFFFF, 0x78}, Case{0x0701, 0}, Case{0x0801, 1}}) {
    const Coded coded = encode(Words(n * k, c.word), n, k);
    EXPECT_EQ(coded.stats.escapes, 0U);
    EXPECT_TRUE(coded.pool.empty());
    EXPECT_THAT(coded.windows, testing::Each(static_cast<std::byte>(c.window)));
    EXPECT_EQ(decode(coded), Words(n * k, c.word));
  }
  Words words(n * k, 0x3F80);
  words.back() = 0xC000;
  expect_exact(words, n, k);
  for (size_t i = 0; i < words.size(); ++i) words[i] = i % 2 == 0 ? 0x0000 : 0x3F80;
  expect_exact(words, n, k);
  for (size_t i = 0; i < words.size(); ++i) words[i] = static_cast<uint16_t>((i % 2) << 7);
  expect_exact(words, n, k);
}

TEST(F12, CO_038_DataThatDoNotCompress) {
  const uint64_t n = 272, k = 1100;
  const Words noise = random_of(n * k, 38);
  expect_exact(noise, n, k);
  EXPECT_GT(encode(noise, n, k).stats.dense_groups, 0U);
  const Words trained = trained_of(n, k, 38);
  Words by_rows = trained, by_columns = trained, board(n * k, 0x3F80);
  for (uint64_t r = 0; r < n; ++r) {
    for (uint64_t c = 0; c < k; ++c) {
      if (r >= n / 2) by_rows[r * k + c] = noise[r * k + c];
      if (c >= k / 2) by_columns[r * k + c] = noise[r * k + c];
      if ((r / 64 + c / 64) % 2 == 0) board[r * k + c] = noise[r * k + c];
    }
  }
  expect_exact(by_rows, n, k);
  expect_exact(by_columns, n, k);
  expect_exact(board, n, k);
}

TEST(F12, CO_040_InfinitiesAndNansAmongTrainedWeights) {
  Words words = trained_of(64, 1024, 40);
  words[5] = 0x7F80;
  words[70000 % words.size()] = 0xFF80;
  words[1024] = 0x7FC1;
  words[2048] = 0xFFFF;
  words[4095] = 0x7F81;
  expect_exact(words, 64, 1024);
}

TEST(F12, WindowIsTheSmallestOfTheBest) {
  // Three rows of eight words; high bytes chosen so that several windows tie.
  const auto row_window = [](std::initializer_list<int> high_bytes) {
    Words words;
    for (const int h : high_bytes) words.push_back(static_cast<uint16_t>(h << 8));
    const Coded coded = encode(words, 1, words.size());
    EXPECT_EQ(static_cast<uint8_t>(coded.windows[0]), reference_window(words.data(), words.size()));
    return static_cast<int>(coded.windows[0]);
  };
  EXPECT_EQ(row_window({0x10, 0x30}), 0x09);        // either: the lower one's smallest window
  EXPECT_EQ(row_window({0x10, 0x30, 0x30}), 0x29);  // two beat one
  EXPECT_EQ(row_window({0x10, 0x17}), 0x10);        // both fit
  EXPECT_EQ(row_window({0x10, 0x18}), 0x09);        // both do not
  EXPECT_EQ(row_window({0x90, 0x17}), 0x10);        // signs play no part
  EXPECT_EQ(row_window({0x00}), 0);
  EXPECT_EQ(row_window({0x7F}), 120);
  EXPECT_EQ(row_window({0x7F, 0x78}), 120);
  EXPECT_EQ(row_window({0x07, 0x7F}), 0);
}

TEST(F12, SubnormalsAndTheTopExponents) {
  Words words;
  for (uint32_t i = 0; i < 2048; ++i) words.push_back(static_cast<uint16_t>((i % 2) << 15 | (i / 2) % 256));  // exponents 0, 1
  for (uint32_t i = 0; i < 2048; ++i) words.push_back(static_cast<uint16_t>((i % 2) << 15 | (0x7800 + i % 0x800)));  // 240..255
  expect_exact(words, 2, 2048);
  expect_exact(words, 4, 1024);
  expect_exact(words, 64, 64);
}

// --- shapes ------------------------------------------------------------------------------------------------------------------

TEST(F12, CO_044_EveryPairOfDimensionsAroundTheTile) {
  const std::array<uint64_t, 12> sizes = {1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 1000};
  for (const uint64_t n : sizes) {
    for (const uint64_t k : sizes) {
      Words words(n * k);
      for (size_t i = 0; i < words.size(); ++i) words[i] = static_cast<uint16_t>(i % 65521);
      if (n < 1000 || k < 128) {
        expect_exact(words, n, k);
      } else {
        expect_round_trip(words, n, k);
      }
    }
  }
}

TEST(F12, CO_049_LastBlockHoldsOneElement) {
  for (const uint64_t k : {uint64_t{1}, uint64_t{65}, uint64_t{513}}) {
    expect_exact(random_of(k, k), 1, k);
    expect_exact(random_of(17 * k, k), 17, k);
  }
}

TEST(F12, EmptyMatrices) {
  for (const auto& [n, k] : {std::pair<uint64_t, uint64_t>{0, 0}, {0, 64}, {5, 0}}) {
    const Coded coded = encode({}, n, k);
    EXPECT_TRUE(coded.codes.empty());
    EXPECT_TRUE(coded.pool.empty());
    EXPECT_THAT(coded.windows, testing::Each(std::byte{0}));
    EXPECT_TRUE(validate(coded).ok());
    EXPECT_TRUE(decode(coded).empty());
  }
}

// --- escapes -----------------------------------------------------------------------------------------------------------------

TEST(F12, EveryEscapeRate) {
  const uint64_t n = 32, k = 1536;
  std::mt19937_64 random(7);
  for (const double rate : {0.0, 1e-4, 1e-3, 0.005, 0.01, 0.03, 0.06, 0.1, 0.25, 0.5, 0.75, 0.99, 1.0}) {
    Words words(n * k);
    std::bernoulli_distribution escape(rate);
    for (uint16_t& word : words) {
      const auto noise = static_cast<uint16_t>(random() & 0x80FF);
      const auto spread = static_cast<uint16_t>(random() % 128);
      word = static_cast<uint16_t>(noise | (escape(random) ? spread : 0x38 + spread % 8) << 8);
    }
    expect_exact(words, n, k);
  }
}

TEST(F12, OneEscapeAtEveryPositionOfATile) {
  // The second of three tiles, so that counts before and after it matter.
  for (uint32_t row = 0; row < 16; ++row) {
    for (uint32_t column = 0; column < 64; ++column) {
      Words words(16 * 192, 0x3C55);
      words[row * 192 + 64 + column] = 0x8123;
      const Coded coded = encode(words, 16, 192);
      ASSERT_EQ(coded.stats.escapes, 1U);
      std::array<uint8_t, 8> end{};
      std::memcpy(end.data(), coded.records.data(), 8);
      ASSERT_THAT(end, testing::ElementsAre(0, 1, 1, 1, 1, 1, 1, 1));
      // The place by hand: column = 16j + 8s + 2q + h of lane 4g + q.
      const uint32_t j = column / 16, s = column % 16 / 8, q = column % 8 / 2, h = column % 2;
      uint32_t entry = 0;
      std::memcpy(&entry, coded.records.data() + 8, 4);
      ASSERT_EQ(entry, (row >= 8 ? 512U : 0U) + 16 * (4 * (row % 8) + q) + 4 * j + 2 * s + h + (0x81U << 16));
      ASSERT_EQ(decode(coded), words);
    }
  }
}

/// One unit, one group of `tiles` tiles, with `count` escapes spread over it.
Words with_escapes(uint64_t k, size_t count) {
  Words words(16 * k, 0x3C01);
  std::vector<size_t> places(words.size());
  std::iota(places.begin(), places.end(), size_t{0});
  std::shuffle(places.begin(), places.end(), std::mt19937_64(count));
  // Rows keep their window: at most a third of a row escapes.
  std::vector<size_t> in_row(16);
  size_t done = 0;
  for (const size_t place : places) {
    if (done == count) break;
    if (in_row[place / k]++ >= k / 3) continue;
    words[place] = static_cast<uint16_t>(0x5000 + 0x100 * (done % 32) + done % 200);
    ++done;
  }
  return words;
}

TEST(F12, RecordHoldsSixEscapesAListHolds254) {
  struct Case {
    size_t escapes, pool_bytes;
  };
  for (const uint64_t k : {uint64_t{512}, uint64_t{300}}) {
    const size_t tiles = (k + 63) / 64;
    for (const Case& c : {Case{0, 0}, Case{1, 0}, Case{6, 0}, Case{7, 32}, Case{8, 32}, Case{9, 48}, Case{253, 1024},
                          Case{254, 1024}, Case{255, 1024 * tiles}, Case{1000, 1024 * tiles}}) {
      SCOPED_TRACE(c.escapes);
      const Words words = with_escapes(k, c.escapes);
      const Coded coded = encode(words, 16, k);
      EXPECT_EQ(coded.stats.escapes, c.escapes);
      EXPECT_EQ(coded.pool.size(), c.pool_bytes);
      EXPECT_EQ(coded.stats.listed_groups, c.escapes > 6 && c.escapes < 255 ? 1U : 0U);
      EXPECT_EQ(coded.stats.dense_groups, c.escapes > 254 ? 1U : 0U);
      EXPECT_EQ(static_cast<size_t>(coded.records[7]), std::min<size_t>(c.escapes, 255));
      expect_exact(words, 16, k);
    }
  }
}

TEST(F12, PaddingIsZeroEvenInDenseGroups) {
  const Words words = random_of(13 * 70, 9);
  const Coded coded = encode(words, 13, 70);
  ASSERT_EQ(coded.stats.dense_groups, 1U);
  ASSERT_EQ(coded.pool.size(), 2048U);
  for (uint32_t pos = 0; pos < 1024; ++pos) {
    // Tile 1 has columns 64..69; rows 13..15 do not exist.
    const uint32_t row = (pos >= 512 ? 8 : 0) + pos % 512 / 64;
    const uint32_t column = f12::tile_column(pos % 512 / 16, pos % 16 / 4, pos % 4);
    if (row < 13 && column < 6) continue;
    EXPECT_EQ(coded.pool[1024 + pos], std::byte{0}) << pos;
    EXPECT_EQ(coded.codes[1536 + pos], std::byte{0}) << pos;
  }
  EXPECT_EQ(coded.windows[13], std::byte{0});
  EXPECT_EQ(coded.windows[15], std::byte{0});
}

// --- cuts, threads, instruction sets -----------------------------------------------------------------------------------------

Words mixed_words(uint64_t n, uint64_t k) {
  Words words = trained_of(n, k, 11);
  const Words noise = random_of(n * k, 12);
  for (uint64_t r = 0; r < n; ++r) {
    for (uint64_t c = 0; c < k; ++c) {
      if ((r / 16 + c / 512) % 3 == 0 && (c % 9 == 0 || r % 32 < 16)) words[r * k + c] = noise[r * k + c];
    }
  }
  return words;
}

TEST(F12, BytesDoNotDependOnThreadsOrInstructionSet) {
  const uint64_t n = 16 * 9 + 5, k = 1000;
  const Words words = mixed_words(n, k);
  const Coded expected = reference_encode(words, n, k);
  test::for_each_simd_target([&] {
    for (const int threads : {1, 2, 7, 0}) {
      SCOPED_TRACE(threads);
      const Coded coded = encode(words, n, k, threads);
      EXPECT_TRUE(coded == expected);
      EXPECT_GT(coded.stats.listed_groups, 0U);
      EXPECT_GT(coded.stats.dense_groups, 0U);
      EXPECT_EQ(decode(coded, threads), words);
    }
  });
}

TEST(F12, AnyCutIntoUnitsGivesTheSameBytes) {
  const uint64_t n = 16 * 9 + 5, k = 1000;
  const Words words = mixed_words(n, k);
  const Coded whole = encode(words, n, k);
  const Geometry& g = whole.geometry;
  Coded parts = planes_for(n, k);
  const std::array<uint64_t, 5> cuts = {0, 1, 4, 4, g.units()};
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    const uint64_t first = cuts[i], last = cuts[i + 1];
    const uint64_t row_begin = first * 16, row_end = std::min(n, last * 16);
    const uint64_t codes = g.tiles() * f12::kTileBytes, records = g.groups() * f12::kRecordBytes;
    const auto row_words = std::as_bytes(std::span(words)).subspan(row_begin * k * 2, (row_end - row_begin) * k * 2);
    // Each part writes its own pool, which starts where the last one ended.
    std::vector<std::byte> pool;
    const Status status = f12_encode(
        row_words, g, first, last, std::span(parts.codes).subspan(first * codes, (last - first) * codes),
        std::span(parts.windows).subspan(first * 16, (last - first) * 16),
        std::span(parts.records).subspan(first * records, (last - first) * records), pool, parts.pool.size(), 3, &parts.stats);
    ASSERT_TRUE(status.ok()) << status.to_string();
    // The same units alone, with only their part of the pool at hand.
    Words decoded((row_end - row_begin) * k);
    const Status back = f12_decode(g, first, last, std::span(parts.codes).subspan(first * codes, (last - first) * codes),
                                   std::span(parts.windows).subspan(first * 16, (last - first) * 16),
                                   std::span(parts.records).subspan(first * records, (last - first) * records), pool,
                                   parts.pool.size(), std::as_writable_bytes(std::span(decoded)), 2);
    ASSERT_TRUE(back.ok()) << back.to_string();
    EXPECT_TRUE(std::equal(decoded.begin(), decoded.end(), words.begin() + static_cast<ptrdiff_t>(row_begin * k)));
    parts.pool.insert(parts.pool.end(), pool.begin(), pool.end());
  }
  EXPECT_TRUE(parts == whole);
  EXPECT_EQ(parts.stats.escapes, whole.stats.escapes);
}

TEST(F12, CO_045_LastUnitsOfTheLargestMatrix) {
  const uint64_t n = 0xFFFFFFFF, k = 300;
  const Geometry g{n, k, 1};
  const uint64_t first = g.units() - 2;
  const uint64_t rows = n - first * 16;
  ASSERT_EQ(rows, 31U);
  const Words words = mixed_words(rows, k);
  const Coded alone = encode(words, rows, k);  // the same rows as a matrix of their own
  Coded part = planes_for(rows, k);
  const auto source = std::as_bytes(std::span(words));
  ASSERT_TRUE(f12_encode(source, g, first, g.units(), part.codes, part.windows, part.records, part.pool, 0, 2).ok());
  EXPECT_TRUE(part == alone);
  Words decoded(words.size());
  const Status status = f12_decode(g, first, g.units(), part.codes, part.windows, part.records, part.pool, 0,
                                   std::as_writable_bytes(std::span(decoded)), 2);
  ASSERT_TRUE(status.ok()) << status.to_string();
  EXPECT_EQ(decoded, words);
}

TEST(F12, AppendsToAPoolThatHasContent) {
  const Words words = with_escapes(512, 40);
  Coded coded = planes_for(16, 512);
  coded.pool.assign(48, std::byte{1});
  ASSERT_TRUE(f12_encode(std::as_bytes(std::span(words)), coded.geometry, 0, 1, coded.codes, coded.windows, coded.records,
                         coded.pool, 160, 1)
                  .ok());
  uint32_t offset = 0;
  std::memcpy(&offset, coded.records.data() + 8, 4);
  EXPECT_EQ(offset, (160 + 48) / 16U);
  EXPECT_EQ(coded.pool.size(), 48U + 160U);
  EXPECT_EQ(coded.pool[47], std::byte{1});
  Words decoded(words.size());
  const auto out = std::as_writable_bytes(std::span(decoded));
  EXPECT_TRUE(f12_decode(coded.geometry, 0, 1, coded.codes, coded.windows, coded.records, coded.pool, 160, out, 1).ok());
  EXPECT_EQ(decoded, words);
  EXPECT_EQ(f12_decode(coded.geometry, 0, 1, coded.codes, coded.windows, coded.records, coded.pool, 224, out, 1).code(),
            StatusCode::kCorruption);
}

// --- memory ------------------------------------------------------------------------------------------------------------------

TEST(F12, CO_041_NothingIsReadOrWrittenOutsideTheBuffers) {
  test::for_each_simd_target([] {
    for (uint64_t k = 57; k < 74; ++k) {
      for (const uint64_t n : {uint64_t{1}, uint64_t{8}, uint64_t{16}, uint64_t{19}}) {
        const Words words = k % 2 == 0 ? trained_of(n, k, k) : random_of(n * k, k);
        const Coded expected = encode(words, n, k);
        const Geometry& g = expected.geometry;
        test::GuardedBytes source(std::as_bytes(std::span(words)));
        source.make_read_only();
        test::GuardedBytes codes(g.codes_bytes()), windows(g.windows_bytes()), records(g.records_bytes()), out(g.raw_bytes());
        std::vector<std::byte> pool;
        ASSERT_TRUE(f12_encode(source.span(), g, 0, g.units(), codes.span(), windows.span(), records.span(), pool, 0, 1).ok());
        ASSERT_TRUE(std::equal(codes.span().begin(), codes.span().end(), expected.codes.begin()));
        test::GuardedBytes pool_copy(pool);
        ASSERT_TRUE(
            f12_decode(g, 0, g.units(), codes.span(), windows.span(), records.span(), pool_copy.span(), 0, out.span(), 1).ok());
        ASSERT_EQ(std::memcmp(out.span().data(), words.data(), g.raw_bytes()), 0);
      }
    }
  });
}

TEST(F12, CO_048_InputIsOnlyRead) {
  const Words nans = {0x7F81, 0x7FA0, 0x7FBF, 0x7FC0, 0x7FFF, 0xFF81};
  for (const uint64_t k : {uint64_t{1}, uint64_t{3}, uint64_t{5}}) {
    Words words(k);
    for (size_t i = 0; i < k; ++i) words[i] = nans[i];
    test::GuardedBytes source(std::as_bytes(std::span(words)));
    source.make_read_only();  // a write would end the process
    Coded coded = planes_for(1, k);
    ASSERT_TRUE(f12_encode(source.span(), coded.geometry, 0, 1, coded.codes, coded.windows, coded.records, coded.pool, 0, 1).ok());
    EXPECT_EQ(decode(coded), words);
    EXPECT_EQ(std::memcmp(source.span().data(), words.data(), 2 * k), 0);
  }
}

TEST(F12, UnalignedBuffers) {
  const uint64_t n = 21, k = 200;
  const Words words = mixed_words(n, k);
  const Coded expected = encode(words, n, k);
  const Geometry& g = expected.geometry;
  const auto shifted = [](std::span<const std::byte> content) {
    std::vector<std::byte> buffer(content.size() + 1);
    std::copy(content.begin(), content.end(), buffer.begin() + 1);
    return buffer;
  };
  std::vector<std::byte> source = shifted(std::as_bytes(std::span(words)));
  std::vector<std::byte> codes(g.codes_bytes() + 1), windows(g.windows_bytes() + 1), records(g.records_bytes() + 1), pool;
  ASSERT_TRUE(f12_encode(std::span(source).subspan(1), g, 0, g.units(), std::span(codes).subspan(1), std::span(windows).subspan(1),
                         std::span(records).subspan(1), pool, 0, 1)
                  .ok());
  EXPECT_TRUE(std::equal(expected.codes.begin(), expected.codes.end(), codes.begin() + 1));
  EXPECT_TRUE(std::equal(expected.records.begin(), expected.records.end(), records.begin() + 1));
  std::vector<std::byte> out(g.raw_bytes() + 1);
  const std::vector<std::byte> shifted_pool = shifted(pool);
  ASSERT_TRUE(f12_decode(g, 0, g.units(), std::span(codes).subspan(1), std::span(windows).subspan(1), std::span(records).subspan(1),
                         std::span(shifted_pool).subspan(1), 0, std::span(out).subspan(1), 1)
                  .ok());
  EXPECT_TRUE(std::equal(source.begin() + 1, source.end(), out.begin() + 1));
}

// --- refusals ----------------------------------------------------------------------------------------------------------------

TEST(F12, RefusesSizesThatDoNotFit) {
  const Words words(16 * 64, 0x3F80);
  Coded coded = planes_for(16, 64);
  const auto bytes = std::as_bytes(std::span(words));
  const auto run = [&](const Geometry& g, uint64_t first, uint64_t last, std::span<const std::byte> from, uint64_t pool_offset) {
    return f12_encode(from, g, first, last, coded.codes, coded.windows, coded.records, coded.pool, pool_offset, 1).code();
  };
  EXPECT_EQ(run(coded.geometry, 0, 1, bytes, 0), StatusCode::kOk);
  EXPECT_EQ(run(coded.geometry, 0, 1, bytes.first(bytes.size() - 1), 0), StatusCode::kInvalidArgument);
  EXPECT_EQ(run(coded.geometry, 0, 2, bytes, 0), StatusCode::kInvalidArgument);
  EXPECT_EQ(run(coded.geometry, 1, 0, bytes, 0), StatusCode::kInvalidArgument);
  EXPECT_EQ(run(coded.geometry, 0, 1, bytes, 8), StatusCode::kInvalidArgument);
  EXPECT_EQ(run({17, 64, 1}, 0, 2, bytes, 0), StatusCode::kInvalidArgument);
  coded.codes.pop_back();
  EXPECT_EQ(run(coded.geometry, 0, 1, bytes, 0), StatusCode::kInvalidArgument);
}

TEST(F12, CO_050_SizesFromFilesDoNotOverflow) {
  std::array<std::byte, 64> some{};
  const std::span<std::byte> bytes(some);
  for (const auto& [n, k] : {std::pair<uint64_t, uint64_t>{0xFFFFFFFF, 0xFFFFFFFF},
                             {uint64_t{1} << 32, 1},
                             {1, uint64_t{1} << 32},
                             {uint64_t{1} << 62, 4},
                             {~uint64_t{0}, ~uint64_t{0}}}) {
    const Geometry g{n, k, 1};
    for (const uint64_t units : {uint64_t{1}, uint64_t{0x10000000}, g.units(), ~uint64_t{0}}) {
      EXPECT_EQ(f12_validate(g, 0, units, bytes, bytes, bytes, bytes, 0).code(), StatusCode::kInvalidArgument);
      EXPECT_EQ(f12_decode(g, 0, units, bytes, bytes, bytes, bytes, 0, bytes, 1).code(), StatusCode::kInvalidArgument);
    }
  }
}

TEST(F12, RefusesAPoolBeyondItsOffsets) {
  const Words words = with_escapes(512, 40);
  Coded coded = planes_for(16, 512);
  const uint64_t limit = uint64_t{16} << 32;
  const auto run = [&](uint64_t offset) {
    return f12_encode(std::as_bytes(std::span(words)), coded.geometry, 0, 1, coded.codes, coded.windows, coded.records, coded.pool,
                      offset, 1);
  };
  EXPECT_TRUE(run(limit - 160).ok());
  EXPECT_EQ(coded.pool.size(), 160U);
  coded.pool.clear();
  EXPECT_EQ(run(limit - 144).code(), StatusCode::kResourceExhausted);
  EXPECT_TRUE(coded.pool.empty());
}

struct Damage {
  const char* name;
  std::function<void(Coded&)> apply;
  const char* rule;  // part of the message
};

void set_word(std::vector<std::byte>& bytes, size_t at, uint32_t value) { std::memcpy(&bytes[at], &value, 4); }

/// 19 x 600: two units; unit 0 has an inline group (2 escapes) and a list (7 and more), unit 1 a dense group and a small one.
Coded sample() {
  const uint64_t n = 19, k = 600;
  Words words(n * k, 0x3C01);
  words[3 * k + 5] = 0x1111;
  words[9 * k + 70] = 0x9222;
  for (uint64_t i = 0; i < 9; ++i) words[i * k + 520 + i] = 0x0155;
  const Words noise = random_of(3 * 512, 77);
  for (uint64_t r = 16; r < 19; ++r)
    std::copy_n(noise.begin() + static_cast<ptrdiff_t>((r - 16) * 512), 512, words.begin() + static_cast<ptrdiff_t>(r * k));
  return encode(words, n, k);
}

TEST(F12, SampleOfTheDamageTestsIsAsDescribed) {
  const Coded coded = sample();
  EXPECT_EQ(static_cast<int>(coded.records[7]), 2);
  EXPECT_EQ(static_cast<int>(coded.records[32 + 7]), 9);
  EXPECT_EQ(static_cast<int>(coded.records[64 + 7]), 255);
  EXPECT_EQ(coded.pool.size(), 48U + 8 * 1024);
  EXPECT_TRUE(validate(coded).ok());
}

TEST(F12, CO_050_EveryRuleIsChecked) {
  const std::vector<Damage> damages = {
      {"window too large", [](Coded& c) { c.windows[4] = std::byte{121}; }, "window 121 of row 4 passes 120"},
      {"window of a padding row", [](Coded& c) { c.windows[16 + 3] = std::byte{1}; }, "window 1 of row 19 passes 0"},
      {"low byte of a padding row", [](Coded& c) { c.codes[10 * 1536 + 64 * 5] = std::byte{1}; },
       "unit 1, tile 0: codes of padding"},
      {"low byte of a padding column", [](Coded& c) { c.codes[9 * 1536 + 3] = std::byte{1}; },
       "ok"},  // column 9 of the last tile exists
      {"low byte past the last column", [](Coded& c) { c.codes[9 * 1536 + 8] = std::byte{1}; }, "unit 0, tile 9: codes of padding"},
      {"code of A past the last column", [](Coded& c) { c.codes[9 * 1536 + 1024 + 8] = std::byte{1}; },
       "unit 0, tile 9: codes of padding"},
      {"code of B past the last column", [](Coded& c) { c.codes[9 * 1536 + 1024 + 8] = std::byte{0x10}; },
       "unit 0, tile 9: codes of padding"},
      {"counts decrease", [](Coded& c) { c.records[1] = std::byte{3}; }, "unit 0, group 0: counts decrease"},
      {"count of a tile that does not exist", [](Coded& c) { c.records[32 + 7] = std::byte{10}; }, "tiles that do not exist"},
      {"seventh inline word", [](Coded& c) { set_word(c.records, 8 + 2 * 4, 1); }, "unit 0, group 0: unused words"},
      {"word behind a list offset", [](Coded& c) { set_word(c.records, 32 + 12, 1); }, "unit 0, group 1: unused words"},
      {"word behind a dense offset", [](Coded& c) { set_word(c.records, 64 + 28, 1); }, "unit 1, group 0: unused words"},
      {"entry outside the tile", [](Coded& c) { set_word(c.records, 8, 1024); }, "an entry lies outside its tile"},
      {"reserved bits of an entry", [](Coded& c) { c.records[8 + 3] = std::byte{1}; }, "reserved bits of an entry"},
      {"entries in the wrong order",
       [](Coded& c) {
         std::array<std::byte, 4> first{};
         std::memcpy(first.data(), &c.pool[0], 4);
         std::memcpy(&c.pool[0], &c.pool[4], 4);
         std::memcpy(&c.pool[4], first.data(), 4);
       },
       "ascending order"},
      {"the same entry twice", [](Coded& c) { std::memcpy(&c.pool[4], &c.pool[0], 4); }, "ascending order"},
      {"entry on a padding row",
       [](Coded& c) {
         std::fill_n(c.records.begin() + 96, 8, std::byte{1});
         set_word(c.records, 96 + 8, 64 * 3);
       },
       "an entry lies in the padding"},
      {"list outside the pool", [](Coded& c) { set_word(c.records, 32 + 8, 0x10000000); }, "outside the pool"},
      {"list at the largest offset", [](Coded& c) { set_word(c.records, 32 + 8, 0xFFFFFFFF); }, "outside the pool"},
      {"dense group behind the pool's end", [](Coded& c) { set_word(c.records, 64 + 8, 4); }, "outside the pool"},
      {"dense group over the list", [](Coded& c) { set_word(c.records, 64 + 8, 2); }, "pool offset 32, expected 48"},
      {"dense counts that are not all 255", [](Coded& c) { c.records[64] = std::byte{254}; }, "not all 255"},
      {"padding of a list", [](Coded& c) { c.pool[36] = std::byte{1}; }, "padding of the list"},
      {"padding of a dense block", [](Coded& c) { c.pool[48 + 64 * 3] = std::byte{1}; }, "padding of a dense block"},
      {"pool cut short", [](Coded& c) { c.pool.pop_back(); }, "outside the pool"},
      {"no pool", [](Coded& c) { c.pool.clear(); }, "outside the pool"},
  };
  for (const Damage& damage : damages) {
    SCOPED_TRACE(damage.name);
    Coded coded = sample();
    damage.apply(coded);
    const Status status = validate(coded);
    Words words;
    const Status decoded = decode_into(coded, words);
    EXPECT_EQ(decoded.to_string(), status.to_string());
    if (damage.rule == std::string("ok")) {
      EXPECT_TRUE(status.ok()) << status.to_string();
      continue;
    }
    EXPECT_EQ(status.code(), StatusCode::kCorruption);
    EXPECT_THAT(status.message(), testing::HasSubstr(damage.rule));
  }
}

TEST(F12, CO_047_MutatedPlanesNeverLeaveTheBuffers) {
  std::mt19937_64 random(47);
  const Coded good = sample();
  size_t refused = 0;
  for (int round = 0; round < 2000; ++round) {
    Coded bad = good;
    for (uint64_t edits = 1 + random() % 4; edits > 0; --edits) {
      const std::array<std::vector<std::byte>*, 4> planes = {&bad.records, &bad.records, &bad.windows, &bad.pool};
      std::vector<std::byte>& plane = *planes[random() % planes.size()];
      plane[random() % plane.size()] ^= static_cast<std::byte>(1U << (random() % 8));
    }
    // Exact allocations: a sanitizer build sees one byte too many.
    Words words;
    refused += decode_into(bad, words, 2).ok() ? 0 : 1;
  }
  EXPECT_GT(refused, 200U);
}

// --- geometry ----------------------------------------------------------------------------------------------------------------

TEST(TileLayout, SizesOfPlanes) {
  constexpr Geometry g{33, 577, 3};
  EXPECT_EQ(g.units(), 3U);
  EXPECT_EQ(g.tiles(), 10U);
  EXPECT_EQ(g.groups(), 2U);
  EXPECT_EQ(g.codes_bytes(), 3U * 3 * 10 * 1536);
  EXPECT_EQ(g.windows_bytes(), 3U * 3 * 16);
  EXPECT_EQ(g.records_bytes(), 3U * 3 * 2 * 32);
  EXPECT_EQ(g.raw_bytes(), 3U * 33 * 577 * 2);
}

TEST(TileLayout, EveryCellHasOnePlace) {
  std::array<int, 1024> seen{};
  for (uint32_t pos = 0; pos < 1024; ++pos) {
    ++seen[f12::scratch_row(pos) * 64 + f12::scratch_column(pos)];
    const uint32_t lane = pos % 512 / 16, word = pos % 16 / 4, byte = pos % 4;
    EXPECT_EQ(f12::scratch_pos(pos >= 512, lane, word, byte), pos);
    EXPECT_EQ(f12::scratch_row(pos), lane / 4 + (pos >= 512 ? 8 : 0));
    EXPECT_EQ(f12::scratch_column(pos), f12::tile_column(lane, word, byte));
  }
  EXPECT_THAT(seen, testing::Each(1));
}

}  // namespace
}  // namespace weightd::store
