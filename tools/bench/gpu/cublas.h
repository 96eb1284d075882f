// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "kernels/f12_cuda.h"
#include "weightd/status.h"
#include "weightd/types.h"

/// The yardstick: BF16 products by cuBLAS on uncoded weights.
namespace weightd::tools {

/// y[m, n] = x[m, k] · w[n, k]ᵀ on device memory without gaps between rows.
struct BlasOperands {
  const uint16_t* w = nullptr;  // [n, k]
  const uint16_t* x = nullptr;  // [m, k]
  uint16_t* y = nullptr;        // [m, n]
};

class Cublas;

/// One shape for cuBLASLt, with what its heuristics propose for it. Ends before its Cublas.
class LtProblem {
 public:
  LtProblem(LtProblem&&) noexcept;
  ~LtProblem();
  [[nodiscard]] int algorithms() const;  // best first, by the heuristics' own estimate; 0: it has none
  Status multiply(int algorithm, const BlasOperands& operands, cudaStream_t stream) const;

 private:
  friend class Cublas;
  struct State;
  explicit LtProblem(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

/// cuBLAS of this machine, loaded at run time: libcublas.so.13 or .12 as the loader finds it, under /usr/local/cuda, or the file
/// that WEIGHTD_CUBLAS names; cuBLASLt as it comes with it. For the device that is current. One thread at a time.
class Cublas {
 public:
  static constexpr int kMostAlgorithms = 8;

  /// kUnavailable: says what was tried.
  [[nodiscard]] static Result<std::unique_ptr<Cublas>> open();
  ~Cublas();
  Cublas(const Cublas&) = delete;
  Cublas& operator=(const Cublas&) = delete;

  /// cublasGemmEx, which chooses the algorithm.
  Status multiply(uint64_t n, uint64_t k, uint64_t m, const BlasOperands& operands, cudaStream_t stream) const;
  [[nodiscard]] Result<LtProblem> problem(uint64_t n, uint64_t k, uint64_t m) const;
  [[nodiscard]] std::string version() const;  // "13.1.0 (libcublas.so.13)"

 private:
  friend class LtProblem;
  struct State;
  explicit Cublas(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace weightd::tools
