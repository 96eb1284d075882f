// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "kernels/f12_cuda.h"
#include "weightd/status.h"
#include "weightd/types.h"

/// Plain BF16 products by cuBLASLt, for raw tensors and for exact mode (decompress, then cuBLASLt).
namespace weightd::kernels {

/// cuBLASLt of this machine, loaded at run time (it has 500 MB and is no dependency): the file that the environment variable
/// WEIGHTD_CUBLASLT names, if it is set; else one that the process has already; else libcublasLt.so.13 and then .12 as the loader
/// finds them, then in /usr/local/cuda/lib64. One handle for one device. Thread-safe.
class Blas {
 public:
  /// For the current device. kUnavailable: no cuBLASLt; the message names what was tried and the variable. kCuda: no device, or
  /// cuBLASLt refuses it.
  [[nodiscard]] static Result<std::shared_ptr<Blas>> open();
  ~Blas();
  Blas(const Blas&) = delete;
  Blas& operator=(const Blas&) = delete;

  /// Of the workspace that multiply() takes, 256-byte aligned. Null is allowed: then the algorithm is one that needs none.
  static constexpr uint64_t kWorkspaceBytes = uint64_t{32} << 20;

  /// y[m, n] = x[m, k] · w[n, k]ᵀ, BF16 in and out, fp32 accumulation, by the first algorithm of the heuristic for this shape,
  /// these strides and alignments and kWorkspaceBytes (or none); the choice is kept, so that equal calls give equal bits. w, x and
  /// y are on the device, any strides that the views allow, y and workspace overlapping nothing; 2-byte aligned at least. m, n of
  /// 0: nothing is written; k of 0: y is +0. Launches on `stream`, may be captured; waits for nothing. Two launches that may run at
  /// the same time need two workspaces. kInvalidArgument: shapes, strides, alignment or overlap, or another device is current;
  /// kUnsupported: cuBLASLt has no algorithm; kCuda. y is untouched then.
  [[nodiscard]] Status multiply(ConstBf16Matrix w, ConstBf16Matrix x, Bf16Matrix y, std::byte* workspace, cudaStream_t stream);

  [[nodiscard]] std::string version() const;  // "13.1.0 (libcublasLt.so.13)"

 private:
  struct Impl;
  explicit Blas(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// Bytes of scratch that multiply_exact needs, 256-byte aligned: the decompressed weight and cuBLASLt's workspace. The largest
/// number there is for a weight past any memory.
[[nodiscard]] uint64_t exact_workspace_bytes(uint64_t n, uint64_t k);
/// The same product by decompressing w into `workspace` and multiplying there: the bits of Blas::multiply with a workspace on the
/// original weights as they lie in an arena, 256-byte aligned and without gaps between the rows. Errors as there; the workspace is
/// unspecified afterwards.
[[nodiscard]] Status multiply_exact(Blas& blas, const F12DeviceMatrix& w, ConstBf16Matrix x, Bf16Matrix y, std::byte* workspace,
                                    cudaStream_t stream);

/// How a product with a coded weight is done when the caller leaves it open.
enum class Route : uint8_t { kFused, kDecompressed };

/// What both ways are expected to take, in microseconds of a Hopper with 132 multiprocessors.
struct RouteCost {
  double fused_us = 0;
  double decompressed_us = 0;
};
/// By the cost model in route.cc, with rates measured on Hopper (tests/bench/RESULTS.md). Pure. Neither falls as n, k or m grows.
[[nodiscard]] RouteCost route_cost(const DeviceTraits& device, uint64_t n, uint64_t k, uint64_t m);
/// The faster one; fused where they are equal. Pure.
[[nodiscard]] Route choose_route(const DeviceTraits& device, uint64_t n, uint64_t k, uint64_t m);

}  // namespace weightd::kernels
