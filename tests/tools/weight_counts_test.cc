// SPDX-License-Identifier: Apache-2.0
#include "tools/pack/weight_counts.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "store/f12.h"
#include "tools/pack/synth_weights.h"

namespace weightd::tools {
namespace {

std::vector<uint16_t> all_patterns() {
  std::vector<uint16_t> words(65536);
  std::iota(words.begin(), words.end(), uint16_t{0});
  return words;
}

TEST(Bf16Counts, UniformPatternsHaveFullEntropy) {
  Bf16Counts counts;
  counts.add(all_patterns(), 2);
  EXPECT_EQ(counts.weights(), 65536U);
  EXPECT_DOUBLE_EQ(counts.exponent_entropy(), 8.0);
  EXPECT_DOUBLE_EQ(counts.sign_mantissa_entropy(), 8.0);
  EXPECT_DOUBLE_EQ(counts.joint_entropy(), 16.0);
  const SpecialCounts special = counts.special();
  EXPECT_EQ(special.inf, 2U);
  EXPECT_EQ(special.nan, 254U);
  EXPECT_EQ(special.zero, 2U);
  EXPECT_EQ(special.subnormal, 254U);
}

TEST(Bf16Counts, OneValueHasNone) {
  Bf16Counts counts;
  counts.add(std::vector<uint16_t>(1000, 0x3F80), 1);
  EXPECT_EQ(counts.joint_entropy(), 0.0);
  EXPECT_FALSE(std::signbit(counts.joint_entropy()));
}

TEST(Bf16Counts, NothingHasNoEntropyAtAll) { EXPECT_TRUE(std::isnan(Bf16Counts().joint_entropy())); }

TEST(Bf16Counts, ThreadsChangeNothing) {
  std::vector<uint16_t> words(3'000'000);
  random_words(words, 7);
  Bf16Counts one, three;
  one.add(words, 1);
  three.add(words, 3);
  EXPECT_EQ(one.joint_entropy(), three.joint_entropy());
  EXPECT_EQ(one.special().nan, three.special().nan);
}

/// The entropies of Gaussian weights with lognormal row scales, computed without any sample.
struct KnownEntropy {
  double sigma, exponent, sign_mantissa, joint;
};
TEST(Bf16Counts, GaussianWeightsHaveTheComputedEntropies) {
  for (const KnownEntropy& known : {KnownEntropy{0.0, 2.545, 7.971, 10.463}, KnownEntropy{0.3, 2.637, 7.971, 10.569}}) {
    std::vector<uint16_t> words(uint64_t{4} << 20);
    synth_bf16(words, 512, 0, 3, {0.02, known.sigma, 0.0}, 2);
    Bf16Counts counts;
    counts.add(words, 2);
    EXPECT_NEAR(counts.exponent_entropy(), known.exponent, 0.02) << known.sigma;
    EXPECT_NEAR(counts.sign_mantissa_entropy(), known.sign_mantissa, 0.005) << known.sigma;
    EXPECT_NEAR(counts.joint_entropy(), known.joint, 0.02) << known.sigma;
  }
}

TEST(CountSpecial, CO_040_InfinitiesAndNaNsOfEveryFloat) {
  const auto bytes = [](const auto& words) { return std::as_bytes(std::span(words)); };
  const std::vector<uint16_t> bf16 = {0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81, 0x0000, 0x8000, 0x0001, 0x3F80};
  const std::vector<uint16_t> f16 = {0x7C00, 0xFC00, 0x7E00, 0xFFFF, 0x7C01, 0x0000, 0x8000, 0x0001, 0x3C00};
  const std::vector<uint32_t> f32 = {0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF, 0x7F800001, 0, 0x80000000, 1, 0x3F800000};
  const std::vector<uint64_t> f64 = {
      0x7FF0000000000000, 0xFFF0000000000000, 0x7FF8000000000000, UINT64_MAX, 0x7FF0000000000001, 0, 0x8000000000000000, 1,
      0x3FF0000000000000};
  for (const SpecialCounts& counts : {count_special(DType::kBF16, bytes(bf16)), count_special(DType::kF16, bytes(f16)),
                                      count_special(DType::kF32, bytes(f32)), count_special(DType::kF64, bytes(f64))}) {
    EXPECT_EQ(counts.inf, 2U);
    EXPECT_EQ(counts.nan, 3U);
    EXPECT_EQ(counts.zero, 2U);
    EXPECT_EQ(counts.subnormal, 1U);
  }
  EXPECT_FALSE(has_special_values(DType::kI8));
  EXPECT_FALSE(has_special_values(DType::kF8E4M3));
}

/// Bytes and escapes of the real codec.
F12Estimate coded(const std::vector<uint16_t>& words, uint64_t rows, uint64_t k) {
  const f12::Geometry geometry{rows, k, 1};
  std::vector<std::byte> codes(geometry.codes_bytes()), windows(geometry.windows_bytes()), records(geometry.records_bytes()), pool;
  store::F12Stats stats;
  const Status status = store::f12_encode(std::as_bytes(std::span(words)), geometry, 0, geometry.units(), codes, windows, records,
                                          pool, 0, 1, &stats);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return {rows * k, stats.escapes, codes.size() + windows.size() + records.size() + pool.size()};
}

struct Weights {
  std::string name;
  double outlier_rate;  // negative: random patterns
};
class EstimateF12 : public ::testing::TestWithParam<Weights> {};

TEST_P(EstimateF12, EqualsTheCodec) {
  for (const auto& [rows, k] :
       std::vector<std::pair<uint64_t, uint64_t>>{{1, 1}, {15, 63}, {16, 64}, {17, 65}, {48, 512}, {33, 1100}, {5, 4096}}) {
    std::vector<uint16_t> words(rows * k);
    if (GetParam().outlier_rate < 0) {
      random_words(words, rows + k);
    } else {
      synth_bf16(words, k, 0, rows + k, {0.02, 0.3, GetParam().outlier_rate}, 1);
    }
    const F12Estimate expected = coded(words, rows, k);
    const F12Estimate estimate = estimate_f12(words, rows, k, 3);
    EXPECT_EQ(estimate.weights, expected.weights);
    EXPECT_EQ(estimate.bytes, expected.bytes) << rows << " x " << k;
    EXPECT_EQ(estimate.escapes, expected.escapes) << rows << " x " << k;
  }
}
// No escapes, a few in records, lists in the pool, dense groups.
INSTANTIATE_TEST_SUITE_P(Weights, EstimateF12,
                         ::testing::Values(Weights{"none", 0.0}, Weights{"few", 0.0002}, Weights{"lists", 0.01},
                                           Weights{"random", -1.0}),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace weightd::tools
