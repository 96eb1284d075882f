// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/test_matrix.h"

#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "store/f12.h"

namespace weightd::testing {
namespace {

/// splitmix64: any seed gives an independent stream.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15U + 1) {}
  uint64_t next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15U);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
    return z ^ (z >> 31);
  }
  double uniform() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }
  float normal() {  // Box-Muller
    const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
    return static_cast<float>(radius * std::cos(6.283185307179586 * uniform()));
  }

 private:
  uint64_t state_;
};

}  // namespace

uint16_t bf16_from(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7FFFU + (bits >> 16 & 1U)) >> 16);
}

double value_of(uint16_t bf16) { return static_cast<double>(std::bit_cast<float>(static_cast<uint32_t>(bf16) << 16)); }

Words random_weights(uint64_t n, uint64_t k, double wild, bool finite, uint64_t seed) {
  Words result{n, k, std::vector<uint16_t>(n * k)};
  Random random(seed);
  for (uint64_t row = 0; row < n; ++row) {
    const auto scale = static_cast<float>(0.005 + 0.05 * random.uniform());
    for (uint64_t column = 0; column < k; ++column) {
      uint16_t word = bf16_from(scale * random.normal());
      if (wild > 0 && random.uniform() < wild) word = static_cast<uint16_t>(random.next());
      if (finite && (word & 0x7F80U) > 0x4700U) word = static_cast<uint16_t>((word & 0x807FU) | 0x4700U);
      result.words[row * k + column] = word;
    }
  }
  return result;
}

Words all_patterns(uint64_t n, uint64_t k) {
  Words result{n, k, std::vector<uint16_t>(n * k)};
  for (uint64_t i = 0; i < n * k; ++i) result.words[i] = static_cast<uint16_t>(i * 40503U + i / 65536U);
  return result;
}

Words random_activations(uint64_t m, uint64_t k, uint64_t seed) {
  Words result{m, k, std::vector<uint16_t>(m * k)};
  Random random(seed + 77);
  for (uint16_t& word : result.words) word = bf16_from(random.normal());
  return result;
}

HostF12 encode(const Words& words) {
  HostF12 host;
  host.geometry = f12::Geometry{words.n, words.k, 1};
  host.codes.resize(host.geometry.codes_bytes());
  host.windows.resize(host.geometry.windows_bytes());
  host.records.resize(host.geometry.records_bytes());
  store::F12Stats stats;
  const Status status = store::f12_encode(std::as_bytes(std::span(words.words)), host.geometry, 0, host.geometry.units(),
                                          host.codes, host.windows, host.records, host.pool, 0, 0, &stats);
  if (!status.ok()) {
    std::fprintf(stderr, "f12_encode: %s\n", status.to_string().c_str());
    std::abort();
  }
  host.escapes = stats.escapes;
  host.listed_groups = stats.listed_groups;
  host.dense_groups = stats.dense_groups;
  return host;
}

DeviceF12::DeviceF12(const HostF12& host)
    : codes(host.codes), windows(host.windows), records(host.records), pool(host.pool), geometry_(host.geometry) {}

kernels::F12DeviceMatrix DeviceF12::matrix() const {
  return {codes.data(), windows.data(), records.data(), pool.data(), pool.bytes(), geometry_.n, geometry_.k};
}

bool DeviceF12::fences_intact() const {
  return codes.fences_intact() && windows.fences_intact() && records.fences_intact() && pool.fences_intact();
}

std::string first_difference(const std::vector<uint16_t>& got, const std::vector<uint16_t>& want, uint64_t columns) {
  if (got.size() != want.size()) return "sizes " + std::to_string(got.size()) + " and " + std::to_string(want.size());
  for (uint64_t i = 0; i < got.size(); ++i) {
    if (got[i] == want[i]) continue;
    char text[128];
    std::snprintf(text, sizeof text, "row %llu, column %llu: got %04x, want %04x", static_cast<unsigned long long>(i / columns),
                  static_cast<unsigned long long>(i % columns), got[i], want[i]);
    return text;
  }
  return "";
}

}  // namespace weightd::testing
