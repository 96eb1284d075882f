// SPDX-License-Identifier: Apache-2.0
#include "tools/bench/report.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string_view>
#include <utility>

#include "base/text.h"
#include "tools/cli/table.h"

namespace weightd::tools {
namespace {

using cli::fixed;

/// A table as Markdown has it. Text is escaped so that no cell ends early.
class MarkdownTable {
 public:
  explicit MarkdownTable(const std::vector<std::string>& titles) {
    row(titles);
    text_ += "|";
    for (size_t i = 0; i < titles.size(); ++i) text_ += " --- |";
    text_ += "\n";
  }
  void row(const std::vector<std::string>& cells) {
    text_ += "|";
    for (const std::string& cell : cells) text_ += " " + escaped(cell) + " |";
    text_ += "\n";
  }
  [[nodiscard]] const std::string& text() const { return text_; }

 private:
  static std::string escaped(const std::string& cell) {
    std::string out;
    for (const char c : printable(cell)) {
      if (c == '|') out += '\\';
      out += c;
    }
    return out;
  }
  std::string text_;
};

/// The values in the order in which they come first.
class Ordered {
 public:
  void add(const std::string& value) {
    if (std::find(values_.begin(), values_.end(), value) == values_.end()) values_.push_back(value);
  }
  [[nodiscard]] const std::vector<std::string>& values() const { return values_; }

 private:
  std::vector<std::string> values_;
};

std::string percent(double share) { return std::isfinite(share) ? fixed(100 * share, 1) + " %" : "-"; }
std::string rate(double share) {
  if (!std::isfinite(share)) return "-";
  char text[32];
  std::snprintf(text, sizeof text, "%.1e", share);
  return text;
}
std::string size_of(const Row& row) { return std::to_string(row.n) + " x " + std::to_string(row.k); }
bool is_product(const Row& row) { return row.m > 0 && !row.op.starts_with("chain"); }

std::string joined(const std::vector<std::string>& values) {
  std::string text;
  for (const std::string& value : values) text += (text.empty() ? "" : ", ") + printable(value);
  return text.empty() ? "unknown" : text;
}

std::string where_measured(const std::vector<Row>& rows) {
  Ordered gpus, drivers, commits;
  for (const Row& row : rows) {
    if (!row.gpu.empty()) gpus.add(row.gpu);
    if (!row.driver.empty()) drivers.add(row.driver);
    if (!row.commit.empty()) commits.add(row.commit);
  }
  return "GPU " + joined(gpus.values()) + ", driver " + joined(drivers.values()) + ", commit " + joined(commits.values()) + ", " +
         cli::counted(rows.size(), "row") + ".\n";
}

/// Ratios of one op, shapes down, tokens across; one table for each escape rate that was asked for.
std::string ratio_table(const std::vector<Row>& rows, const std::string& op) {
  std::vector<uint64_t> tokens;
  Ordered shapes;
  std::map<std::pair<std::string, uint64_t>, double> ratios;
  for (const Row& row : rows) {
    if (row.op != op || !std::isfinite(row.ratio) || !is_product(row)) continue;
    const std::string shape = row.model + " " + row.name;
    shapes.add(shape);
    if (std::find(tokens.begin(), tokens.end(), row.m) == tokens.end()) tokens.push_back(row.m);
    ratios[{shape, row.m}] = row.ratio;
  }
  if (ratios.empty()) return {};
  std::sort(tokens.begin(), tokens.end());
  std::vector<std::string> titles = {"ratio of " + op};
  for (const uint64_t m : tokens) titles.push_back(std::to_string(m));
  MarkdownTable table(titles);
  for (const std::string& shape : shapes.values()) {
    std::vector<std::string> cells = {shape};
    for (const uint64_t m : tokens) {
      const auto found = ratios.find({shape, m});
      cells.push_back(found == ratios.end() ? "-" : fixed(found->second, 3));
    }
    table.row(cells);
  }
  return "\n" + table.text();
}

std::string products_table(const std::vector<Row>& rows) {
  MarkdownTable table({"op", "model", "name", "N x K", "tokens", "us", "best cuBLAS us", "ratio", "coded GB/s", "of copy",
                       "TFLOP/s", "bits", "escapes", "SM MHz", "plan"});
  bool any = false;
  for (const Row& row : rows) {
    if (!is_product(row)) continue;
    any = true;
    table.row({row.op, row.model, row.name, size_of(row), std::to_string(row.m), fixed(row.us, 1), fixed(row.best_cublas_us, 1),
               fixed(row.ratio, 3), fixed(row.coded_gbps, 0), percent(row.copy_fraction), fixed(row.tflops, 1),
               fixed(row.bits_per_weight, 3), rate(row.escapes), fixed(row.sm_mhz, 0), row.plan});
  }
  return any ? "\n" + table.text() : std::string();
}

std::string decompress_table(const std::vector<Row>& rows) {
  std::map<std::pair<std::string, std::string>, double> copy_us;
  for (const Row& row : rows) {
    if (row.op == "copy") copy_us[{row.model, row.name}] = row.us;
  }
  MarkdownTable table(
      {"op", "model", "name", "N x K", "us", "GB/s", "of 1 GiB copy", "same-size copy us", "of it", "bits", "escapes"});
  bool any = false;
  for (const Row& row : rows) {
    if (row.op != "decompress" && row.op != "copy" && row.op != "hash") continue;
    any = true;
    const auto copy = copy_us.find({row.model, row.name});
    const double same = row.op == "decompress" && copy != copy_us.end() ? copy->second : kAbsent;
    table.row({row.op, row.model, row.name, row.n > 0 ? size_of(row) : "-", fixed(row.us, 1), fixed(row.coded_gbps, 0),
               percent(row.copy_fraction), fixed(same, 1), percent(same / row.us), fixed(row.bits_per_weight, 3),
               rate(row.escapes)});
  }
  return any ? "\n" + table.text() : std::string();
}

std::string chain_table(const std::vector<Row>& rows) {
  MarkdownTable table({"chain", "model", "tokens", "us", "best cuBLAS us", "ratio", "coded GB/s", "of copy", "plan"});
  bool any = false;
  for (const Row& row : rows) {
    if (!row.op.starts_with("chain")) continue;
    any = true;
    table.row({row.op, row.model, std::to_string(row.m), fixed(row.us, 1), fixed(row.best_cublas_us, 1), fixed(row.ratio, 3),
               fixed(row.coded_gbps, 0), percent(row.copy_fraction), row.plan});
  }
  return any ? "\n" + table.text() : std::string();
}

std::string load_table(const std::vector<Row>& rows) {
  MarkdownTable table({"step", "of", "ms", "GB/s", "note"});
  bool any = false;
  for (const Row& row : rows) {
    if (!row.op.starts_with("load.")) continue;
    any = true;
    table.row({row.op.substr(5), row.name, fixed(row.us / 1e3, 3), fixed(row.coded_gbps, 1), row.plan});
  }
  return any ? "\n" + table.text() : std::string();
}

}  // namespace

std::string markdown_report(const std::vector<Row>& rows) {
  std::string text = where_measured(rows);
  for (const char* op : {"gemm_best", "gemm_f12", "gemm_exact"}) text += ratio_table(rows, op);
  text += products_table(rows);
  text += decompress_table(rows);
  text += chain_table(rows);
  text += load_table(rows);
  return text;
}

}  // namespace weightd::tools
