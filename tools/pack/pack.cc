// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <string>

#include "base/text.h"
#include "base/version.h"
#include "store/hash.h"
#include "tools/cli/table.h"
#include "tools/pack/verbs.h"

namespace weightd::tools {
namespace {

using cli::counted;
using cli::fixed;
using cli::Json;

struct PackArguments {
  std::string checkpoint, bundle, encoding = "f12";
  bool no_merge = false, strict = false, include_unindexed = false;
  uint64_t threads = 0;
};

double percent_of_source(const store::PackReport& report) {
  return 100 * static_cast<double>(report.bundle_bytes) / static_cast<double>(report.source_bytes);
}

std::string summary(const PackArguments& arguments, const store::PackReport& report) {
  std::string text =
      printable(arguments.bundle) + ": " + human_bytes(report.bundle_bytes) + " from " + human_bytes(report.source_bytes);
  if (report.source_bytes > 0) text += " (" + fixed(percent_of_source(report), 1) + " %)";
  text += ", verified\n";
  if (report.coded_tensors > 0) {
    text += "  coded    " + counted(report.coded_tensors, "tensor") + ", " +
            fixed(bits_per_weight(report.coded_stored_bytes, report.coded_logical_bytes / 2), 3) + " bits per weight";
    if (report.merged_matrices > 0) text += ", in part as " + counted(report.merged_matrices, "merged matrix");
    text += "\n";
  }
  if (report.raw_tensors > 0) text += "  raw      " + counted(report.raw_tensors, "tensor") + "\n";
  if (report.deduplicated_tensors > 0)
    text += "  shared   " + counted(report.deduplicated_tensors, "tensor") + " equal to others, stored once\n";
  text += "  content  " + store::to_hex(report.content_id) + "\n";
  // A user who asked for compression and got none should not have to work that out from the sizes.
  if (report.coded_tensors == 0 && arguments.encoding != "raw") {
    text += "nothing was compressed: the checkpoint has no BF16 matrix that coding makes smaller\n";
  }
  return text;
}

Json to_json(const PackArguments& arguments, const store::PackReport& report) {
  Json warnings = Json::array();
  for (const std::string& warning : report.warnings) warnings.push(warning);
  Json document = Json::document();
  document.set("bundle", arguments.bundle)
      .set("content_id", store::to_hex(report.content_id))
      .set("source_bytes", report.source_bytes)
      .set("bundle_bytes", report.bundle_bytes)
      .set("coded_tensors", report.coded_tensors)
      .set("raw_tensors", report.raw_tensors)
      .set("deduplicated_tensors", report.deduplicated_tensors)
      .set("merged_matrices", report.merged_matrices)
      .set("coded_logical_bytes", report.coded_logical_bytes)
      .set("coded_stored_bytes", report.coded_stored_bytes)
      .set("coded_bits_per_weight", bits_per_weight(report.coded_stored_bytes, report.coded_logical_bytes / 2))
      .set("warnings", std::move(warnings));
  return document;
}

Status run(const PackArguments& arguments, cli::Output& output) {
  output.hold_interrupts();
  store::PackOptions options;
  options.encoding = arguments.encoding == "raw" ? Encoding::kRaw : Encoding::kF12;
  options.merge = !arguments.no_merge;
  options.threads = static_cast<int>(arguments.threads);
  options.checkpoint.strict = arguments.strict;
  options.checkpoint.include_unindexed = arguments.include_unindexed;
  options.tool_version = std::string(release_version());
  cli::ProgressBar bar(output, "pack");
  options.progress = cancellable(output, bar);
  const Result<store::PackReport> report = store::pack(arguments.checkpoint, arguments.bundle, options);
  bar.clear();
  if (!report.ok()) {
    if (report.status().code() == StatusCode::kFailedPrecondition)
      output.set_hint("pack again once nothing writes to the checkpoint");
    return explain_interrupt(output, report.status());
  }
  for (const std::string& warning : report->warnings) output.warning(warning);
  output.print(summary(arguments, *report));
  output.emit(to_json(arguments, *report));
  return {};
}

}  // namespace

void add_pack(cli::Program& program) {
  const auto arguments = std::make_shared<PackArguments>();
  program.verb("pack", "Pack a checkpoint into a bundle")
      .positional("CHECKPOINT", &arguments->checkpoint, std::string(kCheckpointHelp))
      .positional("BUNDLE", &arguments->bundle, "File to write, usually NAME.wpk; replaced when it exists")
      .choice("--encoding", &arguments->encoding, {"f12", "raw"},
              "f12: 12 bits per BF16 weight; raw: nothing is coded (default: f12)")
      .flag("--no-merge", &arguments->no_merge, "Keep q/k/v and gate/up matrices apart")
      .flag("--strict", &arguments->strict, "Refuse files and tensors that the index does not name")
      .flag("--include-unindexed", &arguments->include_unindexed,
            "Make files and tensors that the index does not name part of the model")
      .number("--threads", &arguments->threads, 1, kMaxThreads, std::string(kThreadsHelp))
      .details(
          "BF16 matrices are coded where that pays, everything else is stored as it is. What was written is read back, decoded and "
          "compared bit for bit with the checkpoint before the bundle gets its name.")
      .example("weightpack pack Llama-3.1-8B/ llama-8b.wpk")
      .run([arguments](cli::Output& output) { return run(*arguments, output); });
}

}  // namespace weightd::tools
