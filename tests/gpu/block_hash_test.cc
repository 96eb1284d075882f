// SPDX-License-Identifier: Apache-2.0
#include "kernels/block_hash.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "store/hash.h"
#include "tests/gpu/device_memory.h"

namespace weightd::kernels {
namespace {

using testing::DeviceMemory;

static_assert(kHashBlockBytes == store::kBlockBytes);

constexpr uint64_t kPoison = 0xA5A5A5A5A5A5A5A5;

std::vector<std::byte> random_bytes(uint64_t bytes, uint64_t seed) {
  std::vector<std::byte> data(bytes);
  std::mt19937_64 random(seed);
  for (uint64_t i = 0; i + 8 <= bytes; i += 8) {
    const uint64_t value = random();
    std::memcpy(data.data() + i, &value, sizeof value);
  }
  return data;
}

/// Hashes on the device, with `extra` more words behind them.
std::vector<uint64_t> hash(const std::byte* arena, uint64_t blocks, uint64_t extra) {
  const DeviceMemory hashes((blocks + extra) * sizeof(uint64_t));
  const Status status = launch_block_hashes(arena, blocks, hashes.as<uint64_t>(), nullptr);
  EXPECT_TRUE(status.ok()) << status.to_string();
  EXPECT_TRUE(hashes.fences_intact());
  return testing::from_device<uint64_t>(hashes);
}

TEST(BlockHash, SameAsTheStoreForAnyCount) {
  for (const uint64_t blocks : {1U, 2U, 3U, 131U, 132U, 133U, 300U}) {
    const std::vector<std::byte> data = random_bytes(blocks * kHashBlockBytes, blocks);
    const DeviceMemory arena(data);
    std::vector<uint64_t> want = store::block_hashes(data, 0);
    want.insert(want.end(), 3, kPoison);
    EXPECT_EQ(hash(arena.data(), blocks, 3), want) << blocks << " blocks";
  }
}

TEST(BlockHash, ZerosAndOnes) {
  for (const int value : {0x00, 0xFF, 0x80}) {
    std::vector<std::byte> data(2 * kHashBlockBytes, static_cast<std::byte>(value));
    const DeviceMemory arena(data);
    EXPECT_EQ(hash(arena.data(), 2, 0), store::block_hashes(data, 0)) << value;
  }
}

TEST(BlockHash, AnArenaThatIsAlignedTo16BytesOnly) {
  const std::vector<std::byte> data = random_bytes(5 * kHashBlockBytes, 9);
  const DeviceMemory arena(data.size(), 16);
  arena.upload(data);
  EXPECT_EQ(hash(arena.data(), 5, 0), store::block_hashes(data, 0));
}

/// One flipped bit anywhere changes the hash as it changes the host's: every place of a round, the first and the last stripe.
TEST(BlockHash, EveryBitCounts) {
  std::vector<std::byte> data = random_bytes(kHashBlockBytes, 10);
  const DeviceMemory arena(data);
  const uint64_t before = hash(arena.data(), 1, 0)[0];
  std::mt19937_64 random(3);
  std::vector<uint64_t> places{0, kHashBlockBytes - 1, kHashBlockBytes - 64, kHashBlockBytes - 65, kHashBlockBytes - 1024};
  for (uint64_t i = 0; i < 64; ++i) places.push_back(random() % kHashBlockBytes / 1024 * 1024 + 16 * i);
  for (const uint64_t place : places) {
    const auto bit = static_cast<std::byte>(1U << random() % 8);
    data[place] ^= bit;
    arena.upload(data);
    const uint64_t after = hash(arena.data(), 1, 0)[0];
    EXPECT_NE(after, before) << "byte " << place;
    EXPECT_EQ(after, store::block_hashes(data, 0)[0]) << "byte " << place;
    data[place] ^= bit;
  }
}

/// Far more blocks than run at a time, offsets beyond 32 bits.
TEST(BlockHash, CO_045_ManyBlocks) {
  constexpr uint64_t kBlocks = 9000;
  constexpr uint64_t kDistinct = 61;
  const std::vector<std::byte> data = random_bytes(kDistinct * kHashBlockBytes, 11);
  const std::vector<uint64_t> distinct = store::block_hashes(data, 0);
  std::byte* arena = nullptr;
  testing::require_cuda(cudaMalloc(reinterpret_cast<void**>(&arena), kBlocks * kHashBlockBytes), "cudaMalloc");
  for (uint64_t i = 0; i < kBlocks; ++i) {
    testing::require_cuda(cudaMemcpyAsync(arena + i * kHashBlockBytes, data.data() + i % kDistinct * kHashBlockBytes,
                                          kHashBlockBytes, cudaMemcpyHostToDevice, nullptr),
                          "fill");
  }
  const std::vector<uint64_t> got = hash(arena, kBlocks, 0);
  for (uint64_t i = 0; i < kBlocks; ++i) ASSERT_EQ(got[i], distinct[i % kDistinct]) << "block " << i;
  testing::require_cuda(cudaFree(arena), "cudaFree");
}

TEST(BlockHash, InAGraph) {
  const std::vector<std::byte> data = random_bytes(7 * kHashBlockBytes, 12);
  const DeviceMemory arena(7 * kHashBlockBytes);
  const DeviceMemory hashes(7 * sizeof(uint64_t));
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  testing::require_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  testing::require_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  ASSERT_TRUE(launch_block_hashes(arena.data(), 7, hashes.as<uint64_t>(), stream).ok());
  testing::require_cuda(cudaStreamEndCapture(stream, &graph), "capture");
  testing::require_cuda(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
  arena.upload(data);
  testing::require_cuda(cudaGraphLaunch(executable, stream), "replay");
  testing::require_cuda(cudaStreamSynchronize(stream), "replay");
  EXPECT_EQ(testing::from_device<uint64_t>(hashes), store::block_hashes(data, 0));
  testing::require_cuda(cudaGraphExecDestroy(executable), "destroy");
  testing::require_cuda(cudaGraphDestroy(graph), "destroy");
  testing::require_cuda(cudaStreamDestroy(stream), "destroy");
}

TEST(BlockHash, RefusesWhatItsContractForbids) {
  const DeviceMemory arena(kHashBlockBytes + 16);
  const DeviceMemory hashes(16);
  auto* to = hashes.as<uint64_t>();
  EXPECT_TRUE(launch_block_hashes(nullptr, 0, nullptr, nullptr).ok());
  EXPECT_EQ(launch_block_hashes(nullptr, 1, to, nullptr).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(launch_block_hashes(arena.data(), 1, nullptr, nullptr).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(launch_block_hashes(arena.data() + 8, 1, to, nullptr).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(launch_block_hashes(arena.data(), uint64_t{1} << 31, to, nullptr).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(testing::from_device<uint64_t>(hashes), (std::vector<uint64_t>{kPoison, kPoison}));
}

}  // namespace
}  // namespace weightd::kernels
