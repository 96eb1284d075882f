// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include "base/text.h"
#include "client/address_range.h"
#include "client/compute.h"
#include "client/mapping.h"
#include "weightd/client.h"

namespace weightd {
namespace {

using detail::AddressRange;
using detail::Mapping;
using detail::range_of;
using detail::RowIndexes;
using detail::TensorPlace;
using detail::WeightMatrix;

AddressRange range_of(const Mapping& mapping) { return range_of(mapping.base(), mapping.mapped_bytes()); }

Status bad(const TensorInfo& info, const std::string& what) {
  return Status::invalid_argument("tensor '" + printable(info.name) + "': " + what);
}

Status with_tensor(const Status& status, const TensorInfo& info) {
  return status.ok() ? status : status.with_context("tensor '" + printable(info.name) + "'");
}

// Checks one operand and says where it lies.
Result<AddressRange> check_matrix(const TensorInfo& info, const char* name, ConstBf16Matrix matrix) {
  if (matrix.rows == 0 || matrix.cols == 0) return AddressRange{};
  const auto wrong = [&](const std::string& what) { return bad(info, std::string(name) + ": " + what); };
  if (matrix.data == nullptr) return wrong("no data");
  if (reinterpret_cast<uintptr_t>(matrix.data) % alignof(uint16_t) != 0) return wrong("the address is odd");
  if (matrix.rows > 1 && (matrix.row_stride < 0 || static_cast<uint64_t>(matrix.row_stride) < matrix.cols)) {
    return wrong("row stride " + std::to_string(matrix.row_stride) + " is less than the " + std::to_string(matrix.cols) +
                 " columns");
  }
  const uint64_t stride = matrix.rows > 1 ? static_cast<uint64_t>(matrix.row_stride) : 0;
  uint64_t elements = 0, bytes = 0;
  uintptr_t end = 0;
  if (__builtin_mul_overflow(matrix.rows - 1, stride, &elements) || __builtin_add_overflow(elements, matrix.cols, &elements) ||
      __builtin_mul_overflow(elements, sizeof(uint16_t), &bytes) ||
      __builtin_add_overflow(reinterpret_cast<uintptr_t>(matrix.data), bytes, &end)) {
    return wrong("it does not fit the address space");
  }
  return AddressRange{reinterpret_cast<uintptr_t>(matrix.data), end};
}

Result<AddressRange> check_matrix(const TensorInfo& info, const char* name, const Bf16Matrix& matrix) {
  return check_matrix(info, name, ConstBf16Matrix{matrix.data, matrix.rows, matrix.cols, matrix.row_stride});
}

// All that can be wrong with the operands; nothing has been written when it says so.
Status check_gemm(const TensorInfo& info, const Mapping& mapping, uint64_t n, uint64_t k, ConstBf16Matrix x, Bf16Matrix y) {
  if (x.cols != k) return bad(info, "x has " + std::to_string(x.cols) + " columns, w needs " + std::to_string(k));
  if (y.cols != n) return bad(info, "y has " + std::to_string(y.cols) + " columns, w gives " + std::to_string(n));
  if (y.rows != x.rows) {
    return bad(info, "x has " + std::to_string(x.rows) + " rows, y has " + std::to_string(y.rows));
  }
  WEIGHTD_ASSIGN_OR_RETURN(const AddressRange input, check_matrix(info, "x", x));
  WEIGHTD_ASSIGN_OR_RETURN(const AddressRange output, check_matrix(info, "y", y));
  if (output.overlaps(input)) return bad(info, "y overlaps x");
  if (output.overlaps(range_of(mapping))) return bad(info, "y overlaps the mapped weights");
  return {};
}

template <typename Index>
Status check_gather(const TensorInfo& info, const Mapping& mapping, std::span<const Index> rows, const Bf16Matrix& out) {
  if (out.rows != rows.size() || out.cols != info.shape.back()) {
    return bad(info, "the output is " + std::to_string(out.rows) + " x " + std::to_string(out.cols) + ", expected " +
                         std::to_string(rows.size()) + " x " + std::to_string(info.shape.back()));
  }
  if (rows.empty()) return {};
  if (rows.data() == nullptr || reinterpret_cast<uintptr_t>(rows.data()) % sizeof(Index) != 0) {
    return bad(info, "the row indexes have no data, or are not aligned to their size");
  }
  WEIGHTD_ASSIGN_OR_RETURN(const AddressRange output, check_matrix(info, "the output", out));
  if (output.overlaps(range_of(rows.data(), rows.size_bytes()))) return bad(info, "the output overlaps the row indexes");
  if (output.overlaps(range_of(mapping))) return bad(info, "the output overlaps the mapped weights");
  return {};
}

Status check_output(const TensorInfo& info, const Mapping& mapping, uint64_t bytes, std::span<std::byte> out) {
  if (out.size() < bytes) {
    return bad(info, "the output holds " + std::to_string(out.size()) + " bytes, " + std::to_string(bytes) + " are needed");
  }
  if (bytes > 0 && range_of(out.data(), bytes).overlaps(range_of(mapping))) {
    return bad(info, "the output overlaps the mapped weights");
  }
  return {};
}

// All rows of matrix `index` of the storage behind an f12 tensor.
WeightMatrix stored_matrix(const Mapping& mapping, const TensorPlace& place, uint64_t index) {
  const f12::Geometry& geometry = place.geometry;
  WeightMatrix matrix;
  matrix.encoding = Encoding::kF12;
  matrix.data = mapping.base() + place.data_offset + index * geometry.matrix_codes_bytes();
  matrix.windows = mapping.base() + place.windows_offset + index * geometry.matrix_windows_bytes();
  matrix.records = mapping.base() + place.records_offset + index * geometry.matrix_records_bytes();
  matrix.pool = mapping.base() + mapping.tensors().pool_offset_bytes();
  matrix.pool_bytes = mapping.tensors().pool_bytes();
  matrix.stored_rows = matrix.n = geometry.n;
  matrix.k = geometry.k;
  return matrix;
}

// Matrix `index` of a tensor of rank 2 or 3.
WeightMatrix tensor_matrix(const Mapping& mapping, uint32_t tensor, uint64_t index) {
  const TensorInfo& info = mapping.tensors().infos()[tensor];
  const TensorPlace& place = mapping.tensors().place(tensor);
  const uint64_t n = info.shape[info.shape.size() - 2];
  const uint64_t k = info.shape.back();
  WeightMatrix matrix;
  if (info.encoding == Encoding::kF12) {
    matrix = stored_matrix(mapping, place, index);
    matrix.row_begin = place.row_begin;
  } else {
    matrix.encoding = Encoding::kRaw;
    matrix.data = mapping.base() + place.data_offset + index * n * k * sizeof(uint16_t);
  }
  matrix.n = n;
  matrix.k = k;
  return matrix;
}

// Rows of a tensor: all matrices one below the other; a scalar or a vector is one row.
struct RowShape {
  uint64_t rows = 1;
  uint64_t row_bits = 0;
};

RowShape row_shape(const TensorInfo& info) {
  RowShape shape;
  for (size_t i = 0; i + 1 < info.shape.size(); ++i) shape.rows *= info.shape[i];
  shape.row_bits = (info.shape.empty() ? 1 : info.shape.back()) * dtype_bits(info.dtype);
  return shape;
}

// Rows [begin, end) of all matrices of the storage, one matrix at a time.
Status decode_f12_rows(const Mapping& mapping, const TensorPlace& place, uint64_t begin, uint64_t end, std::byte* out,
                       const GemmOptions& options) {
  const uint64_t n = place.geometry.n;
  while (begin < end) {
    const uint64_t first = begin % n;
    const uint64_t count = std::min(n - first, end - begin);
    WEIGHTD_RETURN_IF_ERROR(
        mapping.compute().decompress(stored_matrix(mapping, place, begin / n), first, first + count, out, options));
    out += count * place.geometry.k * sizeof(uint16_t);
    begin += count;
  }
  return {};
}

Status revoked(const Mapping& mapping) {
  return Status::revoked("the lease on model '" + printable(mapping.first_info().name) + "' has ended");
}

Status check_rank(const TensorInfo& info, size_t rank, const char* what) {
  if (info.dtype == DType::kBF16 && info.shape.size() == rank) return {};
  return bad(info, std::string(what) + ", this is " + std::string(dtype_name(info.dtype)) + " " + shape_to_string(info.shape));
}

Status run_gemm(const Mapping& mapping, uint32_t tensor, uint64_t index, ConstBf16Matrix x, Bf16Matrix y,
                const GemmOptions& options) {
  const TensorInfo& info = mapping.tensors().infos()[tensor];
  const WeightMatrix w = tensor_matrix(mapping, tensor, index);
  WEIGHTD_RETURN_IF_ERROR(check_gemm(info, mapping, w.n, w.k, x, y));
  if (x.rows == 0 || w.n == 0) return {};
  // The stride of a single row says nothing; the kernels ask for a plain one.
  if (x.rows == 1) x.row_stride = static_cast<int64_t>(w.k);
  if (y.rows == 1) y.row_stride = static_cast<int64_t>(w.n);
  return with_tensor(mapping.compute().gemm(w, x, y, options), info);
}

template <typename Index>
Status run_gather(const detail::Lease& lease, uint32_t tensor, std::span<const Index> rows, Bf16Matrix out,
                  const GemmOptions& options) {
  WEIGHTD_RETURN_IF_ERROR(lease.usable());
  const Mapping& mapping = *lease.mapping;
  const Mapping::Use use(mapping);
  if (!use.valid()) return revoked(mapping);
  const TensorInfo& info = mapping.tensors().infos()[tensor];
  WEIGHTD_RETURN_IF_ERROR(check_rank(info, 2, "gathering rows needs a BF16 matrix"));
  WEIGHTD_RETURN_IF_ERROR(check_gather(info, mapping, rows, out));
  if (rows.empty()) return {};
  if (out.rows == 1) out.row_stride = static_cast<int64_t>(out.cols);
  return with_tensor(mapping.compute().gather_rows(tensor_matrix(mapping, tensor, 0), RowIndexes(rows), out, options), info);
}

}  // namespace

const TensorInfo& Tensor::info() const { return lease_->mapping->tensors().infos()[index_]; }

std::span<const std::byte> Tensor::data() const {
  const Mapping& mapping = *lease_->mapping;
  if (info().encoding != Encoding::kRaw || !lease_->usable().ok()) return {};
  return {mapping.base() + mapping.tensors().place(index_).data_offset, info().logical_bytes};
}

Status Tensor::decompress(std::span<std::byte> out, const GemmOptions& options) const {
  return decompress_rows(0, row_shape(info()).rows, out, options);
}

Status Tensor::decompress_rows(uint64_t begin, uint64_t end, std::span<std::byte> out, const GemmOptions& options) const {
  WEIGHTD_RETURN_IF_ERROR(lease_->usable());
  const Mapping& mapping = *lease_->mapping;
  const Mapping::Use use(mapping);
  if (!use.valid()) return revoked(mapping);
  const RowShape shape = row_shape(info());
  if (begin > end || end > shape.rows) {
    return bad(info(), "rows " + std::to_string(begin) + " to " + std::to_string(end) + " of " + std::to_string(shape.rows));
  }
  if (begin * shape.row_bits % 8 != 0 || end * shape.row_bits % 8 != 0) {
    return bad(info(), "rows " + std::to_string(begin) + " to " + std::to_string(end) + " do not begin and end at whole bytes");
  }
  const uint64_t bytes = (end - begin) * shape.row_bits / 8;
  WEIGHTD_RETURN_IF_ERROR(check_output(info(), mapping, bytes, out));
  if (bytes == 0) return {};
  const TensorPlace& place = mapping.tensors().place(index_);
  if (info().encoding == Encoding::kF12) {
    return with_tensor(decode_f12_rows(mapping, place, place.row_begin + begin, place.row_begin + end, out.data(), options),
                       info());
  }
  const std::byte* from = mapping.base() + place.data_offset + begin * shape.row_bits / 8;
  return with_tensor(mapping.compute().copy(from, out.first(bytes), options), info());
}

Status Tensor::gather_rows(std::span<const int32_t> rows, Bf16Matrix out, const GemmOptions& options) const {
  return run_gather(*lease_, index_, rows, out, options);
}

Status Tensor::gather_rows(std::span<const int64_t> rows, Bf16Matrix out, const GemmOptions& options) const {
  return run_gather(*lease_, index_, rows, out, options);
}

Status Tensor::gemm(ConstBf16Matrix x, Bf16Matrix y, const GemmOptions& options) const {
  WEIGHTD_RETURN_IF_ERROR(lease_->usable());
  const Mapping::Use use(*lease_->mapping);
  if (!use.valid()) return revoked(*lease_->mapping);
  WEIGHTD_RETURN_IF_ERROR(check_rank(info(), 2, "a GEMM needs a BF16 matrix"));
  return run_gemm(*lease_->mapping, index_, 0, x, y, options);
}

Status Tensor::gemm(uint64_t index, ConstBf16Matrix x, Bf16Matrix y, const GemmOptions& options) const {
  WEIGHTD_RETURN_IF_ERROR(lease_->usable());
  const Mapping::Use use(*lease_->mapping);
  if (!use.valid()) return revoked(*lease_->mapping);
  WEIGHTD_RETURN_IF_ERROR(check_rank(info(), 3, "a GEMM with an index needs a BF16 stack of matrices"));
  if (index >= info().shape[0]) {
    return bad(info(), "matrix " + std::to_string(index) + " of " + std::to_string(info().shape[0]));
  }
  return run_gemm(*lease_->mapping, index_, index, x, y, options);
}

uint64_t Tensor::workspace_bytes() const {
  const Mapping& mapping = *lease_->mapping;
  const size_t rank = info().shape.size();
  if (info().dtype != DType::kBF16 || (rank != 2 && rank != 3) || !lease_->usable().ok()) return 0;
  const Mapping::Use use(mapping);
  return use.valid() ? mapping.compute().workspace_bytes(tensor_matrix(mapping, index_, 0)) : 0;
}

}  // namespace weightd
