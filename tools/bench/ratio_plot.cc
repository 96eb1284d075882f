// SPDX-License-Identifier: Apache-2.0
#include "tools/bench/ratio_plot.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tools/cli/table.h"

namespace weightd::tools {
namespace {

using cli::fixed;

constexpr double kPanelWidth = 560, kPanelHeight = 340;
constexpr double kLeft = 64, kTop = 56, kRight = 150, kBottom = 56;  // around the axes of one panel; the legend is at the right
constexpr double kStep = 0.1;                                        // of the horizontal lines
constexpr std::array<std::string_view, 6> kColors = {"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"};

struct Line {
  std::string name;
  std::vector<std::pair<uint64_t, double>> points;  // tokens, ratio; ascending
};
struct Panel {
  std::string model;
  std::vector<Line> lines;
};

std::string xml(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '<') {
      out += "&lt;";
    } else if (c == '&') {
      out += "&amp;";
    } else if (c == '"') {
      out += "&quot;";
    } else if (static_cast<unsigned char>(c) < 0x20) {
      out += ' ';
    } else {
      out += c;
    }
  }
  return out;
}

template <typename Item>
Item& find_or_add(std::vector<Item>& items, std::string Item::*key, const std::string& value) {
  for (Item& item : items) {
    if (item.*key == value) return item;
  }
  Item& added = items.emplace_back();
  added.*key = value;
  return added;
}

std::vector<Panel> panels_of(const std::vector<Row>& rows, std::string_view op) {
  std::vector<Panel> panels;
  for (const Row& row : rows) {
    if (row.op != op || row.m == 0 || !std::isfinite(row.ratio)) continue;
    Panel& panel = find_or_add(panels, &Panel::model, row.model);
    find_or_add(panel.lines, &Line::name, row.name).points.emplace_back(row.m, row.ratio);
  }
  for (Panel& panel : panels) {
    for (Line& line : panel.lines) std::sort(line.points.begin(), line.points.end());
  }
  return panels;
}

/// Where tokens and ratios lie on the page, the same scales for all panels.
struct Scale {
  uint64_t least_tokens = ~uint64_t{0}, most_tokens = 1;
  double least_ratio = 0.9, most_ratio = 1.1;
  double origin_x = 0;

  void cover(const std::vector<Panel>& panels) {
    for (const Panel& panel : panels) {
      for (const Line& line : panel.lines) {
        for (const auto& [tokens, ratio] : line.points) {
          least_tokens = std::min(least_tokens, tokens);
          most_tokens = std::max(most_tokens, tokens);
          least_ratio = std::min(least_ratio, std::floor(ratio / kStep) * kStep);
          most_ratio = std::max(most_ratio, std::ceil(ratio / kStep) * kStep);
        }
      }
    }
    if (most_tokens == least_tokens) most_tokens = 2 * least_tokens;
  }
  [[nodiscard]] double x(uint64_t tokens) const {
    const double span = std::log2(static_cast<double>(most_tokens) / static_cast<double>(least_tokens));
    return origin_x + kLeft + kPanelWidth * std::log2(static_cast<double>(tokens) / static_cast<double>(least_tokens)) / span;
  }
  [[nodiscard]] double y(double ratio) const { return kTop + kPanelHeight * (most_ratio - ratio) / (most_ratio - least_ratio); }
};

std::string text_at(double x, double y, std::string_view anchor, std::string_view content) {
  return "<text x=\"" + fixed(x, 1) + "\" y=\"" + fixed(y, 1) + "\" text-anchor=\"" + std::string(anchor) + "\">" + xml(content) +
         "</text>\n";
}

std::string line_between(double x1, double y1, double x2, double y2, std::string_view color, double width) {
  return "<line x1=\"" + fixed(x1, 1) + "\" y1=\"" + fixed(y1, 1) + "\" x2=\"" + fixed(x2, 1) + "\" y2=\"" + fixed(y2, 1) +
         "\" stroke=\"" + std::string(color) + "\" stroke-width=\"" + fixed(width, 1) + "\"/>\n";
}

std::string axes(const Scale& scale, const Panel& panel) {
  const double left = scale.origin_x + kLeft, right = left + kPanelWidth, bottom = kTop + kPanelHeight;
  std::string svg = text_at(left + kPanelWidth / 2, kTop - 14, "middle", panel.model);
  const auto steps = static_cast<int>(std::lround((scale.most_ratio - scale.least_ratio) / kStep));
  const int every = steps > 24 ? 5 : 1;
  for (int i = 0; i <= steps; i += every) {
    const double ratio = scale.least_ratio + i * kStep;
    svg += line_between(left, scale.y(ratio), right, scale.y(ratio), "#dddddd", 1);
    svg += text_at(left - 8, scale.y(ratio) + 4, "end", fixed(ratio, 1));
  }
  for (uint64_t tokens = scale.least_tokens; tokens <= scale.most_tokens; tokens *= 2) {
    svg += line_between(scale.x(tokens), bottom, scale.x(tokens), bottom + 5, "#000000", 1);
    svg += text_at(scale.x(tokens), bottom + 20, "middle", std::to_string(tokens));
  }
  svg += line_between(left, scale.y(1), right, scale.y(1), "#000000", 1.5);
  svg += line_between(left, kTop, left, bottom, "#000000", 1);
  svg += line_between(left, bottom, right, bottom, "#000000", 1);
  svg += text_at(left + kPanelWidth / 2, bottom + 42, "middle", "tokens");
  return svg;
}

std::string curve(const Scale& scale, const Line& line, size_t index) {
  const std::string color(kColors[index % kColors.size()]);
  std::string points, dots;
  for (const auto& [tokens, ratio] : line.points) {
    const std::string x = fixed(scale.x(tokens), 1), y = fixed(scale.y(ratio), 1);
    points += (points.empty() ? "" : " ") + x + "," + y;
    dots += "<circle cx=\"" + x + "\" cy=\"" + y + "\" r=\"3\" fill=\"" + color + "\"/>\n";
  }
  const double legend_x = scale.origin_x + kLeft + kPanelWidth + 14;
  const double legend_y = kTop + 12 + 20 * static_cast<double>(index);
  return "<polyline points=\"" + points + "\" fill=\"none\" stroke=\"" + color + "\" stroke-width=\"2\"/>\n" + dots +
         line_between(legend_x, legend_y, legend_x + 22, legend_y, color, 2) +
         text_at(legend_x + 28, legend_y + 4, "start", line.name);
}

}  // namespace

Result<std::string> ratio_plot(const std::vector<Row>& rows) {
  std::vector<Panel> panels;
  std::string op;
  for (const char* candidate : {"gemm_best", "gemm_f12", "gemm_exact"}) {
    op = candidate;
    panels = panels_of(rows, op);
    if (!panels.empty()) break;
  }
  if (panels.empty()) return Status::invalid_argument("nothing to plot: no product was measured against cuBLAS");
  Scale scale;
  scale.cover(panels);
  const double panel_width = kLeft + kPanelWidth + kRight;
  const double width = panel_width * static_cast<double>(panels.size()), height = kTop + kPanelHeight + kBottom;
  std::string svg = "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" + fixed(width, 0) + "\" height=\"" + fixed(height, 0) +
                    "\" viewBox=\"0 0 " + fixed(width, 0) + " " + fixed(height, 0) +
                    "\" font-family=\"sans-serif\" font-size=\"13\">\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n";
  const auto measured = std::find_if(rows.begin(), rows.end(), [](const Row& row) { return !row.gpu.empty(); });
  svg += text_at(
      kLeft, 20, "start",
      "best cuBLAS time over " + op + " time" + (measured == rows.end() ? "" : ", " + measured->gpu) + " (higher is faster)");
  for (const Panel& panel : panels) {
    svg += axes(scale, panel);
    for (size_t i = 0; i < panel.lines.size(); ++i) svg += curve(scale, panel.lines[i], i);
    scale.origin_x += panel_width;
  }
  return svg + "</svg>\n";
}

}  // namespace weightd::tools
