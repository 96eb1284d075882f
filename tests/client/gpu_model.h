// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ipc/cuda_driver.h"
#include "tests/client/test_model.h"
#include "tests/gpu/device_memory.h"
#include "weightd/types.h"

namespace weightd::test {

/// The driver and the first GPU of this machine. Aborts without one: these tests do not pass there.
[[nodiscard]] const ipc::CudaDriver& driver_or_die();
[[nodiscard]] const ipc::GpuDevice& gpu_or_die();

/// `model`, its bytes moved to the GPU as a loader does it: chunks of at most `chunk_bytes`, which nothing but the descriptors in
/// it keeps alive.
[[nodiscard]] std::shared_ptr<SealedModel> on_gpu(SealedModel model, uint64_t chunk_bytes = uint64_t{1} << 30);

/// Poisoned and fenced device memory for a BF16 matrix [rows, cols], and what came out of it.
class DeviceOutput {
 public:
  DeviceOutput(uint64_t rows, uint64_t cols, uint64_t stride, uint64_t before = 0);
  DeviceOutput(uint64_t rows, uint64_t cols) : DeviceOutput(rows, cols, cols) {}
  [[nodiscard]] Bf16Matrix view() const;
  [[nodiscard]] std::span<std::byte> bytes() const {
    return {memory_.data() + before_ * 2, rows_ * cols_ * 2};
  }  // of one without gaps
  /// The rows one after the other. Waits for the device; a failure of the test if anything else was written.
  [[nodiscard]] std::vector<uint16_t> take() const;
  [[nodiscard]] bool untouched() const;

 private:
  uint64_t rows_, cols_, stride_, before_;
  testing::DeviceMemory memory_;
};

/// A BF16 matrix on the device, row after row.
class DeviceInput {
 public:
  DeviceInput(std::vector<uint16_t> words, uint64_t cols);
  [[nodiscard]] ConstBf16Matrix view() const { return {memory_.as<uint16_t>(), rows_, cols_, static_cast<int64_t>(cols_)}; }
  [[nodiscard]] ConstBf16Matrix rows(uint64_t count) const;  // the first of them
  void upload(const std::vector<uint16_t>& words) const;

 private:
  uint64_t rows_, cols_;
  testing::DeviceMemory memory_;
};

/// What a gemm() with the coded matrix `words` [n, k] has to give, to the last bit: from the oracle's kernels over uncoded tiles or
/// from cuBLASLt, as the library chooses by documented rules.
[[nodiscard]] std::vector<uint16_t> fused_product(const std::vector<uint16_t>& words, uint64_t n, ConstBf16Matrix x);
[[nodiscard]] std::vector<uint16_t> blas_product(const std::vector<uint16_t>& words, uint64_t n, ConstBf16Matrix x);
[[nodiscard]] std::vector<uint16_t> best_product(const std::vector<uint16_t>& words, uint64_t n, ConstBf16Matrix x);

}  // namespace weightd::test
