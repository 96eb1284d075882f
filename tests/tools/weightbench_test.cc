// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/support/daemon_fixture.h"
#include "tests/support/test_bundle.h"
#include "tests/tools/golden.h"
#include "tests/tools/process.h"

/// weightbench as a program, where no GPU is needed.
namespace weightd::testing {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

Outcome weightbench(std::vector<std::string> arguments, const RunOptions& options = {}) {
  arguments.insert(arguments.begin(), WEIGHTBENCH_PROGRAM);
  return run(arguments, options);
}

TEST(Weightbench, HelpTexts) {
  for (const std::string verb : {"gpu", "chain", "load", "report"}) {
    expect_golden("weightbench_" + verb + "_help", transcript(weightbench({verb, "--help"}), ""));
  }
}

TEST(Weightbench, WhatCannotBeMeasuredIsRefusedByOption) {
  const std::vector<std::vector<std::string>> bad = {
      {"gpu", "--tokens", "0"},  {"gpu", "--shapes", "all"},  {"gpu", "--op", "gemm"},       {"gpu", "--escapes", "2"},
      {"gpu", "--repeats", "0"}, {"gpu", "--model", "llama"}, {"chain", "--tokens", "1,,2"}, {"chain", "--layers", "0"}};
  for (const std::vector<std::string>& arguments : bad) {
    const Outcome outcome = weightbench(arguments);
    EXPECT_EQ(outcome.exit_code, 2) << arguments[1];
    EXPECT_THAT(outcome.err, HasSubstr("weightbench: error: " + arguments[1] + ": ")) << arguments[1];
    EXPECT_EQ(outcome.out, "");
  }
}

TEST(Weightbench, AReportIsMadeOfAFile) {
  const TempDir dir;
  const std::string file = dir / "rows.json";
  std::ofstream(file) << R"([{"op": "gemm_best", "model": "llama-3.1-8b", "name": "qkv", "n": 6144, "k": 4096, "m": 1,
    "us": 10.0, "best_cublas_us": 15.0, "ratio": 1.5, "gpu": "NVIDIA H200", "driver": "580", "commit": "abc"}])";
  const Outcome outcome = weightbench({"report", file, "--plot", dir / "plot.svg"});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("| llama-3.1-8b qkv | 1.500 |"));
  EXPECT_TRUE(std::filesystem::exists(dir / "plot.svg"));
  const json document = json::parse(weightbench({"report", file, "--json"}).out);
  EXPECT_EQ(document["rows"][0]["ratio"], 1.5);
  EXPECT_EQ(weightbench({"report", dir / "none.json"}).exit_code, 5);
  EXPECT_EQ(weightbench({"report", dir.path()}).exit_code, 2);
}

class WeightbenchLoad : public ::testing::Test {
 protected:
  Outcome load(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "load");
    arguments.insert(arguments.end(), {"--socket", daemon_.data_socket(), "--control-socket", daemon_.control_socket()});
    return weightbench(std::move(arguments), {daemon_.folder(), {}, -1, -1});
  }
  json models() {
    const Outcome outcome = run({WEIGHTCTL_PROGRAM, "models", "--json", "--socket", daemon_.control_socket()});
    return json::parse(outcome.out, nullptr, false)["models"];
  }
  DaemonFixture daemon_;
};

TEST_F(WeightbenchLoad, MeasuresALoadAndLeavesNothing) {
  make_bundle(daemon_ / "m.wpk");
  const Outcome outcome = load({"m.wpk", "--count", "3", "--json", "--out", daemon_ / "rows.json"});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const json document = json::parse(outcome.out);
  EXPECT_EQ(document["device"], "host");
  EXPECT_GT(document["resident_bytes"], 0);
  std::vector<std::string> ops;
  for (const json& row : document["rows"]) {
    ops.push_back(row["op"]);
    EXPECT_EQ(row["name"], "m.wpk");
  }
  EXPECT_EQ(ops, (std::vector<std::string>{"load.start", "load.upload", "load.check", "load.total", "load.first_attach",
                                           "load.attach", "load.verify_call"}));
  EXPECT_GT(document["rows"][3]["us"], 0);
  EXPECT_GT(document["rows"][3]["coded_gbps"], 0);
  EXPECT_EQ(models(), json::array());
  std::ifstream file(daemon_ / "rows.json");
  EXPECT_EQ(json::parse(file), document["rows"]);
}

TEST_F(WeightbenchLoad, KeepLeavesTheModelAndATakenNameIsRefused) {
  make_bundle(daemon_ / "m.wpk");
  ASSERT_EQ(load({"m.wpk", "--count", "1", "--keep", "--model", "kept"}).exit_code, 0);
  ASSERT_EQ(models().size(), 1U);
  EXPECT_EQ(models()[0]["name"], "kept");
  const Outcome again = load({"m.wpk", "--model", "kept"});
  EXPECT_EQ(again.exit_code, 10);
  EXPECT_THAT(again.err, HasSubstr("the daemon has a model 'kept' (published)"));
  EXPECT_EQ(models().size(), 1U);
}

TEST_F(WeightbenchLoad, WhatIsNotThereIsNotFound) {
  EXPECT_EQ(load({"nowhere.wpk"}).exit_code, 5);
  EXPECT_EQ(models(), json::array());
}

TEST(Weightbench, WithoutADaemonALoadSaysSo) {
  const TempDir dir;
  const Outcome outcome = weightbench({"load", "m.wpk", "--control-socket", dir / "c"});
  EXPECT_EQ(outcome.exit_code, 7) << outcome.err;
}

}  // namespace
}  // namespace weightd::testing
