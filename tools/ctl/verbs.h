// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tools/cli/output.h"
#include "tools/cli/program.h"
#include "weightd/control.h"
#include "weightd/status.h"

namespace weightd::tools {

// Each adds one verb of weightctl.
void add_status(cli::Program& program);
void add_models(cli::Program& program);
void add_load(cli::Program& program);
void add_unload(cli::Program& program);
void add_leases(cli::Program& program);
void add_verify(cli::Program& program);
void add_memory(cli::Program& program);
void add_doctor(cli::Program& program);
void add_version(cli::Program& program);

/// What every verb takes.
struct Connection {
  std::string socket;
  std::chrono::milliseconds timeout{10'000};
};

/// Adds --socket and --timeout. `connection->timeout` is the default at this moment and goes into the help.
void add_connection_options(cli::Verb& verb, Connection* connection);

/// Most time for the first answer when the call itself may take long.
inline constexpr std::chrono::milliseconds kConnectTimeout{10'000};
/// Connects within the time limit. On failure the hint says what to look at.
[[nodiscard]] Result<control::Client> connect(const Connection& connection, cli::Output& output);

/// For a call that has its own, long time limit: a daemon that does not even say hello is given kConnectTimeout at most.
[[nodiscard]] Result<control::Client> connect_for_long_call(const Connection& connection, cli::Output& output);

/// Sets the hint that fits a failure of any call, and passes the failure on.
[[nodiscard]] Status advise(cli::Output& output, Status status);

// How both kinds of output show what the daemon says.
[[nodiscard]] std::string models_table(const std::vector<control::Model>& models);
[[nodiscard]] cli::Json model_json(const control::Model& model);
[[nodiscard]] std::string leases_table(const std::vector<control::Lease>& leases);
[[nodiscard]] cli::Json leases_json(const std::vector<control::Lease>& leases);
[[nodiscard]] cli::Json device_json(const control::Device& device);
[[nodiscard]] cli::Json version_json(const control::Version& version);

}  // namespace weightd::tools
