// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/gemm.h"

#include <algorithm>
#include <bit>
#include <cfenv>
#include <initializer_list>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>

#include "base/parallel.h"
#include "kernels/cpu/gemm_kernels.h"

namespace weightd::kernels::cpu {
namespace {

constexpr uint64_t kMaxDimension = uint64_t{1} << 48;     // keeps every size below in 64 bits
constexpr uint64_t kActivationBytes = uint64_t{8} << 20;  // converted activations at a time, unless six tokens are more
constexpr uint64_t kMinTokens = 6, kMaxTokens = 96;       // multiples of what the kernels hold in registers

/// Floats at a 64-byte boundary, uninitialised.
class FloatBuffer {
 public:
  [[nodiscard]] static FloatBuffer allocate(uint64_t count) {
    FloatBuffer buffer;
    if (count < (uint64_t{1} << 60)) {
      buffer.data_.reset(static_cast<float*>(::operator new (count * sizeof(float), std::align_val_t{64}, std::nothrow)));
    }
    return buffer;
  }
  [[nodiscard]] float* get() const { return data_.get(); }

 private:
  struct Free {
    void operator()(float* data) const { ::operator delete (data, std::align_val_t{64}); }
  };
  std::unique_ptr<float, Free> data_;
};

/// Rounding and subnormals as the contract says, whatever mode the calling thread is in.
class DefaultFloatMode {
 public:
  DefaultFloatMode() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatMode() { std::fesetenv(&saved_); }
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

 private:
  std::fenv_t saved_{};
};

/// Bytes [begin, end).
struct AddressRange {
  uintptr_t begin = 0, end = 0;
  [[nodiscard]] bool overlaps(const AddressRange& other) const { return begin < other.end && other.begin < end; }
};

AddressRange range_of(const void* data, uint64_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  return {begin, begin + bytes};
}

Status bad(std::string what) { return Status::invalid_argument("gemm: " + std::move(what)); }

/// Checks a view and gives the bytes from its first to its last element.
Status check_view(const char* name, const ConstBf16Matrix& view, uint64_t rows, uint64_t cols, AddressRange& range) {
  if (view.rows != rows || view.cols != cols) {
    return bad(std::string(name) + " is " + std::to_string(view.rows) + " x " + std::to_string(view.cols) + ", expected " +
               std::to_string(rows) + " x " + std::to_string(cols));
  }
  if (rows == 0 || cols == 0) return {};
  if (reinterpret_cast<uintptr_t>(view.data) % alignof(uint16_t) != 0 || view.data == nullptr) {
    return bad(std::string(name) + " is null or at an odd address");
  }
  uint64_t elements = cols;
  if (rows > 1) {
    const auto stride = static_cast<uint64_t>(std::max<int64_t>(view.row_stride, 0));
    if (stride < cols)
      return bad(std::string(name) + ": row stride " + std::to_string(view.row_stride) + " is below the columns, " +
                 std::to_string(cols));
    if (stride > kMaxDimension || rows > kMaxDimension || __builtin_mul_overflow(rows - 1, stride, &elements) ||
        __builtin_add_overflow(elements, cols, &elements) || elements > (uint64_t{1} << 62)) {
      return bad(std::string(name) + " does not fit the address space");
    }
  }
  range = range_of(view.data, elements * sizeof(uint16_t));
  return {};
}

/// Checks that hold for both forms of w. `weights` is what y must not touch.
Status check_call(uint64_t n, uint64_t k, RowRange rows, const ConstBf16Matrix& x, const Bf16Matrix& y,
                  std::initializer_list<AddressRange> weights) {
  if (n > kMaxDimension || k > kMaxDimension) return bad("w of " + std::to_string(n) + " x " + std::to_string(k) + " is too large");
  if (rows.begin > rows.end || rows.end > n) {
    return bad("rows " + std::to_string(rows.begin) + " to " + std::to_string(rows.end) + " of " + std::to_string(n));
  }
  AddressRange x_range, y_range;
  WEIGHTD_RETURN_IF_ERROR(check_view("x", x, x.rows, k, x_range));
  WEIGHTD_RETURN_IF_ERROR(check_view("y", {y.data, y.rows, y.cols, y.row_stride}, x.rows, rows.end - rows.begin, y_range));
  if (y_range.overlaps(x_range)) return bad("y overlaps x");
  for (const AddressRange& range : weights) {
    if (y_range.overlaps(range)) return bad("y overlaps w");
  }
  return {};
}

/// One token of `block` to binary32 in lane order; columns past K become -0.
template <bool kF12>
void convert_token(const uint16_t* x, uint64_t k, const Activations& block, uint64_t token, float* values) {
  for (uint64_t step = 0; step < Activations::blocks(k) * kBlockSteps; ++step) {
    float* to = values + Activations::offset(block.tokens, token, step);
    const uint64_t have = std::min<uint64_t>(kLanes, k - std::min(k, step * kLanes));
    const uint16_t* from = x + step * kLanes;
    for (uint32_t c = 0; c < kLanes; ++c) {
      to[kF12 ? f12_lane(c) : c] = c < have ? std::bit_cast<float>(uint32_t{from[c]} << 16) : -0.0F;
    }
  }
}

/// Threads for `units` units: none gets less than a few microseconds of work.
int thread_count(int threads, uint64_t units, uint64_t products) {
  const uint64_t want = threads > 0 ? static_cast<uint64_t>(threads) : std::max(1U, std::thread::hardware_concurrency());
  constexpr uint64_t kProductsPerThread = uint64_t{1} << 16;
  return static_cast<int>(std::max<uint64_t>(1, std::min({want, units, products / kProductsPerThread + 1})));
}

template <typename Matrix>
constexpr bool kIsF12 = std::is_same_v<Matrix, F12Matrix>;

/// y for all tokens of x, after the checks.
template <typename Matrix>
Status multiply(const Matrix& w, RowRange rows, const ConstBf16Matrix& x, const Bf16Matrix& y, int threads) {
  if (x.rows == 0 || rows.begin == rows.end) return {};
  const UnitRange units{rows.begin / kUnitRows, (rows.end + kUnitRows - 1) / kUnitRows};
  const uint64_t token_floats = Activations::blocks(w.k) * Activations::kTokenStride;
  const uint64_t token_bytes = std::max<uint64_t>(1, token_floats * sizeof(float));
  const uint64_t budget = std::clamp<uint64_t>(kActivationBytes / token_bytes / kMinTokens * kMinTokens, kMinTokens, kMaxTokens);
  const uint64_t tokens_at_once = std::min(x.rows, budget);
  const int used = thread_count(threads, units.end - units.begin, (rows.end - rows.begin) * w.k * tokens_at_once);

  const FloatBuffer activations = FloatBuffer::allocate(std::max<uint64_t>(kLanes, tokens_at_once * token_floats));
  const FloatBuffer sums = FloatBuffer::allocate(static_cast<uint64_t>(used) * tokens_at_once * kUnitSums);
  if (activations.get() == nullptr || sums.get() == nullptr) {
    return Status::resource_exhausted("gemm: no memory for " + std::to_string(tokens_at_once) + " tokens of " +
                                      std::to_string(w.k));
  }
  for (uint64_t token = 0; token < x.rows; token += tokens_at_once) {
    const Activations block{activations.get(), std::min(tokens_at_once, x.rows - token)};
    parallel_ranges(block.tokens, 1, thread_count(threads, block.tokens, block.tokens * w.k / 16),
                    [&](uint64_t begin, uint64_t end) {
                      for (uint64_t m = begin; m < end; ++m) {
                        convert_token<kIsF12<Matrix>>(x.data + static_cast<int64_t>(token + m) * x.row_stride, w.k, block, m,
                                                      activations.get());
                      }
                    });
    const Output out{y.data + static_cast<int64_t>(token) * y.row_stride, y.row_stride, rows.begin, rows.end};
    // Cut by part, not by unit, so that each part has its own sums.
    const auto parts = static_cast<uint64_t>(used);
    parallel_ranges(parts, 1, used, [&](uint64_t begin, uint64_t end) {
      const DefaultFloatMode mode;
      for (uint64_t part = begin; part < end; ++part) {
        const uint64_t count = units.end - units.begin;
        const UnitRange mine{units.begin + count * part / parts, units.begin + count * (part + 1) / parts};
        multiply_units(w, mine, block, out, sums.get() + part * tokens_at_once * kUnitSums);
      }
    });
  }
  return {};
}

}  // namespace

Status gemm(const F12Matrix& w, RowRange rows, ConstBf16Matrix x, Bf16Matrix y, int threads) {
  if (w.n > 0xFFFFFFFFU || w.k > 0xFFFFFFFFU)
    return bad("w of " + std::to_string(w.n) + " x " + std::to_string(w.k) + " is too large");
  const f12::Geometry g{w.n, w.k, 1};
  if (g.units() * g.tiles() > (uint64_t{1} << 48)) return bad("w does not fit the address space");
  WEIGHTD_RETURN_IF_ERROR(check_call(w.n, w.k, rows, x, y,
                                     {range_of(w.codes, g.matrix_codes_bytes()), range_of(w.windows, g.matrix_windows_bytes()),
                                      range_of(w.records, g.matrix_records_bytes()), range_of(w.pool, w.pool_bytes)}));
  if (rows.begin % kUnitRows != 0) return bad("row " + std::to_string(rows.begin) + " is not the first of a unit of 16");
  return multiply(w, rows, x, y, threads);
}

Status gemm(const RawMatrix& w, RowRange rows, ConstBf16Matrix x, Bf16Matrix y, int threads) {
  if (w.n > kMaxDimension || w.k > kMaxDimension || w.row_stride > kMaxDimension) return bad("w is too large");
  if (w.n > 1 && w.row_stride < w.k) {
    return bad("w: row stride " + std::to_string(w.row_stride) + " is below the columns, " + std::to_string(w.k));
  }
  uint64_t elements = 0;
  if (w.n != 0 && (__builtin_mul_overflow(w.n - 1, w.row_stride, &elements) || elements > (uint64_t{1} << 61))) {
    return bad("w does not fit the address space");
  }
  WEIGHTD_RETURN_IF_ERROR(check_call(w.n, w.k, rows, x, y, {range_of(w.words, w.n == 0 ? 0 : (elements + w.k) * 2)}));
  // Rows count from the first one asked for: sums of a row do not depend on its unit.
  RawMatrix part = w;
  part.words = rows.begin == 0 ? w.words : w.words + rows.begin * w.row_stride * 2;
  part.n = rows.end - rows.begin;
  return multiply(part, {0, part.n}, x, y, threads);
}

Status decompress(const F12Matrix& w, uint64_t begin, uint64_t end, std::span<std::byte> out, int threads) {
  const f12::Geometry g{w.n, w.k, 1};
  if (w.n > 0xFFFFFFFFU || w.k > 0xFFFFFFFFU || g.units() * g.tiles() > (uint64_t{1} << 48)) {
    return Status::invalid_argument("decompress: the matrix does not fit the address space");
  }
  if (begin > end || end > w.n) {
    return Status::invalid_argument("decompress: rows " + std::to_string(begin) + " to " + std::to_string(end) + " of " +
                                    std::to_string(w.n));
  }
  uint64_t bytes = 0;
  if (__builtin_mul_overflow(end - begin, w.k * 2, &bytes) || bytes != out.size()) {
    return Status::invalid_argument("decompress: output of " + std::to_string(out.size()) + " bytes for " +
                                    std::to_string(end - begin) + " rows of " + std::to_string(w.k));
  }
  if (bytes == 0) return {};
  auto* words = reinterpret_cast<uint8_t*>(out.data());
  // Cut at the bounds of units, so that no unit is decoded twice.
  const uint64_t first_unit = begin / kUnitRows;
  const uint64_t units = (end + kUnitRows - 1) / kUnitRows - first_unit;
  parallel_ranges(units, 1, thread_count(threads, units, bytes), [&](uint64_t unit_begin, uint64_t unit_end) {
    const uint64_t from = std::max(begin, (first_unit + unit_begin) * kUnitRows);
    const uint64_t to = std::min(end, (first_unit + unit_end) * kUnitRows);
    decompress_rows(w, from, to, words + (from - begin) * 2 * w.k);
  });
  return {};
}

}  // namespace weightd::kernels::cpu
