// SPDX-License-Identifier: Apache-2.0
#include "client/mapping.h"

#include <limits>

#include "base/text.h"
#include "client/connection.h"
#include "ipc/memfd.h"
#include "store/tile_layout.h"

namespace weightd::detail {
namespace {

// The whole planes of `storage`, and no more: a kernel takes its addresses from n, k and batch alone.
Status check_f12_planes(const ipc::StorageEntry& storage) {
  constexpr uint64_t kMostRows = std::numeric_limits<uint32_t>::max();
  constexpr uint64_t kMostTiles = uint64_t{1} << 48;
  const f12::Geometry geometry{storage.n, storage.k, storage.batch};
  const auto wrong = [&storage](const std::string& what) {
    return Status::corruption("storage '" + printable(storage.name) + "': " + what);
  };
  uint64_t tiles = 0;
  if (storage.n == 0 || storage.k == 0 || storage.batch == 0 || storage.n > kMostRows || storage.k > kMostRows ||
      __builtin_mul_overflow(geometry.units() * geometry.tiles(), storage.batch, &tiles) || tiles > kMostTiles) {
    return wrong("its sizes are outside the f12 limits");
  }
  if (storage.data_bytes != geometry.codes_bytes() || storage.windows_bytes != geometry.windows_bytes() ||
      storage.records_bytes != geometry.records_bytes()) {
    return wrong("codes, windows or records are not of the size that [" + std::to_string(storage.batch) + ", " +
                 std::to_string(storage.n) + ", " + std::to_string(storage.k) + "] needs");
  }
  return {};
}

TensorInfo info_of(const ipc::StorageEntry& storage, std::string name, Shape shape, DType dtype, uint64_t logical_bytes) {
  TensorInfo info;
  info.name = std::move(name);
  info.dtype = dtype;
  info.shape = std::move(shape);
  info.encoding = storage.encoding;
  info.logical_bytes = logical_bytes;
  info.resident_bytes = storage.resident_bytes;
  return info;
}

TensorPlace place_of(const ipc::StorageEntry& storage, uint64_t row_begin) {
  TensorPlace place;
  place.data_offset = storage.data_offset;
  place.windows_offset = storage.windows_offset;
  place.records_offset = storage.records_offset;
  place.geometry = {storage.n, storage.k, storage.batch};
  place.row_begin = row_begin;
  return place;
}

// The daemon's numbers and descriptors do not fit together. What this process lacks (descriptors, address space) stays what it is.
Status blame_daemon(const Status& status) {
  return status.code() == StatusCode::kInvalidArgument ? Status::corruption(status.message()) : status;
}

// Whether sizes, descriptors and handle of the lease are what its transport needs.
Status check_lease(const ipc::AcquiredReply& acquired, size_t fd_count) {
  const bool legacy = acquired.model.transport == "legacy";
  const size_t chunk_fds = legacy ? 0 : acquired.chunk_bytes.size();
  if (fd_count != acquired.fd_count || fd_count != chunk_fds + 1) {
    return Status::corruption("the lease has " + std::to_string(fd_count) + " descriptors for a table and " +
                              std::to_string(chunk_fds) + " chunks");
  }
  if (acquired.ipc_handle.size() != (legacy ? ipc::kIpcHandleBytes : 0)) {
    return Status::corruption("the lease has a memory handle of " + std::to_string(acquired.ipc_handle.size()) +
                              " bytes, transport " + printable(acquired.model.transport));
  }
  uint64_t chunks_bytes = 0;
  for (const uint64_t bytes : acquired.chunk_bytes) {
    if (__builtin_add_overflow(chunks_bytes, bytes, &chunks_bytes)) return Status::corruption("the chunk sizes overflow");
  }
  if (chunks_bytes < acquired.arena_bytes) {
    return Status::corruption("the chunks hold " + std::to_string(chunks_bytes) + " bytes of an arena of " +
                              std::to_string(acquired.arena_bytes));
  }
  return {};
}

Result<TensorIndex> read_table(const ipc::AcquiredReply& acquired, int fd) {
  Result<std::vector<std::byte>> bytes = ipc::read_sealed_memfd(fd, acquired.table_bytes, ipc::kMaxTableBytes);
  if (!bytes.ok()) return blame_daemon(bytes.status()).with_context("tensor table");
  Result<ipc::TensorTable> table = ipc::decode_table(*bytes);
  if (!table.ok()) return table.status().with_context("tensor table");
  if (table->arena_bytes != acquired.arena_bytes) {
    return Status::corruption("the table is for an arena of " + std::to_string(table->arena_bytes) +
                              " bytes, the lease for one of " + std::to_string(acquired.arena_bytes));
  }
  if (table->content_id != acquired.model.content_id) {
    return Status::corruption("the table is of content " + printable(table->content_id) + ", the lease of " +
                              printable(acquired.model.content_id));
  }
  return TensorIndex::build(*std::move(table));
}

ArenaSource source_of(const ipc::AcquiredReply& acquired, uint64_t instance, std::vector<UniqueFd> chunks) {
  const ipc::ModelSummary& model = acquired.model;
  std::string identity =
      std::to_string(instance) + "/" + std::to_string(model.generation) + "/" + model.name + "/" + model.content_id;
  return {model.device,      model.transport,     acquired.arena_bytes, acquired.chunk_bytes,
          std::move(chunks), acquired.ipc_handle, std::move(identity)};
}

}  // namespace

Result<TensorIndex> TensorIndex::build(ipc::TensorTable table) {
  for (const ipc::StorageEntry& storage : table.storages) {
    if (storage.encoding == Encoding::kF12) WEIGHTD_RETURN_IF_ERROR(check_f12_planes(storage));
  }
  TensorIndex index;
  index.pool_offset_bytes_ = table.pool_offset_bytes;
  index.pool_bytes_ = table.pool_bytes;
  index.infos_.reserve(table.tensors.size());
  index.places_.reserve(table.tensors.size());
  for (ipc::TensorEntry& tensor : table.tensors) {
    const ipc::StorageEntry& storage = table.storages[tensor.storage];
    if (tensor.row_begin % f12::kUnitRows != 0) {
      return Status::corruption("tensor '" + printable(tensor.name) + "': its first row " + std::to_string(tensor.row_begin) +
                                " is not a multiple of " + std::to_string(f12::kUnitRows));
    }
    const uint64_t logical_bytes = storage.merged ? tensor.shape[0] * storage.k * 2 : storage.logical_bytes;
    index.add(info_of(storage, std::move(tensor.name), std::move(tensor.shape), tensor.dtype, logical_bytes),
              place_of(storage, tensor.row_begin));
  }
  for (ipc::StorageEntry& storage : table.storages) {
    if (!storage.merged) continue;
    TensorInfo info = info_of(storage, std::move(storage.name), {storage.n, storage.k}, storage.dtype, storage.logical_bytes);
    info.merged = true;
    index.add(std::move(info), place_of(storage, 0));
  }
  // Only now: growing infos_ moves the names.
  index.by_name_.reserve(index.infos_.size());
  for (uint32_t i = 0; i < index.infos_.size(); ++i) index.by_name_.emplace(index.infos_[i].name, i);
  return index;
}

void TensorIndex::add(TensorInfo info, const TensorPlace& place) {
  infos_.push_back(std::move(info));
  places_.push_back(place);
}

const uint32_t* TensorIndex::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &found->second;
}

uint64_t TensorIndex::allocated_bytes() const {
  constexpr uint64_t kInlineText = 15;  // what a std::string holds without an allocation
  uint64_t bytes = infos_.capacity() * sizeof(TensorInfo) + places_.capacity() * sizeof(TensorPlace);
  bytes += by_name_.bucket_count() * sizeof(void*) +
           by_name_.size() * (sizeof(std::pair<std::string_view, uint32_t>) + 2 * sizeof(void*));
  for (const TensorInfo& info : infos_) {
    if (info.name.capacity() > kInlineText) bytes += info.name.capacity() + 1;
    bytes += info.shape.capacity() * sizeof(uint64_t);
  }
  return bytes;
}

Result<std::shared_ptr<Mapping>> Mapping::make(std::shared_ptr<Connection> connection, uint64_t instance,
                                               const ipc::AcquiredReply& acquired, std::vector<UniqueFd> fds) {
  WEIGHTD_RETURN_IF_ERROR(check_lease(acquired, fds.size()));
  WEIGHTD_ASSIGN_OR_RETURN(TensorIndex tensors, read_table(acquired, fds.front().get()));
  fds.erase(fds.begin());
  WEIGHTD_ASSIGN_OR_RETURN(std::unique_ptr<Compute> compute, map_arena(source_of(acquired, instance, std::move(fds))));
  std::shared_ptr<Mapping> mapping(new Mapping(std::move(connection), instance, std::move(tensors), std::move(compute),
                                               model_info(acquired.model), acquired.arena_bytes));
  mapping->lease = acquired.lease;
  return mapping;
}

Mapping::Mapping(std::shared_ptr<Connection> connection, uint64_t instance, TensorIndex tensors, std::unique_ptr<Compute> compute,
                 ModelInfo info, uint64_t arena_bytes)
    : connection_(std::move(connection)),
      instance_(instance),
      tensors_(std::move(tensors)),
      first_info_(info),
      arena_bytes_(arena_bytes),
      mapped_bytes_(compute->mapped_bytes()),
      compute_(std::move(compute)),
      base_(compute_->base()),
      info_(std::move(info)) {}

Status Mapping::unmap() {
  const std::unique_lock lock(use_mutex_);
  if (!mapped_) return {};
  Status status = compute_->unmap();
  if (status.code() == StatusCode::kFailedPrecondition) return status;
  mapped_ = false;
  compute_.reset();
  connection_.reset();
  return status;
}

Status Mapping::may_unmap() const {
  const Use use(*this);
  return use.valid() ? compute_->may_unmap() : Status();
}

ModelInfo Mapping::info() const {
  // The mutex of a forked child may be held by a thread that it does not have.
  if (home_.left()) return first_info_;
  const std::lock_guard lock(info_mutex_);
  return info_;
}

void Mapping::set_info(ModelInfo info) {
  const std::lock_guard lock(info_mutex_);
  info_ = std::move(info);
}

void Mapping::set_state(std::string state) {
  const std::lock_guard lock(info_mutex_);
  info_.state = std::move(state);
}

void Mapping::set_lost() {
  set_state(std::string(ipc::generation_state_name(ipc::GenerationState::kLost)));
  lost_.store(true, std::memory_order_release);
}

Status Lease::usable() const {
  if (mapping->home().left()) {
    return Status::forked("model '" + printable(mapping->first_info().name) + "' belongs to the parent of this process");
  }
  if (ended.load(std::memory_order_acquire)) {
    return Status::revoked("the lease on model '" + printable(mapping->first_info().name) + "' has ended");
  }
  if (mapping->lost()) {
    return Status::lost("the memory of model '" + printable(mapping->first_info().name) +
                        "' is gone with the process that owned it; release it and acquire the model again");
  }
  return {};
}

Status Lease::end(bool wait_for_daemon) {
  if (mapping->home().surely_left()) {
    return Status::forked("model '" + printable(mapping->first_info().name) + "' belongs to the parent of this process");
  }
  if (wait_for_daemon && !ended.load(std::memory_order_acquire)) WEIGHTD_RETURN_IF_ERROR(mapping->may_unmap());
  if (ended.exchange(true, std::memory_order_acq_rel)) return {};
  const std::shared_ptr<Connection> connection = mapping->connection();
  return connection->end(mapping, wait_for_daemon);
}

ModelInfo model_info(const ipc::ModelSummary& model) {
  ModelInfo info;
  info.name = model.name;
  info.content_id = model.content_id;
  info.generation = model.generation;
  info.device = model.device;
  info.state = std::string(ipc::generation_state_name(model.state));
  info.residency = model.residency;
  info.transport = model.transport;
  info.logical_bytes = model.logical_bytes;
  info.resident_bytes = model.resident_bytes;
  info.tensor_count = model.tensor_count;
  return info;
}

}  // namespace weightd::detail
