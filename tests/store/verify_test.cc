// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>

#include "store/manifest.h"
#include "tests/store/bundle_fixture.h"

namespace weightd::store {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace weightd::testing;  // NOLINT: the fixture's names

// A bundle with every kind of section: two shards and an index, a merged matrix, f12 with lists and dense groups, raw, a stale
// tensor.
void write_rich_checkpoint(const std::string& folder) {
  Words noise(3);
  std::vector<uint16_t> patched = trained(128, 1024, 1);
  for (size_t i = 0; i < 400; ++i) patched[noise.next() % patched.size()] = static_cast<uint16_t>(noise.next());
  for (size_t i = 16 * 1024; i < 17 * 1024; ++i) patched[i] = static_cast<uint16_t>(noise.next());
  SafetensorsBuilder first, second;
  first.add_bf16("l.k_proj.weight", {32, 512}, trained(32, 512, 2)).add_bf16("l.q_proj.weight", {64, 512}, trained(64, 512, 3));
  first.add_bf16("l.v_proj.weight", {32, 512}, trained(32, 512, 4)).add("norm", "BF16", {512}, repeat_word(0x3f80, 512));
  second.add_bf16("w", {128, 1024}, patched).add("norm", "BF16", {512}, repeat_word(0x3f81, 512));
  second.add("f", "F32", {77}, noise.bytes(308));
  write_sharded(folder, {{"1.safetensors", first}, {"2.safetensors", second}},
                {{"l.k_proj.weight", "1.safetensors"},
                 {"l.q_proj.weight", "1.safetensors"},
                 {"l.v_proj.weight", "1.safetensors"},
                 {"norm", "1.safetensors"},
                 {"w", "2.safetensors"},
                 {"f", "2.safetensors"}});
}

Status verify_status(const std::string& bundle, const std::string& checkpoint = "", bool deep = false) {
  return verify(bundle, checkpoint, deep, 2, {}).status();
}

class VerifyRich : public ::testing::Test {
 protected:
  void SetUp() override {
    write_rich_checkpoint(dir_ / "in");
    WEIGHTD_ASSERT_OK(pack(dir_ / "in", dir_ / "m.wpk", pack_options()));
    bytes_ = read_file(dir_ / "m.wpk");
  }
  std::string write_damaged(const std::function<void(std::string&)>& damage) {
    std::string bytes = bytes_;
    damage(bytes);
    write_file(dir_ / "bad.wpk", bytes);
    return dir_ / "bad.wpk";
  }

  TempDir dir_;
  std::string bytes_;
};

TEST_F(VerifyRich, SoundBundlePasses) {
  const BundleReader bundle = open_bundle(dir_ / "m.wpk");
  EXPECT_GT(storage_of(bundle, "w").listed_groups, 0U);
  EXPECT_GT(storage_of(bundle, "w").dense_groups, 0U);
  EXPECT_TRUE(storage_of(bundle, "l.q_proj.weight").merged);
  for (const bool deep : {false, true}) {
    const auto report = verify(dir_ / "m.wpk", dir_ / "in", deep, 2, {});
    WEIGHTD_ASSERT_OK(report);
    EXPECT_EQ(report->tensors, 7U);
    EXPECT_EQ(report->sections, bundle.manifest().sections.size());
  }
}

TEST_F(VerifyRich, CO_103_EveryFlippedBitIsFound) {
  Words random(103);
  const BundleReader sound = open_bundle(dir_ / "m.wpk");
  std::vector<size_t> positions = {0, 8, 0x48, 0xff0, 4095, bytes_.size() - 1};
  for (const Section& section : sound.manifest().sections) {  // both ends of each, and the padding behind it
    if (section.size_bytes == 0) continue;
    positions.insert(positions.end(), {section.offset_bytes, section.offset_bytes + section.size_bytes - 1});
    if (section.size_bytes % kSectionAlign != 0) positions.push_back(section.offset_bytes + section.size_bytes);
  }
  while (positions.size() < 230) positions.push_back(random.next() % bytes_.size());
  for (const size_t position : positions) {
    const std::string bad =
        write_damaged([&](std::string& bytes) { bytes[position] = static_cast<char>(bytes[position] ^ (1 << random.next() % 8)); });
    const Status status = verify_status(bad);
    EXPECT_FALSE(status.ok()) << "bit in byte " << position;
    EXPECT_THAT(status.message(), HasSubstr("bad.wpk")) << "byte " << position << ": " << status.to_string();
  }
}

TEST_F(VerifyRich, DamageNamesSectionAndTensor) {
  const BundleReader sound = open_bundle(dir_ / "m.wpk");
  for (const Plane& plane : storage_of(sound, "w").planes) {
    const Section& section = sound.manifest().sections[plane.section];
    const std::string bad =
        write_damaged([&](std::string& bytes) { bytes[section.offset_bytes + section.size_bytes / 2] ^= 0x10; });
    EXPECT_THAT(verify_status(bad).message(),
                AllOf(HasSubstr(std::string(plane_name(plane.kind)) + " of 'w'"), HasSubstr("XXH3-128 is")));
  }
}

TEST_F(VerifyRich, CO_100_TruncatedBundlesSayWhatIsMissing) {
  const size_t size = bytes_.size();
  for (const size_t length :
       {size_t{0}, size_t{1}, size_t{7}, size_t{8}, size_t{64}, size_t{4095}, size_t{4096}, size / 2, size - 1, size - 4096}) {
    const std::string bad = write_damaged([&](std::string& bytes) { bytes.resize(length); });
    const auto expected =
        AllOf(HasSubstr("expected " + std::to_string(length < 4096 ? 4096 : size)), HasSubstr("have " + std::to_string(length)));
    EXPECT_THAT(verify_status(bad).message(), expected) << length;
    EXPECT_EQ(verify_status(bad).code(), StatusCode::kCorruption) << length;
    const Status unpacked = unpack(bad, dir_ / "out", 1, {}).status();
    EXPECT_THAT(unpacked.message(), expected) << length;
    EXPECT_FALSE(std::filesystem::exists(dir_ / "out"));
  }
}

TEST_F(VerifyRich, CO_101_TheTailIsZeros) {
  const BundleReader sound = open_bundle(dir_ / "m.wpk");
  const Section& codes = sound.manifest().sections[storage_of(sound, "w").planes[0].section];
  const std::string bad = write_damaged([&](std::string& bytes) {
    std::fill(bytes.begin() + static_cast<ptrdiff_t>(codes.offset_bytes + codes.size_bytes / 2),
              bytes.begin() + static_cast<ptrdiff_t>(codes.offset_bytes + codes.size_bytes), '\0');
  });
  EXPECT_EQ(verify_status(bad).code(), StatusCode::kCorruption);
  EXPECT_THAT(verify_status(bad).message(), HasSubstr("'w'"));
}

TEST_F(VerifyRich, BytesAfterTheEndAreRefused) {
  const std::string bad = write_damaged([&](std::string& bytes) { bytes += '\0'; });
  EXPECT_THAT(verify_status(bad).message(), HasSubstr("bytes after the end"));
}

TEST_F(VerifyRich, OtherCheckpointsAreFound) {
  SafetensorsBuilder file;
  file.add("w", "BF16", {2}, "abcd");
  file.write(dir_ / "other.safetensors");
  EXPECT_THAT(verify_status(dir_ / "m.wpk", dir_ / "other.safetensors").message(), HasSubstr("is not in the checkpoint"));
  WEIGHTD_ASSERT_OK(pack(dir_ / "other.safetensors", dir_ / "other.wpk", pack_options()));
  SafetensorsBuilder more = file;
  more.add("x", "BF16", {2}, "abcd").write(dir_ / "more.safetensors");
  EXPECT_THAT(verify_status(dir_ / "other.wpk", dir_ / "more.safetensors").message(), HasSubstr("'x' is not in the bundle"));
  SafetensorsBuilder shape;
  shape.add("w", "BF16", {2, 1}, "abcd").write(dir_ / "shape.safetensors");
  EXPECT_THAT(verify_status(dir_ / "other.wpk", dir_ / "shape.safetensors").message(),
              HasSubstr("BF16 [2] in the bundle, BF16 [2, 1]"));
}

// A bundle whose sections are sound but whose tensor is not what was packed: what a wrong encoder would give.
void rewrite(const std::string& from, const std::string& to,
             const std::function<void(Manifest&, std::string&, const Storage&)>& change, std::string_view tensor) {
  const BundleReader source = open_bundle(from);
  Manifest manifest = source.manifest();
  auto writer = BundleWriter::create(to, 0);
  require(writer.ok(), writer.status().to_string());
  const Storage target = storage_of(source, tensor);
  for (uint32_t s = 0; s < manifest.sections.size(); ++s) {
    std::string bytes(manifest.sections[s].size_bytes, '\0');
    require(source.read(s, 0, std::as_writable_bytes(std::span(bytes.data(), bytes.size()))).ok(), "read");
    if (s == target.planes[0].section) change(manifest, bytes, target);
    writer->begin_section();
    require(writer->append(as_bytes(bytes)).ok() && writer->end_section().ok(), "write");
  }
  const auto id = writer->commit(std::move(manifest));
  require(id.ok(), id.status().to_string());
}

TEST(Verify, CO_036_ComparesBitsNotValues) {
  const TempDir dir;
  std::vector<uint16_t> words(6, 0x7fc1);
  words[5] = 0x8000;
  SafetensorsBuilder file;
  file.add_bf16("nan", {2, 3}, words);
  file.write(dir / "m.safetensors");
  WEIGHTD_ASSERT_OK(pack(dir / "m.safetensors", dir / "m.wpk", pack_options()));
  WEIGHTD_EXPECT_OK(verify_status(dir / "m.wpk", dir / "m.safetensors", true));
  rewrite(
      dir / "m.wpk", dir / "bad.wpk", [](Manifest&, std::string& bytes, const Storage&) { bytes[11] = '\0'; }, "nan");
  EXPECT_THAT(verify_status(dir / "bad.wpk", dir / "m.safetensors").message(),
              HasSubstr("tensor 'nan': element 5 [1, 2]: bundle 0x0000, checkpoint 0x8000"));
  EXPECT_THAT(verify_status(dir / "bad.wpk").message(),
              AllOf(HasSubstr("tensor 'nan'"), HasSubstr("XXH3-128 of the decoded bytes")));
}

TEST(Verify, FirstDifferenceInACodedMatrix) {
  const TempDir dir;
  SafetensorsBuilder file;
  file.add_bf16("w", {64, 512}, trained(64, 512, 1));
  file.write(dir / "m.safetensors");
  WEIGHTD_ASSERT_OK(pack(dir / "m.safetensors", dir / "m.wpk", pack_options()));
  // Byte 0 of L_A of tile (1, 0): row 16, column 0.
  const auto flip = [](Manifest&, std::string& bytes, const Storage& storage) {
    bytes[storage.geometry.tiles() * f12::kTileBytes] = static_cast<char>(bytes[storage.geometry.tiles() * f12::kTileBytes] ^ 1);
  };
  rewrite(dir / "m.wpk", dir / "bad.wpk", flip, "w");
  EXPECT_THAT(verify_status(dir / "bad.wpk", dir / "m.safetensors").message(),
              HasSubstr("tensor 'w': element 8192 [16, 0]: bundle 0x"));
}

// Large enough for hashing to run beside decoding, which stops at once.
TEST(Verify, DamageOfALargeMatrixStopsCleanly) {
  const TempDir dir;
  SafetensorsBuilder file;
  file.add_bf16("w", {3000, 2048}, trained(3000, 2048, 1));
  file.write(dir / "m.safetensors");
  WEIGHTD_ASSERT_OK(pack(dir / "m.safetensors", dir / "m.wpk", pack_options()));
  const BundleReader bundle = open_bundle(dir / "m.wpk");
  const Section& windows = bundle.manifest().sections[storage_of(bundle, "w").planes[1].section];
  std::string bytes = read_file(dir / "m.wpk");
  bytes[windows.offset_bytes] = 121;
  write_file(dir / "bad.wpk", bytes);
  for (const bool deep : {false, true})
    EXPECT_THAT(verify_status(dir / "bad.wpk", "", deep).message(), HasSubstr("windows of 'w'"));
}

TEST(Verify, WrongBlockHashIsFound) {
  const TempDir dir;
  SafetensorsBuilder file;
  Words words(1);
  file.add("big", "U8", {3'000'000}, words.bytes(3'000'000)).add_bf16("w", {64, 512}, trained(64, 512, 1));
  file.write(dir / "m.safetensors");
  WEIGHTD_ASSERT_OK(pack(dir / "m.safetensors", dir / "m.wpk", pack_options()));
  rewrite(
      dir / "m.wpk", dir / "bad.wpk",
      [](Manifest& manifest, std::string&, const Storage&) { manifest.residencies[0].block_hashes[2] ^= 1; }, "w");
  EXPECT_THAT(verify_status(dir / "bad.wpk").message(), AllOf(HasSubstr("block 2 of the resident form"), HasSubstr("'big'")));
}

TEST(Verify, BlockHashesAreThoseOfTheArena) {
  const TempDir dir;
  write_rich_checkpoint(dir / "in");
  WEIGHTD_ASSERT_OK(pack(dir / "in", dir / "m.wpk", pack_options()));
  const BundleReader bundle = open_bundle(dir / "m.wpk");
  const Residency& fast = *bundle.residency("fast");
  std::vector<std::byte> arena(fast.arena_bytes);
  for (const Placement& placement : fast.placements) {
    for (const Plane& plane : bundle.manifest().storages[placement.storage].planes) {
      if (plane.kind != placement.kind) continue;
      WEIGHTD_ASSERT_OK(
          bundle.read(plane.section, 0, std::span(arena).subspan(placement.arena_offset_bytes, placement.size_bytes)));
    }
  }
  EXPECT_EQ(block_hashes(arena, 1), fast.block_hashes);
}

TEST(Verify, CanBeCancelled) {
  const TempDir dir;
  write_rich_checkpoint(dir / "in");
  WEIGHTD_ASSERT_OK(pack(dir / "in", dir / "m.wpk", pack_options()));
  uint64_t last = 0, total = 0;
  int calls = 0;
  WEIGHTD_EXPECT_OK(verify(dir / "m.wpk", "", false, 1, [&](uint64_t done, uint64_t all) {
    ++calls;
    last = done, total = all;
    return true;
  }));
  EXPECT_EQ(last, total);
  for (int stop_at = 1; stop_at <= calls; ++stop_at) {
    int call = 0;
    const auto stopped = verify(dir / "m.wpk", "", false, 1, [&](uint64_t, uint64_t) { return ++call != stop_at; });
    EXPECT_EQ(stopped.status().code(), StatusCode::kCancelled) << stop_at;
  }
}

}  // namespace
}  // namespace weightd::store
