// SPDX-License-Identifier: Apache-2.0
#include "kernels/launch.h"

#include <limits>

#include "store/tile_layout.h"

namespace weightd::kernels {
namespace {

constexpr uint64_t kMaxExtent = std::numeric_limits<uint32_t>::max();
constexpr uint64_t kMaxSpan = uint64_t{1} << 60;  // elements

bool aligned(const void* pointer, uintptr_t alignment) { return reinterpret_cast<uintptr_t>(pointer) % alignment == 0; }

Status refuse(const char* call, const std::string& rule) { return Status::invalid_argument(std::string(call) + ": " + rule); }

}  // namespace

Status status_from_cuda(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return {};
  return {StatusCode::kCuda, std::string(call) + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error)};
}

Status check_matrix(const F12DeviceMatrix& w, const char* call) {
  if (w.n > kMaxExtent || w.k > kMaxExtent) return refuse(call, "the weight has n or k past 2^32 - 1");
  if (w.n == 0 || w.k == 0) return {};
  if (w.codes == nullptr || w.windows == nullptr || w.records == nullptr) return refuse(call, "the weight lacks a plane");
  if (w.pool == nullptr && w.pool_bytes > 0) return refuse(call, "the weight's pool is null but not empty");
  if (!aligned(w.codes, 16) || !aligned(w.windows, 16) || !aligned(w.records, 16) || !aligned(w.pool, 16)) {
    return refuse(call, "the weight's planes must be 16-byte aligned");
  }
  return {};
}

Result<ByteRange> check_bf16(const uint16_t* data, uint64_t rows, uint64_t cols, int64_t stride, const char* call,
                             const char* name) {
  if (rows == 0 || cols == 0) return ByteRange{};
  if (data == nullptr) return refuse(call, std::string(name) + " is null");
  if (!aligned(data, 2)) return refuse(call, std::string(name) + " must be 2-byte aligned");
  uint64_t elements = cols;
  if (rows > 1) {
    if (stride < 0 || static_cast<uint64_t>(stride) < cols) {
      return refuse(
          call, std::string(name) + ": row stride " + std::to_string(stride) + " is below the columns, " + std::to_string(cols));
    }
    if (__builtin_mul_overflow(rows - 1, static_cast<uint64_t>(stride), &elements) || elements > kMaxSpan || cols > kMaxSpan) {
      return refuse(call, std::string(name) + " is larger than any memory");
    }
    elements += cols;
  }
  const auto begin = reinterpret_cast<uintptr_t>(data);
  return ByteRange{begin, begin + elements * 2};
}

Status check_no_overlap(const F12DeviceMatrix& w, uint64_t tile_bytes, const ByteRange& out, const char* call) {
  const f12::Geometry geometry{w.n, w.k, 1};
  const auto overlaps = [&](const std::byte* plane, uint64_t bytes) {
    const auto begin = reinterpret_cast<uintptr_t>(plane);
    return plane != nullptr && out.overlaps({begin, begin + bytes});
  };
  if (overlaps(w.codes, geometry.units() * geometry.tiles() * tile_bytes) || overlaps(w.windows, geometry.windows_bytes()) ||
      overlaps(w.records, geometry.records_bytes()) || overlaps(w.pool, w.pool_bytes)) {
    return refuse(call, "the output overlaps the weight");
  }
  return {};
}

F12DeviceMatrix slice_rows(const F12DeviceMatrix& w, uint64_t begin, uint64_t end) {
  WEIGHTD_CHECK(begin % f12::kUnitRows == 0 && begin <= end && end <= w.n);
  F12DeviceMatrix slice = w;
  const uint64_t unit = begin / f12::kUnitRows;
  const f12::Geometry geometry{w.n, w.k, 1};
  slice.codes += unit * geometry.tiles() * f12::kTileBytes;
  slice.windows += unit * f12::kUnitRows;
  slice.records += unit * geometry.groups() * f12::kRecordBytes;
  slice.n = end - begin;
  return slice;
}

}  // namespace weightd::kernels
