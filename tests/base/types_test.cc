// SPDX-License-Identifier: Apache-2.0
#include "weightd/types.h"

#include <gtest/gtest.h>

namespace weightd {
namespace {

struct Row {
  DType dtype;
  uint16_t number;
  const char* name;
  uint32_t bits;
};

TEST(Types, DTypesAreFrozen) {
  // Numbers are stored in bundles and cross the wire; names are those of the safetensors format.
  const std::vector<Row> rows = {
      {DType::kBool, 0, "BOOL", 8},
      {DType::kF4, 1, "F4", 4},
      {DType::kF6E2M3, 2, "F6_E2M3", 6},
      {DType::kF6E3M2, 3, "F6_E3M2", 6},
      {DType::kU8, 4, "U8", 8},
      {DType::kI8, 5, "I8", 8},
      {DType::kF8E5M2, 6, "F8_E5M2", 8},
      {DType::kF8E4M3, 7, "F8_E4M3", 8},
      {DType::kF8E8M0, 8, "F8_E8M0", 8},
      {DType::kI16, 9, "I16", 16},
      {DType::kU16, 10, "U16", 16},
      {DType::kF16, 11, "F16", 16},
      {DType::kBF16, 12, "BF16", 16},
      {DType::kI32, 13, "I32", 32},
      {DType::kU32, 14, "U32", 32},
      {DType::kF32, 15, "F32", 32},
      {DType::kC64, 16, "C64", 64},
      {DType::kF64, 17, "F64", 64},
      {DType::kI64, 18, "I64", 64},
      {DType::kU64, 19, "U64", 64},
      {DType::kF8E4M3FNUZ, 20, "F8_E4M3FNUZ", 8},
      {DType::kF8E5M2FNUZ, 21, "F8_E5M2FNUZ", 8},
  };
  ASSERT_EQ(rows.size(), size_t{kDTypeCount});
  for (const Row& row : rows) {
    EXPECT_EQ(static_cast<uint16_t>(row.dtype), row.number);
    EXPECT_EQ(dtype_name(row.dtype), row.name);
    EXPECT_EQ(dtype_bits(row.dtype), row.bits);
    EXPECT_EQ(dtype_from_name(row.name), row.dtype);
  }
}

TEST(Types, CO_030_DTypeNamesMatchExactly) {
  for (const char* name : {"", "bf16", "BF16 ", " BF16", "BFLOAT16", "F8", "F8_E9M9"})
    EXPECT_EQ(dtype_from_name(name), std::nullopt) << name;
}

TEST(Types, EncodingsAreFrozen) {
  EXPECT_EQ(static_cast<uint16_t>(Encoding::kRaw), 0);
  EXPECT_EQ(static_cast<uint16_t>(Encoding::kF12), 1);
  EXPECT_EQ(encoding_name(Encoding::kRaw), "raw");
  EXPECT_EQ(encoding_name(Encoding::kF12), "f12");
  EXPECT_EQ(encoding_from_name("f12"), Encoding::kF12);
  EXPECT_EQ(encoding_from_name("raw"), Encoding::kRaw);
  EXPECT_EQ(encoding_from_name("F12"), std::nullopt);
  EXPECT_EQ(encoding_from_name(""), std::nullopt);
}

TEST(Types, ShapesPrintAsLists) {
  EXPECT_EQ(shape_to_string({}), "[]");
  EXPECT_EQ(shape_to_string({7}), "[7]");
  EXPECT_EQ(shape_to_string({4096, 14336, UINT64_MAX}), "[4096, 14336, 18446744073709551615]");
}

}  // namespace
}  // namespace weightd
