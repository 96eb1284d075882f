// SPDX-License-Identifier: Apache-2.0
#include "daemon/loader/cuda_backend.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/text.h"
#include "daemon/loader/pinned_memory.h"
#include "ipc/vmm.h"
#include "kernels/f12_check.h"
#include "store/f12.h"
#include "store/hash.h"

namespace weightd::loader {
namespace {

using Current = ipc::PrimaryContext::Current;

constexpr uint64_t kResults = 512;  // of one round of launches: at 1 MiB a result, a fraction of a millisecond
constexpr std::chrono::milliseconds kBetweenAttempts{50};
constexpr uint32_t kCopyStreams = 2;   // while one copy ends the next one runs: a piece is too small to hide its own start
constexpr uint64_t kFewestPieces = 8;  // small sections are pieces of their own

class CudaBackend final : public Backend {
 public:
  CudaBackend(const ipc::CudaDriver& driver, const ipc::GpuDevice& gpu, DeviceWork work, CudaBackendOptions options)
      : driver_(driver), gpu_(gpu), work_(std::move(work)), options_(std::move(options)) {}
  ~CudaBackend() override;

  Status start();

  uint64_t granularity_bytes() const override { return granularity_; }
  Result<uint64_t> available_bytes() override;
  Status allocate(const std::vector<uint64_t>& chunk_bytes) override;
  uint32_t max_pieces() const override { return static_cast<uint32_t>(slots_.size()); }
  Result<Piece> stage(uint64_t offset_bytes, uint64_t size_bytes) override;
  Status upload(const Piece& piece) override;
  void retire(const Piece& piece) override;
  Result<Shares> seal() override;
  Status import(std::vector<UniqueFd> chunks, const std::vector<uint64_t>& chunk_bytes) override;
  Result<std::vector<uint64_t>> hash_blocks(uint64_t arena_bytes, int threads, const Advance& advance) override;
  Status check_f12(const F12Planes& planes, int threads, const Advance& advance) override;

 private:
  /// Pinned memory for one piece, and the end of the copy that reads it.
  struct Slot {
    std::byte* memory = nullptr;
    CUevent copied = nullptr;
  };

  Status from(CUresult result, std::string_view call) const {
    return ipc::status_from_driver(driver_, result, call).with_context("GPU " + gpu_.uuid);
  }
  uint64_t* result(uint64_t index) const { return reinterpret_cast<uint64_t*>(results_) + index; }
  Result<std::vector<uint64_t>> take_results(uint64_t count) const;
  Status try_allocate(const std::vector<uint64_t>& chunk_bytes);
  Status no_room(uint64_t needed, const Status& last) const;
  Status make_ring(uint64_t arena_bytes);
  Result<uint32_t> take_slot();
  const std::byte* view(uint64_t offset) const { return reinterpret_cast<const std::byte*>(base_ + offset); }
  kernels::F12DeviceMatrix matrix(const F12Planes& planes, uint64_t index) const;
  Status explain(const F12Planes& planes, uint64_t matrix, uint64_t unit) const;
  Status validate_on_host(const F12Planes& planes, uint64_t matrix, uint64_t first, uint64_t last,
                          const std::vector<std::byte>& pool) const;
  Result<std::vector<std::byte>> fetch(uint64_t offset, uint64_t size) const;

  const ipc::CudaDriver& driver_;
  const ipc::GpuDevice gpu_;
  const DeviceWork work_;
  const CudaBackendOptions options_;
  uint64_t granularity_ = 0;
  ipc::PrimaryContext context_;
  CUstream stream_ = nullptr;
  CUstream copies_[kCopyStreams] = {};
  CUdeviceptr results_ = 0;  // kResults words; reserved first, so that a full GPU refuses early
  ipc::VmmArena arena_;
  ipc::LegacyArena legacy_arena_;
  CUdeviceptr base_ = 0;
  uint64_t size_bytes_ = 0;

  PinnedMemory ring_;
  std::vector<Slot> slots_;  // of the ring

  std::mutex mutex_;              // of what follows
  std::deque<uint32_t> retired_;  // slots to be used again, in the order in which they were let go
};

CudaBackend::~CudaBackend() {
  if (stream_ == nullptr) return;
  const Current current(context_);
  (void)driver_.stream_synchronize(stream_);
  for (CUstream copies : copies_) {
    if (copies == nullptr) continue;
    (void)driver_.stream_synchronize(copies);
    driver_.stream_destroy(copies);
  }
  for (const Slot& slot : slots_) driver_.event_destroy(slot.copied);
  ring_ = PinnedMemory();
  if (results_ != 0) driver_.mem_free(results_);
  driver_.stream_destroy(stream_);
  legacy_arena_ = ipc::LegacyArena();
  arena_ = ipc::VmmArena();
}

Status CudaBackend::start() {
  if (!options_.legacy && !(gpu_.vmm && gpu_.fd_handles)) {
    return Status::unsupported("GPU " + gpu_.uuid + " (" + gpu_.name + ") " +
                               (gpu_.vmm ? "cannot export memory as file descriptors" : "has no virtual memory management"));
  }
  WEIGHTD_ASSIGN_OR_RETURN(granularity_, ipc::chunk_granularity(driver_, gpu_.handle));
  WEIGHTD_ASSIGN_OR_RETURN(context_, ipc::PrimaryContext::retain(driver_, gpu_.handle));
  const Current current(context_);
  WEIGHTD_RETURN_IF_ERROR(current.status());
  CUstream stream = nullptr;
  WEIGHTD_RETURN_IF_ERROR(from(driver_.stream_create(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate"));
  stream_ = stream;
  for (CUstream& copies : copies_) {
    WEIGHTD_RETURN_IF_ERROR(from(driver_.stream_create(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate"));
    copies = stream;
  }
  CUdeviceptr results = 0;
  WEIGHTD_RETURN_IF_ERROR(from(driver_.mem_alloc(&results, kResults * sizeof(uint64_t)), "cuMemAlloc"));
  results_ = results;
  return {};
}

/// What the launches of a round left, once they are over.
Result<std::vector<uint64_t>> CudaBackend::take_results(uint64_t count) const {
  WEIGHTD_RETURN_IF_ERROR(from(driver_.stream_synchronize(stream_), "cuStreamSynchronize"));
  std::vector<uint64_t> host(count);
  WEIGHTD_RETURN_IF_ERROR(from(driver_.memcpy_dtoh(host.data(), results_, count * sizeof(uint64_t)), "cuMemcpyDtoH"));
  return host;
}

Status CudaBackend::try_allocate(const std::vector<uint64_t>& chunk_bytes) {
  if (!options_.legacy) {
    WEIGHTD_ASSIGN_OR_RETURN(arena_, ipc::VmmArena::create(driver_, gpu_.handle, chunk_bytes));
    base_ = arena_.base();
    size_bytes_ = arena_.size_bytes();
    return {};
  }
  if (chunk_bytes.size() != 1) return Status::internal("the legacy transport has one allocation");
  WEIGHTD_ASSIGN_OR_RETURN(legacy_arena_, ipc::LegacyArena::create(driver_, chunk_bytes.front()));
  base_ = legacy_arena_.base();
  size_bytes_ = legacy_arena_.size_bytes();
  return {};
}

Status CudaBackend::no_room(uint64_t needed, const Status& last) const {
  size_t free_bytes = 0, total_bytes = 0;
  WEIGHTD_RETURN_IF_ERROR(from(driver_.mem_get_info(&free_bytes, &total_bytes), "cuMemGetInfo"));
  return Status::resource_exhausted("GPU " + gpu_.uuid + ": needs " + human_bytes(needed) + ", " + human_bytes(free_bytes) +
                                    " of " + human_bytes(total_bytes) + " are free: " + last.message());
}

Result<uint64_t> CudaBackend::available_bytes() {
  const Current current(context_);
  WEIGHTD_RETURN_IF_ERROR(current.status());
  size_t free_bytes = 0, total_bytes = 0;
  WEIGHTD_RETURN_IF_ERROR(from(driver_.mem_get_info(&free_bytes, &total_bytes), "cuMemGetInfo"));
  return uint64_t{free_bytes};
}

Status CudaBackend::allocate(const std::vector<uint64_t>& chunk_bytes) {
  const Current current(context_);
  WEIGHTD_RETURN_IF_ERROR(current.status());
  uint64_t needed = 0;
  for (const uint64_t bytes : chunk_bytes) needed += bytes;
  if (slots_.empty()) WEIGHTD_RETURN_IF_ERROR(make_ring(needed));
  Status status = try_allocate(chunk_bytes);
  for (int attempt = 1; attempt < options_.attempts && needed <= gpu_.total_bytes; ++attempt) {
    if (status.code() != StatusCode::kResourceExhausted) break;
    if (options_.between_attempts)
      options_.between_attempts();
    else
      std::this_thread::sleep_for(kBetweenAttempts);
    status = try_allocate(chunk_bytes);
  }
  if (status.code() == StatusCode::kResourceExhausted) return no_room(needed, status);
  WEIGHTD_RETURN_IF_ERROR(status.with_context("GPU " + gpu_.uuid));
  if (size_bytes_ == 0) return {};
  WEIGHTD_RETURN_IF_ERROR(from(driver_.memset_d8_async(base_, 0, size_bytes_, stream_), "cuMemsetD8Async"));
  return from(driver_.stream_synchronize(stream_), "cuStreamSynchronize");  // before all copies
}

Status CudaBackend::make_ring(uint64_t arena_bytes) {
  const uint64_t wanted = std::max<uint64_t>(kFewestPieces, arena_bytes / kPieceBytes);
  const auto pieces = static_cast<uint32_t>(std::min<uint64_t>(wanted, std::max(1U, options_.max_pieces)));
  auto ring = PinnedMemory::make(driver_, pieces * kPieceBytes);
  if (!ring.ok()) return ring.status().with_context("GPU " + gpu_.uuid);
  ring_ = *std::move(ring);
  for (uint32_t i = 0; i < pieces; ++i) {
    CUevent copied = nullptr;
    WEIGHTD_RETURN_IF_ERROR(from(driver_.event_create(&copied, CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING), "cuEventCreate"));
    slots_.push_back({ring_.data() + i * kPieceBytes, copied});
    retired_.push_back(i);
  }
  return {};
}

/// The slot that was let go last, if its copy is over: its memory is in a cache still. Else the one whose copy is the oldest.
Result<uint32_t> CudaBackend::take_slot() {
  std::unique_lock<std::mutex> lock(mutex_);
  WEIGHTD_CHECK(!retired_.empty());  // the caller keeps to max_pieces
  for (auto slot = retired_.end(); slot != retired_.begin();) {
    --slot;
    const uint32_t index = *slot;
    // An event that nothing was recorded into is over.
    const CUresult state = driver_.event_query(slots_[index].copied);
    if (state == CUDA_ERROR_NOT_READY) continue;
    WEIGHTD_RETURN_IF_ERROR(from(state, "cuEventQuery"));
    retired_.erase(slot);
    return index;
  }
  const uint32_t index = retired_.front();
  retired_.pop_front();
  lock.unlock();
  WEIGHTD_RETURN_IF_ERROR(from(driver_.event_synchronize(slots_[index].copied), "cuEventSynchronize"));
  return index;
}

Result<Piece> CudaBackend::stage(uint64_t offset_bytes, uint64_t size_bytes) {
  WEIGHTD_CHECK(size_bytes > 0 && size_bytes <= kPieceBytes && offset_bytes <= size_bytes_ &&
                size_bytes <= size_bytes_ - offset_bytes);
  const Current current(context_);
  WEIGHTD_RETURN_IF_ERROR(current.status());
  WEIGHTD_ASSIGN_OR_RETURN(const uint32_t slot, take_slot());
  return Piece{offset_bytes, {slots_[slot].memory, size_bytes}, slot};
}

Status CudaBackend::upload(const Piece& piece) {
  const Current current(context_);
  WEIGHTD_RETURN_IF_ERROR(current.status());
  const CUstream copies = copies_[piece.slot % kCopyStreams];
  WEIGHTD_RETURN_IF_ERROR(from(
      driver_.memcpy_htod_async(base_ + piece.offset_bytes, piece.bytes.data(), piece.bytes.size(), copies), "cuMemcpyHtoDAsync"));
  return from(driver_.event_record(slots_[piece.slot].copied, copies), "cuEventRecord");
}

void CudaBackend::retire(const Piece& piece) {
  const std::lock_guard<std::mutex> lock(mutex_);
  retired_.push_back(piece.slot);
}

Result<Shares> CudaBackend::seal() {
  const Current current(context_);
  WEIGHTD_RETURN_IF_ERROR(current.status());
  for (CUstream copies : copies_) WEIGHTD_RETURN_IF_ERROR(from(driver_.stream_synchronize(copies), "cuStreamSynchronize"));
  Shares shares;
  if (options_.legacy) {
    WEIGHTD_ASSIGN_OR_RETURN(shares.ipc_handle, legacy_arena_.handle());
    return shares;
  }
  WEIGHTD_RETURN_IF_ERROR(arena_.make_read_only().with_context("GPU " + gpu_.uuid));
  WEIGHTD_ASSIGN_OR_RETURN(shares.chunks, arena_.export_chunks());
  return shares;
}

Status CudaBackend::import(std::vector<UniqueFd> chunks, const std::vector<uint64_t>& chunk_bytes) {
  if (options_.legacy) return Status::unsupported("memory of the legacy transport is its owner's alone to verify");
  WEIGHTD_ASSIGN_OR_RETURN(arena_, ipc::VmmArena::import(driver_, gpu_.handle, std::move(chunks), chunk_bytes));
  base_ = arena_.base();
  size_bytes_ = arena_.size_bytes();
  return {};
}

Result<std::vector<uint64_t>> CudaBackend::hash_blocks(uint64_t arena_bytes, int, const Advance& advance) {
  if (arena_bytes % store::kBlockBytes != 0 || arena_bytes > size_bytes_) {
    return Status::invalid_argument("an arena of " + std::to_string(arena_bytes) + " bytes does not lie in chunks of " +
                                    std::to_string(size_bytes_) + " bytes");
  }
  const Current current(context_);
  WEIGHTD_RETURN_IF_ERROR(current.status());
  const uint64_t blocks = arena_bytes / store::kBlockBytes;
  std::vector<uint64_t> hashes;
  hashes.reserve(blocks);
  while (hashes.size() < blocks) {
    const uint64_t count = std::min<uint64_t>(kResults, blocks - hashes.size());
    WEIGHTD_RETURN_IF_ERROR(work_.block_hashes(view(hashes.size() * store::kBlockBytes), count, result(0), stream_));
    WEIGHTD_ASSIGN_OR_RETURN(const std::vector<uint64_t> round, take_results(count));
    hashes.insert(hashes.end(), round.begin(), round.end());
    advance(count * store::kBlockBytes);
  }
  return hashes;
}

kernels::F12DeviceMatrix CudaBackend::matrix(const F12Planes& planes, uint64_t index) const {
  const f12::Geometry& g = planes.geometry;
  kernels::F12DeviceMatrix w;
  w.codes = view(planes.codes_offset + index * g.matrix_codes_bytes());
  w.windows = view(planes.windows_offset + index * g.matrix_windows_bytes());
  w.records = view(planes.records_offset + index * g.matrix_records_bytes());
  if (planes.pool_bytes > 0) w.pool = view(planes.pool_offset);
  w.pool_bytes = planes.pool_bytes;
  w.n = g.n;
  w.k = g.k;
  return w;
}

Status CudaBackend::check_f12(const F12Planes& planes, int, const Advance& advance) {
  const Current current(context_);
  WEIGHTD_RETURN_IF_ERROR(current.status());
  static_assert(kernels::kNoDamage == ~uint64_t{0});
  for (uint64_t begin = 0; begin < planes.geometry.batch; begin += kResults) {
    const uint64_t count = std::min<uint64_t>(kResults, planes.geometry.batch - begin);
    WEIGHTD_RETURN_IF_ERROR(from(driver_.memset_d8_async(results_, 0xFF, count * sizeof(uint64_t), stream_), "cuMemsetD8Async"));
    for (uint64_t i = 0; i < count; ++i) {
      WEIGHTD_RETURN_IF_ERROR(work_.check_f12(matrix(planes, begin + i), planes.pool_base, result(i), stream_));
    }
    WEIGHTD_ASSIGN_OR_RETURN(const std::vector<uint64_t> damaged, take_results(count));
    for (uint64_t i = 0; i < count; ++i) {
      if (damaged[i] != kernels::kNoDamage) return explain(planes, begin + i, damaged[i]);
    }
    advance(count * planes.geometry.matrix_codes_bytes());
  }
  return {};
}

Result<std::vector<std::byte>> CudaBackend::fetch(uint64_t offset, uint64_t size) const {
  std::vector<std::byte> bytes(size);
  if (size > 0) WEIGHTD_RETURN_IF_ERROR(from(driver_.memcpy_dtoh(bytes.data(), base_ + offset, size), "cuMemcpyDtoH"));
  return bytes;
}

Status CudaBackend::validate_on_host(const F12Planes& planes, uint64_t matrix, uint64_t first, uint64_t last,
                                     const std::vector<std::byte>& pool) const {
  const f12::Geometry& g = planes.geometry;
  const uint64_t codes_bytes = g.tiles() * f12::kTileBytes, records_bytes = g.groups() * f12::kRecordBytes;  // of one unit
  const uint64_t count = last - first;
  WEIGHTD_ASSIGN_OR_RETURN(const auto codes,
                           fetch(planes.codes_offset + matrix * g.matrix_codes_bytes() + first * codes_bytes, count * codes_bytes));
  WEIGHTD_ASSIGN_OR_RETURN(
      const auto windows,
      fetch(planes.windows_offset + matrix * g.matrix_windows_bytes() + first * f12::kUnitRows, count * f12::kUnitRows));
  WEIGHTD_ASSIGN_OR_RETURN(
      const auto records,
      fetch(planes.records_offset + matrix * g.matrix_records_bytes() + first * records_bytes, count * records_bytes));
  return store::f12_validate(g, first, last, codes, windows, records, pool, planes.pool_base);
}

/// The device says where, the codec says what. Some rules are about neighbours.
Status CudaBackend::explain(const F12Planes& planes, uint64_t matrix, uint64_t unit) const {
  const uint64_t units = planes.geometry.units();
  if (unit >= units)
    return Status::internal("the device reports damage in unit " + std::to_string(unit) + " of " + std::to_string(units));
  WEIGHTD_ASSIGN_OR_RETURN(const auto pool, fetch(planes.pool_offset, planes.pool_bytes));
  WEIGHTD_RETURN_IF_ERROR(validate_on_host(planes, matrix, unit, unit + 1, pool));
  const uint64_t first = unit == 0 ? 0 : unit - 1, last = std::min(units, unit + 2);
  WEIGHTD_RETURN_IF_ERROR(validate_on_host(planes, matrix, first, last, pool));
  WEIGHTD_RETURN_IF_ERROR(validate_on_host(planes, matrix, 0, units, pool));
  return Status::internal("the device calls unit " + std::to_string(unit) + " damaged, the codec does not");
}

}  // namespace

Result<std::unique_ptr<Backend>> make_cuda_backend(const ipc::CudaDriver& driver, const ipc::GpuDevice& gpu, DeviceWork work,
                                                   CudaBackendOptions options) {
  auto backend = std::make_unique<CudaBackend>(driver, gpu, std::move(work), std::move(options));
  WEIGHTD_RETURN_IF_ERROR(backend->start());
  return std::unique_ptr<Backend>(std::move(backend));
}

}  // namespace weightd::loader
