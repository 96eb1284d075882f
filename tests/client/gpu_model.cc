// SPDX-License-Identifier: Apache-2.0
#include "tests/client/gpu_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "ipc/memfd.h"
#include "ipc/vmm.h"
#include "kernels/blas.h"
#include "kernels/f12_cuda.h"
#include "kernels/gemm_launch.h"
#include "tests/gpu/raw16.h"
#include "tests/gpu/test_matrix.h"

namespace weightd::test {
namespace {

constexpr uint16_t kPoison = 0xA5A5;

template <typename T>
T or_die(Result<T> result, const char* what) {
  if (!result.ok()) {
    std::fprintf(stderr, "%s: %s\n", what, result.status().to_string().c_str());
    std::abort();
  }
  return *std::move(result);
}

void die_unless(const Status& status, const char* what) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s: %s\n", what, status.to_string().c_str());
  std::abort();
}

const kernels::GemmDevice& gemm_device() {
  static const kernels::GemmDevice device = [] {
    const kernels::GemmDevice made = or_die(kernels::prepare_gemm(), "prepare_gemm");
    die_unless(raise_shared_limits(testing::raw16_gemm_kernels(), made.traits.shared_bytes), "raise_shared_limits");
    return made;
  }();
  return device;
}

kernels::GemmPlan plan_for(uint64_t n, ConstBf16Matrix x, uint32_t tile_bytes, std::optional<kernels::GemmKernel> kernel) {
  kernels::GemmRequest request;
  request.n = n;
  request.k = x.cols;
  request.m = x.rows;
  request.tensor_copy = kernels::allows_tensor_copy(x);
  request.tile_bytes = tile_bytes;
  request.kernel = kernel;
  return or_die(kernels::plan_gemm(gemm_device().traits, request), "plan_gemm");
}

}  // namespace

const ipc::CudaDriver& driver_or_die() { return *or_die(ipc::cuda_driver(), "cuda_driver"); }

const ipc::GpuDevice& gpu_or_die() {
  static const ipc::GpuDevice gpu = [] {
    const std::vector<ipc::GpuDevice> gpus = or_die(ipc::visible_gpus(driver_or_die()), "visible_gpus");
    if (gpus.empty()) {
      std::fprintf(stderr, "these tests need a GPU\n");
      std::abort();
    }
    return gpus.front();
  }();
  return gpu;
}

std::shared_ptr<SealedModel> on_gpu(SealedModel model, uint64_t chunk_bytes) {
  const ipc::CudaDriver& driver = driver_or_die();
  const ipc::GpuDevice& gpu = gpu_or_die();
  const uint64_t granularity = or_die(ipc::chunk_granularity(driver, gpu.handle), "chunk_granularity");
  const ipc::MappedArena host = or_die(ipc::MappedArena::map(std::move(model.chunks), model.chunk_bytes), "MappedArena::map");
  model.chunk_bytes = ipc::cut_chunks(model.table.arena_bytes, chunk_bytes, granularity);
  const ipc::VmmArena arena = or_die(ipc::VmmArena::create(driver, gpu.handle, model.chunk_bytes), "VmmArena::create");
  auto* const base = reinterpret_cast<std::byte*>(static_cast<uintptr_t>(arena.base()));
  testing::require_cuda(cudaMemcpy(base, host.base(), model.table.arena_bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  testing::require_cuda(cudaDeviceSynchronize(), "cudaMemcpy");
  model.chunks = or_die(arena.export_chunks(), "export_chunks");
  model.summary.device = gpu.uuid;
  model.summary.resident_bytes = arena.size_bytes();
  return std::make_shared<SealedModel>(std::move(model));
}

DeviceOutput::DeviceOutput(uint64_t rows, uint64_t cols, uint64_t stride, uint64_t before)
    : rows_(rows), cols_(cols), stride_(stride), before_(before), memory_((before + (rows - 1) * stride + cols) * 2) {}

Bf16Matrix DeviceOutput::view() const { return {memory_.as<uint16_t>() + before_, rows_, cols_, static_cast<int64_t>(stride_)}; }

std::vector<uint16_t> DeviceOutput::take() const {
  EXPECT_TRUE(memory_.fences_intact());
  const std::vector<uint16_t> all = testing::from_device<uint16_t>(memory_);
  std::vector<uint16_t> rows;
  for (uint64_t i = 0; i < all.size(); ++i) {
    if (i >= before_ && (i - before_) % stride_ < cols_) {
      rows.push_back(all[i]);
    } else {
      EXPECT_EQ(all[i], kPoison) << "word " << i << ", which belongs to no row";
    }
  }
  return rows;
}

bool DeviceOutput::untouched() const {
  const std::vector<uint16_t> all = testing::from_device<uint16_t>(memory_);
  return memory_.fences_intact() && std::all_of(all.begin(), all.end(), [](uint16_t word) { return word == kPoison; });
}

DeviceInput::DeviceInput(std::vector<uint16_t> words, uint64_t cols)
    : rows_(words.size() / cols), cols_(cols), memory_(testing::to_device(words)) {}

ConstBf16Matrix DeviceInput::rows(uint64_t count) const {
  ConstBf16Matrix matrix = view();
  matrix.rows = count;
  return matrix;
}

void DeviceInput::upload(const std::vector<uint16_t>& words) const { memory_.upload(std::as_bytes(std::span(words))); }

std::vector<uint16_t> fused_product(const std::vector<uint16_t>& words, uint64_t n, ConstBf16Matrix x) {
  const testing::Words w{n, x.cols, words};
  const DeviceOutput y(x.rows, n);
  const kernels::GemmPlan plan = plan_for(n, x, 1536, std::nullopt);
  const kernels::GemmPlan raw_plan = plan_for(n, x, 2048, plan.kernel);
  if (plan.slices == raw_plan.slices) {
    const testing::DeviceMemory tiles(testing::pack_raw16(w));
    const kernels::F12DeviceMatrix matrix{tiles.data(), nullptr, nullptr, nullptr, 0, n, x.cols};
    die_unless(launch_gemm_kernels(testing::raw16_gemm_kernels(), gemm_device(), raw_plan, matrix, x, y.view(), nullptr), "oracle");
    return y.take();
  }
  const testing::DeviceF12 coded(testing::encode(w));
  die_unless(kernels::launch_gemm(gemm_device(), plan, coded.matrix(), x, y.view(), nullptr), "launch_gemm");
  return y.take();
}

std::vector<uint16_t> blas_product(const std::vector<uint16_t>& words, uint64_t n, ConstBf16Matrix x) {
  static const std::shared_ptr<kernels::Blas> blas = or_die(kernels::Blas::open(), "Blas::open");
  const DeviceInput w(words, x.cols);
  const testing::DeviceMemory workspace(kernels::Blas::kWorkspaceBytes);
  const DeviceOutput y(x.rows, n);
  die_unless(blas->multiply(w.view(), x, y.view(), workspace.data(), nullptr), "Blas::multiply");
  return y.take();
}

std::vector<uint16_t> best_product(const std::vector<uint16_t>& words, uint64_t n, ConstBf16Matrix x) {
  const bool fused = kernels::choose_route(gemm_device().traits, n, x.cols, x.rows) == kernels::Route::kFused;
  return fused ? fused_product(words, n, x) : blas_product(words, n, x);
}

}  // namespace weightd::test
