// SPDX-License-Identifier: Apache-2.0
#include "kernels/f12_check.h"

#include <algorithm>
#include <string>

#include "kernels/launch.h"
#include "kernels/tile.cuh"

namespace weightd::kernels {
namespace {

constexpr uint32_t kWarps = 8;
constexpr uint64_t kMaxGrid = 0x7FFFFFFF;
constexpr uint32_t kSearchDepth = 8;  // records that a lane looks at in one step of a search
constexpr uint32_t kNotFound = 0xFFFFFFFFU;

struct CheckArgs {
  F12DeviceMatrix w;
  uint64_t pool_base;
  uint64_t units, tiles, groups;
  unsigned long long* first_damaged_unit;

  [[nodiscard]] __device__ Record record(uint64_t index) const { return Record::load(w.records + index * f12::kRecordBytes); }
  [[nodiscard]] __device__ uint32_t group_tiles(uint64_t group) const {
    return static_cast<uint32_t>(min(uint64_t{f12::kGroupTiles}, tiles - group * f12::kGroupTiles));
  }
};

/// The part of a unit that a warp checks: one group. In a unit of no columns it is the windows alone.
struct Place {
  uint64_t unit, group;
  uint32_t rows;   // of the unit that the matrix has
  uint32_t tiles;  // of the group that the matrix has

  [[nodiscard]] __device__ uint64_t first_tile() const { return group * f12::kGroupTiles; }
};

/// Columns of tile t that the matrix has; at most 64.
__device__ uint32_t tile_columns(const CheckArgs& args, uint64_t t) {
  return static_cast<uint32_t>(min(uint64_t{f12::kTileCols}, args.w.k - t * f12::kTileCols));
}

/// A list or the blocks of a dense group. Offsets count from the start of the model's pool.
struct PoolRange {
  uint64_t begin, bytes;

  /// Of a record that uses the pool.
  __device__ PoolRange(const Record& record, uint32_t tiles)
      : begin(uint64_t{record.words[0]} * f12::kPoolAlign),
        bytes(record.total() == f12::kDenseEnd ? uint64_t{tiles} * f12::kDenseTileBytes
                                               : f12::align_up(record.total() * sizeof(uint32_t), f12::kPoolAlign)) {}
  /// The bytes, or null where this storage's part of the pool does not have them all.
  [[nodiscard]] __device__ const std::byte* at(const CheckArgs& args) const {
    if (begin < args.pool_base || begin - args.pool_base > args.w.pool_bytes) return nullptr;
    return bytes <= args.w.pool_bytes - (begin - args.pool_base) ? args.w.pool + (begin - args.pool_base) : nullptr;
  }
};

// --- rules; each is true in a lane that sees it broken -------------------------------------------------------------------

__device__ bool bad_window(const CheckArgs& args, const Place& place, uint32_t lane) {
  if (place.group != 0 || lane >= f12::kUnitRows) return false;
  const auto* windows = reinterpret_cast<const uint8_t*>(args.w.windows) + place.unit * f12::kUnitRows;
  return windows[lane] > (lane < place.rows ? f12::kMaxWindow : 0);
}

__device__ bool bad_counts(const Record& record, const Place& place, uint32_t lane) {
  if (lane == 0) return record.total() == f12::kDenseEnd && record.end(0) != f12::kDenseEnd;
  if (lane >= f12::kGroupTiles) return false;
  const uint32_t before = record.end(lane - 1);
  const uint32_t end = record.end(lane);
  return end < before || (lane >= place.tiles && end != before);
}

__device__ bool bad_unused_words(const Record& record, uint32_t lane) {
  const uint32_t used = record.total() <= f12::kInlineEscapes ? record.total() : 1;
  return lane >= used && lane < f12::kRecordWords && record.words[lane] != 0;
}

/// 0xFF in the bytes of word `word` of a lane that stand for padding.
__device__ uint32_t padding_mask(bool padding_row, uint32_t columns, uint32_t lane, uint32_t word) {
  uint32_t mask = 0;
#pragma unroll
  for (uint32_t b = 0; b < 4; ++b) {
    if (padding_row || f12::tile_column(lane, word, b) >= columns) mask |= 0xFFU << (8 * b);
  }
  return mask;
}

/// Whether padding bytes of a tile's planes A and B, and of its codes C if there are any, are not 0. All 16-byte aligned.
__device__ bool bad_padding(const std::byte* a, const std::byte* b, const std::byte* c, uint32_t rows, uint32_t columns,
                            uint32_t lane) {
  uint32_t dirty = 0;
#pragma unroll
  for (uint32_t word = 0; word < 4; ++word) {
    const uint32_t at = 16 * lane + 4 * word;
    const uint32_t mask_a = padding_mask(lane / 4 >= rows, columns, lane, word);
    const uint32_t mask_b = padding_mask(lane / 4 + 8 >= rows, columns, lane, word);
    dirty |= *reinterpret_cast<const uint32_t*>(a + at) & mask_a;
    dirty |= *reinterpret_cast<const uint32_t*>(b + at) & mask_b;
    if (c == nullptr) continue;
    const uint32_t codes_b = mask_b & kSignAndIndex;
    dirty |= *reinterpret_cast<const uint32_t*>(c + at) & ((mask_a & kSignAndIndex) | __funnelshift_r(codes_b, codes_b, 4));
  }
  return dirty != 0;
}

/// Asks `check(i, columns)` of every tile i of the group that has padding.
template <typename Check>
__device__ bool any_padded_tile(const CheckArgs& args, const Place& place, Check&& check) {
  bool bad = false;
  for (uint32_t i = 0; i < place.tiles; ++i) {
    const uint32_t columns = tile_columns(args, place.first_tile() + i);
    if (place.rows == f12::kUnitRows && columns == f12::kTileCols) continue;
    bad |= check(i, columns);
  }
  return bad;
}

__device__ bool bad_codes(const CheckArgs& args, const Place& place, uint32_t lane) {
  const std::byte* codes = args.w.codes + (place.unit * args.tiles + place.first_tile()) * f12::kTileBytes;
  return any_padded_tile(args, place, [&](uint32_t i, uint32_t columns) {
    const std::byte* tile = codes + i * f12::kTileBytes;
    return bad_padding(tile, tile + f12::kTilePlaneBytes, tile + 2 * f12::kTilePlaneBytes, place.rows, columns, lane);
  });
}

__device__ bool bad_dense(const CheckArgs& args, const Place& place, const std::byte* blocks, uint32_t lane) {
  return any_padded_tile(args, place, [&](uint32_t i, uint32_t columns) {
    const std::byte* block = blocks + i * f12::kDenseTileBytes;
    return bad_padding(block, block + f12::kTilePlaneBytes, nullptr, place.rows, columns, lane);
  });
}

/// The counts are good. In a tile each entry is compared with the one before it.
__device__ bool bad_entries(const CheckArgs& args, const Place& place, const Record& record, const uint32_t* entries,
                            uint32_t lane) {
  bool bad = false;
  for (uint32_t e = lane; e < record.total(); e += 32) {
    uint32_t tile = 0;
    while (record.end(tile) <= e) ++tile;
    const uint32_t entry = entries[e];
    const uint32_t pos = f12::entry_pos(entry);
    bad |= pos >= f12::kDenseTileBytes || f12::entry_high(entry) > 0xFF;
    bad |= e > record.begin(tile) && pos <= f12::entry_pos(entries[e - 1]);
    bad |= f12::scratch_row(pos) >= place.rows || f12::scratch_column(pos) >= tile_columns(args, place.first_tile() + tile);
  }
  return bad;
}

__device__ bool bad_list(const CheckArgs& args, const Place& place, const Record& record, const std::byte* list, uint32_t lane) {
  const auto* words = reinterpret_cast<const uint32_t*>(list);
  const auto slots = static_cast<uint32_t>(f12::align_up(record.total(), f12::kPoolAlign / sizeof(uint32_t)));
  const bool bad_end = record.total() + lane < slots && words[record.total() + lane] != 0;
  return bad_end || bad_entries(args, place, record, words, lane);
}

/// How far before record `end` the last one is that uses the pool (0: right before it), among the 32 * kDepth before; or kNotFound.
template <uint32_t kDepth>
__device__ uint32_t search_back(const CheckArgs& args, uint64_t end, uint32_t lane) {
  const auto* totals = reinterpret_cast<const uint8_t*>(args.w.records) + f12::kGroupTiles - 1;
  uint32_t nearest = kNotFound;
#pragma unroll
  for (uint32_t i = 0; i < kDepth; ++i) {
    const uint32_t distance = 32 * (kDepth - 1 - i) + lane;
    if (distance < end && totals[(end - 1 - distance) * f12::kRecordBytes] > f12::kInlineEscapes) nearest = distance;
  }
  return __reduce_min_sync(0xffffffffU, nearest);
}

/// Lists and dense blocks follow one another without gaps: each begins where that of the last record before it that uses the pool
/// ends. That one may be damaged itself; then its unit, which is not higher, says so. All searches together read each record at
/// most once.
__device__ bool bad_order(const CheckArgs& args, uint64_t index, const PoolRange& range, uint32_t lane) {
  uint64_t end = index;
  uint32_t distance = search_back<1>(args, end, lane);
  uint64_t step = 32;
  while (distance == kNotFound) {
    if (end <= step) return false;  // the first of the matrix may begin anywhere
    end -= step;
    step = 32 * kSearchDepth;
    distance = search_back<kSearchDepth>(args, end, lane);
  }
  const uint64_t before = end - 1 - distance;
  const PoolRange before_range(args.record(before), args.group_tiles(before % args.groups));
  return before_range.begin + before_range.bytes != range.begin;
}

/// Everything but windows and codes. Called by whole warps; the same in every lane.
__device__ bool bad_record(const CheckArgs& args, const Place& place, uint32_t lane) {
  constexpr uint32_t kAll = 0xffffffffU;
  const uint64_t index = place.unit * args.groups + place.group;
  const Record record = args.record(index);
  if (__any_sync(kAll, bad_counts(record, place, lane) || bad_unused_words(record, lane))) return true;
  if (record.total() <= f12::kInlineEscapes) return __any_sync(kAll, bad_entries(args, place, record, record.words, lane));
  const PoolRange range(record, place.tiles);
  const std::byte* bytes = range.at(args);
  if (bytes == nullptr || bad_order(args, index, range, lane)) return true;
  return __any_sync(
      kAll, record.total() == f12::kDenseEnd ? bad_dense(args, place, bytes, lane) : bad_list(args, place, record, bytes, lane));
}

/// A warp takes a group of a unit.
__global__ void __launch_bounds__(32 * kWarps) check_kernel(const __grid_constant__ CheckArgs args) {
  const uint32_t lane = threadIdx.x % 32;
  const uint64_t per_unit = max(args.groups, uint64_t{1});
  const uint64_t count = args.units * per_unit;
  for (uint64_t i = uint64_t{blockIdx.x} * kWarps + threadIdx.x / 32; i < count; i += uint64_t{gridDim.x} * kWarps) {
    Place place{};
    place.unit = i / per_unit;
    place.group = i % per_unit;
    place.rows = static_cast<uint32_t>(min(uint64_t{f12::kUnitRows}, args.w.n - place.unit * f12::kUnitRows));
    bool bad = bad_window(args, place, lane);
    if (args.groups > 0) {
      place.tiles = args.group_tiles(place.group);
      bad |= bad_codes(args, place, lane);
      bad |= bad_record(args, place, lane);
    }
    if (__any_sync(0xffffffffU, bad) && lane == 0) atomicMin(args.first_damaged_unit, place.unit);
  }
}

Status refuse(const char* rule) { return Status::invalid_argument(std::string("launch_check_f12: ") + rule); }

}  // namespace

Status launch_check_f12(const F12DeviceMatrix& w, uint64_t pool_base, uint64_t* first_damaged_unit, cudaStream_t stream) {
  WEIGHTD_RETURN_IF_ERROR(check_matrix(w, "launch_check_f12"));
  if (first_damaged_unit == nullptr || reinterpret_cast<uintptr_t>(first_damaged_unit) % alignof(uint64_t) != 0) {
    return refuse("first_damaged_unit is null or not 8-byte aligned");
  }
  if (pool_base % f12::kPoolAlign != 0) return refuse("the pool's part starts at no multiple of 16");
  if (w.n == 0) return {};
  if (w.windows == nullptr) return refuse("the weight lacks a plane");
  const f12::Geometry geometry{w.n, w.k, 1};
  static_assert(sizeof(unsigned long long) == sizeof(uint64_t));
  CheckArgs args{};
  args.w = w;
  args.pool_base = pool_base;
  args.units = geometry.units();
  args.tiles = geometry.tiles();
  args.groups = geometry.groups();
  args.first_damaged_unit = reinterpret_cast<unsigned long long*>(first_damaged_unit);
  const uint64_t warps = args.units * std::max<uint64_t>(args.groups, 1);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<uint32_t>(std::min((warps + kWarps - 1) / kWarps, kMaxGrid)));
  config.blockDim = dim3(32 * kWarps);
  config.stream = stream;
  return status_from_cuda(cudaLaunchKernelEx(&config, check_kernel, args), "launch_check_f12");
}

}  // namespace weightd::kernels
