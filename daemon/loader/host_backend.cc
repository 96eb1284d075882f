// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <limits>
#include <mutex>
#include <optional>
#include <utility>

#include "base/parallel.h"
#include "daemon/loader/backend.h"
#include "ipc/memfd.h"
#include "store/f12.h"
#include "store/hash.h"

namespace weightd::loader {
namespace {

constexpr uint64_t kUnitsPerStep = 256;  // of a validation

Result<std::vector<UniqueFd>> duplicate(const std::vector<UniqueFd>& fds) {
  std::vector<UniqueFd> copies;
  for (const UniqueFd& fd : fds) {
    copies.emplace_back(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0));
    if (!copies.back().valid()) return status_from_errno(errno, "duplicating a chunk's descriptor");
  }
  return copies;
}

class HostBackend final : public Backend {
 public:
  explicit HostBackend(uint64_t granularity_bytes) : granularity_bytes_(granularity_bytes) {}
  uint64_t granularity_bytes() const override { return granularity_bytes_; }

  Result<uint64_t> available_bytes() override { return uint64_t{0}; }  // the daemon sees the same memory
  Status allocate(const std::vector<uint64_t>& chunk_bytes) override {
    WEIGHTD_ASSIGN_OR_RETURN(arena_, ipc::WritableArena::create(chunk_bytes, "weights"));
    chunk_bytes_ = chunk_bytes;
    return {};
  }

  // The pages are mapped here: the file is read straight into the arena, and there is nothing to upload.
  uint32_t max_pieces() const override { return std::numeric_limits<uint32_t>::max(); }
  Result<Piece> stage(uint64_t offset_bytes, uint64_t size_bytes) override {
    return Piece{offset_bytes, arena_->bytes().subspan(offset_bytes, size_bytes), 0};
  }
  Status upload(const Piece&) override { return {}; }
  void retire(const Piece&) override {}

  Result<Shares> seal() override {
    WEIGHTD_ASSIGN_OR_RETURN(std::vector<UniqueFd> chunks, (*std::exchange(arena_, std::nullopt)).seal());
    WEIGHTD_ASSIGN_OR_RETURN(std::vector<UniqueFd> own, duplicate(chunks));
    WEIGHTD_RETURN_IF_ERROR(import(std::move(own), chunk_bytes_));
    return Shares{std::move(chunks), {}};
  }

  Status import(std::vector<UniqueFd> chunks, const std::vector<uint64_t>& chunk_bytes) override {
    WEIGHTD_ASSIGN_OR_RETURN(mapped_, ipc::MappedArena::map(std::move(chunks), chunk_bytes));
    return {};
  }

  Result<std::vector<uint64_t>> hash_blocks(uint64_t arena_bytes, int threads, const Advance& advance) override {
    if (arena_bytes % store::kBlockBytes != 0 || arena_bytes > mapped_.bytes().size()) {
      return Status::invalid_argument("an arena of " + std::to_string(arena_bytes) + " bytes does not lie in chunks of " +
                                      std::to_string(mapped_.bytes().size()) + " bytes");
    }
    std::vector<uint64_t> hashes(arena_bytes / store::kBlockBytes);
    parallel_ranges(hashes.size(), 1, threads, [&](uint64_t begin, uint64_t end) {
      for (uint64_t block = begin; block < end; ++block) {
        const std::byte* bytes = mapped_.base() + block * store::kBlockBytes;
        hashes[block] = store::block_hash(std::span<const std::byte, store::kBlockBytes>(bytes, store::kBlockBytes));
        advance(store::kBlockBytes);
      }
    });
    return hashes;
  }

  Status check_f12(const F12Planes& planes, int threads, const Advance& advance) override {
    std::mutex mutex;
    Status failure;
    std::atomic<bool> failed = false;
    const uint64_t units = planes.geometry.units();
    const uint64_t steps = (units + kUnitsPerStep - 1) / kUnitsPerStep;
    parallel_ranges(planes.geometry.batch * steps, 1, threads, [&](uint64_t begin, uint64_t end) {
      for (uint64_t step = begin; step < end && !failed; ++step) {
        const uint64_t first = step % steps * kUnitsPerStep;
        const uint64_t last = std::min(units, first + kUnitsPerStep);
        Status status = check_units(planes, step / steps, first, last);
        advance((last - first) * planes.geometry.tiles() * f12::kTileBytes);
        if (status.ok()) continue;
        failed = true;
        const std::lock_guard<std::mutex> lock(mutex);
        if (failure.ok()) failure = std::move(status);
      }
    });
    return failure;
  }

 private:
  std::span<const std::byte> view(uint64_t offset, uint64_t size) const { return mapped_.bytes().subspan(offset, size); }

  Status check_units(const F12Planes& planes, uint64_t matrix, uint64_t first, uint64_t last) const {
    const f12::Geometry& g = planes.geometry;
    const uint64_t codes = g.tiles() * f12::kTileBytes, records = g.groups() * f12::kRecordBytes;  // of one unit
    const uint64_t count = last - first;
    return store::f12_validate(
        g, first, last, view(planes.codes_offset + matrix * g.matrix_codes_bytes() + first * codes, count * codes),
        view(planes.windows_offset + matrix * g.matrix_windows_bytes() + first * f12::kUnitRows, count * f12::kUnitRows),
        view(planes.records_offset + matrix * g.matrix_records_bytes() + first * records, count * records),
        view(planes.pool_offset, planes.pool_bytes), planes.pool_base);
  }

  uint64_t granularity_bytes_;
  std::optional<ipc::WritableArena> arena_;
  std::vector<uint64_t> chunk_bytes_;
  ipc::MappedArena mapped_;
};

}  // namespace

std::unique_ptr<Backend> make_host_backend(uint64_t granularity_bytes) { return std::make_unique<HostBackend>(granularity_bytes); }

}  // namespace weightd::loader
