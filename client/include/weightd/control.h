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
};
struct Model {
  std::string name;
  uint64_t generation = 0;
  std::string state, content_id, tensors_id, device, transport, residency, source, failure;
  uint64_t logical_bytes = 0, resident_bytes = 0, tensor_count = 0, progress_bytes = 0;
  uint32_t lease_count = 0, orphan_count = 0;
};
struct Device {
  std::string uuid, name;
  uint64_t total_bytes = 0, budget_bytes = 0, owned_bytes = 0, leased_bytes = 0, draining_bytes = 0, orphan_bytes = 0,
           loading_bytes = 0, free_bytes = 0;
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
  /// Loads the bundle at `path` (absolute) as `model` and returns when it is published. The same content under a name that has it
  /// already: success at once. Another content under a published name: kAlreadyExists.
  [[nodiscard]] Result<Model> load(std::string_view model, std::string_view path, std::string_view device,
                                   std::chrono::milliseconds timeout);
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
