// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "base/fd.h"
#include "weightd/client.h"
#include "weightd/status.h"
#include "weightd/types.h"

namespace weightd::detail {

/// Rows of one BF16 matrix in the arena, as addresses of the process's mapping.
struct WeightMatrix {
  Encoding encoding{};
  const std::byte* data = nullptr;     // raw: the first of the rows meant, without gaps; f12: the codes of all stored rows
  const std::byte* windows = nullptr;  // f12, of all stored rows
  const std::byte* records = nullptr;
  const std::byte* pool = nullptr;  // of the model
  uint64_t pool_bytes = 0;
  uint64_t stored_rows = 0;  // f12
  uint64_t row_begin = 0;    // f12: the first of the rows meant among the stored ones, a multiple of 16
  uint64_t n = 0, k = 0;     // the rows and columns meant
};

using RowIndexes = std::variant<std::span<const int32_t>, std::span<const int64_t>>;

/// Where the bytes of one generation lie in this process, and who computes on them. The caller has checked what does not depend on
/// that: shapes, strides, overlaps; a single row has a plain stride. No call is made during or after unmap(). Calls are
/// thread-safe.
class Compute {
 public:
  virtual ~Compute() = default;
  Compute(const Compute&) = delete;
  Compute& operator=(const Compute&) = delete;

  [[nodiscard]] virtual const std::byte* base() const = 0;
  [[nodiscard]] virtual uint64_t mapped_bytes() const = 0;  // whole chunks

  /// Scratch that the most demanding gemm() with w needs.
  [[nodiscard]] virtual uint64_t workspace_bytes(const WeightMatrix& w) const = 0;
  virtual Status gemm(const WeightMatrix& w, ConstBf16Matrix x, Bf16Matrix y, const GemmOptions& options) = 0;
  /// Rows [begin, end) of an f12 matrix, from its row_begin, without gaps.
  virtual Status decompress(const WeightMatrix& w, uint64_t begin, uint64_t end, std::byte* out, const GemmOptions& options) = 0;
  virtual Status gather_rows(const WeightMatrix& w, const RowIndexes& rows, Bf16Matrix out, const GemmOptions& options) = 0;
  virtual Status copy(const std::byte* from, std::span<std::byte> out, const GemmOptions& options) = 0;

  /// kFailedPrecondition: unmap() would be refused now, as far as can be seen without asking for it.
  [[nodiscard]] virtual Status may_unmap() const = 0;
  /// Waits for what still reads, and unmaps. kFailedPrecondition: not now, and nothing has changed. With any other error it is
  /// unmapped.
  virtual Status unmap() = 0;

 protected:
  Compute() = default;
};

/// What came with a lease, checked: as many descriptors as sizes (legacy: none), sizes that hold the arena.
struct ArenaSource {
  std::string device;     // "host" or a GPU's UUID
  std::string transport;  // "fd" or "legacy"
  uint64_t arena_bytes = 0;
  std::vector<uint64_t> chunk_bytes{};
  std::vector<UniqueFd> chunks{};
  std::vector<std::byte> ipc_handle{};  // legacy
  std::string identity{};               // the same for the same memory of the same daemon, and for nothing else
};

/// Maps the arena where it lies. kUnsupported: a transport or device of a kind that this build does not know.
[[nodiscard]] Result<std::unique_ptr<Compute>> map_arena(ArenaSource source);

[[nodiscard]] Result<std::unique_ptr<Compute>> map_host_arena(ArenaSource source);
/// kUnavailable: no driver, or the GPU is not among those that this process sees. kUnsupported: built without CUDA, or without code
/// for that GPU.
[[nodiscard]] Result<std::unique_ptr<Compute>> map_gpu_arena(ArenaSource source);

}  // namespace weightd::detail
