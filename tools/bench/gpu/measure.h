// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/f12_cuda.h"
#include "weightd/status.h"

/// How times on a GPU are taken: launches of one kind in a CUDA graph, rotating over copies of their input so that the L2 cache
/// never holds it, and the graphs of everything that is to be compared in turn, so that a drifting clock meets all of them.
namespace weightd::tools {

[[nodiscard]] Status check_cuda(cudaError_t error, const char* call);

/// Device memory. Freed at the end.
class DeviceBytes {
 public:
  /// Content undefined. kResourceExhausted.
  [[nodiscard]] static Result<DeviceBytes> allocate(uint64_t bytes);
  DeviceBytes() = default;
  DeviceBytes(DeviceBytes&& other) noexcept;
  DeviceBytes& operator=(DeviceBytes&& other) noexcept;
  ~DeviceBytes();

  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] uint64_t bytes() const { return bytes_; }
  template <typename T>
  [[nodiscard]] T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  Status upload(std::span<const std::byte> content) const;

 private:
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
};

/// Copies of one content, in allocations of their own.
class Copies {
 public:
  /// `content` empty: random bytes.
  [[nodiscard]] static Result<Copies> make(std::span<const std::byte> content, uint64_t bytes, int count);
  [[nodiscard]] std::byte* at(int i) const { return copies_[static_cast<size_t>(i) % copies_.size()].data(); }
  [[nodiscard]] int count() const { return static_cast<int>(copies_.size()); }

 private:
  std::vector<DeviceBytes> copies_;
};

/// Bytes after which nothing of what was read before is left in this device's L2: four times its size, 420 MB at least.
[[nodiscard]] Result<uint64_t> cold_bytes();
/// Copies of `bytes` that together pass cold_bytes.
[[nodiscard]] int copies_for(uint64_t bytes, uint64_t cold_bytes);

/// One competitor of a race.
struct Contender {
  std::string name;
  int copies = 1;  // that launch i rotates over; the number of launches is a multiple of it
  std::function<Status(int i, cudaStream_t stream)> launch;
  bool in_graph = true;  // false: the same launches one by one. A copy inside a graph takes a slower engine
  double us = 0;         // result: of one launch, the median
};

/// Times all of them, `repeats` rounds of one graph of each. A graph holds enough launches to make the cost of starting it small.
/// Very long ones get fewer rounds, five at least. kCuda, and whatever a launch returns.
Status race(std::vector<Contender>& contenders, int repeats);

}  // namespace weightd::tools
