// SPDX-License-Identifier: Apache-2.0
#include "tests/daemon/backend_contract.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <numeric>
#include <random>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "store/f12.h"
#include "store/hash.h"

namespace weightd::testing {
namespace {

using loader::Backend;
using loader::kPieceBytes;
using loader::Piece;
using loader::Shares;

constexpr uint64_t kMiB = uint64_t{1} << 20;
const loader::Advance kIgnore = [](uint64_t) {};

std::vector<std::byte> random_bytes(uint64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

Status put(Backend& backend, const std::vector<std::byte>& bytes, uint64_t begin, uint64_t end) {
  WEIGHTD_ASSIGN_OR_RETURN(const Piece piece, backend.stage(begin, end - begin));
  std::copy(bytes.begin() + static_cast<ptrdiff_t>(begin), bytes.begin() + static_cast<ptrdiff_t>(end), piece.bytes.begin());
  WEIGHTD_RETURN_IF_ERROR(backend.upload(piece));
  backend.retire(piece);
  return {};
}

/// BF16 words like trained weights, with outliers of all kinds among them.
std::vector<std::byte> weights(uint64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(count * 2);
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t draw = random();
    const bool outlier = draw % 61 == 0;
    const auto word = static_cast<uint16_t>(outlier ? draw >> 16 : (draw & 0x807F) | ((118 + (draw >> 20) % 6) << 7));
    bytes[2 * i] = static_cast<std::byte>(word & 0xFF);
    bytes[2 * i + 1] = static_cast<std::byte>(word >> 8);
  }
  return bytes;
}

}  // namespace

std::unique_ptr<Backend> BackendContract::make() {
  auto backend = kind_.make();
  if (!backend.ok()) throw std::runtime_error(backend.status().to_string());  // fails the test
  return *std::move(backend);
}

std::vector<uint64_t> chunks_for(const Backend& backend, uint64_t bytes) {
  const uint64_t granularity = backend.granularity_bytes();
  return std::vector<uint64_t>((bytes + granularity - 1) / granularity, granularity);
}

Status upload_all(Backend& backend, const std::vector<std::byte>& bytes) {
  for (uint64_t begin = 0; begin < bytes.size(); begin += kPieceBytes) {
    WEIGHTD_RETURN_IF_ERROR(put(backend, bytes, begin, std::min<uint64_t>(bytes.size(), begin + kPieceBytes)));
  }
  return {};
}

CodedPlanes make_coded_planes(uint64_t n, uint64_t k, uint64_t batch, uint64_t seed) {
  CodedPlanes coded;
  f12::Geometry& g = coded.planes.geometry;
  g = {n, k, batch};
  coded.planes.codes_offset = 0;
  coded.planes.windows_offset = f12::align_up(g.codes_bytes(), f12::kPlaneAlign);
  coded.planes.records_offset = f12::align_up(coded.planes.windows_offset + g.windows_bytes(), f12::kPlaneAlign);
  coded.planes.pool_offset = f12::align_up(coded.planes.records_offset + g.records_bytes(), f12::kPlaneAlign);
  coded.planes.pool_base = 48;  // behind other storages' parts
  coded.arena.resize(coded.planes.pool_offset);
  std::vector<std::byte> pool;
  const std::span<std::byte> arena(coded.arena);
  for (uint64_t i = 0; i < batch; ++i) {
    const std::vector<std::byte> words = weights(n * k, seed + i);
    const Status status =
        store::f12_encode(words, {n, k, 1}, 0, g.units(),
                          arena.subspan(coded.planes.codes_offset + i * g.matrix_codes_bytes(), g.matrix_codes_bytes()),
                          arena.subspan(coded.planes.windows_offset + i * g.matrix_windows_bytes(), g.matrix_windows_bytes()),
                          arena.subspan(coded.planes.records_offset + i * g.matrix_records_bytes(), g.matrix_records_bytes()), pool,
                          coded.planes.pool_base, 1);
    WEIGHTD_CHECK(status.ok());
  }
  coded.planes.pool_bytes = pool.size();
  coded.arena.insert(coded.arena.end(), pool.begin(), pool.end());
  coded.arena.resize(f12::align_up(coded.arena.size(), store::kBlockBytes));
  return coded;
}

Status CodedPlanes::validate() const {
  const f12::Geometry& g = planes.geometry;
  const std::span<const std::byte> all(arena);
  for (uint64_t i = 0; i < g.batch; ++i) {
    WEIGHTD_RETURN_IF_ERROR(
        store::f12_validate(g, 0, g.units(), all.subspan(planes.codes_offset + i * g.matrix_codes_bytes(), g.matrix_codes_bytes()),
                            all.subspan(planes.windows_offset + i * g.matrix_windows_bytes(), g.matrix_windows_bytes()),
                            all.subspan(planes.records_offset + i * g.matrix_records_bytes(), g.matrix_records_bytes()),
                            all.subspan(planes.pool_offset, planes.pool_bytes), planes.pool_base));
  }
  return {};
}

TEST_P(BackendContract, AnArenaIsZeroed) {
  const auto backend = make();
  const std::vector<uint64_t> chunks = chunks_for(*backend, 3 * backend->granularity_bytes());
  ASSERT_EQ(chunks.size(), 3U);
  ASSERT_TRUE(backend->allocate(chunks).ok());
  ASSERT_TRUE(backend->seal().ok());
  const uint64_t bytes = 3 * backend->granularity_bytes() / kMiB * kMiB;
  const auto hashes = backend->hash_blocks(bytes, 2, kIgnore);
  ASSERT_TRUE(hashes.ok()) << hashes.status().to_string();
  EXPECT_EQ(*hashes, store::block_hashes(std::vector<std::byte>(bytes), 1));
}

TEST_P(BackendContract, WhatWasUploadedIsResidentAndIsSharedAsItIs) {
  const auto backend = make();
  const std::vector<std::byte> bytes = random_bytes(40 * kMiB, 7);  // more pieces than any backend takes at once in this order
  const std::vector<uint64_t> chunks = chunks_for(*backend, bytes.size());
  ASSERT_TRUE(backend->allocate(chunks).ok());
  ASSERT_TRUE(upload_all(*backend, bytes).ok());
  auto shares = backend->seal();
  ASSERT_TRUE(shares.ok()) << shares.status().to_string();
  ASSERT_EQ(shares->chunks.size(), chunks.size());
  EXPECT_TRUE(shares->ipc_handle.empty());
  std::atomic<uint64_t> advanced = 0;
  const auto hashes = backend->hash_blocks(bytes.size(), 2, [&](uint64_t count) { advanced += count; });
  ASSERT_TRUE(hashes.ok()) << hashes.status().to_string();
  EXPECT_EQ(*hashes, store::block_hashes(bytes, 1));
  EXPECT_EQ(advanced, bytes.size());
  const auto other = make();
  ASSERT_TRUE(other->import(std::move(shares->chunks), chunks).ok());
  const auto again = other->hash_blocks(bytes.size(), 1, kIgnore);
  ASSERT_TRUE(again.ok()) << again.status().to_string();
  EXPECT_EQ(*again, *hashes);
}

TEST_P(BackendContract, ManyThreadsUploadPiecesOfAllSizesInAnyOrder) {
  const auto backend = make();
  const std::vector<std::byte> bytes = random_bytes(16 * kMiB, 8);
  std::mt19937_64 random(9);
  std::vector<uint64_t> cuts = {0};
  while (cuts.back() < bytes.size()) cuts.push_back(std::min<uint64_t>(bytes.size(), cuts.back() + 1 + random() % kPieceBytes));
  std::vector<size_t> order(cuts.size() - 1);
  std::iota(order.begin(), order.end(), size_t{0});
  std::shuffle(order.begin(), order.end(), random);
  ASSERT_TRUE(backend->allocate(chunks_for(*backend, bytes.size())).ok());
  std::atomic<size_t> next = 0;
  std::atomic<int> failures = 0;
  {
    std::vector<std::jthread> threads;
    const uint32_t count = std::min(4U, backend->max_pieces());
    for (uint32_t i = 0; i < count; ++i) {
      threads.emplace_back([&] {
        for (size_t at = next++; at < order.size(); at = next++) {
          failures += put(*backend, bytes, cuts[order[at]], cuts[order[at] + 1]).ok() ? 0 : 1;
        }
      });
    }
  }
  EXPECT_EQ(failures, 0);
  ASSERT_TRUE(backend->seal().ok());
  const auto hashes = backend->hash_blocks(bytes.size(), 1, kIgnore);
  ASSERT_TRUE(hashes.ok()) << hashes.status().to_string();
  EXPECT_EQ(*hashes, store::block_hashes(bytes, 1));
}

TEST_P(BackendContract, CO_090_MoreThanThereIsIsRefusedAndNothingStays) {
  const auto backend = make();
  const uint64_t granularity = backend->granularity_bytes();
  const Status status = backend->allocate({granularity, uint64_t{1} << 45});
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status.to_string();
  EXPECT_TRUE(backend->allocate({granularity}).ok());  // the same object may try again
}

TEST_P(BackendContract, AnArenaBeyondTheChunksIsRefused) {
  const auto backend = make();
  ASSERT_TRUE(backend->allocate(chunks_for(*backend, 2 * kMiB)).ok());
  ASSERT_TRUE(backend->seal().ok());
  EXPECT_EQ(backend->hash_blocks(64 * kMiB, 1, kIgnore).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(backend->hash_blocks(kMiB + 1, 1, kIgnore).status().code(), StatusCode::kInvalidArgument);
}

TEST_P(BackendContract, DescriptorsThatAreNoChunksAreRefused) {
  const auto backend = make();
  std::vector<UniqueFd> closed(1);
  EXPECT_FALSE(backend->import(std::move(closed), {backend->granularity_bytes()}).ok());
  EXPECT_FALSE(backend->import({}, {backend->granularity_bytes()}).ok());
}

TEST_P(BackendContract, GoodPlanesPass) {
  for (const auto& [n, k, batch] : {std::array<uint64_t, 3>{64, 512, 1}, {37, 200, 3}, {16, 64, 1}}) {
    const auto backend = make();
    const CodedPlanes coded = make_coded_planes(n, k, batch, 11);
    ASSERT_TRUE(coded.validate().ok());
    ASSERT_TRUE(backend->allocate(chunks_for(*backend, coded.arena.size())).ok());
    ASSERT_TRUE(upload_all(*backend, coded.arena).ok());
    ASSERT_TRUE(backend->seal().ok());
    uint64_t advanced = 0;
    const Status status = backend->check_f12(coded.planes, 1, [&](uint64_t count) { advanced += count; });
    EXPECT_TRUE(status.ok()) << status.to_string();
    EXPECT_EQ(advanced, coded.planes.geometry.codes_bytes());
  }
}

TEST_P(BackendContract, CO_047_DamagedPlanesAreRefusedWithTheCodecsWords) {
  const CodedPlanes good = make_coded_planes(160, 512, 2, 12);
  ASSERT_GT(good.planes.pool_bytes, 0U);
  const uint64_t second_windows = good.planes.windows_offset + good.planes.geometry.matrix_windows_bytes();
  const uint64_t second_records = good.planes.records_offset + good.planes.geometry.matrix_records_bytes();
  struct Damage {
    uint64_t offset;
    std::byte value;
  };
  for (const Damage damage :
       {Damage{second_windows + 5, std::byte{121}}, Damage{good.planes.windows_offset + 100, std::byte{255}},
        Damage{good.planes.records_offset + 3, std::byte{254}}, Damage{second_records + 9, std::byte{0xFF}}}) {
    CodedPlanes bad = good;
    bad.arena[damage.offset] = damage.value;
    const Status expected = bad.validate();
    ASSERT_EQ(expected.code(), StatusCode::kCorruption) << damage.offset;
    const auto backend = make();
    ASSERT_TRUE(backend->allocate(chunks_for(*backend, bad.arena.size())).ok());
    ASSERT_TRUE(upload_all(*backend, bad.arena).ok());
    ASSERT_TRUE(backend->seal().ok());
    const Status status = backend->check_f12(bad.planes, 2, kIgnore);
    EXPECT_EQ(status.code(), StatusCode::kCorruption);
    EXPECT_EQ(status.message(), expected.message());
  }
}

}  // namespace weightd::testing
