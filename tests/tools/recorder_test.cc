// SPDX-License-Identifier: Apache-2.0
#include "tools/bench/recorder.h"

#include <gtest/gtest.h>

#include <csignal>
#include <fstream>
#include <string>
#include <vector>

#include "tests/support/safetensors_builder.h"

namespace weightd::tools {
namespace {

Row named(const std::string& name) {
  Row row;
  row.op = "copy";
  row.name = name;
  row.us = 1;
  return row;
}

std::vector<std::string> names_in(const std::string& path) {
  std::vector<std::string> names;
  const Result<std::vector<Row>> rows = read_rows(path);
  EXPECT_TRUE(rows.ok()) << rows.status().to_string();
  if (!rows.ok()) return names;
  for (const Row& row : *rows) names.push_back(row.name);
  return names;
}

class RecorderTest : public ::testing::Test {
 protected:
  RecorderTest() : output_("test") { output_.quiet = true; }
  testing::TempDir dir_;
  std::string path_ = dir_ / "rows.json";
  cli::Output output_;
};

TEST_F(RecorderTest, TheFileHoldsAllSoFar) {
  Result<Recorder> recorder = Recorder::open({path_, false}, output_);
  ASSERT_TRUE(recorder.ok()) << recorder.status().to_string();
  EXPECT_EQ(names_in(path_), std::vector<std::string>{});
  ASSERT_TRUE(recorder->add(std::vector<Row>(1, named("a"))).ok());
  EXPECT_EQ(names_in(path_), std::vector<std::string>{"a"});
  ASSERT_TRUE(recorder->add({named("b"), named("c")}).ok());
  EXPECT_EQ(names_in(path_), (std::vector<std::string>{"a", "b", "c"}));
}

TEST_F(RecorderTest, AppendKeepsWhatIsThere) {
  ASSERT_TRUE(write_rows(path_, {named("old")}).ok());
  Result<Recorder> recorder = Recorder::open({path_, true}, output_);
  ASSERT_TRUE(recorder.ok());
  ASSERT_TRUE(recorder->add(std::vector<Row>(1, named("new"))).ok());
  EXPECT_EQ(names_in(path_), (std::vector<std::string>{"old", "new"}));
  ASSERT_EQ(recorder->new_rows().size(), 1U);
  EXPECT_EQ(recorder->new_rows().front().name, "new");
}

TEST_F(RecorderTest, ThereNeedBeNothingToAppendTo) {
  EXPECT_TRUE(Recorder::open({path_, true}, output_).ok());
  EXPECT_EQ(names_in(path_), std::vector<std::string>{});
}

TEST_F(RecorderTest, AFileThatCannotBeKeptIsRefusedBeforeAnythingIsMeasured) {
  std::ofstream(path_) << "not rows";
  EXPECT_EQ(Recorder::open({path_, true}, output_).status().code(), StatusCode::kCorruption);
  std::ifstream file(path_);
  std::string text;
  std::getline(file, text);
  EXPECT_EQ(text, "not rows");
  EXPECT_EQ(Recorder::open({dir_ / "no/rows.json", false}, output_).status().code(), StatusCode::kNotFound);
}

TEST_F(RecorderTest, AnInterruptWaitsUntilItIsAskedFor) {
  // In a child: the signal ends it when the output goes away.
  EXPECT_EXIT(
      {
        std::signal(SIGINT, SIG_DFL);  // whatever started the tests may have it ignored
        cli::Output output("test");
        output.quiet = true;
        Result<Recorder> recorder = Recorder::open({path_, false}, output);
        if (!recorder.ok() || !recorder->check_interrupt().ok()) std::_Exit(1);
        std::raise(SIGINT);
        if (!recorder->add(std::vector<Row>(1, named("a"))).ok()) std::_Exit(2);
        if (recorder->check_interrupt().code() != StatusCode::kCancelled) std::_Exit(3);
        output.release_interrupts();
        std::_Exit(4);
      },
      ::testing::KilledBySignal(SIGINT), "");
  EXPECT_EQ(names_in(path_), std::vector<std::string>{"a"});
}

TEST(RowLine, SaysWhatThereIs) {
  Row row = named("1 GiB");
  EXPECT_EQ(row_line(row), "copy 1 GiB: 1.0 us");
  row.op = "gemm_f12";
  row.name = "qkv";
  row.model = "llama-3.1-8b";
  row.n = 6144;
  row.k = 4096;
  row.m = 16;
  row.us = 11.28;
  row.ratio = 1.3743;
  row.coded_gbps = 3346.2;
  row.plan = "bulk";
  EXPECT_EQ(row_line(row), "gemm_f12 llama-3.1-8b qkv 6144x4096 m=16: 11.3 us, ratio 1.374, 3346 GB/s, bulk");
}

}  // namespace
}  // namespace weightd::tools
