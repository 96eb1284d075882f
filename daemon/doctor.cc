// SPDX-License-Identifier: Apache-2.0
#include "daemon/doctor.h"

#include <dirent.h>
#include <grp.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <utility>

#include "base/text.h"

namespace weightd::daemon {
namespace {

using Level = ipc::CheckSummary::Level;
using Checks = std::vector<ipc::CheckSummary>;

constexpr uint64_t kContextBytes = uint64_t{640} << 20;    // of GPU memory for each process that computes there
constexpr uint64_t kUnexplainedBytes = uint64_t{2} << 30;  // beyond this somebody should look
constexpr uint64_t kDescriptorsOfOurOwn = 64;
constexpr uint64_t kDescriptorsPerSession = 2;  // socket, pidfd
constexpr uint32_t kWritableByOthers = 0002;

void add(Checks& checks, std::string name, Level level, std::string detail, std::string advice = {}) {
  checks.push_back({std::move(name), level, ipc::bounded_text(detail), std::move(advice)});
}

std::string gpu_name(const ipc::GpuSummary& gpu) { return printable(gpu.uuid, 80); }

const ipc::GpuSummary* find_gpu(const Result<ipc::ProbeReply>& probe, const std::string& uuid) {
  if (!probe.ok()) return nullptr;
  const auto it = std::find_if(probe->gpus.begin(), probe->gpus.end(), [&](const auto& gpu) { return gpu.uuid == uuid; });
  return it == probe->gpus.end() ? nullptr : &*it;
}

void check_backend(const DoctorFacts& facts, Checks& checks) {
  std::string detail = facts.devices.backend + ", " + std::to_string(facts.devices.devices.size()) +
                       (facts.devices.devices.size() == 1 ? " device" : " devices");
  if (!facts.devices.why.empty()) detail += " (" + facts.devices.why + ")";
  if (!facts.devices.cuda() && facts.config.backend == "auto") {
    return add(checks, "backend", Level::kWarning, detail,
               "make a GPU usable and start weightd again; or say backend = \"host\" when none is meant");
  }
  add(checks, "backend", Level::kGood, detail);
}

void check_loader(const DoctorFacts& facts, Checks& checks) {
  if (!facts.probe) return add(checks, "loader", Level::kWarning, "it was not asked", "ask again: the daemon was busy");
  const Status status = facts.probe->status();
  if (status.ok()) return add(checks, "loader", Level::kGood, printable(facts.config.loader_path) + " starts and answers");
  const bool slow = status.code() == StatusCode::kDeadlineExceeded || status.code() == StatusCode::kUnavailable;
  add(checks, "loader", Level::kFailure, printable(facts.config.loader_path) + ": " + status.message(),
      slow ? "the GPU driver hangs or is slow: dmesg and nvidia-smi tell more; nvml_timeout_ms gives it more time"
           : "check that loader_path names the weightd-loader of this release and that it runs");
}

void check_driver(const DoctorFacts& facts, Checks& checks) {
  if (!facts.probe || !facts.probe->ok()) return;
  const ipc::ProbeReply& probe = **facts.probe;
  if (probe.cuda_version == 0) {
    return add(checks, "driver", facts.devices.cuda() ? Level::kFailure : Level::kWarning,
               probe.problem.empty() ? "no CUDA driver" : printable(probe.problem, 400),
               "install the NVIDIA driver, and give the service access to /dev/nvidia*");
  }
  const std::string cuda = std::to_string(probe.cuda_version / 1000) + "." + std::to_string(probe.cuda_version % 1000 / 10);
  add(checks, "driver", Level::kGood,
      (probe.driver_version.empty() ? "unknown version" : printable(probe.driver_version, 80)) + ", CUDA " + cuda);
  if (!probe.nvml_problem.empty()) {
    add(checks, "nvml", Level::kWarning, printable(probe.nvml_problem, 400),
        "memory of other processes cannot be seen: libnvidia-ml.so.1 of the driver is needed");
  } else {
    add(checks, "nvml", Level::kGood, "answers");
  }
}

void check_capabilities(const DoctorFacts& facts, Checks& checks) {
  for (const ipc::GpuSummary& gpu : facts.devices.probe.gpus) {
    const std::string what = gpu_name(gpu) + " " + printable(gpu.name, 80) + ", compute " + std::to_string(gpu.compute_major) +
                             "." + std::to_string(gpu.compute_minor) + ", " + human_bytes(gpu.total_bytes);
    if (!gpu.problem.empty()) {
      add(checks, "gpu", Level::kFailure, what + ": " + printable(gpu.problem, 400),
          "it is not served; start weightd again when it is repaired");
      continue;
    }
    add(checks, "gpu", Level::kGood, what);
    const std::string problem = fd_transport_problem(gpu);
    if (!problem.empty()) {
      add(checks, "transport", Level::kWarning, gpu_name(gpu) + ": " + problem, "load with --transport legacy on this GPU");
    } else if (gpu.read_only_map < 0) {
      add(checks, "transport", Level::kWarning, gpu_name(gpu) + ": VMM and fd handles, a read-only mapping was not tried",
          "start weightd again to have it tried");
    } else {
      add(checks, "transport", Level::kGood, gpu_name(gpu) + ": VMM, fd handles, read-only mapping");
    }
  }
}

void check_persistence(const DoctorFacts& facts, Checks& checks) {
  for (const Ledger::Device& device : facts.devices.devices) {
    const ipc::GpuSummary* gpu = facts.devices.gpu(device.uuid);
    if (gpu == nullptr) continue;
    const auto held = facts.held_gpus.find(device.uuid);
    const bool holds = held != facts.held_gpus.end() && held->second.ok();
    if (gpu->persistence == 1 || holds) {
      add(checks, "persistence", Level::kGood,
          gpu_name(*gpu) + ": " + (gpu->persistence == 1 ? "persistence mode is on" : "persistence mode is not on") +
              (holds ? ", the device file is held open" : ""));
      continue;
    }
    add(checks, "persistence", Level::kWarning,
        gpu_name(*gpu) + ": persistence mode is " + (gpu->persistence == 0 ? "off" : "unknown") +
            " and the device file is not held" +
            (held == facts.held_gpus.end() ? std::string() : " (" + held->second.message() + ")"),
        "weights may be lost when no process uses the GPU: run nvidia-persistenced, or let the service open /dev/nvidia*");
  }
}

/// What the driver says is in use against what the ledger explains. Lease holders have memory of their own that only they know, so
/// only a GPU without any is judged.
void check_memory(const DoctorFacts& facts, Checks& checks) {
  if (!facts.probe) return;
  for (const ipc::DeviceSummary& device : facts.ledger) {
    const ipc::GpuSummary* gpu = find_gpu(*facts.probe, device.uuid);
    if (gpu == nullptr || !gpu->nvml_known) continue;
    const auto contexts = facts.contexts.find(device.uuid);
    const uint64_t context_bytes = (contexts == facts.contexts.end() ? 0 : contexts->second) * kContextBytes;
    const uint64_t ours = device.owned_bytes + device.loading_bytes;
    const std::string arithmetic = gpu_name(*gpu) + ": " + human_bytes(gpu->used_bytes) + " used, " + human_bytes(ours) +
                                   " of it weights, about " + human_bytes(context_bytes) + " contexts";
    if (gpu->used_bytes < device.owned_bytes) {
      add(checks, "memory", Level::kFailure, arithmetic + ": the ledger counts more than the GPU holds",
          "verify the models, and restart weightd; please report this");
    } else if (gpu->used_bytes > ours + context_bytes + kUnexplainedBytes && device.leased_bytes == 0) {
      add(checks, "memory", Level::kWarning,
          arithmetic + "; " + human_bytes(gpu->used_bytes - ours - context_bytes) + " belong to others",
          "nvidia-smi lists processes; what none of them explains is held by descriptors, or waits for a reset of the GPU");
    } else {
      add(checks, "memory", Level::kGood, arithmetic);
    }
  }
}

void check_descriptors(const DoctorFacts& facts, Checks& checks) {
  uint64_t chunks = 0;
  for (const ipc::DeviceSummary& device : facts.ledger) chunks += device.budget_bytes / facts.config.chunk_bytes + 1;
  // Every chunk is held once and is given away as a copy.
  const uint64_t wanted = 2 * chunks + 2 * facts.config.max_sessions * kDescriptorsPerSession + kDescriptorsOfOurOwn;
  const std::string detail = std::to_string(facts.fd_count) + " open, limit " + std::to_string(facts.fd_limit) + ", " +
                             std::to_string(wanted) + " for a full budget and all sessions";
  const std::string advice = "raise LimitNOFILE= of the service, or chunk_bytes";
  if (facts.fd_limit < facts.fd_count + facts.largest_model_chunks + kDescriptorsOfOurOwn)
    add(checks, "descriptors", Level::kFailure, detail, advice);
  else if (facts.fd_limit < wanted)
    add(checks, "descriptors", Level::kWarning, detail, advice);
  else
    add(checks, "descriptors", Level::kGood, detail);
}

void check_socket(const std::string& name, const FileFacts::Socket& socket, bool others_allowed, Checks& checks) {
  if (!socket.status.ok()) {
    return add(checks, name, Level::kFailure, socket.status.message(), "restart weightd: somebody removed or replaced its socket");
  }
  std::array<char, 8> mode{};
  std::snprintf(mode.data(), mode.size(), "%04o", socket.mode & 07777U);
  const std::string detail = printable(socket.path) + ", mode " + mode.data() + ", group " + printable(socket.group, 80);
  if (!others_allowed && (socket.mode & kWritableByOthers) != 0) {
    return add(checks, name, Level::kWarning, detail, "everybody may connect: control_socket_mode should be 0660");
  }
  add(checks, name, Level::kGood, detail);
}

void check_files(const DoctorFacts& facts, Checks& checks) {
  if (!facts.files) {
    return add(checks, "model folders", Level::kWarning, "a file system did not answer in time", "look for a mount that hangs");
  }
  check_socket("data socket", facts.files->data, true, checks);
  check_socket("control socket", facts.files->control, false, checks);
  if (facts.files->model_folders.empty() && !facts.config.allow_any_path) {
    return add(checks, "model folders", Level::kWarning, "none: 'load' may open nothing", "set model_folders");
  }
  bool good = true;
  for (const FileFacts::Folder& folder : facts.files->model_folders) {
    if (folder.readable.ok()) continue;
    good = false;
    add(checks, "model folders", Level::kFailure, folder.readable.message(), "the daemon's user must be able to read it");
  }
  if (good) {
    const size_t count = facts.files->model_folders.size();
    add(checks, "model folders", Level::kGood, std::to_string(count) + (count == 1 ? " folder" : " folders") + " can be read");
  }
}

void check_models(const DoctorFacts& facts, Checks& checks) {
  for (const ipc::ModelSummary& model : facts.models) {
    const std::string name = "'" + printable(model.name, 80) + "' on " + printable(model.device, 80);
    if (model.state == ipc::GenerationState::kLost) {
      add(checks, "models", Level::kFailure, name + " is lost: " + printable(model.failure, 400), "unload it and load it again");
    } else if (model.state == ipc::GenerationState::kFailed) {
      add(checks, "models", Level::kWarning, name + " failed to load: " + printable(model.failure, 400),
          "load it again, or unload it to forget this");
    }
  }
}

FileFacts::Socket look_at_socket(const std::string& path) {
  FileFacts::Socket socket;
  socket.path = path;
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) {
    socket.status = status_from_errno(errno, printable(path));
    return socket;
  }
  if (!S_ISSOCK(info.st_mode)) socket.status = Status::failed_precondition(printable(path) + " is not a socket");
  socket.mode = info.st_mode & 07777U;
  group entry{};
  group* found = nullptr;
  std::array<char, 4096> buffer{};
  const bool known = ::getgrgid_r(info.st_gid, &entry, buffer.data(), buffer.size(), &found) == 0 && found != nullptr;
  socket.group = known ? entry.gr_name : std::to_string(info.st_gid);
  return socket;
}

FileFacts::Folder look_at_folder(const std::string& path) {
  DIR* folder = ::opendir(path.c_str());
  const int error = errno;
  if (folder == nullptr) return {path, status_from_errno(error, "model folder '" + printable(path) + "'")};
  ::closedir(folder);
  return {path, {}};
}

}  // namespace

FileFacts look_at_files(const Config& config) {
  FileFacts facts;
  facts.data = look_at_socket(config.data_socket);
  facts.control = look_at_socket(config.control_socket);
  for (const std::string& folder : config.model_folders) facts.model_folders.push_back(look_at_folder(folder));
  return facts;
}

std::vector<ipc::CheckSummary> diagnose(const DoctorFacts& facts) {
  Checks checks;
  check_backend(facts, checks);
  check_loader(facts, checks);
  if (facts.config.backend != "host") {
    check_driver(facts, checks);
    check_capabilities(facts, checks);
    check_persistence(facts, checks);
    check_memory(facts, checks);
  }
  check_descriptors(facts, checks);
  check_files(facts, checks);
  check_models(facts, checks);
  return checks;
}

}  // namespace weightd::daemon
