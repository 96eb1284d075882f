// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace weightd {

/// Element types of the safetensors format. The numbers are stored in bundles and cross the wire; never reused.
enum class DType : uint16_t {
  kBool = 0, kF4 = 1, kF6E2M3 = 2, kF6E3M2 = 3, kU8 = 4, kI8 = 5, kF8E5M2 = 6, kF8E4M3 = 7, kF8E8M0 = 8,
  kI16 = 9, kU16 = 10, kF16 = 11, kBF16 = 12, kI32 = 13, kU32 = 14, kF32 = 15, kC64 = 16, kF64 = 17, kI64 = 18,
  kU64 = 19, kF8E4M3FNUZ = 20, kF8E5M2FNUZ = 21,
};
inline constexpr uint16_t kDTypeCount = 22;

/// Bits of one element; sub-byte types are allowed (F4 4, F6 6).
[[nodiscard]] uint32_t dtype_bits(DType dtype);
/// The safetensors spelling, for example "BF16", "F8_E4M3". Static storage.
[[nodiscard]] std::string_view dtype_name(DType dtype);
/// Exact, case-sensitive match of the safetensors spelling; nullopt for anything else.
[[nodiscard]] std::optional<DType> dtype_from_name(std::string_view name);

/// How one tensor is stored. Stored in bundles; never reused.
enum class Encoding : uint16_t {
  kRaw = 0,  // bytes as in the checkpoint
  kF12 = 1,  // fixed-rate 12-bit BF16, store/FORMAT.md
};
inline constexpr uint16_t kEncodingCount = 2;
[[nodiscard]] std::string_view encoding_name(Encoding encoding);  // "raw", "f12"
[[nodiscard]] std::optional<Encoding> encoding_from_name(std::string_view name);

using Shape = std::vector<uint64_t>;  // outermost first; empty = a scalar of one element
[[nodiscard]] std::string shape_to_string(const Shape& shape);  // "[4096, 14336]"

/// Read-only BF16 matrix of `rows` x `cols`; element (r, c) is data[r * row_stride + c].
/// row_stride is in elements; with more than one row it is at least cols. data is 2-byte aligned, any finer alignment is
/// not needed. Borrows data.
struct ConstBf16Matrix {
  const uint16_t* data = nullptr;
  uint64_t rows = 0;
  uint64_t cols = 0;
  int64_t row_stride = 0;
};

/// The same, writable.
struct Bf16Matrix {
  uint16_t* data = nullptr;
  uint64_t rows = 0;
  uint64_t cols = 0;
  int64_t row_stride = 0;
};

}  // namespace weightd
