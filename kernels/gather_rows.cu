// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "kernels/launch.h"
#include "kernels/tile.cuh"

namespace weightd::kernels {
namespace {

constexpr uint32_t kWarps = 8;
constexpr uint32_t kRowTileBytes = 64;  // high bytes of one row in one tile
constexpr uint64_t kMaxGridX = (uint64_t{1} << 31) - 1;

template <typename Index>
struct GatherArgs {
  F12DeviceMatrix w;
  uint64_t tiles, groups;  // per unit
  const Index* rows;
  uint64_t count;
  uint16_t* out;
  int64_t out_stride;
  bool vector_out;
};

/// One row's place in its tiles: plane (0: A, 1: B) and the quad of lanes that holds it.
struct RowPlace {
  uint32_t plane, quad;
};

/// The high bytes of the row's cells in one group that are escapes, put into `high`, which lane (tile, q) holds for 16 cells of its
/// tile. The entries name no tile: entry i belongs to the tile at which the running count passes i.
__device__ __forceinline__ void patch_row(const Record& record, const RowPlace& place, const F12DeviceMatrix& w, uint32_t scratch,
                                          uint32_t lane, uint4& high) {
  const EntryList list(record, w.pool, w.pool_bytes);
  const uint32_t end = min(record.total(), list.limit);
  ptx::store_shared(scratch + 16 * lane, high);
  __syncwarp();
  for (uint32_t i = lane; i < end; i += 32) {
    const uint32_t entry = list.entries[i];
    const uint32_t pos = entry & 1023U;
    if (pos / 512 != place.plane || pos % 512 / 64 != place.quad) continue;
    uint32_t tile = 0;
#pragma unroll
    for (uint32_t t = 0; t + 1 < f12::kGroupTiles; ++t) tile += record.end(t) <= i ? 1 : 0;
    ptx::store_shared_byte(scratch + kRowTileBytes * tile + pos % 64, (entry >> 16) & 255U);
  }
  __syncwarp();
  high = ptx::load_shared(scratch + 16 * lane);
}

__device__ __forceinline__ void store_words(uint16_t* out, uint64_t columns, bool vector_out, uint4 piece) {
  if (vector_out && columns >= 8) {
    *reinterpret_cast<uint4*>(out) = piece;
    return;
  }
  const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) {
    if (i < columns) out[i] = static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2)));
  }
}

/// A warp takes a group of one row: lane 4t + q the cells of tile t that MMA lane (g, q) holds.
template <typename Index>
__global__ void __launch_bounds__(32 * kWarps) gather_kernel(const __grid_constant__ GatherArgs<Index> args) {
  __shared__ uint4 scratch[kWarps][32];
  const uint32_t warp = threadIdx.x / 32;
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t tile_in_group = lane / 4;
  for (uint64_t i = blockIdx.x; i < args.count; i += gridDim.x) {
    const Index index = args.rows[i];
    const bool valid = index >= 0 && static_cast<uint64_t>(index) < args.w.n;
    const uint64_t row = valid ? static_cast<uint64_t>(index) : 0;
    const uint64_t unit = row / f12::kUnitRows;
    const RowPlace place{static_cast<uint32_t>(row / 8 % 2), static_cast<uint32_t>(row % 8)};
    const uint32_t window = static_cast<uint32_t>(args.w.windows[row]) * 0x01010101U;
    uint16_t* out = args.out + static_cast<int64_t>(i) * args.out_stride;
    for (uint64_t group = blockIdx.y * kWarps + warp; group < args.groups; group += gridDim.y * kWarps) {
      const uint64_t tile = group * f12::kGroupTiles + tile_in_group;
      const bool inside = tile < args.tiles;
      const std::byte* words = args.w.codes + (unit * args.tiles + (inside ? tile : args.tiles - 1)) * f12::kTileBytes +
                               64 * place.quad + 16 * (lane % 4);
      const uint4 low = ptx::load_streaming(words + f12::kTilePlaneBytes * place.plane);
      const uint4 codes = ptx::load_streaming(words + f12::kTilePlaneBytes * 2);
      const Record record = Record::load(args.w.records + (unit * args.groups + group) * f12::kRecordBytes);
      const uint32_t rotation = 4 * place.plane;
      const auto high_of = [&](uint32_t c) { return (__funnelshift_l(c, c, rotation) & kSignAndIndex) + window; };
      uint4 high = {high_of(codes.x), high_of(codes.y), high_of(codes.z), high_of(codes.w)};
      if (record.total() == f12::kDenseEnd) {
        const std::byte* dense = dense_tile(record, tile_in_group, args.w.pool, args.w.pool_bytes);
        if (inside && dense != nullptr) {
          high = ptx::load_streaming(dense + f12::kTilePlaneBytes * place.plane + 64 * place.quad + 16 * (lane % 4));
        }
      } else if (record.total() != 0) {
        patch_row(record, place, args.w, ptx::shared_address(scratch[warp]), lane, high);
      }
      uint4 first = {__byte_perm(low.x, high.x, kMergeLow), __byte_perm(low.x, high.x, kMergeHigh),
                     __byte_perm(low.y, high.y, kMergeLow), __byte_perm(low.y, high.y, kMergeHigh)};
      uint4 second = {__byte_perm(low.z, high.z, kMergeLow), __byte_perm(low.z, high.z, kMergeHigh),
                      __byte_perm(low.w, high.w, kMergeLow), __byte_perm(low.w, high.w, kMergeHigh)};
      transpose_quad(lane, first.x, first.y, first.z, first.w);
      transpose_quad(lane, second.x, second.y, second.z, second.w);
      if (!valid) first = second = uint4{0x7fff7fffU, 0x7fff7fffU, 0x7fff7fffU, 0x7fff7fffU};
      const uint64_t column = tile * f12::kTileCols + 8 * (lane % 4);
      if (column < args.w.k) store_words(out + column, args.w.k - column, args.vector_out, first);
      if (column + 32 < args.w.k) store_words(out + column + 32, args.w.k - column - 32, args.vector_out, second);
    }
  }
}

template <typename Index>
Status launch_gather(const F12DeviceMatrix& w, const Index* rows, uint64_t count, uint16_t* out, int64_t out_stride,
                     cudaStream_t stream) {
  WEIGHTD_RETURN_IF_ERROR(check_matrix(w, "launch_gather_rows"));
  WEIGHTD_ASSIGN_OR_RETURN(const ByteRange written, check_bf16(out, count, w.k, out_stride, "launch_gather_rows", "out"));
  WEIGHTD_RETURN_IF_ERROR(check_no_overlap(w, f12::kTileBytes, written, "launch_gather_rows"));
  if (count == 0 || w.k == 0) return {};
  if (rows == nullptr || reinterpret_cast<uintptr_t>(rows) % sizeof(Index) != 0) {
    return Status::invalid_argument("launch_gather_rows: rows is null or not aligned to its element");
  }
  if (w.n == 0) return Status::invalid_argument("launch_gather_rows: the weight has no rows");
  const f12::Geometry geometry{w.n, w.k, 1};
  const GatherArgs<Index> args{
      w, geometry.tiles(), geometry.groups(), rows, count, out, out_stride, vector_aligned(out, out_stride)};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<uint32_t>(std::min(count, kMaxGridX)),
                        static_cast<uint32_t>(std::min<uint64_t>((args.groups + kWarps - 1) / kWarps, 1024)));
  config.blockDim = dim3(32 * kWarps);
  config.stream = stream;
  return status_from_cuda(cudaLaunchKernelEx(&config, gather_kernel<Index>, args), "launch_gather_rows");
}

}  // namespace

Status launch_gather_rows(const F12DeviceMatrix& w, const int32_t* rows, uint64_t count, uint16_t* out, int64_t out_stride,
                          cudaStream_t stream) {
  return launch_gather(w, rows, count, out, out_stride, stream);
}

Status launch_gather_rows(const F12DeviceMatrix& w, const int64_t* rows, uint64_t count, uint16_t* out, int64_t out_stride,
                          cudaStream_t stream) {
  return launch_gather(w, rows, count, out, out_stride, stream);
}

}  // namespace weightd::kernels
