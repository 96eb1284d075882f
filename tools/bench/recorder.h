// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tools/bench/row.h"
#include "tools/cli/output.h"

namespace weightd::tools {

struct RecorderOptions {
  std::string out;      // file that gets the rows; empty: none
  bool append = false;  // behind the rows that it has
};

/// Where a benchmark puts its rows as it gets them: each is said on standard error, and the file holds all so far, so that a run
/// that is cut short has lost nothing. Holds interrupts back; the benchmark asks interrupted() between measurements.
class Recorder {
 public:
  /// kCorruption, kPermissionDenied, ...: of the file, before anything is measured.
  [[nodiscard]] static Result<Recorder> open(const RecorderOptions& options, cli::Output& output);

  Status add(std::vector<Row> rows);
  /// A line of progress, to standard error, with the seconds since the start.
  void say(std::string_view line) const;
  /// kCancelled once somebody wants the program to stop.
  [[nodiscard]] Status check_interrupt() const;

  /// Those of this run.
  [[nodiscard]] std::vector<Row> new_rows() const;
  [[nodiscard]] const std::vector<Row>& rows() const { return rows_; }

 private:
  Recorder(RecorderOptions options, cli::Output& output) : options_(std::move(options)), output_(&output) {}
  RecorderOptions options_;
  cli::Output* output_;
  std::vector<Row> rows_;
  size_t kept_ = 0;  // of rows_, from the file
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

/// "gemm_f12 llama-3.1-8b qkv 6144x4096 m=16: 11.3 us, ratio 1.374, 3346 GB/s, bulk 6144x4096: ..."
[[nodiscard]] std::string row_line(const Row& row);

}  // namespace weightd::tools
