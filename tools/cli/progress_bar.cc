// SPDX-License-Identifier: Apache-2.0
#include "tools/cli/progress_bar.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "base/text.h"
#include "tools/cli/units.h"

namespace weightd::cli {
namespace {

constexpr size_t kBarCells = 24;
constexpr std::chrono::milliseconds kRedraw{100};
constexpr std::string_view kWipe = "\r\x1b[K";

void draw(std::string_view text) {
  // A terminal that went away changes nothing about the work.
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

}  // namespace

std::string progress_line(std::string_view label, uint64_t done_bytes, uint64_t total_bytes, double seconds) {
  std::string line(label);
  const uint64_t done = total_bytes == 0 ? done_bytes : std::min(done_bytes, total_bytes);
  const double share = total_bytes == 0 ? 0.0 : static_cast<double>(done) / static_cast<double>(total_bytes);
  if (total_bytes > 0) {
    const auto cells = static_cast<size_t>(share * static_cast<double>(kBarCells));
    const std::string percent = std::to_string(static_cast<int>(share * 100));
    line += std::string(5 - percent.size(), ' ') + percent + " % [" + std::string(cells, '#') +
            std::string(kBarCells - cells, '.') + "]";
  }
  line += " " + human_bytes(done);
  if (total_bytes > 0) line += " of " + human_bytes(total_bytes);
  if (seconds <= 0 || done == 0) return line;
  const double rate = static_cast<double>(done) / seconds;
  line += ", " + human_bytes(static_cast<uint64_t>(rate)) + "/s";
  if (total_bytes > done) {
    const auto left = static_cast<int64_t>(static_cast<double>(total_bytes - done) / rate) + 1;
    line += ", " + human_duration(std::chrono::seconds(left)) + " left";
  }
  return line;
}

ProgressBar::ProgressBar(const Output& output, std::string label) : label_(std::move(label)), wanted_(output.progress_wanted()) {}

ProgressBar::~ProgressBar() { clear(); }

void ProgressBar::clear() {
  if (drawn_) draw(kWipe);
  drawn_ = false;
}

void ProgressBar::update(uint64_t done_bytes, uint64_t total_bytes) {
  if (!wanted_) return;
  const auto now = Clock::now();
  if (drawn_ && now - last_draw_ < kRedraw) return;
  const double seconds = std::chrono::duration<double>(now - start_).count();
  draw(std::string(kWipe) + progress_line(label_, done_bytes, total_bytes, seconds));
  drawn_ = true;
  last_draw_ = now;
}

}  // namespace weightd::cli
