// SPDX-License-Identifier: Apache-2.0
#include "kernels/launch.h"

#include <limits>

#include "store/tile_layout.h"

namespace weightd::kernels {
namespace {

constexpr uint64_t kMaxExtent = std::numeric_limits<uint32_t>::max();

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

Status check_bf16(const uint16_t* data, uint64_t rows, uint64_t cols, int64_t stride, bool written, const char* call,
                  const char* name) {
  if (rows == 0 || cols == 0) return {};
  if (data == nullptr) return refuse(call, std::string(name) + " is null");
  if (!aligned(data, 2)) return refuse(call, std::string(name) + " must be 2-byte aligned");
  const uint64_t magnitude = stride < 0 ? uint64_t{0} - static_cast<uint64_t>(stride) : static_cast<uint64_t>(stride);
  if (written && rows > 1 && magnitude < cols) return refuse(call, std::string(name) + " has overlapping rows");
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
