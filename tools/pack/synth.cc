// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "base/text.h"
#include "tools/cli/table.h"
#include "tools/pack/synth_checkpoint.h"
#include "tools/pack/verbs.h"

namespace weightd::tools {
namespace {

struct SynthArguments {
  std::string folder, arch;
  uint64_t layers = 0, vocab = 0, seed = 0, shard_bytes = SynthOptions().shard_bytes, threads = 0;
  double row_scale_sigma = WeightModel().row_scale_sigma;
};

Status run(const SynthArguments& arguments, cli::Output& output) {
  output.hold_interrupts();
  SynthOptions options;
  options.architecture = *find_architecture(arguments.arch);  // the parser let only known names through
  if (arguments.layers > 0) options.architecture.layers = arguments.layers;
  if (arguments.vocab > 0) options.architecture.vocab = arguments.vocab;
  options.seed = arguments.seed;
  options.shard_bytes = arguments.shard_bytes;
  options.weights.row_scale_sigma = arguments.row_scale_sigma;
  options.threads = static_cast<int>(arguments.threads);
  cli::ProgressBar bar(output, "synth");
  options.progress = cancellable(output, bar);
  const Result<SynthReport> report = synth_checkpoint(arguments.folder, options);
  bar.clear();
  if (!report.ok()) {
    if (report.status().code() == StatusCode::kAlreadyExists) output.set_hint("name a folder that is empty or does not exist yet");
    return explain_interrupt(output, report.status());
  }
  output.print(printable(arguments.folder) + ": " + arguments.arch + ", " + cli::counted(options.architecture.layers, "layer") +
               ", " + cli::counted(report->tensors, "tensor") + ", " + human_bytes(report->bytes) + " in " +
               cli::counted(report->files, "file") + "\n");
  cli::Json document = cli::Json::document();
  document.set("folder", arguments.folder)
      .set("arch", arguments.arch)
      .set("layers", options.architecture.layers)
      .set("vocab", options.architecture.vocab)
      .set("seed", arguments.seed)
      .set("tensors", report->tensors)
      .set("files", report->files)
      .set("bytes", report->bytes);
  output.emit(document);
  return {};
}

}  // namespace

void add_synth(cli::Program& program) {
  const auto arguments = std::make_shared<SynthArguments>();
  program.verb("synth", "Write a checkpoint of synthetic weights")
      .positional("FOLDER", &arguments->folder, "Folder to write to; made when missing, must be empty")
      .choice("--arch", &arguments->arch, architecture_names(), "Whose names and shapes")
      .required()
      .number("--layers", &arguments->layers, 1, 1000, "Only so many layers (default: all)")
      .number("--vocab", &arguments->vocab, 16, 10'000'000, "Another size of the vocabulary")
      .number("--seed", &arguments->seed, 0, UINT64_MAX, "Seed of the weights (default: 0)")
      .bytes("--shard-bytes", &arguments->shard_bytes, "Most bytes of tensors in one file (default: 5GB)")
      .real("--row-scale-sigma", &arguments->row_scale_sigma, 0, 4,
            "Spread of the row scales, in natural logarithms (default: 0.3)")
      .number("--threads", &arguments->threads, 1, kMaxThreads, std::string(kThreadsHelp))
      .details(
          "Names and shapes are those of a published model. The weights are Gaussian with a lognormal scale per row, which gives "
          "the exponent statistics of trained models. For tests and benchmarks; the same options give the same bytes.")
      .example("weightpack synth /tmp/llama --arch llama-3.1-8b --layers 2 --seed 1")
      .run([arguments](cli::Output& output) { return run(*arguments, output); });
}

}  // namespace weightd::tools
