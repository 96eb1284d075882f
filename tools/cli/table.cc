// SPDX-License-Identifier: Apache-2.0
#include "tools/cli/table.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <utility>

#include "base/text.h"
#include "weightd/status.h"

namespace weightd::cli {
namespace {

/// Code points; printable() has made the text valid UTF-8.
size_t display_width(const std::string& text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U; }));
}

}  // namespace

Table& Table::column(std::string title, Align align) {
  titles_.push_back(std::move(title));
  aligns_.push_back(align);
  return *this;
}

Table& Table::row(std::vector<std::string> cells) {
  WEIGHTD_CHECK(cells.size() <= titles_.size());
  cells.resize(titles_.size());
  for (std::string& cell : cells) cell = printable(cell);
  rows_.push_back(std::move(cells));
  return *this;
}

std::string Table::to_string() const {
  std::vector<size_t> widths;
  for (const std::string& title : titles_) widths.push_back(display_width(title));
  for (const auto& row : rows_) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], display_width(row[i]));
  }
  std::string text;
  const auto append = [&](const std::vector<std::string>& cells) {
    std::string line;
    for (size_t i = 0; i < cells.size(); ++i) {
      const std::string padding(widths[i] - display_width(cells[i]), ' ');
      if (i > 0) line += "  ";
      line += aligns_[i] == Align::kRight ? padding + cells[i] : cells[i] + padding;
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  };
  append(titles_);
  for (const auto& row : rows_) append(row);
  return text;
}

std::string counted(uint64_t count, const std::string& noun) {
  if (count == 1) return "1 " + noun;
  const bool matrix = noun.size() >= 6 && noun.compare(noun.size() - 6, 6, "matrix") == 0;
  return std::to_string(count) + " " + (matrix ? noun.substr(0, noun.size() - 2) + "ices" : noun + "s");
}

std::string fixed(double value, int decimals) {
  if (!std::isfinite(value)) return "-";
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.*f", decimals, value);
  return text.data();
}

}  // namespace weightd::cli
