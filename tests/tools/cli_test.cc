// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "tools/cli/build_check.h"
#include "tools/cli/exit_codes.h"
#include "tools/cli/json.h"
#include "tools/cli/progress_bar.h"
#include "tools/cli/table.h"
#include "tools/cli/units.h"

namespace weightd::cli {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

TEST(ExitCodes, EveryStatusCodeMeansTheDocumentedNumber) {
  const std::vector<std::pair<StatusCode, int>> expected = {
      {StatusCode::kOk, 0},
      {StatusCode::kInvalidArgument, 2},
      {StatusCode::kNotFound, 5},
      {StatusCode::kAlreadyExists, 10},
      {StatusCode::kPermissionDenied, 4},
      {StatusCode::kResourceExhausted, 9},
      {StatusCode::kFailedPrecondition, 10},
      {StatusCode::kUnavailable, 7},
      {StatusCode::kDeadlineExceeded, 8},
      {StatusCode::kCancelled, 10},
      {StatusCode::kUnsupported, 6},
      {StatusCode::kCorruption, 3},
      {StatusCode::kIo, 1},
      {StatusCode::kCuda, 1},
      {StatusCode::kInternal, 1},
      {StatusCode::kRevoked, 10},
      {StatusCode::kForked, 10},
      {StatusCode::kLost, 10},
  };
  for (const auto& [code, number] : expected) EXPECT_EQ(static_cast<int>(exit_code(code)), number) << status_code_name(code);
}

TEST(ExitCodes, TableAndHelpHoldEachNumberOnce) {
  std::set<int> numbers;
  const std::string help = exit_codes_help();
  for (const ExitCodeInfo& info : kExitCodes) {
    EXPECT_TRUE(numbers.insert(static_cast<int>(info.code)).second);
    EXPECT_THAT(help, HasSubstr("\n  " + std::to_string(static_cast<int>(info.code)) + " "));
  }
}

TEST(Json, KeepsOrderAndTypes) {
  Json list = Json::array();
  list.push(1).push("two").push(Json::object());
  Json json = Json::document();
  json.set("z", UINT64_MAX).set("a", INT64_MIN).set("real", 0.5).set("yes", true).set("list", std::move(list));
  EXPECT_EQ(json.dump(),
            "{\n  \"schema_version\": 1,\n  \"z\": 18446744073709551615,\n  \"a\": -9223372036854775808,\n  \"real\": 0.5,\n"
            "  \"yes\": true,\n  \"list\": [\n    1,\n    \"two\",\n    {}\n  ]\n}\n");
}

TEST(Json, StaysValidWhateverTheTextIs) {
  Json json = Json::object();
  const std::string name = std::string("a\0b\n\x1b[2J\"\\", 9) + "\xff\xc3";
  json.set("name", name).set("nan", std::numeric_limits<double>::quiet_NaN()).set("inf", std::numeric_limits<double>::infinity());
  const auto parsed = nlohmann::json::parse(json.dump());
  EXPECT_EQ(parsed["name"].get<std::string>(), std::string("a\0b\n\x1b[2J\"\\", 9) + "\xef\xbf\xbd\xef\xbf\xbd");
  EXPECT_TRUE(parsed["nan"].is_null());
  EXPECT_TRUE(parsed["inf"].is_null());
}

TEST(Table, AlignsByWhatIsSeen) {
  Table table;
  table.column("name").column("size", Align::kRight).column("note");
  table.row({"\xc3\xa4\xc3\xb6", "1", "x"});
  table.row({"abc", "12345"});
  EXPECT_EQ(table.to_string(),
            "name   size  note\n"
            "\xc3\xa4\xc3\xb6        1  x\n"
            "abc   12345\n");
}

TEST(Table, CellsCannotForgeLines) {
  Table table;
  table.column("name");
  table.row({"a\nERROR fake line"}).row({"\x1b[2J"});
  EXPECT_EQ(table.to_string(), "name\na\\nERROR fake line\n\\x1b[2J\n");
}

TEST(Table, WordsForCounts) {
  EXPECT_EQ(counted(0, "tensor"), "0 tensors");
  EXPECT_EQ(counted(1, "tensor"), "1 tensor");
  EXPECT_EQ(counted(2, "merged matrix"), "2 merged matrices");
  EXPECT_EQ(fixed(12.0371, 3), "12.037");
  EXPECT_EQ(fixed(std::numeric_limits<double>::quiet_NaN(), 3), "-");
}

TEST(Units, BytesAreExact) {
  const std::vector<std::pair<std::string, uint64_t>> good = {
      {"1", 1},        {"5000000", 5'000'000},    {"7B", 7}, {"5GB", 5'000'000'000}, {"512MiB", 536'870'912}, {"3kB", 3'000},
      {"2KiB", 2'048}, {"1TB", 1'000'000'000'000}};
  for (const auto& [text, bytes] : good) {
    const auto parsed = parse_bytes(text);
    ASSERT_TRUE(parsed.ok()) << text;
    EXPECT_EQ(*parsed, bytes) << text;
  }
  for (const char* text : {"", "0", "-1", "+1", "1.5GB", "GB", "5 GB", "5gb", "5GBx", "99999999999999999999", "9999999TiB"}) {
    EXPECT_EQ(parse_bytes(text).status().code(), StatusCode::kInvalidArgument) << text;
  }
}

TEST(Units, TimesAreSecondsWithoutAUnit) {
  const std::vector<std::pair<std::string, milliseconds>> good = {{"30", milliseconds(30'000)},
                                                                  {"30s", milliseconds(30'000)},
                                                                  {"250ms", milliseconds(250)},
                                                                  {"5m", milliseconds(300'000)},
                                                                  {"24h", milliseconds(86'400'000)}};
  for (const auto& [text, time] : good) {
    const auto parsed = parse_duration(text);
    ASSERT_TRUE(parsed.ok()) << text;
    EXPECT_EQ(*parsed, time) << text;
  }
  for (const char* text : {"", "0", "-5", "25h", "1d", "5 s", "1e3", "infinite"}) {
    EXPECT_EQ(parse_duration(text).status().code(), StatusCode::kInvalidArgument) << text;
  }
  EXPECT_EQ(human_duration(milliseconds(250)), "250 ms");
  EXPECT_EQ(human_duration(milliseconds(1'000)), "1 s");
  EXPECT_EQ(human_duration(milliseconds(1'500)), "1.5 s");
  EXPECT_EQ(human_duration(milliseconds(90'000)), "1 min 30 s");
  EXPECT_EQ(human_duration(milliseconds(7'260'000)), "2 h 1 min");
}

TEST(ProgressLine, SaysHowFarHowFastHowLong) {
  const uint64_t gib = uint64_t{1} << 30;
  EXPECT_EQ(progress_line("pack", gib, 4 * gib, 2.0),
            "pack   25 % [######..................] 1.0 GiB of 4.0 GiB, 512.0 MiB/s, 7 s left");
  EXPECT_EQ(progress_line("pack", 0, 4 * gib, 0.0), "pack    0 % [........................] 0 B of 4.0 GiB");
  EXPECT_EQ(progress_line("pack", 4 * gib, 4 * gib, 4.0), "pack  100 % [########################] 4.0 GiB of 4.0 GiB, 1.0 GiB/s");
  EXPECT_EQ(progress_line("load", gib, 0, 0.0), "load 1.0 GiB");
  // More than promised must not run off the bar.
  EXPECT_EQ(progress_line("pack", 5 * gib, 4 * gib, 0.0), "pack  100 % [########################] 4.0 GiB of 4.0 GiB");
}

TEST(BuildCheck, CO_111_ProgramAndLibraryOfOneRelease) {
  EXPECT_TRUE(check_same_release("1.2.3 (aaaaaaa)", "1.2.3 (aaaaaaa)").ok());
  EXPECT_TRUE(check_same_release("1.2.3 (aaaaaaa)", "1.2.3 (bbbbbbb)").ok());
  const Status status = check_same_release("1.2.3 (aaaaaaa)", "1.2.4 (bbbbbbb)");
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), HasSubstr("1.2.3 (aaaaaaa)"));
  EXPECT_THAT(status.message(), HasSubstr("1.2.4 (bbbbbbb)"));
}

}  // namespace
}  // namespace weightd::cli
