// SPDX-License-Identifier: Apache-2.0
#include "daemon/devices.h"

#include <fcntl.h>

#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <cerrno>
#include <chrono>
#include <optional>
#include <utility>

#include "base/text.h"
#include "daemon/machine.h"
#include "daemon/prober.h"

namespace weightd::daemon {
namespace {

constexpr uint64_t kHostBudgetPercent = 80;

DeviceSet host_devices(const Config& config) {
  const HostMemory memory = host_memory();
  Ledger::Device device;
  device.uuid = kHostDevice;
  device.name = cpu_name();
  device.total_bytes = memory.total_bytes;
  device.budget_bytes = config.budget_bytes > 0 ? config.budget_bytes : memory.available_bytes / 100 * kHostBudgetPercent;
  DeviceSet set;
  set.devices.push_back(std::move(device));
  return set;
}

/// In one line why `probe` leaves us without a GPU.
std::string no_gpu_because(const Result<ipc::ProbeReply>& probe) {
  if (!probe.ok()) return "the loader could not tell: " + probe.status().message();
  if (!probe->problem.empty()) return printable(probe->problem, 400);
  std::string reasons;
  for (const ipc::GpuSummary& gpu : probe->gpus) {
    reasons += (reasons.empty() ? "" : "; ") + printable(gpu.name, 80) + " (" + printable(gpu.uuid, 80) +
               "): " + printable(gpu.problem, 200);
  }
  return reasons.empty() ? "the driver knows none" : reasons;
}

}  // namespace

const ipc::GpuSummary* DeviceSet::gpu(const std::string& uuid) const {
  const auto it = std::find_if(probe.gpus.begin(), probe.gpus.end(), [&](const auto& each) { return each.uuid == uuid; });
  return it == probe.gpus.end() ? nullptr : &*it;
}

uint64_t gpu_budget(const Config& config, uint64_t total_bytes) {
  if (config.budget_bytes > 0) return std::min(config.budget_bytes, total_bytes);
  return total_bytes > kGpuHeadroomBytes ? total_bytes - kGpuHeadroomBytes : 0;
}

Result<DeviceSet> choose_devices(const Config& config, const Result<ipc::ProbeReply>& probe) {
  if (config.backend == "host") return host_devices(config);
  DeviceSet set;
  if (probe.ok()) {
    for (const ipc::GpuSummary& gpu : probe->gpus) {
      // Two of the same identity could not be told apart in any request.
      const bool known = std::any_of(set.devices.begin(), set.devices.end(), [&](const auto& d) { return d.uuid == gpu.uuid; });
      if (!gpu.problem.empty() || gpu.uuid.empty() || known) continue;
      set.devices.push_back({gpu.uuid, gpu.name, gpu.total_bytes, gpu_budget(config, gpu.total_bytes)});
    }
  }
  if (set.devices.empty()) {
    const std::string reason = no_gpu_because(probe);
    if (config.backend == "cuda") return Status::unavailable("backend 'cuda': no usable GPU: " + reason);
    set = host_devices(config);
    set.why = "auto: no usable GPU: " + reason;
  } else {
    set.backend = "cuda";
    if (config.backend == "auto")
      set.why = "auto: " + std::to_string(set.devices.size()) + " usable GPU" + (set.devices.size() == 1 ? "" : "s");
  }
  if (probe.ok())
    set.probe = *probe;
  else
    set.probe_failure = probe.status();
  return set;
}

Result<DeviceSet> find_devices(const Config& config) {
  if (config.backend == "host") return choose_devices(config, ipc::ProbeReply{});
  boost::asio::io_context io{1};
  Prober prober(io);
  std::optional<Result<ipc::ProbeReply>> reply;
  prober.ask(config.loader_path, true, std::chrono::milliseconds(config.probe_timeout_ms),
             [&](const Result<ipc::ProbeReply>& answer) {
               reply.emplace(answer);
               io.stop();
             });
  io.run();
  return choose_devices(config, reply.value_or(Status::internal("the loader was not asked")));
}

std::string fd_transport_problem(const ipc::GpuSummary& gpu) {
  if (!gpu.vmm) return "it has no virtual memory management";
  if (!gpu.fd_handles) return "its memory cannot be exported as file descriptors";
  if (gpu.read_only_map == 0) return "exporting a chunk and mapping it with read access failed";
  return "";
}

Status check_transport(const DeviceSet& devices, const std::string& uuid, const std::string& transport) {
  if (!devices.cuda()) {
    if (transport == "fd") return {};
    return Status::unsupported("transport 'legacy' is for GPUs: the host's memory is lent as descriptors (transport 'fd')");
  }
  const ipc::GpuSummary* gpu = devices.gpu(uuid);
  if (transport == "legacy" || gpu == nullptr) return {};
  const std::string problem = fd_transport_problem(*gpu);
  if (problem.empty()) return {};
  return Status::unsupported("transport 'fd' is not possible on " + printable(uuid, 80) + ": " + problem +
                             "; use transport 'legacy'");
}

Result<UniqueFd> hold_gpu(int32_t minor, const std::string& folder) {
  if (minor < 0) return Status::not_found("the number of its device file is not known");
  const std::string path = folder + "/nvidia" + std::to_string(minor);
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK));
  if (!fd.valid()) return status_from_errno(errno, path);
  return fd;
}

}  // namespace weightd::daemon
