// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/support/daemon_fixture.h"
#include "tests/support/test_bundle.h"
#include "tests/tools/process.h"
#include "weightd/client.h"

/// weightctl and weightbench with the real daemon.
namespace weightd::testing {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

class WithDaemon : public ::testing::Test {
 protected:
  Outcome weightctl(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), WEIGHTCTL_PROGRAM);
    arguments.insert(arguments.end(), {"--socket", daemon_.control_socket()});
    return run(arguments, {daemon_.folder(), {}, -1, -1});
  }
  json json_of(std::vector<std::string> arguments) {
    arguments.emplace_back("--json");
    const Outcome outcome = weightctl(std::move(arguments));
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return json::parse(outcome.out, nullptr, false);
  }
  void load_model() {
    make_bundle(daemon_ / "m.wpk");
    const Outcome outcome = weightctl({"load", "m", "m.wpk"});
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err << daemon_.log();
  }

  DaemonFixture daemon_;
};

TEST_F(WithDaemon, LoadShowVerifyUnload) {
  load_model();
  EXPECT_EQ(weightctl({"load", "m", "m.wpk"}).exit_code, 0);  // the same content again
  const json models = json_of({"models"});
  ASSERT_EQ(models["models"].size(), 1U);
  EXPECT_EQ(models["models"][0]["name"], "m");
  EXPECT_EQ(models["models"][0]["state"], "published");
  const json status = json_of({"status"});
  EXPECT_EQ(status["daemon"]["pid"], daemon_.pid());
  EXPECT_EQ(status["models"], models["models"]);
  EXPECT_EQ(status["devices"][0]["owned_bytes"], models["models"][0]["resident_bytes"]);
  const json verified = json_of({"verify", "m"});
  EXPECT_EQ(verified["verified"]["good"], true);
  EXPECT_GT(verified["verified"]["blocks"], 0);
  EXPECT_EQ(json_of({"version"})["daemon"]["pid"], daemon_.pid());
  EXPECT_EQ(json_of({"unload", "m"})["freed"], true);
  EXPECT_EQ(json_of({"models"})["models"], json::array());
}

TEST_F(WithDaemon, AnotherContentUnderTheNameIsRefused) {
  load_model();
  TestBundle other;
  other.seed = 2;
  make_bundle(daemon_ / "other.wpk", other);
  EXPECT_EQ(weightctl({"load", "m", "other.wpk"}).exit_code, 10);
}

TEST_F(WithDaemon, WhatIsNotThereIsNotFound) {
  EXPECT_EQ(weightctl({"load", "m", "nowhere.wpk"}).exit_code, 5);
  EXPECT_EQ(weightctl({"unload", "m"}).exit_code, 5);
  EXPECT_EQ(weightctl({"verify", "m"}).exit_code, 5);
}

TEST_F(WithDaemon, LeasesAndUnloadNameTheHolder) {
  load_model();
  ClientOptions options;
  options.socket_path = daemon_.data_socket();
  Result<Client> client = Client::connect(options);
  ASSERT_TRUE(client.ok()) << client.status().to_string();
  Result<Model> model = client->acquire("m");
  ASSERT_TRUE(model.ok()) << model.status().to_string();
  const json leases = json_of({"leases"})["leases"];
  ASSERT_EQ(leases.size(), 1U);
  EXPECT_EQ(leases[0]["model"], "m");
  EXPECT_EQ(leases[0]["pid"], ::getpid());
  EXPECT_EQ(leases[0]["orphan"], false);

  const Outcome held = weightctl({"unload", "m", "--timeout", "100ms"});
  EXPECT_EQ(held.exit_code, 8) << held.err;
  EXPECT_THAT(held.out, HasSubstr(std::to_string(::getpid())));
  ASSERT_TRUE(model->release().ok());
  eventually("the model is freed", [&] { return json_of({"models"})["models"].empty(); });
}

TEST_F(WithDaemon, CO_150_AStoppedDaemonStopsNobodyElse) {
  load_model();
  daemon_.signal(SIGSTOP);
  const std::vector<std::vector<std::string>> verbs = {
      {"status"}, {"models"}, {"load", "n", "m.wpk"}, {"unload", "m"}, {"leases"}, {"verify", "m"}, {"version"}};
  for (std::vector<std::string> verb : verbs) {
    const std::string name = verb[0];
    verb.insert(verb.end(), {"--timeout", "100ms"});
    EXPECT_EQ(weightctl(verb).exit_code, 8) << name;
  }
  daemon_.signal(SIGCONT);
  // What was asked for in vain has had no effect.
  const json models = json_of({"models"})["models"];
  ASSERT_EQ(models.size(), 1U);
  EXPECT_EQ(models[0]["name"], "m");
  EXPECT_EQ(models[0]["state"], "published");
}

TEST_F(WithDaemon, AttachIsMeasured) {
  load_model();
  const Outcome outcome =
      run({WEIGHTBENCH_PROGRAM, "attach", "--model", "m", "--count", "5", "--socket", daemon_.data_socket(), "--json"});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const json report = json::parse(outcome.out);
  EXPECT_EQ(report["count"], 5);
  EXPECT_EQ(report["tensor"], "layers.0.weight");
  EXPECT_EQ(report["tensor_bytes"], 64 * 256 * 2);
  for (const char* phase : {"connect", "acquire", "lookup", "decompress", "release"}) {
    EXPECT_GE(report["phases"][phase]["most_ms"], report["phases"][phase]["p50_ms"]) << phase;
    EXPECT_GE(report["phases"][phase]["least_ms"], 0) << phase;
  }
  EXPECT_EQ(json_of({"leases"})["leases"], json::array());
  EXPECT_EQ(run({WEIGHTBENCH_PROGRAM, "attach", "--model", "nowhere", "--socket", daemon_.data_socket()}).exit_code, 5);
}

}  // namespace
}  // namespace weightd::testing
