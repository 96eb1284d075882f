// SPDX-License-Identifier: Apache-2.0
#include "tools/bench/ratio_plot.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <regex>
#include <string>
#include <vector>

namespace weightd::tools {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

Row point(const std::string& op, const std::string& model, const std::string& name, uint64_t m, double ratio) {
  Row row;
  row.op = op;
  row.model = model;
  row.name = name;
  row.n = row.k = 64;
  row.m = m;
  row.us = 10;
  row.ratio = ratio;
  row.gpu = "NVIDIA H200";
  return row;
}

size_t count_of(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST(RatioPlot, OnePanelAModelOneLineAShape) {
  const Result<std::string> svg = ratio_plot({point("gemm_best", "8b", "qkv", 1, 1.4), point("gemm_best", "8b", "qkv", 2, 1.2),
                                              point("gemm_best", "8b", "o", 1, 1.3), point("gemm_best", "70b", "qkv", 1, 1.35),
                                              point("gemm_f12", "8b", "down", 1, 9)});
  ASSERT_TRUE(svg.ok()) << svg.status().to_string();
  EXPECT_EQ(count_of(*svg, "<polyline"), 3U);
  EXPECT_EQ(count_of(*svg, "<circle"), 4U);
  EXPECT_EQ(count_of(*svg, ">8b</text>"), 1U);
  EXPECT_EQ(count_of(*svg, ">70b</text>"), 1U);
  EXPECT_EQ(count_of(*svg, ">tokens</text>"), 2U);
  EXPECT_EQ(count_of(*svg, ">qkv</text>"), 2U);
  EXPECT_THAT(*svg, HasSubstr("NVIDIA H200"));
  EXPECT_THAT(*svg, Not(HasSubstr(">down<")));
}

TEST(RatioPlot, PlacesFollowTokensAndRatio) {
  const Result<std::string> svg = ratio_plot(
      {point("gemm_best", "8b", "qkv", 4, 1.3), point("gemm_best", "8b", "qkv", 1, 0.9), point("gemm_best", "8b", "qkv", 2, 1.1)});
  ASSERT_TRUE(svg.ok());
  std::smatch match;
  const std::regex three("<polyline points=\"([0-9.]+),([0-9.]+) ([0-9.]+),([0-9.]+) ([0-9.]+),([0-9.]+)\"");
  ASSERT_TRUE(std::regex_search(*svg, match, three)) << *svg;
  const auto at = [&](size_t i) { return std::stod(match[i].str()); };
  EXPECT_NEAR(at(3) - at(1), at(5) - at(3), 0.2);  // powers of two are equally far apart
  EXPECT_GT(at(3), at(1));
  EXPECT_NEAR(at(2) - at(4), at(4) - at(6), 0.2);  // up is faster
  EXPECT_GT(at(2), at(4));
}

TEST(RatioPlot, TakesTheFusedKernelWhereNoRouteWasMeasured) {
  const Result<std::string> svg = ratio_plot({point("gemm_f12", "8b", "qkv", 1, 1.4), point("gemm_exact", "8b", "o", 1, 0.5)});
  ASSERT_TRUE(svg.ok());
  EXPECT_THAT(*svg, HasSubstr("gemm_f12 time"));
  EXPECT_EQ(count_of(*svg, "<polyline"), 1U);
}

TEST(RatioPlot, NothingToDrawIsAnError) {
  EXPECT_EQ(ratio_plot({}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(ratio_plot({point("gemm_best", "8b", "qkv", 1, kAbsent)}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(ratio_plot({point("cublas", "8b", "qkv", 1, 1)}).status().code(), StatusCode::kInvalidArgument);
}

TEST(RatioPlot, NamesStayText) {
  const Result<std::string> svg = ratio_plot({point("gemm_best", "<b>&\"", "q\x01", 1, 1.4)});
  ASSERT_TRUE(svg.ok());
  EXPECT_THAT(*svg, HasSubstr("&lt;b>&amp;&quot;"));
  EXPECT_EQ(svg->find('\x01'), std::string::npos);
}

}  // namespace
}  // namespace weightd::tools
