// SPDX-License-Identifier: Apache-2.0
#include "tools/pack/synth_weights.h"

#include <array>
#include <bit>
#include <cmath>

#include "base/parallel.h"
#include "weightd/status.h"

namespace weightd::tools {
namespace {

/// xoshiro256++ (Blackman and Vigna, "Scrambled Linear Pseudorandom Number Generators"), seeded by splitmix64.
class Generator {
 public:
  Generator(uint64_t seed, uint64_t stream) {
    uint64_t state = seed ^ (stream * 0xD1342543DE82EF95ULL);
    for (uint64_t& word : state_) {
      state += 0x9E3779B97F4A7C15ULL;
      uint64_t z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9ULL;
      z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
      word = z ^ (z >> 31);
    }
  }

  uint64_t next() {
    const uint64_t result = std::rotl(state_[0] + state_[3], 23) + state_[0];
    const uint64_t shifted = state_[1] << 17;
    state_[2] ^= state_[0];
    state_[3] ^= state_[1];
    state_[1] ^= state_[2];
    state_[0] ^= state_[3];
    state_[2] ^= shifted;
    state_[3] = std::rotl(state_[3], 45);
    return result;
  }

  /// Uniform in [0, 1).
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }

 private:
  std::array<uint64_t, 4> state_{};
};

/// N(0,1) by the ziggurat (Marsaglia and Tsang 2000) with 128 layers.
class Ziggurat {
 public:
  Ziggurat() {
    double x = kTail;
    const double area = kTail * density(kTail) + std::sqrt(std::acos(-1.0) / 2) * std::erfc(kTail / std::sqrt(2.0));
    edge_[0] = area / density(kTail);  // the base layer as wide as if it had no tail
    edge_[1] = kTail;
    for (size_t layer = 2; layer < kLayers; ++layer) {
      x = std::sqrt(-2 * std::log(area / x + density(x)));
      edge_[layer] = x;
    }
    edge_[kLayers] = 0;
    for (size_t layer = 0; layer <= kLayers; ++layer) height_[layer] = density(edge_[layer]);
  }

  /// `bits` decides nearly every call; `generator` supplies more for the rest.
  double sample(uint64_t bits, Generator& generator) const {
    while (true) {
      const size_t layer = bits & (kLayers - 1);
      const double sign = (bits & kLayers) != 0 ? -1 : 1;
      const double x = static_cast<double>(bits >> 32) * 0x1p-32 * edge_[layer];
      if (x < edge_[layer + 1]) return sign * x;
      if (layer == 0) return sign * tail(generator);
      if (height_[layer] + generator.uniform() * (height_[layer + 1] - height_[layer]) < density(x)) return sign * x;
      bits = generator.next();
    }
  }

 private:
  static constexpr size_t kLayers = 128;
  static constexpr double kTail = 3.442619855899;  // where the base layer's rectangle ends

  static double density(double x) { return std::exp(-0.5 * x * x); }
  static double tail(Generator& generator) {
    while (true) {
      const double x = -std::log(1 - generator.uniform()) / kTail;
      const double y = -std::log(1 - generator.uniform());
      if (2 * y > x * x) return kTail + x;
    }
  }

  std::array<double, kLayers + 1> edge_{};
  std::array<double, kLayers + 1> height_{};
};

uint16_t bf16_from(double value) {
  const uint32_t bits = std::bit_cast<uint32_t>(static_cast<float>(value));
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

/// Log-uniform magnitude in one of the two ranges that lie far outside the trained distribution.
double outlier(Generator& generator) {
  const uint64_t choice = generator.next();
  const double exponent = (choice & 1) != 0 ? -40 + 20 * generator.uniform() : 3 + 7 * generator.uniform();
  return ((choice & 2) != 0 ? -1 : 1) * std::exp2(exponent);
}

void fill_row(std::span<uint16_t> row, uint64_t seed, uint64_t row_index, const WeightModel& model, const Ziggurat& normal) {
  Generator generator(seed, row_index);
  const double row_scale = model.scale * std::exp(model.row_scale_sigma * normal.sample(generator.next(), generator));
  const auto outlier_below = static_cast<uint64_t>(std::llround(model.outlier_rate * 0x1p24));
  for (uint16_t& word : row) {
    const uint64_t bits = generator.next();
    // Bits 8..31 choose the outliers; the ziggurat uses the others.
    const bool is_outlier = ((bits >> 8) & 0xFFFFFF) < outlier_below;
    word = bf16_from(is_outlier ? outlier(generator) : row_scale * normal.sample(bits, generator));
  }
}

}  // namespace

void synth_bf16(std::span<uint16_t> words, uint64_t k, uint64_t row_begin, uint64_t seed, const WeightModel& model, int threads) {
  if (words.empty()) return;
  WEIGHTD_CHECK(k != 0 && words.size() % k == 0);
  const Ziggurat normal;
  parallel_ranges(words.size() / k, 1, threads, [&](uint64_t begin, uint64_t end) {
    for (uint64_t row = begin; row < end; ++row) fill_row(words.subspan(row * k, k), seed, row_begin + row, model, normal);
  });
}

void random_words(std::span<uint16_t> words, uint64_t seed) {
  Generator generator(seed, 0);
  size_t i = 0;
  for (; i + 4 <= words.size(); i += 4) {
    const uint64_t bits = generator.next();
    for (size_t part = 0; part < 4; ++part) words[i + part] = static_cast<uint16_t>(bits >> (16 * part));
  }
  const uint64_t bits = generator.next();
  for (size_t part = 0; i < words.size(); ++i, ++part) words[i] = static_cast<uint16_t>(bits >> (16 * part));
}

}  // namespace weightd::tools
