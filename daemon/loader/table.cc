// SPDX-License-Identifier: Apache-2.0
#include "daemon/loader/table.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace weightd::loader {
namespace {

constexpr uint32_t kLeftOut = std::numeric_limits<uint32_t>::max();

void place(ipc::StorageEntry& entry, const store::Placement& placement) {
  switch (placement.kind) {
    case store::PlaneKind::kRaw:
    case store::PlaneKind::kCodes:
      entry.data_offset = placement.arena_offset_bytes;
      entry.data_bytes = placement.size_bytes;
      break;
    case store::PlaneKind::kWindows:
      entry.windows_offset = placement.arena_offset_bytes;
      entry.windows_bytes = placement.size_bytes;
      break;
    case store::PlaneKind::kRecords:
      entry.records_offset = placement.arena_offset_bytes;
      entry.records_bytes = placement.size_bytes;
      break;
    case store::PlaneKind::kPool:
      break;  // the pool is the model's
  }
  entry.resident_bytes += placement.size_bytes;
}

ipc::StorageEntry make_entry(const store::Storage& storage) {
  ipc::StorageEntry entry;
  entry.name = storage.name;
  entry.encoding = storage.encoding;
  entry.dtype = storage.dtype;
  entry.merged = storage.merged;
  if (storage.encoding == Encoding::kF12) {
    entry.n = storage.geometry.n;
    entry.k = storage.geometry.k;
    entry.batch = storage.geometry.batch;
  }
  entry.logical_bytes = storage.logical_bytes;
  return entry;
}

bool touches(uint64_t offset, uint64_t size, const std::vector<uint64_t>& blocks) {
  if (size == 0) return false;
  const auto first = std::lower_bound(blocks.begin(), blocks.end(), offset / store::kBlockBytes);
  return first != blocks.end() && *first <= (offset + size - 1) / store::kBlockBytes;
}

}  // namespace

ipc::TensorTable make_table(const store::BundleReader& bundle, const store::Residency& residency) {
  const store::Manifest& manifest = bundle.manifest();
  ipc::TensorTable table;
  table.content_id = store::to_hex(bundle.content_id());
  table.residency = residency.form;
  table.arena_bytes = residency.arena_bytes;
  table.pool_offset_bytes = residency.pool_offset_bytes;
  table.pool_bytes = residency.pool_bytes;
  table.block_hashes = residency.block_hashes;
  std::vector<uint32_t> index_of(manifest.storages.size(), kLeftOut);
  for (size_t i = 0; i < manifest.storages.size(); ++i) {
    if (!manifest.storages[i].resident) continue;
    index_of[i] = static_cast<uint32_t>(table.storages.size());
    table.storages.push_back(make_entry(manifest.storages[i]));
  }
  for (const store::Placement& placement : residency.placements) place(table.storages[index_of[placement.storage]], placement);
  for (const store::TensorRecord& tensor : manifest.tensors) {
    if (!tensor.indexed) continue;
    table.tensors.push_back({tensor.name, tensor.dtype, tensor.shape, index_of[tensor.storage], tensor.row_begin});
  }
  return table;
}

std::vector<std::string> names_in_blocks(const ipc::TensorTable& table, const std::vector<uint64_t>& blocks, size_t limit) {
  std::vector<std::string> names;
  for (const ipc::StorageEntry& entry : table.storages) {
    if (names.size() == limit) break;
    if (touches(entry.data_offset, entry.data_bytes, blocks) || touches(entry.windows_offset, entry.windows_bytes, blocks) ||
        touches(entry.records_offset, entry.records_bytes, blocks)) {
      names.push_back(entry.name);
    }
  }
  if (names.size() < limit && touches(table.pool_offset_bytes, table.pool_bytes, blocks)) names.emplace_back("(pool of escapes)");
  return names;
}

}  // namespace weightd::loader
