// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "weightd/status.h"
#include "weightd/types.h"

namespace weightd::store {

struct TensorView {
  std::string_view name;
  DType dtype{};
  const Shape& shape;
};

/// Compares the bits of two pieces of equal size, which begin at byte `offset_bytes` of the tensor. kCorruption names the first
/// element that differs, its coordinates and both values: "tensor 'w': element 5 [0, 5]: bundle 0x0000, checkpoint 0x8000".
Status compare_bits(const TensorView& tensor, uint64_t offset_bytes, std::span<const std::byte> bundle,
                    std::span<const std::byte> checkpoint);

}  // namespace weightd::store
