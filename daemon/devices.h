// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "base/fd.h"
#include "daemon/config.h"
#include "daemon/ledger.h"
#include "ipc/messages.h"
#include "weightd/status.h"

/// Which devices this daemon serves: every usable GPU, or the host's memory.
namespace weightd::daemon {

inline constexpr std::string_view kHostDevice = "host";
/// What a budget of 0 leaves free on a GPU, for the contexts of loaders and workers (about half a GiB each).
inline constexpr uint64_t kGpuHeadroomBytes = uint64_t{1} << 30;

struct DeviceSet {
  std::string backend = "host";  // or "cuda"
  std::string why;               // "auto: no usable GPU: ...", "auto: 2 usable GPUs"; empty when there was no choice
  std::vector<Ledger::Device> devices;
  ipc::ProbeReply probe;  // of the start; empty when nothing was asked, or nothing answered
  Status probe_failure;

  [[nodiscard]] bool cuda() const { return backend == "cuda"; }
  [[nodiscard]] const ipc::GpuSummary* gpu(const std::string& uuid) const;  // as the start found it; nullptr: none
};

/// Asks a loader about the GPUs, unless the backend is host, and decides. Waits for at most probe_timeout_ms. kUnavailable: the
/// backend is cuda and there is no usable GPU.
[[nodiscard]] Result<DeviceSet> find_devices(const Config& config);
/// The decision alone; `probe` is not looked at when the backend is host.
[[nodiscard]] Result<DeviceSet> choose_devices(const Config& config, const Result<ipc::ProbeReply>& probe);

/// Bytes for weights on a device: the configured budget, never more than a GPU has; with 0 what is left of `device` by rule.
[[nodiscard]] uint64_t gpu_budget(const Config& config, uint64_t total_bytes);

/// Why a GPU cannot lend chunks as descriptors that are mapped read-only; empty: it can.
[[nodiscard]] std::string fd_transport_problem(const ipc::GpuSummary& gpu);
/// kUnsupported: the device cannot serve this transport ("fd" or "legacy").
Status check_transport(const DeviceSet& devices, const std::string& uuid, const std::string& transport);

/// An open descriptor of the GPU's device file: its device instance, and with it the memory behind chunk descriptors, lives as long
/// as some process holds one, also without persistence mode.
[[nodiscard]] Result<UniqueFd> hold_gpu(int32_t minor, const std::string& folder = "/dev");

}  // namespace weightd::daemon
