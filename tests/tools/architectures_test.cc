// SPDX-License-Identifier: Apache-2.0
#include "tools/pack/architectures.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

namespace weightd::tools {
namespace {

uint64_t parameters(const std::string& name) {
  uint64_t total = 0;
  for (const TensorPlan& tensor : plan_tensors(*find_architecture(name))) {
    uint64_t elements = 1;
    for (const uint64_t dimension : tensor.shape) elements *= dimension;
    total += elements;
  }
  return total;
}

std::map<std::string, Shape> shapes(const std::string& name) {
  std::map<std::string, Shape> result;
  for (const TensorPlan& tensor : plan_tensors(*find_architecture(name)))
    EXPECT_TRUE(result.emplace(tensor.name, tensor.shape).second);
  return result;
}

// As the models' publishers count them.
TEST(Architectures, HaveAsManyParametersAsThePublishedModels) {
  EXPECT_EQ(parameters("llama-3.1-8b"), 8'030'261'248U);
  EXPECT_EQ(parameters("llama-3.1-70b"), 70'553'706'496U);
  EXPECT_EQ(parameters("qwen3-0.6b"), 751'632'384U);  // the tied head is stored too
  EXPECT_EQ(parameters("qwen3-8b"), 8'190'735'360U);
  EXPECT_EQ(parameters("qwen3-14b"), 14'768'307'200U);
  EXPECT_EQ(parameters("qwen3-32b"), 32'762'123'264U);
  EXPECT_EQ(parameters("mixtral-8x7b-like"), 46'702'792'704U);
}

TEST(Architectures, NamesAndShapesOfLlama) {
  const auto tensors = shapes("llama-3.1-8b");
  EXPECT_EQ(tensors.size(), 291U);
  EXPECT_EQ(tensors.at("model.embed_tokens.weight"), (Shape{128256, 4096}));
  EXPECT_EQ(tensors.at("model.layers.31.self_attn.k_proj.weight"), (Shape{1024, 4096}));
  EXPECT_EQ(tensors.at("model.layers.0.mlp.down_proj.weight"), (Shape{4096, 14336}));
  EXPECT_EQ(tensors.at("model.norm.weight"), (Shape{4096}));
  EXPECT_EQ(tensors.at("lm_head.weight"), (Shape{128256, 4096}));
}

TEST(Architectures, Qwen3HasHeadNormsAndItsOwnHeadSize) {
  const auto tensors = shapes("qwen3-0.6b");
  EXPECT_EQ(tensors.at("model.layers.0.self_attn.q_proj.weight"), (Shape{2048, 1024}));
  EXPECT_EQ(tensors.at("model.layers.27.self_attn.o_proj.weight"), (Shape{1024, 2048}));
  EXPECT_EQ(tensors.at("model.layers.27.self_attn.k_norm.weight"), (Shape{128}));
  const auto plan = plan_tensors(*find_architecture("qwen3-0.6b"));
  EXPECT_EQ(plan.back().same_as, "model.embed_tokens.weight");
  EXPECT_TRUE(plan_tensors(*find_architecture("qwen3-8b")).back().same_as.empty());
}

TEST(Architectures, MixtralHasExpertsAndARouter) {
  const auto tensors = shapes("mixtral-8x7b-like");
  EXPECT_EQ(tensors.at("model.layers.0.block_sparse_moe.gate.weight"), (Shape{8, 4096}));
  EXPECT_EQ(tensors.at("model.layers.31.block_sparse_moe.experts.7.w2.weight"), (Shape{4096, 14336}));
  EXPECT_EQ(tensors.count("model.layers.0.mlp.gate_proj.weight"), 0U);
}

TEST(Architectures, EveryNameIsFoundAndItsConfigIsJson) {
  EXPECT_FALSE(find_architecture("llama").has_value());
  for (const std::string& name : architecture_names()) {
    const auto config = nlohmann::json::parse(config_json(*find_architecture(name)));
    EXPECT_EQ(config["hidden_size"], find_architecture(name)->hidden) << name;
    EXPECT_EQ(config["torch_dtype"], "bfloat16");
  }
}

}  // namespace
}  // namespace weightd::tools
