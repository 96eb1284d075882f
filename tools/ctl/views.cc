// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "base/text.h"
#include "tools/cli/table.h"
#include "tools/cli/units.h"
#include "tools/ctl/verbs.h"

namespace weightd::tools {
namespace {

using cli::Json;

constexpr size_t kShortIdDigits = 12;

std::string state_text(const control::Model& model) {
  if (!model.failure.empty()) return model.state + ": " + model.failure;
  if (model.progress_bytes == 0 || model.resident_bytes == 0 || model.progress_bytes >= model.resident_bytes) return model.state;
  return model.state + " " +
         cli::fixed(100 * static_cast<double>(model.progress_bytes) / static_cast<double>(model.resident_bytes), 0) + " %";
}

Json lease_json(const control::Lease& lease) {
  Json json = Json::object();
  json.set("id", lease.id)
      .set("model", lease.model)
      .set("generation", lease.generation)
      .set("content_id", lease.content_id)
      .set("device", lease.device)
      .set("pid", lease.pid)
      .set("uid", lease.uid)
      .set("command", lease.command)
      .set("age_ms", lease.age_ms)
      .set("bytes", lease.bytes)
      .set("orphan", lease.orphan);
  return json;
}

}  // namespace

std::string models_table(const std::vector<control::Model>& models) {
  if (models.empty()) return "no models\n";
  cli::Table table;
  table.column("model").column("gen", cli::Align::kRight).column("state").column("device").column("transport");
  table.column("resident", cli::Align::kRight);
  table.column("logical", cli::Align::kRight)
      .column("tensors", cli::Align::kRight)
      .column("leases", cli::Align::kRight)
      .column("content");
  for (const control::Model& model : models) {
    std::string leases = std::to_string(model.lease_count);
    if (model.orphan_count > 0) leases += " (" + cli::counted(model.orphan_count, "orphan") + ")";
    table.row({model.name, std::to_string(model.generation), state_text(model), model.device, model.transport,
               human_bytes(model.resident_bytes), human_bytes(model.logical_bytes), std::to_string(model.tensor_count), leases,
               model.content_id.substr(0, kShortIdDigits)});
  }
  return table.to_string();
}

Json model_json(const control::Model& model) {
  Json encodings = Json::array();
  for (const control::EncodingSum& sum : model.encodings) {
    encodings.push(std::move(Json::object()
                                 .set("encoding", sum.encoding)
                                 .set("tensors", sum.tensors)
                                 .set("logical_bytes", sum.logical_bytes)
                                 .set("resident_bytes", sum.resident_bytes)));
  }
  Json json = Json::object();
  json.set("name", model.name)
      .set("generation", model.generation)
      .set("state", model.state)
      .set("content_id", model.content_id)
      .set("tensors_id", model.tensors_id)
      .set("device", model.device)
      .set("transport", model.transport)
      .set("residency", model.residency)
      .set("source", model.source)
      .set("failure", model.failure)
      .set("logical_bytes", model.logical_bytes)
      .set("resident_bytes", model.resident_bytes)
      .set("progress_bytes", model.progress_bytes)
      .set("tensor_count", model.tensor_count)
      .set("lease_count", model.lease_count)
      .set("orphan_count", model.orphan_count)
      .set("encodings", std::move(encodings));
  return json;
}

std::string leases_table(const std::vector<control::Lease>& leases) {
  if (leases.empty()) return "no leases\n";
  cli::Table table;
  table.column("lease", cli::Align::kRight).column("model").column("gen", cli::Align::kRight).column("pid", cli::Align::kRight);
  table.column("uid", cli::Align::kRight)
      .column("age", cli::Align::kRight)
      .column("bytes", cli::Align::kRight)
      .column("kind")
      .column("command");
  for (const control::Lease& lease : leases) {
    table.row({std::to_string(lease.id), lease.model, std::to_string(lease.generation),
               lease.pid == 0 ? "unknown" : std::to_string(lease.pid), std::to_string(lease.uid),
               cli::human_duration(std::chrono::milliseconds(lease.age_ms)), human_bytes(lease.bytes),
               lease.orphan ? "orphan" : "held", lease.command});
  }
  return table.to_string();
}

Json leases_json(const std::vector<control::Lease>& leases) {
  Json json = Json::array();
  for (const control::Lease& lease : leases) json.push(lease_json(lease));
  return json;
}

Json device_json(const control::Device& device) {
  Json json = Json::object();
  json.set("uuid", device.uuid)
      .set("name", device.name)
      .set("total_bytes", device.total_bytes)
      .set("budget_bytes", device.budget_bytes)
      .set("owned_bytes", device.owned_bytes)
      .set("leased_bytes", device.leased_bytes)
      .set("draining_bytes", device.draining_bytes)
      .set("orphan_bytes", device.orphan_bytes)
      .set("fd_only_bytes", device.fd_only_bytes)
      .set("loading_bytes", device.loading_bytes)
      .set("free_bytes", device.free_bytes);
  return json;
}

Json version_json(const control::Version& version) {
  Json json = Json::object();
  json.set("build", version.build)
      .set("protocol_version", version.protocol_version)
      .set("backend", version.backend)
      .set("backend_reason", version.backend_reason)
      .set("pid", version.pid);
  return json;
}

}  // namespace weightd::tools
