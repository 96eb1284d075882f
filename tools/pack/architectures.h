// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "weightd/types.h"

/// Names and shapes of published models, as their safetensors checkpoints have them.
namespace weightd::tools {

enum class Family { kLlama, kQwen3, kMixtral };

struct Architecture {
  std::string_view name;  // as --arch takes it
  Family family{};
  uint64_t hidden = 0, intermediate = 0, layers = 0, heads = 0, kv_heads = 0, head_dim = 0, vocab = 0;
  uint64_t experts = 0, experts_per_token = 0;  // Mixtral only
  bool tied = false;                            // lm_head is stored too, equal to the embedding, as Qwen3-0.6B does
  double rope_theta = 0, norm_eps = 0;
  uint64_t max_positions = 0;
};

[[nodiscard]] std::vector<std::string> architecture_names();
[[nodiscard]] std::optional<Architecture> find_architecture(std::string_view name);

struct TensorPlan {
  std::string name;
  Shape shape;
  bool norm = false;    // a vector of values around 1
  std::string same_as;  // not empty: has the values of this tensor
};
/// All tensors in the order of the model: embedding, layers, final norm, head.
[[nodiscard]] std::vector<TensorPlan> plan_tensors(const Architecture& architecture);

/// config.json as the model's publisher writes it, for BF16 weights.
[[nodiscard]] std::string config_json(const Architecture& architecture);

}  // namespace weightd::tools
