// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "ipc/cuda_driver.h"
#include "weightd/status.h"

namespace weightd::loader {

/// Page-locked host memory that the GPU copies from at full speed. Huge pages where the system gives them, touched by all cores and
/// registered in one call: cuMemHostAlloc of the same size takes ten times as long, under the driver's lock.
class PinnedMemory {
 public:
  /// In the current context. kResourceExhausted: no memory.
  [[nodiscard]] static Result<PinnedMemory> make(const ipc::CudaDriver& driver, uint64_t size_bytes);

  PinnedMemory() = default;
  PinnedMemory(PinnedMemory&& other) noexcept;
  PinnedMemory& operator=(PinnedMemory&& other) noexcept;
  ~PinnedMemory();  // in the context of make(); nothing copies from it any more

  [[nodiscard]] std::byte* data() const { return data_; }

 private:
  void give_back();

  const ipc::CudaDriver* driver_ = nullptr;
  std::byte* mapped_ = nullptr;  // with the slack that aligns data_
  uint64_t mapped_bytes_ = 0;
  std::byte* data_ = nullptr;
  bool registered_ = false;
};

}  // namespace weightd::loader
