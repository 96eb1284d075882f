// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/gemm.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cfenv>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "store/f12.h"
#include "tests/kernels/guarded_bytes.h"
#include "tests/kernels/simd_targets.h"
#include "tools/pack/synth_weights.h"

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace weightd::kernels::cpu {
namespace {

using Words = std::vector<uint16_t>;

float to_float(uint16_t word) { return std::bit_cast<float>(uint32_t{word} << 16); }
uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return std::isnan(value) ? uint16_t{0x7FFF} : static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

/// One output, by the contract of gemm.h.
uint16_t reference(const uint16_t* x, const uint16_t* w, uint64_t k) {
  float p[16] = {};
  for (uint64_t i = 0; i < k; ++i) p[i % 16] = std::fma(to_float(x[i]), to_float(w[i]), p[i % 16]);
  float s[8];
  for (int i = 0; i < 8; ++i) s[i] = p[i] + p[i + 8];
  for (int i = 0; i < 4; ++i) s[i] = s[i] + s[i + 4];
  for (int i = 0; i < 2; ++i) s[i] = s[i] + s[i + 2];
  return to_bf16(s[0] + s[1]);
}

Words reference_product(const Words& x, const Words& w, uint64_t m, uint64_t n, uint64_t k) {
  Words y(m * n);
  for (uint64_t t = 0; t < m; ++t) {
    for (uint64_t r = 0; r < n; ++r) y[t * n + r] = reference(x.data() + t * k, w.data() + r * k, k);
  }
  return y;
}

/// A matrix in both forms. Owns the bytes that the views borrow.
struct Weights {
  Words words;
  uint64_t n = 0, k = 0;
  std::vector<std::byte> codes, windows, records, pool;
  store::F12Stats stats;

  Weights(Words content, uint64_t rows, uint64_t cols) : words(std::move(content)), n(rows), k(cols) {
    const f12::Geometry g{n, k, 1};
    codes.resize(g.codes_bytes());
    windows.resize(g.windows_bytes());
    records.resize(g.records_bytes());
    const Status status =
        store::f12_encode(std::as_bytes(std::span(words)), g, 0, g.units(), codes, windows, records, pool, 0, 1, &stats);
    EXPECT_TRUE(status.ok()) << status.to_string();
  }
  [[nodiscard]] F12Matrix coded() const { return {codes.data(), windows.data(), records.data(), pool.data(), pool.size(), n, k}; }
  [[nodiscard]] RawMatrix raw() const { return {reinterpret_cast<const std::byte*>(words.data()), n, k, k}; }
};

ConstBf16Matrix x_view(const Words& x, uint64_t m, uint64_t k) { return {x.data(), m, k, static_cast<int64_t>(k)}; }
Bf16Matrix y_view(Words& y, uint64_t m, uint64_t n) { return {y.data(), m, n, static_cast<int64_t>(n)}; }

template <typename Matrix>
Words product(const Matrix& w, const Words& x, uint64_t m, int threads = 1) {
  Words y(m * w.n, 0xDEAD);
  const Status status = gemm(w, {0, w.n}, x_view(x, m, w.k), y_view(y, m, w.n), threads);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return y;
}

/// First difference with its place; "" when equal.
std::string difference(const Words& have, const Words& want, uint64_t n) {
  if (have.size() != want.size()) return "sizes differ";
  for (size_t i = 0; i < have.size(); ++i) {
    if (have[i] == want[i]) continue;
    char text[96];
    std::snprintf(text, sizeof text, "token %zu, row %zu: 0x%04x, expected 0x%04x", i / n, i % n, have[i], want[i]);
    return text;
  }
  return "";
}

Words trained(uint64_t rows, uint64_t k, uint64_t seed) {
  Words words(rows * k);
  tools::synth_bf16(words, k, 0, seed, {}, 1);
  return words;
}
Words activations(uint64_t m, uint64_t k, uint64_t seed) {
  Words words(m * k);
  tools::synth_bf16(words, k, 0, seed, {.scale = 1.0, .row_scale_sigma = 0.5, .outlier_rate = 0.01}, 1);
  return words;
}
Words noise(uint64_t count, uint64_t seed) {
  Words words(count);
  tools::random_words(words, seed);
  return words;
}
/// Integers -2 to 2.
Words small_integers(uint64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  Words words(count);
  for (uint16_t& word : words) word = to_bf16(static_cast<float>(random() % 5) - 2);
  return words;
}

/// Both forms, all instruction sets, against the loop above.
void expect_contract(const Weights& w, const Words& x, uint64_t m) {
  SCOPED_TRACE("m " + std::to_string(m) + ", n " + std::to_string(w.n) + ", k " + std::to_string(w.k));
  const Words want = reference_product(x, w.words, m, w.n, w.k);
  test::for_each_simd_target([&] {
    EXPECT_EQ(difference(product(w.coded(), x, m), want, w.n), "");
    EXPECT_EQ(difference(product(w.raw(), x, m), want, w.n), "");
  });
}

// --- shapes ------------------------------------------------------------------------------------------------------------------

TEST(CpuGemm, CO_051_OddShapesGiveExactIntegers) {
  const std::array<uint64_t, 14> sizes = {1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257};
  const std::array<uint64_t, 8> batches = {1, 2, 3, 8, 9, 16, 17, 33};
  const Words all_x = small_integers(33 * 257, 1);
  for (const uint64_t n : sizes) {
    for (const uint64_t k : sizes) {
      const Weights w(small_integers(n * k, n * 1000 + k), n, k);
      for (const uint64_t m : batches) {
        const Words x(all_x.begin(), all_x.begin() + static_cast<ptrdiff_t>(m * k));
        Words want(m * n);
        for (uint64_t t = 0; t < m; ++t) {
          for (uint64_t r = 0; r < n; ++r) {
            float sum = 0;  // exact: at most 257 * 4
            for (uint64_t c = 0; c < k; ++c) sum += to_float(x[t * k + c]) * to_float(w.words[r * k + c]);
            want[t * n + r] = to_bf16(sum);
          }
        }
        ASSERT_EQ(difference(product(w.coded(), x, m), want, n), "") << m << " " << n << " " << k;
        ASSERT_EQ(difference(product(w.raw(), x, m), want, n), "") << m << " " << n << " " << k;
      }
    }
  }
}

TEST(CpuGemm, CO_051_OddShapesKeepTheOrderOfTheSums) {
  for (const uint64_t n : {1U, 8U, 15U, 17U, 64U, 129U}) {
    for (const uint64_t k : {1U, 7U, 15U, 16U, 17U, 63U, 64U, 65U, 257U, 511U, 512U, 513U, 1100U}) {
      const Weights w(trained(n, k, n + k), n, k);
      for (const uint64_t m : {1U, 2U, 3U, 5U, 6U, 7U, 13U}) expect_contract(w, activations(m, k, k), m);
    }
  }
}

TEST(CpuGemm, CO_044_EveryPairOfDimensionsAroundTheTile) {
  const std::array<uint64_t, 12> sizes = {1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 1000};
  for (const uint64_t n : sizes) {
    for (const uint64_t k : sizes) {
      Words counted(n * k);
      for (size_t i = 0; i < counted.size(); ++i) counted[i] = static_cast<uint16_t>(i % 65521);
      const Weights exact(counted, n, k);
      Words decoded(n * k);
      ASSERT_TRUE(decompress(exact.coded(), 0, n, std::as_writable_bytes(std::span(decoded)), 1).ok());
      ASSERT_EQ(decoded, counted) << n << " " << k;

      const Weights w(small_integers(n * k, n + k), n, k);
      const Words x = small_integers(2 * k, k);
      const Words want = reference_product(x, w.words, 2, n, k);
      ASSERT_EQ(difference(product(w.coded(), x, 2), want, n), "") << n << " " << k;
      ASSERT_EQ(difference(product(w.raw(), x, 2), want, n), "") << n << " " << k;
    }
  }
}

TEST(CpuGemm, CO_052_VocabularySizedHeads) {
  for (const auto& [n, k] : {std::pair<uint64_t, uint64_t>{50257, 96}, {32001, 64}, {51865, 48}, {49155, 128}}) {
    const Weights w(trained(n, k, n), n, k);
    for (const uint64_t m : {1U, 5U, 64U}) {
      const Words x = activations(m, k, n);
      const Words coded = product(w.coded(), x, m, 2);
      ASSERT_EQ(difference(coded, product(w.raw(), x, m, 2), n), "");
      for (uint64_t r = n - 3; r < n; ++r) {
        for (uint64_t t = 0; t < m; ++t) ASSERT_EQ(coded[t * n + r], reference(&x[t * k], &w.words[r * k], k)) << r << " " << t;
      }
    }
  }
}

TEST(CpuGemm, CO_059_AnyBatchGivesTheBitsOfBatchOne) {
  const uint64_t n = 48, k = 600;
  const Weights w(trained(n, k, 59), n, k);
  const Words x = activations(300, k, 60);
  Words one(300 * n);
  for (uint64_t t = 0; t < 300; ++t) {
    const Words y =
        product(w.coded(), Words(x.begin() + static_cast<ptrdiff_t>(t * k), x.begin() + static_cast<ptrdiff_t>((t + 1) * k)), 1);
    std::copy(y.begin(), y.end(), one.begin() + static_cast<ptrdiff_t>(t * n));
  }
  EXPECT_EQ(difference(one, reference_product(x, w.words, 300, n, k), n), "");
  std::vector<uint64_t> batches(130);
  std::iota(batches.begin(), batches.end(), uint64_t{1});
  for (const uint64_t m : {191U, 192U, 193U, 255U, 256U, 257U, 300U}) batches.push_back(m);
  for (const uint64_t m : batches) {
    const Words want(one.begin(), one.begin() + static_cast<ptrdiff_t>(m * n));
    ASSERT_EQ(difference(product(w.coded(), x, m), want, n), "") << m;
    ASSERT_EQ(difference(product(w.raw(), x, m), want, n), "") << m;
  }
}

TEST(CpuGemm, EmptyCalls) {
  const Weights w(trained(20, 40, 1), 20, 40);
  const Words x = activations(2, 40, 1);
  Words y(40, 0xDEAD);
  EXPECT_TRUE(gemm(w.coded(), {0, 20}, {nullptr, 0, 40, 40}, {nullptr, 0, 20, 20}, 1).ok());
  EXPECT_TRUE(gemm(w.coded(), {16, 16}, x_view(x, 2, 40), {nullptr, 2, 0, 0}, 1).ok());
  EXPECT_TRUE(gemm(w.raw(), {3, 3}, x_view(x, 2, 40), {nullptr, 2, 0, 0}, 1).ok());
  EXPECT_TRUE(decompress(w.coded(), 7, 7, {}, 1).ok());
  EXPECT_THAT(y, testing::Each(0xDEAD));
  const Weights no_columns({}, 20, 0);
  EXPECT_TRUE(gemm(no_columns.coded(), {0, 20}, {nullptr, 2, 0, 0}, y_view(y, 2, 20), 1).ok());
  EXPECT_THAT(y, testing::Each(0));
  y.assign(40, 0xDEAD);
  EXPECT_TRUE(gemm(no_columns.raw(), {0, 20}, {nullptr, 2, 0, 0}, y_view(y, 2, 20), 1).ok());
  EXPECT_THAT(y, testing::Each(0));
}

TEST(CpuGemm, RowRangesAndThreadsGiveTheSameBits) {
  const uint64_t n = 16 * 11 + 3, k = 700, m = 9;
  const Weights w(trained(n, k, 5), n, k);
  const Words x = activations(m, k, 6);
  const Words want = reference_product(x, w.words, m, n, k);
  for (const int threads : {1, 2, 7, 0}) {
    EXPECT_EQ(difference(product(w.coded(), x, m, threads), want, n), "") << threads;
    EXPECT_EQ(difference(product(w.raw(), x, m, threads), want, n), "") << threads;
  }
  for (const auto& [begin, end] : {std::pair<uint64_t, uint64_t>{0, 1}, {16, 17}, {32, 100}, {160, n}, {176, 178}}) {
    const uint64_t count = end - begin;
    for (const bool coded : {true, false}) {
      Words y(m * count, 0xDEAD);
      const Status status = coded ? gemm(w.coded(), {begin, end}, x_view(x, m, k), y_view(y, m, count), 2)
                                  : gemm(w.raw(), {begin, end}, x_view(x, m, k), y_view(y, m, count), 2);
      ASSERT_TRUE(status.ok()) << status.to_string();
      for (uint64_t t = 0; t < m; ++t) {
        for (uint64_t r = 0; r < count; ++r) ASSERT_EQ(y[t * count + r], want[t * n + begin + r]) << begin << " " << t << " " << r;
      }
    }
  }
  Words y(m * 5, 0xDEAD);
  ASSERT_TRUE(gemm(w.raw(), {13, 18}, x_view(x, m, k), y_view(y, m, 5), 1).ok());  // raw rows start anywhere
  for (uint64_t t = 0; t < m; ++t) {
    for (uint64_t r = 0; r < 5; ++r) ASSERT_EQ(y[t * 5 + r], want[t * n + 13 + r]);
  }
}

// --- values ------------------------------------------------------------------------------------------------------------------

TEST(CpuGemm, CO_034_All65536PatternsTimesTheIdentity) {
  Words ordered(65536);
  std::iota(ordered.begin(), ordered.end(), uint16_t{0});
  Words identity(65536, 0);
  for (size_t i = 0; i < 256; ++i) identity[i * 257] = 0x3F80;
  const Weights w(ordered, 256, 256);
  test::for_each_simd_target([&] {
    for (const bool coded : {true, false}) {
      const Words y = coded ? product(w.coded(), identity, 256) : product(w.raw(), identity, 256);
      for (uint32_t row = 0; row < 256; ++row) {
        const bool special = row == 0x7F || row == 0xFF;  // these rows hold infinities and NaNs, which meet 0
        for (uint32_t c = 0; c < 256; ++c) {
          const auto word = static_cast<uint16_t>(row * 256 + c);
          const uint16_t want = special ? 0x7FFF : word == 0x8000 ? 0 : word;
          ASSERT_EQ(y[c * 256 + row], want) << row << " " << c;
        }
      }
    }
    Words decoded(65536);
    ASSERT_TRUE(decompress(w.coded(), 0, 256, std::as_writable_bytes(std::span(decoded)), 1).ok());
    ASSERT_EQ(decoded, ordered);
  });
  std::shuffle(ordered.begin(), ordered.end(), std::mt19937_64(34));
  expect_contract(Weights(ordered, 256, 256), activations(3, 256, 34), 3);
}

TEST(CpuGemm, CO_035_AnyNanBecomesOnePattern) {
  for (const int nan : {0x7F81, 0x7FA0, 0x7FBF, 0x7FC0, 0x7FFF, 0xFF81, 0xFFA0, 0xFFBF, 0xFFC0, 0xFFFF}) {
    Words words(3 * 64, 0x3F80);
    words[64 + 17] = static_cast<uint16_t>(nan);
    const Weights w(words, 3, 64);
    Words x(2 * 64, 0x3F80);
    test::for_each_simd_target([&] {
      EXPECT_THAT(product(w.coded(), x, 2), testing::ElementsAre(0x4280, 0x7FFF, 0x4280, 0x4280, 0x7FFF, 0x4280));
      EXPECT_THAT(product(w.raw(), x, 2), testing::ElementsAre(0x4280, 0x7FFF, 0x4280, 0x4280, 0x7FFF, 0x4280));
    });
    const Weights ones(Words(2 * 64, 0x3F80), 2, 64);
    x[64] = static_cast<uint16_t>(nan);
    EXPECT_THAT(product(ones.coded(), x, 2), testing::ElementsAre(0x4280, 0x4280, 0x7FFF, 0x7FFF));
  }
}

TEST(CpuGemm, CO_036_SignsOfZeroFollowTheContract) {
  // -2^-240 rounds to -0 in every lane that has a column; lanes without one hold +0, and +0 + -0 is +0.
  for (uint64_t k = 1; k < 200; ++k) {
    const Weights w(Words(20 * k, 0x8380), 20, k);  // -2^-120
    const Words x(2 * k, 0x0380);                   // 2^-120
    const uint16_t want = k >= 16 ? 0x8000 : 0x0000;
    EXPECT_THAT(product(w.coded(), x, 2), testing::Each(want)) << k;
    EXPECT_THAT(product(w.coded(), x, 1), testing::SizeIs(20)) << k;
    EXPECT_THAT(product(w.raw(), x, 2), testing::Each(want)) << k;
    EXPECT_EQ(reference(x.data(), w.words.data(), k), want);
    const Words one(k, 0x0380);
    EXPECT_THAT(product(w.coded(), one, 1), testing::Each(want)) << k;
    EXPECT_THAT(product(w.raw(), one, 1), testing::Each(want)) << k;
  }
}

TEST(CpuGemm, CO_037_ConstantTensors) {
  const uint64_t n = 40, k = 4096;
  const Words x = activations(4, k, 37);
  for (const int word : {0x0000, 0x3F80, 0x8000, 0x0001, 0x7F7F})
    expect_contract(Weights(Words(n * k, static_cast<uint16_t>(word)), n, k), x, 4);
  Words last(n * k, 0x3F80);
  last.back() = 0xC000;
  expect_contract(Weights(last, n, k), x, 4);
  Words alternating(n * k);
  for (size_t i = 0; i < alternating.size(); ++i) alternating[i] = i % 2 == 0 ? 0x0000 : 0x3F80;
  expect_contract(Weights(alternating, n, k), x, 1);
}

TEST(CpuGemm, CO_038_DataThatDoNotCompress) {
  const uint64_t n = 70, k = 1090;
  const Weights w(noise(n * k, 38), n, k);
  EXPECT_GT(w.stats.dense_groups, 0U);
  expect_contract(w, activations(3, k, 38), 3);
  // NaNs hide most of that; the same with finite weights of all sizes.
  Words finite = w.words;
  for (uint16_t& word : finite) word = (word & 0x7F80) == 0x7F80 ? static_cast<uint16_t>(word & 0xBFFF) : word;
  expect_contract(Weights(finite, n, k), activations(1, k, 39), 1);
  expect_contract(Weights(finite, n, k), activations(7, k, 39), 7);
}

TEST(CpuGemm, EveryEscapeRate) {
  const uint64_t n = 32, k = 1536;
  std::mt19937_64 random(7);
  for (const double rate : {0.0, 1e-4, 1e-3, 0.01, 0.02, 0.03, 0.06, 0.25, 1.0}) {
    Words words(n * k);
    std::bernoulli_distribution escape(rate);
    for (uint16_t& word : words) {
      const auto rest = static_cast<uint16_t>(random() & 0x80FF);
      const auto spread = static_cast<uint16_t>(random() % 64);
      word = static_cast<uint16_t>(rest | (escape(random) ? 0x10 + spread : 0x38 + spread % 8) << 8);
    }
    const Weights w(words, n, k);
    SCOPED_TRACE(rate);
    expect_contract(w, activations(1, k, 8), 1);
    expect_contract(w, activations(4, k, 8), 4);
  }
}

TEST(CpuGemm, OneEscapeAtEveryPositionOfATile) {
  const uint64_t k = 192;
  const Words x = activations(2, k, 3);
  const Words x1(x.begin(), x.begin() + static_cast<ptrdiff_t>(k));
  const Words before = reference_product(x, Words(16 * k, 0x3C55), 2, 16, k);
  for (uint32_t row = 0; row < 16; ++row) {
    for (uint32_t column = 0; column < 64; ++column) {
      Words words(16 * k, 0x3C55);
      words[row * k + 64 + column] = 0xC123;
      const Weights w(words, 16, k);
      Words want = before;
      want[row] = reference(&x[0], &words[row * k], k);
      want[16 + row] = reference(&x[k], &words[row * k], k);
      ASSERT_EQ(difference(product(w.coded(), x, 2), want, 16), "") << row << " " << column;
      ASSERT_EQ(difference(product(w.coded(), x1, 1), Words(want.begin(), want.begin() + 16), 16), "") << row << " " << column;
    }
  }
}

TEST(CpuGemm, EscapesInTheRecordInAListAndDense) {
  const uint64_t k = 512;
  for (const size_t escapes : {1U, 6U, 7U, 254U, 255U, 900U}) {
    Words words(16 * k, 0x3C01);
    for (size_t i = 0; i < escapes; ++i) words[i * 7919 % words.size()] = static_cast<uint16_t>(0x5000 + i);
    const Weights w(words, 16, k);
    ASSERT_EQ(w.stats.escapes, escapes);
    expect_contract(w, activations(1, k, escapes), 1);
    expect_contract(w, activations(3, k, escapes), 3);
  }
}

TEST(CpuGemm, ProductsThatOverflowOrUnderflowRoundOnce) {
  // The fused operation sees the exact product: 2^130 - 2^128 is infinite, 2^128 - 2^127 is not; tiny products still decide ties.
  const uint64_t k = 640;
  std::mt19937_64 random(9);
  Words words(32 * k), x(5 * k);
  const auto any_finite = [&random](uint16_t& word) {
    word = static_cast<uint16_t>(random());
    if ((word & 0x7F80) == 0x7F80) word = static_cast<uint16_t>(word & 0x80FF);
  };
  for (uint16_t& word : words) any_finite(word);
  for (uint16_t& value : x) any_finite(value);
  expect_contract(Weights(words, 32, k), x, 5);
  // Only tiny ones, so that sums stay among the subnormals.
  for (uint16_t& word : words) word = static_cast<uint16_t>((random() % 0x1000 + 0x1000) | (random() & 0x8000));
  for (uint16_t& value : x) value = static_cast<uint16_t>((random() % 0x0C00 + 0x1000) | (random() & 0x8000));
  expect_contract(Weights(words, 32, k), x, 5);
  // A product beyond the largest number that an earlier sum brings back.
  Words big(16 * 32, 0);
  big[0] = 0xFF00;   // -2^127
  big[16] = 0x7F00;  // times 2: 2^128
  Words factors(32, 0);
  factors[0] = 0x3F80;
  factors[16] = 0x4000;
  EXPECT_EQ(product(Weights(big, 16, 32).coded(), factors, 1)[0], 0x7F00);
  expect_contract(Weights(big, 16, 32), factors, 1);
}

TEST(CpuGemm, CO_057_InfinitiesMeetZeros) {
  Words words(64 * 64, 0x3F80);
  words[3 * 64 + 5] = 0x7F80;
  const Weights w(words, 64, 64);
  Words x(2 * 64, 0x3F80);
  x[5] = 0;  // token 0 meets the infinity with 0, token 1 with 1
  test::for_each_simd_target([&] {
    for (const bool coded : {true, false}) {
      const Words y = coded ? product(w.coded(), x, 2) : product(w.raw(), x, 2);
      for (uint64_t r = 0; r < 64; ++r) {
        EXPECT_EQ(y[r], r == 3 ? 0x7FFF : 0x427C) << r;  // 63
        EXPECT_EQ(y[64 + r], r == 3 ? 0x7F80 : 0x4280) << r;
      }
    }
  });
  // Infinite activations meet padding rows and columns, which are not there.
  const Weights odd(Words(17 * 65, 0x3F80), 17, 65);
  EXPECT_THAT(product(odd.coded(), Words(65, 0x7F80), 1), testing::Each(0x7F80));
  EXPECT_THAT(product(odd.coded(), Words(3 * 65, 0x7F80), 3), testing::Each(0x7F80));
  EXPECT_THAT(product(odd.raw(), Words(65, 0x7F80), 1), testing::Each(0x7F80));
}

TEST(CpuGemm, TokensDoNotInfluenceOneAnother) {
  const uint64_t n = 33, k = 130;
  const Weights w(trained(n, k, 1), n, k);
  Words x = activations(8, k, 2);
  const Words want = product(w.coded(), x, 8);
  for (uint64_t c = 0; c < k; ++c) x[3 * k + c] = 0x7FC0;
  const Words y = product(w.coded(), x, 8);
  for (uint64_t t = 0; t < 8; ++t) {
    for (uint64_t r = 0; r < n; ++r) EXPECT_EQ(y[t * n + r], t == 3 ? 0x7FFF : want[t * n + r]);
  }
}

TEST(CpuGemm, FloatModeOfTheCallerHasNoInfluence) {
  const uint64_t n = 32, k = 300;
  std::mt19937_64 random(3);
  Words words(n * k), x(2 * k);
  for (uint16_t& word : words) word = static_cast<uint16_t>((random() % 0x1000 + 0x1000) | (random() & 0x8000));
  for (uint16_t& value : x) value = static_cast<uint16_t>((random() % 0x0C00 + 0x1000) | (random() & 0x8000));
  const Weights w(words, n, k);
  const Words want = product(w.coded(), x, 2);
  ASSERT_TRUE(std::any_of(want.begin(), want.end(), [](uint16_t v) { return (v & 0x7FFF) != 0 && (v & 0x7F80) == 0; }));
  std::fenv_t saved;
  std::fegetenv(&saved);
  ASSERT_EQ(std::fesetround(FE_UPWARD), 0);
#if defined(__SSE__)
  _mm_setcsr(_mm_getcsr() | 0x8040);  // flush to zero, denormals are zero
  const unsigned mode = _mm_getcsr();
#endif
  const Words y = product(w.coded(), x, 2);
  const Words raw = product(w.raw(), x, 2, 2);
  const int rounding = std::fegetround();
#if defined(__SSE__)
  const unsigned mode_after = _mm_getcsr();
  EXPECT_EQ(mode_after & 0xFFC0, mode & 0xFFC0);
#endif
  std::fesetenv(&saved);
  EXPECT_EQ(rounding, FE_UPWARD);
  EXPECT_EQ(difference(y, want, n), "");
  EXPECT_EQ(difference(raw, want, n), "");
}

// --- memory ------------------------------------------------------------------------------------------------------------------

TEST(CpuGemm, CO_041_CO_048_WeightsAndActivationsAreOnlyReadAndOnlyInside) {
  test::for_each_simd_target([] {
    for (const uint64_t k : {1U, 15U, 16U, 31U, 63U, 64U, 65U, 100U, 513U}) {
      for (const uint64_t n : {1U, 15U, 16U, 17U}) {
        const Weights w(k % 2 == 0 ? trained(n, k, k) : noise(n * k, k), n, k);
        test::GuardedBytes codes(w.codes), windows(w.windows), records(w.records), pool(w.pool),
            words(std::as_bytes(std::span(w.words)));
        for (test::GuardedBytes* bytes : {&codes, &windows, &records, &pool, &words}) bytes->make_read_only();
        const F12Matrix coded{
            codes.span().data(), windows.span().data(), records.span().data(), pool.span().data(), w.pool.size(), n, k};
        const RawMatrix raw{words.span().data(), n, k, k};
        for (const uint64_t m : {1U, 3U, 7U}) {
          const Words x = activations(m, k, m);
          test::GuardedBytes x_bytes(std::as_bytes(std::span(x))), y_bytes(m * n * 2);
          x_bytes.make_read_only();
          const ConstBf16Matrix xv{reinterpret_cast<const uint16_t*>(x_bytes.span().data()), m, k, static_cast<int64_t>(k)};
          const Bf16Matrix yv{reinterpret_cast<uint16_t*>(y_bytes.span().data()), m, n, static_cast<int64_t>(n)};
          const Words want = reference_product(x, w.words, m, n, k);
          ASSERT_TRUE(gemm(coded, {0, n}, xv, yv, 1).ok());
          ASSERT_EQ(std::memcmp(yv.data, want.data(), m * n * 2), 0) << m << " " << n << " " << k;
          std::memset(yv.data, 0, m * n * 2);
          ASSERT_TRUE(gemm(raw, {0, n}, xv, yv, 1).ok());
          ASSERT_EQ(std::memcmp(yv.data, want.data(), m * n * 2), 0) << m << " " << n << " " << k;
        }
        test::GuardedBytes out(n * k * 2);
        ASSERT_TRUE(decompress(coded, 0, n, out.span(), 1).ok());
        ASSERT_EQ(std::memcmp(out.span().data(), w.words.data(), n * k * 2), 0);
      }
    }
  });
}

TEST(CpuGemm, PlanesThatSkippedValidationStayInsideThePool) {
  // The loader validates; this is the second line of defence. Exact allocations, so that a sanitizer build sees any excess.
  const uint64_t n = 32, k = 600;
  std::mt19937_64 random(5);
  const Weights good(noise(n * k, 4), n, k);
  const Words x = activations(2, k, 1);
  Words y(2 * n), out(n * k);
  for (int round = 0; round < 200; ++round) {
    Weights w = good;
    for (int edit = 0; edit < 6; ++edit) w.records[random() % w.records.size()] = static_cast<std::byte>(random());
    w.pool.resize(random() % (w.pool.size() + 1));
    w.pool.shrink_to_fit();
    EXPECT_TRUE(gemm(w.coded(), {0, n}, x_view(x, 2, k), y_view(y, 2, n), 1).ok());
    EXPECT_TRUE(gemm(w.coded(), {0, n}, x_view(x, 1, k), y_view(y, 1, n), 1).ok());
    EXPECT_TRUE(decompress(w.coded(), 0, n, std::as_writable_bytes(std::span(out)), 1).ok());
  }
}

TEST(CpuGemm, CO_055_AnyAlignment) {
  const uint64_t n = 35, k = 150, m = 4;
  const Weights w(trained(n, k, 55), n, k);
  const Words x = activations(m, k, 55);
  const Words want = reference_product(x, w.words, m, n, k);
  for (const uint64_t shift : {1U, 2U, 4U, 5U}) {  // elements: 2, 4, 8, 10 bytes
    const uint64_t x_stride = k + shift, y_stride = n + 2 * shift + 1;
    Words xs(shift + m * x_stride, 0x7FC0), ys(shift + m * y_stride, 0xDEAD);
    for (uint64_t t = 0; t < m; ++t) std::copy_n(&x[t * k], k, &xs[shift + t * x_stride]);
    for (const bool coded : {true, false}) {
      std::fill(ys.begin(), ys.end(), uint16_t{0xDEAD});
      const ConstBf16Matrix xv{xs.data() + shift, m, k, static_cast<int64_t>(x_stride)};
      const Bf16Matrix yv{ys.data() + shift, m, n, static_cast<int64_t>(y_stride)};
      const Status status = coded ? gemm(w.coded(), {0, n}, xv, yv, 1) : gemm(w.raw(), {0, n}, xv, yv, 1);
      ASSERT_TRUE(status.ok()) << status.to_string();
      for (uint64_t i = 0; i < ys.size(); ++i) {
        const bool inside = i >= shift && (i - shift) % y_stride < n;
        const uint64_t token = inside ? (i - shift) / y_stride : 0, row = inside ? (i - shift) % y_stride : 0;
        ASSERT_EQ(ys[i], inside ? want[token * n + row] : 0xDEAD) << i;
      }
    }
  }
  // Planes and raw words at odd byte addresses, rows apart.
  std::vector<std::byte> raw(1 + n * (k + 3) * 2);
  for (uint64_t r = 0; r < n; ++r) std::memcpy(raw.data() + 1 + r * (k + 3) * 2, &w.words[r * k], k * 2);
  EXPECT_EQ(difference(product(RawMatrix{raw.data() + 1, n, k, k + 3}, x, m), want, n), "");
  std::vector<std::vector<std::byte>> planes;
  for (const auto* plane : {&w.codes, &w.windows, &w.records, &w.pool}) {
    planes.emplace_back(1);
    planes.back().insert(planes.back().end(), plane->begin(), plane->end());
  }
  const F12Matrix odd{&planes[0][1], &planes[1][1], &planes[2][1], planes[3].data() + 1, w.pool.size(), n, k};
  EXPECT_EQ(difference(product(odd, x, m), want, n), "");
}

TEST(CpuGemm, CO_056_EveryOutputIsWrittenAndNothingElse) {
  const uint64_t k = 64, canary = 2048;
  for (const uint64_t n : {1440U, 1472U, 1536U, 1537U}) {
    const Weights w(small_integers(n * k, n), n, k);
    for (const uint64_t m : {1U, 63U, 64U, 65U}) {
      const Words x = small_integers(m * k, m);
      Words buffer(canary + m * n + canary, 0xDEAD);
      ASSERT_TRUE(gemm(w.coded(), {0, n}, x_view(x, m, k), {buffer.data() + canary, m, n, static_cast<int64_t>(n)}, 2).ok());
      const auto inside = buffer.begin() + canary;
      const auto end = inside + static_cast<ptrdiff_t>(m * n);
      EXPECT_EQ(std::count(inside, end, uint16_t{0xDEAD}), 0);
      EXPECT_TRUE(std::all_of(buffer.begin(), inside, [](uint16_t v) { return v == 0xDEAD; }));
      EXPECT_TRUE(std::all_of(end, buffer.end(), [](uint16_t v) { return v == 0xDEAD; }));
      EXPECT_EQ(difference(Words(inside, end), product(w.raw(), x, m), n), "");
    }
  }
}

/// Address space that costs memory only where it is written.
class SparseBytes {
 public:
  explicit SparseBytes(size_t size) : size_(size) {
    data_ = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    WEIGHTD_CHECK(data_ != MAP_FAILED);
  }
  SparseBytes(const SparseBytes&) = delete;
  SparseBytes& operator=(const SparseBytes&) = delete;
  ~SparseBytes() { munmap(data_, size_); }
  [[nodiscard]] std::byte* get() const { return static_cast<std::byte*>(data_); }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

TEST(CpuGemm, CO_045_CO_053_IndexesBeyond32Bits) {
  // The last rows of a matrix of 2^32 elements and more, tokens and outputs 2^20 elements apart: every offset passes 32 bits.
  const uint64_t k = 4096, n = (uint64_t{1} << 20) + 7, m = 4100;
  const Weights tail(trained(16 + 7, k, 45), 16 + 7, k);
  const uint64_t first_row = n - 23;
  ASSERT_EQ(first_row % 16, 0U);
  const f12::Geometry g{n, k, 1}, part{23, k, 1};
  const uint64_t unit = first_row / 16;
  const SparseBytes codes(g.codes_bytes()), windows(g.windows_bytes()), records(g.records_bytes()), raw(g.raw_bytes());
  std::memcpy(codes.get() + unit * g.tiles() * f12::kTileBytes, tail.codes.data(), part.codes_bytes());
  std::memcpy(windows.get() + unit * 16, tail.windows.data(), part.windows_bytes());
  std::memcpy(records.get() + unit * g.groups() * f12::kRecordBytes, tail.records.data(), part.records_bytes());
  std::memcpy(raw.get() + first_row * k * 2, tail.words.data(), tail.words.size() * 2);
  const F12Matrix coded_view{codes.get(), windows.get(), records.get(), tail.pool.data(), tail.pool.size(), n, k};
  const RawMatrix raw_view{raw.get(), n, k, k};

  const uint64_t stride = uint64_t{1} << 20;
  const SparseBytes xs(m * stride * 2), ys(m * stride * 2);
  auto* x = reinterpret_cast<uint16_t*>(xs.get());
  auto* y = reinterpret_cast<uint16_t*>(ys.get());
  const Words last = activations(1, k, 46);
  std::copy(last.begin(), last.end(), x + (m - 1) * stride);
  Words want(23);
  for (uint64_t r = 0; r < 23; ++r) want[r] = reference(last.data(), &tail.words[r * k], k);
  for (const bool coded : {true, false}) {
    const ConstBf16Matrix xv{x, m, k, static_cast<int64_t>(stride)};
    const Bf16Matrix yv{y, m, 23, static_cast<int64_t>(stride)};
    uint16_t* out = y + (m - 1) * stride;
    std::fill_n(out, 23, uint16_t{0xDEAD});
    const Status status = coded ? gemm(coded_view, {first_row, n}, xv, yv, 2) : gemm(raw_view, {first_row, n}, xv, yv, 2);
    ASSERT_TRUE(status.ok()) << status.to_string();
    EXPECT_EQ(Words(out, out + 23), want);
  }
  Words decoded(23 * k);
  ASSERT_TRUE(decompress(coded_view, first_row, n, std::as_writable_bytes(std::span(decoded)), 2).ok());
  EXPECT_EQ(decoded, tail.words);
}

// --- refusals ----------------------------------------------------------------------------------------------------------------

TEST(CpuGemm, CO_054_StridesBelowTheColumnsAreRefused) {
  const uint64_t n = 20, k = 40;
  const Weights w(trained(n, k, 54), n, k);
  const Words x = activations(2, k, 54);
  const Words want = reference_product(x, w.words, 1, n, k);
  for (const int64_t x_stride : {int64_t{39}, int64_t{0}, int64_t{-40}, int64_t{40}}) {
    for (const int64_t y_stride : {int64_t{19}, int64_t{0}, int64_t{-20}, int64_t{20}}) {
      Words y(2 * n, 0xDEAD);
      const Status two = gemm(w.coded(), {0, n}, {x.data(), 2, k, x_stride}, {y.data(), 2, n, y_stride}, 1);
      const Status two_raw = gemm(w.raw(), {0, n}, {x.data(), 2, k, x_stride}, {y.data(), 2, n, y_stride}, 1);
      const bool right = x_stride == 40 && y_stride == 20;
      EXPECT_EQ(two.code(), right ? StatusCode::kOk : StatusCode::kInvalidArgument);
      EXPECT_EQ(two_raw.code(), two.code());
      if (!right) {
        EXPECT_THAT(y, testing::Each(0xDEAD));
      }
      ASSERT_TRUE(gemm(w.coded(), {0, n}, {x.data(), 1, k, x_stride}, {y.data(), 1, n, y_stride}, 1).ok());
      EXPECT_EQ(difference(Words(y.begin(), y.begin() + n), want, n), "");
      ASSERT_TRUE(gemm(w.raw(), {0, n}, {x.data(), 1, k, x_stride}, {y.data(), 1, n, y_stride}, 1).ok());
      EXPECT_EQ(difference(Words(y.begin(), y.begin() + n), want, n), "");
    }
  }
  RawMatrix narrow = w.raw();
  narrow.row_stride = k - 1;
  Words y(n);
  EXPECT_EQ(gemm(narrow, {0, n}, x_view(x, 1, k), y_view(y, 1, n), 1).code(), StatusCode::kInvalidArgument);
}

TEST(CpuGemm, WrongShapesAreRefused) {
  const uint64_t n = 40, k = 40;
  const Weights w(trained(n, k, 1), n, k);
  const Words x = activations(2, k + 1, 1);
  Words y(2 * n + 2, 0xDEAD);
  const auto run = [&](RowRange rows, const ConstBf16Matrix& xv, const Bf16Matrix& yv) {
    const StatusCode coded = gemm(w.coded(), rows, xv, yv, 1).code();
    EXPECT_EQ(gemm(w.raw(), rows, xv, yv, 1).code(), coded);
    return coded;
  };
  EXPECT_EQ(run({0, n}, x_view(x, 2, k + 1), y_view(y, 2, n)), StatusCode::kInvalidArgument);
  EXPECT_EQ(run({0, n}, x_view(x, 2, k), y_view(y, 1, n)), StatusCode::kInvalidArgument);
  EXPECT_EQ(run({0, n}, x_view(x, 2, k), y_view(y, 2, n + 1)), StatusCode::kInvalidArgument);
  EXPECT_EQ(run({0, n - 1}, x_view(x, 2, k), y_view(y, 2, n)), StatusCode::kInvalidArgument);
  EXPECT_EQ(run({0, n + 1}, x_view(x, 2, k), y_view(y, 2, n + 1)), StatusCode::kInvalidArgument);
  EXPECT_EQ(run({32, 16}, x_view(x, 2, k), y_view(y, 2, 0)), StatusCode::kInvalidArgument);
  EXPECT_EQ(run({0, n}, {nullptr, 2, k, 40}, y_view(y, 2, n)), StatusCode::kInvalidArgument);
  EXPECT_EQ(run({0, n}, {x.data(), 2, k, INT64_MAX}, y_view(y, 2, n)), StatusCode::kInvalidArgument);
  EXPECT_EQ(run({0, n}, {x.data(), UINT64_MAX, k, 40}, {y.data(), UINT64_MAX, n, 40}), StatusCode::kInvalidArgument);
  EXPECT_EQ(gemm(w.coded(), {8, n}, x_view(x, 2, k), y_view(y, 2, n - 8), 1).code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(y, testing::Each(0xDEAD));
}

TEST(CpuGemm, CO_050_HugeSizesAreRefused) {
  const Words x(64);
  Words y(64);
  for (const auto& [n, k] : {std::pair<uint64_t, uint64_t>{uint64_t{1} << 62, 4},
                             {4, uint64_t{1} << 62},
                             {~uint64_t{0}, ~uint64_t{0}},
                             {0xFFFFFFFF, 0xFFFFFFFF}}) {
    const F12Matrix w{nullptr, nullptr, nullptr, nullptr, 0, n, k};
    EXPECT_EQ(gemm(w, {0, 1}, {x.data(), 1, k, 1}, y_view(y, 1, 1), 1).code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(decompress(w, 0, 1, std::as_writable_bytes(std::span(y)), 1).code(), StatusCode::kInvalidArgument);
    if (n > 0xFFFFFFFF || k > 0xFFFFFFFF) {
      const RawMatrix raw{nullptr, n, k, k};
      EXPECT_EQ(gemm(raw, {0, 1}, {x.data(), 1, k, 1}, y_view(y, 1, 1), 1).code(), StatusCode::kInvalidArgument);
    }
  }
}

TEST(CpuGemm, CO_058_OverlapOfOutputAndInputsIsRefused) {
  const uint64_t n = 64, k = 64;
  Weights w(noise(n * k, 58), n, k);
  const Weights before = w;
  Words x = activations(3, k, 58);
  const Words x_before = x;
  const auto run = [&](std::byte* y, bool raw) {
    const Bf16Matrix yv{reinterpret_cast<uint16_t*>(y), 2, n, static_cast<int64_t>(n)};
    return raw ? gemm(w.raw(), {0, n}, x_view(x, 2, k), yv, 1).code() : gemm(w.coded(), {0, n}, x_view(x, 2, k), yv, 1).code();
  };
  auto* x_bytes = reinterpret_cast<std::byte*>(x.data());
  for (const bool raw : {false, true}) {
    EXPECT_EQ(run(x_bytes, raw), StatusCode::kInvalidArgument);
    EXPECT_EQ(run(x_bytes + 16, raw), StatusCode::kInvalidArgument);
    EXPECT_EQ(run(x_bytes + 254, raw), StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(run(w.codes.data() + 512, false), StatusCode::kInvalidArgument);
  EXPECT_EQ(run(w.codes.data() + w.codes.size() - 2, false), StatusCode::kInvalidArgument);
  EXPECT_EQ(run(w.windows.data(), false), StatusCode::kInvalidArgument);
  EXPECT_EQ(run(w.records.data() + 2, false), StatusCode::kInvalidArgument);
  EXPECT_EQ(run(w.pool.data() + 64, false), StatusCode::kInvalidArgument);
  EXPECT_EQ(run(reinterpret_cast<std::byte*>(w.words.data()) + 640, true), StatusCode::kInvalidArgument);
  EXPECT_EQ(x, x_before);
  EXPECT_EQ(w.codes, before.codes);
  EXPECT_EQ(w.windows, before.windows);
  EXPECT_EQ(w.records, before.records);
  EXPECT_EQ(w.pool, before.pool);
  EXPECT_EQ(w.words, before.words);
  // Side by side is no overlap.
  Words both(2 * k + 2 * n);
  std::copy_n(x.begin(), 2 * k, both.begin());
  EXPECT_TRUE(gemm(w.coded(), {0, n}, {both.data(), 2, k, 64}, {both.data() + 2 * k, 2, n, 64}, 1).ok());
}

// --- decompression -----------------------------------------------------------------------------------------------------------

TEST(CpuDecompress, AnyRowsAnyThreads) {
  const uint64_t n = 16 * 5 + 7, k = 333;
  Words words = trained(n, k, 2);
  const Words rough = noise(20 * k, 3);
  std::copy(rough.begin(), rough.end(), words.begin() + 30 * 333);
  const Weights w(words, n, k);
  test::for_each_simd_target([&] {
    for (const auto& [begin, end] : {std::pair<uint64_t, uint64_t>{0, n}, {0, 1}, {15, 17}, {16, 32}, {5, 9}, {31, 80}, {86, 87}}) {
      for (const int threads : {1, 2, 7}) {
        Words out((end - begin) * k, 0xDEAD);
        ASSERT_TRUE(decompress(w.coded(), begin, end, std::as_writable_bytes(std::span(out)), threads).ok());
        ASSERT_TRUE(std::equal(out.begin(), out.end(), words.begin() + static_cast<ptrdiff_t>(begin * k))) << begin << " " << end;
      }
    }
  });
}

TEST(CpuDecompress, CO_042_OutputOfTheWrongSizeIsRefused) {
  const Weights w(noise(64 * 64, 42), 64, 64);
  std::vector<std::byte> buffer(4096 + 8192 + 4096, std::byte{0xCC});
  for (const size_t size : {8190U, 8191U, 8193U, 0U}) {
    EXPECT_EQ(decompress(w.coded(), 0, 64, std::span(buffer).subspan(4096, size), 1).code(), StatusCode::kInvalidArgument);
  }
  EXPECT_THAT(buffer, testing::Each(std::byte{0xCC}));
  EXPECT_TRUE(decompress(w.coded(), 0, 64, std::span(buffer).subspan(4096, 8192), 2).ok());
  EXPECT_EQ(std::memcmp(buffer.data() + 4096, w.words.data(), 8192), 0);
  EXPECT_TRUE(std::all_of(buffer.begin(), buffer.begin() + 4096, [](std::byte b) { return b == std::byte{0xCC}; }));
  EXPECT_TRUE(std::all_of(buffer.begin() + 4096 + 8192, buffer.end(), [](std::byte b) { return b == std::byte{0xCC}; }));
  EXPECT_EQ(decompress(w.coded(), 1, 65, std::span(buffer).subspan(4096, 8192), 1).code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace weightd::kernels::cpu
