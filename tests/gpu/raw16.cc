// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/raw16.h"

#include <cstring>

namespace weightd::testing {

std::vector<std::byte> pack_raw16(const Words& words) {
  const f12::Geometry geometry{words.n, words.k, 1};
  std::vector<std::byte> tiles(geometry.units() * geometry.tiles() * 2048);
  for (uint64_t row = 0; row < words.n; ++row) {
    for (uint64_t column = 0; column < words.k; ++column) {
      const uint64_t tile = row / 16 * geometry.tiles() + column / 64;
      const uint64_t step = column % 64 / 16;
      const uint64_t lane = row % 8 * 4 + column % 8 / 2;
      const uint64_t reg = row % 16 / 8 + column % 16 / 8 * 2;
      const uint16_t word = words.at(row, column);
      std::memcpy(&tiles[tile * 2048 + step * 512 + lane * 16 + reg * 4 + column % 2 * 2], &word, 2);
    }
  }
  return tiles;
}

}  // namespace weightd::testing
