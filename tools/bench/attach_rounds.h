// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "tools/bench/gpu_work.h"
#include "tools/cli/json.h"
#include "weightd/client.h"
#include "weightd/status.h"

/// How a worker starts, phase by phase.
namespace weightd::tools {

struct AttachPlan {
  std::string model, tensor, socket;  // tensor empty: the first coded one of the checkpoint
  std::string device;                 // "host" or a GPU's UUID; empty: asked of the daemon, the only one that has the model
  uint64_t rounds = 100;
  std::chrono::milliseconds timeout{10'000};
};

/// One phase, with its time in each round, in milliseconds.
struct AttachPhase {
  std::string name, meaning;
  std::vector<double> ms;
};

struct AttachReport {
  std::string tensor, device;
  uint64_t tensor_bytes = 0;
  uint64_t resident_bytes = 0;      // of the model
  std::vector<AttachPhase> phases;  // connect, acquire, lookup, decompress, release
  std::vector<double> usable_ms;    // acquire and lookup together: from the request to the first pointer that can be used
};

/// Each round is a fresh connection. On a GPU, `side` is that GPU, whose context is there already; null on the host.
[[nodiscard]] Result<AttachReport> measure_attach(const AttachPlan& plan, GpuSide* side);

/// The device that has the model, if it is one only. kNotFound: the daemon has no such model; kInvalidArgument: several have it.
[[nodiscard]] Result<std::string> device_of_model(const AttachPlan& plan);

[[nodiscard]] std::string phases_table(const AttachReport& report);
[[nodiscard]] cli::Json phases_json(const AttachReport& report);

}  // namespace weightd::tools
