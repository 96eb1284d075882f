// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

/// What a worker computed, for a checker that shares no kernel with it: one record per GEMM, row gather or decompression, in a
/// binary file.
namespace weightd::e2e {

struct TraceRecord {
  enum class Kind : uint32_t {
    kGemm = 1,         // host backend: the bits are those of kernels/LAYOUT.md, "host GEMM"
    kRows = 2,         // an embedding look-up
    kWeights = 3,      // a whole matrix, decompressed
    kBoundedGemm = 4,  // GPU: within the bound of kernels/f12_cuda.h
  };
  Kind kind{};
  std::string tensor;
  uint64_t m = 0, n = 0, k = 0;
  std::vector<uint16_t> x;     // GEMMs: [m, k]
  std::vector<uint64_t> rows;  // kRows: m row numbers
  std::vector<uint16_t> y;     // GEMMs: [m, n]; kRows: [m, k]; kWeights: the four words of digest_of([n, k])
};

/// A hash over words that every run computes alike; finds differences, not malice.
class Digest {
 public:
  void add(std::span<const uint16_t> words);
  [[nodiscard]] uint64_t value() const;

 private:
  uint64_t state_ = 0x9e3779b97f4a7c15U, count_ = 0;
};
[[nodiscard]] uint64_t digest_of(std::span<const uint16_t> words);
[[nodiscard]] std::vector<uint16_t> words_of(uint64_t digest);

/// Throw std::runtime_error.
void write_trace(const std::string& path, const std::vector<TraceRecord>& records);
[[nodiscard]] std::vector<TraceRecord> read_trace(const std::string& path);

}  // namespace weightd::e2e
