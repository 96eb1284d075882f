// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

/// What a worker computed, for a checker that shares no code with it: one record per GEMM or row gather, in a binary file.
namespace weightd::e2e {

struct TraceRecord {
  enum class Kind : uint32_t { kGemm = 1, kRows = 2 };
  Kind kind{};
  std::string tensor;
  uint64_t m = 0, n = 0, k = 0;
  std::vector<uint16_t> x;     // kGemm: [m, k]
  std::vector<uint64_t> rows;  // kRows: m row numbers
  std::vector<uint16_t> y;     // kGemm: [m, n]; kRows: [m, k]
};

/// Throw std::runtime_error.
void write_trace(const std::string& path, const std::vector<TraceRecord>& records);
[[nodiscard]] std::vector<TraceRecord> read_trace(const std::string& path);

}  // namespace weightd::e2e
