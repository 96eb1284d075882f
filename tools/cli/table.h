// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace weightd::cli {

enum class Align { kLeft, kRight };

/// A table for people: columns two spaces apart, as wide as their widest cell. Cells go through printable() when added, so no cell
/// can forge a line or move the cursor.
class Table {
 public:
  Table& column(std::string title, Align align = Align::kLeft);
  /// As many cells as there are columns; missing ones are empty.
  Table& row(std::vector<std::string> cells);
  [[nodiscard]] bool empty() const { return rows_.empty(); }
  /// Title line and rows, no trailing spaces, each line ended.
  [[nodiscard]] std::string to_string() const;

 private:
  std::vector<std::string> titles_;
  std::vector<Align> aligns_;
  std::vector<std::vector<std::string>> rows_;
};

/// "1 tensor", "2 tensors".
[[nodiscard]] std::string counted(uint64_t count, const std::string& noun);
/// Fixed point with `decimals` digits; "-" for a value that is not finite.
[[nodiscard]] std::string fixed(double value, int decimals);

}  // namespace weightd::cli
