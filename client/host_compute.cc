// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <mutex>
#include <utility>

#include "base/parallel.h"
#include "client/compute.h"
#include "ipc/memfd.h"
#include "kernels/cpu/gemm.h"

namespace weightd::detail {
namespace {

// Threads pay for themselves above this.
constexpr uint64_t kCopyGrainBytes = uint64_t{1} << 22;
constexpr uint64_t kGatherGrainBytes = uint64_t{1} << 18;

kernels::cpu::F12Matrix stored_matrix(const WeightMatrix& w) {
  return {w.data, w.windows, w.records, w.pool, w.pool_bytes, w.stored_rows, w.k};
}

/// The first index outside [0, n), or rows.size().
template <typename Index>
size_t first_outside(std::span<const Index> rows, uint64_t n) {
  size_t i = 0;
  while (i < rows.size() && rows[i] >= 0 && static_cast<uint64_t>(rows[i]) < n) ++i;
  return i;
}

Status gather_one(const WeightMatrix& w, uint64_t row, uint16_t* out) {
  const uint64_t row_bytes = w.k * sizeof(uint16_t);
  if (w.encoding == Encoding::kRaw) {
    std::memcpy(out, w.data + row * row_bytes, row_bytes);
    return {};
  }
  const std::span<std::byte> bytes(reinterpret_cast<std::byte*>(out), row_bytes);
  return kernels::cpu::decompress(stored_matrix(w), w.row_begin + row, w.row_begin + row + 1, bytes, 1);
}

template <typename Index>
Status gather(const WeightMatrix& w, std::span<const Index> rows, Bf16Matrix out, int threads) {
  if (const size_t i = first_outside(rows, w.n); i < rows.size()) {
    return Status::invalid_argument("index " + std::to_string(i) + " is row " + std::to_string(rows[i]) + " of " +
                                    std::to_string(w.n));
  }
  if (w.k == 0) return {};
  std::mutex mutex;
  Status result;
  const uint64_t grain = kGatherGrainBytes / (w.k * sizeof(uint16_t)) + 1;
  parallel_ranges(rows.size(), grain, threads, [&](uint64_t begin, uint64_t end) {
    for (uint64_t i = begin; i < end; ++i) {
      Status status = gather_one(w, static_cast<uint64_t>(rows[i]), out.data + static_cast<int64_t>(i) * out.row_stride);
      if (status.ok()) continue;
      const std::lock_guard lock(mutex);
      result = std::move(status);
      return;
    }
  });
  return result;
}

/// Sealed chunks in this process's memory, and the CPU's kernels. Calls have ended when they return, so nothing is left to wait
/// for.
class HostCompute final : public Compute {
 public:
  explicit HostCompute(ipc::MappedArena arena) : arena_(std::move(arena)) {}

  const std::byte* base() const override { return arena_.base(); }
  uint64_t mapped_bytes() const override { return arena_.bytes().size(); }
  uint64_t workspace_bytes(const WeightMatrix&) const override { return 0; }

  Status gemm(const WeightMatrix& w, ConstBf16Matrix x, Bf16Matrix y, const GemmOptions& options) override {
    if (w.encoding == Encoding::kF12) {
      return kernels::cpu::gemm(stored_matrix(w), {w.row_begin, w.row_begin + w.n}, x, y, options.threads);
    }
    return kernels::cpu::gemm(kernels::cpu::RawMatrix{w.data, w.n, w.k, w.k}, {0, w.n}, x, y, options.threads);
  }

  Status decompress(const WeightMatrix& w, uint64_t begin, uint64_t end, std::byte* out, const GemmOptions& options) override {
    const uint64_t bytes = (end - begin) * w.k * sizeof(uint16_t);
    return kernels::cpu::decompress(stored_matrix(w), w.row_begin + begin, w.row_begin + end, {out, bytes}, options.threads);
  }

  Status gather_rows(const WeightMatrix& w, const RowIndexes& rows, Bf16Matrix out, const GemmOptions& options) override {
    return std::visit([&](const auto& indexes) { return gather(w, indexes, out, options.threads); }, rows);
  }

  Status copy(const std::byte* from, std::span<std::byte> out, const GemmOptions& options) override {
    parallel_ranges(out.size(), kCopyGrainBytes, options.threads,
                    [&](uint64_t begin, uint64_t end) { std::memcpy(out.data() + begin, from + begin, end - begin); });
    return {};
  }

  Status may_unmap() const override { return {}; }
  Status unmap() override {
    arena_ = ipc::MappedArena();
    return {};
  }

 private:
  ipc::MappedArena arena_;
};

}  // namespace

Result<std::unique_ptr<Compute>> map_host_arena(ArenaSource source) {
  Result<ipc::MappedArena> arena = ipc::MappedArena::map(std::move(source.chunks), source.chunk_bytes);
  if (!arena.ok()) {
    // The daemon's numbers and descriptors do not fit together. What this process lacks stays what it is.
    const Status status = arena.status();
    return status.code() == StatusCode::kInvalidArgument ? Status::corruption(status.message()) : status;
  }
  return std::unique_ptr<Compute>(std::make_unique<HostCompute>(*std::move(arena)));
}

}  // namespace weightd::detail
