// SPDX-License-Identifier: Apache-2.0
#include "tests/e2e/system.h"

#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <random>

#include "store/pack.h"
#include "tests/support/programs.h"
#include "tests/support/raw_peer.h"
#include "tests/support/safetensors_builder.h"
#include "tests/support/test_bundle.h"

namespace weightd::e2e {
namespace {

using testing::RawPeer;

testing::DaemonOptions options_of(const std::string& config) {
  testing::DaemonOptions options;
  options.config = config;
  options.backend = kBackend;
  options.any_user = true;
  return options;
}

/// Trained weights' kind: a scale of its own for each row, all signs and fractions, no infinities.
std::vector<uint16_t> random_words(std::mt19937_64& random, uint64_t rows, uint64_t cols) {
  std::vector<uint16_t> words(rows * cols);
  for (uint64_t row = 0; row < rows; ++row) {
    std::normal_distribution<double> exponent(112.0 + static_cast<double>(random() % 8), 1.6);
    for (uint64_t col = 0; col < cols; ++col) {
      const auto e = static_cast<uint32_t>(std::clamp(exponent(random), 90.0, 130.0));
      words[row * cols + col] = static_cast<uint16_t>((random() & 0x807FU) | e << 7);
    }
  }
  return words;
}

void pack(const std::string& from, const std::string& to, bool raw) {
  store::PackOptions options;
  options.encoding = raw ? Encoding::kRaw : Encoding::kF12;
  options.tool_version = "test";
  const auto report = store::pack(from, to, options);
  testing::require(report.ok(), "pack: " + report.status().message());
}

}  // namespace

System::System(const std::string& config) : daemon(options_of(config)) {
  if (kGpu) nvml_ = std::make_unique<Nvml>();
  testing::require(::mkdir(scratch("").c_str(), 0777) == 0 && ::chmod(scratch("").c_str(), 0777) == 0, "scratch folder");
}

void System::make_small(const std::string& name, uint64_t seed, bool raw) {
  std::mt19937_64 random(seed);
  testing::SafetensorsBuilder builder;
  const auto add = [&](const std::string& tensor, uint64_t rows, uint64_t cols) {
    builder.add_bf16(tensor, {rows, cols}, random_words(random, rows, cols));
  };
  for (int layer = 0; layer < 2; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    add(prefix + "self_attn.q_proj.weight", 512, 512);
    add(prefix + "self_attn.k_proj.weight", 128, 512);
    add(prefix + "self_attn.v_proj.weight", 128, 512);
    add(prefix + "self_attn.o_proj.weight", 512, 512);
    add(prefix + "mlp.gate_proj.weight", 1376, 512);
    add(prefix + "mlp.up_proj.weight", 1376, 512);
    add(prefix + "mlp.down_proj.weight", 512, 1376);
  }
  add("odd", 37, 129);
  add("lm_head.weight", 2001, 512);
  builder.add("norm.weight", "F32", {512}, std::string(4 * 512, '\x3f'));
  builder.write(daemon / name + "/model.safetensors");
  pack(daemon / name, daemon / (name + ".wpk"), raw);
}

void System::make_pattern(const std::string& name, const std::string& word) {
  std::string bytes;
  while (bytes.size() < 65'536) bytes += word;
  bytes.resize(65'536);
  testing::SafetensorsBuilder builder;
  builder.add("bytes", "U8", {bytes.size()}, bytes).write(daemon / name + "/model.safetensors");
  pack(daemon / name, daemon / (name + ".wpk"), true);
}

void System::make_big(const std::string& name, uint64_t mib) {
  testing::TestBundle options;
  options.layers = 1;
  options.cols = 8192;
  options.rows = mib * kMiB / (2 * options.cols);
  options.encoding = Encoding::kRaw;
  options.zeros = true;
  testing::make_bundle(daemon / (name + ".wpk"), options);
}

void System::damage(const std::string& name) {
  std::fstream file(daemon / (name + ".wpk"), std::ios::in | std::ios::out | std::ios::binary | std::ios::ate);
  const auto middle = static_cast<std::streamoff>(file.tellg()) / 2;
  file.seekg(middle);
  const auto byte = static_cast<char>(file.get() ^ 0x10);
  file.seekp(middle);
  file.put(byte);
  file.close();
  testing::require(file.good(), "damaging a bundle");
}

Result<ipc::ModelSummary> System::load(const std::string& model, const std::string& bundle, const std::string& transport) {
  RawPeer admin(daemon.control_socket());
  ipc::LoadRequest request;
  request.model = model;
  request.path = daemon / (bundle + ".wpk");
  request.transport = transport;
  auto reply = admin.get<ipc::LoadedReply>(std::move(request));
  if (!reply.ok()) return reply.status();
  return reply->model;
}

void System::must_load(const std::string& model, const std::string& transport) {
  const auto loaded = load(model, model, transport);
  if (!loaded.ok()) throw test_failure("loading " + model + ": " + loaded.status().to_string() + "\n" + daemon.log());
}

Result<ipc::UnloadedReply> System::unload(const std::string& model, uint32_t timeout_ms) {
  RawPeer admin(daemon.control_socket());
  return admin.get<ipc::UnloadedReply>(ipc::UnloadRequest{model, "", timeout_ms});
}

void System::must_unload(const std::string& model) {
  const auto unloaded = unload(model);
  if (!unloaded.ok()) throw test_failure("unloading " + model + ": " + unloaded.status().to_string());
  if (!unloaded->freed)
    throw test_failure("unloading " + model + ": not freed, " + std::to_string(unloaded->holders.size()) + " holders");
}

ipc::StatusReply System::status() {
  RawPeer admin(daemon.control_socket());
  auto reply = admin.get<ipc::StatusReply>(ipc::StatusRequest{});
  if (!reply.ok()) throw test_failure("status: " + reply.status().to_string());
  return *std::move(reply);
}

ipc::DeviceSummary System::device() {
  const ipc::StatusReply now = status();
  if (now.devices.empty()) throw test_failure("the daemon knows no device");
  return now.devices.front();
}

std::optional<ipc::ModelSummary> System::model(const std::string& name) {
  const ipc::StatusReply now = status();
  for (const ipc::ModelSummary& one : now.models) {
    if (one.name == name) return one;
  }
  return std::nullopt;
}

std::vector<ipc::LeaseSummary> System::leases() {
  RawPeer admin(daemon.control_socket());
  auto reply = admin.get<ipc::LeasesReply>(ipc::LeasesRequest{});
  if (!reply.ok()) throw test_failure("leases: " + reply.status().to_string());
  return std::move(reply->leases);
}

std::string System::verify(const std::string& model) {
  RawPeer admin(daemon.control_socket());
  const auto reply = admin.get<ipc::VerifiedReply>(ipc::VerifyRequest{model});
  if (!reply.ok()) return reply.status().to_string();
  if (reply->blocks == 0) return "no block was checked";
  return reply->bad_blocks.empty() ? "" : std::to_string(reply->bad_blocks.size()) + " bad blocks";
}

void System::wait_for_leases(size_t count) {
  wait_until(std::to_string(count) + " leases", [&] { return status().lease_count == count; });
}

void System::wait_for_no_loader() {
  wait_until("the loader's end", [&] { return daemon.children().empty(); });
}

uint64_t System::used_bytes() {
  const ipc::DeviceSummary now = device();
  return kGpu ? nvml_->used_bytes(now.uuid) : now.owned_bytes + now.loading_bytes;
}

void System::wait_for_used(uint64_t bytes, const std::string& what) {
  uint64_t now = 0;
  try {
    wait_until(what, [&] { return (now = used_bytes()) <= bytes; });
  } catch (const std::runtime_error& error) {
    throw test_failure(std::string(error.what()) + ": " + std::to_string(now / kMiB) + " MiB in use, at most " +
                       std::to_string(bytes / kMiB) + " expected");
  }
}

std::string System::check_traces(const std::string& checkpoint, const std::vector<std::string>& traces) {
  std::vector<std::string> words = {testing::program("trace_check", WEIGHTD_TRACE_CHECK), daemon / checkpoint};
  for (const std::string& trace : traces) words.push_back(scratch(trace));
  std::string output;
  const int status = run_program(words, &output);
  return status == 0 ? "" : "trace_check ended with " + std::to_string(status) + ": " + output;
}

RunningLoad::RunningLoad(System& system, const std::string& model, const std::string& bundle)
    : thread_([this, &system, model, bundle] {
        status_ = system.load(model, bundle).status();
        done_ = true;
      }) {}

RunningLoad::~RunningLoad() {
  if (thread_.joinable()) thread_.join();
}

Status RunningLoad::wait() {
  thread_.join();
  return status_;
}

}  // namespace weightd::e2e
