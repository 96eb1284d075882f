// SPDX-License-Identifier: Apache-2.0

/// Decoding and encoding of one f12 tile (store/FORMAT.md, "f12"), shared by the codec and the host kernels. A Highway "-inl"
/// header: include it after "hwy/highway.h" and "hwy/cache_control.h" from a file that is compiled once per target. Words are
/// integers everywhere.

#ifndef WEIGHTD_STORE_F12_TILE_ONCE_
#define WEIGHTD_STORE_F12_TILE_ONCE_

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "store/tile_layout.h"

namespace weightd::f12 {

static_assert(std::endian::native == std::endian::little, "codes, words and entries are read as they lie");

inline uint32_t load_u32(const void* from) {
  uint32_t value = 0;
  std::memcpy(&value, from, sizeof value);
  return value;
}

/// The planes of one unit.
struct UnitPlanes {
  const uint8_t* codes = nullptr;    // tiles * 1536
  const uint8_t* windows = nullptr;  // 16
  const uint8_t* records = nullptr;  // groups * 32
};

/// The part of the model's pool that is at hand: `bytes` lie at `offset_bytes` of the pool.
struct PoolView {
  std::span<const uint8_t> bytes;
  uint64_t offset_bytes = 0;

  /// `size` bytes at `offset` of the model's pool, or nullptr when they are not all at hand.
  const uint8_t* at(uint64_t offset, uint64_t size) const {
    if (offset < offset_bytes || offset - offset_bytes > bytes.size()) return nullptr;
    return size <= bytes.size() - (offset - offset_bytes) ? bytes.data() + (offset - offset_bytes) : nullptr;
  }
};

/// One record, resolved. For bytes that break the format (a caller that skipped validation) it is some harmless reading of them: it
/// never points outside record and pool.
struct GroupPatches {
  const uint8_t* record = nullptr;
  const uint8_t* entries = nullptr;  // of all tiles of the group, u32 each; nullptr: none
  const uint8_t* dense = nullptr;    // 1 KiB of true high bytes for each tile; nullptr: not a dense group

  /// Entries [begin, end) belong to tile `tile` (0..7) of the group.
  uint32_t begin(uint32_t tile) const { return tile == 0 ? 0U : record[tile - 1]; }
  uint32_t end(uint32_t tile) const { return record[tile]; }
};

/// `tiles` is how many tiles the group has (1..8).
inline GroupPatches read_group(const uint8_t* record, uint32_t tiles, const PoolView& pool) {
  GroupPatches group;
  group.record = record;
  const uint32_t count = record[kGroupTiles - 1];
  const uint8_t* words = record + kRecordWordsOffset;
  if (count <= kInlineEscapes) {
    group.entries = words;
  } else if (count < kDenseEnd) {
    group.entries = pool.at(uint64_t{load_u32(words)} * kPoolAlign, uint64_t{count} * sizeof(uint32_t));
  } else {
    group.dense = pool.at(uint64_t{load_u32(words)} * kPoolAlign, uint64_t{tiles} * kDenseTileBytes);
  }
  return group;
}

/// Overwrites the high bytes that the entries of tile `tile` name.
inline void apply_patches(const GroupPatches& group, uint32_t tile, uint8_t* high) {
  if (group.entries == nullptr) return;
  const uint32_t last = std::min<uint32_t>(group.end(tile), group.record[kGroupTiles - 1]);
  for (uint32_t i = group.begin(tile); i < last; ++i) {
    const uint32_t entry = load_u32(group.entries + sizeof(uint32_t) * i);
    high[entry_pos(entry) % kDenseTileBytes] = static_cast<uint8_t>(entry_high(entry));
  }
}

/// Row-to-column order of the 64 bytes of a row, and back, as tables.
struct RowPermutation {
  alignas(64) std::array<uint8_t, 64> column_of_byte{};
  alignas(64) std::array<uint8_t, 64> byte_of_column{};
  constexpr RowPermutation() {
    for (uint32_t b = 0; b < 64; ++b) {
      column_of_byte[b] = static_cast<uint8_t>(row_byte_column(b));
      byte_of_column[row_byte_column(b)] = static_cast<uint8_t>(b);
    }
  }
};
inline constexpr RowPermutation kRowPermutation;

/// Byte indexes into two concatenated 64-byte vectors (vpermi2b).
struct PermutePairs {
  alignas(64) std::array<uint8_t, 64> words_first{};   // L, H -> words of columns 0..31
  alignas(64) std::array<uint8_t, 64> words_second{};  // L, H -> words of columns 32..63
  alignas(64) std::array<uint8_t, 64> low{};           // words -> L
  alignas(64) std::array<uint8_t, 64> high{};          // words -> H
  constexpr PermutePairs() {
    for (uint32_t i = 0; i < 64; ++i) {
      const uint32_t from_high = (i & 1) * 64;
      words_first[i] = static_cast<uint8_t>(from_high + kRowPermutation.byte_of_column[i / 2]);
      words_second[i] = static_cast<uint8_t>(from_high + kRowPermutation.byte_of_column[32 + i / 2]);
      low[i] = static_cast<uint8_t>(2 * kRowPermutation.column_of_byte[i]);
      high[i] = static_cast<uint8_t>(2 * kRowPermutation.column_of_byte[i] + 1);
    }
  }
};
inline constexpr PermutePairs kPermutePairs;

}  // namespace weightd::f12

#endif  // WEIGHTD_STORE_F12_TILE_ONCE_

#if defined(WEIGHTD_STORE_F12_TILE_INL_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEIGHTD_STORE_F12_TILE_INL_
#undef WEIGHTD_STORE_F12_TILE_INL_
#else
#define WEIGHTD_STORE_F12_TILE_INL_
#endif

#undef WEIGHTD_F12_PLAIN
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
#define WEIGHTD_F12_PLAIN 1  // plain C++: the portable fallback
#else
#define WEIGHTD_F12_PLAIN 0
#endif

HWY_BEFORE_NAMESPACE();
namespace weightd::f12 {
namespace HWY_NAMESPACE {

inline constexpr uint32_t kRowBytes = 64;     // of one row in one plane of a tile
inline constexpr uint32_t kWordsBytes = 128;  // of one row of a tile, as BF16
inline constexpr uint8_t kNibbleMask = 0x87;  // sign and index bits of a code

#if WEIGHTD_F12_PLAIN

/// The 64 bytes of one row in a tile plane.
struct Row {
  uint8_t b[kRowBytes];
};

inline Row load_row(const uint8_t* from) {
  Row row;
  std::memcpy(row.b, from, kRowBytes);
  return row;
}
inline void store_row(const Row& row, uint8_t* to) { std::memcpy(to, row.b, kRowBytes); }

/// High bytes of row g (plane A) from its codes and window.
inline Row high_a(const Row& codes, uint8_t window) {
  Row high;
  for (uint32_t i = 0; i < kRowBytes; ++i) high.b[i] = static_cast<uint8_t>((codes.b[i] & kNibbleMask) + window);
  return high;
}
/// High bytes of row g + 8 (plane B).
inline Row high_b(const Row& codes, uint8_t window) {
  Row high;
  for (uint32_t i = 0; i < kRowBytes; i += 4) {
    const uint32_t rotated = std::rotl(load_u32(codes.b + i), 4);
    std::memcpy(high.b + i, &rotated, sizeof rotated);
  }
  return high_a(high, window);
}

/// The row as 64 words in the order of the columns.
inline void store_words(const Row& low, const Row& high, uint8_t* words) {
  for (uint32_t i = 0; i < kRowBytes; ++i) {
    words[2 * kRowPermutation.column_of_byte[i]] = low.b[i];
    words[2 * kRowPermutation.column_of_byte[i] + 1] = high.b[i];
  }
}
inline void load_words(const uint8_t* words, Row& low, Row& high) {
  for (uint32_t i = 0; i < kRowBytes; ++i) {
    low.b[i] = words[2 * kRowPermutation.column_of_byte[i]];
    high.b[i] = words[2 * kRowPermutation.column_of_byte[i] + 1];
  }
}

/// Codes of a row in bits 7, 2, 1, 0 of each byte; the result has a bit for each byte that escapes the window.
inline uint64_t encode_high(const Row& high, uint8_t window, Row& nibbles) {
  uint64_t escapes = 0;
  for (uint32_t i = 0; i < kRowBytes; ++i) {
    const auto index = static_cast<uint8_t>((high.b[i] & 0x7F) - window);
    const bool escape = index > 7;
    nibbles.b[i] = static_cast<uint8_t>((high.b[i] & 0x80) | (escape ? 0 : index));
    escapes |= uint64_t{escape} << i;
  }
  return escapes;
}
/// The C plane's row: A | rotr32(B, 4).
inline Row merge_codes(const Row& a, const Row& b) {
  Row merged;
  for (uint32_t i = 0; i < kRowBytes; i += 4) {
    const uint32_t word = load_u32(a.b + i) | std::rotr(load_u32(b.b + i), 4);
    std::memcpy(merged.b + i, &word, sizeof word);
  }
  return merged;
}

#else  // vectors

namespace hn = hwy::HWY_NAMESPACE;

using RowTag = hn::CappedTag<uint8_t, kRowBytes>;
using RowTag16 = hn::Repartition<uint16_t, RowTag>;
using RowTag32 = hn::Repartition<uint32_t, RowTag>;
using RowVector = hn::Vec<RowTag>;
inline constexpr uint32_t kPartBytes = HWY_MAX_BYTES < kRowBytes ? HWY_MAX_BYTES : kRowBytes;
inline constexpr uint32_t kParts = kRowBytes / kPartBytes;

/// The 64 bytes of one row in a tile plane.
struct Row {
  RowVector v[kParts];
};

HWY_INLINE Row load_row(const uint8_t* from) {
  Row row;
  for (uint32_t p = 0; p < kParts; ++p) row.v[p] = hn::LoadU(RowTag(), from + p * kPartBytes);
  return row;
}
HWY_INLINE void store_row(const Row& row, uint8_t* to) {
  for (uint32_t p = 0; p < kParts; ++p) hn::StoreU(row.v[p], RowTag(), to + p * kPartBytes);
}

/// High bytes of row g (plane A) from its codes and window. No carry leaves a byte: code and window add up to 0xFF at most.
HWY_INLINE Row high_a(const Row& codes, uint8_t window) {
  const RowTag d;
  Row high;
  for (uint32_t p = 0; p < kParts; ++p) {
    high.v[p] = hn::Add(hn::And(codes.v[p], hn::Set(d, kNibbleMask)), hn::Set(d, window));
  }
  return high;
}
/// High bytes of row g + 8 (plane B).
HWY_INLINE Row high_b(const Row& codes, uint8_t window) {
  const RowTag d;
  Row rotated;
  for (uint32_t p = 0; p < kParts; ++p) {
    rotated.v[p] = hn::BitCast(d, hn::RotateRight<28>(hn::BitCast(RowTag32(), codes.v[p])));
  }
  return high_a(rotated, window);
}

/// Codes of a row in bits 7, 2, 1, 0 of each byte; the result has a bit for each byte that escapes the window.
HWY_INLINE uint64_t encode_high(const Row& high, uint8_t window, Row& nibbles) {
  const RowTag d;
  uint64_t escapes = 0;
  for (uint32_t p = 0; p < kParts; ++p) {
    const RowVector index = hn::Sub(hn::And(high.v[p], hn::Set(d, uint8_t{0x7F})), hn::Set(d, window));
    const auto inside = hn::Eq(hn::Min(index, hn::Set(d, uint8_t{7})), index);
    const RowVector sign = hn::And(high.v[p], hn::Set(d, uint8_t{0x80}));
    nibbles.v[p] = hn::Or(sign, hn::IfThenElseZero(inside, index));
    uint8_t bits[8] = {};
    hn::StoreMaskBits(d, inside, bits);
    uint64_t part = 0;
    std::memcpy(&part, bits, sizeof part);
    constexpr uint64_t kPartMask = kPartBytes == 64 ? ~uint64_t{0} : (uint64_t{1} << (kPartBytes % 64)) - 1;
    escapes |= (~part & kPartMask) << (p * kPartBytes % 64);
  }
  return escapes;
}
/// The C plane's row: A | rotr32(B, 4).
HWY_INLINE Row merge_codes(const Row& a, const Row& b) {
  Row merged;
  for (uint32_t p = 0; p < kParts; ++p) {
    merged.v[p] = hn::Or(a.v[p], hn::BitCast(RowTag(), hn::RotateRight<4>(hn::BitCast(RowTag32(), b.v[p]))));
  }
  return merged;
}

#if HWY_TARGET == HWY_AVX3_DL

/// The row as 64 words in the order of the columns.
HWY_INLINE void store_words(const Row& low, const Row& high, uint8_t* words) {
  const RowTag d;
  const __m512i first = _mm512_load_si512(kPermutePairs.words_first.data());
  const __m512i second = _mm512_load_si512(kPermutePairs.words_second.data());
  hn::StoreU(RowVector{_mm512_permutex2var_epi8(low.v[0].raw, first, high.v[0].raw)}, d, words);
  hn::StoreU(RowVector{_mm512_permutex2var_epi8(low.v[0].raw, second, high.v[0].raw)}, d, words + kPartBytes);
}
HWY_INLINE void load_words(const uint8_t* words, Row& low, Row& high) {
  const RowTag d;
  const __m512i first = hn::LoadU(d, words).raw;
  const __m512i second = hn::LoadU(d, words + kPartBytes).raw;
  low.v[0] = RowVector{_mm512_permutex2var_epi8(first, _mm512_load_si512(kPermutePairs.low.data()), second)};
  high.v[0] = RowVector{_mm512_permutex2var_epi8(first, _mm512_load_si512(kPermutePairs.high.data()), second)};
}

#elif HWY_TARGET == HWY_AVX2

// With L and H interleaved a row is a matrix of pairs of words [q][js], 4 by 8, and the columns want its transpose.
HWY_INLINE void store_words(const Row& low, const Row& high, uint8_t* words) {
  const RowTag d8;
  const RowTag32 d;
  const hn::Repartition<uint64_t, RowTag> d64;
  alignas(32) static constexpr uint32_t kAcross[8] = {0, 4, 1, 5, 2, 6, 3, 7};
  const auto across = hn::SetTableIndices(d, kAcross);
  for (uint32_t half = 0; half < 2; ++half) {  // j = 2 half and 2 half + 1
    const auto q01 = half == 0 ? hn::InterleaveLower(d8, low.v[0], high.v[0]) : hn::InterleaveUpper(d8, low.v[0], high.v[0]);
    const auto q23 = half == 0 ? hn::InterleaveLower(d8, low.v[1], high.v[1]) : hn::InterleaveUpper(d8, low.v[1], high.v[1]);
    // Blocks [q0: u0 u1 u2 u3 | q1: ...] and [q2 | q3] become [q0 q1 q2 q3] for each u.
    const auto a = hn::BitCast(d64, hn::TableLookupLanes(hn::BitCast(d, q01), across));  // q0u0 q1u0 q0u1 q1u1 | u2 u3
    const auto b = hn::BitCast(d64, hn::TableLookupLanes(hn::BitCast(d, q23), across));
    const auto even = hn::InterleaveLower(d64, a, b);  // u0 | u2
    const auto odd = hn::InterleaveUpper(d64, a, b);   // u1 | u3
    hn::StoreU(hn::BitCast(d8, hn::ConcatLowerLower(d64, odd, even)), d8, words + half * 64);
    hn::StoreU(hn::BitCast(d8, hn::ConcatUpperUpper(d64, odd, even)), d8, words + half * 64 + 32);
  }
}
HWY_INLINE void load_words(const uint8_t* words, Row& low, Row& high) {
  alignas(32) static constexpr uint32_t kAcross[8] = {0, 4, 1, 5, 2, 6, 3, 7};
  const __m256i across = _mm256_load_si256(reinterpret_cast<const __m256i*>(kAcross));
  const __m256i low_mask = _mm256_set1_epi16(0xFF);
  __m256i step[4];  // j: dwords [q0s0 q0s1 q1s0 q1s1 | q2s0 ...]
  for (int j = 0; j < 4; ++j) {
    step[j] = _mm256_permutevar8x32_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(words) + j), across);
  }
  __m256i part[2][2];  // [low, high][j / 2]: dwords [q even of j, q odd of j, q even of j + 1, q odd of j + 1 | the upper q]
  for (int j = 0; j < 2; ++j) {
    part[0][j] = _mm256_packus_epi16(_mm256_and_si256(step[2 * j], low_mask), _mm256_and_si256(step[2 * j + 1], low_mask));
    part[1][j] = _mm256_packus_epi16(_mm256_srli_epi16(step[2 * j], 8), _mm256_srli_epi16(step[2 * j + 1], 8));
  }
  for (int i = 0; i < 2; ++i) {
    const __m256 a = _mm256_castsi256_ps(part[i][0]);
    const __m256 b = _mm256_castsi256_ps(part[i][1]);
    const __m256i even = _mm256_castps_si256(_mm256_shuffle_ps(a, b, _MM_SHUFFLE(2, 0, 2, 0)));  // q0 | q2
    const __m256i odd = _mm256_castps_si256(_mm256_shuffle_ps(a, b, _MM_SHUFFLE(3, 1, 3, 1)));   // q1 | q3
    Row& row = i == 0 ? low : high;
    row.v[0] = RowVector{_mm256_permute2x128_si256(even, odd, 0x20)};
    row.v[1] = RowVector{_mm256_permute2x128_si256(even, odd, 0x31)};
  }
}

#else  // 16-byte vectors; part q of a row is lane 4g + q

template <typename V>
HWY_INLINE void transpose_4x4(V (&m)[4]) {
  const RowTag32 d;
  const hn::Repartition<uint64_t, RowTag> d64;
  const auto a = hn::BitCast(d64, hn::InterleaveLower(d, m[0], m[1]));
  const auto b = hn::BitCast(d64, hn::InterleaveLower(d, m[2], m[3]));
  const auto c = hn::BitCast(d64, hn::InterleaveUpper(d, m[0], m[1]));
  const auto e = hn::BitCast(d64, hn::InterleaveUpper(d, m[2], m[3]));
  m[0] = hn::BitCast(d, hn::InterleaveLower(d64, a, b));
  m[1] = hn::BitCast(d, hn::InterleaveUpper(d64, a, b));
  m[2] = hn::BitCast(d, hn::InterleaveLower(d64, c, e));
  m[3] = hn::BitCast(d, hn::InterleaveUpper(d64, c, e));
}

HWY_INLINE void store_words(const Row& low, const Row& high, uint8_t* words) {
  const RowTag d8;
  const RowTag32 d;
  for (uint32_t half = 0; half < 2; ++half) {  // j = 2 half and 2 half + 1
    hn::Vec<RowTag32> pairs[4];
    for (uint32_t q = 0; q < 4; ++q) {
      pairs[q] =
          hn::BitCast(d, half == 0 ? hn::InterleaveLower(d8, low.v[q], high.v[q]) : hn::InterleaveUpper(d8, low.v[q], high.v[q]));
    }
    transpose_4x4(pairs);
    for (uint32_t u = 0; u < 4; ++u) hn::StoreU(hn::BitCast(d8, pairs[u]), d8, words + half * 64 + 16 * u);
  }
}
HWY_INLINE void load_words(const uint8_t* words, Row& low, Row& high) {
  const RowTag d8;
  const RowTag16 d16;
  const RowTag32 d;
  hn::Vec<RowTag32> by_step[2][4];
  for (uint32_t j = 0; j < 4; ++j) {
    const RowVector s0 = hn::LoadU(d8, words + 32 * j);
    const RowVector s1 = hn::LoadU(d8, words + 32 * j + 16);
    const auto lows = hn::BitCast(d16, hn::ConcatEven(d8, s1, s0));  // pairs of bytes [s][q]
    const auto highs = hn::BitCast(d16, hn::ConcatOdd(d8, s1, s0));
    by_step[0][j] = hn::BitCast(d, hn::InterleaveLower(d16, lows, hn::ConcatUpperUpper(d16, lows, lows)));  // [q][s]
    by_step[1][j] = hn::BitCast(d, hn::InterleaveLower(d16, highs, hn::ConcatUpperUpper(d16, highs, highs)));
  }
  transpose_4x4(by_step[0]);
  transpose_4x4(by_step[1]);
  for (uint32_t q = 0; q < 4; ++q) {
    low.v[q] = hn::BitCast(d8, by_step[0][q]);
    high.v[q] = hn::BitCast(d8, by_step[1][q]);
  }
}

#endif  // HWY_TARGET
#endif  // WEIGHTD_F12_PLAIN

/// Brings a tile that comes soon closer: three planes in turn are more than hardware prefetchers follow. `tile` is the present one;
/// the next units' tiles follow in memory, and past the end of the codes a prefetch does nothing.
HWY_INLINE void prefetch_after(const uint8_t* tile) {
  constexpr uintptr_t kTilesAhead = 4;
  const uintptr_t ahead = reinterpret_cast<uintptr_t>(tile) + kTilesAhead * kTileBytes;
  for (uintptr_t line = 0; line < kTileBytes; line += 64) hwy::Prefetch(reinterpret_cast<const uint8_t*>(ahead + line));
}

/// The 1 KiB of high bytes of one tile in scratch order, before patches.
HWY_INLINE void tile_high(const uint8_t* tile, const uint8_t* windows, uint8_t* high) {
  for (uint32_t g = 0; g < 8; ++g) {
    const Row codes = load_row(tile + 2 * kTilePlaneBytes + kRowBytes * g);
    store_row(high_a(codes, windows[g]), high + kRowBytes * g);
    store_row(high_b(codes, windows[g + 8]), high + kTilePlaneBytes + kRowBytes * g);
  }
}

/// True high bytes of a tile that has patches, in `scratch` (1 KiB) or in the pool; nullptr when the codes say all.
HWY_INLINE const uint8_t* patched_high(const uint8_t* tile, const uint8_t* windows, const GroupPatches& group,
                                       uint32_t tile_in_group, uint8_t* scratch) {
  if (group.dense != nullptr) return group.dense + uint64_t{tile_in_group} * kDenseTileBytes;
  if (group.end(tile_in_group) == group.begin(tile_in_group)) return nullptr;
  tile_high(tile, windows, scratch);
  apply_patches(group, tile_in_group, scratch);
  return scratch;
}

/// Rows [row_begin, row_end) of one tile to words, whole rows of 128 bytes, `stride` bytes apart.
HWY_INLINE void decode_tile(const uint8_t* tile, const uint8_t* windows, const uint8_t* high, uint32_t row_begin, uint32_t row_end,
                            uint8_t* words, uint64_t stride) {
  for (uint32_t row = row_begin; row < row_end; ++row) {
    const uint32_t g = row % 8;
    const uint32_t at = kRowBytes * row;  // plane B follows plane A
    const Row low = load_row(tile + at);
    const Row codes = load_row(tile + 2 * kTilePlaneBytes + kRowBytes * g);
    const Row top = high != nullptr ? load_row(high + at) : row < 8 ? high_a(codes, windows[row]) : high_b(codes, windows[row]);
    store_words(low, top, words + (row - row_begin) * stride);
  }
}

/// Rows [row_begin, row_end) (0..16) of one unit to BF16 words, tightly packed at `words` (2k bytes a row).
HWY_INLINE void decode_unit(const UnitPlanes& unit, const PoolView& pool, uint64_t k, uint32_t row_begin, uint32_t row_end,
                            uint8_t* words) {
  alignas(64) uint8_t scratch[kDenseTileBytes];
  alignas(64) uint8_t edge[kUnitRows * kWordsBytes];
  const uint64_t tiles = Geometry{.n = 1, .k = k}.tiles();
  const uint64_t stride = 2 * k;
  GroupPatches group;
  for (uint64_t t = 0; t < tiles; ++t) {
    const auto in_group = static_cast<uint32_t>(t % kGroupTiles);
    if (in_group == 0) {
      const auto group_tiles = static_cast<uint32_t>(tiles - t < kGroupTiles ? tiles - t : kGroupTiles);
      group = read_group(unit.records + t / kGroupTiles * kRecordBytes, group_tiles, pool);
    }
    const uint8_t* tile = unit.codes + t * kTileBytes;
    prefetch_after(tile);
    const uint8_t* high = patched_high(tile, unit.windows, group, in_group, scratch);
    const uint64_t columns = k - t * kTileCols;
    if (columns >= kTileCols) {
      decode_tile(tile, unit.windows, high, row_begin, row_end, words + t * kWordsBytes, stride);
      continue;
    }
    decode_tile(tile, unit.windows, high, row_begin, row_end, edge, kWordsBytes);
    for (uint32_t row = row_begin; row < row_end; ++row) {
      const uint32_t i = row - row_begin;
      std::memcpy(words + i * stride + t * kWordsBytes, edge + i * kWordsBytes, 2 * columns);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace weightd::f12
HWY_AFTER_NAMESPACE();

#endif  // per target
