// SPDX-License-Identifier: Apache-2.0
#include "tools/bench/recorder.h"

#include <cmath>
#include <cstdio>
#include <utility>

#include "base/text.h"
#include "tools/cli/table.h"

namespace weightd::tools {

Result<Recorder> Recorder::open(const RecorderOptions& options, cli::Output& output) {
  Recorder recorder(options, output);
  if (!options.out.empty()) {
    if (options.append) {
      Result<std::vector<Row>> before = read_rows(options.out);
      if (!before.ok() && before.status().code() != StatusCode::kNotFound) return before.status();
      if (before.ok()) recorder.rows_ = *std::move(before);
      recorder.kept_ = recorder.rows_.size();
    }
    // Says now what would be a pity to learn at the end.
    WEIGHTD_RETURN_IF_ERROR(write_rows(options.out, recorder.rows_));
  }
  output.hold_interrupts();
  return recorder;
}

Status Recorder::add(std::vector<Row> rows) {
  for (Row& row : rows) {
    say(row_line(row));
    rows_.push_back(std::move(row));
  }
  return options_.out.empty() ? Status() : write_rows(options_.out, rows_);
}

void Recorder::say(std::string_view line) const {
  if (output_->quiet) return;
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  std::fprintf(stderr, "%6.1f s  %s\n", seconds, printable(line, 1000).c_str());
}

Status Recorder::check_interrupt() const {
  if (!output_->interrupted()) return {};
  return Status::cancelled("interrupted" + (options_.out.empty()
                                                ? std::string()
                                                : "; " + printable(options_.out) + " has " + cli::counted(rows_.size(), "row")));
}

std::vector<Row> Recorder::new_rows() const { return {rows_.begin() + static_cast<int64_t>(kept_), rows_.end()}; }

std::string row_line(const Row& row) {
  std::string line = row.op;
  if (!row.model.empty()) line += " " + row.model;
  if (!row.name.empty()) line += " " + row.name;
  if (row.n > 0) line += " " + std::to_string(row.n) + "x" + std::to_string(row.k);
  if (row.m > 0) line += " m=" + std::to_string(row.m);
  line += ": " + cli::fixed(row.us, 1) + " us";
  if (std::isfinite(row.ratio)) line += ", ratio " + cli::fixed(row.ratio, 3);
  if (std::isfinite(row.coded_gbps)) line += ", " + cli::fixed(row.coded_gbps, 0) + " GB/s";
  if (!row.plan.empty()) line += ", " + row.plan;
  return line;
}

}  // namespace weightd::tools
