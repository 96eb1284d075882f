// SPDX-License-Identifier: Apache-2.0
#include "client/cuda_compute.h"

#include <utility>

#include "base/text.h"
#include "client/address_range.h"
#include "kernels/blas.h"
#include "kernels/f12_cuda.h"
#include "kernels/gather_raw.h"
#include "kernels/gemm_plan.h"

namespace weightd::detail {
namespace {

using ipc::PrimaryContext;

constexpr uint64_t kWorkspaceAlign = 256;

/// Of all stored rows.
kernels::F12DeviceMatrix stored_matrix(const WeightMatrix& w) {
  return {w.data, w.windows, w.records, w.pool, w.pool_bytes, w.stored_rows, w.k};
}

kernels::F12DeviceMatrix coded_matrix(const WeightMatrix& w) {
  return kernels::slice_rows(stored_matrix(w), w.row_begin, w.row_begin + w.n);
}

ConstBf16Matrix raw_matrix(const WeightMatrix& w) {
  return {reinterpret_cast<const uint16_t*>(w.data), w.n, w.k, static_cast<int64_t>(w.k)};
}

}  // namespace

Result<std::unique_ptr<Compute>> CudaCompute::map(CudaDevices& devices, ArenaSource source) {
  WEIGHTD_ASSIGN_OR_RETURN(CudaDevice* const device, devices.open(source.device));
  WEIGHTD_ASSIGN_OR_RETURN(std::shared_ptr<CudaArena> arena, device->share(std::move(source)));
  return std::unique_ptr<Compute>(new CudaCompute(*device, std::move(arena)));
}

Result<std::unique_ptr<Compute>> map_gpu_arena(ArenaSource source) {
  WEIGHTD_ASSIGN_OR_RETURN(CudaDevices* const devices, CudaDevices::of_process());
  return CudaCompute::map(*devices, std::move(source));
}

CudaCompute::~CudaCompute() {
  if (arena_ != nullptr && !home_.surely_left()) (void)unmap();
  if (arena_ != nullptr) abandon(std::move(arena_));
}

uint64_t CudaCompute::workspace_bytes(const WeightMatrix& w) const {
  if (w.n == 0) return 0;
  return w.encoding == Encoding::kF12 ? kernels::exact_workspace_bytes(w.n, w.k) : kernels::Blas::kWorkspaceBytes;
}

Status CudaCompute::gemm(const WeightMatrix& w, ConstBf16Matrix x, Bf16Matrix y, const GemmOptions& options) {
  const PrimaryContext::Current current(device_.context());
  WEIGHTD_RETURN_IF_ERROR(current.status());
  if (w.encoding == Encoding::kRaw) {
    WEIGHTD_ASSIGN_OR_RETURN(const std::shared_ptr<kernels::Blas> blas, device_.blas());
    return with_workspace(w, x, y, options,
                          [&](std::byte* workspace) { return blas->multiply(raw_matrix(w), x, y, workspace, options.stream); });
  }
  WEIGHTD_ASSIGN_OR_RETURN(const kernels::GemmDevice gemm, device_.gemm());
  std::shared_ptr<kernels::Blas> blas;
  if (options.exact) {
    WEIGHTD_ASSIGN_OR_RETURN(blas, device_.blas());
  } else if (kernels::choose_route(gemm.traits, w.n, w.k, x.rows) == kernels::Route::kDecompressed) {
    blas = device_.blas_if_there();
  }
  if (blas != nullptr) {
    return with_workspace(w, x, y, options, [&](std::byte* workspace) {
      return kernels::multiply_exact(*blas, coded_matrix(w), x, y, workspace, options.stream);
    });
  }
  kernels::GemmRequest request;
  request.n = w.n;
  request.k = w.k;
  request.m = x.rows;
  request.tensor_copy = kernels::allows_tensor_copy(x);
  request.overlap_previous = options.overlap_previous;
  WEIGHTD_ASSIGN_OR_RETURN(const kernels::GemmPlan plan, kernels::plan_gemm(gemm.traits, request));
  return kernels::launch_gemm(gemm, plan, coded_matrix(w), x, y, options.stream);
}

// The caller's workspace if it is large enough, else one of the pool.
Status CudaCompute::with_workspace(const WeightMatrix& w, ConstBf16Matrix x, Bf16Matrix y, const GemmOptions& options,
                                   const std::function<Status(std::byte*)>& work) {
  const uint64_t bytes = workspace_bytes(w);
  if (options.workspace.size() < bytes) return device_.with_scratch(bytes, options.stream, work);
  const AddressRange workspace = range_of(options.workspace.data(), bytes);
  if (workspace.begin % kWorkspaceAlign != 0) {
    return Status::invalid_argument("the workspace is not at a multiple of " + std::to_string(kWorkspaceAlign) + " bytes");
  }
  if (workspace.overlaps(range_of(x)) || workspace.overlaps(range_of({y.data, y.rows, y.cols, y.row_stride})) ||
      workspace.overlaps(range_of(arena_->base, arena_->mapped_bytes))) {
    return Status::invalid_argument("the workspace overlaps x, y or the mapped weights");
  }
  return work(options.workspace.data());
}

Status CudaCompute::decompress(const WeightMatrix& w, uint64_t begin, uint64_t end, std::byte* out, const GemmOptions& options) {
  if (reinterpret_cast<uintptr_t>(out) % sizeof(uint16_t) != 0) return Status::invalid_argument("the output is at an odd address");
  const PrimaryContext::Current current(device_.context());
  WEIGHTD_RETURN_IF_ERROR(current.status());
  return kernels::launch_decompress(stored_matrix(w), w.row_begin + begin, w.row_begin + end, reinterpret_cast<uint16_t*>(out),
                                    static_cast<int64_t>(w.k), options.stream);
}

Status CudaCompute::gather_rows(const WeightMatrix& w, const RowIndexes& rows, Bf16Matrix out, const GemmOptions& options) {
  const PrimaryContext::Current current(device_.context());
  WEIGHTD_RETURN_IF_ERROR(current.status());
  return std::visit(
      [&](const auto& indexes) {
        return w.encoding == Encoding::kF12 ? kernels::launch_gather_rows(coded_matrix(w), indexes.data(), indexes.size(), out.data,
                                                                          out.row_stride, options.stream)
                                            : kernels::launch_gather_raw(raw_matrix(w), indexes.data(), indexes.size(), out.data,
                                                                         out.row_stride, options.stream);
      },
      rows);
}

Status CudaCompute::copy(const std::byte* from, std::span<std::byte> out, const GemmOptions& options) {
  if (out.empty()) return {};
  const PrimaryContext::Current current(device_.context());
  WEIGHTD_RETURN_IF_ERROR(current.status());
  const cudaError_t error = cudaMemcpyAsync(out.data(), from, out.size(), cudaMemcpyDeviceToDevice, options.stream);
  if (error == cudaSuccess) return {};
  return Status::cuda(std::string("cudaMemcpyAsync: ") + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

Status CudaCompute::may_unmap() const {
  if (device_.shut_down()) return {};
  const PrimaryContext::Current current(device_.context());
  return current.status().ok() ? device_.refuse_during_capture() : Status();
}

Status CudaCompute::unmap() {
  if (arena_ == nullptr) return {};
  std::shared_ptr<CudaArena> last = device_.leave(std::move(arena_));
  arena_.reset();
  if (last == nullptr) return {};
  if (device_.shut_down()) {
    abandon(std::move(last));
    return {};
  }
  const PrimaryContext::Current current(device_.context());
  Status waited = current.status().ok() ? device_.wait() : current.status();
  if (waited.code() == StatusCode::kFailedPrecondition) {
    arena_ = std::move(last);
    return waited;
  }
  // Whatever else went wrong, no kernel of a context in that state reads any more.
  last.reset();
  device_.trim();
  return waited.with_context("GPU " + printable(device_.uuid()) + ", waiting before the weights were unmapped");
}

}  // namespace weightd::detail
