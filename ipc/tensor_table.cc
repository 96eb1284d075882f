// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "base/text.h"
#include "ipc/messages.h"
#include "ipc/protocol.capnp.h"
#include "ipc/wire.h"

namespace weightd::ipc {
namespace {

constexpr uint64_t kPlaneAlignBytes = 256;
constexpr uint64_t kMaxMatrixSide = std::numeric_limits<uint32_t>::max();

/// Puts "storage 'x'" in front of what is wrong with it. Formed on failure only: there may be a million entries.
void check_entry(FieldDecoder& fields, const char* kind, const std::string& name, const Status& status) {
  if (!status.ok()) fields.fail(status.with_context(std::string(kind) + " '" + printable(name, 80) + "'"));
}

/// a * b unless it exceeds `limit`.
std::optional<uint64_t> product(uint64_t a, uint64_t b, uint64_t limit) {
  if (a != 0 && b > limit / a) return std::nullopt;
  return a * b;
}

/// The product of `dimensions`; nullopt over kMaxArenaBytes * 8 (no tensor has more elements than its bytes have bits).
std::optional<uint64_t> element_count(std::span<const uint64_t> dimensions) {
  // A dimension of 0 makes the whole empty, however large the others are.
  if (std::find(dimensions.begin(), dimensions.end(), 0U) != dimensions.end()) return 0;
  std::optional<uint64_t> count = 1;
  for (const uint64_t dimension : dimensions) {
    if (count.has_value()) count = product(*count, dimension, kMaxArenaBytes * 8);
  }
  return count;
}

Status check_plane(const char* plane, uint64_t offset, uint64_t bytes, uint64_t arena_bytes) {
  if (offset > arena_bytes || bytes > arena_bytes - offset) {
    return Status::corruption(std::string(plane) + " [" + std::to_string(offset) + ", +" + std::to_string(bytes) +
                              ") lies outside the arena of " + std::to_string(arena_bytes) + " bytes");
  }
  if (bytes != 0 && offset % kPlaneAlignBytes != 0) {
    return Status::corruption(std::string(plane) + " begins at " + std::to_string(offset) + ", not a multiple of " +
                              std::to_string(kPlaneAlignBytes));
  }
  return {};
}

Status check_f12(const StorageEntry& storage) {
  if (storage.dtype != DType::kBF16) return Status::corruption("f12 holds BF16 only");
  if (storage.n == 0 || storage.k == 0 || storage.batch == 0 || storage.n > kMaxMatrixSide || storage.k > kMaxMatrixSide) {
    return Status::corruption("n, k and batch must be at least 1, n and k below 2^32");
  }
  if (storage.merged && storage.batch != 1)
    return Status::corruption("a merged matrix is one matrix, batch is " + std::to_string(storage.batch));
  std::optional<uint64_t> bytes = product(storage.n * storage.k, 2, kMaxArenaBytes);
  if (bytes.has_value()) bytes = product(*bytes, storage.batch, kMaxArenaBytes);
  if (bytes != storage.logical_bytes) return Status::corruption("logical bytes are not those of its n, k and batch");
  return {};
}

Status check_raw(const StorageEntry& storage) {
  if (storage.data_bytes != storage.logical_bytes) return Status::corruption("raw bytes and logical bytes differ");
  if (storage.windows_bytes != 0 || storage.records_bytes != 0) return Status::corruption("raw has neither windows nor records");
  if (storage.merged || storage.n != 0 || storage.k != 0 || storage.batch != 0)
    return Status::corruption("raw has no matrix geometry");
  return {};
}

Status check_storage(const StorageEntry& storage, uint64_t arena_bytes) {
  WEIGHTD_RETURN_IF_ERROR(check_plane("data", storage.data_offset, storage.data_bytes, arena_bytes));
  WEIGHTD_RETURN_IF_ERROR(check_plane("windows", storage.windows_offset, storage.windows_bytes, arena_bytes));
  WEIGHTD_RETURN_IF_ERROR(check_plane("records", storage.records_offset, storage.records_bytes, arena_bytes));
  if (storage.resident_bytes > arena_bytes) return Status::corruption("resident bytes exceed the arena");
  return storage.encoding == Encoding::kF12 ? check_f12(storage) : check_raw(storage);
}

Status check_raw_tensor(const TensorEntry& tensor, const StorageEntry& storage) {
  const std::optional<uint64_t> elements = element_count(tensor.shape);
  const std::optional<uint64_t> bits =
      elements.has_value() ? product(*elements, dtype_bits(tensor.dtype), kMaxArenaBytes * 8) : elements;
  if (!bits.has_value() || *bits % 8 != 0 || *bits / 8 != storage.logical_bytes) {
    return Status::corruption("shape " + shape_to_string(tensor.shape) + " of " + std::string(dtype_name(tensor.dtype)) +
                              " is not the " + std::to_string(storage.logical_bytes) + " bytes of its storage");
  }
  if (tensor.row_begin != 0) return Status::corruption("begins at a row of a storage that is not merged");
  return {};
}

Status check_f12_tensor(const TensorEntry& tensor, const StorageEntry& storage) {
  const size_t rank = tensor.shape.size();
  const auto misfit = [&] {
    return Status::corruption("shape " + shape_to_string(tensor.shape) + " from row " + std::to_string(tensor.row_begin) +
                              " does not fit its storage of " + std::to_string(storage.batch) + " x [" + std::to_string(storage.n) +
                              ", " + std::to_string(storage.k) + "]");
  };
  if (tensor.dtype != DType::kBF16) return Status::corruption("f12 holds BF16 only");
  if (rank < 2 || tensor.shape[rank - 1] != storage.k) return misfit();
  if (storage.merged) {
    const bool inside = rank == 2 && tensor.row_begin <= storage.n && tensor.shape[0] <= storage.n - tensor.row_begin;
    return inside ? Status() : misfit();
  }
  const bool whole = tensor.shape[rank - 2] == storage.n && tensor.row_begin == 0 &&
                     element_count(std::span(tensor.shape).first(rank - 2)) == storage.batch;
  return whole ? Status() : misfit();
}

Status check_numbers(uint16_t encoding, uint16_t dtype) {
  if (encoding >= kEncodingCount) return Status::corruption("unknown encoding " + std::to_string(encoding));
  if (dtype >= kDTypeCount) return Status::corruption("unknown dtype " + std::to_string(dtype));
  return {};
}

StorageEntry get_storage(FieldDecoder& fields, wire::StorageEntry::Reader from, uint64_t arena_bytes) {
  StorageEntry to;
  to.name = fields.text(from.getName(), "storage.name", kMaxTableBytes);
  check_entry(fields, "storage", to.name, check_numbers(from.getEncoding(), from.getDtype()));
  if (!fields.ok()) return to;
  to.encoding = static_cast<Encoding>(from.getEncoding());
  to.dtype = static_cast<DType>(from.getDtype());
  to.merged = from.getMerged();
  to.n = from.getN();
  to.k = from.getK();
  to.batch = from.getBatch();
  to.logical_bytes = from.getLogicalBytes();
  to.data_offset = from.getDataOffset();
  to.windows_offset = from.getWindowsOffset();
  to.records_offset = from.getRecordsOffset();
  to.resident_bytes = from.getResidentBytes();
  to.data_bytes = from.getDataBytes();
  to.windows_bytes = from.getWindowsBytes();
  to.records_bytes = from.getRecordsBytes();
  check_entry(fields, "storage", to.name, check_storage(to, arena_bytes));
  return to;
}

Status check_tensor(const TensorEntry& tensor, const std::vector<StorageEntry>& storages) {
  if (tensor.storage >= storages.size()) {
    return Status::corruption("storage " + std::to_string(tensor.storage) + " of " + std::to_string(storages.size()));
  }
  const StorageEntry& storage = storages[tensor.storage];
  return storage.encoding == Encoding::kF12 ? check_f12_tensor(tensor, storage) : check_raw_tensor(tensor, storage);
}

TensorEntry get_tensor(FieldDecoder& fields, wire::TensorEntry::Reader from, const std::vector<StorageEntry>& storages) {
  TensorEntry to;
  to.name = fields.text(from.getName(), "tensor.name", kMaxTableBytes);
  check_entry(fields, "tensor", to.name, check_numbers(0, from.getDtype()));
  const auto shape = from.getShape();
  const uint32_t rank = fields.count(shape.size(), "tensor.shape", kMaxTensorRank);
  if (!fields.ok()) return to;
  to.dtype = static_cast<DType>(from.getDtype());
  to.shape.reserve(rank);
  for (uint32_t i = 0; i < rank; ++i) to.shape.push_back(shape[i]);
  to.storage = from.getStorage();
  to.row_begin = from.getRowBegin();
  check_entry(fields, "tensor", to.name, check_tensor(to, storages));
  return to;
}

Status check_frame(const TensorTable& table) {
  if (table.arena_bytes > kMaxArenaBytes || table.arena_bytes % kHashBlockBytes != 0) {
    return Status::corruption("arena: " + std::to_string(table.arena_bytes) +
                              " bytes: must be whole blocks of 1 MiB, at most 2^48");
  }
  return check_plane("pool", table.pool_offset_bytes, table.pool_bytes, table.arena_bytes);
}

void get_table(FieldDecoder& fields, wire::TensorTable::Reader from, TensorTable& to) {
  to.content_id = fields.text(from.getContentId(), "contentId", kMaxTextBytes);
  to.residency = fields.text(from.getResidency(), "residency", kMaxTextBytes);
  to.arena_bytes = from.getArenaBytes();
  to.pool_offset_bytes = from.getPoolOffsetBytes();
  to.pool_bytes = from.getPoolBytes();
  fields.fail(check_frame(to));
  const auto storages = from.getStorages();
  const uint32_t storage_count = fields.count(storages.size(), "storages", kMaxTableEntries);
  to.storages.reserve(storage_count);
  for (uint32_t i = 0; i < storage_count && fields.ok(); ++i)
    to.storages.push_back(get_storage(fields, storages[i], to.arena_bytes));
  const auto tensors = from.getTensors();
  const uint32_t tensor_count = fields.count(tensors.size(), "tensors", kMaxTableEntries);
  to.tensors.reserve(tensor_count);
  for (uint32_t i = 0; i < tensor_count && fields.ok(); ++i) to.tensors.push_back(get_tensor(fields, tensors[i], to.storages));
  const auto hashes = from.getBlockHashes();
  if (fields.ok() && hashes.size() != to.arena_bytes / kHashBlockBytes) {
    fields.fail(Status::corruption("blockHashes: " + std::to_string(hashes.size()) + " hashes for " +
                                   std::to_string(to.arena_bytes / kHashBlockBytes) + " blocks"));
  }
  const uint32_t hash_count = fields.ok() ? hashes.size() : 0;
  to.block_hashes.reserve(hash_count);
  for (uint32_t i = 0; i < hash_count; ++i) to.block_hashes.push_back(hashes[i]);
}

void put_storage(wire::StorageEntry::Builder to, const StorageEntry& from) {
  to.setName(text_reader(from.name));
  to.setEncoding(static_cast<uint16_t>(from.encoding));
  to.setDtype(static_cast<uint16_t>(from.dtype));
  to.setMerged(from.merged);
  to.setN(from.n);
  to.setK(from.k);
  to.setBatch(from.batch);
  to.setLogicalBytes(from.logical_bytes);
  to.setDataOffset(from.data_offset);
  to.setWindowsOffset(from.windows_offset);
  to.setRecordsOffset(from.records_offset);
  to.setResidentBytes(from.resident_bytes);
  to.setDataBytes(from.data_bytes);
  to.setWindowsBytes(from.windows_bytes);
  to.setRecordsBytes(from.records_bytes);
}

void put_tensor(wire::TensorEntry::Builder to, const TensorEntry& from) {
  to.setName(text_reader(from.name));
  to.setDtype(static_cast<uint16_t>(from.dtype));
  auto shape = to.initShape(static_cast<uint32_t>(from.shape.size()));
  for (uint32_t i = 0; i < from.shape.size(); ++i) shape.set(i, from.shape[i]);
  to.setStorage(from.storage);
  to.setRowBegin(from.row_begin);
}

}  // namespace

std::vector<std::byte> encode(const TensorTable& table) {
  const QuietKj quiet;
  capnp::MallocMessageBuilder message;
  auto to = message.initRoot<wire::TensorTable>();
  to.setContentId(text_reader(table.content_id));
  to.setResidency(text_reader(table.residency));
  to.setArenaBytes(table.arena_bytes);
  to.setPoolOffsetBytes(table.pool_offset_bytes);
  to.setPoolBytes(table.pool_bytes);
  auto storages = to.initStorages(static_cast<uint32_t>(table.storages.size()));
  for (uint32_t i = 0; i < table.storages.size(); ++i) put_storage(storages[i], table.storages[i]);
  auto tensors = to.initTensors(static_cast<uint32_t>(table.tensors.size()));
  for (uint32_t i = 0; i < table.tensors.size(); ++i) put_tensor(tensors[i], table.tensors[i]);
  auto hashes = to.initBlockHashes(static_cast<uint32_t>(table.block_hashes.size()));
  for (uint32_t i = 0; i < table.block_hashes.size(); ++i) hashes.set(i, table.block_hashes[i]);
  return flatten(message);
}

Result<TensorTable> decode_table(std::span<const std::byte> bytes) {
  if (bytes.size() > kMaxTableBytes) {
    return Status::corruption("tensor table: " + std::to_string(bytes.size()) + " bytes, at most " +
                              std::to_string(kMaxTableBytes) + " are allowed");
  }
  Result<TensorTable> result = TensorTable{};
  Status status = read_message(
      bytes, "tensor table", StatusCode::kCorruption,
      [&](capnp::MessageReader& reader, FieldDecoder& fields) { get_table(fields, reader.getRoot<wire::TensorTable>(), *result); });
  if (!status.ok()) result = std::move(status);
  return result;
}

}  // namespace weightd::ipc
