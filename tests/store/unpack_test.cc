// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <filesystem>

#include "tests/store/bundle_fixture.h"

namespace weightd::store {
namespace {

using ::testing::HasSubstr;
using namespace weightd::testing;  // NOLINT: the fixture's names

class Unpack : public ::testing::Test {
 protected:
  void SetUp() override {
    SafetensorsBuilder first, second;
    first.add_bf16("a", {512, 1024}, trained(512, 1024, 1));
    second.add_bf16("b", {512, 1024}, trained(512, 1024, 2)).add("c", "U8", {5}, "hello");
    write_sharded(dir_ / "in", {{"sub/1.safetensors", first}, {"2.safetensors", second}},
                  {{"a", "sub/1.safetensors"}, {"b", "2.safetensors"}, {"c", "2.safetensors"}});
    WEIGHTD_ASSERT_OK(pack(dir_ / "in", dir_ / "m.wpk", pack_options()));
  }
  TempDir dir_;
};

TEST_F(Unpack, RestoresIntoAnEmptyFolder) {
  std::filesystem::create_directory(dir_ / "out");
  const auto report = unpack(dir_ / "m.wpk", dir_ / "out", 2, {});
  WEIGHTD_ASSERT_OK(report);
  EXPECT_EQ(report->files, 3U);
  EXPECT_EQ(files_below(dir_ / "out"), files_below(dir_ / "in"));
  uint64_t bytes = 0;
  for (const std::string& name : files_below(dir_ / "in")) {
    EXPECT_TRUE(read_file(dir_ / "in" + "/" + name) == read_file(dir_ / "out" + "/" + name)) << name;
    bytes += std::filesystem::file_size(dir_ / "in" + "/" + name);
  }
  EXPECT_EQ(report->bytes, bytes);
}

TEST_F(Unpack, RefusesAFolderThatIsNotEmpty) {
  write_file(dir_ / "out/mine.txt", "mine");
  const auto report = unpack(dir_ / "m.wpk", dir_ / "out", 2, {});
  EXPECT_EQ(report.status().code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(report.status().message(), HasSubstr("not empty"));
  EXPECT_EQ(files_below(dir_ / "out"), std::vector<std::string>{"mine.txt"});
}

TEST_F(Unpack, RefusesAFileAndAMissingParent) {
  write_file(dir_ / "file", "x");
  EXPECT_EQ(unpack(dir_ / "m.wpk", dir_ / "file", 1, {}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(unpack(dir_ / "m.wpk", dir_ / "missing/out", 1, {}).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(unpack(dir_ / "missing.wpk", dir_ / "out", 1, {}).status().code(), StatusCode::kNotFound);
  EXPECT_FALSE(std::filesystem::exists(dir_ / "out"));
}

TEST_F(Unpack, DamageLeavesNothingBehind) {
  std::string bytes = read_file(dir_ / "m.wpk");
  const BundleReader bundle = open_bundle(dir_ / "m.wpk");
  const Section& codes = bundle.manifest().sections[storage_of(bundle, "a").planes[0].section];
  bytes[codes.offset_bytes + 100] ^= 1;
  write_file(dir_ / "bad.wpk", bytes);
  const auto report = unpack(dir_ / "bad.wpk", dir_ / "out", 1, {});
  EXPECT_EQ(report.status().code(), StatusCode::kCorruption);
  EXPECT_THAT(report.status().message(), HasSubstr("'sub/1.safetensors'"));
  EXPECT_FALSE(std::filesystem::exists(dir_ / "out"));
}

TEST_F(Unpack, CancellingAtAnyStepLeavesNothing) {
  int calls = 0;
  for (int stop_at = 1;; ++stop_at) {
    calls = 0;
    const auto report = unpack(dir_ / "m.wpk", dir_ / "out", 1, [&](uint64_t done, uint64_t total) {
      EXPECT_LE(done, total);
      return ++calls != stop_at;
    });
    if (report.ok()) {
      EXPECT_GT(stop_at, 3);
      return;
    }
    EXPECT_EQ(report.status().code(), StatusCode::kCancelled);
    EXPECT_FALSE(std::filesystem::exists(dir_ / "out"));
  }
}

TEST_F(Unpack, CO_099_FileSizeLimitIsAnError) {
  struct rlimit before {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  struct rlimit small = before;
  small.rlim_cur = 600'000;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const auto report = unpack(dir_ / "m.wpk", dir_ / "out", 1, {});
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, old_handler);
  EXPECT_EQ(report.status().code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(report.status().message(), HasSubstr("no space"));
  EXPECT_FALSE(std::filesystem::exists(dir_ / "out"));
}

TEST_F(Unpack, TemporaryNamesMayBeSourceNames) {
  SafetensorsBuilder first, second, third;
  first.add("a", "U8", {1}, "a");
  second.add("b", "U8", {1}, "b");
  third.add("c", "U8", {1}, "c");
  const std::vector<std::string> names = {".unpack-0.tmp", ".unpack-1.tmp", "z"};
  write_sharded(dir_ / "odd", {{names[0], first}, {names[1], second}, {names[2], third}},
                {{"a", names[0]}, {"b", names[1]}, {"c", names[2]}});
  WEIGHTD_ASSERT_OK(pack(dir_ / "odd", dir_ / "odd.wpk", pack_options()));
  WEIGHTD_ASSERT_OK(unpack(dir_ / "odd.wpk", dir_ / "out", 1, {}));
  EXPECT_EQ(files_below(dir_ / "out"), files_below(dir_ / "odd"));
  EXPECT_EQ(read_file(dir_ / "out/.unpack-0.tmp"), first.bytes());
  EXPECT_EQ(read_file(dir_ / "out/.unpack-1.tmp"), second.bytes());
}

}  // namespace
}  // namespace weightd::store
