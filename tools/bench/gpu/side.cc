// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <utility>

#include "base/version.h"
#include "kernels/block_hash.h"
#include "tools/bench/gpu/session.h"
#include "tools/bench/gpu_work.h"

namespace weightd::tools {
namespace {

constexpr uint64_t kUploadBytes = uint64_t{1} << 30;
constexpr int kUploads = 6;
constexpr int kHashRepeats = 9;

struct PinnedDeleter {
  void operator()(std::byte* data) const { (void)cudaFreeHost(data); }
};

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

class CudaSide : public GpuSide {
 public:
  CudaSide(int ordinal, double context_ms) : ordinal_(ordinal), context_ms_(context_ms), clocks_(gpu_uuid(ordinal)) {}

  [[nodiscard]] double context_ms() const override { return context_ms_; }

  [[nodiscard]] Result<double> host_to_device_gbps() override {
    void* data = nullptr;
    WEIGHTD_RETURN_IF_ERROR(check_cuda(cudaHostAlloc(&data, kUploadBytes, cudaHostAllocDefault), "cudaHostAlloc"));
    const std::unique_ptr<std::byte, PinnedDeleter> pinned(static_cast<std::byte*>(data));
    __builtin_memset(pinned.get(), 0x5A, kUploadBytes);
    WEIGHTD_ASSIGN_OR_RETURN(const DeviceBytes target, DeviceBytes::allocate(kUploadBytes));
    double best = 0;
    for (int i = 0; i < kUploads; ++i) {
      const auto begin = std::chrono::steady_clock::now();
      WEIGHTD_RETURN_IF_ERROR(check_cuda(
          cudaMemcpyAsync(target.data(), pinned.get(), kUploadBytes, cudaMemcpyHostToDevice, nullptr), "cudaMemcpyAsync"));
      WEIGHTD_RETURN_IF_ERROR(synchronize());
      best = std::max(best, static_cast<double>(kUploadBytes) / seconds_since(begin) / 1e9);
    }
    return best;
  }

  [[nodiscard]] Result<double> hash_gbps(uint64_t bytes) override {
    const uint64_t whole_blocks = std::max<uint64_t>(1, bytes / kernels::kHashBlockBytes) * kernels::kHashBlockBytes;
    WEIGHTD_ASSIGN_OR_RETURN(const double us, time_block_hashes(whole_blocks, kHashRepeats));
    return static_cast<double>(whole_blocks) / us / 1e3;
  }

  [[nodiscard]] Result<std::span<std::byte>> scratch(uint64_t bytes) override {
    if (scratch_.bytes() < bytes) {
      scratch_ = DeviceBytes();
      WEIGHTD_ASSIGN_OR_RETURN(scratch_, DeviceBytes::allocate(bytes));
    }
    return std::span<std::byte>(scratch_.data(), scratch_.bytes());
  }

  Status synchronize() override { return check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); }

  [[nodiscard]] Row row(std::string op, std::string name) const override {
    Row row;
    row.op = std::move(op);
    row.name = std::move(name);
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, ordinal_) == cudaSuccess) row.gpu = properties.name;
    row.driver = clocks_.driver_version();
    row.commit = commit_of(build_id());
    return row;
  }

 private:
  int ordinal_;
  double context_ms_;
  ClockReader clocks_;
  DeviceBytes scratch_;
};

}  // namespace

Result<std::unique_ptr<GpuSide>> GpuSide::open(const std::string& uuid) {
  const auto begin = std::chrono::steady_clock::now();
  WEIGHTD_ASSIGN_OR_RETURN(const int ordinal, select_gpu(uuid));
  WEIGHTD_RETURN_IF_ERROR(check_cuda(cudaFree(nullptr), "making a context"));
  const double context_ms = 1e3 * seconds_since(begin);
  return std::unique_ptr<GpuSide>(std::make_unique<CudaSide>(ordinal, context_ms));
}

}  // namespace weightd::tools
