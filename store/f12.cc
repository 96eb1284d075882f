// SPDX-License-Identifier: Apache-2.0
#include "store/f12.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <initializer_list>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "base/parallel.h"

// Highway compiles the rest of this file once per target; targets whose vectors have no fixed size are left to the fallback.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "store/f12.cc"
#define HWY_WANT_AVX3_DL
#define HWY_DISABLED_TARGETS (HWY_AVX3 | HWY_SSSE3 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "store/f12_tile-inl.h"

#ifndef WEIGHTD_STORE_F12_ONCE_
#define WEIGHTD_STORE_F12_ONCE_
namespace weightd::store {

/// The units that one thread encodes. Spans start at the first of them.
struct EncodeJob {
  const uint8_t* words = nullptr;
  f12::Geometry geometry;
  uint64_t unit_begin = 0, unit_end = 0;
  uint8_t* codes = nullptr;
  uint8_t* windows = nullptr;
  uint8_t* records = nullptr;
  std::vector<std::byte>* pool = nullptr;  // offsets in the records count from its first byte
  F12Stats stats;
};

/// The units that one thread decodes.
struct DecodeJob {
  f12::Geometry geometry;
  uint64_t unit_begin = 0, unit_end = 0;
  f12::UnitPlanes planes;  // of unit_begin
  f12::PoolView pool;
  uint8_t* words = nullptr;
};

/// Rows of unit `unit` that the matrix has.
inline uint32_t rows_of_unit(const f12::Geometry& geometry, uint64_t unit) {
  return static_cast<uint32_t>(std::min<uint64_t>(f12::kUnitRows, geometry.n - unit * f12::kUnitRows));
}

}  // namespace weightd::store
#endif  // once

HWY_BEFORE_NAMESPACE();
namespace weightd::store {
namespace HWY_NAMESPACE {

namespace tile = weightd::f12::HWY_NAMESPACE;

/// The window with the fewest escapes among `k` words, the smallest of several.
uint8_t choose_window(const uint8_t* words, uint64_t k) {
  // Equal values come in runs; four tables keep their increments from waiting for one another.
  std::array<std::array<uint32_t, 128>, 4> tables{};
  uint64_t i = 0;
  for (; i + 4 <= k; i += 4) {
    uint64_t four = 0;
    std::memcpy(&four, words + 2 * i, sizeof four);
    ++tables[0][(four >> 8) & 0x7F];
    ++tables[1][(four >> 24) & 0x7F];
    ++tables[2][(four >> 40) & 0x7F];
    ++tables[3][(four >> 56) & 0x7F];
  }
  for (; i < k; ++i) ++tables[0][words[2 * i + 1] & 0x7F];

  std::array<uint32_t, 128> counts;
  for (size_t bin = 0; bin < counts.size(); ++bin) counts[bin] = tables[0][bin] + tables[1][bin] + tables[2][bin] + tables[3][bin];
  uint32_t covered = 0;
  for (size_t bin = 0; bin < 8; ++bin) covered += counts[bin];
  uint32_t best = covered;
  uint8_t window = 0;
  for (uint32_t w = 1; w <= f12::kMaxWindow; ++w) {
    covered += counts[w + 7] - counts[w - 1];
    if (covered > best) {
      best = covered;
      window = static_cast<uint8_t>(w);
    }
  }
  return window;
}

/// Escapes of one group while its tiles are encoded.
struct GroupEntries {
  std::array<uint32_t, f12::kListEscapes> entries;
  std::array<uint32_t, f12::kGroupTiles> end{};  // running counts, not limited
  uint32_t count = 0;

  void add(uint64_t escapes, uint32_t row_pos, const uint8_t* high) {
    for (; escapes != 0; escapes &= escapes - 1) {
      const auto bit = static_cast<uint32_t>(std::countr_zero(escapes));
      if (count < entries.size()) entries[count] = f12::make_entry(row_pos + bit, high[bit]);
      ++count;
    }
  }
};

/// Words of a tile that the matrix has only in part, as a whole tile: padding cells become what codes to L = 0, index 0.
void pad_tile(const uint8_t* words, uint64_t stride, uint32_t rows, uint64_t columns, const uint8_t* windows, uint8_t* padded) {
  for (uint32_t row = 0; row < f12::kUnitRows; ++row) {
    uint8_t* to = padded + row * tile::kWordsBytes;
    const uint64_t have = row < rows ? columns : 0;
    for (uint64_t c = have; c < f12::kTileCols; ++c) {
      to[2 * c] = 0;
      to[2 * c + 1] = windows[row];
    }
    if (have != 0) std::memcpy(to, words + row * stride, 2 * have);
  }
}

/// Encodes a whole tile; rows are `stride` bytes apart.
HWY_INLINE void encode_tile(const uint8_t* words, uint64_t stride, const uint8_t* windows, uint8_t* codes, GroupEntries& entries) {
  std::array<uint64_t, f12::kUnitRows> escapes{};
  uint64_t any = 0;
  for (uint32_t g = 0; g < 8; ++g) {
    tile::Row low, high, a, b;
    tile::load_words(words + g * stride, low, high);
    tile::store_row(low, codes + tile::kRowBytes * g);
    escapes[g] = tile::encode_high(high, windows[g], a);
    tile::load_words(words + (g + 8) * stride, low, high);
    tile::store_row(low, codes + f12::kTilePlaneBytes + tile::kRowBytes * g);
    escapes[g + 8] = tile::encode_high(high, windows[g + 8], b);
    tile::store_row(tile::merge_codes(a, b), codes + 2 * f12::kTilePlaneBytes + tile::kRowBytes * g);
    any |= escapes[g] | escapes[g + 8];
  }
  if (any == 0) return;
  for (uint32_t row = 0; row < f12::kUnitRows; ++row) {
    if (escapes[row] == 0) continue;
    alignas(64) uint8_t true_high[tile::kRowBytes];
    tile::Row low, high;
    tile::load_words(words + row * stride, low, high);
    tile::store_row(high, true_high);
    entries.add(escapes[row], row * tile::kRowBytes, true_high);
  }
}

/// The true high bytes of one tile of a dense group; padding cells 0.
void append_dense_tile(const uint8_t* words, uint64_t stride, uint32_t rows, uint64_t columns, std::vector<std::byte>& pool) {
  constexpr std::array<uint8_t, f12::kUnitRows> kZeros{};
  alignas(64) uint8_t padded[f12::kUnitRows * tile::kWordsBytes];
  alignas(64) uint8_t high_bytes[f12::kDenseTileBytes];
  pad_tile(words, stride, rows, columns, kZeros.data(), padded);
  for (uint32_t row = 0; row < f12::kUnitRows; ++row) {
    tile::Row low, high;
    tile::load_words(padded + row * tile::kWordsBytes, low, high);
    tile::store_row(high, high_bytes + row * tile::kRowBytes);
  }
  const auto* bytes = reinterpret_cast<const std::byte*>(high_bytes);
  pool.insert(pool.end(), bytes, bytes + sizeof high_bytes);
}

void append_list(const GroupEntries& entries, std::vector<std::byte>& pool) {
  const auto* bytes = reinterpret_cast<const std::byte*>(entries.entries.data());
  pool.insert(pool.end(), bytes, bytes + entries.count * sizeof(uint32_t));
  pool.resize(f12::align_up(pool.size(), f12::kPoolAlign));
}

/// One unit of a job: where its words are and how many rows it has.
struct UnitWords {
  const uint8_t* words = nullptr;
  uint64_t stride = 0;
  uint32_t rows = 0;
  uint64_t k = 0;

  const uint8_t* at_tile(uint64_t t) const { return words + t * tile::kWordsBytes; }
  uint64_t columns(uint64_t t) const { return std::min<uint64_t>(f12::kTileCols, k - t * f12::kTileCols); }
};

/// Writes the record of tiles [tile_begin, tile_end), and what belongs to it into the pool.
void finish_group(const UnitWords& unit, uint64_t tile_begin, uint64_t tile_end, const GroupEntries& entries, uint8_t* record,
                  EncodeJob& job) {
  std::memset(record, 0, f12::kRecordBytes);
  job.stats.escapes += entries.count;
  const bool dense = entries.count > f12::kListEscapes;
  for (uint32_t i = 0; i < f12::kGroupTiles; ++i) record[i] = static_cast<uint8_t>(dense ? f12::kDenseEnd : entries.end[i]);
  uint8_t* words = record + f12::kRecordWordsOffset;
  if (entries.count <= f12::kInlineEscapes) {
    std::memcpy(words, entries.entries.data(), entries.count * sizeof(uint32_t));
    return;
  }
  // The caller checks that the last offset fits; a wrapped one is never seen.
  const auto offset = static_cast<uint32_t>(job.pool->size() / f12::kPoolAlign);
  std::memcpy(words, &offset, sizeof offset);
  if (!dense) {
    ++job.stats.listed_groups;
    append_list(entries, *job.pool);
    return;
  }
  ++job.stats.dense_groups;
  for (uint64_t t = tile_begin; t < tile_end; ++t) {
    append_dense_tile(unit.at_tile(t), unit.stride, unit.rows, unit.columns(t), *job.pool);
  }
}

void encode_unit(const UnitWords& unit, uint8_t* codes, uint8_t* windows, uint8_t* records, EncodeJob& job) {
  for (uint32_t row = 0; row < f12::kUnitRows; ++row) {
    windows[row] = row < unit.rows ? choose_window(unit.words + row * unit.stride, unit.k) : uint8_t{0};
  }
  alignas(64) uint8_t padded[f12::kUnitRows * tile::kWordsBytes];
  const uint64_t tiles = job.geometry.tiles();
  for (uint64_t first = 0; first < tiles; first += f12::kGroupTiles) {
    GroupEntries entries;
    const uint64_t last = std::min<uint64_t>(tiles, first + f12::kGroupTiles);
    for (uint64_t t = first; t < last; ++t) {
      uint8_t* to = codes + t * f12::kTileBytes;
      if (unit.rows == f12::kUnitRows && unit.columns(t) == f12::kTileCols) {
        encode_tile(unit.at_tile(t), unit.stride, windows, to, entries);
      } else {
        pad_tile(unit.at_tile(t), unit.stride, unit.rows, unit.columns(t), windows, padded);
        encode_tile(padded, tile::kWordsBytes, windows, to, entries);
      }
      entries.end[t - first] = entries.count;
    }
    for (uint64_t i = last - first; i < f12::kGroupTiles; ++i) entries.end[i] = entries.count;
    finish_group(unit, first, last, entries, records + first / f12::kGroupTiles * f12::kRecordBytes, job);
  }
}

void encode_units(EncodeJob& job) {
  const f12::Geometry& g = job.geometry;
  for (uint64_t u = job.unit_begin; u < job.unit_end; ++u) {
    const uint64_t i = u - job.unit_begin;
    UnitWords unit;
    unit.stride = 2 * g.k;
    unit.words = job.words + i * f12::kUnitRows * unit.stride;
    unit.rows = rows_of_unit(g, u);
    unit.k = g.k;
    encode_unit(unit, job.codes + i * g.tiles() * f12::kTileBytes, job.windows + i * f12::kUnitRows,
                job.records + i * g.groups() * f12::kRecordBytes, job);
  }
}

void decode_units(const DecodeJob& job) {
  const f12::Geometry& g = job.geometry;
  for (uint64_t u = job.unit_begin; u < job.unit_end; ++u) {
    const uint64_t i = u - job.unit_begin;
    f12::UnitPlanes unit = job.planes;
    unit.codes += i * g.tiles() * f12::kTileBytes;
    unit.windows += i * f12::kUnitRows;
    unit.records += i * g.groups() * f12::kRecordBytes;
    tile::decode_unit(unit, job.pool, g.k, 0, rows_of_unit(g, u), job.words + i * f12::kUnitRows * 2 * g.k);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace weightd::store
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace weightd::store {
namespace {

HWY_EXPORT(encode_units);
HWY_EXPORT(decode_units);

constexpr uint64_t kMaxDimension = 0xFFFFFFFFU;
constexpr uint64_t kMaxPoolBytes = (uint64_t{1} << 32) * f12::kPoolAlign;

/// Sizes of the planes of a range of units. Absent when one does not fit 63 bits.
struct RangeSizes {
  uint64_t words = 0, codes = 0, windows = 0, records = 0;
};

std::optional<uint64_t> product(std::initializer_list<uint64_t> factors) {
  uint64_t result = 1;
  for (const uint64_t factor : factors) {
    if (__builtin_mul_overflow(result, factor, &result) || result > (uint64_t{1} << 62)) return std::nullopt;
  }
  return result;
}

Result<RangeSizes> range_sizes(const f12::Geometry& g, uint64_t unit_begin, uint64_t unit_end) {
  if (g.n > kMaxDimension || g.k > kMaxDimension) {
    return Status::invalid_argument("f12: matrix of " + std::to_string(g.n) + " x " + std::to_string(g.k) +
                                    ": a dimension passes 2^32 - 1");
  }
  if (unit_begin > unit_end || unit_end > g.units()) {
    return Status::invalid_argument("f12: units " + std::to_string(unit_begin) + " to " + std::to_string(unit_end) +
                                    " of a matrix of " + std::to_string(g.units()));
  }
  const uint64_t units = unit_end - unit_begin;
  const uint64_t rows = std::min(g.n, unit_end * f12::kUnitRows) - std::min(g.n, unit_begin * f12::kUnitRows);
  const auto words = product({rows, g.k, 2});
  const auto codes = product({units, g.tiles(), f12::kTileBytes});
  const auto records = product({units, g.groups(), f12::kRecordBytes});
  if (!words || !codes || !records) {
    return Status::invalid_argument("f12: a matrix of " + std::to_string(g.n) + " x " + std::to_string(g.k) +
                                    " does not fit the address space");
  }
  return RangeSizes{*words, *codes, units * f12::kUnitRows, *records};
}

Status check_size(const char* what, uint64_t have, uint64_t want) {
  if (have == want) return {};
  return Status::invalid_argument(std::string("f12: ") + what + " of " + std::to_string(have) + " bytes, expected " +
                                  std::to_string(want));
}

Status check_planes(const RangeSizes& sizes, uint64_t codes, uint64_t windows, uint64_t records) {
  WEIGHTD_RETURN_IF_ERROR(check_size("codes", codes, sizes.codes));
  WEIGHTD_RETURN_IF_ERROR(check_size("windows", windows, sizes.windows));
  return check_size("records", records, sizes.records);
}

const uint8_t* bytes_of(std::span<const std::byte> span) { return reinterpret_cast<const uint8_t*>(span.data()); }
uint8_t* bytes_of(std::span<std::byte> span) { return reinterpret_cast<uint8_t*>(span.data()); }

int thread_count(int threads, uint64_t units) {
  const uint64_t want = threads > 0 ? static_cast<uint64_t>(threads) : std::max(1U, std::thread::hardware_concurrency());
  return static_cast<int>(std::clamp<uint64_t>(want, 1, std::max<uint64_t>(units, 1)));
}

/// The range [0, count) cut into `parts`: bounds of part `part`.
std::pair<uint64_t, uint64_t> part_of(uint64_t count, uint64_t parts, uint64_t part) {
  return {count / parts * part + std::min(part, count % parts), count / parts * (part + 1) + std::min(part + 1, count % parts)};
}

/// Pool offsets that count from a part's own pool come to count from the model's. `delta` is in units of 16 bytes.
void move_offsets(uint8_t* records, uint64_t record_count, uint64_t delta) {
  if (delta == 0) return;
  for (uint64_t i = 0; i < record_count; ++i) {
    uint8_t* record = records + i * f12::kRecordBytes;
    if (record[f12::kGroupTiles - 1] <= f12::kInlineEscapes) continue;
    const auto offset = static_cast<uint32_t>(f12::load_u32(record + f12::kRecordWordsOffset) + delta);
    std::memcpy(record + f12::kRecordWordsOffset, &offset, sizeof offset);
  }
}

/// Encodes one part; false when its pool outgrew memory.
bool encode_part(EncodeJob& job) {
  try {
    HWY_DYNAMIC_DISPATCH(encode_units)(job);
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

bool encode_parts(std::vector<EncodeJob>& jobs) {
  std::atomic<bool> ok{true};
  parallel_ranges(jobs.size(), 1, static_cast<int>(jobs.size()), [&](uint64_t begin, uint64_t end) {
    for (uint64_t i = begin; i < end; ++i) {
      if (!encode_part(jobs[i])) ok = false;
    }
  });
  return ok;
}

/// Appends the parts' pools behind one another and makes the records' offsets count from the model's pool. False without memory.
bool join_pools(std::vector<EncodeJob>& jobs, const f12::Geometry& geometry, uint64_t pool_bytes, uint64_t pool_offset_bytes) {
  std::vector<std::byte>& pool = *jobs.front().pool;
  try {
    pool.reserve(pool_bytes);
  } catch (const std::bad_alloc&) {
    return false;
  }
  for (EncodeJob& job : jobs) {
    const uint64_t base = pool_offset_bytes + (job.pool == &pool ? 0 : pool.size());
    move_offsets(job.records, (job.unit_end - job.unit_begin) * geometry.groups(), base / f12::kPoolAlign);
    if (job.pool != &pool) pool.insert(pool.end(), job.pool->begin(), job.pool->end());
  }
  return true;
}

}  // namespace

void F12Stats::operator+=(const F12Stats& other) {
  escapes += other.escapes;
  listed_groups += other.listed_groups;
  dense_groups += other.dense_groups;
}

Status f12_encode(std::span<const std::byte> words, const f12::Geometry& geometry, uint64_t unit_begin, uint64_t unit_end,
                  std::span<std::byte> codes, std::span<std::byte> windows, std::span<std::byte> records,
                  std::vector<std::byte>& pool, uint64_t pool_offset_bytes, int threads, F12Stats* stats) {
  WEIGHTD_ASSIGN_OR_RETURN(const RangeSizes sizes, range_sizes(geometry, unit_begin, unit_end));
  WEIGHTD_RETURN_IF_ERROR(check_size("words", words.size(), sizes.words));
  WEIGHTD_RETURN_IF_ERROR(check_planes(sizes, codes.size(), windows.size(), records.size()));
  if (pool_offset_bytes % f12::kPoolAlign != 0 || pool.size() % f12::kPoolAlign != 0) {
    return Status::invalid_argument("f12: the pool's offset and size are multiples of 16");
  }
  const uint64_t units = unit_end - unit_begin;
  if (units == 0) return {};

  const auto parts = static_cast<uint64_t>(thread_count(threads, units));
  const uint64_t record_bytes = geometry.groups() * f12::kRecordBytes;
  const uint64_t pool_bytes_before = pool.size();
  std::vector<std::vector<std::byte>> part_pools(parts);
  std::vector<EncodeJob> jobs(parts);
  for (uint64_t part = 0; part < parts; ++part) {
    const auto [begin, end] = part_of(units, parts, part);
    EncodeJob& job = jobs[part];
    job.geometry = geometry;
    job.unit_begin = unit_begin + begin;
    job.unit_end = unit_begin + end;
    job.words = bytes_of(words) + begin * f12::kUnitRows * 2 * geometry.k;
    job.codes = bytes_of(codes) + begin * geometry.tiles() * f12::kTileBytes;
    job.windows = bytes_of(windows) + begin * f12::kUnitRows;
    job.records = bytes_of(records) + begin * record_bytes;
    job.pool = part == 0 ? &pool : &part_pools[part];  // one thread appends in place
  }
  const bool encoded = encode_parts(jobs);

  uint64_t pool_bytes = pool.size();
  for (const std::vector<std::byte>& part_pool : part_pools) pool_bytes += part_pool.size();
  const bool fits = pool_offset_bytes <= kMaxPoolBytes && pool_bytes <= kMaxPoolBytes - pool_offset_bytes;
  if (!encoded || !fits || !join_pools(jobs, geometry, pool_bytes, pool_offset_bytes)) {
    pool.resize(pool_bytes_before);
    if (encoded && !fits) {
      return Status::resource_exhausted("f12: the model's pool of escapes passes " + std::to_string(kMaxPoolBytes) + " bytes");
    }
    return Status::resource_exhausted("f12: no memory for a pool of escapes of " + std::to_string(pool_bytes) + " bytes");
  }
  if (stats != nullptr) {
    for (const EncodeJob& job : jobs) *stats += job.stats;
  }
  return {};
}

// --- validation --------------------------------------------------------------------------------------------------------------

namespace {

/// Where a rule was broken.
std::string place(uint64_t unit, uint64_t group) {
  return "f12: unit " + std::to_string(unit) + ", group " + std::to_string(group);
}

bool all_zero(const uint8_t* bytes, size_t count) {
  return std::all_of(bytes, bytes + count, [](uint8_t byte) { return byte == 0; });
}

/// Marks of the cells of one tile that the matrix does not have, in the layout of the tile's planes.
class PaddingMask {
 public:
  PaddingMask(uint32_t rows, uint64_t columns) {
    for (uint32_t pos = 0; pos < f12::kDenseTileBytes; ++pos) {
      if (f12::scratch_row(pos) >= rows || f12::scratch_column(pos) >= columns) high_[pos] = 0xFF;
    }
    for (uint32_t i = 0; i < f12::kTilePlaneBytes; i += sizeof(uint32_t)) {
      const uint32_t a = f12::load_u32(high_.data() + i) & 0x87878787U;
      const uint32_t b = f12::load_u32(high_.data() + f12::kTilePlaneBytes + i) & 0x87878787U;
      const uint32_t merged = a | std::rotr(b, 4);
      std::memcpy(codes_.data() + i, &merged, sizeof merged);
    }
  }
  bool padding(uint32_t pos) const { return high_[pos] != 0; }
  /// Whether the padding of a tile's three planes is 0.
  bool clean_tile(const uint8_t* tile) const {
    return clean(tile, high_.data(), high_.size()) && clean(tile + 2 * f12::kTilePlaneBytes, codes_.data(), codes_.size());
  }
  bool clean_dense(const uint8_t* block) const { return clean(block, high_.data(), high_.size()); }

 private:
  static bool clean(const uint8_t* bytes, const uint8_t* mask, size_t count) {
    uint64_t dirty = 0;
    for (size_t i = 0; i < count; i += sizeof(uint64_t)) {
      uint64_t value = 0, masked = 0;
      std::memcpy(&value, bytes + i, sizeof value);
      std::memcpy(&masked, mask + i, sizeof masked);
      dirty |= value & masked;
    }
    return dirty == 0;
  }

  std::array<uint8_t, f12::kDenseTileBytes> high_{};  // also the planes L_A, L_B, one after the other
  std::array<uint8_t, f12::kTilePlaneBytes> codes_{};
};

/// Checks one range of units, in order.
class Validator {
 public:
  Validator(const f12::Geometry& geometry, f12::PoolView pool) : geometry_(geometry), pool_(pool) {
    const uint64_t tail_columns = geometry.k % f12::kTileCols;
    const auto tail_rows = static_cast<uint32_t>(geometry.n % f12::kUnitRows);
    if (tail_columns != 0) edges_[0].emplace(f12::kUnitRows, tail_columns);
    if (tail_rows != 0) edges_[1].emplace(tail_rows, f12::kTileCols);
    if (tail_columns != 0 && tail_rows != 0) edges_[2].emplace(tail_rows, tail_columns);
  }

  Status check_unit(uint64_t unit, const f12::UnitPlanes& planes) {
    WEIGHTD_RETURN_IF_ERROR(check_windows(unit, planes.windows));
    const uint64_t tiles = geometry_.tiles();
    const uint64_t whole_tiles = unit_is_whole(unit) ? geometry_.k / f12::kTileCols : 0;  // those have no padding
    for (uint64_t t = whole_tiles; t < tiles; ++t) {
      if (mask_of(unit, t)->clean_tile(planes.codes + t * f12::kTileBytes)) continue;
      return Status::corruption("f12: unit " + std::to_string(unit) + ", tile " + std::to_string(t) +
                                ": codes of padding are not 0");
    }
    for (uint64_t group = 0; group < geometry_.groups(); ++group) {
      WEIGHTD_RETURN_IF_ERROR(check_record(unit, group, planes.records + group * f12::kRecordBytes));
    }
    return {};
  }

 private:
  bool unit_is_whole(uint64_t unit) const { return (unit + 1) * f12::kUnitRows <= geometry_.n; }
  bool tile_is_whole(uint64_t t) const { return (t + 1) * f12::kTileCols <= geometry_.k; }
  const PaddingMask* mask_of(uint64_t unit, uint64_t t) const {
    if (unit_is_whole(unit)) return tile_is_whole(t) ? nullptr : &*edges_[0];
    return tile_is_whole(t) ? &*edges_[1] : &*edges_[2];
  }

  Status check_windows(uint64_t unit, const uint8_t* windows) const {
    const uint32_t rows = rows_of_unit(geometry_, unit);
    for (uint32_t row = 0; row < f12::kUnitRows; ++row) {
      const uint32_t limit = row < rows ? f12::kMaxWindow : 0;
      if (windows[row] <= limit) continue;
      return Status::corruption("f12: window " + std::to_string(windows[row]) + " of row " +
                                std::to_string(unit * f12::kUnitRows + row) + " passes " + std::to_string(limit));
    }
    return {};
  }

  Status check_record(uint64_t unit, uint64_t group, const uint8_t* record) {
    const auto tiles = static_cast<uint32_t>(std::min<uint64_t>(f12::kGroupTiles, geometry_.tiles() - group * f12::kGroupTiles));
    for (uint32_t i = 1; i < f12::kGroupTiles; ++i) {
      if (record[i] < record[i - 1]) return Status::corruption(place(unit, group) + ": counts decrease");
      if (i >= tiles && record[i] != record[i - 1]) {
        return Status::corruption(place(unit, group) + ": escapes of tiles that do not exist");
      }
    }
    const uint32_t count = record[f12::kGroupTiles - 1];
    const uint8_t* words = record + f12::kRecordWordsOffset;
    const size_t used = count <= f12::kInlineEscapes ? count * sizeof(uint32_t) : sizeof(uint32_t);
    if (!all_zero(words + used, f12::kRecordWords * sizeof(uint32_t) - used)) {
      return Status::corruption(place(unit, group) + ": unused words are not 0");
    }
    if (count <= f12::kInlineEscapes) return check_entries(unit, group, record, words);
    const uint64_t offset = uint64_t{f12::load_u32(words)} * f12::kPoolAlign;
    return count == f12::kDenseEnd ? check_dense(unit, group, record, tiles, offset) : check_list(unit, group, record, offset);
  }

  /// Lists and dense blocks follow one another without gaps, so that any range of units is one range of the pool.
  Status take(uint64_t unit, uint64_t group, uint64_t offset, uint64_t bytes, const uint8_t*& data) {
    data = pool_.at(offset, bytes);
    if (data == nullptr) {
      return Status::corruption(place(unit, group) + ": pool range of " + std::to_string(bytes) + " bytes at " +
                                std::to_string(offset) + " is outside the pool");
    }
    if (next_ && *next_ != offset) {
      return Status::corruption(place(unit, group) + ": pool offset " + std::to_string(offset) + ", expected " +
                                std::to_string(*next_));
    }
    next_ = offset + bytes;
    return {};
  }

  Status check_list(uint64_t unit, uint64_t group, const uint8_t* record, uint64_t offset) {
    const uint64_t used = uint64_t{record[f12::kGroupTiles - 1]} * sizeof(uint32_t);
    const uint64_t bytes = f12::align_up(used, f12::kPoolAlign);
    const uint8_t* list = nullptr;
    WEIGHTD_RETURN_IF_ERROR(take(unit, group, offset, bytes, list));
    if (!all_zero(list + used, bytes - used)) return Status::corruption(place(unit, group) + ": padding of the list is not 0");
    return check_entries(unit, group, record, list);
  }

  Status check_dense(uint64_t unit, uint64_t group, const uint8_t* record, uint32_t tiles, uint64_t offset) {
    if (record[0] != f12::kDenseEnd) return Status::corruption(place(unit, group) + ": counts of a dense group are not all 255");
    const uint8_t* blocks = nullptr;
    WEIGHTD_RETURN_IF_ERROR(take(unit, group, offset, uint64_t{tiles} * f12::kDenseTileBytes, blocks));
    for (uint32_t i = 0; i < tiles; ++i) {
      const PaddingMask* mask = mask_of(unit, group * f12::kGroupTiles + i);
      if (mask != nullptr && !mask->clean_dense(blocks + i * f12::kDenseTileBytes)) {
        return Status::corruption(place(unit, group) + ": padding of a dense block is not 0");
      }
    }
    return {};
  }

  Status check_entries(uint64_t unit, uint64_t group, const uint8_t* record, const uint8_t* entries) const {
    for (uint32_t i = 0; i < f12::kGroupTiles; ++i) {
      const PaddingMask* mask = record[i] == (i == 0 ? 0 : record[i - 1]) ? nullptr : mask_of(unit, group * f12::kGroupTiles + i);
      uint32_t above = 0;  // one more than the last pos
      for (uint32_t e = i == 0 ? 0U : record[i - 1]; e < record[i]; ++e) {
        const uint32_t entry = f12::load_u32(entries + e * sizeof(uint32_t));
        const uint32_t pos = f12::entry_pos(entry);
        const char* rule = pos >= f12::kDenseTileBytes             ? ": an entry lies outside its tile"
                           : f12::entry_high(entry) > 0xFF         ? ": reserved bits of an entry are not 0"
                           : pos < above                           ? ": entries are not in ascending order"
                           : mask != nullptr && mask->padding(pos) ? ": an entry lies in the padding"
                                                                   : nullptr;
        if (rule != nullptr) return Status::corruption(place(unit, group) + rule);
        above = pos + 1;
      }
    }
    return {};
  }

  f12::Geometry geometry_;
  f12::PoolView pool_;
  std::array<std::optional<PaddingMask>, 3> edges_;  // right edge, bottom edge, corner
  std::optional<uint64_t> next_;                     // where the next list or dense group starts
};

Status validate_units(const f12::Geometry& g, uint64_t unit_begin, uint64_t unit_end, const f12::UnitPlanes& planes,
                      const f12::PoolView& pool) {
  Validator validator(g, pool);
  for (uint64_t u = unit_begin; u < unit_end; ++u) {
    const uint64_t i = u - unit_begin;
    f12::UnitPlanes unit = planes;
    unit.codes += i * g.tiles() * f12::kTileBytes;
    unit.windows += i * f12::kUnitRows;
    unit.records += i * g.groups() * f12::kRecordBytes;
    WEIGHTD_RETURN_IF_ERROR(validator.check_unit(u, unit));
  }
  return {};
}

}  // namespace

Status f12_validate(const f12::Geometry& geometry, uint64_t unit_begin, uint64_t unit_end, std::span<const std::byte> codes,
                    std::span<const std::byte> windows, std::span<const std::byte> records, std::span<const std::byte> pool,
                    uint64_t pool_offset_bytes) {
  WEIGHTD_ASSIGN_OR_RETURN(const RangeSizes sizes, range_sizes(geometry, unit_begin, unit_end));
  WEIGHTD_RETURN_IF_ERROR(check_planes(sizes, codes.size(), windows.size(), records.size()));
  return validate_units(geometry, unit_begin, unit_end, {bytes_of(codes), bytes_of(windows), bytes_of(records)},
                        {{bytes_of(pool), pool.size()}, pool_offset_bytes});
}

Status f12_decode(const f12::Geometry& geometry, uint64_t unit_begin, uint64_t unit_end, std::span<const std::byte> codes,
                  std::span<const std::byte> windows, std::span<const std::byte> records, std::span<const std::byte> pool,
                  uint64_t pool_offset_bytes, std::span<std::byte> words, int threads) {
  WEIGHTD_ASSIGN_OR_RETURN(const RangeSizes sizes, range_sizes(geometry, unit_begin, unit_end));
  WEIGHTD_RETURN_IF_ERROR(check_planes(sizes, codes.size(), windows.size(), records.size()));
  WEIGHTD_RETURN_IF_ERROR(check_size("words", words.size(), sizes.words));
  const f12::UnitPlanes planes{bytes_of(codes), bytes_of(windows), bytes_of(records)};
  const f12::PoolView pool_view{{bytes_of(pool), pool.size()}, pool_offset_bytes};
  WEIGHTD_RETURN_IF_ERROR(validate_units(geometry, unit_begin, unit_end, planes, pool_view));

  const uint64_t units = unit_end - unit_begin;
  parallel_ranges(units, 1, thread_count(threads, units), [&](uint64_t begin, uint64_t end) {
    DecodeJob job;
    job.geometry = geometry;
    job.unit_begin = unit_begin + begin;
    job.unit_end = unit_begin + end;
    job.planes.codes = planes.codes + begin * geometry.tiles() * f12::kTileBytes;
    job.planes.windows = planes.windows + begin * f12::kUnitRows;
    job.planes.records = planes.records + begin * geometry.groups() * f12::kRecordBytes;
    job.pool = pool_view;
    job.words = bytes_of(words) + begin * f12::kUnitRows * 2 * geometry.k;
    HWY_DYNAMIC_DISPATCH(decode_units)(job);
  });
  return {};
}

}  // namespace weightd::store
#endif  // HWY_ONCE
