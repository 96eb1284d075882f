// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/blas.h"
#include "kernels/f12_cuda.h"
#include "tools/bench/gpu/clocks.h"
#include "tools/bench/gpu/cublas.h"
#include "tools/bench/gpu/measure.h"
#include "tools/bench/row.h"
#include "tools/bench/selection.h"
#include "tools/bench/weights.h"
#include "weightd/status.h"

namespace weightd::tools {

/// Makes the GPU of this UUID current ("GPU-..."; empty: the first one) and gives its ordinal. kNotFound lists those there are;
/// kUnavailable: no driver, no GPU.
[[nodiscard]] Result<int> select_gpu(const std::string& uuid);
[[nodiscard]] std::string gpu_uuid(int ordinal);

/// Everything that a benchmark of products needs of one GPU.
struct Session {
  std::string gpu, driver;
  std::unique_ptr<ClockReader> clocks;
  kernels::GemmDevice device;
  std::unique_ptr<Cublas> cublas;  // null without products, as the next
  std::shared_ptr<kernels::Blas> blas;
  uint64_t cold = 0;           // bytes, as cold_bytes()
  double copy_gbps = kAbsent;  // read and written, of the 1 GiB device copy

  /// `products`: with cuBLAS and cuBLASLt, which must be there then.
  [[nodiscard]] static Result<Session> open(const std::string& uuid, int repeats, bool products);
  [[nodiscard]] std::string describe() const;
  /// A row with its place and the clocks of this moment.
  [[nodiscard]] Row row(std::string op, std::string name) const;
  [[nodiscard]] Row row(std::string op, const BenchShape& shape, uint64_t m) const;
};

/// Device copies that read and write `bytes` in all, cold, as a contender of a race. Owns what it copies.
[[nodiscard]] Result<Contender> copy_contender(uint64_t bytes, uint64_t cold);

/// Microseconds of the block hashes' kernel over `bytes` of device memory, a multiple of 1 MiB.
[[nodiscard]] Result<double> time_block_hashes(uint64_t bytes, int repeats);

/// One matrix on the device, coded and, if wanted, as it was, each in as many copies as it takes to be cold, or `copies`.
class DeviceWeights {
 public:
  [[nodiscard]] static Result<DeviceWeights> upload(const HostMatrix& host, uint64_t cold, std::optional<int> copies = {});

  [[nodiscard]] kernels::F12DeviceMatrix coded(int i) const;
  [[nodiscard]] const uint16_t* raw(int i) const { return reinterpret_cast<const uint16_t*>(raw_.at(i)); }
  [[nodiscard]] int coded_copies() const { return coded_.count(); }
  [[nodiscard]] int raw_copies() const { return raw_.count(); }
  [[nodiscard]] uint64_t n() const { return geometry_.n; }
  [[nodiscard]] uint64_t k() const { return geometry_.k; }
  [[nodiscard]] uint64_t coded_bytes() const { return coded_bytes_; }
  [[nodiscard]] uint64_t raw_bytes() const { return geometry_.raw_bytes(); }

 private:
  f12::Geometry geometry_;
  uint64_t windows_at_ = 0, records_at_ = 0, pool_at_ = 0, pool_bytes_ = 0, coded_bytes_ = 0;
  Copies coded_, raw_;
};

/// The activations, outputs and scratch of products of one shape with `m` tokens.
struct Batch {
  uint64_t m = 0, n = 0, k = 0;
  DeviceBytes x, y, workspace;

  [[nodiscard]] static Result<Batch> make(uint64_t n, uint64_t k, uint64_t m);
  [[nodiscard]] ConstBf16Matrix input() const { return {x.as<uint16_t>(), m, k, static_cast<int64_t>(k)}; }
  [[nodiscard]] Bf16Matrix output() const { return {y.as<uint16_t>(), m, n, static_cast<int64_t>(n)}; }
};

/// The products, one launch each; matrices rotate with i.
struct FusedProduct {
  kernels::GemmPlan plan;
  [[nodiscard]] static Result<FusedProduct> make(const Session& session, const Batch& batch);  // planned as the client plans
  Status launch(const Session& session, const DeviceWeights& weights, const Batch& batch, int i, cudaStream_t stream) const;
};
Status launch_exact(const Session& session, const DeviceWeights& weights, const Batch& batch, int i, cudaStream_t stream);

/// The ways in which cuBLAS does one product.
struct CublasProduct {
  static constexpr int kGemmEx = -1;
  LtProblem problem;
  int best_algorithm = kGemmEx;  // of the problem's

  /// Races cuBLASLt's proposals for the best one.
  [[nodiscard]] static Result<CublasProduct> make(const Session& session, const DeviceWeights& weights, const Batch& batch);
  Status launch(int algorithm, const Session& session, const DeviceWeights& weights, const Batch& batch, int i,
                cudaStream_t stream) const;
  [[nodiscard]] std::string describe(int algorithm) const;  // "cublasGemmEx", "cublasLt, proposal 3 of 8"
};

}  // namespace weightd::tools
