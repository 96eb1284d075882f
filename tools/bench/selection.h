// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "weightd/status.h"

/// What of the benchmark's matrices, batch sizes and operations a run measures.
namespace weightd::tools {

struct BenchShape {
  std::string model, name;
  uint64_t n = 0, k = 0;
  bool operator==(const BenchShape&) const = default;
};

/// The matrices of Llama-3.1-8B and 70B, with q/k/v and gate/up merged, in the order of a forward pass.
[[nodiscard]] const std::vector<BenchShape>& bench_shapes();

inline constexpr std::string_view kDefaultTokens = "1,2,4,8,16,32,64,128,256,512,1024,2048,4096,8192";
inline constexpr std::string_view kDefaultShapes = "qkv,o,gate_up,down,head";
inline constexpr std::string_view kDefaultOps = "copy,cublas,gemm_f12,gemm_exact,decompress,gemm_best,hash";

/// `model` is a model's name or "all"; `names` a list as kDefaultShapes. Order of bench_shapes(). kInvalidArgument names the word
/// that is not known.
[[nodiscard]] Result<std::vector<BenchShape>> select_shapes(std::string_view model, std::string_view names);
/// Each 1 to 1,048,576; ascending, each once.
[[nodiscard]] Result<std::vector<uint64_t>> parse_tokens(std::string_view list);
[[nodiscard]] Result<std::vector<std::string>> parse_ops(std::string_view list);
/// Each 0 to 1, in the order given. Empty text: none.
[[nodiscard]] Result<std::vector<double>> parse_escapes(std::string_view list);

}  // namespace weightd::tools
