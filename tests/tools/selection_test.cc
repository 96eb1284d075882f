// SPDX-License-Identifier: Apache-2.0
#include "tools/bench/selection.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace weightd::tools {
namespace {

TEST(Selection, ShapesOfBothModels) {
  const Result<std::vector<BenchShape>> all = select_shapes("all", kDefaultShapes);
  ASSERT_TRUE(all.ok());
  EXPECT_EQ(*all, bench_shapes());
  ASSERT_EQ(all->size(), 10U);
  // What a model of 32 and 80 layers has in its products, heads counted once.
  uint64_t weights_8b = 0, weights_70b = 0;
  for (const BenchShape& shape : *all) {
    const bool head = shape.name == "head";
    if (shape.model == "llama-3.1-8b") weights_8b += shape.n * shape.k * (head ? 1 : 32);
    if (shape.model == "llama-3.1-70b") weights_70b += shape.n * shape.k * (head ? 1 : 80);
  }
  EXPECT_EQ(weights_8b, 7'504'658'432U);    // 8.03e9 less the embedding and the norms
  EXPECT_EQ(weights_70b, 69'501'714'432U);  // 70.6e9 likewise
}

TEST(Selection, SomeShapesOfOneModelInTheOrderOfAForwardPass) {
  const Result<std::vector<BenchShape>> some = select_shapes("llama-3.1-70b", "head,qkv");
  ASSERT_TRUE(some.ok());
  EXPECT_EQ(*some, (std::vector<BenchShape>{{"llama-3.1-70b", "qkv", 10240, 8192}, {"llama-3.1-70b", "head", 128256, 8192}}));
}

TEST(Selection, UnknownWordsAreNamed) {
  EXPECT_EQ(select_shapes("all", "qkv,gate").status().message(), "--shapes: 'gate' is not one of qkv,o,gate_up,down,head");
  EXPECT_EQ(select_shapes("all", "").status().message(), "--shapes: '' is not one of qkv,o,gate_up,down,head");
  EXPECT_EQ(select_shapes("gpt", "qkv").status().message(), "--model: there is no 'gpt'");
  EXPECT_EQ(parse_ops("copy,\n").status().message(),
            "--op: '\\n' is not one of copy,cublas,gemm_f12,gemm_exact,decompress,gemm_best,hash");
}

TEST(Selection, TokensAscendAndOccurOnce) {
  EXPECT_EQ(*parse_tokens("64,1,64,8192"), (std::vector<uint64_t>{1, 64, 8192}));
  EXPECT_EQ(parse_tokens(kDefaultTokens)->size(), 14U);
  for (const char* bad : {"", "0", "1,", ",1", "x", "1.5", "-1", "1048577", "99999999999999999999", "1 "}) {
    EXPECT_EQ(parse_tokens(bad).status().code(), StatusCode::kInvalidArgument) << bad;
  }
}

TEST(Selection, EscapesAreShares) {
  EXPECT_EQ(*parse_escapes("0,1e-4,1.5e-2,1"), (std::vector<double>{0, 1e-4, 1.5e-2, 1}));
  EXPECT_TRUE(parse_escapes("")->empty());
  for (const char* bad : {"-0.1", "1.01", "nan", "inf", "0x1", "0,", "1e"}) {
    EXPECT_EQ(parse_escapes(bad).status().code(), StatusCode::kInvalidArgument) << bad;
  }
}

}  // namespace
}  // namespace weightd::tools
