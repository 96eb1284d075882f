// SPDX-License-Identifier: Apache-2.0
#include "tools/bench/row.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/support/safetensors_builder.h"

namespace weightd::tools {
namespace {

using ::testing::HasSubstr;

Row product() {
  Row row;
  row.op = "gemm_f12";
  row.name = "qkv";
  row.model = "llama-3.1-8b";
  row.n = 6144;
  row.k = 4096;
  row.m = 16;
  row.us = 10;
  row.best_cublas_us = 14;
  row.plan = "bulk 6144x4096";
  row.gpu = "NVIDIA H200";
  row.driver = "580.1";
  row.commit = "abcdef0";
  return row;
}

TEST(Row, BytesThatCount) {
  EXPECT_EQ(counted_bytes("cublas", 12, 16), 16U);
  EXPECT_EQ(counted_bytes("gemm_f12", 12, 16), 12U);
  EXPECT_EQ(counted_bytes("gemm_exact", 12, 16), 12U);
  EXPECT_EQ(counted_bytes("gemm_best", 12, 16), 12U);
  EXPECT_EQ(counted_bytes("decompress", 12, 16), 28U);
  EXPECT_EQ(counted_bytes("copy", 12, 16), 28U);
  EXPECT_EQ(counted_bytes("hash", 12, 16), 0U);
}

TEST(Row, RatesFollowFromTheTime) {
  Row row = product();
  fill_rates(row, 37'748'736, 4200);  // 12 bits a weight
  EXPECT_DOUBLE_EQ(row.ratio, 1.4);
  EXPECT_DOUBLE_EQ(row.coded_gbps, 3774.8736);
  EXPECT_DOUBLE_EQ(row.copy_fraction, 3774.8736 / 4200);
  EXPECT_DOUBLE_EQ(row.tflops, 80.530'636'8);  // 2 * 6144 * 4096 * 16 in 10 us
}

TEST(Row, WhatCannotBeKnownStaysAbsent) {
  Row row;
  row.op = "decompress";
  row.n = row.k = 64;
  row.us = 2;
  fill_rates(row, 4000, kAbsent);
  EXPECT_TRUE(std::isnan(row.ratio));
  EXPECT_TRUE(std::isnan(row.tflops));
  EXPECT_DOUBLE_EQ(row.coded_gbps, 2);
  EXPECT_TRUE(std::isnan(row.copy_fraction));
  Row unmeasured = product();
  unmeasured.us = kAbsent;
  fill_rates(unmeasured, 4000, 4200);
  EXPECT_TRUE(std::isnan(unmeasured.ratio));
  EXPECT_TRUE(std::isnan(unmeasured.coded_gbps));
  Row no_bytes = product();
  fill_rates(no_bytes, 0, 4200);
  EXPECT_TRUE(std::isnan(no_bytes.coded_gbps));
}

TEST(Row, JsonHasEveryFieldByItsName) {
  const auto json = nlohmann::json::parse(to_json(std::vector<Row>(1, product())).dump());
  ASSERT_EQ(json.size(), 1U);
  for (const char* field : {"op", "name", "model", "n", "k", "m", "us", "best_cublas_us", "ratio", "coded_gbps", "copy_fraction",
                            "tflops", "bits_per_weight", "plan", "gpu", "driver", "commit"}) {
    EXPECT_TRUE(json[0].contains(field)) << field;
  }
  EXPECT_EQ(json[0]["n"], 6144);
  EXPECT_EQ(json[0]["us"], 10.0);
  EXPECT_TRUE(json[0]["ratio"].is_null());
}

TEST(Row, JsonComesBackAsItWas) {
  Row full = product();
  fill_rates(full, 1000, 4200);
  full.bits_per_weight = 12.03;
  full.escapes = 1e-4;
  full.sm_mhz = 1980;
  full.power_w = 512.5;
  full.temperature_c = 40;
  const Result<std::vector<Row>> back = parse_rows(to_json(std::vector<Row>(2, full)).dump(), "x");
  ASSERT_TRUE(back.ok()) << back.status().to_string();
  ASSERT_EQ(back->size(), 2U);
  EXPECT_EQ((*back)[1], full);
}

TEST(Row, UnknownFieldsArePassedOverAndMissingOnesAbsent) {
  const Result<std::vector<Row>> rows = parse_rows(R"([{"op": "copy", "newer": [1], "us": null}])", "x");
  ASSERT_TRUE(rows.ok()) << rows.status().to_string();
  EXPECT_EQ(rows->front().op, "copy");
  EXPECT_EQ(rows->front().m, 0U);
  EXPECT_TRUE(std::isnan(rows->front().us));
}

TEST(Row, WhatIsNoListOfRowsIsRefusedWithThePlace) {
  struct Case {
    const char *text, *message;
  };
  for (const Case& bad : {Case{"{", "is not JSON"}, Case{"{}", "is not a list of rows"}, Case{"[1]", "row 0 is not an object"},
                          Case{R"([{"op": "copy"}, {"us": 1}])", "row 1: field 'op' is missing"},
                          Case{R"([{"op": "copy", "us": "fast"}])", "row 0: field 'us' has the wrong type"},
                          Case{R"([{"op": "copy", "n": -1}])", "row 0: field 'n' has the wrong type"},
                          Case{R"([{"op": "copy", "n": 1.5}])", "row 0: field 'n' has the wrong type"},
                          Case{R"([{"op": 3}])", "row 0: field 'op' has the wrong type"}}) {
    const Result<std::vector<Row>> rows = parse_rows(bad.text, "f.json");
    ASSERT_FALSE(rows.ok()) << bad.text;
    EXPECT_EQ(rows.status().code(), StatusCode::kCorruption);
    EXPECT_EQ(rows.status().message(), std::string("f.json: ") + bad.message);
  }
}

TEST(Row, FilesAreReplacedAsAWhole) {
  const testing::TempDir dir;
  const std::string path = dir / "rows.json";
  ASSERT_TRUE(write_rows(path, std::vector<Row>(3, product())).ok());
  ASSERT_TRUE(write_rows(path, std::vector<Row>(1, product())).ok());
  const Result<std::vector<Row>> rows = read_rows(path);
  ASSERT_TRUE(rows.ok()) << rows.status().to_string();
  EXPECT_EQ(rows->size(), 1U);
  // Nothing else is left in the folder.
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir.path()), {}), 1);
  EXPECT_EQ(read_rows(dir / "none.json").status().code(), StatusCode::kNotFound);
  EXPECT_EQ(write_rows(dir / "none/rows.json", {}).code(), StatusCode::kNotFound);
  EXPECT_EQ(read_rows(dir.path()).status().code(), StatusCode::kInvalidArgument);
}

TEST(Row, CommitOfABuild) {
  EXPECT_EQ(commit_of("1.2.3 (abcdef0)"), "abcdef0");
  EXPECT_EQ(commit_of("1.2.3"), "1.2.3");
  EXPECT_EQ(commit_of(""), "");
}

}  // namespace
}  // namespace weightd::tools
