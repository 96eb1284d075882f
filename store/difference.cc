// SPDX-License-Identifier: Apache-2.0
#include "store/difference.h"

#include <algorithm>
#include <cstring>

#include "base/text.h"

namespace weightd::store {
namespace {

// The value at `begin`, most significant digit first.
std::string hex_value(std::span<const std::byte> bytes, uint64_t begin, uint64_t count) {
  std::string text = "0x";
  for (uint64_t i = std::min<uint64_t>(begin + count, bytes.size()); i > begin; --i) {
    const auto byte = static_cast<unsigned char>(bytes[i - 1]);
    text += hex(&byte, 1);
  }
  return text;
}

Shape coordinates(const Shape& shape, uint64_t element) {
  Shape at(shape.size());
  for (size_t i = shape.size(); i > 0; --i) {
    if (shape[i - 1] == 0) return {};
    at[i - 1] = element % shape[i - 1];
    element /= shape[i - 1];
  }
  return at;
}

}  // namespace

Status compare_bits(const TensorView& tensor, uint64_t offset_bytes, std::span<const std::byte> bundle,
                    std::span<const std::byte> checkpoint) {
  WEIGHTD_CHECK(bundle.size() == checkpoint.size());
  if (bundle.empty() || std::memcmp(bundle.data(), checkpoint.data(), bundle.size()) == 0) return {};
  const auto differing = std::mismatch(bundle.begin(), bundle.end(), checkpoint.begin()).first - bundle.begin();
  const uint64_t byte = offset_bytes + static_cast<uint64_t>(differing);
  const std::string name = "tensor '" + printable(tensor.name) + "': ";
  const uint32_t bits = dtype_bits(tensor.dtype);
  if (bits < 8 || offset_bytes % (bits / 8) != 0) {
    const auto at = static_cast<uint64_t>(differing);
    return Status::corruption(name + "byte " + std::to_string(byte) + ": bundle " + hex_value(bundle, at, 1) + ", checkpoint " +
                              hex_value(checkpoint, at, 1));
  }
  const uint64_t element = byte / (bits / 8);
  const uint64_t at = element * (bits / 8) - offset_bytes;
  return Status::corruption(name + "element " + std::to_string(element) + " " +
                            shape_to_string(coordinates(tensor.shape, element)) + ": bundle " + hex_value(bundle, at, bits / 8) +
                            ", checkpoint " + hex_value(checkpoint, at, bits / 8));
}

}  // namespace weightd::store
