// SPDX-License-Identifier: Apache-2.0
#include "kernels/gather_raw.h"

#include <algorithm>

#include "kernels/launch.h"

namespace weightd::kernels {
namespace {

constexpr uint32_t kThreads = 128;
constexpr uint32_t kVectorWords = 8;  // BF16 words of a 16-byte access
constexpr uint64_t kMaxGridX = (uint64_t{1} << 31) - 1;
constexpr uint64_t kMaxBlocksPerRow = 1024;
constexpr uint16_t kNoRow = 0x7fff;

template <typename Index>
struct GatherRawArgs {
  ConstBf16Matrix w;
  const Index* rows;
  uint64_t count;
  uint16_t* out;
  int64_t out_stride;
  uint64_t vectors;  // of 8 words, in each row
};

/// Blocks (x: row of out; y: part of it) copy words, the first ones 8 at a time.
template <typename Index>
__global__ void __launch_bounds__(kThreads) gather_raw_kernel(const __grid_constant__ GatherRawArgs<Index> args) {
  const uint64_t first = uint64_t{blockIdx.y} * kThreads + threadIdx.x;
  const uint64_t step = uint64_t{gridDim.y} * kThreads;
  for (uint64_t i = blockIdx.x; i < args.count; i += gridDim.x) {
    const Index index = args.rows[i];
    const bool valid = index >= 0 && static_cast<uint64_t>(index) < args.w.rows;
    const uint16_t* from = args.w.data + (valid ? static_cast<int64_t>(index) : 0) * args.w.row_stride;
    uint16_t* out = args.out + static_cast<int64_t>(i) * args.out_stride;
    for (uint64_t v = first; v < args.vectors; v += step) {
      constexpr uint4 kNoWords{kNoRow * 0x10001U, kNoRow * 0x10001U, kNoRow * 0x10001U, kNoRow * 0x10001U};
      reinterpret_cast<uint4*>(out)[v] = valid ? reinterpret_cast<const uint4*>(from)[v] : kNoWords;
    }
    for (uint64_t c = args.vectors * kVectorWords + first; c < args.w.cols; c += step) out[c] = valid ? from[c] : kNoRow;
  }
}

template <typename Index>
Status launch(const ConstBf16Matrix& w, const Index* rows, uint64_t count, uint16_t* out, int64_t out_stride, cudaStream_t stream) {
  constexpr const char* kCall = "launch_gather_raw";
  WEIGHTD_ASSIGN_OR_RETURN(const ByteRange read, check_bf16(w.data, w.rows, w.cols, w.row_stride, kCall, "w"));
  WEIGHTD_ASSIGN_OR_RETURN(const ByteRange written, check_bf16(out, count, w.cols, out_stride, kCall, "out"));
  if (written.overlaps(read)) return Status::invalid_argument(std::string(kCall) + ": the output overlaps the weight");
  if (count == 0 || w.cols == 0) return {};
  if (rows == nullptr || reinterpret_cast<uintptr_t>(rows) % sizeof(Index) != 0) {
    return Status::invalid_argument(std::string(kCall) + ": rows is null or not aligned to its element");
  }
  if (w.rows == 0) return Status::invalid_argument(std::string(kCall) + ": the weight has no rows");
  const bool vector = vector_aligned(w.data, w.rows > 1 ? w.row_stride : 0) && vector_aligned(out, count > 1 ? out_stride : 0);
  const uint64_t vectors = vector ? w.cols / kVectorWords : 0;
  const uint64_t accesses = std::max(vectors, w.cols - vectors * kVectorWords);
  const GatherRawArgs<Index> args{w, rows, count, out, out_stride, vectors};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<uint32_t>(std::min(count, kMaxGridX)),
                        static_cast<uint32_t>(std::clamp<uint64_t>((accesses + kThreads - 1) / kThreads, 1, kMaxBlocksPerRow)));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return status_from_cuda(cudaLaunchKernelEx(&config, gather_raw_kernel<Index>, args), kCall);
}

}  // namespace

Status launch_gather_raw(ConstBf16Matrix w, const int32_t* rows, uint64_t count, uint16_t* out, int64_t out_stride,
                         cudaStream_t stream) {
  return launch(w, rows, count, out, out_stride, stream);
}

Status launch_gather_raw(ConstBf16Matrix w, const int64_t* rows, uint64_t count, uint16_t* out, int64_t out_stride,
                         cudaStream_t stream) {
  return launch(w, rows, count, out, out_stride, stream);
}

}  // namespace weightd::kernels
