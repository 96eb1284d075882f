// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>

#include "ipc/messages.h"
#include "ipc_test_support.h"

namespace weightd::ipc {
namespace {

/// An arena of two blocks: a raw tensor, a merged f12 matrix of two parts, a stack of three experts, an empty tensor, and a pool.
TensorTable a_table() {
  TensorTable table;
  table.content_id = "c0ffee";
  table.residency = "fast";
  table.arena_bytes = 2 * kHashBlockBytes;
  table.pool_offset_bytes = 1'536'000;
  table.pool_bytes = 4096;
  StorageEntry raw;
  raw.name = "norm.weight";
  raw.encoding = Encoding::kRaw;
  raw.dtype = DType::kBF16;
  raw.logical_bytes = raw.data_bytes = raw.resident_bytes = 128;
  StorageEntry merged;
  merged.name = "qkv";
  merged.encoding = Encoding::kF12;
  merged.dtype = DType::kBF16;
  merged.merged = true;
  merged.n = 48;
  merged.k = 64;
  merged.batch = 1;
  merged.logical_bytes = 48 * 64 * 2;
  merged.data_offset = 256;
  merged.data_bytes = 3 * 1536;
  merged.windows_offset = 8192;
  merged.windows_bytes = 48;
  merged.records_offset = 8448;
  merged.records_bytes = 96;
  merged.resident_bytes = 3 * 1536 + 48 + 96 + 16;
  StorageEntry experts = merged;
  experts.name = "experts";
  experts.merged = false;
  experts.n = 16;
  experts.batch = 3;
  experts.data_offset = 16384;
  experts.windows_offset = 32768;
  experts.records_offset = 33024;
  StorageEntry empty;
  empty.name = "empty";
  empty.encoding = Encoding::kRaw;
  empty.dtype = DType::kF32;
  table.storages = {raw, merged, experts, empty};
  table.tensors = {{"norm.weight", DType::kBF16, {64}, 0, 0},
                   {"q", DType::kBF16, {16, 64}, 1, 0},
                   {"k", DType::kBF16, {32, 64}, 1, 16},
                   {"experts", DType::kBF16, {3, 16, 64}, 2, 0},
                   {"empty", DType::kF32, {0, UINT64_MAX, 7}, 3, 0},
                   {std::string("tied\0\n", 6), DType::kBF16, {8, 8}, 0, 0}};
  table.block_hashes = {0x1111111111111111, UINT64_MAX};
  return table;
}

TEST(TensorTable, EveryFieldSurvives) {
  const TensorTable table = a_table();
  const Result<TensorTable> decoded = decode_table(encode(table));
  ASSERT_TRUE(decoded.ok()) << decoded.status().to_string();
  EXPECT_EQ(decoded->content_id, "c0ffee");
  EXPECT_EQ(decoded->residency, "fast");
  EXPECT_EQ(decoded->arena_bytes, 2U << 20);
  EXPECT_EQ(decoded->pool_offset_bytes, 1'536'000U);
  EXPECT_EQ(decoded->pool_bytes, 4096U);
  EXPECT_EQ(decoded->block_hashes, table.block_hashes);
  ASSERT_EQ(decoded->storages.size(), 4U);
  const StorageEntry& merged = decoded->storages[1];
  EXPECT_EQ(merged.name, "qkv");
  EXPECT_EQ(merged.encoding, Encoding::kF12);
  EXPECT_EQ(merged.dtype, DType::kBF16);
  EXPECT_TRUE(merged.merged);
  EXPECT_EQ(merged.n, 48U);
  EXPECT_EQ(merged.k, 64U);
  EXPECT_EQ(merged.batch, 1U);
  EXPECT_EQ(merged.logical_bytes, 6144U);
  EXPECT_EQ(merged.data_offset, 256U);
  EXPECT_EQ(merged.data_bytes, 4608U);
  EXPECT_EQ(merged.windows_offset, 8192U);
  EXPECT_EQ(merged.windows_bytes, 48U);
  EXPECT_EQ(merged.records_offset, 8448U);
  EXPECT_EQ(merged.records_bytes, 96U);
  EXPECT_EQ(merged.resident_bytes, 4768U);
  EXPECT_EQ(decoded->storages[3].dtype, DType::kF32);
  ASSERT_EQ(decoded->tensors.size(), 6U);
  const TensorEntry& k = decoded->tensors[2];
  EXPECT_EQ(k.name, "k");
  EXPECT_EQ(k.dtype, DType::kBF16);
  EXPECT_EQ(k.shape, (Shape{32, 64}));
  EXPECT_EQ(k.storage, 1U);
  EXPECT_EQ(k.row_begin, 16U);
  EXPECT_EQ(decoded->tensors[5].name, std::string("tied\0\n", 6)) << "names are opaque";
}

TEST(TensorTable, EmptyArenaIsValid) {
  const Result<TensorTable> decoded = decode_table(encode(TensorTable{}));
  ASSERT_TRUE(decoded.ok()) << decoded.status().to_string();
  EXPECT_TRUE(decoded->tensors.empty());
}

TEST(TensorTable, EveryBrokenRuleIsCorruptionThatNamesTheEntry) {
  using Break = std::function<void(TensorTable&)>;
  struct Case {
    const char* what;
    const char* named;
    Break change;
  };
  const std::vector<Case> cases = {
      {"arena no multiple of a block", "arena", [](TensorTable& t) { t.arena_bytes += 8; }},
      {"arena too large", "arena", [](TensorTable& t) { t.arena_bytes = (uint64_t{1} << 48) + kHashBlockBytes; }},
      {"a hash too few", "blockHashes", [](TensorTable& t) { t.block_hashes.pop_back(); }},
      {"a hash too many", "blockHashes", [](TensorTable& t) { t.block_hashes.push_back(1); }},
      {"pool past the end", "pool", [](TensorTable& t) { t.pool_bytes = t.arena_bytes - t.pool_offset_bytes + 1; }},
      {"pool sum overflows", "pool", [](TensorTable& t) { t.pool_bytes = UINT64_MAX - 4096; }},
      {"pool not aligned", "pool", [](TensorTable& t) { t.pool_offset_bytes += 16; }},
      {"data past the end", "qkv", [](TensorTable& t) { t.storages[1].data_offset = t.arena_bytes - 256; }},
      {"data offset overflows", "qkv", [](TensorTable& t) { t.storages[1].data_offset = UINT64_MAX - 255; }},
      {"data not aligned", "qkv", [](TensorTable& t) { t.storages[1].data_offset = 257; }},
      {"windows past the end", "qkv", [](TensorTable& t) { t.storages[1].windows_bytes = UINT64_MAX; }},
      {"windows not aligned", "qkv", [](TensorTable& t) { t.storages[1].windows_offset += 128; }},
      {"records past the end", "qkv", [](TensorTable& t) { t.storages[1].records_offset = t.arena_bytes; }},
      {"records not aligned", "qkv", [](TensorTable& t) { t.storages[1].records_offset += 1; }},
      {"resident more than the arena", "qkv", [](TensorTable& t) { t.storages[1].resident_bytes = t.arena_bytes + 1; }},
      {"unknown encoding", "qkv", [](TensorTable& t) { t.storages[1].encoding = static_cast<Encoding>(kEncodingCount); }},
      {"unknown dtype", "qkv", [](TensorTable& t) { t.storages[1].dtype = static_cast<DType>(kDTypeCount); }},
      {"f12 of another dtype", "qkv", [](TensorTable& t) { t.storages[1].dtype = DType::kF16; }},
      {"n of 0", "qkv", [](TensorTable& t) { t.storages[1].n = 0, t.storages[1].logical_bytes = 0; }},
      {"k of 0", "qkv", [](TensorTable& t) { t.storages[1].k = 0, t.storages[1].logical_bytes = 0; }},
      {"batch of 0", "experts", [](TensorTable& t) { t.storages[2].batch = 0, t.storages[2].logical_bytes = 0; }},
      {"n over 32 bits", "experts", [](TensorTable& t) { t.storages[2].n = uint64_t{1} << 32; }},
      {"n * k * 2 wraps to the right value", "experts",
       [](TensorTable& t) {
         t.storages[2].n = t.storages[2].k = uint64_t{1} << 31;
         t.storages[2].batch = 2, t.storages[2].logical_bytes = 0;
       }},
      {"batch wraps to the right value", "experts", [](TensorTable& t) { t.storages[2].batch = (uint64_t{1} << 53) + 3; }},
      {"logical bytes wrong", "qkv", [](TensorTable& t) { t.storages[1].logical_bytes -= 2; }},
      {"merged stack", "experts", [](TensorTable& t) { t.storages[2].merged = true; }},
      {"raw with windows", "norm.weight", [](TensorTable& t) { t.storages[0].windows_bytes = 16; }},
      {"raw with records", "norm.weight", [](TensorTable& t) { t.storages[0].records_bytes = 32; }},
      {"raw with geometry", "norm.weight", [](TensorTable& t) { t.storages[0].n = 1; }},
      {"raw and merged", "norm.weight", [](TensorTable& t) { t.storages[0].merged = true; }},
      {"raw shorter than logical", "norm.weight", [](TensorTable& t) { t.storages[0].data_bytes = 126; }},
      {"storage out of range", "tensor 'q'", [](TensorTable& t) { t.tensors[1].storage = 4; }},
      {"storage far out of range", "tensor 'q'", [](TensorTable& t) { t.tensors[1].storage = UINT32_MAX; }},
      {"tensor's dtype unknown", "tensor 'q'", [](TensorTable& t) { t.tensors[1].dtype = static_cast<DType>(999); }},
      {"f12 tensor of another dtype", "tensor 'q'", [](TensorTable& t) { t.tensors[1].dtype = DType::kF16; }},
      {"rows past the merged matrix", "tensor 'k'", [](TensorTable& t) { t.tensors[2].row_begin = 17; }},
      {"row_begin overflows", "tensor 'k'", [](TensorTable& t) { t.tensors[2].row_begin = UINT64_MAX - 15; }},
      {"rows overflow", "tensor 'k'", [](TensorTable& t) { t.tensors[2].shape[0] = UINT64_MAX; }},
      {"another k", "tensor 'k'", [](TensorTable& t) { t.tensors[2].shape[1] = 63; }},
      {"merged part of rank 3", "tensor 'k'",
       [](TensorTable& t) {
         t.tensors[2].shape = {1, 32, 64};
       }},
      {"rank 1 of a coded storage", "tensor 'k'", [](TensorTable& t) { t.tensors[2].shape = {2048}; }},
      {"rank 0 of a coded storage", "tensor 'k'", [](TensorTable& t) { t.tensors[2].shape = {}; }},
      {"experts miscounted", "tensor 'experts'", [](TensorTable& t) { t.tensors[3].shape[0] = 2; }},
      {"experts from a row", "tensor 'experts'", [](TensorTable& t) { t.tensors[3].row_begin = 16; }},
      {"experts' product wraps", "tensor 'experts'",
       [](TensorTable& t) {
         t.tensors[3].shape = {uint64_t{1} << 63, 2, 3, 16, 64};
       }},
      {"raw tensor larger than its storage", "norm.weight", [](TensorTable& t) { t.tensors[0].shape = {65}; }},
      {"raw tensor smaller than its storage", "norm.weight", [](TensorTable& t) { t.tensors[0].shape = {63}; }},
      {"raw product wraps", "norm.weight",
       [](TensorTable& t) {
         t.tensors[0].shape = {uint64_t{1} << 63, 2, 64};
       }},
      {"raw with a row", "norm.weight", [](TensorTable& t) { t.tensors[0].row_begin = 1; }},
      {"half a byte", "norm.weight", [](TensorTable& t) { t.tensors[0].dtype = DType::kF4, t.tensors[0].shape = {255}; }},
      {"rank over the limit", "shape", [](TensorTable& t) { t.tensors[0].shape = Shape(65, 1); }},
      {"name not UTF-8", "tensor.name", [](TensorTable& t) { t.tensors[0].name = "\xFF"; }},
      {"storage name not UTF-8", "storage.name", [](TensorTable& t) { t.storages[0].name = "\xFF"; }},
  };
  for (const Case& broken : cases) {
    TensorTable table = a_table();
    broken.change(table);
    const Result<TensorTable> decoded = decode_table(encode(table));
    ASSERT_FALSE(decoded.ok()) << broken.what;
    EXPECT_EQ(decoded.status().code(), StatusCode::kCorruption) << broken.what << ": " << decoded.status().to_string();
    EXPECT_NE(decoded.status().message().find(broken.named), std::string::npos)
        << broken.what << ": " << decoded.status().message();
    EXPECT_EQ(decoded.status().message().find('\n'), std::string::npos) << broken.what;
  }
}

TEST(TensorTable, LargestAllowedDimensionsAreAllowed) {
  TensorTable table = a_table();
  table.storages[2].n = UINT32_MAX;
  table.storages[2].k = 1;
  table.storages[2].batch = 1;
  table.storages[2].logical_bytes = uint64_t{2} * UINT32_MAX;
  table.tensors[3].shape = {1, UINT32_MAX, 1};
  EXPECT_TRUE(decode_table(encode(table)).ok()) << decode_table(encode(table)).status().to_string();
}

TEST(TensorTable, TruncationAndBitFlipsAreAnswers) {
  const std::vector<std::byte> bytes = encode(a_table());
  for (size_t size = 0; size < bytes.size(); ++size) {
    const Result<TensorTable> decoded = decode_table(std::span(bytes).first(size));
    ASSERT_FALSE(decoded.ok()) << size;
    EXPECT_EQ(decoded.status().code(), StatusCode::kCorruption);
  }
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    std::vector<std::byte> changed = bytes;
    changed[bit / 8] ^= std::byte{1} << (bit % 8);
    (void)decode_table(changed);
  }
}

TEST(TensorTable, CO_119_HugeListsCostNothing) {
  constexpr uint64_t kMost = (uint64_t{1} << 29) - 1;
  // Root with 3 data words and 5 pointers; each list in turn claims 2^29 - 1 items of no size.
  for (uint64_t list = 2; list < 5; ++list) {
    std::vector<uint64_t> words(9, 0);
    words[0] = test::struct_pointer(0, 3, 5);
    words[4 + list] = test::list_pointer(0, 0, kMost);
    const double before = test::cpu_seconds();
    const Result<TensorTable> decoded = decode_table(test::message_of(words));
    EXPECT_LT(test::cpu_seconds() - before, 0.05);
    EXPECT_FALSE(decoded.ok()) << list;
  }
}

TEST(TensorTable, CO_122_AMillionNamesOfAHundredBytes) {
  constexpr uint32_t kCount = 1'000'000;
  TensorTable table;
  table.arena_bytes = kHashBlockBytes;
  table.block_hashes = {7};
  StorageEntry storage;
  storage.name = "s";
  storage.dtype = DType::kBF16;
  storage.logical_bytes = storage.data_bytes = storage.resident_bytes = 2;
  table.storages = {storage};
  const std::string stem(92, 'n');
  table.tensors.reserve(kCount);
  for (uint32_t i = 0; i < kCount; ++i)
    table.tensors.push_back({stem + std::to_string(10'000'000 + i), DType::kBF16, {1, 1}, 0, 0});
  const std::vector<std::byte> bytes = encode(table);
  EXPECT_GT(bytes.size(), size_t{100} << 20) << "more than the 64 MiB that a reader accepts by default";
  EXPECT_LT(bytes.size(), kMaxTableBytes);
  const Result<TensorTable> decoded = decode_table(bytes);
  ASSERT_TRUE(decoded.ok()) << decoded.status().to_string();
  ASSERT_EQ(decoded->tensors.size(), kCount);
  EXPECT_EQ(decoded->tensors.front().name, stem + "10000000");
  EXPECT_EQ(decoded->tensors.back().name, stem + "10999999");
}

}  // namespace
}  // namespace weightd::ipc
