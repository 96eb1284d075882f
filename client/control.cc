// SPDX-License-Identifier: Apache-2.0
#include "weightd/control.h"

#include <errno.h>

#include <utility>

#include "base/text.h"
#include "client/rpc.h"

namespace weightd::control {
namespace {

using std::chrono::milliseconds;

Version version_of(const ipc::HelloReply& hello) {
  return {hello.build, hello.protocol_version, hello.backend, hello.pid, hello.backend_reason};
}

Model model_of(ipc::ModelSummary summary) {
  Model model;
  model.name = std::move(summary.name);
  model.generation = summary.generation;
  model.state = std::string(ipc::generation_state_name(summary.state));
  model.content_id = std::move(summary.content_id);
  model.tensors_id = std::move(summary.tensors_id);
  model.device = std::move(summary.device);
  model.transport = std::move(summary.transport);
  model.residency = std::move(summary.residency);
  model.source = std::move(summary.source);
  model.failure = std::move(summary.failure);
  model.logical_bytes = summary.logical_bytes;
  model.resident_bytes = summary.resident_bytes;
  model.tensor_count = summary.tensor_count;
  model.progress_bytes = summary.progress_bytes;
  model.lease_count = summary.lease_count;
  model.orphan_count = summary.orphan_count;
  for (ipc::EncodingSum& sum : summary.encodings) {
    model.encodings.push_back({std::move(sum.encoding), sum.tensors, sum.logical_bytes, sum.resident_bytes});
  }
  return model;
}

Device device_of(ipc::DeviceSummary summary) {
  Device device;
  device.uuid = std::move(summary.uuid);
  device.name = std::move(summary.name);
  device.total_bytes = summary.total_bytes;
  device.budget_bytes = summary.budget_bytes;
  device.owned_bytes = summary.owned_bytes;
  device.leased_bytes = summary.leased_bytes;
  device.draining_bytes = summary.draining_bytes;
  device.orphan_bytes = summary.orphan_bytes;
  device.loading_bytes = summary.loading_bytes;
  device.free_bytes = summary.free_bytes;
  device.fd_only_bytes = summary.fd_only_bytes;
  return device;
}

std::vector<Lease> leases_of(std::vector<ipc::LeaseSummary> summaries) {
  std::vector<Lease> leases;
  leases.reserve(summaries.size());
  for (ipc::LeaseSummary& summary : summaries) {
    Lease lease;
    lease.id = summary.id;
    lease.model = std::move(summary.model);
    lease.generation = summary.generation;
    lease.content_id = std::move(summary.content_id);
    lease.device = std::move(summary.device);
    lease.command = std::move(summary.command);
    lease.pid = summary.pid;
    lease.uid = summary.uid;
    lease.age_ms = summary.age_ms;
    lease.bytes = summary.bytes;
    lease.orphan = summary.orphan;
    leases.push_back(std::move(lease));
  }
  return leases;
}

DaemonStatus status_of(ipc::StatusReply reply) {
  DaemonStatus status;
  status.version = version_of(reply.version);
  status.uptime_ms = reply.uptime_ms;
  status.rss_bytes = reply.rss_bytes;
  status.session_count = reply.session_count;
  status.lease_count = reply.lease_count;
  status.fd_count = reply.fd_count;
  for (ipc::DeviceSummary& device : reply.devices) status.devices.push_back(device_of(std::move(device)));
  for (ipc::ModelSummary& model : reply.models) status.models.push_back(model_of(std::move(model)));
  return status;
}

Gpu gpu_of(ipc::GpuSummary summary) {
  Gpu gpu;
  gpu.uuid = std::move(summary.uuid);
  gpu.name = std::move(summary.name);
  gpu.problem = std::move(summary.problem);
  gpu.total_bytes = summary.total_bytes;
  gpu.used_bytes = summary.used_bytes;
  gpu.free_bytes = summary.free_bytes;
  gpu.nvml_known = summary.nvml_known;
  gpu.persistence = summary.persistence;
  return gpu;
}

std::string level_name(ipc::CheckSummary::Level level) {
  switch (level) {
    case ipc::CheckSummary::Level::kGood:
      return "good";
    case ipc::CheckSummary::Level::kWarning:
      return "warning";
    case ipc::CheckSummary::Level::kFailure:
      return "failure";
  }
  return "failure";
}

/// How long to wait for the answer to something that was given `timeout`: a little longer, since the daemon answers at that time.
/// Without one the daemon's own limits apply, and a daemon that ends is noticed in any case.
milliseconds answer_limit(milliseconds timeout) {
  constexpr milliseconds kMargin{5'000};
  return timeout > milliseconds{0} ? timeout + kMargin : milliseconds::max();
}

}  // namespace

struct Client::State {
  std::unique_ptr<detail::Rpc> rpc;
  milliseconds timeout;

  template <typename Reply>
  Result<Reply> ask(const detail::RequestBody& body, milliseconds limit) {
    if (rpc->left_home()) return Status::forked("this control client belongs to the parent of this process; connect again here");
    WEIGHTD_ASSIGN_OR_RETURN(detail::Rpc::Reply reply, rpc->call(body, detail::deadline_in(limit)));
    rpc->events().clear();
    if (auto* expected = std::get_if<Reply>(&reply.body)) return std::move(*expected);
    return Status::invalid_argument("the daemon's answer is of another kind than the call");
  }
};

Client::Client(std::unique_ptr<State> state) : state_(std::move(state)) {}
Client::Client(Client&&) noexcept = default;
Client& Client::operator=(Client&&) noexcept = default;
Client::~Client() = default;

Result<Client> Client::connect(const Options& options) {
  const std::string path = detail::socket_path_or(options.socket_path, "WEIGHTD_CONTROL_SOCKET", "/run/weightd/control.sock");
  auto state = std::make_unique<State>();
  state->timeout = options.timeout;
  WEIGHTD_ASSIGN_OR_RETURN(state->rpc,
                           detail::Rpc::open(path, ipc::bounded_text(program_invocation_short_name, ipc::kMaxModelNameBytes),
                                             detail::deadline_in(options.timeout)));
  return Client(std::move(state));
}

Result<Version> Client::version() {
  WEIGHTD_ASSIGN_OR_RETURN(const ipc::VersionReply reply, state_->ask<ipc::VersionReply>(ipc::VersionRequest{}, state_->timeout));
  return version_of(reply.version);
}

Result<DaemonStatus> Client::status() {
  WEIGHTD_ASSIGN_OR_RETURN(ipc::StatusReply reply, state_->ask<ipc::StatusReply>(ipc::StatusRequest{}, state_->timeout));
  return status_of(std::move(reply));
}

Result<Memory> Client::memory() {
  WEIGHTD_ASSIGN_OR_RETURN(ipc::MemoryReply reply, state_->ask<ipc::MemoryReply>(ipc::MemoryRequest{}, state_->timeout));
  Memory memory;
  memory.status = status_of(std::move(reply.status));
  memory.leases = leases_of(std::move(reply.leases));
  for (ipc::GpuSummary& gpu : reply.gpus) memory.gpus.push_back(gpu_of(std::move(gpu)));
  memory.problem = std::move(reply.problem);
  return memory;
}

Result<std::vector<Check>> Client::doctor() {
  WEIGHTD_ASSIGN_OR_RETURN(ipc::DoctorReply reply, state_->ask<ipc::DoctorReply>(ipc::DoctorRequest{}, state_->timeout));
  std::vector<Check> checks;
  for (ipc::CheckSummary& check : reply.checks) {
    checks.push_back({std::move(check.name), level_name(check.level), std::move(check.detail), std::move(check.advice)});
  }
  return checks;
}

Result<std::vector<Lease>> Client::leases() {
  WEIGHTD_ASSIGN_OR_RETURN(ipc::LeasesReply reply, state_->ask<ipc::LeasesReply>(ipc::LeasesRequest{}, state_->timeout));
  return leases_of(std::move(reply.leases));
}

Result<Model> Client::load(std::string_view model, std::string_view path, std::string_view device, milliseconds timeout,
                           std::string_view transport) {
  WEIGHTD_RETURN_IF_ERROR(detail::check_model_name(model));
  WEIGHTD_RETURN_IF_ERROR(detail::check_text("the path", path, ipc::kMaxTextBytes));
  WEIGHTD_RETURN_IF_ERROR(detail::check_text("the device", device));
  if (transport != "fd" && transport != "legacy") {
    return Status::invalid_argument("the transport '" + printable(transport, 80) + "' is neither fd nor legacy");
  }
  const ipc::LoadRequest request{std::string(model), std::string(path), std::string(device), detail::wire_milliseconds(timeout),
                                 std::string(transport)};
  WEIGHTD_ASSIGN_OR_RETURN(ipc::LoadedReply reply, state_->ask<ipc::LoadedReply>(request, answer_limit(timeout)));
  return model_of(std::move(reply.model));
}

Result<Unloaded> Client::unload(std::string_view model, std::string_view device, milliseconds timeout) {
  WEIGHTD_RETURN_IF_ERROR(detail::check_model_name(model));
  WEIGHTD_RETURN_IF_ERROR(detail::check_text("the device", device));
  const ipc::UnloadRequest request{std::string(model), std::string(device), detail::wire_milliseconds(timeout)};
  WEIGHTD_ASSIGN_OR_RETURN(ipc::UnloadedReply reply, state_->ask<ipc::UnloadedReply>(request, answer_limit(timeout)));
  return Unloaded{reply.freed, reply.bytes, leases_of(std::move(reply.holders))};
}

Result<Verified> Client::verify(std::string_view model, milliseconds timeout) {
  WEIGHTD_RETURN_IF_ERROR(detail::check_model_name(model));
  WEIGHTD_ASSIGN_OR_RETURN(ipc::VerifiedReply reply,
                           state_->ask<ipc::VerifiedReply>(ipc::VerifyRequest{std::string(model)},
                                                           timeout > milliseconds{0} ? timeout : milliseconds::max()));
  Verified verified;
  verified.blocks = reply.blocks;
  verified.bytes = reply.bytes;
  verified.elapsed_ms = reply.elapsed_ms;
  verified.bad_blocks = std::move(reply.bad_blocks);
  verified.bad_tensors = std::move(reply.bad_tensors);
  return verified;
}

}  // namespace weightd::control
