// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>

#include "client/compute.h"
#include "client/cuda_device.h"
#include "client/fork_guard.h"

namespace weightd::detail {

/// An arena on a GPU, and that GPU's kernels. All Computes of a process that are of the same memory share one mapping. Destroyed in
/// a forked child, or after CUDA's end at exit, it touches nothing.
class CudaCompute final : public Compute {
 public:
  [[nodiscard]] static Result<std::unique_ptr<Compute>> map(CudaDevices& devices, ArenaSource source);
  ~CudaCompute() override;

  const std::byte* base() const override { return arena_->base; }
  uint64_t mapped_bytes() const override { return arena_->mapped_bytes; }
  uint64_t workspace_bytes(const WeightMatrix& w) const override;

  Status gemm(const WeightMatrix& w, ConstBf16Matrix x, Bf16Matrix y, const GemmOptions& options) override;
  Status decompress(const WeightMatrix& w, uint64_t begin, uint64_t end, std::byte* out, const GemmOptions& options) override;
  Status gather_rows(const WeightMatrix& w, const RowIndexes& rows, Bf16Matrix out, const GemmOptions& options) override;
  Status copy(const std::byte* from, std::span<std::byte> out, const GemmOptions& options) override;

  Status may_unmap() const override;
  Status unmap() override;

 private:
  CudaCompute(CudaDevice& device, std::shared_ptr<CudaArena> arena) : device_(device), arena_(std::move(arena)) {}
  Status with_workspace(const WeightMatrix& w, ConstBf16Matrix x, Bf16Matrix y, const GemmOptions& options,
                        const std::function<Status(std::byte* workspace)>& work);

  const HomeProcess home_;
  CudaDevice& device_;
  std::shared_ptr<CudaArena> arena_;  // null: unmapped
};

}  // namespace weightd::detail
