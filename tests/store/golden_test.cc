// SPDX-License-Identifier: Apache-2.0
// The bundles of tests/golden, and the worked example of FORMAT.md. Run with WEIGHTD_UPDATE_GOLDEN=1 to write them anew, after a
// change of the format that is meant; the files of an older major version are never rewritten.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>

#include "store/manifest.h"
#include "tests/store/bundle_fixture.h"

namespace weightd::store {
namespace {

using ::testing::HasSubstr;
using namespace weightd::testing;  // NOLINT: the fixture's names

const std::string kGolden = std::string(WEIGHTD_SOURCE_DIR) + "/tests/golden";

bool updating() { return std::getenv("WEIGHTD_UPDATE_GOLDEN") != nullptr; }

// --- the checkpoints: integers only, so that every machine makes the same ones
// ----------------------------------------------------

// Exponents as a steep distribution has them; all inside one window of 16.
std::vector<uint16_t> steep(size_t count, uint64_t seed) {
  Words random(seed);
  std::vector<uint16_t> words(count);
  for (uint16_t& word : words) {
    const uint64_t r = random.next();
    const uint64_t exponent = 120 - static_cast<uint64_t>(std::countr_zero((r >> 16) | 1024));
    word = static_cast<uint16_t>((r & 0x807f) | exponent << 7);
  }
  return words;
}

void write_tiny(const std::string& folder) {
  std::vector<uint16_t> words(16 * 64, 0x3f80);
  words[3 * 64 + 10] = 0x0001;  // the escape: row 3, column 10
  SafetensorsBuilder file;
  file.add_bf16("w", {16, 64}, words).add("b", "F32", {2}, std::string("\x00\x00\x80\x3f\x00\x00\x00\x40", 8));
  file.write(folder + "/model.safetensors");
}

void write_empty(const std::string& folder) {
  write_file(folder + "/model.safetensors", st("{\"__metadata__\":{\"a\":\"b\"}}", ""));
}

// 56 x 1100: rows and columns of padding, three groups of which the last has two tiles; inline, listed and dense.
std::vector<uint16_t> patched() {
  constexpr size_t kColumns = 1100;
  std::vector<uint16_t> words = steep(56 * kColumns, 1);
  Words random(2);
  const auto escape = [&](size_t row, size_t column) {
    words[row * kColumns + column] = static_cast<uint16_t>(random.next() & 0x8fff);
  };
  for (size_t i = 0; i < 5; ++i) escape(i, 100 * i + 7);                                  // unit 0, groups 0: inline
  for (size_t i = 0; i < 100; ++i) escape(16 + random.next() % 16, random.next() % 512);  // unit 1, group 0: listed
  for (size_t i = 0; i < 300; ++i) escape(20 + i % 8, 1024 + i / 8);                      // unit 1, group 2: dense, partly padding
  for (size_t i = 0; i < 8; ++i) escape(48 + i, 1099);                                    // last unit and column: listed
  return words;
}

void write_mixed(const std::string& folder) {
  Words random(3);
  SafetensorsBuilder first, second;
  first.metadata({{"format", "pt"}}).padding(3);
  first.add_bf16("l.0.mlp.gate_proj.weight", {16, 512}, steep(16 * 512, 4));
  first.add("flag", "BOOL", {3}, std::string("\x01\x00\x01", 3));
  first.add_bf16("l.0.mlp.up_proj.weight", {32, 512}, steep(32 * 512, 5));
  first.add_bf16("patched", {56, 1100}, patched());
  first.add("scalar", "F64", {}, random.bytes(8));
  first.add("stale", "I8", {5}, "stale");
  second.add_bf16("experts", {2, 32, 512}, steep(2 * 32 * 512, 6));
  second.add_bf16("noise", {64, 64}, random.random(64 * 64));
  second.add_bf16("tied", {56, 1100}, patched());
  second.entry("none", "BF16", {0, 64}, second.data().size(), second.data().size());
  second.add("stale", "I8", {5}, "fresh");
  const std::string one = "model-00001-of-00002.safetensors", two = "sub/model-00002-of-00002.safetensors";
  write_sharded(folder, {{one, first}, {two, second}},
                {{"l.0.mlp.gate_proj.weight", one},
                 {"flag", one},
                 {"l.0.mlp.up_proj.weight", one},
                 {"patched", one},
                 {"scalar", one},
                 {"experts", two},
                 {"noise", two},
                 {"tied", two},
                 {"none", two},
                 {"stale", two}});
}

struct Golden {
  std::string name;
  std::function<void(const std::string&)> write;
};
std::vector<Golden> goldens() { return {{"tiny", write_tiny}, {"empty", write_empty}, {"mixed", write_mixed}}; }

PackOptions golden_options() {
  PackOptions options = pack_options();
  options.tool_version = "1.0.0";
  return options;
}

TEST(Golden, BundlesOfVersion1AreReadAndUnpacked) {
  for (const Golden& golden : goldens()) {
    const std::string input = kGolden + "/v1/" + golden.name, bundle = input + ".wpk";
    if (updating()) {
      std::filesystem::remove_all(input);
      golden.write(input);
      WEIGHTD_ASSERT_OK(pack(input, bundle, golden_options()));
    }
    WEIGHTD_EXPECT_OK(verify(bundle, input, true, 2, {}));
    const TempDir dir;
    WEIGHTD_ASSERT_OK(unpack(bundle, dir / "out", 2, {}));
    EXPECT_EQ(files_below(dir / "out"), files_below(input));
    for (const std::string& name : files_below(input))
      EXPECT_TRUE(read_file(dir / "out/" + name) == read_file(input + "/" + name)) << name;
  }
}

TEST(Golden, PackingStillGivesTheSameBytes) {
  for (const Golden& golden : goldens()) {
    const TempDir dir;
    WEIGHTD_ASSERT_OK(pack(kGolden + "/v1/" + golden.name, dir / "m.wpk", golden_options()));
    EXPECT_TRUE(read_file(dir / "m.wpk") == read_file(kGolden + "/v1/" + golden.name + ".wpk")) << golden.name;
  }
}

TEST(Golden, TheInputsAreWhatTheirGeneratorMakes) {
  for (const Golden& golden : goldens()) {
    const TempDir dir;
    golden.write(dir / "in");
    ASSERT_EQ(files_below(dir / "in"), files_below(kGolden + "/v1/" + golden.name));
    for (const std::string& name : files_below(dir / "in")) {
      EXPECT_TRUE(read_file(dir / "in/" + name) == read_file(kGolden + "/v1/" + golden.name + "/" + name)) << name;
    }
  }
}

TEST(Golden, MixedHasEveryKindOfContent) {
  const BundleReader bundle = open_bundle(kGolden + "/v1/mixed.wpk");
  const Storage& patched_storage = storage_of(bundle, "patched");
  EXPECT_EQ(patched_storage.encoding, Encoding::kF12);
  EXPECT_EQ(patched_storage.listed_groups, 2U);
  EXPECT_EQ(patched_storage.dense_groups, 1U);
  EXPECT_EQ(tensor_of(bundle, "tied").storage, tensor_of(bundle, "patched").storage);
  EXPECT_TRUE(storage_of(bundle, "l.0.mlp.up_proj.weight").merged);
  EXPECT_EQ(storage_of(bundle, "experts").geometry.batch, 2U);
  EXPECT_EQ(storage_of(bundle, "noise").encoding, Encoding::kRaw);
  EXPECT_EQ(decode(bundle, "stale"), "fresh");
  EXPECT_EQ(bundle.manifest().sources.size(), 3U);
}

// --- bad bundles
// --------------------------------------------------------------------------------------------------------------------

// A bundle in pieces, put together again without any check.
struct Pieces {
  Manifest manifest;
  std::vector<std::string> sections;
  uint16_t major = kFormatMajor;

  explicit Pieces(const std::string& path) {
    const BundleReader bundle = open_bundle(path);
    manifest = bundle.manifest();
    for (uint32_t s = 0; s < manifest.sections.size(); ++s) {
      sections.emplace_back(manifest.sections[s].size_bytes, '\0');
      require(bundle.read(s, 0, std::as_writable_bytes(std::span(sections[s].data(), sections[s].size()))).ok(), "read");
    }
  }

  std::string& plane(size_t storage, size_t plane_index) {
    return sections[manifest.storages[storage].planes[plane_index].section];
  }

  // Section hashes follow the bytes, so that what is wrong is found by the rule and not by a hash.
  void rehash() {
    for (size_t s = 0; s < sections.size(); ++s) {
      manifest.sections[s].xxh = xxh128(as_bytes(sections[s]));
      manifest.sections[s].sha = sha256(as_bytes(sections[s]));
    }
  }

  [[nodiscard]] std::string bytes() const {
    std::string file(kHeaderBytes, '\0');
    for (const std::string& section : sections) {
      file += section;
      file.resize(f12::align_up(file.size(), kSectionAlign));
    }
    const auto encoded = encode_manifest(manifest);
    require(encoded.ok(), encoded.status().to_string());
    BundleHeader header;
    header.major = major;
    header.manifest_offset_bytes = file.size();
    header.manifest_bytes = encoded->size();
    header.file_bytes = file.size() + encoded->size();
    header.manifest_sha = sha256(*encoded);
    file.append(reinterpret_cast<const char*>(encoded->data()), encoded->size());
    const auto head = encode_header(header);
    std::memcpy(file.data(), head.data(), head.size());
    return file;
  }
};

struct BadGolden {
  std::string name;  // of the error
  StatusCode code;
  std::string message;
  std::function<std::string()> make;
};

std::string tiny_bytes() { return read_file(kGolden + "/v1/tiny.wpk"); }

std::function<std::string()> with_bytes(const std::function<void(std::string&)>& damage) {
  return [damage] {
    std::string bytes = tiny_bytes();
    damage(bytes);
    return bytes;
  };
}

// Storages of tiny: 0 is w (codes, windows, records, pool), 1 is b.
std::function<std::string()> with_pieces(const std::function<void(Pieces&)>& damage, const char* bundle = "tiny") {
  return [damage, bundle] {
    Pieces pieces(kGolden + "/v1/" + bundle + ".wpk");
    damage(pieces);
    return pieces.bytes();
  };
}

std::function<std::string()> with_planes(const std::function<void(Pieces&)>& damage) {
  return with_pieces([damage](Pieces& p) {
    damage(p);
    p.rehash();
  });
}

std::vector<BadGolden> bad_goldens() {
  constexpr auto kCorrupt = StatusCode::kCorruption;
  constexpr auto kUnsupported = StatusCode::kUnsupported;
  return {
      {"magic", kCorrupt, "not a weightd bundle", with_bytes([](std::string& b) { b[0] = 'P'; })},
      {"truncated", kCorrupt, "the file is truncated", with_bytes([](std::string& b) { b.resize(b.size() - 8); })},
      {"truncated-header", kCorrupt, "expected 4096 bytes, have 4095", with_bytes([](std::string& b) { b.resize(4095); })},
      {"trailing-bytes", kCorrupt, "bytes after the end", with_bytes([](std::string& b) { b += "more"; })},
      {"header-hash", kCorrupt, "header: XXH3-128 is", with_bytes([](std::string& b) { b[0x100] = 1; })},
      {"newer-major", kUnsupported, "bundle format 2.0", with_pieces([](Pieces& p) { p.major = 2; })},
      {"manifest-hash", kCorrupt, "manifest: SHA-256 is", with_bytes([](std::string& b) { b.back() ^= 1; })},
      {"unknown-encoding", kUnsupported, "encoding 7",
       with_pieces([](Pieces& p) { p.manifest.storages[0].encoding = static_cast<Encoding>(7); })},
      {"unknown-dtype", kUnsupported, "dtype 99",
       with_pieces([](Pieces& p) { p.manifest.tensors[1].dtype = static_cast<DType>(99); })},
      {"unknown-plane", kUnsupported, "plane kind 9",
       with_pieces([](Pieces& p) { p.manifest.storages[1].planes[0].kind = static_cast<PlaneKind>(9); })},
      {"section-overlap", kCorrupt, "sections[2]: offset",
       with_pieces([](Pieces& p) { p.manifest.sections[2].offset_bytes = 8192; })},
      {"section-past-end", kCorrupt, "reach past the manifest",
       with_pieces([](Pieces& p) { p.manifest.sections[5].size_bytes = 1U << 20; })},
      {"traversal-name", kCorrupt, "not a safe relative path",
       with_pieces([](Pieces& p) { p.manifest.sources[0].relative_name = "../model.safetensors"; })},
      {"uncovered-source", kCorrupt, "tensors: expected", with_pieces([](Pieces& p) { p.manifest.sources[0].file_bytes += 1; })},
      {"placement", kCorrupt, "placements[0]",
       with_pieces([](Pieces& p) { p.manifest.residencies[0].placements[0].arena_offset_bytes = 256; })},
      {"duplicate-name", kCorrupt, "occurs twice", with_pieces([](Pieces& p) {
         p.manifest.tensors[1].name = p.manifest.storages[1].name = "w";
         p.manifest.tensors_id = compute_tensors_id(p.manifest.tensors);
       })},
      {"section-hash", kCorrupt, "(codes of 'w'): XXH3-128 is", with_pieces([](Pieces& p) { p.plane(0, 0)[100] ^= 1; })},
      {"padding", kCorrupt, "the padding behind it is not zero", with_bytes([](std::string& b) { b[8191] = 1; })},
      {"tensor-hash", kCorrupt, "tensor 'w': XXH3-128 of the decoded bytes",
       with_planes([](Pieces& p) { p.plane(0, 0)[100] ^= 1; })},
      {"block-hash", kCorrupt, "block 0 of the resident form",
       with_pieces([](Pieces& p) { p.manifest.residencies[0].block_hashes[0] ^= 1; })},
      {"window-range", kCorrupt, "'w'", with_planes([](Pieces& p) { p.plane(0, 1)[0] = 121; })},
      {"escape-count", kCorrupt, "'w'", with_planes([](Pieces& p) { p.plane(0, 2)[7] = 0; })},
      {"escape-reserved", kCorrupt, "'w'", with_planes([](Pieces& p) { p.plane(0, 2)[11] = 1; })},
      {"list-outside-pool", kCorrupt, "'w'", with_planes([](Pieces& p) {
         std::string& records = p.plane(0, 2);
         records = std::string(8, '\x07') + std::string(24, '\0');  // seven entries in a list, and no pool
       })},
      {"dense-outside-pool", kCorrupt, "'w'", with_planes([](Pieces& p) {
         std::string& records = p.plane(0, 2);
         records = std::string(8, '\xff') + std::string("\xff\xff\xff\x7f", 4) + std::string(20, '\0');
       })},
  };
}

TEST(Golden, BadBundlesAreRefusedForTheirReason) {
  if (updating()) std::filesystem::remove_all(kGolden + "/bad");
  for (const BadGolden& bad : bad_goldens()) {
    const std::string path = kGolden + "/bad/" + bad.name + ".wpk";
    if (updating()) write_file(path, bad.make());
    const Status status = verify(path, "", true, 2, {}).status();
    EXPECT_EQ(status.code(), bad.code) << bad.name << ": " << status.to_string();
    EXPECT_THAT(status.message(), HasSubstr(bad.message)) << bad.name;
    EXPECT_TRUE(bad.make() == read_file(path)) << bad.name;
  }
  EXPECT_EQ(files_below(kGolden + "/bad").size(), bad_goldens().size());
}

// --- FORMAT.md
// ------------------------------------------------------------------------------------------------------------------------

std::string hex_dump(const std::string& bytes) {
  std::string out, line_before;
  bool starred = false;
  for (size_t at = 0; at < bytes.size(); at += 16) {
    const std::string row = bytes.substr(at, 16);
    if (row == line_before && at + 16 < bytes.size()) {
      if (!starred) out += "*\n";
      starred = true;
      continue;
    }
    starred = false;
    line_before = row;
    char text[80];
    std::snprintf(text, sizeof text, "%06zx ", at);
    out += text;
    std::string printed;
    for (size_t i = 0; i < 16; ++i) {
      if (i == 8) out += ' ';
      if (i < row.size()) {
        std::snprintf(text, sizeof text, " %02x", static_cast<unsigned char>(row[i]));
        out += text;
        printed += row[i] >= 0x20 && row[i] < 0x7f ? row[i] : '.';
      } else {
        out += "   ";
      }
    }
    out += "  " + printed + "\n";
  }
  return out;
}

// The text between "```kind\n" and "\n```".
std::string fenced(const std::string& page, const std::string& kind) {
  const size_t begin = page.find("```" + kind + "\n");
  require(begin != std::string::npos, "no block " + kind);
  const size_t text = begin + kind.size() + 4;
  return page.substr(text, page.find("\n```", text) + 1 - text);
}

TEST(Format, TheWorkedExampleIsTheRealFile) {
  const std::string path = std::string(WEIGHTD_SOURCE_DIR) + "/store/FORMAT.md";
  std::string page = read_file(path);
  const std::string dump = hex_dump(tiny_bytes());
  if (updating()) {
    const std::string old = "```hexdump\n" + fenced(page, "hexdump");
    page.replace(page.find(old), old.size(), "```hexdump\n" + dump);
    write_file(path, page);
  }
  EXPECT_EQ(fenced(page, "hexdump"), dump);
}

TEST(Format, TheSchemaIsTheRealOne) {
  const std::string page = read_file(std::string(WEIGHTD_SOURCE_DIR) + "/store/FORMAT.md");
  EXPECT_EQ(fenced(page, "capnp"), read_file(std::string(WEIGHTD_SOURCE_DIR) + "/store/manifest.capnp"));
}

}  // namespace
}  // namespace weightd::store
