// SPDX-License-Identifier: Apache-2.0
#include "tools/pack/storage_shares.h"

#include <algorithm>

namespace weightd::tools {
namespace {

/// Rows of the storage that `tensor` covers; 1 for tensors that are a storage of their own, so that they take all of it.
uint64_t covered_rows(const store::Storage& storage, const store::TensorRecord& tensor) {
  if (!storage.merged || tensor.shape.empty()) return 1;
  return tensor.shape.front();
}

uint64_t scaled(uint64_t bytes, uint64_t rows, uint64_t total_rows) {
  if (total_rows == 0) return 0;
  __extension__ using Wide = unsigned __int128;
  return static_cast<uint64_t>(static_cast<Wide>(bytes) * rows / total_rows);
}

std::vector<uint64_t> resident_bytes(const store::Manifest& manifest) {
  std::vector<uint64_t> bytes(manifest.storages.size());
  for (const store::Residency& residency : manifest.residencies) {
    if (residency.form != "fast") continue;
    for (const store::Placement& placement : residency.placements) bytes[placement.storage] += placement.size_bytes;
  }
  return bytes;
}

/// Gives each tensor of one storage its share. `tensors`: their indexes in the manifest, ascending.
void share_storage(const store::Manifest& manifest, std::vector<uint32_t> tensors, uint64_t stored, uint64_t resident,
                   std::vector<StorageShare>& shares) {
  const auto& records = manifest.tensors;
  std::stable_sort(tensors.begin(), tensors.end(),
                   [&](uint32_t a, uint32_t b) { return records[a].row_begin < records[b].row_begin; });
  std::vector<uint32_t> owners;
  for (const uint32_t tensor : tensors) {
    const bool first = owners.empty() || records[owners.back()].row_begin != records[tensor].row_begin;
    if (first) owners.push_back(tensor);
    shares[tensor].owner = owners.back();
  }
  const store::Storage& storage = manifest.storages[records[tensors.front()].storage];
  uint64_t total_rows = 0;
  for (const uint32_t owner : owners) total_rows += covered_rows(storage, records[owner]);
  uint64_t rows_before = 0;
  StorageShare taken;
  for (const uint32_t owner : owners) {
    const uint64_t rows = covered_rows(storage, records[owner]);
    const uint64_t rows_after = rows_before + rows;
    const bool last = owner == owners.back();
    shares[owner].stored_bytes = (last ? stored : scaled(stored, rows_after, total_rows)) - taken.stored_bytes;
    shares[owner].resident_bytes = (last ? resident : scaled(resident, rows_after, total_rows)) - taken.resident_bytes;
    taken.stored_bytes += shares[owner].stored_bytes;
    taken.resident_bytes += shares[owner].resident_bytes;
    rows_before = rows_after;
  }
  if (!storage.merged) return;
  for (const uint32_t tensor : tensors) shares[tensor].rows = covered_rows(storage, records[tensor]);
}

}  // namespace

uint64_t stored_bytes(const store::Manifest& manifest, const store::Storage& storage) {
  uint64_t bytes = 0;
  for (const store::Plane& plane : storage.planes) bytes += manifest.sections[plane.section].size_bytes;
  return bytes;
}

std::vector<StorageShare> storage_shares(const store::Manifest& manifest) {
  std::vector<std::vector<uint32_t>> tensors_of(manifest.storages.size());
  for (uint32_t i = 0; i < manifest.tensors.size(); ++i) tensors_of[manifest.tensors[i].storage].push_back(i);
  const std::vector<uint64_t> resident = resident_bytes(manifest);
  std::vector<StorageShare> shares(manifest.tensors.size());
  for (uint32_t i = 0; i < manifest.storages.size(); ++i) {
    if (tensors_of[i].empty()) continue;
    share_storage(manifest, tensors_of[i], stored_bytes(manifest, manifest.storages[i]), resident[i], shares);
  }
  return shares;
}

}  // namespace weightd::tools
