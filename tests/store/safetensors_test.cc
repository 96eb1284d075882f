// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

#include "store/checkpoint.h"
#include "tests/support/safetensors_builder.h"

namespace weightd::store {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::SafetensorsBuilder;
using testing::TempDir;

/// What the header parser says about J and a data area of `data_bytes`.
Status parse_status(std::string json, uint64_t data_bytes) {
  return parse_safetensors_header(std::move(json), data_bytes, "f").status();
}

SafetensorsHeader parsed(std::string json, uint64_t data_bytes) {
  Result<SafetensorsHeader> header = parse_safetensors_header(std::move(json), data_bytes, "f");
  EXPECT_TRUE(header.ok()) << header.status().to_string();
  return header.ok() ? *std::move(header) : SafetensorsHeader();
}

/// What the file reader says about a file with these bytes.
Result<SafetensorsHeader> read_bytes(std::string_view bytes) {
  const TempDir dir;
  const std::string path = dir / "f";
  testing::write_file(path, bytes);
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  return read_safetensors_header(fd.get(), bytes.size(), "f");
}

/// One line, with this code, this text in it, and the file's name in front.
void expect_refused(const Status& status, StatusCode code, const std::string& text) {
  EXPECT_EQ(status.code(), code) << status.to_string();
  EXPECT_THAT(status.message(), AllOf(HasSubstr(text), Not(HasSubstr("\n")))) << status.to_string();
  EXPECT_THAT(status.message(), ::testing::StartsWith("f: "));
}

std::string one(std::string_view dtype_json, std::string_view shape_json, std::string_view offsets_json) {
  return "{\"w\":{\"dtype\":" + std::string(dtype_json) + ",\"shape\":" + std::string(shape_json) +
         ",\"data_offsets\":" + std::string(offsets_json) + "}}";
}

// --- what is accepted ---------------------------------------------------------------------------------------------------------

TEST(Safetensors, ReadsEveryDtype) {
  const std::vector<std::pair<std::string, uint32_t>> dtypes = {
      {"BOOL", 8},    {"F4", 4},      {"F6_E2M3", 6},     {"F6_E3M2", 6},     {"U8", 8},   {"I8", 8},
      {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8},     {"I16", 16},        {"U16", 16}, {"F16", 16},
      {"BF16", 16},   {"I32", 32},    {"U32", 32},        {"F32", 32},        {"C64", 64}, {"F64", 64},
      {"I64", 64},    {"U64", 64},    {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8},
  };
  for (const auto& [name, bits] : dtypes) {
    SafetensorsBuilder file;
    file.add("w", name, {2, 4}, std::string(bits, 'x'));
    const SafetensorsHeader header = parsed(file.json(), bits);
    ASSERT_EQ(header.entries.size(), 1U) << name;
    EXPECT_EQ(dtype_name(header.entries[0].dtype), name);
    EXPECT_EQ(header.entries[0].shape, (Shape{2, 4}));
    EXPECT_EQ(header.entries[0].size_bytes, bits);
  }
}

TEST(Safetensors, ReadsAScalarAndKeepsTheHeaderVerbatim) {
  SafetensorsBuilder file;
  file.metadata({{"format", "pt"}, {"odd \"key\"", ""}}).add("s", "F32", {}, "abcd").padding(5);
  const Result<SafetensorsHeader> header = read_bytes(file.bytes());
  ASSERT_TRUE(header.ok()) << header.status().to_string();
  EXPECT_EQ(header->json, file.json());
  EXPECT_EQ(header->header_bytes, file.json().size());
  EXPECT_EQ(header->data_bytes, 4U);
  ASSERT_EQ(header->entries.size(), 1U);
  EXPECT_TRUE(header->entries[0].shape.empty());
  EXPECT_EQ(header->entries[0].size_bytes, 4U);
}

TEST(Safetensors, KeysOfAnEntryComeInAnyOrder) {
  const SafetensorsHeader header = parsed(R"({"w":{"data_offsets":[0,4],"shape":[1,2],"dtype":"BF16"}})", 4);
  ASSERT_EQ(header.entries.size(), 1U);
  EXPECT_EQ(header.entries[0].dtype, DType::kBF16);
  EXPECT_EQ(header.entries[0].shape, (Shape{1, 2}));
}

TEST(Safetensors, LimitsAreInclusive) {
  SafetensorsBuilder file;
  file.add(std::string(kMaxNameBytes, 'n'), "U8", Shape(kMaxRank, 1), "x");
  EXPECT_EQ(parsed(file.json(), 1).entries.size(), 1U);

  SafetensorsBuilder long_name;
  long_name.add(std::string(kMaxNameBytes + 1, 'n'), "U8", {1}, "x");
  expect_refused(parse_status(long_name.json(), 1), StatusCode::kUnsupported, "limit of 65535");
  EXPECT_LT(parse_status(long_name.json(), 1).message().size(), 500U);

  SafetensorsBuilder deep;
  deep.add("w", "U8", Shape(kMaxRank + 1, 1), "x");
  expect_refused(parse_status(deep.json(), 1), StatusCode::kUnsupported, "more than 32 dimensions");
}

// --- lengths ------------------------------------------------------------------------------------------------------------------

TEST(Safetensors, CO_001_HeaderLengthFieldIsCheckedBySubtraction) {
  expect_refused(read_bytes("").status(), StatusCode::kCorruption, "the file is empty");
  expect_refused(read_bytes(std::string(7, '\x01')).status(), StatusCode::kCorruption, "has 7 bytes");
  expect_refused(read_bytes(testing::little_endian_u64(8)).status(), StatusCode::kCorruption, "says 8, the file has 8 bytes");
  for (const uint64_t length : {UINT64_MAX, UINT64_MAX - 4, uint64_t{1} << 63, uint64_t{3}}) {
    expect_refused(read_bytes(testing::little_endian_u64(length) + "{}").status(), StatusCode::kCorruption,
                   "says " + std::to_string(length) + ", the file has 10 bytes");
  }
  EXPECT_TRUE(read_bytes(testing::little_endian_u64(2) + "{}").ok());
}

TEST(Safetensors, HeaderOverTheCapIsRefusedUnread) {
  // A sparse file: the header's bytes are claimed and there, but never written.
  const TempDir dir;
  const std::string path = dir / "f";
  testing::write_file(path, testing::little_endian_u64(kMaxHeaderBytes + 1) + "{");
  std::filesystem::resize_file(path, 8 + kMaxHeaderBytes + 1);
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  expect_refused(read_safetensors_header(fd.get(), 8 + kMaxHeaderBytes + 1, "f").status(), StatusCode::kUnsupported,
                 "limit of 100000000");
  expect_refused(parse_status("{" + std::string(kMaxHeaderBytes, ' '), 0), StatusCode::kUnsupported, "limit of 100000000");
}

TEST(Safetensors, HeaderOfExactlyTheCapIsRead) {
  const std::string json = "{}" + std::string(kMaxHeaderBytes - 2, ' ');
  EXPECT_TRUE(parse_status(json, 0).ok());
}

TEST(Safetensors, HeaderMustBeginWithABrace) {
  expect_refused(read_bytes(testing::st(" {}", "")).status(), StatusCode::kCorruption, "does not begin with '{'");
  expect_refused(read_bytes(testing::st("[]", "")).status(), StatusCode::kCorruption, "does not begin with '{'");
  expect_refused(read_bytes(testing::st("", "")).status(), StatusCode::kCorruption, "does not begin with '{'");
  expect_refused(read_bytes(testing::st("", "{}")).status(), StatusCode::kCorruption, "does not begin with '{'");
  expect_refused(parse_status("", 0), StatusCode::kCorruption, "does not begin with '{'");
  expect_refused(parse_status("\xEF\xBB\xBF{}", 0), StatusCode::kCorruption, "does not begin with '{'");
}

// --- names --------------------------------------------------------------------------------------------------------------------

TEST(Safetensors, CO_002_RepeatedKeysAreRefusedAndNamed) {
  const std::string first = R"("a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]})";
  const std::string second = R"({"dtype":"BF16","shape":[2],"data_offsets":[4,8]})";
  expect_refused(parse_status("{" + first + ",\"a\":" + second + "}", 8), StatusCode::kCorruption, "tensor 'a' occurs twice");
  expect_refused(parse_status("{" + first + ",\"\\u0061\":" + second + "}", 8), StatusCode::kCorruption, "tensor 'a' occurs twice");
  // Not even when the entries are equal, which would pass as an overlap otherwise.
  expect_refused(parse_status("{" + first + "," + first + "}", 4), StatusCode::kCorruption, "tensor 'a' occurs twice");
  expect_refused(parse_status(R"({"a":{"dtype":"BF16","dtype":"BF16","shape":[2],"data_offsets":[0,4]}})", 4),
                 StatusCode::kCorruption, "tensor 'a': the key 'dtype' occurs twice");
  expect_refused(parse_status(R"({"a":{"dtype":"BF16","shape":[2],"shap\u0065":[2],"data_offsets":[0,4]}})", 4),
                 StatusCode::kCorruption, "tensor 'a': the key 'shape' occurs twice");
  expect_refused(parse_status(R"({"a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4],"data_offsets":[0,4]}})", 4),
                 StatusCode::kCorruption, "tensor 'a': the key 'data_offsets' occurs twice");
  expect_refused(parse_status(R"({"__metadata__":{},"__metadata__":{}})", 0), StatusCode::kCorruption, "__metadata__ occurs twice");
}

TEST(Safetensors, CO_006_NamesThatDifferBehindANulStayDifferent) {
  SafetensorsBuilder file;
  file.add("a", "BF16", {2}, "1111")
      .add(std::string_view("a\0b", 3), "BF16", {2}, "2222")
      .add(std::string_view("a\0c", 3), "BF16", {2}, "3333");
  const SafetensorsHeader header = parsed(file.json(), 12);
  ASSERT_EQ(header.entries.size(), 3U);
  EXPECT_EQ(header.entries[1].name, std::string_view("a\0b", 3));
  EXPECT_EQ(header.entries[2].name, std::string_view("a\0c", 3));
}

TEST(Safetensors, CO_009_TheReservedNameAndTextBehindTheHeader) {
  expect_refused(parse_status(R"({"__metadata__":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}})", 4), StatusCode::kCorruption,
                 "no tensor may have the name __metadata__");
  expect_refused(parse_status(R"({"\u005f_metadata__":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}})", 4),
                 StatusCode::kCorruption, "no tensor may have the name __metadata__");
  expect_refused(parse_status(R"({},"__metadata__":{"a":"b"})", 0), StatusCode::kCorruption, "text after the closing bracket");
  expect_refused(parse_status("{}" + std::string(1, '\0') + "{}", 0), StatusCode::kCorruption, "NUL");
  expect_refused(parse_status("{}}", 0), StatusCode::kCorruption, "text after the closing bracket");
  for (const char* value :
       {"1", "null", "\"text\"", "[]", "[\"a\"]", "{\"a\":1}", "{\"a\":null}", "{\"a\":{}}", "{\"a\":[\"b\"]}"}) {
    expect_refused(parse_status("{\"__metadata__\":" + std::string(value) + "}", 0), StatusCode::kCorruption, "__metadata__");
  }
  // Metadata without tensors is legal, and kept.
  const Result<SafetensorsHeader> only = read_bytes(testing::st(R"({"__metadata__":{"a":"b"}})", ""));
  ASSERT_TRUE(only.ok()) << only.status().to_string();
  EXPECT_TRUE(only->entries.empty());
  EXPECT_EQ(only->json, R"({"__metadata__":{"a":"b"}})");
}

TEST(Safetensors, CO_010_MessagesShowOddNamesOnOneLine) {
  SafetensorsBuilder file;
  file.entry("a\nERROR fake \x1b[2J", "BF16", {2}, 0, 3).raw_data("xyz");
  expect_refused(parse_status(file.json(), 3), StatusCode::kCorruption, "tensor 'a\\nERROR fake \\x1b[2J'");
  for (const char* name : {"../../etc/x", "/abs", "", "\"quoted\"", "weights,with,commas", "back\\slash"}) {
    SafetensorsBuilder fine;
    fine.add(name, "U8", {1}, "x");
    const SafetensorsHeader header = parsed(fine.json(), 1);
    ASSERT_EQ(header.entries.size(), 1U);
    EXPECT_EQ(header.entries[0].name, name);
  }
}

TEST(Safetensors, CO_018_NamesAreDecodedUtf8WithoutNormalisation) {
  const std::string entry = R"(:{"dtype":"U8","shape":[1],"data_offsets":)";
  const auto at = [&](int i) { return entry + "[" + std::to_string(i) + "," + std::to_string(i + 1) + "]}"; };
  const std::string json =
      "{"
      R"("\u00e9")" +
      at(0) + ",\"e\xCC\x81\"" + at(1) + ",\"\u0441\u043b\u043e\u0439.0\"" + at(2) + ",\"\u91cd\u307f\"" + at(3) +
      R"(,"\ud83d\ude00")" + at(4) + R"(,"a\/b")" + at(5) + "}";
  const SafetensorsHeader header = parsed(json, 6);
  const std::vector<std::string> expected = {"\xC3\xA9",     "e\xCC\x81",        "\u0441\u043b\u043e\u0439.0",
                                             "\u91cd\u307f", "\xF0\x9F\x98\x80", "a/b"};
  ASSERT_EQ(header.entries.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(header.entries[i].name, expected[i]);
  expect_refused(parse_status("{\"a/b\"" + at(0) + R"(,"a\/b")" + at(1) + "}", 2), StatusCode::kCorruption,
                 "tensor 'a/b' occurs twice");
  expect_refused(parse_status(R"({"\ud83d")" + at(0) + "}", 1), StatusCode::kCorruption, "not valid JSON");
  expect_refused(parse_status("{\"\xC3\"" + at(0) + "}", 1), StatusCode::kCorruption, "not valid JSON");
}

TEST(Safetensors, CO_019_NoTensorsAtAll) {
  const Result<SafetensorsHeader> header = read_bytes(std::string("\x02\0\0\0\0\0\0\0{}", 10));
  ASSERT_TRUE(header.ok()) << header.status().to_string();
  EXPECT_TRUE(header->entries.empty());
  EXPECT_EQ(header->header_bytes, 2U);
  EXPECT_EQ(header->data_bytes, 0U);
  expect_refused(parse_status("{}", 3), StatusCode::kCorruption, "3 trailing bytes");
}

// --- structure ----------------------------------------------------------------------------------------------------------------

TEST(Safetensors, EntriesAreCompleteAndKnowNoOtherKeys) {
  const std::vector<std::pair<const char*, const char*>> cases = {
      {R"({"w":{"shape":[2],"data_offsets":[0,4]}})", "tensor 'w': dtype is missing"},
      {R"({"w":{"dtype":"BF16","data_offsets":[0,4]}})", "tensor 'w': shape is missing"},
      {R"({"w":{"dtype":"BF16","shape":[2]}})", "tensor 'w': data_offsets is missing"},
      {R"({"w":{}})", "tensor 'w': dtype is missing"},
      {R"({"w":{"dtype":"BF16","shape":[2],"data_offsets":[0,4],"stride":[1]}})", "tensor 'w': unknown key 'stride'"},
      {R"({"w":{"dtype":"BF16","shape":[2],"data_offsets":[0,4],"":{}}})", "tensor 'w': unknown key ''"},
      {R"({"w":[]})", "tensor 'w': the entry must be an object"},
      {R"({"w":"BF16"})", "tensor 'w': the entry must be an object"},
      {R"({"w":null})", "tensor 'w': the entry must be an object, have null"},
      {R"({"w":{"dtype":["BF16"],"shape":[2],"data_offsets":[0,4]}})", "tensor 'w': dtype must be a string"},
      {R"({"w":{"dtype":"BF16","shape":2,"data_offsets":[0,4]}})", "tensor 'w': shape must be an array of integers, have 2"},
      {R"({"w":{"dtype":"BF16","shape":{},"data_offsets":[0,4]}})", "tensor 'w': shape must be an array"},
      {R"({"w":{"dtype":"BF16","shape":[{}],"data_offsets":[0,4]}})", "tensor 'w': shape[0] must be a plain integer"},
      {R"({"w":{"dtype":"BF16","shape":[2],"data_offsets":4}})", "tensor 'w': data_offsets must be an array"},
      {R"({"w":{"dtype":"BF16","shape":[2],"data_offsets":[]}})", "tensor 'w': data_offsets has 0 values instead of 2"},
      {R"({"w":{"dtype":"BF16","shape":[2],"data_offsets":[4]}})", "tensor 'w': data_offsets has 1 value instead of 2"},
      {R"({"w":{"dtype":"BF16","shape":[2],"data_offsets":[0,4,8]}})", "tensor 'w': data_offsets has more than 2 values"},
      {R"({"w":{"dtype":"BF16","shape":[2],"data_offsets":[4,0]}})", "tensor 'w': data_offsets [4, 0] end before they begin"},
      {R"({"w":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]})", "not valid JSON"},
      {R"({"w")", "not valid JSON"},
      {"{", "not valid JSON"},
  };
  for (const auto& [json, rule] : cases) expect_refused(parse_status(json, 4), StatusCode::kCorruption, rule);
}

TEST(Safetensors, DeepNestingIsRefusedAtOnce) {
  expect_refused(parse_status("{\"w\":" + std::string(1'000'000, '[') + "}", 4), StatusCode::kCorruption,
                 "tensor 'w': the entry must be");
  std::string objects;
  for (int i = 0; i < 100'000; ++i) objects += "{\"a\":";
  expect_refused(parse_status(objects, 4), StatusCode::kCorruption, "tensor 'a'");
}

TEST(Safetensors, CO_005_NumbersMustBePlainIntegers) {
  for (const char* token :
       {"2.0", "2e0", "-2", "-0", "1e300", "1e999", "\"2\"", "true", "null", "[2]", "18446744073709551616", "{}"}) {
    const bool shown = token[0] != '"' && token[0] != '[' && token[0] != '{';
    const std::string have = shown ? std::string(", have ") + token : ", have";
    const std::string rule = "must be a plain integer from 0 to 2^64 - 1" + have;
    expect_refused(parse_status(one("\"BF16\"", "[" + std::string(token) + "]", "[0,4]"), 4), StatusCode::kCorruption,
                   "tensor 'w': shape[0] " + rule);
    expect_refused(parse_status(one("\"BF16\"", "[2]", "[" + std::string(token) + ",4]"), 4), StatusCode::kCorruption,
                   "tensor 'w': data_offsets[0] " + rule);
    expect_refused(parse_status(one("\"BF16\"", "[2]", "[0," + std::string(token) + "]"), 4), StatusCode::kCorruption,
                   "tensor 'w': data_offsets[1] " + rule);
  }
  // A number that double would round is printed as it is.
  for (const std::string& json : {one("\"BF16\"", "[9007199254740993]", "[0,4]"), one("\"BF16\"", "[2]", "[9007199254740993,4]"),
                                  one("\"BF16\"", "[2]", "[0,9007199254740993]")}) {
    expect_refused(parse_status(json, 4), StatusCode::kCorruption, "9007199254740993");
  }
}

TEST(Safetensors, CO_004_ShapeAndOffsetsMustAgree) {
  expect_refused(parse_status(one("\"F32\"", "[32,8]", "[0,65536]"), 65536), StatusCode::kCorruption,
                 "needs 1024 bytes, data_offsets [0, 65536] give 65536");
  expect_refused(parse_status(one("\"F32\"", "[1000,1000]", "[0,4]"), 4), StatusCode::kCorruption,
                 "needs 4000000 bytes, data_offsets [0, 4] give 4");
  expect_refused(parse_status(one("\"F64\"", "[4]", "[0,16]"), 16), StatusCode::kCorruption, "needs 32 bytes");
  expect_refused(parse_status(one("\"BF16\"", "[3]", "[0,7]"), 7), StatusCode::kCorruption, "needs 6 bytes");
  expect_refused(parse_status(one("\"BF16\"", "[]", "[0,0]"), 0), StatusCode::kCorruption, "needs 2 bytes");
  expect_refused(parse_status(one("\"BF16\"", "[0]", "[0,2]"), 2), StatusCode::kCorruption, "needs 0 bytes");
  expect_refused(parse_status(one("\"U8\"", "[1]", "[0,2]"), 2), StatusCode::kCorruption, "needs 1 byte,");
}

TEST(Safetensors, ProductsThatOverflowAreRefused) {
  const std::vector<const char*> shapes = {
      "[4294967296,4294967296]",    // elements wrap to 0
      "[18446744073709551615]",     // bits wrap
      "[2305843009213693952]",      // 2^61 elements of 16 bits
      "[1152921504606846976]",      // 2^60 elements of 16 bits wrap to 0 bits exactly
      "[0,4294967296,4294967296]",  // the zero hides nothing
      "[4294967296,4294967296,0]", "[9223372036854775808,2,4294967296]",
  };
  for (const char* shape : shapes) {
    expect_refused(parse_status(one("\"BF16\"", shape, "[0,0]"), 0), StatusCode::kCorruption, "has more than 2^64 - 1 bits");
  }
}

TEST(Safetensors, CO_030_UnknownDtypesAreRefusedAndNamed) {
  for (const char* dtype : {"F8_E9M9", "bf16", "BFLOAT16", "", "BF16 "}) {
    expect_refused(parse_status(one("\"" + std::string(dtype) + "\"", "[2]", "[0,4]"), 4), StatusCode::kUnsupported,
                   "tensor 'w': unknown dtype '" + std::string(dtype) + "'");
  }
  expect_refused(parse_status(one("42", "[2]", "[0,4]"), 4), StatusCode::kCorruption,
                 "tensor 'w': dtype must be a string, have 42");
}

TEST(Safetensors, CO_031_F32StaysF32) {
  const SafetensorsHeader header =
      parsed(R"({"gate.e_score_correction_bias":{"dtype":"F32","shape":[256],"data_offsets":[0,1024]}})", 1024);
  ASSERT_EQ(header.entries.size(), 1U);
  EXPECT_EQ(header.entries[0].dtype, DType::kF32);
}

TEST(Safetensors, CO_033_SubByteTypesMustFillWholeBytes) {
  EXPECT_TRUE(parse_status(one("\"F4\"", "[4,6]", "[0,12]"), 12).ok());
  EXPECT_TRUE(parse_status(one("\"F6_E2M3\"", "[4]", "[0,3]"), 3).ok());
  expect_refused(parse_status(one("\"F4\"", "[3,3]", "[0,4]"), 4), StatusCode::kCorruption, "36 bits: not whole bytes");
  expect_refused(parse_status(one("\"F4\"", "[3,3]", "[0,5]"), 5), StatusCode::kCorruption, "36 bits: not whole bytes");
  expect_refused(parse_status(one("\"F6_E3M2\"", "[3]", "[0,3]"), 3), StatusCode::kCorruption, "18 bits: not whole bytes");
  EXPECT_TRUE(parse_status(one("\"F4\"", "[3,0]", "[0,0]"), 0).ok());
}

// --- coverage -----------------------------------------------------------------------------------------------------------------

uint64_t peak_rss_bytes() {
  struct rusage usage {};
  EXPECT_EQ(::getrusage(RUSAGE_SELF, &usage), 0);
  return static_cast<uint64_t>(usage.ru_maxrss) * 1024;
}

TEST(Safetensors, CO_003_ManyTensorsClaimTheSameBytes) {
  SafetensorsBuilder file;
  for (int i = 0; i < 100'000; ++i) file.entry("t" + std::to_string(i), "BF16", {200, 200}, 0, 80000);
  const std::string json = file.json();
  const uint64_t before = peak_rss_bytes();
  expect_refused(parse_status(json, 80000), StatusCode::kCorruption, "shared storage is not allowed in this format");
  EXPECT_LT(peak_rss_bytes() - before, uint64_t{300} << 20);
  SafetensorsBuilder two;
  two.entry("a", "U8", {4}, 0, 4).entry("b", "U8", {4}, 3, 7);
  expect_refused(parse_status(two.json(), 7), StatusCode::kCorruption,
                 "tensor 'b' begins at offset 3, inside tensor 'a' (0 to 4): shared storage is not allowed in this format");
}

TEST(Safetensors, CO_028_TwoNamesForTheSameBytes) {
  SafetensorsBuilder same;
  same.entry("a", "BF16", {2}, 0, 4).entry("b", "BF16", {2}, 0, 4);
  expect_refused(parse_status(same.json(), 4), StatusCode::kCorruption, "shared storage is not allowed in this format");
  SafetensorsBuilder view;
  view.entry("a", "BF16", {4}, 0, 8).entry("b", "BF16", {2}, 4, 8);
  expect_refused(parse_status(view.json(), 8), StatusCode::kCorruption, "shared storage is not allowed in this format");
}

TEST(Safetensors, CO_011_ZeroSizedTensorsAtAnyBoundary) {
  SafetensorsBuilder file;
  file.entry("scaled_fp8", "F8_E4M3", {0}, 0, 0).entry("e1", "BF16", {2, 0}, 0, 0).entry("w", "BF16", {2}, 0, 4);
  file.entry("e2", "BF16", {0, 5}, 4, 4).entry("e3", "F32", {0, 0, 0}, 4, 4);
  const SafetensorsHeader header = parsed(file.json(), 4);
  ASSERT_EQ(header.entries.size(), 5U);
  EXPECT_EQ(header.entries[0].name, "scaled_fp8");
  EXPECT_EQ(header.entries[1].shape, (Shape{2, 0}));
  EXPECT_EQ(header.entries[3].offset_bytes, 4U);
  EXPECT_EQ(header.entries[4].shape, (Shape{0, 0, 0}));
  for (const size_t i : {0U, 1U, 3U, 4U}) EXPECT_EQ(header.entries[i].size_bytes, 0U);

  SafetensorsBuilder inside;
  inside.entry("w", "BF16", {2}, 0, 4).entry("e", "BF16", {0}, 2, 2);
  expect_refused(parse_status(inside.json(), 4), StatusCode::kCorruption, "tensor 'e' begins at offset 2, inside tensor 'w'");
  SafetensorsBuilder outside;
  outside.entry("w", "BF16", {2}, 0, 4).entry("e", "BF16", {0}, 5, 5);
  expect_refused(parse_status(outside.json(), 4), StatusCode::kCorruption, "1 byte before tensor 'e' (4 to 5) belong to no tensor");
}

TEST(Safetensors, CO_012_AnyHeaderPaddingIsTheSameToTheReader) {
  for (size_t blanks = 0; blanks < 8; ++blanks) {
    SafetensorsBuilder file;
    file.add("w", "BF16", {64, 64}, std::string(8192, 'x')).padding(blanks);
    const Result<SafetensorsHeader> header = read_bytes(file.bytes());
    ASSERT_TRUE(header.ok()) << header.status().to_string();
    EXPECT_EQ(header->header_bytes, file.json().size());
    EXPECT_EQ(header->data_bytes, 8192U);
  }
}

TEST(Safetensors, CO_013_AnOddByteTensorInFront) {
  SafetensorsBuilder file;
  file.add("a", "U8", {3}, "abc")
      .add("w", "BF16", {64, 64}, std::string(8192, 'w'))
      .add("c", "BOOL", {1}, "\x01")
      .add("z", "F32", {2}, "zzzzzzzz");
  const SafetensorsHeader header = parsed(file.json(), 8204);
  ASSERT_EQ(header.entries.size(), 4U);
  EXPECT_EQ(header.entries[1].offset_bytes, 3U);
  EXPECT_EQ(header.entries[2].offset_bytes, 8195U);
  EXPECT_EQ(header.entries[3].offset_bytes, 8196U);
}

TEST(Safetensors, CO_014_HeaderOrderIsNotOffsetOrder) {
  SafetensorsBuilder file;
  file.entry("a", "BF16", {3}, 10, 16).entry("m", "BF16", {3}, 4, 10).entry("z", "BF16", {2}, 0, 4);
  file.entry("e1", "BF16", {0}, 4, 4).entry("e2", "BF16", {0}, 16, 16);
  const SafetensorsHeader header = parsed(file.json(), 16);
  ASSERT_EQ(header.entries.size(), 5U);
  EXPECT_EQ(header.entries[0].name, "a");
  EXPECT_EQ(header.entries[0].offset_bytes, 10U);
  EXPECT_EQ(header.entries[2].name, "z");
  EXPECT_EQ(header.entries[2].offset_bytes, 0U);
}

TEST(Safetensors, CO_015_TrailingAndMissingBytesAreToldApart) {
  SafetensorsBuilder file;
  file.add("w", "BF16", {4}, "12345678");
  const std::string bytes = file.bytes();
  const std::string size = std::to_string(bytes.size());
  expect_refused(read_bytes(bytes + std::string(1, '\0')).status(), StatusCode::kCorruption,
                 "1 trailing byte after the last tensor: the header accounts for " + size + " bytes, the file has " +
                     std::to_string(bytes.size() + 1));
  expect_refused(read_bytes(bytes + std::string(4096, '\0')).status(), StatusCode::kCorruption, "4096 trailing bytes");
  expect_refused(read_bytes(bytes.substr(0, bytes.size() - 1)).status(), StatusCode::kCorruption,
                 "missing 1 byte: the header accounts for " + size + " bytes, the file has " + std::to_string(bytes.size() - 1));
  expect_refused(read_bytes(bytes.substr(0, bytes.size() - 8)).status(), StatusCode::kCorruption, "missing 8 bytes");
  const TempDir dir;
  testing::write_file(dir / "f", bytes);
  std::filesystem::resize_file(dir / "f", bytes.size() + (uint64_t{1} << 30));
  const UniqueFd fd(::open((dir / "f").c_str(), O_RDONLY | O_CLOEXEC));
  expect_refused(read_safetensors_header(fd.get(), bytes.size() + (uint64_t{1} << 30), "f").status(), StatusCode::kCorruption,
                 "1073741824 trailing bytes");
}

TEST(Safetensors, GapsAreRefused) {
  SafetensorsBuilder front;
  front.entry("w", "U8", {4}, 2, 6);
  expect_refused(parse_status(front.json(), 6), StatusCode::kCorruption, "2 bytes before tensor 'w' (0 to 2) belong to no tensor");
  SafetensorsBuilder middle;
  middle.entry("a", "U8", {4}, 0, 4).entry("b", "U8", {4}, 5, 9);
  expect_refused(parse_status(middle.json(), 9), StatusCode::kCorruption, "1 byte before tensor 'b' (4 to 5) belong to no tensor");
  SafetensorsBuilder far;
  far.entry("w", "U8", {0}, UINT64_MAX, UINT64_MAX);
  expect_refused(parse_status(far.json(), 4), StatusCode::kCorruption, "belong to no tensor");
}

TEST(Safetensors, SizesAtTheEndOfTheNumberRange) {
  // The largest tensor that can be described: 2^61 - 1 bytes.
  expect_refused(parse_status(one("\"U8\"", "[2305843009213693951]", "[0,2305843009213693951]"), 4), StatusCode::kCorruption,
                 "missing 2305843009213693947 bytes");
  expect_refused(parse_status(one("\"U8\"", "[2]", "[18446744073709551614,18446744073709551616]"), 4), StatusCode::kCorruption,
                 "data_offsets[1] must be a plain integer");
}

// --- other kinds of files -----------------------------------------------------------------------------------------------------

TEST(Safetensors, CO_007_OtherKindsOfFilesAreRecognised) {
  const std::string lfs = "version https://git-lfs.github.com/spec/v1\noid sha256:" + std::string(64, 'a') + "\nsize 4976698672\n";
  const std::vector<std::pair<std::string, const char*>> files = {
      {lfs, "Git-LFS"},
      {"<!DOCTYPE html><html><body>Sign in</body></html>", "HTML"},
      {"\n  <HTML><head></head></HTML>", "HTML"},
      {"<?xml version=\"1.0\"?><Error><Code>AccessDenied</Code></Error>", "XML"},
      {"PK\x03\x04" + std::string(200, '\0'), "zip/pickle"},
      {"\x80\x02\x8a\nl\xfc\x9c" + std::string(200, 'x'), "zip/pickle"},
      {"{\"error\": \"Repository not found\"}", "JSON"},
      {"GGUF\x03" + std::string(100, '\0'), "GGUF"},
      {"Entry not found", "this is text ('Entry not found')"},
  };
  for (const auto& [bytes, hint] : files) {
    const Status status = read_bytes(bytes).status();
    expect_refused(status, StatusCode::kCorruption, hint);
    // No number out of the text is shown as if it were a length.
    EXPECT_THAT(status.message(), Not(HasSubstr("header length")));
  }
}

TEST(Safetensors, CO_007_ALengthThatSpellsPkIsNoZipFile) {
  // 0x04034B50 header bytes, honestly there.
  const std::string json = "{}" + std::string(0x04034B50 - 2, ' ');
  EXPECT_TRUE(read_bytes(testing::st(json, "")).ok());
}

// --- large files --------------------------------------------------------------------------------------------------------------

TEST(Safetensors, CO_016_OffsetsBeyondFourGiB) {
  SafetensorsBuilder file;
  file.entry("pad", "U8", {4294967299}, 0, 4294967299).entry("w", "BF16", {64, 64}, 4294967299, 4294975491);
  const SafetensorsHeader header = parsed(file.json(), 4294975491);
  ASSERT_EQ(header.entries.size(), 2U);
  EXPECT_EQ(header.entries[1].offset_bytes, 4294967299U);
  EXPECT_EQ(header.entries[1].size_bytes, 8192U);
  EXPECT_EQ(header.entries[0].size_bytes, 4294967299U);
}

TEST(Safetensors, CO_017_MoreThanTwoGiElements) {
  SafetensorsBuilder file;
  file.entry("w", "BF16", {262144, 8960}, 0, 4697620480);
  EXPECT_EQ(parsed(file.json(), 4697620480).entries[0].size_bytes, 4697620480U);
}

}  // namespace
}  // namespace weightd::store
