// SPDX-License-Identifier: Apache-2.0
#include "tests/client/test_model.h"

#include <fcntl.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>

#include "ipc/memfd.h"
#include "store/f12.h"
#include "store/tile_layout.h"

namespace weightd::test {
namespace {

constexpr uint64_t kPage = 4096;

uint16_t bf16(float value) { return static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16); }

}  // namespace

std::vector<uint16_t> random_weights(uint64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0.0F, 0.02F);
  std::vector<uint16_t> words(count);
  for (uint16_t& word : words) {
    word = bf16(normal(random));
    if (random() % 1000 == 0) word = bf16(normal(random) * 1e6F);
  }
  return words;
}

std::vector<uint16_t> random_activations(uint64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0.0F, 1.0F);
  std::vector<uint16_t> words(count);
  for (uint16_t& word : words) word = bf16(normal(random));
  return words;
}

std::vector<std::byte> bytes_of(const std::vector<uint16_t>& words) {
  std::vector<std::byte> bytes(words.size() * sizeof(uint16_t));
  if (!words.empty()) std::memcpy(bytes.data(), words.data(), bytes.size());
  return bytes;
}

void SealedModel::seal_table() {
  const std::vector<std::byte> bytes = ipc::encode(table);
  table_bytes = bytes.size();
  table_fd = ipc::sealed_memfd(bytes, "test-table").value();
}

std::vector<UniqueFd> SealedModel::copies_of_fds() const {
  std::vector<UniqueFd> fds;
  fds.emplace_back(::fcntl(table_fd.get(), F_DUPFD_CLOEXEC, 0));
  for (const UniqueFd& chunk : chunks) fds.emplace_back(::fcntl(chunk.get(), F_DUPFD_CLOEXEC, 0));
  return fds;
}

uint64_t ModelBuilder::place(const std::vector<std::byte>& plane) {
  arena_.resize(f12::align_up(arena_.size(), f12::kPlaneAlign));
  const uint64_t offset = arena_.size();
  arena_.insert(arena_.end(), plane.begin(), plane.end());
  return offset;
}

void ModelBuilder::add_raw(const std::string& name, DType dtype, const Shape& shape, const std::vector<std::byte>& bytes) {
  ipc::StorageEntry storage;
  storage.name = name;
  storage.encoding = Encoding::kRaw;
  storage.dtype = dtype;
  storage.logical_bytes = storage.data_bytes = storage.resident_bytes = bytes.size();
  storage.data_offset = place(bytes);
  table_.tensors.push_back({name, dtype, shape, static_cast<uint32_t>(table_.storages.size()), 0});
  table_.storages.push_back(std::move(storage));
}

uint32_t ModelBuilder::add_f12_storage(const std::string& name, uint64_t batch, uint64_t n, uint64_t k, bool merged,
                                       const std::vector<uint16_t>& words) {
  const f12::Geometry geometry{n, k, batch};
  std::vector<std::byte> codes(geometry.codes_bytes()), windows(geometry.windows_bytes()), records(geometry.records_bytes());
  const std::vector<std::byte> bytes = bytes_of(words);
  const size_t pool_before = pool_.size();
  for (uint64_t i = 0; i < batch; ++i) {
    std::vector<std::byte> lists;
    const auto part = [&](std::vector<std::byte>& plane, uint64_t size) { return std::span(plane).subspan(i * size, size); };
    const Status status =
        store::f12_encode(std::span(bytes).subspan(i * n * k * 2, n * k * 2), geometry, 0, geometry.units(),
                          part(codes, geometry.matrix_codes_bytes()), part(windows, geometry.matrix_windows_bytes()),
                          part(records, geometry.matrix_records_bytes()), lists, pool_.size(), 1);
    WEIGHTD_CHECK(status.ok());
    pool_.insert(pool_.end(), lists.begin(), lists.end());
  }
  ipc::StorageEntry storage;
  storage.name = name;
  storage.encoding = Encoding::kF12;
  storage.dtype = DType::kBF16;
  storage.merged = merged;
  storage.n = n;
  storage.k = k;
  storage.batch = batch;
  storage.logical_bytes = geometry.raw_bytes();
  storage.data_bytes = codes.size();
  storage.windows_bytes = windows.size();
  storage.records_bytes = records.size();
  storage.data_offset = place(codes);
  storage.windows_offset = place(windows);
  storage.records_offset = place(records);
  storage.resident_bytes = codes.size() + windows.size() + records.size() + pool_.size() - pool_before;
  table_.storages.push_back(std::move(storage));
  return static_cast<uint32_t>(table_.storages.size() - 1);
}

void ModelBuilder::add_f12(const std::string& name, const Shape& shape, const std::vector<uint16_t>& words) {
  const uint64_t batch = shape.size() == 3 ? shape[0] : 1;
  const uint32_t storage = add_f12_storage(name, batch, shape[shape.size() - 2], shape.back(), false, words);
  table_.tensors.push_back({name, DType::kBF16, shape, storage, 0});
}

void ModelBuilder::add_merged(const std::string& name, const std::vector<Part>& parts, uint64_t k,
                              const std::vector<uint16_t>& words) {
  const uint32_t storage = add_f12_storage(name, 1, words.size() / k, k, true, words);
  uint64_t row = 0;
  for (const Part& part : parts) {
    table_.tensors.push_back({part.name, DType::kBF16, {part.rows, k}, storage, row});
    row += part.rows;
  }
}

SealedModel ModelBuilder::seal(const std::string& name, uint64_t generation, uint64_t chunk_bytes) {
  SealedModel model;
  model.table = table_;
  model.table.content_id = "content-of-" + name + "-" + std::to_string(arena_.size());
  model.table.residency = "fast";
  model.table.pool_offset_bytes = place(pool_);
  model.table.pool_bytes = pool_.size();
  arena_.resize(f12::align_up(arena_.size(), ipc::kHashBlockBytes));
  model.table.arena_bytes = arena_.size();
  model.table.block_hashes.assign(arena_.size() / ipc::kHashBlockBytes, 0);
  model.chunk_bytes =
      ipc::cut_chunks(arena_.size(), std::min<uint64_t>(chunk_bytes, f12::align_up(arena_.size() + 1, kPage)), kPage);
  ipc::WritableArena arena = ipc::WritableArena::create(model.chunk_bytes, "test-" + name).value();
  if (!arena_.empty()) std::memcpy(arena.bytes().data(), arena_.data(), arena_.size());
  model.chunks = std::move(arena).seal().value();
  model.seal_table();

  model.summary.name = name;
  model.summary.generation = generation;
  model.summary.state = ipc::GenerationState::kPublished;
  model.summary.content_id = model.table.content_id;
  model.summary.device = "host";
  model.summary.transport = "fd";
  model.summary.residency = "fast";
  for (const ipc::StorageEntry& storage : table_.storages) model.summary.logical_bytes += storage.logical_bytes;
  for (const uint64_t bytes : model.chunk_bytes) model.summary.resident_bytes += bytes;
  model.summary.tensor_count = table_.tensors.size();
  return model;
}

}  // namespace weightd::test
