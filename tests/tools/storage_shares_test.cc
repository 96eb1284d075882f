// SPDX-License-Identifier: Apache-2.0
#include "tools/pack/storage_shares.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>

namespace weightd::tools {
namespace {

using store::Manifest;
using store::PlaneKind;

/// Adds a storage of one plane with so many bytes in the file and in the arena.
uint32_t add_storage(Manifest& manifest, uint64_t stored, uint64_t resident, bool merged) {
  if (manifest.residencies.empty()) manifest.residencies.push_back({"fast", 0, 0, 0, {}, {}});
  const auto storage = static_cast<uint32_t>(manifest.storages.size());
  const auto section = static_cast<uint32_t>(manifest.sections.size());
  manifest.sections.push_back({0, stored, {}, {}});
  store::Storage entry;
  entry.merged = merged;
  entry.planes.push_back({PlaneKind::kRaw, section});
  manifest.storages.push_back(entry);
  manifest.residencies[0].placements.push_back({storage, PlaneKind::kRaw, 0, resident});
  return storage;
}

void add_tensor(Manifest& manifest, const std::string& name, uint32_t storage, uint64_t row_begin, uint64_t rows) {
  store::TensorRecord tensor;
  tensor.name = name;
  tensor.shape = {rows, 64};
  tensor.storage = storage;
  tensor.row_begin = row_begin;
  manifest.tensors.push_back(std::move(tensor));
}

TEST(StorageShares, AlonePaysForItself) {
  Manifest manifest;
  add_tensor(manifest, "a", add_storage(manifest, 1000, 900, false), 0, 7);
  const auto shares = storage_shares(manifest);
  ASSERT_EQ(shares.size(), 1U);
  EXPECT_EQ(shares[0].stored_bytes, 1000U);
  EXPECT_EQ(shares[0].resident_bytes, 900U);
  EXPECT_EQ(shares[0].owner, 0U);
  EXPECT_EQ(shares[0].rows, 0U);
}

TEST(StorageShares, PartsOfAMergedMatrixPayByRowsAndTheLastTakesTheRest) {
  Manifest manifest;
  const uint32_t storage = add_storage(manifest, 1000, 101, true);
  // The checkpoint's order is not the matrix's.
  add_tensor(manifest, "v", storage, 48, 16);
  add_tensor(manifest, "q", storage, 0, 16);
  add_tensor(manifest, "k", storage, 16, 32);
  const auto shares = storage_shares(manifest);
  EXPECT_EQ(shares[1].stored_bytes, 250U);
  EXPECT_EQ(shares[2].stored_bytes, 500U);
  EXPECT_EQ(shares[0].stored_bytes, 250U);
  EXPECT_EQ(shares[1].resident_bytes, 25U);  // 101 * 16 / 64 = 25.25
  EXPECT_EQ(shares[2].resident_bytes, 50U);  // 101 * 48 / 64 = 75.75
  EXPECT_EQ(shares[0].resident_bytes, 26U);  // what is left
  EXPECT_EQ(shares[2].rows, 32U);
}

TEST(StorageShares, EqualTensorsPayOnce) {
  Manifest manifest;
  const uint32_t other = add_storage(manifest, 10, 10, false);
  const uint32_t storage = add_storage(manifest, 1000, 1000, false);
  add_tensor(manifest, "embedding", storage, 0, 16);
  add_tensor(manifest, "between", other, 0, 16);
  add_tensor(manifest, "head", storage, 0, 16);
  const auto shares = storage_shares(manifest);
  EXPECT_EQ(shares[0].stored_bytes, 1000U);
  EXPECT_EQ(shares[1].stored_bytes, 10U);
  EXPECT_EQ(shares[2].stored_bytes, 0U);
  EXPECT_EQ(shares[2].resident_bytes, 0U);
  EXPECT_EQ(shares[2].owner, 0U);
}

TEST(StorageShares, EqualPartsOfAMergedMatrixToo) {
  Manifest manifest;
  const uint32_t storage = add_storage(manifest, 300, 300, true);
  add_tensor(manifest, "gate", storage, 0, 16);
  add_tensor(manifest, "up", storage, 16, 32);
  add_tensor(manifest, "copy of gate", storage, 0, 16);
  const auto shares = storage_shares(manifest);
  EXPECT_EQ(shares[0].stored_bytes, 100U);
  EXPECT_EQ(shares[1].stored_bytes, 200U);
  EXPECT_EQ(shares[2].stored_bytes, 0U);
  EXPECT_EQ(shares[2].owner, 0U);
}

TEST(StorageShares, SumsAreExactForAwkwardNumbers) {
  Manifest manifest;
  const uint64_t huge = (uint64_t{1} << 60) + 12345;
  const uint32_t storage = add_storage(manifest, huge, 7, true);
  uint64_t row = 0;
  for (const uint64_t rows : {3U, 1U, 0U, 11U, 2U}) {
    add_tensor(manifest, "part", storage, row, rows);
    row += rows;
  }
  uint64_t stored = 0, resident = 0;
  for (const StorageShare& share : storage_shares(manifest)) {
    stored += share.stored_bytes;
    resident += share.resident_bytes;
  }
  EXPECT_EQ(stored, huge);
  EXPECT_EQ(resident, 7U);
}

}  // namespace
}  // namespace weightd::tools
