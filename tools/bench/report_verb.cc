// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tools/bench/ratio_plot.h"
#include "tools/bench/report.h"
#include "tools/bench/verbs.h"

namespace weightd::tools {
namespace {

struct ReportArguments {
  std::string file, plot;
};

Status run(const ReportArguments& arguments, cli::Output& output) {
  WEIGHTD_ASSIGN_OR_RETURN(const std::vector<Row> rows, read_rows(arguments.file));
  if (!arguments.plot.empty()) {
    WEIGHTD_ASSIGN_OR_RETURN(const std::string svg, ratio_plot(rows));
    WEIGHTD_RETURN_IF_ERROR(write_text(arguments.plot, svg));
  }
  output.print(markdown_report(rows));
  cli::Json document = cli::Json::document();
  document.set("rows", to_json(rows));
  output.emit(document);
  return {};
}

}  // namespace

void add_report(cli::Program& program) {
  const auto arguments = std::make_shared<ReportArguments>();
  program.verb("report", "Show measured rows as Markdown tables")
      .positional("FILE", &arguments->file, "Rows, as 'weightbench gpu --out' writes them")
      .text("--plot", "FILE", &arguments->plot, "Also draw the ratios over tokens, as SVG")
      .example("weightbench report tests/bench/results/h200.json --plot ratios.svg")
      .run([arguments](cli::Output& output) { return run(*arguments, output); });
}

}  // namespace weightd::tools
