// SPDX-License-Identifier: Apache-2.0
#include "store/pack.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <thread>

#include "store/manifest.h"
#include "tests/store/bundle_fixture.h"

namespace weightd::store {
namespace {

using ::testing::HasSubstr;
using namespace weightd::testing;  // NOLINT: the fixture's names

// --- round trips -----------------------------------------------------------------------------------------------------------

TEST(Pack, RandomWordsOddShapesAndEveryRank) {
  const TempDir dir;
  Words words(1);
  SafetensorsBuilder file;
  file.add_bf16("scalar", {}, words.random(1));
  file.add_bf16("vector", {4097}, words.random(4097));
  file.add_bf16("row", {1, 300}, words.random(300));
  file.add_bf16("column", {300, 1}, words.random(300));
  file.add_bf16("odd", {17, 65}, words.random(17 * 65));
  file.add_bf16("random", {200, 515}, words.random(200 * 515));
  file.add_bf16("stack", {3, 33, 130}, words.random(3 * 33 * 130));
  file.add_bf16("deep", {2, 2, 16, 64}, words.random(2 * 2 * 16 * 64));
  file.add_bf16("empty", {0, 64}, {});
  expect_round_trip(dir, file);
}

TEST(Pack, TrainedWordsAreCodedInAnyShape) {
  const TempDir dir;
  SafetensorsBuilder file;
  const std::vector<Shape> shapes = {{512, 512}, {129, 640}, {250, 513}, {3, 48, 257}, {2, 2, 64, 512}};
  for (size_t i = 0; i < shapes.size(); ++i) {
    const uint64_t k = shapes[i].back();
    const uint64_t rows = std::accumulate(shapes[i].begin(), shapes[i].end() - 1, uint64_t{1}, std::multiplies<>());
    file.add_bf16("w" + std::to_string(i), shapes[i], trained(rows, k, i));
  }
  expect_round_trip(dir, file);
  const BundleReader bundle = open_bundle(dir / "model.wpk");
  for (const size_t i : {size_t{0}, size_t{4}}) {
    EXPECT_EQ(storage_of(bundle, "w" + std::to_string(i)).encoding, Encoding::kF12) << i;
  }
  const Storage& stack = storage_of(bundle, "w4");
  EXPECT_EQ(stack.geometry.batch, 4U);
  EXPECT_EQ(stack.geometry.n, 64U);
  EXPECT_EQ(stack.geometry.k, 512U);
}

TEST(Pack, ConstantAndAllEscapeMatrices) {
  const TempDir dir;
  SafetensorsBuilder file;
  file.add("zeros", "BF16", {64, 512}, repeat_word(0, 64 * 512));
  file.add("ones", "BF16", {64, 512}, repeat_word(0x3f80, 64 * 512));
  file.add("nans", "BF16", {64, 512}, repeat_word(0xffff, 64 * 512));
  // Every value in a row has another exponent than its neighbours can share a window with: half of all are escapes.
  std::vector<uint16_t> far(64 * 512);
  for (size_t i = 0; i < far.size(); ++i) far[i] = i % 2 == 0 ? 0x0080 : 0x7f00;
  file.add_bf16("far", {64, 512}, far);
  expect_round_trip(dir, file);
  const BundleReader bundle = open_bundle(dir / "model.wpk");
  EXPECT_EQ(storage_of(bundle, "zeros").encoding, Encoding::kF12);
  EXPECT_EQ(storage_of(bundle, "zeros").escapes, 0U);
  EXPECT_EQ(storage_of(bundle, "far").encoding, Encoding::kRaw) << "escapes in every second place cannot pay";
}

TEST(Pack, EveryDtypeStaysAsItIs) {
  const TempDir dir;
  Words words(3);
  SafetensorsBuilder file;
  for (uint16_t d = 0; d < kDTypeCount; ++d) {
    const auto dtype = static_cast<DType>(d);
    file.add("t" + std::to_string(d), dtype_name(dtype), {4, 6}, words.bytes(uint64_t{24} * dtype_bits(dtype) / 8));
  }
  expect_round_trip(dir, file);
  const BundleReader bundle = open_bundle(dir / "model.wpk");
  for (uint16_t d = 0; d < kDTypeCount; ++d) EXPECT_EQ(tensor_of(bundle, "t" + std::to_string(d)).dtype, static_cast<DType>(d));
}

TEST(Pack, HeaderSpacingAndMetadataAreRestored) {
  const TempDir dir;
  const std::string json =
      "{ \"__metadata__\" : {\"format\":\"pt\"},\n \"w\" : { \"dtype\":\"BF16\" , \"shape\":[2],\"data_offsets\":[0, 4]} }   ";
  std::filesystem::create_directory(dir / "in");
  write_file(dir / "in/model.safetensors", st(json, "abcd"));
  expect_round_trip(dir / "in/model.safetensors", dir / "in", {"model.safetensors"}, dir / "b.wpk", dir / "out");
}

TEST(Pack, ShardsInSubfoldersAndIndexAreRestored) {
  const TempDir dir;
  SafetensorsBuilder first, second;
  first.add_bf16("a.weight", {64, 512}, trained(64, 512, 1));
  second.add_bf16("b.weight", {64, 512}, trained(64, 512, 2)).padding(3);
  write_sharded(dir / "in", {{"x/m-00001.safetensors", first}, {"m-00002.safetensors", second}},
                {{"a.weight", "x/m-00001.safetensors"}, {"b.weight", "m-00002.safetensors"}});
  expect_round_trip(dir / "in", dir / "in", {"x/m-00001.safetensors", "m-00002.safetensors", "model.safetensors.index.json"},
                    dir / "b.wpk", dir / "out");
}

TEST(Pack, SlabsOfOneTensorGiveTheSameBytesForAnyThreadCount) {
  const TempDir dir;
  // 3000 rows of 4096 columns: several slabs for one thread, fewer for two and three; escapes enough for lists and dense groups.
  std::vector<uint16_t> words = trained(3000, 4096, 5);
  Words noise(6);
  for (size_t i = 0; i < 60000; ++i) words[noise.next() % words.size()] = static_cast<uint16_t>(noise.next());
  for (size_t i = 700 * 4096; i < 716 * 4096; ++i) words[i] = static_cast<uint16_t>(noise.next());
  SafetensorsBuilder file;
  file.add_bf16("w", {3000, 4096}, words).add("big_raw", "U8", {20'000'001}, noise.bytes(20'000'001));
  file.write(dir / "m.safetensors");
  std::string first;
  for (const int threads : {1, 2, 3, 1}) {
    WEIGHTD_ASSERT_OK(pack(dir / "m.safetensors", dir / "m.wpk", pack_options(threads)));
    const std::string bytes = read_file(dir / "m.wpk");
    if (first.empty()) first = bytes;
    EXPECT_TRUE(bytes == first) << threads << " threads";
  }
  const BundleReader bundle = open_bundle(dir / "m.wpk");
  EXPECT_EQ(storage_of(bundle, "w").encoding, Encoding::kF12);
  EXPECT_GT(storage_of(bundle, "w").listed_groups, 0U);
  EXPECT_GT(storage_of(bundle, "w").dense_groups, 0U);
  EXPECT_TRUE(decode(bundle, "w") == words_to_bytes(words));
  WEIGHTD_EXPECT_OK(verify(dir / "m.wpk", dir / "m.safetensors", true, 3, {}));
  WEIGHTD_EXPECT_OK(unpack(dir / "m.wpk", dir / "out", 1, {}));
  EXPECT_TRUE(read_file(dir / "out/m.safetensors") == read_file(dir / "m.safetensors"));
}

TEST(Pack, EncodingRawCodesNothing) {
  const TempDir dir;
  SafetensorsBuilder file;
  file.add_bf16("q_proj.weight", {64, 512}, trained(64, 512, 1));
  file.add_bf16("k_proj.weight", {64, 512}, trained(64, 512, 2));
  file.add_bf16("v_proj.weight", {64, 512}, trained(64, 512, 3));
  PackOptions options = pack_options();
  options.encoding = Encoding::kRaw;
  expect_round_trip(dir, file, options);
  const BundleReader bundle = open_bundle(dir / "model.wpk");
  EXPECT_EQ(bundle.manifest().storages.size(), 3U);
  for (const Storage& storage : bundle.manifest().storages) EXPECT_EQ(storage.encoding, Encoding::kRaw);
}

TEST(Pack, CodedSizeIsTwelveBitsAndALittle) {
  const TempDir dir;
  SafetensorsBuilder file;
  file.add_bf16("w", {512, 4096}, trained(512, 4096, 9));
  file.write(dir / "m.safetensors");
  const auto report = pack(dir / "m.safetensors", dir / "m.wpk", pack_options());
  WEIGHTD_ASSERT_OK(report);
  EXPECT_EQ(report->coded_logical_bytes, uint64_t{2} * 512 * 4096);
  const double bits = 16.0 * static_cast<double>(report->coded_stored_bytes) / static_cast<double>(report->coded_logical_bytes);
  EXPECT_LT(bits, 12.05);
  EXPECT_GT(bits, 12.03);
}

// --- merging ---------------------------------------------------------------------------------------------------------------

TEST(Pack, MergedMatrixHoldsItsPartsInTheRulesOrder) {
  const TempDir dir;
  // As exporters write them: by name, so k comes first. The parts have different row counts, as with grouped queries.
  const std::vector<uint16_t> q = trained(128, 512, 1), k = trained(32, 512, 2), v = trained(48, 512, 3);
  SafetensorsBuilder file;
  file.add_bf16("l.0.self_attn.k_proj.weight", {32, 512}, k);
  file.add_bf16("l.0.self_attn.o_proj.weight", {128, 512}, trained(128, 512, 4));
  file.add_bf16("l.0.self_attn.q_proj.weight", {128, 512}, q);
  file.add_bf16("l.0.self_attn.v_proj.weight", {48, 512}, v);
  expect_round_trip(dir, file);
  const BundleReader bundle = open_bundle(dir / "model.wpk");
  ASSERT_EQ(bundle.manifest().storages.size(), 2U);
  const Storage& merged = bundle.manifest().storages[0];
  EXPECT_EQ(merged.name, "l.0.self_attn.qkv_proj.weight");
  EXPECT_TRUE(merged.merged);
  EXPECT_EQ(merged.geometry.n, 208U);
  EXPECT_EQ(tensor_of(bundle, "l.0.self_attn.q_proj.weight").row_begin, 0U);
  EXPECT_EQ(tensor_of(bundle, "l.0.self_attn.k_proj.weight").row_begin, 128U);
  EXPECT_EQ(tensor_of(bundle, "l.0.self_attn.v_proj.weight").row_begin, 160U);
  EXPECT_TRUE(decode(bundle, "l.0.self_attn.q_proj.weight") == words_to_bytes(q));
  EXPECT_TRUE(decode(bundle, "l.0.self_attn.k_proj.weight") == words_to_bytes(k));
  EXPECT_TRUE(decode(bundle, "l.0.self_attn.v_proj.weight") == words_to_bytes(v));
}

TEST(Pack, NoMergeKeepsThePartsApart) {
  const TempDir dir;
  SafetensorsBuilder file;
  file.add_bf16("gate_proj.weight", {64, 512}, trained(64, 512, 1)).add_bf16("up_proj.weight", {64, 512}, trained(64, 512, 2));
  PackOptions options = pack_options();
  options.merge = false;
  expect_round_trip(dir, file, options);
  EXPECT_EQ(open_bundle(dir / "model.wpk").manifest().storages.size(), 2U);
}

TEST(Pack, MergedMatrixThatDoesNotPayFallsApart) {
  const TempDir dir;
  Words words(8);
  SafetensorsBuilder file;
  file.add_bf16("gate_proj.weight", {64, 512}, words.random(64 * 512)).add_bf16("up_proj.weight", {64, 512}, trained(64, 512, 2));
  file.add_bf16("after.weight", {64, 512}, trained(64, 512, 3));
  expect_round_trip(dir, file);
  const BundleReader bundle = open_bundle(dir / "model.wpk");
  EXPECT_EQ(bundle.manifest().storages.size(), 3U);
  EXPECT_EQ(storage_of(bundle, "gate_proj.weight").encoding, Encoding::kRaw);
  EXPECT_EQ(storage_of(bundle, "up_proj.weight").encoding, Encoding::kF12);
}

TEST(Pack, PartsMayLieInDifferentShards) {
  const TempDir dir;
  SafetensorsBuilder first, second;
  first.add_bf16("x.up_proj.weight", {64, 512}, trained(64, 512, 1));
  second.add_bf16("x.gate_proj.weight", {32, 512}, trained(32, 512, 2));
  write_sharded(dir / "in", {{"1.safetensors", first}, {"2.safetensors", second}},
                {{"x.up_proj.weight", "1.safetensors"}, {"x.gate_proj.weight", "2.safetensors"}});
  expect_round_trip(dir / "in", dir / "in", {"1.safetensors", "2.safetensors", "model.safetensors.index.json"}, dir / "b.wpk",
                    dir / "o");
  EXPECT_EQ(open_bundle(dir / "b.wpk").manifest().storages.size(), 1U);
}

// --- field cases: names ------------------------------------------------------------------------------------------------------

TEST(Pack, CO_006_NamesThatDifferAfterANulStayApart) {
  const TempDir dir;
  using namespace std::string_literals;
  SafetensorsBuilder file;
  file.add("a", "BF16", {2}, "1111").add("a\0b"s, "BF16", {2}, "2222").add("a\0c"s, "BF16", {2}, "3333");
  file.write(dir / "m.safetensors");
  WEIGHTD_ASSERT_OK(pack(dir / "m.safetensors", dir / "m.wpk", pack_options()));
  const BundleReader bundle = open_bundle(dir / "m.wpk");
  EXPECT_EQ(decode(bundle, "a"), "1111");
  EXPECT_EQ(decode(bundle, "a\0b"s), "2222");
  EXPECT_EQ(decode(bundle, "a\0c"s), "3333");
}

TEST(Pack, CO_008_NumbersInNamesAreNotRead) {
  const TempDir dir;
  SafetensorsBuilder file;
  std::vector<std::string> names;
  for (const char* layer : {"2147483000", "4294967296", "0"}) {
    names.push_back("model.layers." + std::string(layer) + ".mlp.up_proj.weight");
    file.add_bf16(names.back(), {64, 64}, trained(64, 64, names.size()));
  }
  expect_round_trip(dir, file);
  const BundleReader bundle = open_bundle(dir / "model.wpk");
  for (size_t i = 0; i < names.size(); ++i) EXPECT_TRUE(decode(bundle, names[i]) == words_to_bytes(trained(64, 64, i + 1)));
}

TEST(Pack, CO_010_NamesAreKeysNeverPaths) {
  const TempDir dir;
  SafetensorsBuilder file;
  const std::vector<std::string> names = {"../../etc/x",        "/abs", "a\nERROR fake line", "\x1b[2J", "", "\"quoted\"",
                                          "weights,with,commas"};
  for (size_t i = 0; i < names.size(); ++i) file.add(names[i], "U8", {1}, std::string(1, static_cast<char>('a' + i)));
  std::filesystem::create_directories(dir / "i");
  std::filesystem::create_directories(dir / "o");
  file.write(dir / "i/m.safetensors");
  WEIGHTD_ASSERT_OK(pack(dir / "i/m.safetensors", dir / "o/x", pack_options()));
  WEIGHTD_ASSERT_OK(unpack(dir / "o/x", dir / "r", 1, {}));
  EXPECT_EQ(files_below(dir.path()), (std::vector<std::string>{"i/m.safetensors", "o/x", "r/m.safetensors"}));
  const BundleReader bundle = open_bundle(dir / "o/x");
  for (size_t i = 0; i < names.size(); ++i) EXPECT_EQ(decode(bundle, names[i]), std::string(1, static_cast<char>('a' + i)));
}

// --- field cases: odd but legal files ------------------------------------------------------------------------------------------

TEST(Pack, CO_011_TensorsWithoutData) {
  const TempDir dir;
  SafetensorsBuilder file;
  file.entry("scaled_fp8", "F8_E4M3", {0}, 0, 0).entry("e1", "BF16", {2, 0}, 0, 0).entry("w", "BF16", {2}, 0, 4);
  file.entry("e2", "BF16", {0, 5}, 4, 4).entry("e3", "F32", {0, 0, 0}, 4, 4).raw_data("wxyz");
  expect_round_trip(dir, file);
  const BundleReader bundle = open_bundle(dir / "model.wpk");
  ASSERT_EQ(bundle.manifest().tensors.size(), 5U);
  EXPECT_EQ(tensor_of(bundle, "e1").shape, (Shape{2, 0}));
  EXPECT_EQ(tensor_of(bundle, "e3").dtype, DType::kF32);
  EXPECT_EQ(decode(bundle, "e2"), "");
  EXPECT_EQ(decode(bundle, "w"), "wxyz");
}

TEST(Pack, CO_012_DataAtOddAddressesGiveTheSamePayload) {
  const TempDir dir;
  const std::string data = words_to_bytes(trained(64, 64, 7));
  std::vector<Sha256> ids;
  std::vector<Sha256> payloads;
  for (size_t k = 0; k < 8; ++k) {
    SafetensorsBuilder file;
    file.add("w", "BF16", {64, 64}, data).padding(k);
    file.write(dir / "m.safetensors");
    WEIGHTD_ASSERT_OK(pack(dir / "m.safetensors", dir / "m.wpk", pack_options()));
    const BundleReader bundle = open_bundle(dir / "m.wpk");
    ids.push_back(bundle.manifest().tensors_id);
    payloads.push_back(bundle.manifest().sections[storage_of(bundle, "w").planes[0].section].sha);
    for (const Placement& placement : bundle.residency("fast")->placements) {
      EXPECT_EQ(placement.arena_offset_bytes % (placement.kind == PlaneKind::kPool ? 16 : 256), 0U);
    }
  }
  EXPECT_THAT(ids, ::testing::Each(ids[0]));
  EXPECT_THAT(payloads, ::testing::Each(payloads[0]));
}

TEST(Pack, CO_013_OddLengthBytesInFrontOfOtherTensors) {
  const TempDir dir;
  SafetensorsBuilder file;
  file.add("a", "U8", {3}, "abc")
      .add_bf16("w", {64, 64}, trained(64, 64, 1))
      .add("c", "BOOL", {1}, "\x01")
      .add("z", "F32", {2}, "12345678");
  expect_round_trip(dir, file);
}

TEST(Pack, CO_014_HeaderOrderDiffersFromOffsetOrder) {
  const TempDir dir;
  SafetensorsBuilder file;
  file.entry("a", "BF16", {3}, 10, 16).entry("m", "BF16", {3}, 4, 10).entry("z", "BF16", {2}, 0, 4);
  file.entry("e1", "BF16", {0}, 4, 4).entry("e2", "BF16", {0}, 16, 16).raw_data("zzzzmmmmmmaaaaaa");
  expect_round_trip(dir, file);
  const BundleReader bundle = open_bundle(dir / "model.wpk");
  EXPECT_EQ(decode(bundle, "a"), "aaaaaa");
  EXPECT_EQ(decode(bundle, "m"), "mmmmmm");
  EXPECT_EQ(decode(bundle, "z"), "zzzz");
}

TEST(Pack, CO_019_NoTensorsAtAll) {
  const TempDir dir;
  std::filesystem::create_directory(dir / "in");
  write_file(dir / "in/m.safetensors", st("{}", ""));
  expect_round_trip(dir / "in/m.safetensors", dir / "in", {"m.safetensors"}, dir / "m.wpk", dir / "out");
  const BundleReader bundle = open_bundle(dir / "m.wpk");
  EXPECT_EQ(bundle.manifest().tensors.size(), 0U);
  EXPECT_EQ(bundle.residency("fast")->arena_bytes, 0U);
  EXPECT_EQ(bundle.residency("fast")->block_hashes.size(), 0U);
}

// --- field cases: shards, ties, dtypes ----------------------------------------------------------------------------------------

TEST(Pack, CO_021_StaleTensorsAreKeptButNotPartOfTheModel) {
  const TempDir dir;
  SafetensorsBuilder first, second;
  first.add("a", "BF16", {64}, repeat_word(1, 64)).add("b", "BF16", {64}, repeat_word(2, 64));
  second.add("b", "BF16", {64}, repeat_word(3, 64)).add("c", "BF16", {64}, repeat_word(4, 64));
  const auto write = [&](const std::string& folder, const std::string& one, const std::string& two) {
    write_sharded(folder, {{one, first}, {two, second}}, {{"a", one}, {"b", two}, {"c", two}});
  };
  write(dir / "in", "1.safetensors", "2.safetensors");
  expect_round_trip(dir / "in", dir / "in", {"1.safetensors", "2.safetensors", "model.safetensors.index.json"}, dir / "b.wpk",
                    dir / "o");
  const BundleReader bundle = open_bundle(dir / "b.wpk");
  EXPECT_EQ(decode(bundle, "b"), repeat_word(3, 64));
  ASSERT_EQ(bundle.manifest().tensors.size(), 4U);
  const TensorRecord& stale = bundle.manifest().tensors[1];
  EXPECT_EQ(stale.name, "b");
  EXPECT_FALSE(stale.indexed);
  EXPECT_FALSE(bundle.manifest().storages[stale.storage].resident);
  for (const Placement& placement : bundle.residency("fast")->placements) EXPECT_NE(placement.storage, stale.storage);

  write(dir / "swapped", "2.safetensors", "1.safetensors");
  const auto report = pack(dir / "swapped", dir / "s.wpk", pack_options());
  WEIGHTD_ASSERT_OK(report);
  EXPECT_EQ(open_bundle(dir / "s.wpk").manifest().tensors_id, bundle.manifest().tensors_id);
  EXPECT_THAT(report->warnings, ::testing::Contains(HasSubstr("1 stored tensor")));
}

TEST(Pack, CO_027_TheBundleHoldsWhatTheCheckpointHolds) {
  const TempDir dir;
  SafetensorsBuilder file;
  file.add_bf16("model.embed_tokens.weight", {256, 64}, trained(256, 64, 1));
  expect_round_trip(dir, file);
  const BundleReader bundle = open_bundle(dir / "model.wpk");
  ASSERT_EQ(bundle.manifest().tensors.size(), 1U);
  EXPECT_EQ(bundle.manifest().tensors[0].name, "model.embed_tokens.weight");
}

TEST(Pack, CO_029_EqualTensorsAreStoredOnceAndRestoredTwice) {
  const TempDir dir;
  const std::string data = words_to_bytes(trained(256, 64, 1));
  SafetensorsBuilder file;
  file.add("a", "BF16", {256, 64}, data).add("b", "BF16", {64, 256}, data).add("c", "F16", {256, 64}, data);
  file.add("d", "BF16", {256, 64}, data);
  expect_round_trip(dir, file);
  const BundleReader bundle = open_bundle(dir / "model.wpk");
  EXPECT_EQ(bundle.manifest().storages.size(), 3U);
  EXPECT_EQ(tensor_of(bundle, "a").storage, tensor_of(bundle, "d").storage);
  EXPECT_EQ(tensor_of(bundle, "b").shape, (Shape{64, 256}));
  EXPECT_EQ(tensor_of(bundle, "c").dtype, DType::kF16);
  for (const char* name : {"a", "b", "c", "d"}) EXPECT_TRUE(decode(bundle, name) == data) << name;
}

TEST(Pack, EqualBeginningsAreNotEqualTensors) {
  const TempDir dir;
  std::string one(100'000, 'x'), two = one;
  two.back() = 'y';
  SafetensorsBuilder file;
  file.add("one", "U8", {one.size()}, one).add("two", "U8", {two.size()}, two).add("three", "U8", {one.size()}, one);
  expect_round_trip(dir, file);
  const BundleReader bundle = open_bundle(dir / "model.wpk");
  EXPECT_EQ(bundle.manifest().storages.size(), 2U);
  EXPECT_EQ(tensor_of(bundle, "one").storage, tensor_of(bundle, "three").storage);
}

TEST(Pack, CO_031_F32IsNeverConverted) {
  const TempDir dir;
  std::vector<float> values(256);
  for (size_t i = 0; i < values.size(); ++i) values[i] = 1.0F + static_cast<float>(i) * std::ldexp(1.0F, -20);
  std::string data(values.size() * 4, '\0');
  std::memcpy(data.data(), values.data(), data.size());
  SafetensorsBuilder file;
  file.add("gate.e_score_correction_bias", "F32", {256}, data).add_bf16("w", {64, 512}, trained(64, 512, 1));
  expect_round_trip(dir, file);
  const BundleReader bundle = open_bundle(dir / "model.wpk");
  EXPECT_EQ(storage_of(bundle, "gate.e_score_correction_bias").dtype, DType::kF32);
  EXPECT_EQ(decode(bundle, "gate.e_score_correction_bias"), data);
}

TEST(Pack, CO_032_ModelsWithoutBF16ArePackedRaw) {
  const TempDir dir;
  Words words(1);
  const std::vector<std::pair<std::string, std::pair<Shape, size_t>>> models = {
      {"F16", {{1024, 1024}, 2U << 20}}, {"F32", {{512, 512}, 1U << 20}}, {"U8", {{1U << 20}, 1U << 20}}};
  for (const auto& [dtype, size] : models) {
    SafetensorsBuilder file;
    file.add("w", dtype, size.first, words.bytes(size.second));
    file.write(dir / "m.safetensors");
    const auto report = pack(dir / "m.safetensors", dir / "m.wpk", pack_options());
    WEIGHTD_ASSERT_OK(report);
    EXPECT_LE(report->bundle_bytes, report->source_bytes + report->source_bytes / 100 + (64U << 10));
    EXPECT_EQ(report->coded_tensors, 0U);
    EXPECT_THAT(report->warnings, ::testing::Contains(HasSubstr("no tensor could be coded")));
  }
}

// --- field cases: bits -------------------------------------------------------------------------------------------------------

TEST(Pack, CO_034_AllBitPatterns) {
  const TempDir dir;
  std::vector<uint16_t> ordered(65536);
  std::iota(ordered.begin(), ordered.end(), uint16_t{0});
  std::vector<uint16_t> shuffled = ordered;
  Words random(1);
  for (size_t i = shuffled.size() - 1; i > 0; --i) std::swap(shuffled[i], shuffled[random.next() % (i + 1)]);
  SafetensorsBuilder file;
  file.add_bf16("ordered", {256, 256}, ordered).add_bf16("shuffled", {256, 256}, shuffled);
  // All patterns inside a matrix that is coded.
  std::vector<uint16_t> mixed = trained(2048, 2048, 2);
  for (size_t i = 0; i < ordered.size(); ++i) mixed[i * 64 + 5] = ordered[i];
  file.add_bf16("mixed", {2048, 2048}, mixed);
  expect_round_trip(dir, file);
  const BundleReader bundle = open_bundle(dir / "model.wpk");
  EXPECT_EQ(storage_of(bundle, "ordered").encoding, Encoding::kF12) << "each row has one high byte";
  EXPECT_EQ(storage_of(bundle, "mixed").encoding, Encoding::kF12);
  EXPECT_TRUE(decode(bundle, "mixed") == words_to_bytes(mixed));
}

TEST(Pack, CO_035_NanPayloads) {
  const TempDir dir;
  SafetensorsBuilder file;
  int number = 0;
  for (const uint16_t base : std::initializer_list<uint16_t>{0x0000, 0x3f80}) {
    std::vector<uint16_t> all(64 * 64, base);
    for (const uint16_t nan :
         std::initializer_list<uint16_t>{0x7f81, 0x7fa0, 0x7fbf, 0x7fc0, 0x7fff, 0xff81, 0xffa0, 0xffbf, 0xffc0, 0xffff}) {
      std::vector<uint16_t> alone(64 * 64, base);
      alone[1000] = nan;
      all[static_cast<size_t>(number) * 37] = nan;
      file.add_bf16("n" + std::to_string(number++), {64, 64}, alone);
    }
    file.add_bf16("all" + std::to_string(base), {64, 64}, all);
  }
  expect_round_trip(dir, file);
  EXPECT_EQ(storage_of(open_bundle(dir / "model.wpk"), "n0").encoding, Encoding::kF12);
}

TEST(Pack, CO_038_DataThatDoNotCompress) {
  const TempDir dir;
  Words words(1);
  constexpr size_t kSide = 1024;
  const std::vector<uint16_t> good = trained(kSide, kSide, 1);
  std::vector<uint16_t> rows = good, columns = good, board = good;
  for (size_t i = 0; i < good.size(); ++i) {
    const size_t r = i / kSide, c = i % kSide;
    const auto noise = static_cast<uint16_t>(words.next());
    if (r < kSide / 2) rows[i] = noise;
    if (c < kSide / 2) columns[i] = noise;
    board[i] = (r / 64 + c / 64) % 2 == 0 ? noise : uint16_t{0x3c00};
  }
  SafetensorsBuilder file;
  file.add_bf16("random", {kSide, kSide}, words.random(kSide * kSide)).add_bf16("rows", {kSide, kSide}, rows);
  file.add_bf16("columns", {kSide, kSide}, columns).add_bf16("board", {kSide, kSide}, board);
  expect_round_trip(dir, file);
  const BundleReader bundle = open_bundle(dir / "model.wpk");
  for (const char* name : {"random", "rows", "columns", "board"})
    EXPECT_EQ(storage_of(bundle, name).encoding, Encoding::kRaw) << name;
  EXPECT_LE(bundle.file_bytes(), std::filesystem::file_size(dir / "in/model.safetensors") * 101 / 100 + (64U << 10));
}

TEST(Pack, CO_045_SizesAreComputedIn64Bits) {
  // Geometry and file arithmetic of tensors past 2^31 elements and 4 GiB, without their bytes.
  constexpr f12::Geometry kWide{262144, 8960, 1};
  static_assert(kWide.raw_bytes() == 4697620480U);
  static_assert(kWide.codes_bytes() == uint64_t{16384} * 140 * 1536);
  Manifest manifest;
  manifest.sections = {
      {0, kWide.codes_bytes(), {}, {}}, {0, kWide.windows_bytes(), {}, {}}, {0, kWide.records_bytes(), {}, {}}, {0, 32, {}, {}}};
  for (int i = 0; i < 2; ++i) {
    Storage storage;
    storage.encoding = Encoding::kF12;
    storage.dtype = DType::kBF16;
    storage.geometry = kWide;
    storage.planes = {{PlaneKind::kCodes, 0}, {PlaneKind::kWindows, 1}, {PlaneKind::kRecords, 2}, {PlaneKind::kPool, 3}};
    manifest.storages.push_back(storage);
  }
  const Residency residency = plan_residency(manifest);
  ASSERT_EQ(residency.placements.size(), 8U);
  EXPECT_EQ(residency.placements[3].arena_offset_bytes, uint64_t{3523215360} + 262144 + 9437184);
  EXPECT_EQ(residency.pool_offset_bytes, 2 * (uint64_t{3523215360} + 262144 + 9437184));
  EXPECT_EQ(residency.pool_bytes, 64U);
  EXPECT_EQ(residency.placements[7].arena_offset_bytes, residency.pool_offset_bytes + 32);
  EXPECT_EQ(residency.arena_bytes % kBlockBytes, 0U);
}

TEST(Pack, CO_048_TheSourceIsNotTouched) {
  const TempDir dir;
  SafetensorsBuilder file;
  file.add_bf16("a", {1}, trained(1, 1, 1)).add_bf16("b", {3, 5}, trained(3, 5, 1)).add_bf16("w", {64, 512}, trained(64, 512, 1));
  file.write(dir / "m.safetensors");
  ASSERT_EQ(::chmod((dir / "m.safetensors").c_str(), 0444), 0);
  struct stat before {
  }, after{};
  ASSERT_EQ(::stat((dir / "m.safetensors").c_str(), &before), 0);
  WEIGHTD_ASSERT_OK(pack(dir / "m.safetensors", dir / "m.wpk", pack_options()));
  ASSERT_EQ(::stat((dir / "m.safetensors").c_str(), &after), 0);
  EXPECT_EQ(before.st_mtim.tv_nsec, after.st_mtim.tv_nsec);
  EXPECT_EQ(before.st_mtim.tv_sec, after.st_mtim.tv_sec);
  EXPECT_EQ(read_file(dir / "m.safetensors"), file.bytes());
}

// --- field cases: identity, races, changes -------------------------------------------------------------------------------------

TEST(Pack, CO_083_TwoPackersOfOneOutput) {
  const TempDir dir;
  SafetensorsBuilder a, b;
  a.add_bf16("w", {64, 512}, trained(64, 512, 1));
  b.add_bf16("w", {64, 512}, trained(64, 512, 2));
  a.write(dir / "a.safetensors");
  b.write(dir / "b.safetensors");
  std::filesystem::create_directory(dir / "out");
  WEIGHTD_ASSERT_OK(pack(dir / "a.safetensors", dir / "a.wpk", pack_options(1)));
  WEIGHTD_ASSERT_OK(pack(dir / "b.safetensors", dir / "b.wpk", pack_options(1)));
  const std::string bytes_a = read_file(dir / "a.wpk"), bytes_b = read_file(dir / "b.wpk");
  for (int round = 0; round < 25; ++round) {
    std::thread other([&] { WEIGHTD_EXPECT_OK(pack(dir / "a.safetensors", dir / "out/x.wpk", pack_options(1))); });
    WEIGHTD_EXPECT_OK(pack(dir / "b.safetensors", dir / "out/x.wpk", pack_options(1)));
    other.join();
    const std::string bytes = read_file(dir / "out/x.wpk");
    EXPECT_TRUE(bytes == bytes_a || bytes == bytes_b) << round;
    EXPECT_EQ(files_below(dir / "out"), std::vector<std::string>{"x.wpk"});
  }
}

TEST(Pack, CO_089_TheCheckpointChangesWhileItIsPacked) {
  const TempDir dir;
  SafetensorsBuilder file;
  file.add_bf16("w", {1024, 1024}, trained(1024, 1024, 1)).add_bf16("x", {1024, 1024}, trained(1024, 1024, 2));
  std::filesystem::create_directory(dir / "out");
  const std::string path = dir / "m.safetensors";
  const auto attempt = [&](const std::function<void()>& change) {
    file.write(path);
    bool done = false;
    PackOptions options = pack_options();
    options.progress = [&](uint64_t, uint64_t) {
      if (!done) change();
      done = true;
      return true;
    };
    const auto report = pack(path, dir / "out/m.wpk", options);
    EXPECT_FALSE(report.ok());
    EXPECT_EQ(files_below(dir / "out"), std::vector<std::string>{});
    return report.status();
  };
  const auto overwrite = [&] {
    std::fstream out(path, std::ios::in | std::ios::out | std::ios::binary);
    out.seekp(3'000'000);
    out << std::string(100'000, '\0');
  };
  EXPECT_EQ(attempt(overwrite).code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(attempt([&] { std::filesystem::resize_file(path, 3'000'000); }).code(), StatusCode::kCorruption);
  // Touched in the part that has been read, with the same content.
  const auto touch = [&] {
    const std::string bytes = read_file(path);
    std::filesystem::last_write_time(path, std::filesystem::file_time_type::clock::now() + std::chrono::seconds(5));
  };
  const Status touched = attempt(touch);
  EXPECT_EQ(touched.code(), StatusCode::kFailedPrecondition) << touched.to_string();
  EXPECT_THAT(touched.message(), HasSubstr("m.safetensors"));
}

TEST(Pack, CO_106_TheTensorsIdDoesNotDependOnFilesOrEncoding) {
  const TempDir dir;
  const std::string a = words_to_bytes(trained(64, 512, 1)), b = words_to_bytes(trained(64, 512, 2));
  SafetensorsBuilder whole, first, second;
  whole.add("b", "BF16", {64, 512}, b).add("a", "BF16", {64, 512}, a).padding(5);
  first.add("a", "BF16", {64, 512}, a);
  second.add("b", "BF16", {64, 512}, b);
  whole.write(dir / "whole/model.safetensors");
  write_sharded(dir / "shards", {{"1.safetensors", first}, {"2.safetensors", second}},
                {{"a", "1.safetensors"}, {"b", "2.safetensors"}});
  const auto ids = [&](const std::string& checkpoint, Encoding encoding) {
    PackOptions options = pack_options();
    options.encoding = encoding;
    const auto report = pack(checkpoint, dir / "m.wpk", options);
    EXPECT_TRUE(report.ok()) << report.status().to_string();
    return std::make_pair(report->content_id, open_bundle(dir / "m.wpk").manifest().tensors_id);
  };
  const auto from_whole = ids(dir / "whole", Encoding::kF12);
  const auto from_shards = ids(dir / "shards", Encoding::kF12);
  EXPECT_EQ(from_whole.second, from_shards.second);
  EXPECT_NE(from_whole.first, from_shards.first);
  EXPECT_EQ(from_whole.second, ids(dir / "whole", Encoding::kRaw).second);
  EXPECT_EQ(from_whole.first, ids(dir / "whole", Encoding::kF12).first) << "packing twice gives the same bundle";
  std::string flipped = b;
  flipped[17] = static_cast<char>(flipped[17] ^ 1);
  SafetensorsBuilder changed;
  changed.add("b", "BF16", {64, 512}, flipped).add("a", "BF16", {64, 512}, a).padding(5);
  changed.write(dir / "whole/model.safetensors");
  EXPECT_NE(from_whole.second, ids(dir / "whole", Encoding::kF12).second);
}

TEST(Pack, TheTensorsIdIsWhatTheFormatSays) {
  // Computed by hand from FORMAT.md, section 4.2.
  std::string text("weightd tensors\0", 16);
  const auto add = [&](uint64_t value) { text += little_endian_u64(value); };
  add(2);
  add(1), text += "a", add(4), add(1), add(3), add(3), add(7), add(8);
  add(2), text += "ab", add(12), add(0), add(2), add(9), add(10);
  TensorRecord a, ab, stale;
  a.name = "a", a.dtype = DType::kU8, a.shape = {3}, a.logical_bytes = 3, a.logical_xxh = {7, 8};
  ab.name = "ab", ab.dtype = DType::kBF16, ab.logical_bytes = 2, ab.logical_xxh = {9, 10};
  stale = a;
  stale.indexed = false;
  EXPECT_EQ(to_hex(compute_tensors_id({ab, stale, a})), to_hex(sha256(as_bytes(text))));
}

// --- cancelling, refusing ------------------------------------------------------------------------------------------------------

TEST(Pack, CancellingAtAnyStepLeavesNothing) {
  const TempDir dir;
  SafetensorsBuilder file;
  file.add_bf16("w", {2048, 2048}, trained(2048, 2048, 1)).add("r", "U8", {9'000'000}, Words(1).bytes(9'000'000));
  file.write(dir / "m.safetensors");
  std::filesystem::create_directory(dir / "out");
  int steps = 0;
  for (int stop_at = 0; stop_at == 0 || steps > stop_at; ++stop_at) {
    steps = 0;
    uint64_t last = 0;
    PackOptions options = pack_options();
    options.progress = [&](uint64_t done, uint64_t total) {
      EXPECT_GE(done, last);
      EXPECT_LE(done, total);
      last = done;
      return steps++ != stop_at;
    };
    const auto report = pack(dir / "m.safetensors", dir / "out/m.wpk", options);
    if (report.ok()) {
      EXPECT_GE(stop_at, 4) << "both passes report";
      break;
    }
    EXPECT_EQ(report.status().code(), StatusCode::kCancelled);
    EXPECT_EQ(files_below(dir / "out"), std::vector<std::string>{});
  }
}

TEST(Pack, RefusesToReplaceItsOwnSource) {
  const TempDir dir;
  SafetensorsBuilder file;
  file.add("w", "U8", {4}, "abcd");
  file.write(dir / "m.safetensors");
  std::filesystem::create_symlink(dir / "m.safetensors", dir / "link.wpk");
  for (const char* name : {"m.safetensors", "link.wpk"}) {
    const auto report = pack(dir / "m.safetensors", dir / name, pack_options());
    EXPECT_EQ(report.status().code(), StatusCode::kInvalidArgument) << name;
  }
  EXPECT_EQ(read_file(dir / "m.safetensors"), file.bytes());
}

}  // namespace
}  // namespace weightd::store
