// SPDX-License-Identifier: Apache-2.0
#include "store/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>

#include "store/checkpoint.h"
#include "tests/store/bundle_fixture.h"

namespace weightd::store {
namespace {

using ::testing::HasSubstr;
using namespace weightd::testing;  // NOLINT: the fixture's names

// --- header ----------------------------------------------------------------------------------------------------------------

BundleHeader small_header() {
  BundleHeader header;
  header.file_bytes = 8192 + 160;
  header.manifest_offset_bytes = 8192;
  header.manifest_bytes = 160;
  for (size_t i = 0; i < 32; ++i) header.manifest_sha[i] = static_cast<unsigned char>(i);
  return header;
}

using HeaderBytes = std::array<std::byte, kHeaderBytes>;

// With the hash made right again, so that what it protects is looked at.
HeaderBytes rehashed(HeaderBytes bytes) {
  const Xxh128 hash = xxh128(std::span(bytes).first(0xff0));
  std::memcpy(bytes.data() + 0xff0, &hash.low, 8);
  std::memcpy(bytes.data() + 0xff8, &hash.high, 8);
  return bytes;
}

TEST(Header, BytesAreWhereTheFormatSays) {
  const HeaderBytes bytes = encode_header(small_header());
  const auto at = [&](size_t offset) { return static_cast<unsigned>(bytes[offset]); };
  const std::string_view magic("\x89WPK\r\n\x1a\n", 8);
  EXPECT_EQ(std::memcmp(bytes.data(), magic.data(), 8), 0);
  EXPECT_EQ(at(0x08), 1U);
  EXPECT_EQ(at(0x0a), 0U);
  EXPECT_EQ(at(0x0d), 0x10U);
  EXPECT_EQ(at(0x10), 0xa0U);
  EXPECT_EQ(at(0x11), 0x20U);
  EXPECT_EQ(at(0x19), 0x20U);
  EXPECT_EQ(at(0x20), 0xa0U);
  EXPECT_EQ(at(0x28 + 31), 31U);
  EXPECT_EQ(rehashed(bytes), bytes);
  const auto header = decode_header(bytes, 8352, "f");
  WEIGHTD_ASSERT_OK(header);
  EXPECT_EQ(header->manifest_offset_bytes, 8192U);
  EXPECT_EQ(header->manifest_sha[31], 31U);
}

TEST(Header, EveryFlippedBitIsRefused) {
  const HeaderBytes sound = encode_header(small_header());
  for (size_t byte = 0; byte < kHeaderBytes; ++byte) {
    HeaderBytes bad = sound;
    bad[byte] ^= std::byte{1} << (byte % 8);
    EXPECT_EQ(decode_header(bad, 8352, "f").status().code(), StatusCode::kCorruption) << byte;
  }
}

TEST(Header, NewerMajorIsUnsupportedNewerMinorIsRead) {
  BundleHeader newer = small_header();
  newer.major = 2;
  const Status status = decode_header(encode_header(newer), 8352, "f").status();
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_THAT(status.message(), HasSubstr("bundle format 2.0"));
  newer.major = 1;
  newer.minor = 9;
  WEIGHTD_EXPECT_OK(decode_header(encode_header(newer), 8352, "f"));
}

TEST(Header, RulesWithARightHash) {
  const auto refuse = [](HeaderBytes bytes, std::string_view rule) {
    const Status status = decode_header(rehashed(bytes), 8352, "f").status();
    EXPECT_EQ(status.code(), StatusCode::kCorruption) << rule;
    EXPECT_THAT(status.message(), HasSubstr(std::string(rule)));
  };
  HeaderBytes bytes = encode_header(small_header());
  bytes[0xfef] = std::byte{1};
  refuse(bytes, "reserved");
  bytes = encode_header(small_header());
  bytes[0x48] = std::byte{1};
  refuse(bytes, "reserved");
  bytes = encode_header(small_header());
  bytes[0x0d] = std::byte{0x20};
  refuse(bytes, "header_bytes");
  BundleHeader header = small_header();
  header.file_bytes += 8;
  refuse(encode_header(header), "expected 8360 bytes, have 8352: the file is truncated");
  header = small_header();
  header.manifest_offset_bytes = 4096;
  refuse(encode_header(header), "does not end a file");
  header.manifest_offset_bytes = 8200, header.manifest_bytes = 152;
  refuse(encode_header(header), "does not end a file");
  header.manifest_offset_bytes = 0, header.manifest_bytes = 8352;
  refuse(encode_header(header), "does not end a file");
  header.manifest_offset_bytes = 8192, header.manifest_bytes = UINT64_MAX - 7;
  refuse(encode_header(header), "does not end a file");
}

TEST(Header, OtherFilesAreNamedAsSuch) {
  for (const std::string_view text : {"hello", "{\"a\":1}", "\x89PNG\r\n\x1a\n"}) {
    EXPECT_THAT(decode_header(as_bytes(text), text.size(), "f").status().message(), HasSubstr("not a weightd bundle")) << text;
  }
  EXPECT_THAT(decode_header({}, 0, "f").status().message(), HasSubstr("expected 4096 bytes, have 0"));
}

// --- a small sound manifest -----------------------------------------------------------------------------------------------------

// One shard with a merged pair of matrices (rows 0..15 "g", 16..47 "u"), a raw tensor and a stale one; one index.
Manifest sound_manifest() {
  Manifest m;
  m.tool_version = "1.2.3";
  const f12::Geometry g{48, 64, 1};
  const std::vector<uint64_t> sizes = {40, 25, g.codes_bytes(), g.windows_bytes(), g.records_bytes(), 32, 6, 8};
  uint64_t offset = kHeaderBytes;
  for (size_t i = 0; i < sizes.size(); ++i) {
    m.sections.push_back({offset, sizes[i], {i, i + 1}, {}});
    offset = f12::align_up(offset + sizes[i], kSectionAlign);
  }
  m.sources = {{"d/m.safetensors", 40 + 6144 + 6 + 8, {}, 0, false}, {"i.json", 25, {}, 1, true}};
  Storage merged;
  merged.name = "gu";
  merged.encoding = Encoding::kF12;
  merged.dtype = DType::kBF16;
  merged.merged = true;
  merged.geometry = g;
  merged.logical_bytes = 6144;
  merged.planes = {{PlaneKind::kCodes, 2}, {PlaneKind::kWindows, 3}, {PlaneKind::kRecords, 4}, {PlaneKind::kPool, 5}};
  merged.escapes = 7;
  merged.listed_groups = 1;
  Storage raw;
  raw.name = "r";
  raw.dtype = DType::kF16;
  raw.geometry = {0, 0, 0};
  raw.logical_bytes = 6;
  raw.planes = {{PlaneKind::kRaw, 6}};
  Storage stale = raw;
  stale.name = "r";
  stale.dtype = DType::kF32;
  stale.resident = false;
  stale.logical_bytes = 8;
  stale.planes = {{PlaneKind::kRaw, 7}};
  m.storages = {merged, raw, stale};
  m.tensors = {{"g", DType::kBF16, {16, 64}, 0, 0, 0, 0, 2048, {1, 2}, true},
               {"u", DType::kBF16, {32, 64}, 0, 16, 0, 2048, 4096, {3, 4}, true},
               {"r", DType::kF16, {3}, 1, 0, 0, 6144, 6, {5, 6}, true},
               {"r", DType::kF32, {2}, 2, 0, 0, 6150, 8, {7, 8}, false}};
  m.left_out_files = {"other.safetensors"};
  m.residencies = {plan_residency(m)};
  m.residencies[0].block_hashes = {42};
  m.tensors_id = compute_tensors_id(m.tensors);
  return m;
}

uint64_t manifest_offset(const Manifest& m) {
  return m.sections.empty() ? kHeaderBytes
                            : f12::align_up(m.sections.back().offset_bytes + m.sections.back().size_bytes, kSectionAlign);
}

TEST(Manifest, SurvivesTheWayThroughBytes) {
  const Manifest m = sound_manifest();
  const auto bytes = encode_manifest(m);
  WEIGHTD_ASSERT_OK(bytes);
  EXPECT_EQ(bytes->size() % 8, 0U);
  const auto back = decode_manifest(*bytes, "f");
  WEIGHTD_ASSERT_OK(back);
  WEIGHTD_EXPECT_OK(validate_manifest(*back, manifest_offset(m), "f"));
  EXPECT_EQ(back->tool_version, "1.2.3");
  EXPECT_EQ(back->sources[0].relative_name, "d/m.safetensors");
  EXPECT_TRUE(back->sources[1].is_index);
  EXPECT_EQ(back->sections[7].xxh, (Xxh128{7, 8}));
  EXPECT_EQ(back->storages[0].geometry.n, 48U);
  EXPECT_EQ(back->storages[0].escapes, 7U);
  EXPECT_EQ(back->storages[0].planes[3].kind, PlaneKind::kPool);
  EXPECT_FALSE(back->storages[2].resident);
  EXPECT_EQ(back->tensors[1].row_begin, 16U);
  EXPECT_EQ(back->tensors[1].shape, (Shape{32, 64}));
  EXPECT_EQ(back->tensors[3].logical_xxh, (Xxh128{7, 8}));
  EXPECT_FALSE(back->tensors[3].indexed);
  EXPECT_EQ(back->left_out_files, m.left_out_files);
  EXPECT_EQ(back->residencies[0].block_hashes, (std::vector<uint64_t>{42}));
  // The same again, byte for byte, and from an unaligned place.
  EXPECT_EQ(*encode_manifest(*back), *bytes);
  std::vector<std::byte> shifted(bytes->size() + 1);
  std::copy(bytes->begin(), bytes->end(), shifted.begin() + 1);
  WEIGHTD_EXPECT_OK(decode_manifest(std::span(shifted).subspan(1), "f"));
}

TEST(Manifest, ResidencyFollowsTheRules) {
  const Residency fast = plan_residency(sound_manifest());
  ASSERT_EQ(fast.placements.size(), 5U);
  // 3 units, 1 tile, 1 group: codes 4608, windows 48, records 96; then the raw tensor of 6 bytes; the stale one is left out.
  const std::vector<std::tuple<uint32_t, PlaneKind, uint64_t, uint64_t>> expected = {{0, PlaneKind::kCodes, 0, 4608},
                                                                                     {0, PlaneKind::kWindows, 4608, 48},
                                                                                     {0, PlaneKind::kRecords, 4864, 96},
                                                                                     {1, PlaneKind::kRaw, 5120, 6},
                                                                                     {0, PlaneKind::kPool, 5376, 32}};
  for (size_t i = 0; i < expected.size(); ++i) {
    const Placement& p = fast.placements[i];
    EXPECT_EQ(std::make_tuple(p.storage, p.kind, p.arena_offset_bytes, p.size_bytes), expected[i]) << i;
  }
  EXPECT_EQ(fast.pool_offset_bytes, 5376U);
  EXPECT_EQ(fast.pool_bytes, 32U);
  EXPECT_EQ(fast.arena_bytes, uint64_t{1} << 20);
}

TEST(Manifest, NothingResidentMakesAnEmptyArena) {
  Manifest m;
  const Residency fast = plan_residency(m);
  EXPECT_EQ(fast.arena_bytes, 0U);
  m.residencies = {fast};
  m.tensors_id = compute_tensors_id({});
  WEIGHTD_EXPECT_OK(validate_manifest(m, kHeaderBytes, "f"));
}

// --- what is refused ------------------------------------------------------------------------------------------------------------

struct BadManifest {
  const char* rule;  // in the message
  std::function<void(Manifest&)> damage;
};

// Things that depend on the damaged part are made right again, so that the rule itself is reached.
const std::vector<BadManifest>& bad_manifests() {
  static const std::vector<BadManifest> kBad = {
      {"sections[3]: offset", [](Manifest& m) { m.sections[3].offset_bytes += 4096; }},
      {"sections[3]: offset", [](Manifest& m) { m.sections[3].offset_bytes += 1; }},
      {"reach past the manifest", [](Manifest& m) { m.sections[7].size_bytes = 5000; }},
      {"reach past the manifest", [](Manifest& m) { m.sections[2].size_bytes = UINT64_MAX - 100; }},
      {"sections end at", [](Manifest& m) { m.sections.pop_back(); }},
      {"toolVersion is not UTF-8", [](Manifest& m) { m.tool_version = "\xff"; }},
      {"leftOutFiles", [](Manifest& m) { m.left_out_files[0] = "\xff"; }},
      {"sources[0] '/etc/x': the name is not a safe relative path", [](Manifest& m) { m.sources[0].relative_name = "/etc/x"; }},
      {"not a safe relative path", [](Manifest& m) { m.sources[0].relative_name = "a/../b"; }},
      {"not a safe relative path", [](Manifest& m) { m.sources[0].relative_name = ""; }},
      {"occurs twice", [](Manifest& m) { m.sources[0].relative_name = "i.json"; }},
      {"is a file and a folder", [](Manifest& m) { m.sources[0].relative_name = "i.json/m"; }},
      {"header of 40 bytes in a file of 39", [](Manifest& m) { m.sources[0].file_bytes = 39; }},
      {"header of less than 8 bytes", [](Manifest& m) { m.sources[0].header_section = 6, m.storages[1].planes[0].section = 0; }},
      {"the index is not stored whole", [](Manifest& m) { m.sources[1].file_bytes = 26; }},
      {"the index is not the last", [](Manifest& m) { std::swap(m.sources[0], m.sources[1]); }},
      {"section 9 of 8", [](Manifest& m) { m.sources[0].header_section = 9; }},
      {"is used twice", [](Manifest& m) { m.sources[1].header_section = 0; }},
      {"is used twice", [](Manifest& m) { m.storages[1].planes[0].section = 2; }},
      {"raw storages are never merged", [](Manifest& m) { m.storages[1].merged = true; }},
      {"n, k and batch of a raw storage", [](Manifest& m) { m.storages[1].geometry.n = 1; }},
      {"escape counts of a raw storage", [](Manifest& m) { m.storages[1].escapes = 1; }},
      {"exactly one plane", [](Manifest& m) { m.storages[1].planes[0].kind = PlaneKind::kCodes; }},
      {"raw: expected 4 bytes, have 6", [](Manifest& m) { m.storages[1].logical_bytes = 4; }},
      {"f12 with dtype F16", [](Manifest& m) { m.storages[0].dtype = DType::kF16; }},
      {"f12 storages are resident", [](Manifest& m) { m.storages[0].resident = false; }},
      {"out of range", [](Manifest& m) { m.storages[0].geometry.n = 0; }},
      {"out of range", [](Manifest& m) { m.storages[0].geometry.k = uint64_t{1} << 32; }},
      {"more than 2^48 tiles", [](Manifest& m) { m.storages[0].geometry.batch = UINT64_MAX; }},
      {"a merged storage has batch 1", [](Manifest& m) { m.storages[0].geometry.batch = 2; }},
      {"logicalBytes: expected 6144", [](Manifest& m) { m.storages[0].logical_bytes = 6142; }},
      {"four planes", [](Manifest& m) { m.storages[0].planes.pop_back(); }},
      {"codes, windows, records, pool", [](Manifest& m) { std::swap(m.storages[0].planes[0], m.storages[0].planes[1]); }},
      {"windows: expected 48 bytes", [](Manifest& m) { m.sections[3].size_bytes = 47; }},
      {"not a multiple of 16", [](Manifest& m) { m.sections[5].size_bytes = 33; }},
      {"name is not UTF-8", [](Manifest& m) { m.storages[0].name = "\xc0\x80"; }},
      {"name is not UTF-8", [](Manifest& m) { m.tensors[2].name = std::string(kMaxNameBytes + 1, 'n'); }},
      {"source 1 is out of range", [](Manifest& m) { m.tensors[3].source = 1; }},
      {"source 7 is out of range", [](Manifest& m) { m.tensors[3].source = 7; }},
      {"storage 3 does not exist", [](Manifest& m) { m.tensors[3].storage = 3; }},
      {"its dtype differs", [](Manifest& m) { m.tensors[2].dtype = DType::kI16; }},
      {"the shape overflows",
       [](Manifest& m) {
         m.tensors[2].shape = {UINT64_MAX, 2};
       }},
      {"not a whole number of bytes", [](Manifest& m) { m.tensors[2].dtype = m.storages[1].dtype = DType::kF4; }},
      {"logicalBytes: expected 8 bytes, have 6", [](Manifest& m) { m.tensors[2].shape = {4}; }},
      {"logicalBytes: expected 6 bytes, have 4", [](Manifest& m) { m.tensors[2].shape = {2}, m.tensors[2].logical_bytes = 4; }},
      {"expected to begin at 6144", [](Manifest& m) { m.tensors[2].source_offset_bytes = 6145; }},
      {"tensors: expected 6158 bytes, have 6150", [](Manifest& m) { m.tensors.pop_back(), m.storages[2].resident = false; }},
      {"expected to begin at 6150 of a data area of 6150", [](Manifest& m) { m.sources[0].file_bytes -= 8; }},
      {"descends or leaves",
       [](Manifest& m) {
         m.tensors[3].shape = {0}, m.tensors[3].logical_bytes = 0, m.tensors[3].source_offset_bytes = 9999,
         m.storages[2].logical_bytes = 0, m.sections[7].size_bytes = 0;
       }},
      {"rowBegin in a storage that is not merged", [](Manifest& m) { m.tensors[2].row_begin = 16; }},
      {"indexed tensors only", [](Manifest& m) { m.tensors[0].indexed = false; }},
      {"does not fit a merged storage",
       [](Manifest& m) {
         m.tensors[0].shape = {64, 16};
       }},
      {"not whole units", [](Manifest& m) { m.tensors[1].row_begin = 17; }},
      {"not whole units", [](Manifest& m) { m.tensors[1].row_begin = UINT64_MAX - 15; }},
      {"do not cover its rows", [](Manifest& m) { m.tensors[1].row_begin = 0; }},
      {"no tensor is stored in it",
       [](Manifest& m) {
         m.storages.push_back(m.storages[1]), m.storages.back().planes[0].section = 8,
                                              m.sections.push_back({m.sections[7].offset_bytes + 4096, 6, {}, {}});
       }},
      {"belongs to nothing",
       [](Manifest& m) {
         m.sections.push_back({m.sections[7].offset_bytes + 4096, 0, {}, {}});
       }},
      {"resident must be true exactly", [](Manifest& m) { m.storages[1].resident = false; }},
      {"resident must be true exactly", [](Manifest& m) { m.storages[2].resident = true; }},
      {"not one of its tensors'", [](Manifest& m) { m.storages[1].name = "x"; }},
      {"the tensor name 'g' occurs twice", [](Manifest& m) { m.tensors[1].name = "g"; }},
      {"the tensor name 'r' occurs twice", [](Manifest& m) { m.storages[0].name = "r"; }},
      {"expected 5 placements, have 4", [](Manifest& m) { m.residencies[0].placements.pop_back(); }},
      {"placements[1]: expected windows", [](Manifest& m) { m.residencies[0].placements[1].arena_offset_bytes += 256; }},
      {"placements[1]: expected windows", [](Manifest& m) { m.residencies[0].placements[1].size_bytes += 1; }},
      {"poolOffsetBytes", [](Manifest& m) { m.residencies[0].pool_offset_bytes += 256; }},
      {"poolBytes", [](Manifest& m) { m.residencies[0].pool_bytes += 16; }},
      {"arenaBytes", [](Manifest& m) { m.residencies[0].arena_bytes += kBlockBytes; }},
      {"expected 1 block hashes, have 2", [](Manifest& m) { m.residencies[0].block_hashes.push_back(1); }},
      {"the form occurs twice", [](Manifest& m) { m.residencies.push_back(m.residencies[0]); }},
      {"outside the arena",
       [](Manifest& m) { m.residencies[0].form = "x", m.residencies[0].placements[4].size_bytes = kBlockBytes; }},
      {"outside the arena",
       [](Manifest& m) { m.residencies[0].form = "x", m.residencies[0].placements[0].arena_offset_bytes = 9; }},
      {"tensorsId does not match", [](Manifest& m) { m.tensors_id[0] ^= 1; }},
  };
  return kBad;
}

TEST(Manifest, EveryRuleIsChecked) {
  WEIGHTD_ASSERT_OK(validate_manifest(sound_manifest(), manifest_offset(sound_manifest()), "f"));
  for (size_t i = 0; i < bad_manifests().size(); ++i) {
    Manifest m = sound_manifest();
    const uint64_t sound_offset = manifest_offset(m);
    const size_t sound_sections = m.sections.size();
    bad_manifests()[i].damage(m);
    const bool moved = m.sections.size() > sound_sections || m.sections.back().size_bytes == 0;
    const uint64_t offset = moved ? manifest_offset(m) : sound_offset;
    const Status status = validate_manifest(m, offset, "file.wpk");
    EXPECT_EQ(status.code(), StatusCode::kCorruption) << i << ": " << bad_manifests()[i].rule;
    EXPECT_THAT(status.message(), HasSubstr(bad_manifests()[i].rule)) << i;
    EXPECT_THAT(status.message(), HasSubstr("file.wpk: manifest: ")) << i;
  }
}

TEST(Manifest, UnknownNumbersAreUnsupported) {
  const std::vector<std::pair<const char*, std::function<void(Manifest&)>>> changes = {
      {"encoding 2", [](Manifest& m) { m.storages[0].encoding = static_cast<Encoding>(2); }},
      {"dtype 22", [](Manifest& m) { m.storages[1].dtype = static_cast<DType>(22); }},
      {"dtype 999", [](Manifest& m) { m.tensors[1].dtype = static_cast<DType>(999); }},
      {"plane kind 5", [](Manifest& m) { m.storages[0].planes[1].kind = static_cast<PlaneKind>(5); }},
      {"plane kind 6", [](Manifest& m) { m.residencies[0].placements[0].kind = static_cast<PlaneKind>(6); }}};
  for (const auto& [what, change] : changes) {
    Manifest m = sound_manifest();
    change(m);
    const Status status = decode_manifest(*encode_manifest(m), "f").status();
    EXPECT_EQ(status.code(), StatusCode::kUnsupported) << what;
    EXPECT_THAT(status.message(), HasSubstr(what));
  }
}

TEST(Manifest, OtherResidencyFormsAreLeftAlone) {
  Manifest m = sound_manifest();
  Residency other = m.residencies[0];
  other.form = "dense";
  other.placements[0].arena_offset_bytes = 7;
  other.placements[0].size_bytes = 9;
  m.residencies.push_back(other);
  WEIGHTD_EXPECT_OK(validate_manifest(m, manifest_offset(m), "f"));
}

TEST(Manifest, BrokenMessagesAreCorrupt) {
  const std::vector<std::byte> sound = *encode_manifest(sound_manifest());
  const auto code = [](std::vector<std::byte> bytes) { return decode_manifest(bytes, "f").status().code(); };
  EXPECT_EQ(code({}), StatusCode::kCorruption);
  EXPECT_EQ(code({sound.begin(), sound.begin() + 8}), StatusCode::kCorruption);
  EXPECT_EQ(code({sound.begin(), sound.end() - 8}), StatusCode::kCorruption);
  std::vector<std::byte> bytes = sound;
  bytes[0] = std::byte{1};  // two segments
  EXPECT_EQ(code(bytes), StatusCode::kCorruption);
  // Any damage is an error or another manifest, never a crash; the pointers are where most of the bytes are.
  Words random(5);
  for (int i = 0; i < 20000; ++i) {
    bytes = sound;
    for (int j = 0; j < 3; ++j) bytes[8 + random.next() % (bytes.size() - 8)] = static_cast<std::byte>(random.next());
    if (const auto m = decode_manifest(bytes, "f"); m.ok()) (void)validate_manifest(*m, manifest_offset(sound_manifest()), "f");
  }
}

TEST(Manifest, SafeRelativeNames) {
  for (const char* name : {"a", "a/b", "model-00001-of-00002.safetensors", "...", "a b", "\xc3\xa4"})
    EXPECT_TRUE(is_safe_relative_name(name)) << name;
  for (const char* name : {"", "/", "/a", "a/", "a//b", ".", "..", "./a", "a/.", "a/../b", "../a", "\xff"})
    EXPECT_FALSE(is_safe_relative_name(name)) << name;
  EXPECT_FALSE(is_safe_relative_name(std::string_view("a\0b", 3)));
  EXPECT_TRUE(is_safe_relative_name(std::string(255, 'a')));
  EXPECT_FALSE(is_safe_relative_name(std::string(256, 'a')));
  std::string deep;
  for (int i = 0; i < 2048; ++i) deep += "a/";
  EXPECT_FALSE(is_safe_relative_name(deep + "a"));
}

TEST(Manifest, AMillionTensors) {
  constexpr uint64_t kCount = 1'000'000;
  Manifest m;
  m.sections.push_back({kHeaderBytes, 8, {}, {}});
  m.sources = {{"m", 8 + kCount, {}, 0, false}};
  for (uint64_t i = 0; i < kCount; ++i) {
    const std::string name = "model.layers." + std::to_string(i) + ".weight";
    m.sections.push_back({2 * kHeaderBytes + i * kSectionAlign, 1, {i, i}, {}});
    Storage storage;
    storage.name = name;
    storage.dtype = DType::kU8;
    storage.geometry = {0, 0, 0};
    storage.logical_bytes = 1;
    storage.planes = {{PlaneKind::kRaw, static_cast<uint32_t>(i + 1)}};
    m.storages.push_back(std::move(storage));
    m.tensors.push_back({name, DType::kU8, {1}, static_cast<uint32_t>(i), 0, 0, i, 1, {i, i}, true});
  }
  m.residencies = {plan_residency(m)};
  m.residencies[0].block_hashes.resize(m.residencies[0].arena_bytes / kBlockBytes);
  m.tensors_id = compute_tensors_id(m.tensors);
  const auto bytes = encode_manifest(m);
  WEIGHTD_ASSERT_OK(bytes);
  EXPECT_LT(bytes->size(), 600 * kCount);
  const auto back = decode_manifest(*bytes, "f");
  WEIGHTD_ASSERT_OK(back);
  WEIGHTD_ASSERT_OK(validate_manifest(*back, manifest_offset(m), "f"));
  EXPECT_EQ(back->tensors[kCount - 1].name, "model.layers.999999.weight");
}

}  // namespace
}  // namespace weightd::store
