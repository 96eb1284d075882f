// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "tools/cli/output.h"

namespace weightd::cli {

/// One line of progress: "pack   43 % [########............] 1.2 GiB of 2.8 GiB, 850.0 MiB/s, 2 s left".
/// Without a total the percentage, the bar and the time left are absent.
[[nodiscard]] std::string progress_line(std::string_view label, uint64_t done_bytes, uint64_t total_bytes, double seconds);

/// Draws progress_line() on the terminal behind standard error, at most ten times a second, and wipes it at the end. Does nothing
/// when standard error is no terminal or output is quiet.
class ProgressBar {
 public:
  ProgressBar(const Output& output, std::string label);
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  void update(uint64_t done_bytes, uint64_t total_bytes);
  /// Wipes the line, so that other output may follow.
  void clear();

 private:
  using Clock = std::chrono::steady_clock;
  std::string label_;
  bool wanted_;
  bool drawn_ = false;
  Clock::time_point start_ = Clock::now();
  Clock::time_point last_draw_{};
};

}  // namespace weightd::cli
