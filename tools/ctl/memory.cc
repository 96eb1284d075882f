// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <memory>
#include <string>

#include "base/text.h"
#include "tools/cli/table.h"
#include "tools/cli/units.h"
#include "tools/ctl/verbs.h"

namespace weightd::tools {
namespace {

using cli::Align;
using cli::Json;

std::string signed_bytes(uint64_t minuend, uint64_t subtrahend) {
  return minuend >= subtrahend ? human_bytes(minuend - subtrahend) : "-" + human_bytes(subtrahend - minuend);
}

const control::Gpu* find_gpu(const control::Memory& memory, const std::string& uuid) {
  const auto it = std::find_if(memory.gpus.begin(), memory.gpus.end(), [&](const control::Gpu& gpu) { return gpu.uuid == uuid; });
  return it == memory.gpus.end() || !it->nvml_known ? nullptr : &*it;
}

/// The host has no driver to ask.
bool has_driver(const control::Memory& memory) { return memory.status.version.backend == "cuda"; }

std::string devices_table(const control::Memory& memory) {
  cli::Table table;
  table.column("device").column("name");
  for (const char* title : {"total", "budget", "owned", "leased", "draining", "fd only", "loading", "free"}) {
    table.column(title, Align::kRight);
  }
  if (has_driver(memory)) table.column("NVML used", Align::kRight).column("not ours", Align::kRight);
  for (const control::Device& device : memory.status.devices) {
    std::vector<std::string> cells = {device.uuid, device.name};
    for (const uint64_t bytes : {device.total_bytes, device.budget_bytes, device.owned_bytes, device.leased_bytes,
                                 device.draining_bytes, device.fd_only_bytes, device.loading_bytes, device.free_bytes}) {
      cells.push_back(human_bytes(bytes));
    }
    if (has_driver(memory)) {
      const control::Gpu* gpu = find_gpu(memory, device.uuid);
      cells.push_back(gpu == nullptr ? "unknown" : human_bytes(gpu->used_bytes));
      cells.push_back(gpu == nullptr ? "unknown" : signed_bytes(gpu->used_bytes, device.owned_bytes + device.loading_bytes));
    }
    table.row(std::move(cells));
  }
  return table.to_string();
}

/// "f12 225 in 12.0 GiB, raw 66 in 0.1 GiB".
std::string encodings_text(const control::Model& model) {
  std::string text;
  for (const control::EncodingSum& sum : model.encodings) {
    text +=
        (text.empty() ? "" : ", ") + sum.encoding + " " + std::to_string(sum.tensors) + " in " + human_bytes(sum.resident_bytes);
  }
  return text;
}

std::string models_memory_table(const std::vector<control::Model>& models) {
  if (models.empty()) return "no models\n";
  cli::Table table;
  table.column("model").column("gen", Align::kRight).column("state").column("device").column("transport");
  table.column("logical", Align::kRight).column("resident", Align::kRight).column("saved", Align::kRight).column("encodings");
  for (const control::Model& model : models) {
    // What is lost or failed holds nothing, so it saves nothing either.
    const bool resident = model.state == "published" || model.state == "draining";
    table.row({model.name, std::to_string(model.generation), model.state, model.device, model.transport,
               human_bytes(model.logical_bytes), human_bytes(resident ? model.resident_bytes : 0),
               resident ? signed_bytes(model.logical_bytes, model.resident_bytes) : "-", encodings_text(model)});
  }
  return table.to_string();
}

std::string memory_text(const control::Memory& memory) {
  return devices_table(memory) + "\n" + models_memory_table(memory.status.models) + "\n" + leases_table(memory.leases);
}

Json gpu_json(const control::Gpu& gpu) {
  Json json = Json::object();
  json.set("uuid", gpu.uuid)
      .set("name", gpu.name)
      .set("total_bytes", gpu.total_bytes)
      .set("nvml_known", gpu.nvml_known)
      .set("used_bytes", gpu.used_bytes)
      .set("free_bytes", gpu.free_bytes)
      .set("persistence", gpu.persistence)
      .set("problem", gpu.problem);
  return json;
}

Json memory_json(const control::Memory& memory) {
  Json devices = Json::array(), models = Json::array(), gpus = Json::array();
  for (const control::Device& device : memory.status.devices) {
    Json json = device_json(device);
    if (const control::Gpu* gpu = find_gpu(memory, device.uuid)) {
      json.set("nvml_used_bytes", gpu->used_bytes)
          .set("not_ours_bytes", static_cast<int64_t>(gpu->used_bytes) - static_cast<int64_t>(device.owned_bytes) -
                                     static_cast<int64_t>(device.loading_bytes));
    }
    devices.push(std::move(json));
  }
  for (const control::Model& model : memory.status.models) models.push(model_json(model));
  for (const control::Gpu& gpu : memory.gpus) gpus.push(gpu_json(gpu));
  Json document = Json::document();
  document.set("daemon", version_json(memory.status.version))
      .set("devices", std::move(devices))
      .set("models", std::move(models))
      .set("leases", leases_json(memory.leases))
      .set("gpus", std::move(gpus))
      .set("problem", memory.problem);
  return document;
}

Status run(const Connection& connection, cli::Output& output) {
  WEIGHTD_ASSIGN_OR_RETURN(control::Client client, connect(connection, output));
  const Result<control::Memory> memory = client.memory();
  if (!memory.ok()) return advise(output, memory.status());
  output.print(memory_text(*memory));
  if (!memory->problem.empty()) output.warning("what the driver says is missing: " + printable(memory->problem));
  output.emit(memory_json(*memory));
  return {};
}

}  // namespace

void add_memory(cli::Program& program) {
  const auto connection = std::make_shared<Connection>();
  cli::Verb verb = program.verb("memory", "Show who has which memory, with the driver's figures beside");
  add_connection_options(verb, connection.get());
  verb.details(
          "owned: weights in memory. Of these, leased: some worker has them; draining: waiting for their last worker; fd only: "
          "kept by "
          "the daemon alone. free: what is left of the budget. NVML used: what the driver counts for all processes; not ours: the "
          "rest "
          "of it beside owned and loading, such as contexts and caches of workers. saved: what the models would take beyond it "
          "uncompressed.")
      .example("weightctl memory")
      .run([connection](cli::Output& output) { return run(*connection, output); });
}

}  // namespace weightd::tools
