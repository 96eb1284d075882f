// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

/// XXH3-64 (seed 0, default secret) of 1 MiB, cut for a warp; constexpr, so host and device compile the same arithmetic. Algorithm
/// and secret: XXH3 by Yann Collet, xxHash 0.8 (github.com/Cyan4973/xxHash), BSD 2-Clause.
///
/// The input is 1024 rounds of 16 stripes of 64 bytes. Inside a round the eight accumulators only take sums, in any order; a
/// scramble ends each round but the last. In the last round the 16th stripe is keyed by its own part of the secret.
namespace weightd::kernels::xxh3 {

inline constexpr uint32_t kStripeBytes = 64;
inline constexpr uint32_t kRoundStripes = 16;
inline constexpr uint32_t kRoundBytes = kStripeBytes * kRoundStripes;
inline constexpr uint32_t kAccumulators = 8;
inline constexpr uint32_t kSecretBytes = 192;

inline constexpr uint64_t kPrime32_1 = 0x9E3779B1U, kPrime32_2 = 0x85EBCA77U, kPrime32_3 = 0xC2B2AE3DU;
inline constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87U, kPrime64_2 = 0xC2B2AE3D27D4EB4FU, kPrime64_3 = 0x165667B19E3779F9U,
                          kPrime64_4 = 0x85EBCA77C2B2AE63U, kPrime64_5 = 0x27D4EB2F165667C5U;

/// What the parts of the secret are to a launch, by value, so that a kernel reads it from its arguments.
struct Keys {
  uint64_t stripe[kSecretBytes / 8];  // stripe s, word i: [s + i]; the scramble of word i: [16 + i]
  uint64_t tail[kAccumulators];       // of the last stripe
  uint64_t merge[kAccumulators];
  uint64_t start[kAccumulators];  // of the accumulators
};

constexpr Keys make_keys() {
  constexpr uint64_t kSecret[kSecretBytes / 8] = {
      0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072, 0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82,
      0x8e2443f7744608b8, 0x4c263a81e69035e0, 0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
      0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8, 0xc3ebd33483acc5ea, 0xeb6313faffa081c5,
      0x49daf0b751dd0d17, 0x9e68d429265516d3, 0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af};
  constexpr uint64_t kStart[kAccumulators] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                                              kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
  // XXH3's distances from the secret's end and start, in bytes; neither is a multiple of 8.
  constexpr uint32_t kTailOffset = kSecretBytes - kStripeBytes - 7;
  constexpr uint32_t kMergeOffset = 11;
  static_assert(kTailOffset % 8 != 0 && kMergeOffset % 8 != 0);
  const auto word_at = [&](uint32_t byte) {
    return kSecret[byte / 8] >> (8 * (byte % 8)) | kSecret[byte / 8 + 1] << (64 - 8 * (byte % 8));
  };
  Keys keys{};
  for (uint32_t i = 0; i < kSecretBytes / 8; ++i) keys.stripe[i] = kSecret[i];
  for (uint32_t i = 0; i < kAccumulators; ++i) {
    keys.tail[i] = word_at(kTailOffset + 8 * i);
    keys.merge[i] = word_at(kMergeOffset + 8 * i);
    keys.start[i] = kStart[i];
  }
  return keys;
}

/// What one lane adds to the accumulators 2q and 2q + 1, or their keys; q is the lane's place in its quad, lane % 4.
struct Pair {
  uint64_t even = 0, odd = 0;
};

/// A warp takes 512 bytes at once, 16 a lane: in half h of a round lane l has piece l % 4 of stripe 8h + l / 4.
constexpr uint32_t lane_stripe(uint32_t lane, uint32_t half) { return 8 * half + lane / 4; }

constexpr Pair lane_keys(const Keys& keys, uint32_t lane, uint32_t half) {
  const uint32_t first = lane_stripe(lane, half) + 2 * (lane % 4);
  return {keys.stripe[first], keys.stripe[first + 1]};
}

constexpr Pair tail_keys(const Keys& keys, uint32_t lane) { return {keys.tail[2 * (lane % 4)], keys.tail[2 * (lane % 4) + 1]}; }

/// The product of a word's halves.
constexpr uint64_t square_halves(uint64_t word) { return (word & 0xFFFFFFFFU) * (word >> 32); }

constexpr void add_piece(Pair& sum, const Pair& data, const Pair& keys) {
  sum.even += data.odd + square_halves(data.even ^ keys.even);
  sum.odd += data.even + square_halves(data.odd ^ keys.odd);
}

/// Ends a round for one accumulator.
constexpr uint64_t scramble(uint64_t accumulator, uint64_t key) { return (accumulator ^ (accumulator >> 47) ^ key) * kPrime32_1; }

/// The 128-bit product's halves, xored: what two keyed accumulators give to the result.
constexpr uint64_t fold_product(uint64_t a, uint64_t b) {
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

/// The hash of `bytes` bytes from the sum of the four fold_products.
constexpr uint64_t finish(uint64_t folded, uint64_t bytes) {
  uint64_t hash = bytes * kPrime64_1 + folded;
  hash ^= hash >> 37;
  hash *= 0x165667919E3779F9U;
  return hash ^ (hash >> 32);
}

// --- from one sum a lane to one sum a quad -------------------------------------------------------------------------------
//
// A lane holds its part of the sums of eight rounds, [0, 8). At level L (0, 1, 2) it keeps the half of its rounds that bit 4 - L of
// its number says, hands the other half to lane ^ (16 >> L), and adds what comes back. At the end it holds round lane / 4,
// complete.

inline constexpr uint32_t kBatchRounds = 8;
inline constexpr uint32_t kFoldLevels = 3;
constexpr uint32_t fold_partner(uint32_t level) { return 16U >> level; }            // xor to the lane's number
constexpr uint32_t fold_kept(uint32_t level) { return kBatchRounds / 2 >> level; }  // sums kept, and given away
constexpr bool fold_upper(uint32_t lane, uint32_t level) { return (lane & fold_partner(level)) != 0; }

}  // namespace weightd::kernels::xxh3
