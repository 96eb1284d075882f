// SPDX-License-Identifier: Apache-2.0
#include "tools/bench/attach_rounds.h"

#include <algorithm>
#include <utility>

#include "base/text.h"
#include "tools/bench/percentiles.h"
#include "tools/cli/table.h"

namespace weightd::tools {
namespace {

using Clock = std::chrono::steady_clock;

enum PhaseIndex { kConnect, kAcquire, kLookup, kDecompress, kRelease };

std::vector<AttachPhase> no_phases() {
  return {{"connect", "socket to hello answered", {}},
          {"acquire", "request to model mapped", {}},
          {"lookup", "name to tensor", {}},
          {"decompress", "first decode of the tensor", {}},
          {"release", "unmap and answer", {}}};
}

/// Times what stands between its construction and each lap.
class Lap {
 public:
  double ms() {
    const auto now = Clock::now();
    const double elapsed = std::chrono::duration<double, std::milli>(now - last_).count();
    last_ = now;
    return elapsed;
  }

 private:
  Clock::time_point last_ = Clock::now();
};

ClientOptions options_of(const AttachPlan& plan) {
  ClientOptions options;
  options.socket_path = plan.socket;
  options.name = "weightbench";
  options.call_timeout = plan.timeout;
  return options;
}

/// The tensor that the user named; else the first coded one of the checkpoint, else the first.
Result<std::string> choose_tensor(const Model& model, const std::string& wanted) {
  if (!wanted.empty()) return wanted;
  const auto tensors = model.tensors();
  if (tensors.empty()) return Status::failed_precondition("the model has no tensors");
  for (const TensorInfo& tensor : tensors) {
    if (tensor.encoding != Encoding::kRaw && !tensor.merged) return tensor.name;
  }
  return tensors.front().name;
}

/// Where decoded tensors go: as large as the largest so far, so that its page faults are not measured again and again.
class Scratch {
 public:
  explicit Scratch(GpuSide* side) : side_(side) {}
  Result<std::span<std::byte>> at_least(uint64_t bytes) {
    if (side_ != nullptr) return side_->scratch(bytes);
    host_.resize(std::max<size_t>(host_.size(), bytes));
    return std::span<std::byte>(host_);
  }
  Status synchronize() { return side_ == nullptr ? Status() : side_->synchronize(); }

 private:
  GpuSide* side_;
  std::vector<std::byte> host_;
};

/// One worker's start, from nothing to released.
Status round_trip(const AttachPlan& plan, Scratch& scratch, AttachReport& report) {
  std::vector<AttachPhase>& out = report.phases;
  Lap lap;
  WEIGHTD_ASSIGN_OR_RETURN(Client client, Client::connect(options_of(plan)));
  out[kConnect].ms.push_back(lap.ms());
  AcquireOptions acquire;
  acquire.device = plan.device;
  WEIGHTD_ASSIGN_OR_RETURN(Model model, client.acquire(plan.model, acquire));
  out[kAcquire].ms.push_back(lap.ms());
  if (report.tensor.empty()) {
    WEIGHTD_ASSIGN_OR_RETURN(report.tensor, choose_tensor(model, plan.tensor));
    report.resident_bytes = model.info().resident_bytes;
    report.device = model.info().device;
  }
  lap.ms();
  WEIGHTD_ASSIGN_OR_RETURN(const Tensor tensor, model.tensor(report.tensor));
  out[kLookup].ms.push_back(lap.ms());
  report.usable_ms.push_back(out[kAcquire].ms.back() + out[kLookup].ms.back());
  report.tensor_bytes = tensor.info().logical_bytes;
  WEIGHTD_ASSIGN_OR_RETURN(const std::span<std::byte> target, scratch.at_least(report.tensor_bytes));
  lap.ms();
  WEIGHTD_RETURN_IF_ERROR(tensor.decompress(target));
  WEIGHTD_RETURN_IF_ERROR(scratch.synchronize());
  out[kDecompress].ms.push_back(lap.ms());
  WEIGHTD_RETURN_IF_ERROR(model.release());
  out[kRelease].ms.push_back(lap.ms());
  return {};
}

}  // namespace

Result<std::string> device_of_model(const AttachPlan& plan) {
  WEIGHTD_ASSIGN_OR_RETURN(Client client, Client::connect(options_of(plan)));
  WEIGHTD_ASSIGN_OR_RETURN(const std::vector<ModelInfo> models, client.list());
  std::string device;
  for (const ModelInfo& model : models) {
    if (model.name != plan.model || model.state != "published" || model.device == device) continue;
    if (!device.empty()) {
      return Status::invalid_argument("'" + printable(plan.model) +
                                      "' is on several devices: say with --device which one is meant");
    }
    device = model.device;
  }
  if (device.empty()) return Status::not_found("no model '" + printable(plan.model) + "' is published");
  return device;
}

Result<AttachReport> measure_attach(const AttachPlan& plan, GpuSide* side) {
  AttachReport report;
  report.phases = no_phases();
  Scratch scratch(side);
  for (uint64_t i = 0; i < plan.rounds; ++i) WEIGHTD_RETURN_IF_ERROR(round_trip(plan, scratch, report));
  return report;
}

std::string phases_table(const AttachReport& report) {
  cli::Table table;
  table.column("phase");
  for (const char* title : {"least ms", "p50", "p90", "p99", "most", "mean"}) table.column(title, cli::Align::kRight);
  table.column("from .. to");
  for (const AttachPhase& phase : report.phases) {
    const Percentiles p = percentiles(phase.ms);
    std::vector<std::string> cells = {phase.name};
    for (const double value : {p.least, p.p50, p.p90, p.p99, p.most, p.mean}) cells.push_back(cli::fixed(value, 4));
    cells.push_back(phase.meaning);
    table.row(std::move(cells));
  }
  return table.to_string();
}

cli::Json phases_json(const AttachReport& report) {
  cli::Json json = cli::Json::object();
  for (const AttachPhase& phase : report.phases) {
    const Percentiles p = percentiles(phase.ms);
    cli::Json entry = cli::Json::object();
    entry.set("least_ms", p.least)
        .set("p50_ms", p.p50)
        .set("p90_ms", p.p90)
        .set("p99_ms", p.p99)
        .set("most_ms", p.most)
        .set("mean_ms", p.mean);
    json.set(phase.name, std::move(entry));
  }
  return json;
}

}  // namespace weightd::tools
