// SPDX-License-Identifier: Apache-2.0
#include "tools/pack/architectures.h"

#include <utility>

#include "tools/cli/json.h"

namespace weightd::tools {
namespace {

constexpr Architecture kArchitectures[] = {
    // name, family, hidden, intermediate, layers, heads, kv heads, head dim, vocabulary, experts, of them used, tied, theta, eps,
    // positions
    {"llama-3.1-8b", Family::kLlama, 4096, 14336, 32, 32, 8, 128, 128256, 0, 0, false, 500000, 1e-5, 131072},
    {"llama-3.1-70b", Family::kLlama, 8192, 28672, 80, 64, 8, 128, 128256, 0, 0, false, 500000, 1e-5, 131072},
    {"qwen3-0.6b", Family::kQwen3, 1024, 3072, 28, 16, 8, 128, 151936, 0, 0, true, 1000000, 1e-6, 40960},
    {"qwen3-8b", Family::kQwen3, 4096, 12288, 36, 32, 8, 128, 151936, 0, 0, false, 1000000, 1e-6, 40960},
    {"qwen3-14b", Family::kQwen3, 5120, 17408, 40, 40, 8, 128, 151936, 0, 0, false, 1000000, 1e-6, 40960},
    {"qwen3-32b", Family::kQwen3, 5120, 25600, 64, 64, 8, 128, 151936, 0, 0, false, 1000000, 1e-6, 40960},
    {"mixtral-8x7b-like", Family::kMixtral, 4096, 14336, 32, 32, 8, 128, 32000, 8, 2, false, 1000000, 1e-5, 32768},
    // Not published: the same names, small enough for a test.
    {"tiny-llama", Family::kLlama, 256, 704, 2, 4, 2, 64, 1024, 0, 0, false, 10000, 1e-5, 2048},
    {"tiny-qwen3", Family::kQwen3, 256, 704, 2, 4, 2, 64, 1024, 0, 0, true, 10000, 1e-6, 2048},
    {"tiny-moe", Family::kMixtral, 256, 512, 2, 4, 2, 64, 1024, 4, 2, false, 10000, 1e-5, 2048},
};

void add_attention(const Architecture& a, const std::string& layer, std::vector<TensorPlan>& plan) {
  const std::string attention = layer + "self_attn.";
  plan.push_back({attention + "q_proj.weight", {a.heads * a.head_dim, a.hidden}, false, {}});
  plan.push_back({attention + "k_proj.weight", {a.kv_heads * a.head_dim, a.hidden}, false, {}});
  plan.push_back({attention + "v_proj.weight", {a.kv_heads * a.head_dim, a.hidden}, false, {}});
  plan.push_back({attention + "o_proj.weight", {a.hidden, a.heads * a.head_dim}, false, {}});
  if (a.family != Family::kQwen3) return;
  plan.push_back({attention + "q_norm.weight", {a.head_dim}, true, {}});
  plan.push_back({attention + "k_norm.weight", {a.head_dim}, true, {}});
}

void add_mlp(const Architecture& a, const std::string& layer, std::vector<TensorPlan>& plan) {
  if (a.family != Family::kMixtral) {
    plan.push_back({layer + "mlp.gate_proj.weight", {a.intermediate, a.hidden}, false, {}});
    plan.push_back({layer + "mlp.up_proj.weight", {a.intermediate, a.hidden}, false, {}});
    plan.push_back({layer + "mlp.down_proj.weight", {a.hidden, a.intermediate}, false, {}});
    return;
  }
  const std::string moe = layer + "block_sparse_moe.";
  plan.push_back({moe + "gate.weight", {a.experts, a.hidden}, false, {}});
  for (uint64_t e = 0; e < a.experts; ++e) {
    const std::string expert = moe + "experts." + std::to_string(e) + ".";
    plan.push_back({expert + "w1.weight", {a.intermediate, a.hidden}, false, {}});
    plan.push_back({expert + "w2.weight", {a.hidden, a.intermediate}, false, {}});
    plan.push_back({expert + "w3.weight", {a.intermediate, a.hidden}, false, {}});
  }
}

struct FamilyNames {
  const char* model_class;
  const char* model_type;
};
FamilyNames names_of(Family family) {
  switch (family) {
    case Family::kLlama:
      return {"LlamaForCausalLM", "llama"};
    case Family::kQwen3:
      return {"Qwen3ForCausalLM", "qwen3"};
    case Family::kMixtral:
      return {"MixtralForCausalLM", "mixtral"};
  }
  return {"", ""};
}

}  // namespace

std::vector<std::string> architecture_names() {
  std::vector<std::string> names;
  for (const Architecture& architecture : kArchitectures) names.emplace_back(architecture.name);
  return names;
}

std::optional<Architecture> find_architecture(std::string_view name) {
  for (const Architecture& architecture : kArchitectures) {
    if (architecture.name == name) return architecture;
  }
  return std::nullopt;
}

std::vector<TensorPlan> plan_tensors(const Architecture& a) {
  std::vector<TensorPlan> plan;
  const std::string embedding = "model.embed_tokens.weight";
  plan.push_back({embedding, {a.vocab, a.hidden}, false, {}});
  for (uint64_t i = 0; i < a.layers; ++i) {
    const std::string layer = "model.layers." + std::to_string(i) + ".";
    plan.push_back({layer + "input_layernorm.weight", {a.hidden}, true, {}});
    add_attention(a, layer, plan);
    plan.push_back({layer + "post_attention_layernorm.weight", {a.hidden}, true, {}});
    add_mlp(a, layer, plan);
  }
  plan.push_back({"model.norm.weight", {a.hidden}, true, {}});
  plan.push_back({"lm_head.weight", {a.vocab, a.hidden}, false, a.tied ? embedding : std::string()});
  return plan;
}

std::string config_json(const Architecture& a) {
  const FamilyNames names = names_of(a.family);
  cli::Json classes = cli::Json::array();
  classes.push(names.model_class);
  cli::Json config = cli::Json::object();
  config.set("architectures", std::move(classes))
      .set("attention_bias", false)
      .set("head_dim", a.head_dim)
      .set("hidden_act", "silu")
      .set("hidden_size", a.hidden)
      .set("intermediate_size", a.intermediate)
      .set("max_position_embeddings", a.max_positions)
      .set("model_type", names.model_type)
      .set("num_attention_heads", a.heads)
      .set("num_hidden_layers", a.layers)
      .set("num_key_value_heads", a.kv_heads)
      .set("rms_norm_eps", a.norm_eps)
      .set("rope_theta", a.rope_theta)
      .set("tie_word_embeddings", a.tied)
      .set("torch_dtype", "bfloat16")
      .set("vocab_size", a.vocab);
  if (a.experts > 0) config.set("num_local_experts", a.experts).set("num_experts_per_tok", a.experts_per_token);
  return config.dump();
}

}  // namespace weightd::tools
