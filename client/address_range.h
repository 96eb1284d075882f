// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "weightd/types.h"

namespace weightd::detail {

/// Bytes [begin, end) of the address space, which the CPU and GPUs of a process share. An empty one overlaps nothing.
struct AddressRange {
  uintptr_t begin = 0;
  uintptr_t end = 0;
  [[nodiscard]] bool overlaps(const AddressRange& other) const { return begin < other.end && other.begin < end; }
};

[[nodiscard]] inline AddressRange range_of(const void* data, uint64_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  return {begin, begin + bytes};
}

/// From the first element to the last; of a matrix whose stride has been checked.
[[nodiscard]] inline AddressRange range_of(const ConstBf16Matrix& matrix) {
  if (matrix.rows == 0 || matrix.cols == 0) return {};
  const uint64_t elements = (matrix.rows - 1) * static_cast<uint64_t>(matrix.row_stride) + matrix.cols;
  return range_of(matrix.data, elements * sizeof(uint16_t));
}

}  // namespace weightd::detail
