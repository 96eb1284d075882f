// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>

#include "daemon/config.h"

namespace weightd::daemon {
namespace {

using K = Option::Kind;
constexpr uint64_t kDayMs = uint64_t{24} * 3600 * 1000;
constexpr uint64_t kTiB = uint64_t{1} << 40;

// key, kind, member, min, max, choices, reloadable, help
constexpr std::array kOptions = {
    Option{"data_socket", K::kPath, &Config::data_socket, 0, 0, "", false, "socket for workers"},
    Option{"control_socket", K::kPath, &Config::control_socket, 0, 0, "", false, "socket for administrators"},
    Option{"data_socket_mode", K::kMode, &Config::data_socket_mode, 0, 0777, "", false, "mode of the data socket's file"},
    Option{"control_socket_mode", K::kMode, &Config::control_socket_mode, 0, 0777, "", false, "mode of the control socket's file"},
    Option{"data_socket_group", K::kText, &Config::data_socket_group, 0, 0, "", false,
           "group of the data socket's file; 'auto': weightd if it exists and may be given, '': unchanged"},
    Option{"control_socket_group", K::kText, &Config::control_socket_group, 0, 0, "", false,
           "group of the control socket's file; 'auto': weightd-admin if it exists and may be given, '': unchanged"},
    Option{"data_users", K::kNames, &Config::data_users, 0, 0, "", true,
           "users (names or ids, '*': all) who may lease, beside root and the daemon's own user"},
    Option{"data_groups", K::kNames, &Config::data_groups, 0, 0, "", true,
           "groups whose members may lease; empty: weightd and weightd-admin where they exist"},
    Option{"control_users", K::kNames, &Config::control_users, 0, 0, "", true,
           "users who may administer, beside root and the daemon's own user"},
    Option{"control_groups", K::kNames, &Config::control_groups, 0, 0, "", true,
           "groups whose members may administer; empty: weightd-admin where it exists"},
    Option{"model_folders", K::kPaths, &Config::model_folders, 0, 0, "", true, "folders that 'load' may open bundles in"},
    Option{"allow_any_path", K::kFlag, &Config::allow_any_path, 0, 0, "", true,
           "root and the daemon's own user may load from anywhere"},
    Option{"backend", K::kChoice, &Config::backend, 0, 0, "auto|host|cuda", false,
           "where weights are resident; auto: on the GPUs if one is usable, otherwise host; cuda: without a usable GPU the start "
           "fails"},
    Option{"budget_bytes", K::kBytes, &Config::budget_bytes, 0, 1024 * kTiB, "", true,
           "memory for weights on each device; 0: on a GPU all but 1 GiB, on the host 80 % of what is available at the start"},
    Option{"chunk_bytes", K::kBytes, &Config::chunk_bytes, uint64_t{2} << 20, kTiB, "", true,
           "most bytes of one chunk, a multiple of 2 MiB"},
    Option{"ready_after", K::kChoice, &Config::ready_after, 0, 0, "socket|models", false,
           "readiness is told after the sockets listen, or after the [[model]] entries were loaded or failed"},
    Option{"loader_path", K::kPath, &Config::loader_path, 0, 0, "", true,
           "weightd-loader; '': beside this program, else in the libexec folder"},
    Option{"loader_threads", K::kCount, &Config::loader_threads, 0, 4096, "", true, "threads of a loader; 0: one per core"},
    Option{"load_stall_ms", K::kCount, &Config::load_stall_ms, 100, kDayMs, "", true,
           "a load or verification without any progress for so long fails"},
    Option{"max_jobs", K::kCount, &Config::max_jobs, 1, 64, "", true, "loaders that run at once; further jobs wait"},
    Option{"probe_timeout_ms", K::kCount, &Config::probe_timeout_ms, 100, kDayMs, "", false,
           "how long the start waits for what a loader finds out about the GPUs"},
    Option{"nvml_timeout_ms", K::kCount, &Config::nvml_timeout_ms, 10, kDayMs, "", true,
           "how long 'memory', 'doctor' and the admission of a load wait for what the driver says of the GPUs"},
    Option{"max_sessions", K::kCount, &Config::max_sessions, 1, 1'000'000, "", true, "connections per socket"},
    Option{"max_requests_in_flight", K::kCount, &Config::max_requests_in_flight, 1, 65'536, "", true,
           "unanswered requests per connection; beyond it nothing is read"},
    Option{"max_request_bytes", K::kBytes, &Config::max_request_bytes, 1024, uint64_t{64} << 20, "", false, "size of one request"},
    Option{"max_queued_bytes", K::kBytes, &Config::max_queued_bytes, 65'536, uint64_t{1} << 30, "", false,
           "unsent replies per connection; beyond it the connection is closed"},
    Option{"max_leases_per_session", K::kCount, &Config::max_leases_per_session, 1, 1'000'000, "", false, "leases per connection"},
    Option{"message_deadline_ms", K::kCount, &Config::message_deadline_ms, 10, kDayMs, "", true,
           "a message must be complete so long after its first byte, and the first one so long after the connection"},
    Option{"write_deadline_ms", K::kCount, &Config::write_deadline_ms, 10, kDayMs, "", true,
           "a peer that does not read its replies for so long is disconnected"},
    Option{"drain_timeout_ms", K::kCount, &Config::drain_timeout_ms, 0, kDayMs, "", true,
           "how long an unload without a time limit of its own waits for the last lease"},
    Option{"log_level", K::kChoice, &Config::log_level, 0, 0, "debug|info|warning|error", true, "the least that is logged"},
    Option{"log_target", K::kPath, &Config::log_target, 0, 0, "", false, "'stderr', or a file (opened again on SIGHUP)"},
};

}  // namespace

std::span<const Option> options() { return kOptions; }

const Option* find_option(std::string_view key) {
  const auto it = std::find_if(kOptions.begin(), kOptions.end(), [&](const Option& option) { return option.key == key; });
  return it == kOptions.end() ? nullptr : &*it;
}

}  // namespace weightd::daemon
