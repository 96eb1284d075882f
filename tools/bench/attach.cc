// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <string>

#include "base/text.h"
#include "base/version.h"
#include "tools/bench/attach_rounds.h"
#include "tools/bench/verbs.h"
#include "tools/cli/build_check.h"
#include "tools/cli/table.h"

namespace weightd::tools {
namespace {

using cli::Json;

Status advise(cli::Output& output, Status status) {
  if (status.code() == StatusCode::kNotFound) output.set_hint("'weightctl models' lists what can be attached to");
  return status;
}

/// The context of the GPU is made first, so that no phase has it in it; null on the host.
Result<std::unique_ptr<GpuSide>> make_side(const AttachPlan& plan) {
  if (plan.device == "host") return std::unique_ptr<GpuSide>();
  return GpuSide::open(plan.device);
}

Status run(AttachPlan plan, cli::Output& output) {
  WEIGHTD_RETURN_IF_ERROR(cli::check_same_release(build_id(), version()));
  if (plan.device.empty()) {
    const Result<std::string> device = device_of_model(plan);
    if (!device.ok()) return advise(output, device.status());
    plan.device = *device;
  }
  WEIGHTD_ASSIGN_OR_RETURN(const std::unique_ptr<GpuSide> side, make_side(plan));
  const Result<AttachReport> report = measure_attach(plan, side.get());
  if (!report.ok()) return advise(output, report.status());
  output.print("attach to " + printable(plan.model) + " on " + printable(report->device) + ", " +
               cli::counted(plan.rounds, "round") + ", tensor " + printable(report->tensor) + " of " +
               human_bytes(report->tensor_bytes) + "\n\n" + phases_table(*report));
  if (side != nullptr) output.print("\nCUDA context, made before: " + cli::fixed(side->context_ms(), 1) + " ms\n");
  Json document = Json::document();
  document.set("model", plan.model)
      .set("device", report->device)
      .set("tensor", report->tensor)
      .set("tensor_bytes", report->tensor_bytes)
      .set("count", plan.rounds)
      .set("phases", phases_json(*report));
  if (side != nullptr) document.set("context_ms", side->context_ms());
  output.emit(document);
  return {};
}

}  // namespace

void add_attach(cli::Program& program) {
  const auto plan = std::make_shared<AttachPlan>();
  program.verb("attach", "Time how a worker starts")
      .text("--model", "NAME", &plan->model, "Model to attach to")
      .required()
      .number("--count", &plan->rounds, 1, 1'000'000, "Rounds (default: 100)")
      .text("--tensor", "NAME", &plan->tensor, "Tensor to decode (default: the first coded one)")
      .text("--device", "UUID", &plan->device, "GPU by UUID, or host (default: the only one that has the model)")
      .text("--socket", "PATH", &plan->socket, "Data socket (default: $WEIGHTD_SOCKET or /run/weightd/weightd.sock)")
      .duration("--timeout", &plan->timeout, "Longest wait for each answer of the daemon (default: 10 s)")
      .details(
          "Each round is a fresh connection: connect, acquire (from the request until the model is mapped), look a tensor up, "
          "decode it for the first time, release. On a GPU, this process's CUDA context is made before the first round and its "
          "time "
          "is reported apart.")
      .example("weightbench attach --model llama-8b --count 1000")
      .run([plan](cli::Output& output) { return run(*plan, output); });
}

}  // namespace weightd::tools
