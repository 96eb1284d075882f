// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <string>

#include "base/text.h"
#include "tools/cli/table.h"
#include "tools/cli/units.h"
#include "tools/ctl/verbs.h"

namespace weightd::tools {
namespace {

using cli::counted;
using cli::Json;

std::string devices_table(const std::vector<control::Device>& devices) {
  cli::Table table;
  table.column("device").column("name");
  for (const char* title : {"budget", "owned", "leased", "draining", "orphans", "loading", "free"})
    table.column(title, cli::Align::kRight);
  for (const control::Device& device : devices) {
    table.row({device.uuid, device.name, human_bytes(device.budget_bytes), human_bytes(device.owned_bytes),
               human_bytes(device.leased_bytes), human_bytes(device.draining_bytes), human_bytes(device.orphan_bytes),
               human_bytes(device.loading_bytes), human_bytes(device.free_bytes)});
  }
  return table.to_string();
}

std::string backend_reason(const control::Version& version) {
  return version.backend_reason.empty() ? "" : " (" + printable(version.backend_reason, 400) + ")";
}

std::string status_text(const control::DaemonStatus& status) {
  return "weightd " + printable(status.version.build) + ", pid " + std::to_string(status.version.pid) + ", backend " +
         printable(status.version.backend) + backend_reason(status.version) + ", up " +
         cli::human_duration(std::chrono::milliseconds(status.uptime_ms)) + "\n" + human_bytes(status.rss_bytes) +
         " of memory of its own, " + counted(status.fd_count, "descriptor") + ", " + counted(status.session_count, "session") +
         ", " + counted(status.lease_count, "lease") + "\n\n" + devices_table(status.devices) + "\n" + models_table(status.models);
}

Json status_json(const control::DaemonStatus& status) {
  Json devices = Json::array();
  for (const control::Device& device : status.devices) devices.push(device_json(device));
  Json models = Json::array();
  for (const control::Model& model : status.models) models.push(model_json(model));
  Json document = Json::document();
  document.set("daemon", version_json(status.version))
      .set("uptime_ms", status.uptime_ms)
      .set("rss_bytes", status.rss_bytes)
      .set("fd_count", status.fd_count)
      .set("session_count", status.session_count)
      .set("lease_count", status.lease_count)
      .set("devices", std::move(devices))
      .set("models", std::move(models));
  return document;
}

Status run(const Connection& connection, cli::Output& output) {
  WEIGHTD_ASSIGN_OR_RETURN(control::Client client, connect(connection, output));
  const Result<control::DaemonStatus> status = client.status();
  if (!status.ok()) return advise(output, status.status());
  output.print(status_text(*status));
  output.emit(status_json(*status));
  return {};
}

}  // namespace

void add_status(cli::Program& program) {
  const auto connection = std::make_shared<Connection>();
  cli::Verb verb = program.verb("status", "Show the daemon, its devices and models");
  add_connection_options(verb, connection.get());
  verb.example("weightctl status").run([connection](cli::Output& output) { return run(*connection, output); });
}

}  // namespace weightd::tools
