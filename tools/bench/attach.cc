// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "base/version.h"
#include "tools/bench/percentiles.h"
#include "tools/bench/verbs.h"
#include "tools/cli/build_check.h"
#include "tools/cli/table.h"
#include "weightd/client.h"

namespace weightd::tools {
namespace {

using cli::Json;
using Clock = std::chrono::steady_clock;

struct AttachArguments {
  std::string model, tensor, socket;
  uint64_t count = 100;
  std::chrono::milliseconds timeout{10'000};
};

/// One phase of becoming a worker, with its time in each round, in milliseconds.
struct Phase {
  std::string name, meaning;
  std::vector<double> ms;
};
enum PhaseIndex { kConnect, kAcquire, kLookup, kDecompress, kRelease };

std::vector<Phase> phases() {
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

/// One worker's start, from nothing to released. `scratch` is as large as the largest tensor so far, so that its page faults are
/// not measured again and again.
Status round_trip(const AttachArguments& arguments, std::string& tensor_name, std::vector<std::byte>& scratch,
                  std::vector<Phase>& out) {
  ClientOptions options;
  options.socket_path = arguments.socket;
  options.name = "weightbench";
  options.call_timeout = arguments.timeout;
  Lap lap;
  WEIGHTD_ASSIGN_OR_RETURN(Client client, Client::connect(options));
  out[kConnect].ms.push_back(lap.ms());
  WEIGHTD_ASSIGN_OR_RETURN(Model model, client.acquire(arguments.model));
  out[kAcquire].ms.push_back(lap.ms());
  if (tensor_name.empty()) {
    WEIGHTD_ASSIGN_OR_RETURN(tensor_name, choose_tensor(model, arguments.tensor));
  }
  lap.ms();
  WEIGHTD_ASSIGN_OR_RETURN(const Tensor tensor, model.tensor(tensor_name));
  out[kLookup].ms.push_back(lap.ms());
  scratch.resize(std::max<size_t>(scratch.size(), tensor.info().logical_bytes));
  lap.ms();
  WEIGHTD_RETURN_IF_ERROR(tensor.decompress(scratch));
  out[kDecompress].ms.push_back(lap.ms());
  WEIGHTD_RETURN_IF_ERROR(model.release());
  out[kRelease].ms.push_back(lap.ms());
  return {};
}

std::string phases_table(const std::vector<Phase>& measured) {
  cli::Table table;
  table.column("phase");
  for (const char* title : {"least ms", "p50", "p90", "p99", "most", "mean"}) table.column(title, cli::Align::kRight);
  table.column("from .. to");
  for (const Phase& phase : measured) {
    const Percentiles p = percentiles(phase.ms);
    std::vector<std::string> cells = {phase.name};
    for (const double value : {p.least, p.p50, p.p90, p.p99, p.most, p.mean}) cells.push_back(cli::fixed(value, 4));
    cells.push_back(phase.meaning);
    table.row(std::move(cells));
  }
  return table.to_string();
}

Json phases_json(const std::vector<Phase>& measured) {
  Json json = Json::object();
  for (const Phase& phase : measured) {
    const Percentiles p = percentiles(phase.ms);
    Json entry = Json::object();
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

Status run(const AttachArguments& arguments, cli::Output& output) {
  WEIGHTD_RETURN_IF_ERROR(cli::check_same_release(build_id(), version()));
  std::vector<Phase> measured = phases();
  std::string tensor;
  std::vector<std::byte> scratch;
  for (uint64_t i = 0; i < arguments.count; ++i) {
    const Status status = round_trip(arguments, tensor, scratch, measured);
    if (status.ok()) continue;
    if (status.code() == StatusCode::kNotFound) output.set_hint("'weightctl models' lists what can be attached to");
    return status;
  }
  output.print("attach to " + printable(arguments.model) + ", " + cli::counted(arguments.count, "round") + ", tensor " +
               printable(tensor) + " of " + human_bytes(scratch.size()) + "\n\n" + phases_table(measured));
  Json document = Json::document();
  document.set("model", arguments.model)
      .set("tensor", tensor)
      .set("tensor_bytes", scratch.size())
      .set("count", arguments.count)
      .set("phases", phases_json(measured));
  output.emit(document);
  return {};
}

}  // namespace

void add_attach(cli::Program& program) {
  const auto arguments = std::make_shared<AttachArguments>();
  program.verb("attach", "Time how a worker starts")
      .text("--model", "NAME", &arguments->model, "Model to attach to")
      .required()
      .number("--count", &arguments->count, 1, 1'000'000, "Rounds (default: 100)")
      .text("--tensor", "NAME", &arguments->tensor, "Tensor to decode (default: the first coded one)")
      .text("--socket", "PATH", &arguments->socket, "Data socket (default: $WEIGHTD_SOCKET or /run/weightd/weightd.sock)")
      .duration("--timeout", &arguments->timeout, "Longest wait for each answer of the daemon (default: 10 s)")
      .details(
          "Each round is a fresh connection: connect, acquire (from the request until the model is mapped), look a tensor up, "
          "decode it for the first time, release.")
      .example("weightbench attach --model llama-8b --count 1000")
      .run([arguments](cli::Output& output) { return run(*arguments, output); });
}

}  // namespace weightd::tools
