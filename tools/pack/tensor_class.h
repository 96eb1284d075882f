// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <string_view>

namespace weightd::tools {

/// What a tensor does in its model, as far as its name tells.
enum class TensorClass { kEmbedding, kAttention, kMlp, kExpert, kNorm, kHead, kOther };
inline constexpr size_t kTensorClassCount = 7;

[[nodiscard]] std::string_view tensor_class_name(TensorClass tensor_class);  // "embedding", "attention", ...

/// By a table of name parts, first match wins; names of Llama, Qwen, Mistral, Gemma, DeepSeek, Mixtral, GPT-2, GPT-NeoX and BERT
/// families are known. A name that no line matches is kOther: routers, position tables of attention, vision parts and so on.
[[nodiscard]] TensorClass classify_tensor(std::string_view name);

}  // namespace weightd::tools
