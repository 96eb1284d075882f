// SPDX-License-Identifier: Apache-2.0
#include "weightd/types.h"

#include <array>

namespace weightd {
namespace {

struct DTypeFacts {
  std::string_view name;
  uint32_t bits;
};
// Indexed by DType.
constexpr std::array<DTypeFacts, kDTypeCount> kDTypes = {{
    {"BOOL", 8}, {"F4", 4}, {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8}, {"I8", 8}, {"F8_E5M2", 8}, {"F8_E4M3", 8},
    {"F8_E8M0", 8}, {"I16", 16}, {"U16", 16}, {"F16", 16}, {"BF16", 16}, {"I32", 32}, {"U32", 32}, {"F32", 32},
    {"C64", 64}, {"F64", 64}, {"I64", 64}, {"U64", 64}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8},
}};
constexpr std::array<std::string_view, kEncodingCount> kEncodings = {"raw", "f12"};

}  // namespace

uint32_t dtype_bits(DType dtype) { return kDTypes[static_cast<size_t>(dtype)].bits; }
std::string_view dtype_name(DType dtype) { return kDTypes[static_cast<size_t>(dtype)].name; }

std::optional<DType> dtype_from_name(std::string_view name) {
  for (uint16_t i = 0; i < kDTypeCount; ++i) {
    if (kDTypes[i].name == name) return static_cast<DType>(i);
  }
  return std::nullopt;
}

std::string_view encoding_name(Encoding encoding) { return kEncodings[static_cast<size_t>(encoding)]; }

std::optional<Encoding> encoding_from_name(std::string_view name) {
  for (uint16_t i = 0; i < kEncodingCount; ++i) {
    if (kEncodings[i] == name) return static_cast<Encoding>(i);
  }
  return std::nullopt;
}

std::string shape_to_string(const Shape& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + "]";
}

}  // namespace weightd
