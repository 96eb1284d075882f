// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/f12_cuda.h"
#include "kernels/ptx.cuh"
#include "store/tile_layout.h"

/// From a tile's bytes to the A fragments of mma.m16n8k16. Lane l = 4g + q; k16 step j of a tile; fragment registers
///   a[j][0]: row g,     columns 16j + 2q, +1         a[j][2]: row g,     columns 16j + 8 + 2q, +1
///   a[j][1]: row g + 8, columns 16j + 2q, +1         a[j][3]: row g + 8, columns 16j + 8 + 2q, +1
/// in the tile, the even column in the low half. Drawings in LAYOUT.md.
namespace weightd::kernels {

inline constexpr uint32_t kSignAndIndex = 0x87878787U;  // bits {7, 2, 1, 0} of each byte
inline constexpr uint32_t kMergeLow = 0x5140U;          // PRMT: bytes 0 and 1 of (low, high), interleaved
inline constexpr uint32_t kMergeHigh = 0x7362U;         // bytes 2 and 3
inline constexpr uint32_t kScratchVectors = 64;         // 1 KiB a warp: the high bytes of one tile

/// One record: its eight running counts in registers (byte i = end[i]), its six words where they are (shared or global memory).
struct Record {
  uint64_t ends;
  const uint32_t* words;

  /// `record` lies in memory that a plain load reads.
  __device__ static Record load(const std::byte* record) {
    return {*reinterpret_cast<const uint64_t*>(record), reinterpret_cast<const uint32_t*>(record + f12::kGroupTiles)};
  }
  __device__ uint32_t end(uint32_t tile_in_group) const { return static_cast<uint32_t>(ends >> (8 * tile_in_group)) & 255U; }
  __device__ uint32_t begin(uint32_t tile_in_group) const {
    return static_cast<uint32_t>((ends << 8) >> (8 * tile_in_group)) & 255U;
  }
  __device__ uint32_t total() const { return static_cast<uint32_t>(ends >> 56); }
};

/// The entries of one group's escapes, clipped to what is really there, so that a damaged record reads nothing else.
struct EntryList {
  const uint32_t* entries;
  uint32_t limit;

  __device__ EntryList(const Record& record, const std::byte* pool, uint64_t pool_bytes) {
    if (record.total() <= f12::kInlineEscapes) {
      entries = record.words;
      limit = f12::kInlineEscapes;
    } else {
      const uint64_t offset = uint64_t{record.words[0]} * f12::kPoolAlign;
      entries = reinterpret_cast<const uint32_t*>(pool + offset);
      limit = offset >= pool_bytes ? 0 : static_cast<uint32_t>(min((pool_bytes - offset) / 4, uint64_t{f12::kListEscapes}));
    }
  }
};

/// The true high bytes of tile `tile_in_group` of a dense group, or null when the record points outside the pool.
__device__ __forceinline__ const std::byte* dense_tile(const Record& record, uint32_t tile_in_group, const std::byte* pool,
                                                       uint64_t pool_bytes) {
  const uint64_t offset = uint64_t{record.words[0]} * f12::kPoolAlign + tile_in_group * f12::kDenseTileBytes;
  return offset + f12::kDenseTileBytes <= pool_bytes ? pool + offset : nullptr;
}

/// Puts the true high bytes of the tile's escapes into ha and hb (words j of planes A and B). Called by whole warps with the same
/// arguments; `scratch` is the warp's own 1 KiB of shared memory.
__device__ __forceinline__ void patch_tile(const Record& record, uint32_t tile_in_group, const F12DeviceMatrix& w, uint32_t scratch,
                                           uint32_t lane, uint4& ha, uint4& hb) {
  const uint32_t begin = record.begin(tile_in_group);
  uint32_t end = record.end(tile_in_group);
  if (record.total() == f12::kDenseEnd) {
    if (const std::byte* high = dense_tile(record, tile_in_group, w.pool, w.pool_bytes)) {
      ha = ptx::load_streaming(high + 16 * lane);
      hb = ptx::load_streaming(high + f12::kTilePlaneBytes + 16 * lane);
    }
  } else if (begin != end) {
    const EntryList list(record, w.pool, w.pool_bytes);
    end = min(end, list.limit);
    ptx::store_shared(scratch + 16 * lane, ha);
    ptx::store_shared(scratch + f12::kTilePlaneBytes + 16 * lane, hb);
    __syncwarp();
    for (uint32_t i = begin + lane; i < end; i += 32) {
      const uint32_t entry = list.entries[i];
      ptx::store_shared_byte(scratch + (entry & 1023U), (entry >> 16) & 255U);
    }
    __syncwarp();
    ha = ptx::load_shared(scratch + 16 * lane);
    hb = ptx::load_shared(scratch + f12::kTilePlaneBytes + 16 * lane);
  }
}

struct Fragments {
  uint32_t a[4][4];  // [k16 step][register]
};

__device__ __forceinline__ void merge_bytes(uint32_t low_a, uint32_t low_b, uint32_t high_a, uint32_t high_b, uint32_t (&a)[4]) {
  a[0] = __byte_perm(low_a, high_a, kMergeLow);
  a[1] = __byte_perm(low_b, high_b, kMergeLow);
  a[2] = __byte_perm(low_a, high_a, kMergeHigh);
  a[3] = __byte_perm(low_b, high_b, kMergeHigh);
}

/// The f12 tile: planes L_A, L_B, C; one 16-byte vector of each a lane.
struct F12Tile {
  static constexpr uint32_t kBytes = f12::kTileBytes;
  static constexpr uint32_t kVectors = 3;
  static constexpr bool kHasRecords = true;

  struct Windows {  // of rows g and g + 8, in every byte
    uint32_t a = 0, b = 0;
  };

  __device__ static Windows load_windows(const F12DeviceMatrix& w, uint64_t unit, uint32_t lane) {
    const auto* rows = reinterpret_cast<const uint8_t*>(w.windows) + unit * f12::kUnitRows + lane / 4;
    return {rows[0] * 0x01010101U, rows[8] * 0x01010101U};
  }

  /// Low and high bytes of the weights, not merged yet.
  struct Halves {
    uint4 la, lb, ha, hb;
  };

  /// `patch(ha, hb)` may replace high bytes.
  template <typename Patch>
  __device__ __forceinline__ static Halves split(const uint4 (&v)[kVectors], const Windows& windows, Patch&& patch) {
    const uint4 c = v[2];
    uint4 ha = {(c.x & kSignAndIndex) + windows.a, (c.y & kSignAndIndex) + windows.a, (c.z & kSignAndIndex) + windows.a,
                (c.w & kSignAndIndex) + windows.a};
    uint4 hb = {high_b(c.x, windows.b), high_b(c.y, windows.b), high_b(c.z, windows.b), high_b(c.w, windows.b)};
    patch(ha, hb);
    return {v[0], v[1], ha, hb};
  }

  __device__ __forceinline__ static Fragments merge(const Halves& h) {
    Fragments f;
    merge_bytes(h.la.x, h.lb.x, h.ha.x, h.hb.x, f.a[0]);
    merge_bytes(h.la.y, h.lb.y, h.ha.y, h.hb.y, f.a[1]);
    merge_bytes(h.la.z, h.lb.z, h.ha.z, h.hb.z, f.a[2]);
    merge_bytes(h.la.w, h.lb.w, h.ha.w, h.hb.w, f.a[3]);
    return f;
  }

  template <typename Patch>
  __device__ static Fragments decode(const uint4 (&v)[kVectors], const Windows& windows, Patch&& patch) {
    return merge(split(v, windows, patch));
  }

  __device__ static uint32_t high_b(uint32_t c, uint32_t window) { return (__funnelshift_l(c, c, 4) & kSignAndIndex) + window; }
};

/// The oracle's tile: the four fragment registers of step j as they are, 512 bytes a step, 16 a lane. No escapes.
struct Raw16Tile {
  static constexpr uint32_t kBytes = 2048;
  static constexpr uint32_t kVectors = 4;
  static constexpr bool kHasRecords = false;
  struct Windows {};
  __device__ static Windows load_windows(const F12DeviceMatrix&, uint64_t, uint32_t) { return {}; }

  struct Halves {
    uint4 v[kVectors];
  };

  template <typename Patch>
  __device__ __forceinline__ static Halves split(const uint4 (&v)[kVectors], const Windows&, Patch&&) {
    return {{v[0], v[1], v[2], v[3]}};
  }

  __device__ __forceinline__ static Fragments merge(const Halves& h) {
    return {{{h.v[0].x, h.v[0].y, h.v[0].z, h.v[0].w},
             {h.v[1].x, h.v[1].y, h.v[1].z, h.v[1].w},
             {h.v[2].x, h.v[2].y, h.v[2].z, h.v[2].w},
             {h.v[3].x, h.v[3].y, h.v[3].z, h.v[3].w}}};
  }

  template <typename Patch>
  __device__ static Fragments decode(const uint4 (&v)[kVectors], const Windows& windows, Patch&& patch) {
    return merge(split(v, windows, patch));
  }
};

template <typename Tile>
__device__ __forceinline__ void load_tile(const std::byte* tile, uint32_t lane, uint4 (&v)[Tile::kVectors]) {
#pragma unroll
  for (uint32_t i = 0; i < Tile::kVectors; ++i) v[i] = ptx::load_streaming(tile + 512 * i + 16 * lane);
}

template <typename Tile>
__device__ __forceinline__ void load_tile_shared(uint32_t tile, uint32_t lane, uint4 (&v)[Tile::kVectors]) {
#pragma unroll
  for (uint32_t i = 0; i < Tile::kVectors; ++i) v[i] = ptx::load_shared(tile + 512 * i + 16 * lane);
}

/// In each quad of lanes: lane q's r.w[i] becomes lane i's old r.w[q].
__device__ __forceinline__ void transpose_quad(uint32_t lane, uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3) {
  const auto exchange = [](bool upper, uint32_t mask, uint32_t& low, uint32_t& high) {
    const uint32_t received = __shfl_xor_sync(0xffffffffU, upper ? low : high, mask);
    if (upper) {
      low = received;
    } else {
      high = received;
    }
  };
  exchange((lane & 1) != 0, 1, r0, r1);
  exchange((lane & 1) != 0, 1, r2, r3);
  exchange((lane & 2) != 0, 2, r0, r2);
  exchange((lane & 2) != 0, 2, r1, r3);
}

}  // namespace weightd::kernels
