// SPDX-License-Identifier: Apache-2.0
// Tensor tables: what decodes may be used to form pointers, and encodes to bytes that decode to the same.
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "ipc/messages.h"
#include "weightd/status.h"

namespace {

using weightd::ipc::StorageEntry;
using weightd::ipc::TensorTable;

void check_inside(uint64_t offset, uint64_t bytes, uint64_t arena_bytes) {
  WEIGHTD_CHECK(offset <= arena_bytes && bytes <= arena_bytes - offset);
  WEIGHTD_CHECK(bytes == 0 || offset % 256 == 0);
}

void check_pointers(const TensorTable& table) {
  check_inside(table.pool_offset_bytes, table.pool_bytes, table.arena_bytes);
  WEIGHTD_CHECK(table.block_hashes.size() * weightd::ipc::kHashBlockBytes == table.arena_bytes);
  for (const StorageEntry& storage : table.storages) {
    check_inside(storage.data_offset, storage.data_bytes, table.arena_bytes);
    check_inside(storage.windows_offset, storage.windows_bytes, table.arena_bytes);
    check_inside(storage.records_offset, storage.records_bytes, table.arena_bytes);
  }
  for (const weightd::ipc::TensorEntry& tensor : table.tensors) {
    WEIGHTD_CHECK(tensor.storage < table.storages.size());
    const StorageEntry& storage = table.storages[tensor.storage];
    if (storage.merged) WEIGHTD_CHECK(tensor.row_begin <= storage.n && tensor.shape.at(0) <= storage.n - tensor.row_begin);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto first = weightd::ipc::decode_table(std::as_bytes(std::span(data, size)));
  if (!first.ok()) return 0;
  check_pointers(*first);
  const std::vector<std::byte> bytes = weightd::ipc::encode(*first);
  const auto second = weightd::ipc::decode_table(bytes);
  WEIGHTD_CHECK(second.ok());
  WEIGHTD_CHECK(weightd::ipc::encode(*second) == bytes);
  return 0;
}
