// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

struct CUstream_st;

namespace weightd::e2e {

/// The device that a worker computes on. Throw std::runtime_error with CUDA's words; on a build without CUDA, for anything but the
/// host.
[[nodiscard]] bool is_host(const std::string& device);  // "host", as the daemon names it
/// Makes the GPU of this UUID current for the thread; nothing for the host.
void use_device(const std::string& device);
/// What CUDA has as current for this thread: the device's number and the context.
[[nodiscard]] std::string current_device();
/// A stream of the current GPU that waits for no other; null on the host.
[[nodiscard]] CUstream_st* make_stream(bool host);
void end_stream(CUstream_st* stream);
void wait_for(CUstream_st* stream);
/// Bytes of the current GPU that are in use, by anybody.
[[nodiscard]] uint64_t gpu_bytes_in_use();
/// Allocates on the current GPU until at most `leave_bytes` are free; returns what it took. Kept until the process ends.
uint64_t fill_gpu(uint64_t leave_bytes);
/// Copies device memory to the host.
[[nodiscard]] std::vector<std::byte> read_device(const std::byte* address, uint64_t bytes);
/// The allocation or mapping of the current GPU that holds this device address, and its end.
[[nodiscard]] std::span<const std::byte> range_around(const std::byte* address);

/// Memory for activations and outputs on the host or on the current GPU, filled with 0xA5, with 4 KiB of 0xC3 on both sides.
class Buffer {
 public:
  Buffer(bool host, uint64_t bytes);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  [[nodiscard]] std::byte* data() const { return base_ + kFence; }
  [[nodiscard]] uint16_t* words() const { return reinterpret_cast<uint16_t*>(data()); }
  [[nodiscard]] uint64_t bytes() const { return bytes_; }
  void upload(std::span<const uint16_t> words);
  /// The content; throws when a byte outside has been written. The work that writes it must be done.
  [[nodiscard]] std::vector<uint16_t> download() const;
  /// Whether nothing, inside or outside, has been written since the construction.
  [[nodiscard]] bool untouched() const;

 private:
  static constexpr uint64_t kFence = 4096;
  [[nodiscard]] std::vector<std::byte> all() const;

  bool host_;
  uint64_t bytes_;
  std::byte* base_ = nullptr;
};

/// What a broken worker does to a GPU. Each returns CUDA's words for the first error that shows, "" if none does.
[[nodiscard]] std::string memset_device(const std::byte* address, uint64_t bytes);
[[nodiscard]] std::string store_to_device(const std::byte* address);  // a kernel writes one byte there
[[nodiscard]] std::string trap_device();                              // a kernel ends with a trap

}  // namespace weightd::e2e
