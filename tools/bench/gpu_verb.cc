// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tools/bench/gpu_work.h"
#include "tools/bench/ratio_plot.h"
#include "tools/bench/report.h"
#include "tools/bench/verbs.h"

namespace weightd::tools {
namespace {

constexpr uint64_t kMostRepeats = 1000;

struct GpuArguments {
  std::string device, model = "all", shapes{kDefaultShapes}, tokens{kDefaultTokens}, ops{kDefaultOps}, escapes, plot;
  RecorderOptions recorder;
  uint64_t repeats = 12;
};

struct ChainArguments {
  std::string device, model = "llama-3.1-8b", tokens = "1,8,32,128";
  RecorderOptions recorder;
  uint64_t layers = 32, repeats = 12;
};

Status finish(const Recorder& recorder, cli::Output& output) {
  output.print(markdown_report(recorder.new_rows()));
  cli::Json document = cli::Json::document();
  document.set("rows", to_json(recorder.new_rows()));
  output.emit(document);
  return {};
}

Status run_gpu(const GpuArguments& arguments, cli::Output& output) {
  GpuBench bench;
  bench.device = arguments.device;
  bench.repeats = static_cast<int>(arguments.repeats);
  WEIGHTD_ASSIGN_OR_RETURN(bench.shapes, select_shapes(arguments.model, arguments.shapes));
  WEIGHTD_ASSIGN_OR_RETURN(bench.tokens, parse_tokens(arguments.tokens));
  WEIGHTD_ASSIGN_OR_RETURN(bench.ops, parse_ops(arguments.ops));
  WEIGHTD_ASSIGN_OR_RETURN(const std::vector<double> rates, parse_escapes(arguments.escapes));
  bench.escapes.assign(rates.begin(), rates.end());
  if (rates.empty()) bench.escapes.emplace_back();
  WEIGHTD_ASSIGN_OR_RETURN(Recorder recorder, Recorder::open(arguments.recorder, output));
  WEIGHTD_RETURN_IF_ERROR(run_gpu_bench(bench, recorder));
  if (!arguments.plot.empty()) {
    WEIGHTD_ASSIGN_OR_RETURN(const std::string svg, ratio_plot(recorder.rows()));
    WEIGHTD_RETURN_IF_ERROR(write_text(arguments.plot, svg));
  }
  return finish(recorder, output);
}

Status run_chain(const ChainArguments& arguments, cli::Output& output) {
  ChainBench bench;
  bench.device = arguments.device;
  bench.layers = static_cast<int>(arguments.layers);
  bench.repeats = static_cast<int>(arguments.repeats);
  WEIGHTD_ASSIGN_OR_RETURN(bench.shapes, select_shapes(arguments.model, "qkv,o,gate_up,down"));
  WEIGHTD_ASSIGN_OR_RETURN(bench.tokens, parse_tokens(arguments.tokens));
  WEIGHTD_ASSIGN_OR_RETURN(Recorder recorder, Recorder::open(arguments.recorder, output));
  WEIGHTD_RETURN_IF_ERROR(run_chain_bench(bench, recorder));
  return finish(recorder, output);
}

}  // namespace

void add_recorder_options(cli::Verb& verb, RecorderOptions* options) {
  verb.text("--out", "FILE", &options->out, "Write the rows to this file, as JSON; it holds all so far at every moment")
      .flag("--append", &options->append, "Keep the rows that FILE has and put the new ones behind them");
}

void add_gpu(cli::Program& program) {
  const auto arguments = std::make_shared<GpuArguments>();
  cli::Verb verb = program.verb("gpu", "Race fused products, decompression and cuBLAS on a GPU");
  verb.choice("--model", &arguments->model, {"llama-3.1-8b", "llama-3.1-70b", "all"}, "Whose matrices (default: all)")
      .text("--shapes", "LIST", &arguments->shapes, "Which of them (default: " + std::string(kDefaultShapes) + ")")
      .text("--tokens", "LIST", &arguments->tokens, "Tokens of a product (default: 1, 2, 4 and so on to 8192)")
      .text("--op", "LIST", &arguments->ops, "What to report (default: " + std::string(kDefaultOps) + ")")
      .text("--escapes", "LIST", &arguments->escapes,
            "Shares of the weights to put outside of their windows, 0 to 1 (default: weights as trained ones are)")
      .number("--repeats", &arguments->repeats, 1, kMostRepeats, "Rounds of a race (default: 12)")
      .text("--device", "UUID", &arguments->device, "GPU (default: the first)");
  add_recorder_options(verb, &arguments->recorder);
  verb.text("--plot", "FILE", &arguments->plot, "Draw the ratios over tokens, as SVG")
      .details(
          "Everything is timed by events around CUDA graphs whose launches rotate over copies, so that no weight is in the L2 "
          "cache; "
          "what is compared takes turns, and medians count. cuBLAS is the better of cublasGemmEx and the fastest of eight "
          "proposals "
          "of cuBLASLt. A product whose result differs from cuBLAS beyond rounding ends the run. cuBLAS is loaded from the "
          "machine; "
          "WEIGHTD_CUBLAS can name the file.")
      .example("weightbench gpu --model llama-3.1-8b --tokens 1,8,64 --out h200.json")
      .run([arguments](cli::Output& output) { return run_gpu(*arguments, output); });
}

void add_chain(cli::Program& program) {
  const auto arguments = std::make_shared<ChainArguments>();
  cli::Verb verb = program.verb("chain", "Time the products of many layers in one graph");
  verb.choice("--model", &arguments->model, {"llama-3.1-8b", "llama-3.1-70b"}, "Whose layers (default: llama-3.1-8b)")
      .number("--layers", &arguments->layers, 1, 1000, "Layers, each with weights of its own (default: 32)")
      .text("--tokens", "LIST", &arguments->tokens, "Tokens of a pass (default: 1,8,32,128)")
      .number("--repeats", &arguments->repeats, 1, kMostRepeats, "Rounds (default: 12)")
      .text("--device", "UUID", &arguments->device, "GPU (default: the first)");
  add_recorder_options(verb, &arguments->recorder);
  verb.details(
          "qkv, o, gate_up and down of every layer in order, by the route that the client takes (row chain), by the best of cuBLAS "
          "for "
          "each (chain_cublas) and by cublasGemmEx (chain_gemm_ex).")
      .example("weightbench chain --tokens 1,8")
      .run([arguments](cli::Output& output) { return run_chain(*arguments, output); });
}

}  // namespace weightd::tools
