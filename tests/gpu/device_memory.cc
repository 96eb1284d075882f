// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/device_memory.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace weightd::testing {
namespace {

constexpr int kPoison = 0xA5;
constexpr int kFenceByte = 0xC3;

}  // namespace

void require_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s: %s\n", what, cudaGetErrorName(error), cudaGetErrorString(error));
  std::abort();
}

DeviceMemory::DeviceMemory(uint64_t bytes, uint64_t shift) : bytes_(bytes), shift_(shift) {
  const uint64_t total = bytes + shift + 2 * kFence;
  require_cuda(cudaMalloc(reinterpret_cast<void**>(&base_), total), "cudaMalloc");
  require_cuda(cudaMemset(base_, kFenceByte, total), "cudaMemset");
  if (bytes > 0) require_cuda(cudaMemset(data(), kPoison, bytes), "cudaMemset");
  require_cuda(cudaDeviceSynchronize(), "cudaMemset");
}

DeviceMemory::DeviceMemory(std::span<const std::byte> content) : DeviceMemory(content.size()) { upload(content); }

DeviceMemory::~DeviceMemory() {
  if (base_ != nullptr) (void)cudaFree(base_);
}

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept : base_(other.base_), bytes_(other.bytes_), shift_(other.shift_) {
  other.base_ = nullptr;
}

void DeviceMemory::upload(std::span<const std::byte> content) const {
  if (content.size() > bytes_) std::abort();
  if (!content.empty()) require_cuda(cudaMemcpy(data(), content.data(), content.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
  // From pageable memory it may return before the last piece has arrived, and a non-blocking stream would not wait for that.
  require_cuda(cudaDeviceSynchronize(), "upload");
}

std::vector<std::byte> DeviceMemory::download() const {
  std::vector<std::byte> content(bytes_);
  require_cuda(cudaDeviceSynchronize(), "kernels before a download");
  if (bytes_ > 0) require_cuda(cudaMemcpy(content.data(), data(), bytes_, cudaMemcpyDeviceToHost), "cudaMemcpy");
  return content;
}

bool DeviceMemory::fences_intact() const {
  require_cuda(cudaDeviceSynchronize(), "kernels before a check");
  std::vector<std::byte> all(bytes_ + shift_ + 2 * kFence);
  require_cuda(cudaMemcpy(all.data(), base_, all.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
  const auto intact = [](std::byte b) { return b == static_cast<std::byte>(kFenceByte); };
  const auto begin = all.begin() + static_cast<int64_t>(kFence + shift_);
  return std::all_of(all.begin(), begin, intact) && std::all_of(begin + static_cast<int64_t>(bytes_), all.end(), intact);
}

}  // namespace weightd::testing
