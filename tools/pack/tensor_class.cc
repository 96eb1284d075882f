// SPDX-License-Identifier: Apache-2.0
#include "tools/pack/tensor_class.h"

#include <string>

namespace weightd::tools {
namespace {

struct NamePart {
  std::string_view part;  // anywhere in the lower-case name; '^' in front: at its start only
  TensorClass tensor_class;
};
// The order matters: a norm inside attention is a norm, the projections of an expert belong to it.
constexpr NamePart kNameParts[] = {
    {"norm", TensorClass::kNorm},
    {".ln_", TensorClass::kNorm},
    {"^ln_", TensorClass::kNorm},
    {"embeddings.", TensorClass::kEmbedding},
    {"embed_tokens", TensorClass::kEmbedding},
    {"embed_positions", TensorClass::kEmbedding},
    {"tok_embeddings", TensorClass::kEmbedding},
    {"embed_in", TensorClass::kEmbedding},
    {"wte.", TensorClass::kEmbedding},
    {"wpe.", TensorClass::kEmbedding},
    {"lm_head", TensorClass::kHead},
    {"embed_out", TensorClass::kHead},
    {"^output.weight", TensorClass::kHead},
    {"^score.", TensorClass::kHead},
    {"^classifier.", TensorClass::kHead},
    {"shared_expert_gate", TensorClass::kOther},
    {"experts.", TensorClass::kExpert},
    {"shared_expert.", TensorClass::kExpert},
    {"attn", TensorClass::kAttention},
    {"attention", TensorClass::kAttention},
    {"mlp.gate.", TensorClass::kOther},
    {"block_sparse_moe.gate.", TensorClass::kOther},
    {"mlp.", TensorClass::kMlp},
    {"feed_forward", TensorClass::kMlp},
    {"ffn", TensorClass::kMlp},
    {"intermediate.dense", TensorClass::kMlp},
    {"output.dense", TensorClass::kMlp},
};
constexpr std::array<std::string_view, kTensorClassCount> kNames = {"embedding", "attention", "mlp",  "expert",
                                                                    "norm",      "head",      "other"};

bool matches(std::string_view name, std::string_view part) {
  if (part.front() == '^') return name.starts_with(part.substr(1));
  return name.find(part) != std::string_view::npos;
}

}  // namespace

std::string_view tensor_class_name(TensorClass tensor_class) { return kNames[static_cast<size_t>(tensor_class)]; }

TensorClass classify_tensor(std::string_view name) {
  std::string lower(name);
  for (char& c : lower) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  for (const NamePart& line : kNameParts) {
    if (matches(lower, line.part)) return line.tensor_class;
  }
  return TensorClass::kOther;
}

}  // namespace weightd::tools
