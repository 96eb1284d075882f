// SPDX-License-Identifier: Apache-2.0
#include "tools/bench/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace weightd::tools {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

Row product(const std::string& op, const std::string& name, uint64_t m, double us) {
  Row row;
  row.op = op;
  row.name = name;
  row.model = "llama-3.1-8b";
  row.n = 4096;
  row.k = 4096;
  row.m = m;
  row.us = us;
  row.best_cublas_us = 12;
  row.bits_per_weight = 12.033;
  row.escapes = 1e-4;
  row.plan = "bulk 4096x4096";
  row.gpu = "NVIDIA H200";
  row.driver = "580.1";
  row.commit = "abcdef0";
  fill_rates(row, 25'000'000, 4000);
  return row;
}

TEST(Report, ProductsAsRatiosAndInFull) {
  const std::string text = markdown_report({product("gemm_best", "qkv", 8, 10), product("gemm_best", "qkv", 1, 8),
                                            product("gemm_best", "o", 1, 6), product("cublas", "o", 1, 12)});
  EXPECT_EQ(
      text,
      "GPU NVIDIA H200, driver 580.1, commit abcdef0, 4 rows.\n"
      "\n"
      "| ratio of gemm_best | 1 | 8 |\n"
      "| --- | --- | --- |\n"
      "| llama-3.1-8b qkv | 1.500 | 1.200 |\n"
      "| llama-3.1-8b o | 2.000 | - |\n"
      "\n"
      "| op | model | name | N x K | tokens | us | best cuBLAS us | ratio | coded GB/s | of copy | TFLOP/s | bits | escapes | SM "
      "MHz | plan |\n"
      "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
      "| gemm_best | llama-3.1-8b | qkv | 4096 x 4096 | 8 | 10.0 | 12.0 | 1.200 | 2500 | 62.5 % | 26.8 | 12.033 | 1.0e-04 | - | "
      "bulk 4096x4096 |\n"
      "| gemm_best | llama-3.1-8b | qkv | 4096 x 4096 | 1 | 8.0 | 12.0 | 1.500 | 3125 | 78.1 % | 4.2 | 12.033 | 1.0e-04 | - | "
      "bulk 4096x4096 |\n"
      "| gemm_best | llama-3.1-8b | o | 4096 x 4096 | 1 | 6.0 | 12.0 | 2.000 | 4167 | 104.2 % | 5.6 | 12.033 | 1.0e-04 | - | "
      "bulk 4096x4096 |\n"
      "| cublas | llama-3.1-8b | o | 4096 x 4096 | 1 | 12.0 | 12.0 | 1.000 | 2083 | 52.1 % | 2.8 | 12.033 | 1.0e-04 | - | bulk "
      "4096x4096 |\n");
}

TEST(Report, DecompressionStandsBesideItsCopy) {
  Row decompress = product("decompress", "o", 0, 20);
  decompress.best_cublas_us = decompress.ratio = kAbsent;
  Row copy = product("copy", "o", 0, 16);
  copy.best_cublas_us = copy.ratio = kAbsent;
  Row large;
  large.op = "copy";
  large.name = "1 GiB";
  large.us = 500;
  const std::string text = markdown_report({large, decompress, copy});
  EXPECT_THAT(text, HasSubstr("| copy |  | 1 GiB | - | 500.0 | - | - | - | - | - | - |\n"));
  EXPECT_THAT(
      text,
      HasSubstr("| decompress | llama-3.1-8b | o | 4096 x 4096 | 20.0 | 1250 | 31.2 % | 16.0 | 80.0 % | 12.033 | 1.0e-04 |\n"));
  EXPECT_THAT(text, Not(HasSubstr("ratio of")));
}

TEST(Report, ChainsAndLoadsHaveTablesOfTheirOwn) {
  Row chain = product("chain", "32 layers", 8, 10);
  Row load;
  load.op = "load.upload";
  load.name = "m.wpk";
  load.us = 2500;
  load.coded_gbps = 48.25;
  load.plan = "note";
  const std::string text = markdown_report({chain, load});
  EXPECT_THAT(text, HasSubstr("| chain | llama-3.1-8b | 8 | 10.0 | 12.0 | 1.200 | 2500 | 62.5 % | bulk 4096x4096 |\n"));
  EXPECT_THAT(text, HasSubstr("| upload | m.wpk | 2.500 | 48.2 | note |\n"));
  EXPECT_THAT(text, Not(HasSubstr("| tokens | us | best cuBLAS us | ratio | coded GB/s | of copy | TFLOP/s |")));
}

TEST(Report, NamesCannotEndACellOrALine) {
  Row row = product("gemm_best", "a|b\nc", 1, 6);
  const std::string text = markdown_report({row});
  EXPECT_THAT(text, HasSubstr("a\\|b\\nc"));
}

TEST(Report, OfNoRows) { EXPECT_EQ(markdown_report({}), "GPU unknown, driver unknown, commit unknown, 0 rows.\n"); }

}  // namespace
}  // namespace weightd::tools
