// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <functional>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "tests/client/fake_daemon.h"
#include "tests/tools/golden.h"
#include "tests/tools/process.h"
#include "tests/tools/terminal.h"

/// The real program against no daemon, a silent one, and one that answers as told.
namespace weightd::testing {
namespace {

using nlohmann::json;
using test::FakeDaemon;
using ::testing::HasSubstr;
using ::testing::StartsWith;

std::vector<std::string> weightctl(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), WEIGHTCTL_PROGRAM);
  return arguments;
}

/// One command line for each verb, without options.
std::vector<std::vector<std::string>> every_verb() {
  return {{"status"}, {"models"}, {"load", "m", "m.wpk"}, {"unload", "m"}, {"leases"}, {"verify", "m"}, {"memory"},
          {"doctor"}, {"version"}};
}

class WeightctlAlone : public ::testing::Test {
 protected:
  Outcome weightctl_in_dir(std::vector<std::string> arguments) {
    arguments.insert(arguments.end(), {"--socket", dir_ / "c"});
    return run(weightctl(std::move(arguments)), {dir_.path(), {}, -1, -1});
  }
  void expect_golden_of(const std::string& name, const std::vector<std::string>& arguments) {
    expect_golden(name, transcript(weightctl_in_dir(arguments), dir_.path()));
  }

  TempDir dir_;
};

TEST_F(WeightctlAlone, HelpTexts) {
  expect_golden("weightctl_help", transcript(run(weightctl({"--help"})), ""));
  for (const auto& verb : every_verb()) {
    expect_golden("weightctl_" + verb[0] + "_help", transcript(run(weightctl({verb[0], "--help"})), ""));
  }
  expect_golden("weightbench_help", transcript(run({WEIGHTBENCH_PROGRAM, "--help"}), ""));
  expect_golden("weightbench_attach_help", transcript(run({WEIGHTBENCH_PROGRAM, "attach", "--help"}), ""));
}

TEST_F(WeightctlAlone, CO_111_VersionShowsProgramAndLibrary) {
  expect_golden("weightctl_version_option", transcript(run(weightctl({"--version"})), ""));
  expect_golden("weightbench_version_option", transcript(run({WEIGHTBENCH_PROGRAM, "--version"}), ""));
}

#ifdef WEIGHTD_OTHER_RELEASE
TEST_F(WeightctlAlone, CO_111_ALibraryOfAnotherReleaseIsRefused) {
  const RunOptions other{"", {"LD_PRELOAD=" WEIGHTD_OTHER_RELEASE, "ASAN_OPTIONS=verify_asan_link_order=0"}, -1, -1};
  expect_golden("weightctl_version_option_other_library", transcript(run(weightctl({"--version"}), other), ""));
  const Outcome outcome = run(weightctl({"status"}), other);
  EXPECT_THAT(outcome.err, HasSubstr("libweightd it found is 0.0.1 (0000000)"));
  expect_golden("weightctl_other_library", transcript(outcome, ""));
  expect_golden("weightbench_other_library", transcript(run({WEIGHTBENCH_PROGRAM, "attach", "--model", "m"}, other), ""));
}
#endif

TEST_F(WeightctlAlone, WithoutADaemonEveryVerbSaysSo) {
  for (const auto& verb : every_verb()) {
    const Outcome outcome = weightctl_in_dir(verb);
    EXPECT_EQ(outcome.exit_code, verb[0] == "doctor" ? 1 : 7) << verb[0];
    EXPECT_THAT(outcome.err, StartsWith("weightctl: error: ")) << verb[0];
    if (verb[0] != "version" && verb[0] != "doctor") {
      EXPECT_EQ(outcome.out, "") << verb[0];
    }
  }
  EXPECT_EQ(run({WEIGHTBENCH_PROGRAM, "attach", "--model", "m", "--socket", dir_ / "d"}).exit_code, 7);
  expect_golden_of("weightctl_version_without_daemon", {"version"});
  expect_golden_of("weightctl_status_without_daemon_json", {"status", "--json"});
  expect_golden_of("weightctl_doctor_without_daemon", {"doctor"});
  expect_golden_of("weightctl_doctor_without_daemon_json", {"doctor", "--json"});
}

TEST_F(WeightctlAlone, TheEnvironmentNamesTheSocket) {
  const Outcome outcome = run(weightctl({"status"}), {"", {"WEIGHTD_CONTROL_SOCKET=" + (dir_ / "from-environment")}, -1, -1});
  EXPECT_EQ(outcome.exit_code, 7);
  EXPECT_THAT(outcome.err, HasSubstr(dir_ / "from-environment"));
}

/// Listens and never says a word.
class SilentDaemon {
 public:
  explicit SilentDaemon(const std::string& path) : socket_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof address.sun_path - 1);
    require(::bind(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0, "bind");
    require(::listen(socket_.get(), 64) == 0, "listen");
  }
  [[nodiscard]] UniqueFd accept() const { return UniqueFd(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC)); }

 private:
  UniqueFd socket_;
};

TEST_F(WeightctlAlone, CO_150_EveryVerbEndsInItsTimeWithItsOwnCode) {
  const SilentDaemon daemon(dir_ / "c");
  for (std::vector<std::string> verb : every_verb()) {
    const std::string name = verb[0];
    verb.insert(verb.end(), {"--timeout", "100ms"});
    const Outcome outcome = weightctl_in_dir(verb);
    EXPECT_EQ(outcome.exit_code, name == "doctor" ? 1 : 8) << name << outcome.err;
    EXPECT_THAT(outcome.err, StartsWith("weightctl: error: ")) << name;
  }
  EXPECT_EQ(run({WEIGHTBENCH_PROGRAM, "attach", "--model", "m", "--socket", dir_ / "c", "--timeout", "100ms"}).exit_code, 8);
}

TEST_F(WeightctlAlone, CO_150_CtrlCEndsTheWait) {
  const SilentDaemon daemon(dir_ / "c");
  Process process(weightctl({"status", "--socket", dir_ / "c", "--timeout", "24h"}));
  const UniqueFd connection = daemon.accept();
  process.send(SIGINT);
  EXPECT_EQ(process.wait().signal, SIGINT);
}

ipc::ModelSummary a_model(const std::string& name, uint64_t generation, ipc::GenerationState state) {
  ipc::ModelSummary model;
  model.name = name;
  model.generation = generation;
  model.state = state;
  model.content_id = std::string(64, 'c');
  model.tensors_id = std::string(64, 'd');
  model.device = "host";
  model.transport = "fd";
  model.residency = "fast";
  model.source = "/models/" + name + ".wpk";
  model.logical_bytes = uint64_t{16} << 30;
  model.resident_bytes = uint64_t{12} << 30;
  model.tensor_count = 291;
  model.encodings = {{"f12", 225, (uint64_t{16} << 30) - 4096, (uint64_t{12} << 30) - 4096}, {"raw", 66, 4096, 4096}};
  return model;
}

ipc::LeaseSummary a_lease(uint64_t id, bool orphan) {
  ipc::LeaseSummary lease;
  lease.id = id;
  lease.model = "llama";
  lease.generation = 3;
  lease.content_id = std::string(64, 'c');
  lease.device = "host";
  lease.command = orphan ? "old\nworker" : "worker";
  lease.pid = orphan ? 0 : 4242;
  lease.uid = 1000;
  lease.age_ms = 61'000;
  lease.bytes = uint64_t{12} << 30;
  lease.orphan = orphan;
  return lease;
}

ipc::StatusReply a_status() {
  ipc::StatusReply status;
  status.version = {"9.8.7 (abc)", 1, "host", 5, 77, "auto: no usable GPU: no CUDA driver"};
  status.uptime_ms = 3'725'000;
  status.rss_bytes = uint64_t{20} << 20;
  status.session_count = 3;
  status.lease_count = 2;
  status.fd_count = 40;
  status.models = {a_model("llama", 3, ipc::GenerationState::kPublished), a_model("qwen", 4, ipc::GenerationState::kLoading),
                   a_model("gone", 2, ipc::GenerationState::kFailed)};
  status.models[0].lease_count = 2;
  status.models[0].orphan_count = 1;
  status.models[1].progress_bytes = uint64_t{3} << 30;
  status.models[2].failure = "bundle is corrupt";
  ipc::DeviceSummary device;
  device.uuid = "host";
  device.name = "main memory";
  device.total_bytes = uint64_t{64} << 30;
  device.budget_bytes = uint64_t{48} << 30;
  device.owned_bytes = uint64_t{24} << 30;
  device.leased_bytes = uint64_t{12} << 30;
  device.orphan_bytes = 512;
  device.loading_bytes = uint64_t{12} << 30;
  device.free_bytes = uint64_t{12} << 30;
  status.devices = {device};
  return status;
}

/// The same on two GPUs, with what their driver says.
ipc::MemoryReply a_memory() {
  ipc::MemoryReply memory;
  memory.status = a_status();
  memory.status.version.backend = "cuda";
  memory.status.version.backend_reason = "auto: 2 usable GPUs";
  memory.status.models[1].state = ipc::GenerationState::kLost;
  memory.status.models[1].failure = "the loader was killed (signal 9)";
  memory.status.models[1].transport = "legacy";
  for (ipc::ModelSummary& model : memory.status.models) model.device = "GPU-11112222-3333-4444-5555-666677778888";
  memory.status.models.push_back(a_model("old", 1, ipc::GenerationState::kDraining));
  memory.status.models.back().device = "GPU-99990000-3333-4444-5555-666677778888";
  memory.status.models.back().encodings.clear();
  ipc::DeviceSummary& first = memory.status.devices[0];
  first.uuid = "GPU-11112222-3333-4444-5555-666677778888";
  first.name = "NVIDIA H200";
  first.fd_only_bytes = uint64_t{12} << 30;
  ipc::DeviceSummary second = first;
  second.uuid = "GPU-99990000-3333-4444-5555-666677778888";
  second.owned_bytes = second.draining_bytes = second.leased_bytes = uint64_t{12} << 30;
  second.loading_bytes = second.orphan_bytes = second.fd_only_bytes = 0;
  memory.leases = {a_lease(7, false), a_lease(8, true)};
  ipc::GpuSummary gpu;
  gpu.uuid = first.uuid;
  gpu.name = first.name;
  gpu.total_bytes = first.total_bytes;
  gpu.used_bytes = uint64_t{40} << 30;
  gpu.free_bytes = uint64_t{24} << 30;
  gpu.nvml_known = true;
  gpu.persistence = 1;
  memory.gpus = {gpu};
  memory.status.devices.push_back(second);
  memory.problem = "the driver does not show every GPU any more";
  return memory;
}

class Weightctl : public WeightctlAlone {
 protected:
  Weightctl()
      : daemon_(dir_ / "c", [this](FakeDaemon& daemon, FakeDaemon::Session& session, const ipc::Request& request) {
          return answer(daemon, session, request);
        }) {}

  bool answer(FakeDaemon& daemon, FakeDaemon::Session& session, const ipc::Request& request) {
    if (std::holds_alternative<ipc::HelloRequest>(request.body)) return false;
    const Script script = note(request);
    if (!script.refusal.ok()) {
      daemon.reply(session, request.id, script.refusal);
    } else if (std::holds_alternative<ipc::VersionRequest>(request.body)) {
      daemon.reply(session, request.id, ipc::VersionReply{{"9.8.7 (abc)", 1, "host", 5, 77}});
    } else if (std::holds_alternative<ipc::StatusRequest>(request.body)) {
      daemon.reply(session, request.id, a_status());
      ++status_calls_;
      if (waiting_load_) finish_load(daemon);
    } else if (std::holds_alternative<ipc::MemoryRequest>(request.body)) {
      daemon.reply(session, request.id, script.memory);
    } else if (std::holds_alternative<ipc::DoctorRequest>(request.body)) {
      daemon.reply(session, request.id, ipc::DoctorReply{script.checks});
    } else if (std::holds_alternative<ipc::LeasesRequest>(request.body)) {
      daemon.reply(session, request.id, ipc::LeasesReply{{a_lease(7, false), a_lease(8, true)}});
    } else if (std::holds_alternative<ipc::LoadRequest>(request.body)) {
      waiting_load_ = {&session, request.id};
      if (!script.load_waits_for_status) finish_load(daemon);
    } else if (std::holds_alternative<ipc::UnloadRequest>(request.body)) {
      daemon.reply(session, request.id, script.unloaded);
    } else if (std::holds_alternative<ipc::VerifyRequest>(request.body)) {
      daemon.reply(session, request.id, script.verified);
    }
    return true;
  }
  void finish_load(FakeDaemon& daemon) {
    daemon.reply(*waiting_load_->first, waiting_load_->second,
                 ipc::LoadedReply{a_model("qwen", 4, ipc::GenerationState::kPublished)});
    waiting_load_.reset();
  }
  ipc::LoadRequest load_request() {
    const std::lock_guard lock(mutex_);
    return load_;
  }

  /// What the daemon's thread answers.
  struct Script {
    Status refusal;
    ipc::UnloadedReply unloaded{true, uint64_t{12} << 30, {}};
    ipc::VerifiedReply verified{12288, {}, {}, 950, uint64_t{12} << 30};
    bool load_waits_for_status = false;
    ipc::MemoryReply memory = a_memory();
    std::vector<ipc::CheckSummary> checks = {
        {"backend", ipc::CheckSummary::Level::kGood, "cuda, 1 device", ""},
        {"persistence", ipc::CheckSummary::Level::kWarning, "GPU-1: persistence mode is off", "run nvidia-persistenced"}};
  };
  void set(const std::function<void(Script&)>& change) {
    const std::lock_guard lock(mutex_);
    change(script_);
  }
  Script note(const ipc::Request& request) {
    const std::lock_guard lock(mutex_);
    if (const auto* load = std::get_if<ipc::LoadRequest>(&request.body)) load_ = *load;
    return script_;
  }

  // The daemon's thread only.
  int status_calls_ = 0;
  std::optional<std::pair<FakeDaemon::Session*, uint64_t>> waiting_load_;

  std::mutex mutex_;
  Script script_;
  ipc::LoadRequest load_;
  FakeDaemon daemon_;
};

TEST_F(Weightctl, TablesForPeople) {
  expect_golden_of("weightctl_status", {"status"});
  expect_golden_of("weightctl_models", {"models"});
  expect_golden_of("weightctl_leases", {"leases"});
  expect_golden_of("weightctl_load", {"load", "qwen", "m.wpk"});
  expect_golden_of("weightctl_unload", {"unload", "llama"});
  expect_golden_of("weightctl_verify", {"verify", "llama"});
  expect_golden_of("weightctl_memory", {"memory"});
  expect_golden_of("weightctl_doctor", {"doctor"});
  expect_golden_of("weightctl_version", {"version"});
}

TEST_F(Weightctl, JsonForPrograms) {
  expect_golden_of("weightctl_status_json", {"status", "--json"});
  expect_golden_of("weightctl_models_json", {"models", "--json"});
  expect_golden_of("weightctl_leases_json", {"leases", "--json"});
  expect_golden_of("weightctl_load_json", {"load", "qwen", "m.wpk", "--json"});
  expect_golden_of("weightctl_unload_json", {"unload", "llama", "--json"});
  expect_golden_of("weightctl_verify_json", {"verify", "llama", "--json"});
  expect_golden_of("weightctl_version_json", {"version", "--json"});
  expect_golden_of("weightctl_memory_json", {"memory", "--json"});
  expect_golden_of("weightctl_doctor_json", {"doctor", "--json"});
}

TEST_F(Weightctl, MemoryOfTheHostHasNoDriverToAsk) {
  set([](Script& script) { script.memory = ipc::MemoryReply{a_status(), {}, {}, ""}; });
  expect_golden_of("weightctl_memory_host", {"memory"});
}

TEST_F(Weightctl, DoctorFailsWhenACheckFailsAndStillSaysAll) {
  set([](Script& script) {
    script.checks.push_back({"driver", ipc::CheckSummary::Level::kFailure, "no CUDA\ndriver", "install the NVIDIA driver"});
  });
  expect_golden_of("weightctl_doctor_failure", {"doctor"});
  expect_golden_of("weightctl_doctor_failure_json", {"doctor", "--json"});
}

TEST_F(Weightctl, LoadSaysWhichTransportAndDevice) {
  EXPECT_EQ(weightctl_in_dir({"load", "qwen", "m.wpk"}).exit_code, 0);
  EXPECT_EQ(load_request().transport, "fd");
  EXPECT_EQ(weightctl_in_dir({"load", "qwen", "m.wpk", "--transport", "legacy", "--device", "GPU-1"}).exit_code, 0);
  EXPECT_EQ(load_request().transport, "legacy");
  EXPECT_EQ(load_request().device, "GPU-1");
  EXPECT_EQ(weightctl_in_dir({"load", "qwen", "m.wpk", "--transport", "pigeon"}).exit_code, 2);
}

TEST_F(Weightctl, QuietSaysNothingAndStillAnswers) {
  for (std::vector<std::string> verb : every_verb()) {
    const std::string name = verb[0];
    verb.emplace_back("--quiet");
    const Outcome outcome = weightctl_in_dir(verb);
    EXPECT_EQ(outcome.exit_code, 0) << name;
    EXPECT_EQ(outcome.out + outcome.err, "") << name;
  }
}

TEST_F(Weightctl, LoadMakesThePathAbsolute) {
  EXPECT_EQ(weightctl_in_dir({"load", "qwen", "sub/../m.wpk", "--device", "host", "--timeout", "5m"}).exit_code, 0);
  EXPECT_EQ(load_request().path, std::filesystem::canonical(dir_.path()).string() + "/sub/../m.wpk");
  EXPECT_EQ(load_request().model, "qwen");
  EXPECT_EQ(load_request().device, "host");
  EXPECT_EQ(load_request().timeout_ms, 300'000U);
  EXPECT_EQ(weightctl_in_dir({"load", "qwen", "/abs/m.wpk"}).exit_code, 0);
  EXPECT_EQ(load_request().path, "/abs/m.wpk");
}

TEST_F(Weightctl, LoadDrawsProgressOnATerminal) {
  set([](Script& script) { script.load_waits_for_status = true; });
  Terminal terminal;
  Process process(weightctl({"load", "qwen", "m.wpk", "--socket", dir_ / "c"}), {"", {}, -1, terminal.program_end()});
  const std::string screen = terminal.read_to_end();
  const Outcome outcome = process.wait();
  EXPECT_EQ(outcome.exit_code, 0) << screen;
  EXPECT_THAT(outcome.out, StartsWith("qwen generation 4 is published"));
  EXPECT_THAT(screen, HasSubstr("load   25 % [######..................] 3.0 GiB of 12.0 GiB"));
}

TEST_F(Weightctl, UnloadSaysWhoHoldsIt) {
  set([](Script& script) { script.unloaded = {false, uint64_t{12} << 30, {a_lease(7, false), a_lease(8, true)}}; });
  expect_golden_of("weightctl_unload_held", {"unload", "llama", "--timeout", "250ms"});
  expect_golden_of("weightctl_unload_held_json", {"unload", "llama", "--timeout", "250ms", "--json"});
}

TEST_F(Weightctl, VerifyNamesWhatIsDamaged) {
  set([](Script& script) { script.verified = {12288, {17, 4000}, {"model.norm.weight", "a\nb"}, 950, uint64_t{12} << 30}; });
  expect_golden_of("weightctl_verify_damaged", {"verify", "llama"});
  expect_golden_of("weightctl_verify_damaged_json", {"verify", "llama", "--json"});
}

TEST_F(Weightctl, RefusalsKeepTheirCodeAndGetAHint) {
  const std::vector<std::pair<Status, int>> refusals = {{Status::not_found("no model 'm'"), 5},
                                                        {Status::permission_denied("you may not"), 4},
                                                        {Status::already_exists("'m' is another bundle"), 10},
                                                        {Status::resource_exhausted("needs 9.8 GiB, 7.1 free"), 9},
                                                        {Status::unsupported("too new"), 6},
                                                        {Status::corruption("section 3"), 3},
                                                        {Status::deadline_exceeded("60 s passed"), 8}};
  for (const auto& [refusal, code] : refusals) {
    set([&wanted = refusal](Script& script) { script.refusal = wanted; });
    const Outcome outcome = weightctl_in_dir({"load", "m", "m.wpk"});
    EXPECT_EQ(outcome.exit_code, code);
    EXPECT_THAT(outcome.err, HasSubstr("weightctl: error: ")) << refusal.message();
    EXPECT_THAT(outcome.err, HasSubstr(refusal.message()));
    EXPECT_THAT(outcome.err, HasSubstr("\nweightctl: hint: ")) << refusal.message();
    const json document = json::parse(weightctl_in_dir({"load", "m", "m.wpk", "--json"}).out);
    EXPECT_EQ(document["schema_version"], 1);
    EXPECT_EQ(document["error"]["exit_code"], code);
    EXPECT_EQ(document["error"]["code"], std::string(status_code_name(refusal.code())));
  }
}

}  // namespace
}  // namespace weightd::testing
