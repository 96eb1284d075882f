// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "kernels/launch.h"
#include "kernels/tile.cuh"

namespace weightd::kernels {
namespace {

constexpr uint32_t kWarps = f12::kGroupTiles;
constexpr uint32_t kRowVectors = 64 + 1;  // 512 columns; one vector more spreads the eight rows of a fragment over the banks
constexpr uint32_t kMaxGridY = 65535;

struct DecompressArgs {
  F12DeviceMatrix w;
  uint64_t tiles, groups;  // per unit
  uint64_t first_unit, unit_count;
  uint64_t begin, end;  // rows
  uint16_t* out;
  int64_t out_stride;
  bool vector_out;
};

/// Eight columns of one row. The caller has checked the row.
__device__ __forceinline__ void store_piece(const DecompressArgs& args, uint64_t row, uint64_t column, uint4 piece) {
  if (column >= args.w.k) return;
  uint16_t* out = args.out + static_cast<int64_t>(row - args.begin) * args.out_stride + static_cast<int64_t>(column);
  if (args.vector_out && column + 8 <= args.w.k) {
    *reinterpret_cast<uint4*>(out) = piece;  // not streaming: who decompresses reads the words soon, from L2 if they fit
    return;
  }
  const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) {
    if (column + i < args.w.k) out[i] = static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2)));
  }
}

/// A block takes a group, a warp one tile of it. The words cross the block in shared memory, so that a warp writes 1 KiB of each of
/// two rows in one go; written straight from the fragments, 64 bytes at a time, they cost 4 % of the bandwidth.
///
/// From sm_90 on the blocks start while the kernel before ends, which hides most of a launch; small matrices take little longer
/// than that. They touch memory only after that kernel has finished: it may have written w or still read out. And they let the
/// kernel after start no sooner, so that what it reads early is older than the kernel before this one too.
__global__ void __launch_bounds__(32 * kWarps, 5) decompress_kernel(const __grid_constant__ DecompressArgs args) {
  __shared__ uint4 scratch[kWarps][kScratchVectors];
  __shared__ uint4 rows[f12::kUnitRows][kRowVectors];
  const uint32_t warp = threadIdx.x / 32;
  const uint32_t lane = threadIdx.x % 32;
  const uint64_t group = blockIdx.x;
  const uint64_t tile = group * f12::kGroupTiles + warp;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  ptx::wait_previous();
  ptx::launch_dependents();
#endif
  for (uint64_t index = blockIdx.y; index < args.unit_count; index += gridDim.y) {
    const uint64_t unit = args.first_unit + index;
    if (tile < args.tiles) {
      uint4 v[F12Tile::kVectors];
      load_tile<F12Tile>(args.w.codes + (unit * args.tiles + tile) * f12::kTileBytes, lane, v);
      const F12Tile::Windows windows = F12Tile::load_windows(args.w, unit, lane);
      const Record record = Record::load(args.w.records + (unit * args.groups + group) * f12::kRecordBytes);
      const Fragments f = F12Tile::decode(v, windows, [&](uint4& ha, uint4& hb) {
        patch_tile(record, warp, args.w, ptx::shared_address(scratch[warp]), lane, ha, hb);
      });
      const uint32_t row = ptx::shared_address(rows[lane / 4]) + 128 * warp + 4 * (lane % 4);
#pragma unroll
      for (uint32_t i = 0; i < 16; ++i) {  // step i / 4, register i % 4: rows + 8 (r % 2), columns + 8 (r / 2)
        const uint32_t reg = i % 4;
        ptx::store_shared_word(row + reg % 2 * 8 * sizeof(rows[0]) + i / 4 * 32 + reg / 2 * 16, f.a[i / 4][reg]);
      }
    }
    __syncthreads();
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t r = 2 * warp + i / 2;
      const uint32_t piece = i % 2 * 32 + lane;
      const uint64_t row = unit * f12::kUnitRows + r;
      if (row >= args.begin && row < args.end) {
        store_piece(args, row, group * f12::kGroupTiles * f12::kTileCols + 8 * piece, rows[r][piece]);
      }
    }
    __syncthreads();
  }
}

/// Whether the current device can start a kernel before the one in front of it has ended.
bool device_overlaps_launches() {
  constexpr int kFirstMajor = 9;
  int device = 0;
  int major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= kFirstMajor;
}

}  // namespace

Status launch_decompress(const F12DeviceMatrix& w, uint64_t begin, uint64_t end, uint16_t* out, int64_t out_stride,
                         cudaStream_t stream) {
  WEIGHTD_RETURN_IF_ERROR(check_matrix(w, "launch_decompress"));
  if (begin > end || end > w.n) return Status::invalid_argument("launch_decompress: the rows are not inside the weight");
  WEIGHTD_ASSIGN_OR_RETURN(const ByteRange written, check_bf16(out, end - begin, w.k, out_stride, "launch_decompress", "out"));
  WEIGHTD_RETURN_IF_ERROR(check_no_overlap(w, f12::kTileBytes, written, "launch_decompress"));
  if (begin == end || w.k == 0) return {};
  const f12::Geometry geometry{w.n, w.k, 1};
  DecompressArgs args{};
  args.w = w;
  args.tiles = geometry.tiles();
  args.groups = geometry.groups();
  args.first_unit = begin / f12::kUnitRows;
  args.unit_count = (end - 1) / f12::kUnitRows + 1 - args.first_unit;
  args.begin = begin;
  args.end = end;
  args.out = out;
  args.out_stride = out_stride;
  args.vector_out = vector_aligned(out, out_stride);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<uint32_t>(args.groups), static_cast<uint32_t>(std::min<uint64_t>(args.unit_count, kMaxGridY)));
  config.blockDim = dim3(32 * kWarps);
  config.stream = stream;
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &overlap;
  config.numAttrs = device_overlaps_launches() ? 1 : 0;
  return status_from_cuda(cudaLaunchKernelEx(&config, decompress_kernel, args), "launch_decompress");
}

}  // namespace weightd::kernels
