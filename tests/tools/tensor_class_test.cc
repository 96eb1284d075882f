// SPDX-License-Identifier: Apache-2.0
#include "tools/pack/tensor_class.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace weightd::tools {
namespace {

TEST(TensorClass, KnowsTheNamesOfPublishedModels) {
  const std::vector<std::pair<std::string, std::string>> expected = {
      // Llama, Mistral, Qwen
      {"model.embed_tokens.weight", "embedding"},
      {"model.layers.0.input_layernorm.weight", "norm"},
      {"model.layers.31.self_attn.q_proj.weight", "attention"},
      {"model.layers.31.self_attn.q_proj.bias", "attention"},
      {"model.layers.3.self_attn.q_norm.weight", "norm"},
      {"model.layers.3.mlp.gate_proj.weight", "mlp"},
      {"model.norm.weight", "norm"},
      {"lm_head.weight", "head"},
      // the models' own format
      {"tok_embeddings.weight", "embedding"},
      {"layers.0.attention.wq.weight", "attention"},
      {"layers.0.feed_forward.w1.weight", "mlp"},
      {"output.weight", "head"},
      // mixtures of experts
      {"model.layers.0.block_sparse_moe.experts.7.w1.weight", "expert"},
      {"model.layers.0.block_sparse_moe.gate.weight", "other"},
      {"model.layers.0.mlp.experts.127.down_proj.weight", "expert"},
      {"model.layers.0.mlp.experts.gate_up_proj", "expert"},
      {"model.layers.0.mlp.gate.weight", "other"},
      {"model.layers.0.mlp.shared_experts.up_proj.weight", "expert"},
      {"model.layers.0.mlp.shared_expert.up_proj.weight", "expert"},
      {"model.layers.0.mlp.shared_expert_gate.weight", "other"},
      // GPT-2, GPT-NeoX, BERT
      {"wte.weight", "embedding"},
      {"h.0.ln_1.weight", "norm"},
      {"h.0.attn.c_attn.weight", "attention"},
      {"h.0.mlp.c_fc.weight", "mlp"},
      {"gpt_neox.embed_in.weight", "embedding"},
      {"embed_out.weight", "head"},
      {"embeddings.word_embeddings.weight", "embedding"},
      {"embeddings.LayerNorm.weight", "norm"},
      {"encoder.layer.0.attention.output.dense.weight", "attention"},
      {"encoder.layer.0.intermediate.dense.weight", "mlp"},
      {"encoder.layer.0.output.dense.weight", "mlp"},
      // nothing to go by
      {"", "other"},
      {"vision_tower.patch.weight", "other"},
  };
  for (const auto& [name, tensor_class] : expected) EXPECT_EQ(tensor_class_name(classify_tensor(name)), tensor_class) << name;
}

}  // namespace
}  // namespace weightd::tools
