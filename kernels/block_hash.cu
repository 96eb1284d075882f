// SPDX-License-Identifier: Apache-2.0
#include "kernels/block_hash.h"

#include "kernels/launch.h"
#include "kernels/ptx.cuh"
#include "kernels/xxh3.h"

namespace weightd::kernels {
namespace {

using xxh3::Pair;

constexpr uint32_t kSumWarps = 8;
constexpr uint32_t kThreads = 32 * (kSumWarps + 1);
constexpr uint32_t kBatchBytes = xxh3::kBatchRounds * xxh3::kRoundBytes;  // of one warp at a time, all in flight
constexpr uint32_t kStageRounds = kSumWarps * xxh3::kBatchRounds;
constexpr uint32_t kStageBytes = kSumWarps * kBatchBytes;
constexpr uint32_t kStages = kHashBlockBytes / kStageBytes;
constexpr uint64_t kMaxBlocks = 0x7FFFFFFF;  // of a grid
static_assert(kStages * kStageBytes == kHashBlockBytes);

struct HashArgs {
  const std::byte* arena;
  uint64_t* hashes;
  xxh3::Keys keys;
};

__device__ __forceinline__ Pair as_pair(uint4 v) {
  return {static_cast<uint64_t>(v.y) << 32 | v.x, static_cast<uint64_t>(v.w) << 32 | v.z};
}

/// One level of the fold (xxh3.h), with register indexes that the compiler knows.
template <uint32_t kLevel>
__device__ __forceinline__ void fold(uint32_t lane, Pair (&sums)[xxh3::kBatchRounds]) {
  constexpr uint32_t kKept = xxh3::fold_kept(kLevel);
  const bool upper = xxh3::fold_upper(lane, kLevel);
#pragma unroll
  for (uint32_t i = 0; i < kKept; ++i) {
    const Pair low = sums[i];
    const Pair high = sums[i + kKept];
    const uint64_t even = __shfl_xor_sync(0xffffffffU, upper ? low.even : high.even, xxh3::fold_partner(kLevel));
    const uint64_t odd = __shfl_xor_sync(0xffffffffU, upper ? low.odd : high.odd, xxh3::fold_partner(kLevel));
    sums[i] = {(upper ? high.even : low.even) + even, (upper ? high.odd : low.odd) + odd};
  }
}

/// The accumulators 2q and 2q + 1 of round lane / 4 of eight that start at `batch`. `last`: the eighth is the last round of all.
__device__ __forceinline__ Pair sum_batch(const HashArgs& args, const std::byte* batch, uint32_t lane, bool last) {
  uint4 data[xxh3::kBatchRounds][2];
#pragma unroll
  for (uint32_t i = 0; i < 2 * xxh3::kBatchRounds; ++i) data[i / 2][i % 2] = ptx::load_streaming(batch + 512 * i + 16 * lane);
  const Pair first_keys = xxh3::lane_keys(args.keys, lane, 0);
  Pair second_keys = xxh3::lane_keys(args.keys, lane, 1);
  Pair sums[xxh3::kBatchRounds];
#pragma unroll
  for (uint32_t round = 0; round < xxh3::kBatchRounds; ++round) {
    if (round + 1 == xxh3::kBatchRounds && last && xxh3::lane_stripe(lane, 1) + 1 == xxh3::kRoundStripes) {
      second_keys = xxh3::tail_keys(args.keys, lane);
    }
    xxh3::add_piece(sums[round], as_pair(data[round][0]), first_keys);
    xxh3::add_piece(sums[round], as_pair(data[round][1]), second_keys);
  }
  fold<0>(lane, sums);
  fold<1>(lane, sums);
  fold<2>(lane, sums);
  return sums[0];
}

/// A thread block hashes one block of the arena: eight warps sum a stage of 64 rounds while the ninth, one accumulator a lane,
/// chains the rounds of the stage before. A step of the chain is some 30 clocks and the sums of one round are 1 KiB, so that a
/// chain alone keeps up with what a multiprocessor gets from memory.
__global__ void __launch_bounds__(kThreads, 2) block_hash_kernel(const __grid_constant__ HashArgs args) {
  __shared__ uint64_t sums[2][kStageRounds][xxh3::kAccumulators];
  const uint32_t warp = threadIdx.x / 32;
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t word = lane % xxh3::kAccumulators;  // the chain's lanes 8 to 31 repeat lanes 0 to 7
  const uint64_t scramble_key = args.keys.stripe[xxh3::kRoundStripes + word];
  const std::byte* block = args.arena + blockIdx.x * kHashBlockBytes;
  uint64_t accumulator = args.keys.start[word];

  for (uint32_t stage = 0; stage <= kStages; ++stage) {
    if (warp < kSumWarps && stage < kStages) {
      const bool last = stage + 1 == kStages && warp + 1 == kSumWarps;
      const Pair sum = sum_batch(args, block + stage * kStageBytes + warp * kBatchBytes, lane, last);
      uint64_t* to = &sums[stage % 2][warp * xxh3::kBatchRounds + lane / 4][2 * (lane % 4)];
      ptx::store_shared(ptx::shared_address(to), {static_cast<uint32_t>(sum.even), static_cast<uint32_t>(sum.even >> 32),
                                                  static_cast<uint32_t>(sum.odd), static_cast<uint32_t>(sum.odd >> 32)});
    } else if (warp == kSumWarps && stage > 0) {
      const auto& from = sums[(stage - 1) % 2];
#pragma unroll 8
      for (uint32_t round = 0; round + 1 < kStageRounds; ++round) {
        accumulator = xxh3::scramble(accumulator + from[round][word], scramble_key);
      }
      accumulator += from[kStageRounds - 1][word];
      if (stage < kStages) accumulator = xxh3::scramble(accumulator, scramble_key);
    }
    __syncthreads();
  }
  if (warp != kSumWarps) return;
  const uint64_t keyed = accumulator ^ args.keys.merge[word];
  uint64_t folded = xxh3::fold_product(keyed, __shfl_xor_sync(0xffffffffU, keyed, 1));
  folded += __shfl_xor_sync(0xffffffffU, folded, 2);
  folded += __shfl_xor_sync(0xffffffffU, folded, 4);
  if (lane == 0) args.hashes[blockIdx.x] = xxh3::finish(folded, kHashBlockBytes);
}

}  // namespace

Status launch_block_hashes(const std::byte* arena, uint64_t blocks, uint64_t* hashes, cudaStream_t stream) {
  if (blocks == 0) return {};
  if (arena == nullptr || hashes == nullptr) return Status::invalid_argument("launch_block_hashes: arena or hashes is null");
  if (reinterpret_cast<uintptr_t>(arena) % 16 != 0 || reinterpret_cast<uintptr_t>(hashes) % alignof(uint64_t) != 0) {
    return Status::invalid_argument("launch_block_hashes: the arena must be 16-byte aligned, the hashes 8-byte");
  }
  if (blocks > kMaxBlocks) return Status::invalid_argument("launch_block_hashes: more blocks than any memory has");
  constexpr xxh3::Keys kKeys = xxh3::make_keys();
  const HashArgs args{arena, hashes, kKeys};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<uint32_t>(blocks));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return status_from_cuda(cudaLaunchKernelEx(&config, block_hash_kernel, args), "launch_block_hashes");
}

}  // namespace weightd::kernels
