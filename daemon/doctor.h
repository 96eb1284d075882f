// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "daemon/config.h"
#include "daemon/devices.h"
#include "ipc/messages.h"
#include "weightd/status.h"

/// What `doctor` answers: facts in, judgements out. Only look_at_files() touches the system.
namespace weightd::daemon {

struct FileFacts {
  struct Socket {
    std::string path;
    Status status;  // not ok: it is not there, or no socket
    uint32_t mode = 0;
    std::string group;
  };
  struct Folder {
    std::string path;
    Status readable;
  };
  Socket data, control;
  std::vector<Folder> model_folders;
};
/// May wait for a slow file system: not for the event loop.
[[nodiscard]] FileFacts look_at_files(const Config& config);

struct DoctorFacts {
  Config config;
  DeviceSet devices;
  std::optional<Result<ipc::ProbeReply>> probe;  // asked now; nullopt: not asked
  std::optional<FileFacts> files;                // nullopt: not known in time
  std::map<std::string, Status> held_gpus;       // by UUID: whether the daemon holds the device file
  std::vector<ipc::DeviceSummary> ledger;
  std::vector<ipc::ModelSummary> models;
  std::map<std::string, uint64_t> contexts;  // by UUID: processes of ours and of lease holders that may have a context there
  uint64_t fd_limit = 0, fd_count = 0, largest_model_chunks = 0;
};

/// In the order in which a person would look. Names are fixed: backend, loader, driver, nvml, gpu, transport, persistence, memory,
/// descriptors, data socket, control socket, model folders, models.
[[nodiscard]] std::vector<ipc::CheckSummary> diagnose(const DoctorFacts& facts);

}  // namespace weightd::daemon
