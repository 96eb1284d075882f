// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/gemm_kernels.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

// Highway compiles the rest of this file once per target; targets whose vectors have no fixed size are left to the fallback.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/gemm_kernels.cc"
#define HWY_WANT_AVX3_DL
#define HWY_DISABLED_TARGETS (HWY_AVX3 | HWY_SSSE3 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "store/f12_tile-inl.h"

#ifndef WEIGHTD_KERNELS_GEMM_ONCE_
#define WEIGHTD_KERNELS_GEMM_ONCE_

// Loops over registers: they must disappear, or the registers become memory.
#if defined(__clang__)
#define WEIGHTD_UNROLL _Pragma("clang loop unroll(full)")
#else
#define WEIGHTD_UNROLL _Pragma("GCC unroll 16")
#endif

namespace weightd::kernels::cpu {

inline const uint8_t* bytes_of(const std::byte* bytes) { return reinterpret_cast<const uint8_t*>(bytes); }

inline uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FFF;
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

/// The contract's order of the final sums. `p` in lane order: of f12 (kF12), or of the columns.
template <bool kF12>
float reduce(const float* p) {
  float s[8];
  for (uint32_t i = 0; i < 8; ++i) s[i] = kF12 ? p[f12_lane(i)] + p[f12_lane(i + 8)] : p[i] + p[i + 8];
  for (uint32_t i = 0; i < 4; ++i) s[i] += s[i + 4];
  for (uint32_t i = 0; i < 2; ++i) s[i] += s[i + 2];
  return s[0] + s[1];
}

template <bool kF12>
void put_unit(const float* sums, uint64_t unit, uint64_t tokens, const Output& out) {
  for (uint64_t token = 0; token < tokens; ++token) {
    for (uint64_t row = 0; row < kUnitRows; ++row) {
      out.put(token, unit * kUnitRows + row, to_bf16(reduce<kF12>(sums + token * kUnitSums + row * kLanes)));
    }
  }
}

inline f12::UnitPlanes planes_of(const F12Matrix& w, uint64_t unit) {
  const f12::Geometry g{w.n, w.k, 1};
  return {bytes_of(w.codes) + unit * g.tiles() * f12::kTileBytes, bytes_of(w.windows) + unit * f12::kUnitRows,
          bytes_of(w.records) + unit * g.groups() * f12::kRecordBytes};
}

inline f12::PoolView pool_of(const F12Matrix& w) { return {{bytes_of(w.pool), w.pool_bytes}, 0}; }

/// Where one tile's bytes come from.
struct TileSource {
  const uint8_t* low = nullptr;    // planes L_A, L_B
  const uint8_t* codes = nullptr;  // plane C
  const uint8_t* high = nullptr;   // true high bytes in scratch order, or nullptr: the codes say all
};

constexpr uint64_t kPairBytes = 2 * kLanes * sizeof(uint16_t);     // weights of one row in two steps
constexpr uint64_t kRowBlockBytes = kBlockSteps / 2 * kPairBytes;  // and in a block

/// Scratch for tiles that need more than their codes.
struct TileScratch {
  alignas(64) uint8_t high[f12::kDenseTileBytes];
  alignas(64) uint8_t low[2 * f12::kTilePlaneBytes];
  alignas(64) uint8_t clean_high[f12::kDenseTileBytes];
};

/// The columns of a tile from `columns` on become +0, whatever the file has there: with -0 in x their products are -0, which change
/// no partial sum.
inline TileSource clear_padding(const TileSource& tile, uint64_t columns, TileScratch& scratch) {
  for (uint32_t pos = 0; pos < f12::kDenseTileBytes; ++pos) {
    const bool inside = f12::scratch_column(pos) < columns;
    scratch.low[pos] = inside ? tile.low[pos] : uint8_t{0};
    scratch.clean_high[pos] = inside ? tile.high[pos] : uint8_t{0};
  }
  return {scratch.low, tile.codes, scratch.clean_high};
}

}  // namespace weightd::kernels::cpu
#endif  // once

HWY_BEFORE_NAMESPACE();
namespace weightd::kernels::cpu {
namespace HWY_NAMESPACE {

namespace tile = weightd::f12::HWY_NAMESPACE;

// --- slices: as many of the 16 lanes as one register holds ----------------------------------------------------------------

#if WEIGHTD_F12_PLAIN

struct Slice {
  float f[kLanes];
};
constexpr uint32_t kSlices = 1;
constexpr uint32_t kSliceLanes = kLanes;
constexpr uint32_t kBlockTokens = 2, kBlockRows = 2;

inline Slice zero() { return {}; }
inline Slice load(const float* from) {
  Slice s;
  std::memcpy(s.f, from, sizeof s.f);
  return s;
}
inline void store(const Slice& s, float* to) { std::memcpy(to, s.f, sizeof s.f); }
inline Slice fused(const Slice& x, const Slice& w, const Slice& p) {
  Slice s;
  for (uint32_t i = 0; i < kLanes; ++i) s.f[i] = std::fma(x.f[i], w.f[i], p.f[i]);
  return s;
}
inline float word_to_float(const uint8_t* at) {
  uint16_t word = 0;
  std::memcpy(&word, at, sizeof word);
  return std::bit_cast<float>(uint32_t{word} << 16);
}
inline Slice from_words(const uint8_t* words) {
  Slice s;
  for (uint32_t i = 0; i < kLanes; ++i) s.f[i] = word_to_float(words + 2 * i);
  return s;
}

/// The 64 weights of a row as words in lane order, two steps together: [2 pairs of steps][lane quadruple][step][4 lanes].
inline void interleave_row(const tile::Row& low, const tile::Row& high, uint8_t* to) {
  for (uint32_t b = 0; b < tile::kRowBytes; ++b) {
    // Byte 16q + 4j + 2s + h: lane 4q + 2s + h of step j.
    const uint64_t at = ((b >> 3) & 1) * kPairBytes + 16 * (b >> 4) + 2 * (b & 7);
    to[at] = low.b[b];
    to[at + 1] = high.b[b];
  }
}
/// One step of such a pair.
template <bool kOdd>
Slice from_interleaved(const uint8_t* pair) {
  Slice s;
  for (uint32_t i = 0; i < kLanes; ++i) s.f[i] = word_to_float(pair + 16 * (i / 4) + (kOdd ? 8 : 0) + 2 * (i % 4));
  return s;
}

#else

namespace hn = hwy::HWY_NAMESPACE;
using FloatTag = hn::CappedTag<float, kLanes>;
using Slice = hn::Vec<FloatTag>;
constexpr uint32_t kSlices = tile::kParts;
constexpr uint32_t kSliceLanes = kLanes / kSlices;
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_SSE4
constexpr uint32_t kBlockTokens = 3, kBlockRows = 4;  // 12 sums of 16 registers
#else
constexpr uint32_t kBlockTokens = 6, kBlockRows = 4;  // 24 sums of 32 registers
#endif

HWY_INLINE Slice zero() { return hn::Zero(FloatTag()); }
HWY_INLINE Slice load(const float* from) { return hn::Load(FloatTag(), from); }
HWY_INLINE void store(Slice s, float* to) { hn::Store(s, FloatTag(), to); }

#if HWY_NATIVE_FMA
HWY_INLINE Slice fused(Slice x, Slice w, Slice p) { return hn::MulAdd(x, w, p); }
#else
/// Two BF16 values have 16 significant bits together, so their product is exact in binary32 unless it leaves the normal range, and
/// then product and sum round like one operation. The rest goes lane by lane.
HWY_INLINE Slice fused(Slice x, Slice w, Slice p) {
  const FloatTag d;
  const Slice product = hn::Mul(x, w);
  const Slice size = hn::Abs(product);
  const auto normal = hn::And(hn::Gt(size, hn::Set(d, 0x1p-100F)), hn::Lt(size, hn::Set(d, 0x1p100F)));
  const auto zero_factor = hn::Or(hn::Eq(x, hn::Zero(d)), hn::Eq(w, hn::Zero(d)));
  if (HWY_LIKELY(hn::AllTrue(d, hn::Or(normal, zero_factor)))) return hn::Add(product, p);
  HWY_ALIGN float lanes[3][kSliceLanes];
  hn::Store(x, d, lanes[0]);
  hn::Store(w, d, lanes[1]);
  hn::Store(p, d, lanes[2]);
  for (uint32_t i = 0; i < kSliceLanes; ++i) lanes[2][i] = std::fma(lanes[0][i], lanes[1][i], lanes[2][i]);
  return hn::Load(d, lanes[2]);
}
#endif

HWY_INLINE Slice from_words(const uint8_t* words) {
  const FloatTag d;
  const hn::Rebind<uint32_t, FloatTag> d32;
  const hn::Rebind<uint16_t, FloatTag> d16;
  const hn::Repartition<uint8_t, decltype(d16)> d8;  // the words may lie at odd addresses
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::BitCast(d16, hn::LoadU(d8, words)))));
}

/// The 64 weights of a row as four steps of 16 lanes; f[j][p] is slice p of step j. Part p of a row holds the lanes of slice p.
struct RowFloats {
  Slice f[4][kSlices];
};
HWY_INLINE RowFloats to_floats(const tile::Row& low, const tile::Row& high) {
  const FloatTag d;
  const tile::RowTag d8;
  const tile::RowTag16 d16;
  const auto none = hn::Zero(d16);
  RowFloats row;
  WEIGHTD_UNROLL
  for (uint32_t p = 0; p < kSlices; ++p) {
    const auto first = hn::BitCast(d16, hn::InterleaveLower(d8, low.v[p], high.v[p]));   // steps 0, 1 of each lane quadruple
    const auto second = hn::BitCast(d16, hn::InterleaveUpper(d8, low.v[p], high.v[p]));  // steps 2, 3
    row.f[0][p] = hn::BitCast(d, hn::InterleaveLower(d16, none, first));
    row.f[1][p] = hn::BitCast(d, hn::InterleaveUpper(d16, none, first));
    row.f[2][p] = hn::BitCast(d, hn::InterleaveLower(d16, none, second));
    row.f[3][p] = hn::BitCast(d, hn::InterleaveUpper(d16, none, second));
  }
  return row;
}

/// The 64 weights of a row as words in lane order, two steps together: [2 pairs of steps][lane quadruple][step][4 lanes].
HWY_INLINE void interleave_row(const tile::Row& low, const tile::Row& high, uint8_t* to) {
  const tile::RowTag d;
  WEIGHTD_UNROLL
  for (uint32_t p = 0; p < kSlices; ++p) {
    hn::StoreU(hn::InterleaveLower(d, low.v[p], high.v[p]), d, to + p * tile::kPartBytes);
    hn::StoreU(hn::InterleaveUpper(d, low.v[p], high.v[p]), d, to + kPairBytes + p * tile::kPartBytes);
  }
}
/// One step of such a pair; `pair` is at the slice.
template <bool kOdd>
HWY_INLINE Slice from_interleaved(const uint8_t* pair) {
  const tile::RowTag16 d16;
  const auto words = hn::BitCast(d16, hn::LoadU(tile::RowTag(), pair));
  const auto none = hn::Zero(d16);
  return hn::BitCast(FloatTag(), kOdd ? hn::InterleaveUpper(d16, none, words) : hn::InterleaveLower(d16, none, words));
}

#endif  // WEIGHTD_F12_PLAIN

// --- one block: some rows times some tokens over some steps ----------------------------------------------------------------

/// Weights of a block in lane order, as interleave_row() leaves them: [16 rows][16 pairs of steps][64 bytes].
struct LaneRows {
  const uint8_t* words = nullptr;
  template <bool kOdd>
  HWY_INLINE Slice at(uint64_t row, uint64_t pair, uint32_t slice) const {
    return from_interleaved<kOdd>(words + row * kRowBlockBytes + pair * kPairBytes + slice * (kPairBytes / kSlices));
  }
};

/// BF16 rows as they lie in memory.
struct WordRows {
  const uint8_t* words = nullptr;
  uint64_t stride_bytes = 0;
  template <bool kOdd>
  HWY_INLINE Slice at(uint64_t row, uint64_t pair, uint32_t slice) const {
    return from_words(words + row * stride_bytes + pair * kPairBytes + (kOdd ? kPairBytes / 2 : 0) + slice * kSliceLanes * 2);
  }
};

/// One step of kRows rows and kTokens tokens; x is at step and slice.
template <bool kOdd, uint32_t kRows, uint32_t kTokens, typename Weights>
HWY_INLINE void multiply_step(const Weights& w, uint64_t row, uint64_t pair, uint32_t slice, const float* x,
                              Slice (&acc)[kTokens][kRows]) {
  Slice values[kTokens];
  WEIGHTD_UNROLL
  for (uint32_t m = 0; m < kTokens; ++m) values[m] = load(x + m * Activations::kTokenStride);
  WEIGHTD_UNROLL
  for (uint32_t r = 0; r < kRows; ++r) {
    const Slice weights = w.template at<kOdd>(row + r, pair, slice);
    WEIGHTD_UNROLL
    for (uint32_t m = 0; m < kTokens; ++m) acc[m][r] = fused(values[m], weights, acc[m][r]);
  }
}

/// sums[token][row] += over `pairs` pairs of steps, for kRows rows from `row` on and kTokens tokens from `token` on. Lanes never
/// meet, so each slice goes on its own and all its sums stay in registers.
template <uint32_t kRows, uint32_t kTokens, typename Weights>
HWY_NOINLINE void multiply_block(const Weights& w, uint64_t row, uint64_t pairs, const Activations& x, uint64_t token,
                                 uint64_t first_step, float* sums) {
  for (uint32_t slice = 0; slice < kSlices; ++slice) {
    const float* xs = x.at(token, first_step) + slice * kSliceLanes;
    float* to = sums + token * kUnitSums + row * kLanes + slice * kSliceLanes;
    Slice acc[kTokens][kRows];
    WEIGHTD_UNROLL
    for (uint32_t m = 0; m < kTokens; ++m) {
      WEIGHTD_UNROLL
      for (uint32_t r = 0; r < kRows; ++r) acc[m][r] = load(to + m * kUnitSums + r * kLanes);
    }
    for (uint64_t pair = 0; pair < pairs; ++pair) {
      multiply_step<false>(w, row, pair, slice, xs + 2 * pair * kLanes, acc);
      multiply_step<true>(w, row, pair, slice, xs + (2 * pair + 1) * kLanes, acc);
    }
    WEIGHTD_UNROLL
    for (uint32_t m = 0; m < kTokens; ++m) {
      WEIGHTD_UNROLL
      for (uint32_t r = 0; r < kRows; ++r) store(acc[m][r], to + m * kUnitSums + r * kLanes);
    }
  }
}

/// `count` tokens (1..kTokens) from `token` on, all rows of the unit.
template <uint32_t kTokens, typename Weights>
void multiply_tokens(uint64_t count, const Weights& w, uint64_t pairs, const Activations& x, uint64_t token, uint64_t first_step,
                     float* sums) {
  if constexpr (kTokens > 1) {
    if (count < kTokens) return multiply_tokens<kTokens - 1>(count, w, pairs, x, token, first_step, sums);
  }
  // Few tokens leave registers for more rows, which hide the latency of the sums.
  constexpr uint32_t kRows = kTokens * kBlockRows * 2 <= kBlockTokens * kBlockRows ? 2 * kBlockRows : kBlockRows;
  for (uint64_t row = 0; row < kUnitRows; row += kRows) {
    multiply_block<kRows, kTokens>(w, row, pairs, x, token, first_step, sums);
  }
}

/// All tokens, in blocks of nearly the same size.
template <typename Weights>
void multiply_all_tokens(const Weights& w, uint64_t pairs, const Activations& x, uint64_t first_step, float* sums) {
  const uint64_t blocks = (x.tokens + kBlockTokens - 1) / kBlockTokens;
  for (uint64_t block = 0; block < blocks; ++block) {
    const uint64_t token = x.tokens * block / blocks;
    const uint64_t count = x.tokens * (block + 1) / blocks - token;
    multiply_tokens<kBlockTokens>(count, w, pairs, x, token, first_step, sums);
  }
}

// --- f12 ---------------------------------------------------------------------------------------------------------------------

/// The tiles of one unit in order, patched and with cleared padding.
class TileWalk {
 public:
  TileWalk(const F12Matrix& w, uint64_t unit)
      : unit_(planes_of(w, unit)), pool_(pool_of(w)), k_(w.k), tiles_(f12::Geometry{w.n, w.k, 1}.tiles()) {}

  uint64_t tiles() const { return tiles_; }
  const uint8_t* windows() const { return unit_.windows; }

  /// Tile t; to be called with t = 0, 1, 2, ...
  HWY_INLINE TileSource next(uint64_t t) {
    const auto in_group = static_cast<uint32_t>(t % f12::kGroupTiles);
    if (in_group == 0) {
      const auto group_tiles = static_cast<uint32_t>(std::min<uint64_t>(f12::kGroupTiles, tiles_ - t));
      group_ = f12::read_group(unit_.records + t / f12::kGroupTiles * f12::kRecordBytes, group_tiles, pool_);
    }
    const uint8_t* codes = unit_.codes + t * f12::kTileBytes;
    tile::prefetch_after(codes);
    TileSource tile{codes, codes + 2 * f12::kTilePlaneBytes,
                    tile::patched_high(codes, unit_.windows, group_, in_group, scratch_.high)};
    const uint64_t columns = k_ - t * f12::kTileCols;
    if (columns >= f12::kTileCols) return tile;
    if (tile.high == nullptr) {
      tile::tile_high(codes, unit_.windows, scratch_.high);
      tile.high = scratch_.high;
    }
    return clear_padding(tile, columns, scratch_);
  }

 private:
  f12::UnitPlanes unit_;
  f12::PoolView pool_;
  uint64_t k_ = 0, tiles_ = 0;
  f12::GroupPatches group_;
  TileScratch scratch_;
};

/// One tile to words in lane order, as tile `in_group` of LaneRows.
HWY_INLINE void interleave_tile(const TileSource& source, const uint8_t* windows, uint64_t in_group, uint8_t* words) {
  for (uint32_t g = 0; g < 8; ++g) {
    const uint32_t a = tile::kRowBytes * g;
    const uint32_t b = a + f12::kTilePlaneBytes;
    tile::Row high_a, high_b;
    if (source.high == nullptr) {
      const tile::Row codes = tile::load_row(source.codes + a);
      high_a = tile::high_a(codes, windows[g]);
      high_b = tile::high_b(codes, windows[g + 8]);
    } else {
      high_a = tile::load_row(source.high + a);
      high_b = tile::load_row(source.high + b);
    }
    uint8_t* to = words + g * kRowBlockBytes + in_group * 2 * kPairBytes;
    interleave_row(tile::load_row(source.low + a), high_a, to);
    interleave_row(tile::load_row(source.low + b), high_b, to + 8 * kRowBlockBytes);
  }
}

/// Any number of tokens: a group of tiles is decoded once into the cache, then multiplied with all of them.
void multiply_unit_blocked(const F12Matrix& w, uint64_t unit, const Activations& x, float* sums) {
  alignas(64) uint8_t words[kUnitRows * kRowBlockBytes];
  std::memset(sums, 0, x.tokens * kUnitSums * sizeof(float));
  TileWalk walk(w, unit);
  for (uint64_t first = 0; first < walk.tiles(); first += f12::kGroupTiles) {
    const uint64_t count = std::min<uint64_t>(f12::kGroupTiles, walk.tiles() - first);
    for (uint64_t i = 0; i < count; ++i) interleave_tile(walk.next(first + i), walk.windows(), i, words);
    multiply_all_tokens(LaneRows{words}, count * 2, x, first * 4, sums);
  }
}

#if !WEIGHTD_F12_PLAIN && HWY_NATIVE_FMA

/// One row of a tile times one token.
HWY_INLINE void multiply_row(const tile::Row& low, const tile::Row& high, const float* x, Slice (&acc)[kSlices]) {
  const RowFloats row = to_floats(low, high);
  WEIGHTD_UNROLL
  for (uint32_t j = 0; j < 4; ++j) {
    WEIGHTD_UNROLL
    for (uint32_t p = 0; p < kSlices; ++p) acc[p] = fused(load(x + j * kLanes + p * kSliceLanes), row.f[j][p], acc[p]);
  }
}

/// One token, kPairs pairs of rows (g, g + 8) from `g_begin` on: weights go from the codes into the sums without touching memory.
template <uint32_t kPairs>
HWY_INLINE void multiply_pairs(const F12Matrix& w, uint64_t unit, uint32_t g_begin, const Activations& x, float* sums) {
  Slice acc[2 * kPairs][kSlices];
  WEIGHTD_UNROLL
  for (uint32_t r = 0; r < 2 * kPairs; ++r) {
    WEIGHTD_UNROLL
    for (uint32_t p = 0; p < kSlices; ++p) acc[r][p] = zero();
  }
  TileWalk walk(w, unit);
  for (uint64_t t = 0; t < walk.tiles(); ++t) {
    const TileSource source = walk.next(t);
    const float* xs = x.at(0, t * 4);
    if (HWY_LIKELY(source.high == nullptr)) {
      WEIGHTD_UNROLL
      for (uint32_t i = 0; i < kPairs; ++i) {
        const uint32_t a = tile::kRowBytes * (g_begin + i);
        const tile::Row codes = tile::load_row(source.codes + a);
        multiply_row(tile::load_row(source.low + a), tile::high_a(codes, walk.windows()[g_begin + i]), xs, acc[2 * i]);
        multiply_row(tile::load_row(source.low + f12::kTilePlaneBytes + a), tile::high_b(codes, walk.windows()[g_begin + i + 8]),
                     xs, acc[2 * i + 1]);
      }
    } else {
      WEIGHTD_UNROLL
      for (uint32_t i = 0; i < kPairs; ++i) {
        const uint32_t a = tile::kRowBytes * (g_begin + i);
        const uint32_t b = a + f12::kTilePlaneBytes;
        multiply_row(tile::load_row(source.low + a), tile::load_row(source.high + a), xs, acc[2 * i]);
        multiply_row(tile::load_row(source.low + b), tile::load_row(source.high + b), xs, acc[2 * i + 1]);
      }
    }
  }
  WEIGHTD_UNROLL
  for (uint32_t i = 0; i < kPairs; ++i) {
    WEIGHTD_UNROLL
    for (uint32_t p = 0; p < kSlices; ++p) {
      store(acc[2 * i][p], sums + (g_begin + i) * kLanes + p * kSliceLanes);
      store(acc[2 * i + 1][p], sums + (g_begin + i + 8) * kLanes + p * kSliceLanes);
    }
  }
}

constexpr uint32_t kPairsAtOnce = HWY_TARGET == HWY_AVX2 ? 2 : 8 / kSlices;

void multiply_unit(const F12Matrix& w, uint64_t unit, const Activations& x, float* sums) {
  if (x.tokens != 1) return multiply_unit_blocked(w, unit, x, sums);
  for (uint32_t g = 0; g < 8; g += kPairsAtOnce) multiply_pairs<kPairsAtOnce>(w, unit, g, x, sums);
}

#else

void multiply_unit(const F12Matrix& w, uint64_t unit, const Activations& x, float* sums) {
  multiply_unit_blocked(w, unit, x, sums);
}

#endif

void multiply_f12(const F12Matrix& w, UnitRange units, const Activations& x, const Output& out, float* sums) {
  for (uint64_t unit = units.begin; unit < units.end; ++unit) {
    multiply_unit(w, unit, x, sums);
    put_unit<true>(sums, unit, x.tokens, out);
  }
}

// --- raw ---------------------------------------------------------------------------------------------------------------------

/// One unit; the sums of rows that w lacks mean nothing.
void multiply_raw_unit(const RawMatrix& w, uint64_t unit, const Activations& x, float* sums) {
  std::memset(sums, 0, x.tokens * kUnitSums * sizeof(float));
  const uint64_t stride_bytes = w.row_stride * 2;
  const uint8_t* words = bytes_of(w.words) + unit * kUnitRows * stride_bytes;
  const uint64_t rows = std::min<uint64_t>(kUnitRows, w.n - unit * kUnitRows);
  constexpr uint64_t kPairColumns = 2 * kLanes, kBlockPairs = kBlockSteps / 2;
  const uint64_t whole_pairs = rows == kUnitRows ? w.k / kPairColumns : 0;
  for (uint64_t pair = 0; pair < whole_pairs; pair += kBlockPairs) {
    const uint64_t pairs = std::min<uint64_t>(kBlockPairs, whole_pairs - pair);
    multiply_all_tokens(WordRows{words + pair * kPairBytes, stride_bytes}, pairs, x, 2 * pair, sums);
  }
  // What is left is copied, so that nothing past a row's end is read: the last columns, or all of a unit that lacks rows. The copy
  // is filled up with +0, and x has -0 there.
  alignas(64) uint8_t edge[kUnitRows * kRowBlockBytes];
  uint64_t columns = 0;
  for (uint64_t column = whole_pairs * kPairColumns; column < w.k; column += columns) {
    columns = std::min(w.k - column, Activations::kTokenStride - column % Activations::kTokenStride);
    const uint64_t pairs = (columns + kPairColumns - 1) / kPairColumns;
    const uint64_t edge_stride = pairs * kPairBytes;
    std::memset(edge, 0, kUnitRows * edge_stride);
    for (uint64_t row = 0; row < rows; ++row)
      std::memcpy(edge + row * edge_stride, words + row * stride_bytes + column * 2, columns * 2);
    multiply_all_tokens(WordRows{edge, edge_stride}, pairs, x, column / kLanes, sums);
  }
}

void multiply_raw(const RawMatrix& w, UnitRange units, const Activations& x, const Output& out, float* sums) {
  for (uint64_t unit = units.begin; unit < units.end; ++unit) {
    multiply_raw_unit(w, unit, x, sums);
    put_unit<false>(sums, unit, x.tokens, out);
  }
}

void decompress(const F12Matrix& w, uint64_t begin, uint64_t end, uint8_t* words) {
  for (uint64_t row = begin; row < end;) {
    const uint64_t unit = row / kUnitRows;
    const uint64_t last = std::min(end, (unit + 1) * kUnitRows);
    tile::decode_unit(planes_of(w, unit), pool_of(w), w.k, static_cast<uint32_t>(row % kUnitRows),
                      static_cast<uint32_t>(last - unit * kUnitRows), words + (row - begin) * 2 * w.k);
    row = last;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace weightd::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace weightd::kernels::cpu {
namespace {
HWY_EXPORT(multiply_f12);
HWY_EXPORT(multiply_raw);
HWY_EXPORT(decompress);
}  // namespace

void multiply_units(const F12Matrix& w, UnitRange units, const Activations& x, const Output& out, float* sums) {
  HWY_DYNAMIC_DISPATCH(multiply_f12)(w, units, x, out, sums);
}

void multiply_units(const RawMatrix& w, UnitRange units, const Activations& x, const Output& out, float* sums) {
  HWY_DYNAMIC_DISPATCH(multiply_raw)(w, units, x, out, sums);
}

void decompress_rows(const F12Matrix& w, uint64_t begin, uint64_t end, uint8_t* words) {
  HWY_DYNAMIC_DISPATCH(decompress)(w, begin, end, words);
}

}  // namespace weightd::kernels::cpu
#endif  // HWY_ONCE
