// SPDX-License-Identifier: Apache-2.0
#include "kernels/xxh3.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <random>
#include <vector>

#include "store/hash.h"

namespace weightd::kernels::xxh3 {
namespace {

using Warp = std::array<std::array<Pair, kBatchRounds>, 32>;  // [lane][round]

/// The kernel's fold, all lanes in step.
void fold(Warp& warp) {
  for (uint32_t level = 0; level < kFoldLevels; ++level) {
    const uint32_t kept = fold_kept(level);
    const Warp before = warp;
    for (uint32_t lane = 0; lane < 32; ++lane) {
      const uint32_t partner = lane ^ fold_partner(level);
      const uint32_t mine = fold_upper(lane, level) ? kept : 0;
      ASSERT_NE(fold_upper(lane, level), fold_upper(partner, level));
      for (uint32_t i = 0; i < kept; ++i) {
        warp[lane][i].even = before[lane][mine + i].even + before[partner][mine + i].even;
        warp[lane][i].odd = before[lane][mine + i].odd + before[partner][mine + i].odd;
      }
    }
  }
}

/// The eight rounds at `data`: sums[round][accumulator].
std::array<std::array<uint64_t, kAccumulators>, kBatchRounds> sum_batch(const Keys& keys, const std::byte* data, bool last) {
  Warp warp{};
  for (uint32_t lane = 0; lane < 32; ++lane) {
    for (uint32_t round = 0; round < kBatchRounds; ++round) {
      for (uint32_t half = 0; half < 2; ++half) {
        Pair piece;
        std::memcpy(&piece, data + round * kRoundBytes + half * 512 + 16 * lane, sizeof piece);
        const bool tail = last && round + 1 == kBatchRounds && lane_stripe(lane, half) + 1 == kRoundStripes;
        add_piece(warp[lane][round], piece, tail ? tail_keys(keys, lane) : lane_keys(keys, lane, half));
      }
    }
  }
  fold(warp);
  std::array<std::array<uint64_t, kAccumulators>, kBatchRounds> sums{};
  for (uint32_t lane = 0; lane < 32; ++lane) {
    sums[lane / 4][2 * (lane % 4)] = warp[lane][0].even;
    sums[lane / 4][2 * (lane % 4) + 1] = warp[lane][0].odd;
  }
  return sums;
}

/// A block as the kernel hashes it, lane by lane.
uint64_t hash_by_lanes(const std::vector<std::byte>& block) {
  const Keys keys = make_keys();
  std::array<uint64_t, kAccumulators> accumulators{};
  for (uint32_t i = 0; i < kAccumulators; ++i) accumulators[i] = keys.start[i];
  const uint64_t rounds = block.size() / kRoundBytes;
  for (uint64_t first = 0; first < rounds; first += kBatchRounds) {
    const auto sums = sum_batch(keys, block.data() + first * kRoundBytes, first + kBatchRounds == rounds);
    for (uint32_t round = 0; round < kBatchRounds; ++round) {
      for (uint32_t i = 0; i < kAccumulators; ++i) {
        accumulators[i] += sums[round][i];
        if (first + round + 1 < rounds) accumulators[i] = scramble(accumulators[i], keys.stripe[kRoundStripes + i]);
      }
    }
  }
  uint64_t folded = 0;
  for (uint32_t i = 0; i < kAccumulators; i += 2) {
    folded += fold_product(accumulators[i] ^ keys.merge[i], accumulators[i + 1] ^ keys.merge[i + 1]);
  }
  return finish(folded, block.size());
}

TEST(Xxh3, LanesGiveTheHashOfTheStore) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 6; ++round) {
    std::vector<std::byte> block(store::kBlockBytes);
    if (round == 1) std::memset(block.data(), 0xFF, block.size());
    for (size_t i = 0; round > 1 && i < block.size(); i += 8) {
      const uint64_t value = random();
      std::memcpy(block.data() + i, &value, sizeof value);
    }
    if (round == 2) std::memset(block.data() + 1000, 0, 500000);
    const uint64_t want = store::block_hash(std::span<const std::byte>(block).first<store::kBlockBytes>());
    EXPECT_EQ(hash_by_lanes(block), want) << "block " << round;
    EXPECT_NE(want, 0U);
  }
}

}  // namespace
}  // namespace weightd::kernels::xxh3
