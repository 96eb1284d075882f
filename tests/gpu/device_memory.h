// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace weightd::testing {

/// Aborts with the call's place and CUDA's words: a GPU test cannot go on after a failed call, and must not pass without a GPU.
void require_cuda(cudaError_t error, const char* what);

/// Device memory filled with 0xA5 and fenced by 4 KiB of 0xC3 on both sides.
class DeviceMemory {
 public:
  /// `shift` bytes are left before data(), to make it less aligned than the 256 bytes it has otherwise.
  explicit DeviceMemory(uint64_t bytes, uint64_t shift = 0);
  explicit DeviceMemory(std::span<const std::byte> content);
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  [[nodiscard]] std::byte* data() const { return base_ + kFence + shift_; }
  template <typename T>
  [[nodiscard]] T* as() const {
    return reinterpret_cast<T*>(data());
  }
  [[nodiscard]] uint64_t bytes() const { return bytes_; }
  void upload(std::span<const std::byte> content) const;
  [[nodiscard]] std::vector<std::byte> download() const;
  /// Whether nothing outside [data(), data() + bytes()) was written. Waits for the device.
  [[nodiscard]] bool fences_intact() const;

 private:
  static constexpr uint64_t kFence = 4096;
  std::byte* base_ = nullptr;
  uint64_t bytes_ = 0;
  uint64_t shift_ = 0;
};

template <typename T>
DeviceMemory to_device(const std::vector<T>& values) {
  return DeviceMemory(std::as_bytes(std::span(values)));
}

template <typename T>
std::vector<T> from_device(const DeviceMemory& memory) {
  const std::vector<std::byte> bytes = memory.download();
  std::vector<T> values(bytes.size() / sizeof(T));
  for (size_t i = 0; i < values.size(); ++i) __builtin_memcpy(&values[i], &bytes[i * sizeof(T)], sizeof(T));
  return values;
}

}  // namespace weightd::testing
