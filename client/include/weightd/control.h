// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "weightd/status.h"

/// What an administrator's program asks the daemon; weightctl is written on it. Blocking calls, one at a time (not thread-safe), no
/// thread, no reconnect: after kUnavailable connect again. kForked in a forked child.
namespace weightd::control {

struct Options {
  /// Control socket; empty: $WEIGHTD_CONTROL_SOCKET, or /run/weightd/control.sock.
  std::string socket_path;
  std::chrono::milliseconds timeout{10'000};  // each call, unless it takes its own
};

struct Version {
  std::string build;
  uint16_t protocol_version = 0;
  std::string backend;
  int32_t pid = 0;
  std::string backend_reason;  // in a status: why "auto" chose the backend; else empty
};
struct EncodingSum {
  std::string encoding;  // "f12", "raw"
  uint64_t tensors = 0, logical_bytes = 0, resident_bytes = 0;
};
struct Model {
  std::string name;
  uint64_t generation = 0;
  std::string state, content_id, tensors_id, device, transport, residency, source, failure;
  uint64_t logical_bytes = 0, resident_bytes = 0, tensor_count = 0, progress_bytes = 0;
  uint32_t lease_count = 0, orphan_count = 0;
  std::vector<EncodingSum> encodings;
};
struct Device {
  std::string uuid, name;
  uint64_t total_bytes = 0, budget_bytes = 0, owned_bytes = 0, leased_bytes = 0, draining_bytes = 0, orphan_bytes = 0,
           loading_bytes = 0, free_bytes = 0,
           fd_only_bytes = 0;  // owned, and kept by the daemon alone: no lease
};
struct Lease {
  uint64_t id = 0;
  std::string model;
  uint64_t generation = 0;
  std::string content_id, device, command;
  int32_t pid = 0;  // 0: unknown
  uint32_t uid = 0;
  uint64_t age_ms = 0, bytes = 0;
  bool orphan = false;
};
struct DaemonStatus {
  Version version;
  uint64_t uptime_ms = 0, rss_bytes = 0;
  uint32_t session_count = 0, lease_count = 0, fd_count = 0;
  std::vector<Device> devices;
  std::vector<Model> models;
};
/// What the driver says of a GPU that the daemon serves.
struct Gpu {
  std::string uuid, name, problem;
  uint64_t total_bytes = 0, used_bytes = 0, free_bytes = 0;  // used and free: by all processes; valid if nvml_known
  bool nvml_known = false;
  int persistence = -1;  // 1 on, 0 off, -1 unknown
};
struct Memory {
  DaemonStatus status;
  std::vector<Lease> leases;
  std::vector<Gpu> gpus;
  std::string problem;  // why gpus are missing or incomplete
};
struct Check {
  std::string name, level;     // "good", "warning", "failure"
  std::string detail, advice;  // what was found; what to do, empty when good
};
struct Unloaded {
  bool freed = false;  // false: still draining; `holders` says who keeps it
  uint64_t bytes = 0;
  std::vector<Lease> holders;
};
struct Verified {
  uint64_t blocks = 0, bytes = 0, elapsed_ms = 0;
  std::vector<uint64_t> bad_blocks;
  std::vector<std::string> bad_tensors;
};

/// `timeout` of load, unload and verify replaces Options::timeout; 0 leaves it to the daemon's own limits, however long they are.
class Client {
 public:
  [[nodiscard]] static Result<Client> connect(const Options& options = {});
  Client(Client&&) noexcept;
  Client& operator=(Client&&) noexcept;
  ~Client();

  [[nodiscard]] Result<Version> version();
  [[nodiscard]] Result<DaemonStatus> status();
  [[nodiscard]] Result<std::vector<Lease>> leases();
  /// The ledger with what the driver says beside it, each from the same moment.
  [[nodiscard]] Result<Memory> memory();
  /// What the daemon finds when it looks at its surroundings.
  [[nodiscard]] Result<std::vector<Check>> doctor();
  /// Loads the bundle at `path` (absolute) as `model` and returns when it is published. The same content under a name that has it
  /// already: success at once. Another content, or another transport, under a published name: kAlreadyExists. `transport`: "fd" or
  /// "legacy" (GPUs only, kUnsupported elsewhere).
  [[nodiscard]] Result<Model> load(std::string_view model, std::string_view path, std::string_view device,
                                   std::chrono::milliseconds timeout, std::string_view transport = "fd");
  /// Takes the model out of service; returns when it is freed, or after `timeout` with who holds it (it goes on draining).
  [[nodiscard]] Result<Unloaded> unload(std::string_view model, std::string_view device, std::chrono::milliseconds timeout);
  /// Recomputes the block hashes of the resident bytes.
  [[nodiscard]] Result<Verified> verify(std::string_view model, std::chrono::milliseconds timeout);

 private:
  struct State;
  explicit Client(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace weightd::control
