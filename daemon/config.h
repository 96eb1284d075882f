// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "weightd/status.h"

/// The daemon's configuration: built-in values < file (TOML) < environment (WEIGHTD_<KEY>) < command line (--<key>), key by key
/// (CO-134). One table describes every option; the parser, --help, --print-config and the manual read it.
namespace weightd::daemon {

struct ModelEntry {
  std::string name, path, device;  // path is absolute here; device may be empty: the only one
  std::string transport = "fd";    // or "legacy"
  bool operator==(const ModelEntry&) const = default;
};

struct Config {
  std::string data_socket = "/run/weightd/weightd.sock";
  std::string control_socket = "/run/weightd/control.sock";
  uint64_t data_socket_mode = 0660;
  uint64_t control_socket_mode = 0660;
  std::string data_socket_group = "auto";
  std::string control_socket_group = "auto";
  std::vector<std::string> data_users;
  std::vector<std::string> data_groups;
  std::vector<std::string> control_users;
  std::vector<std::string> control_groups;

  std::vector<std::string> model_folders;
  bool allow_any_path = false;

  std::string backend = "auto";
  uint64_t budget_bytes = 0;
  uint64_t chunk_bytes = uint64_t{1} << 30;
  std::string ready_after = "socket";

  std::string loader_path;
  uint64_t loader_threads = 0;
  uint64_t load_stall_ms = 60'000;
  uint64_t max_jobs = 2;
  uint64_t probe_timeout_ms = 10'000;
  uint64_t nvml_timeout_ms = 2'000;

  uint64_t max_sessions = 1024;
  uint64_t max_requests_in_flight = 32;
  uint64_t max_request_bytes = 1U << 20;
  uint64_t max_queued_bytes = 16U << 20;
  uint64_t max_leases_per_session = 1024;
  uint64_t message_deadline_ms = 5'000;
  uint64_t write_deadline_ms = 5'000;
  uint64_t drain_timeout_ms = 30'000;

  std::string log_level = "info";
  std::string log_target = "stderr";

  std::vector<ModelEntry> models;
};

struct Option {
  enum class Kind { kText, kChoice, kPath, kFlag, kCount, kBytes, kMode, kNames, kPaths };
  using Member = std::variant<std::string Config::*, bool Config::*, uint64_t Config::*, std::vector<std::string> Config::*>;
  std::string_view key;
  Kind kind{};
  Member member;
  uint64_t min = 0, max = 0;  // kCount, kBytes, kMode
  std::string_view choices;   // kChoice: "a|b|c"
  bool reloadable = false;    // SIGHUP applies it; otherwise it needs a restart
  std::string_view help;      // one line
};
[[nodiscard]] std::span<const Option> options();
[[nodiscard]] const Option* find_option(std::string_view key);

/// A configuration in force: the values, and where each came from ("built-in", "weightd.toml:3", "environment", "command line").
struct EffectiveConfig {
  Config values;
  std::vector<std::string> origins;  // in the order of options()
  std::string file;                  // the file that was read; empty: none
};

struct ConfigSources {
  std::optional<std::string> file;                                // must exist; nullopt: kDefaultConfigFile if that exists
  std::function<const char*(const std::string&)> environment;     // value of a variable or nullptr; may be empty
  std::vector<std::pair<std::string, std::string>> command_line;  // key, value as text
};
inline constexpr std::string_view kDefaultConfigFile = "/etc/weightd/weightd.toml";
inline constexpr uint64_t kMaxConfigBytes = uint64_t{1} << 20;

/// kInvalidArgument, kNotFound or kIo: one line with file, line, key and rule; for an unknown key also the nearest known one
/// (CO-132). Relative paths are taken from the folder of the file, from the working directory in the environment and on the command
/// line (CO-136).
[[nodiscard]] Result<EffectiveConfig> load_config(const ConfigSources& sources);

/// The file layer alone, from memory; `file_name` (absolute) is for messages and relative paths. On failure `config` is
/// unspecified.
Status parse_config(std::string_view text, const std::string& file_name, EffectiveConfig& config);

/// The configuration as a TOML text that load_config accepts, with the origin of each value as a comment.
[[nodiscard]] std::string print_config(const EffectiveConfig& config);
/// The value of one option as TOML.
[[nodiscard]] std::string print_value(const Config& config, const Option& option);

/// "6GiB", "512 MiB", "4096": bytes; units B, KiB, MiB, GiB, TiB.
[[nodiscard]] Result<uint64_t> parse_bytes(std::string_view text);

/// Keys that differ, split by whether a running daemon can take them over. "model" stands for the [[model]] entries.
struct ConfigChanges {
  std::vector<std::string> applied, need_restart;
};
[[nodiscard]] ConfigChanges compare_configs(const Config& running, const Config& wanted);

}  // namespace weightd::daemon
