// SPDX-License-Identifier: Apache-2.0
// The whole way with real processes: checkpoint, weightpack, weightd, weightctl, workers; checked against the original checkpoint.
#include <gtest/gtest.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "base/fd.h"
#include "tests/support/daemon_fixture.h"
#include "tests/support/safetensors_builder.h"
#include "weightd/control.h"

extern char** environ;

namespace weightd::e2e {
namespace {

using testing::DaemonFixture;

/// trace_worker as a process: holds its lease until finish().
class Worker {
 public:
  Worker(const DaemonFixture& daemon, const std::string& trace, const std::string& seed) {
    int in[2], out[2];
    testing::require(::pipe2(in, O_CLOEXEC) == 0 && ::pipe2(out, O_CLOEXEC) == 0, "pipe2");
    hold_ = UniqueFd(in[1]);
    output_ = UniqueFd(out[0]);
    const UniqueFd child_in(in[0]), child_out(out[1]);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, child_in.get(), STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, child_out.get(), STDOUT_FILENO);
    std::vector<std::string> words = {TRACE_WORKER, daemon.data_socket(), "m", trace, "random", seed};
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    testing::require(::posix_spawn(&pid_, TRACE_WORKER, &actions, nullptr, argv.data(), environ) == 0, "posix_spawn");
    posix_spawn_file_actions_destroy(&actions);
  }
  ~Worker() {
    if (pid_ > 0) kill();
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  /// Reads its output until a line begins with `word`; false when it ended before.
  bool says(const std::string& word) {
    for (char byte = 0; ::read(output_.get(), &byte, 1) == 1;) {
      line_ += byte == '\n' ? '\0' : byte;
      if (byte != '\n') continue;
      const bool found = line_.compare(0, word.size(), word) == 0;
      line_.clear();
      if (found) return true;
    }
    return false;
  }
  void kill() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  int finish() {
    hold_.reset();
    int status = 0;
    ::waitpid(pid_, &status, 0);
    pid_ = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  pid_t pid_ = 0;
  UniqueFd hold_, output_;
  std::string line_;
};

void write_checkpoint(const std::string& folder) {
  std::mt19937 random(11);
  std::normal_distribution<double> exponent(118, 2);
  const auto words = [&](size_t count) {
    std::vector<uint16_t> result(count);
    for (uint16_t& word : result) {
      word = static_cast<uint16_t>((random() & 0x807FU) | static_cast<uint32_t>(exponent(random)) << 7);
    }
    return result;
  };
  const std::string layer = "model.layers.0.";
  testing::SafetensorsBuilder builder;
  builder.add_bf16(layer + "self_attn.q_proj.weight", {256, 320}, words(256 * 320));
  builder.add_bf16(layer + "self_attn.k_proj.weight", {64, 320}, words(64 * 320));
  builder.add_bf16(layer + "self_attn.v_proj.weight", {64, 320}, words(64 * 320));
  builder.add_bf16(layer + "mlp.down_proj.weight", {320, 1000}, words(320 * 1000));
  builder.add_bf16("odd", {37, 129}, words(37 * 129)).add_bf16("norm", {320}, words(320));
  builder.write(folder + "/model.safetensors");
}

void run(const std::string& command) { ASSERT_EQ(std::system(command.c_str()), 0) << command; }

class Workers : public ::testing::Test {
 protected:
  void SetUp() override {
    write_checkpoint(daemon_ / "checkpoint");
    run(std::string(WEIGHTPACK) + " pack --quiet " + daemon_ / "checkpoint" + " " + daemon_ / "m.wpk");
    run(std::string(WEIGHTCTL) + " load m " + daemon_ / "m.wpk" + " --quiet --socket " + daemon_.control_socket());
  }
  control::Client control() {
    control::Options options;
    options.socket_path = daemon_.control_socket();
    auto client = control::Client::connect(options);
    testing::require(client.ok(), "control socket");
    return *std::move(client);
  }

  DaemonFixture daemon_;
};

TEST_F(Workers, CO_069_TwoComputeFromOneCopyAndOneIsKilled) {
  auto client = control();
  Worker first(daemon_, daemon_ / "trace1", "1"), second(daemon_, daemon_ / "trace2", "2");
  ASSERT_TRUE(first.says("computed"));
  ASSERT_TRUE(second.says("computed"));
  run(std::string(TRACE_CHECK) + " " + daemon_ / "checkpoint" + " " + daemon_ / "trace1" + " " + daemon_ / "trace2");
  const auto before = client.status();
  ASSERT_TRUE(before.ok());
  EXPECT_EQ(before->lease_count, 2U);

  first.kill();
  testing::eventually("the killed worker's lease ends", [&] { return client.status()->lease_count == 1; });
  Worker third(daemon_, daemon_ / "trace3", "3");
  ASSERT_TRUE(third.says("computed"));
  run(std::string(TRACE_CHECK) + " " + daemon_ / "checkpoint" + " " + daemon_ / "trace3");
  EXPECT_EQ(second.finish(), 0);
  EXPECT_EQ(third.finish(), 0);
  testing::eventually("all leases end", [&] { return client.status()->lease_count == 0; });
  const auto unloaded = client.unload("m", "", std::chrono::seconds(30));
  ASSERT_TRUE(unloaded.ok());
  EXPECT_TRUE(unloaded->freed);
  const auto after = client.status();
  ASSERT_TRUE(after.ok());
  EXPECT_EQ(after->devices.at(0).owned_bytes, 0U);
}

TEST_F(Workers, CO_062_AcquireReleaseCyclesAndKilledWorkersLeaveNothing) {
  run(std::string(SOAK) + " " + daemon_.data_socket() + " " + daemon_.control_socket() + " m 300 10");
}

}  // namespace
}  // namespace weightd::e2e
