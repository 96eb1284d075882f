// SPDX-License-Identifier: Apache-2.0
#include "tools/bench/weights.h"

#include <gtest/gtest.h>

#include <cmath>
#include <span>
#include <vector>

#include "store/f12.h"

namespace weightd::tools {
namespace {

/// The words that the planes of `coded` hold.
std::vector<uint16_t> decoded(const CodedMatrix& coded) {
  const f12::Geometry& g = coded.geometry;
  std::vector<uint16_t> words(g.n * g.k, 0xA5A5);
  const std::span<const std::byte> arena(coded.arena);
  const Status status =
      store::f12_decode(g, 0, g.units(), arena.first(g.codes_bytes()), arena.subspan(coded.windows_at, g.windows_bytes()),
                        arena.subspan(coded.records_at, g.records_bytes()), arena.subspan(coded.pool_at), 0,
                        std::as_writable_bytes(std::span(words)), 1);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return words;
}

TEST(BenchWeights, PlanesHoldTheWords) {
  for (const std::optional<double> escapes : {std::optional<double>(), std::optional<double>(0.001), std::optional<double>(1.0)}) {
    const Result<HostMatrix> matrix = make_matrix(100, 300, escapes, 1, 2);
    ASSERT_TRUE(matrix.ok()) << matrix.status().to_string();
    EXPECT_EQ(decoded(matrix->coded), matrix->words);
    EXPECT_EQ(matrix->coded.windows_at % 256, 0U);
    EXPECT_EQ(matrix->coded.records_at % 256, 0U);
    EXPECT_EQ(matrix->coded.pool_at % 256, 0U);
    EXPECT_EQ(matrix->coded.arena.size(), matrix->coded.pool_at + matrix->coded.pool_bytes);
  }
}

TEST(BenchWeights, ThreadsChangeNothing) {
  for (const std::optional<double> escapes : {std::optional<double>(), std::optional<double>(0.01)}) {
    const Result<HostMatrix> one = make_matrix(96, 512, escapes, 7, 1);
    const Result<HostMatrix> four = make_matrix(96, 512, escapes, 7, 4);
    ASSERT_TRUE(one.ok() && four.ok());
    EXPECT_EQ(one->words, four->words);
    EXPECT_EQ(one->coded.arena, four->coded.arena);
  }
}

TEST(BenchWeights, EscapesAreAsManyAsAskedFor) {
  constexpr uint64_t kRows = 512, kColumns = 2048;  // 2^20 weights
  EXPECT_EQ(make_matrix(kRows, kColumns, 0.0, 1, 2)->coded.escapes, 0U);
  for (const double rate : {1e-3, 1.5e-2, 0.3}) {
    const Result<HostMatrix> matrix = make_matrix(kRows, kColumns, rate, 1, 2);
    ASSERT_TRUE(matrix.ok());
    const double sigma = std::sqrt(rate / (kRows * kColumns));
    EXPECT_NEAR(matrix->coded.escape_rate(), rate, 5 * sigma) << rate;
  }
  // No row's window can hold less than its share of the values.
  const double most = make_matrix(kRows, kColumns, 1.0, 1, 2)->coded.escape_rate();
  EXPECT_GT(most, 0.9);
  EXPECT_LT(most, 1 - 8.0 / 112);
  const double trained = make_matrix(kRows, kColumns, {}, 1, 2)->coded.escape_rate();
  EXPECT_GT(trained, 1e-5);
  EXPECT_LT(trained, 1e-3);
}

TEST(BenchWeights, NoWeightIsInfinite) {
  const Result<HostMatrix> matrix = make_matrix(64, 1024, 1.0, 3, 1);
  ASSERT_TRUE(matrix.ok());
  for (const uint16_t word : matrix->words) ASSERT_LT(word & 0x7F80, 120 << 8);
}

TEST(BenchWeights, BitsCountEveryPlane) {
  const Result<HostMatrix> matrix = make_matrix(16, 512, 0.0, 1, 1);
  ASSERT_TRUE(matrix.ok());
  // 8 tiles of 1536 bytes, 16 windows, one record.
  EXPECT_EQ(matrix->coded.coded_bytes, 8 * 1536U + 16 + 32);
  EXPECT_DOUBLE_EQ(matrix->coded.bits_per_weight(), 8.0 * (8 * 1536 + 16 + 32) / (16 * 512));
}

}  // namespace
}  // namespace weightd::tools
