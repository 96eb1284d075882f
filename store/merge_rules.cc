// SPDX-License-Identifier: Apache-2.0
#include "store/merge_rules.h"

#include <algorithm>
#include <array>
#include <unordered_map>
#include <unordered_set>

#include "store/tile_layout.h"

namespace weightd::store {
namespace {

constexpr std::string_view kWeight = ".weight";

// Parts of a prefix that mark attention whose queries and keys come from different activations.
constexpr std::array<std::string_view, 3> kCrossAttention = {"encoder_attn", "EncDecAttention", "cross"};

constexpr std::array<MergeRule, 8> kRules = {{
    {{"q_proj", "k_proj", "v_proj"}, "qkv_proj"},        // Llama, Qwen, Mistral, Gemma, OPT
    {{"gate_proj", "up_proj"}, "gate_up_proj"},          // their MLPs and experts
    {{"query", "key", "value"}, "qkv"},                  // BERT, ViT: attention.self.qkv
    {{"q_lin", "k_lin", "v_lin"}, "qkv_lin"},            // DistilBERT
    {{"q", "k", "v"}, "qkv"},                            // T5
    {{"w1", "w3"}, "w1w3"},                              // Mixtral's experts, Llama's own names, InternLM2
    {{"wq", "wk", "wv"}, "wqkv"},                        // Llama's own names
    {{"q_a_proj", "kv_a_proj_with_mqa"}, "qkv_a_proj"},  // DeepSeek's latent attention
}};

struct SplitName {
  std::string_view prefix;  // "model.layers.0.self_attn."
  std::string_view member;  // "q_proj"
};

// The member is empty when the name cannot take part.
SplitName split(std::string_view name) {
  if (!name.ends_with(kWeight)) return {};
  name.remove_suffix(kWeight.size());
  const size_t dot = name.rfind('.');
  const size_t begin = dot == std::string_view::npos ? 0 : dot + 1;
  return {name.substr(0, begin), name.substr(begin)};
}

bool is_cross_attention(std::string_view prefix) {
  return std::any_of(kCrossAttention.begin(), kCrossAttention.end(),
                     [&](std::string_view mark) { return prefix.find(mark) != std::string_view::npos; });
}

class Finder {
 public:
  explicit Finder(std::span<const MergeInput> tensors) : tensors_(tensors) {
    for (uint32_t i = 0; i < tensors.size(); ++i) by_name_.emplace(tensors[i].name, i);
  }

  // The group whose first member is tensor `first`, if it is one and all is well; else one without members.
  [[nodiscard]] MergeGroup group(const MergeRule& rule, uint32_t first, std::string_view prefix) const {
    MergeGroup group;
    group.name = std::string(prefix) + std::string(rule.merged) + std::string(kWeight);
    if (by_name_.count(group.name) != 0) return {};
    for (const std::string_view member : rule.members) {
      if (member.empty()) break;
      const auto found = by_name_.find(std::string(prefix) + std::string(member) + std::string(kWeight));
      if (found == by_name_.end()) return {};
      const MergeInput& tensor = tensors_[found->second];
      if (!tensor.eligible || tensor.k != tensors_[first].k || tensor.n % f12::kUnitRows != 0) return {};
      group.members.push_back(found->second);
    }
    return group;
  }

 private:
  std::span<const MergeInput> tensors_;
  std::unordered_map<std::string, uint32_t> by_name_;
};

}  // namespace

std::span<const MergeRule> merge_rules() { return kRules; }

std::vector<MergeGroup> find_merge_groups(std::span<const MergeInput> tensors) {
  std::unordered_map<std::string_view, const MergeRule*> rule_of_first;
  for (const MergeRule& rule : merge_rules()) rule_of_first.emplace(rule.members.front(), &rule);
  const Finder finder(tensors);
  std::vector<MergeGroup> groups;
  for (uint32_t i = 0; i < tensors.size(); ++i) {
    const SplitName name = split(tensors[i].name);
    const auto rule = rule_of_first.find(name.member);
    if (rule == rule_of_first.end() || !tensors[i].eligible || is_cross_attention(name.prefix)) continue;
    MergeGroup group = finder.group(*rule->second, i, name.prefix);
    if (!group.members.empty()) groups.push_back(std::move(group));
  }
  const auto first_place = [](const MergeGroup& group) { return *std::min_element(group.members.begin(), group.members.end()); };
  std::sort(groups.begin(), groups.end(),
            [&](const MergeGroup& a, const MergeGroup& b) { return first_place(a) < first_place(b); });
  return groups;
}

}  // namespace weightd::store
