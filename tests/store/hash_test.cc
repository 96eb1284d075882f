// SPDX-License-Identifier: Apache-2.0
#include "store/hash.h"

#include <gtest/gtest.h>
#include <xxhash.h>

#include <algorithm>
#include <utility>

#include "store/xxh3_vector.h"
#include "tests/support/safetensors_builder.h"

namespace weightd::store {
namespace {

using testing::as_bytes;

// Expected values that are not in the algorithms' own documents come from another build of xxHash (the Python package xxhash,
// library 0.8.4) and Python's hashlib, over the same pattern.
std::vector<std::byte> pattern() {
  std::vector<std::byte> bytes(3 * kBlockBytes);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>((i * 7 + (i >> 8) * 13 + (i >> 20) * 101) & 255);
  return bytes;
}
constexpr uint64_t kZeroBlock = 0x918780b90550bf34;
const std::vector<uint64_t> kPatternBlocks = {0x0897bfa3a6d80f14, 0x5f02b074c3b8f7bb, 0xf478a28369c3f5c9};

TEST(Hash, KnownValues) {
  EXPECT_EQ(to_hex(sha256({})), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(to_hex(sha256(as_bytes("abc"))), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(to_hex(xxh128({})), "99aa06d3014798d86001c324468d497f");
  EXPECT_EQ(to_hex(xxh128(as_bytes("abc"))), "06b05ab6733a618578af5f94892f3950");
  const std::vector<std::byte> bytes = pattern();
  EXPECT_EQ(to_hex(xxh128(bytes)), "d72d144b048d88e9edf0f1515846e4c3");
  EXPECT_EQ(to_hex(sha256(bytes)), "f63a212eac85f99a4d5a69691d7288b2f02758cf9044c2e2222e6181040c6d82");
}

TEST(Hash, HexShowsTheHighWordFirst) {
  EXPECT_EQ(to_hex(Xxh128{0x0123456789abcdef, 0xfedcba9876543210}), "fedcba98765432100123456789abcdef");
}

TEST(Hash, StreamsGiveTheSameDigestForAnyCut) {
  const std::vector<std::byte> bytes = pattern();
  for (const size_t cut : {size_t{1}, size_t{63}, size_t{4096}, size_t{1000003}, bytes.size()}) {
    // Single bytes of the whole pattern would take long; the first 64 KiB and then the rest do as well.
    const size_t fine = cut == 1 ? 65536 : bytes.size();
    Xxh128Stream xxh;
    Sha256Stream sha;
    for (size_t at = 0; at < bytes.size();) {
      const size_t step = at < fine ? std::min(cut, bytes.size() - at) : bytes.size() - at;
      const auto piece = std::span<const std::byte>(bytes).subspan(at, step);
      xxh.update(piece);
      xxh.update({});
      sha.update(piece);
      sha.update({});
      at += step;
    }
    EXPECT_EQ(xxh.digest(), xxh128(bytes)) << cut;
    EXPECT_EQ(sha.finish(), sha256(bytes)) << cut;
  }
}

#ifdef __x86_64__
TEST(Hash, EveryVectorWidthGivesTheSameBits) {
  struct Width {
    const char* name;
    bool here;
    void (*update)(void*, const void*, size_t);
    uint64_t (*hash64)(const void*, size_t);
  };
  const Width widths[] = {{"avx2", __builtin_cpu_supports("avx2") != 0, weightd_xxh3_update_avx2, weightd_xxh3_64_avx2},
                          {"avx512", __builtin_cpu_supports("avx512f") != 0, weightd_xxh3_update_avx512, weightd_xxh3_64_avx512}};
  const std::vector<std::byte> bytes = pattern();
  for (const Width& width : widths) {
    if (!width.here) continue;
    SCOPED_TRACE(width.name);
    for (size_t block = 0; block < kPatternBlocks.size(); ++block) {
      EXPECT_EQ(width.hash64(bytes.data() + block * kBlockBytes, kBlockBytes), kPatternBlocks[block]);
    }
    XXH3_state_t* state = XXH3_createState();
    ASSERT_NE(state, nullptr);
    XXH3_128bits_reset(state);
    for (size_t at = 0; at < bytes.size();) {
      const size_t step = std::min<size_t>(at % 5 == 0 ? 777 : 100'000, bytes.size() - at);
      width.update(state, bytes.data() + at, step);
      at += step;
    }
    const XXH128_hash_t digest = XXH3_128bits_digest(state);
    EXPECT_EQ(to_hex(Xxh128{digest.low64, digest.high64}), "d72d144b048d88e9edf0f1515846e4c3");
    XXH3_freeState(state);
  }
}
#endif

TEST(Hash, DigestOfAStreamMayBeReadOnTheWay) {
  Xxh128Stream stream;
  stream.update(as_bytes("ab"));
  EXPECT_EQ(stream.digest(), xxh128(as_bytes("ab")));
  Xxh128Stream moved = std::move(stream);
  moved.update(as_bytes("c"));
  EXPECT_EQ(moved.digest(), xxh128(as_bytes("abc")));
}

TEST(Hash, BlockHashesOfAnArena) {
  const std::vector<std::byte> bytes = pattern();
  for (const int threads : {0, 1, 2, 7}) EXPECT_EQ(block_hashes(bytes, threads), kPatternBlocks) << threads;
  EXPECT_TRUE(block_hashes({}, 2).empty());
  const std::vector<std::byte> zeros(kBlockBytes);
  EXPECT_EQ(block_hash(std::span<const std::byte>(zeros).first<kBlockBytes>()), kZeroBlock);
}

TEST(BlockHasher, PiecesOfAnySizeEqualTheWhole) {
  const std::vector<std::byte> bytes = pattern();
  for (const size_t step :
       {size_t{1000}, size_t{300007}, size_t{kBlockBytes}, size_t{kBlockBytes + 1}, size_t{2 * kBlockBytes + 5}, bytes.size()}) {
    BlockHasher hasher;
    for (size_t at = 0; at < bytes.size(); at += step) {
      hasher.add(at, std::span<const std::byte>(bytes).subspan(at, std::min(step, bytes.size() - at)));
    }
    EXPECT_EQ(hasher.finish(bytes.size()), kPatternBlocks) << step;
  }
}

TEST(BlockHasher, GapsAreZeros) {
  // An arena of 8 blocks: pieces with gaps inside a block, over a boundary, and over whole blocks.
  std::vector<std::byte> arena(8 * kBlockBytes);
  const std::vector<std::byte> source = pattern();
  struct Piece {
    uint64_t offset, size;
  };
  const std::vector<Piece> pieces = {{0, 100},
                                     {256, 1000},
                                     {kBlockBytes - 10, 20},
                                     {kBlockBytes + 10, 0},
                                     {3 * kBlockBytes + 5, kBlockBytes - 5},
                                     {4 * kBlockBytes, kBlockBytes},
                                     {6 * kBlockBytes - 1, 2}};
  BlockHasher hasher;
  for (const Piece& piece : pieces) {
    const auto data = std::span<const std::byte>(source).first(piece.size);
    std::copy(data.begin(), data.end(), arena.begin() + static_cast<ptrdiff_t>(piece.offset));
    hasher.add(piece.offset, data);
  }
  EXPECT_EQ(hasher.finish(arena.size()), block_hashes(arena, 1));
}

TEST(BlockHasher, NoPiecesAtAll) {
  EXPECT_TRUE(BlockHasher().finish(0).empty());
  EXPECT_EQ(BlockHasher().finish(3 * kBlockBytes), std::vector<uint64_t>(3, kZeroBlock));
}

TEST(BlockHasherDeathTest, RefusesPiecesThatGoBack) {
  BlockHasher hasher;
  hasher.add(10, as_bytes("abc"));
  EXPECT_DEATH(hasher.add(12, as_bytes("d")), "check failed");
}

}  // namespace
}  // namespace weightd::store
