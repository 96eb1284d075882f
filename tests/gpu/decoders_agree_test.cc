// SPDX-License-Identifier: Apache-2.0
// Three decoders of one bundle: the device's, the store's, and the second implementation that was written from store/FORMAT.md
// alone.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>

#include "store/bundle.h"
#include "store/pack.h"
#include "tests/gpu/test_matrix.h"
#include "tests/reference/bundle.h"
#include "tests/support/safetensors_builder.h"

namespace weightd::kernels {
namespace {

using testing::DeviceMemory;
using testing::Words;

/// A model as it is resident: the arena of the bundle's "fast" form, on the device.
class Resident {
 public:
  explicit Resident(const store::BundleReader& bundle)
      : manifest_(bundle.manifest()), residency_(*bundle.residency("fast")), arena_(residency_.arena_bytes) {
    std::vector<std::byte> bytes(residency_.arena_bytes);
    for (const store::Placement& placement : residency_.placements) {
      for (const store::Plane& plane : manifest_.storages[placement.storage].planes) {
        if (plane.kind != placement.kind) continue;
        const Status status =
            bundle.read(plane.section, 0, std::span(bytes).subspan(placement.arena_offset_bytes, placement.size_bytes));
        EXPECT_TRUE(status.ok()) << status.to_string();
      }
    }
    arena_.upload(bytes);
  }

  /// Matrix `index` of the stack in a storage.
  [[nodiscard]] F12DeviceMatrix matrix(uint32_t storage, uint64_t index) const {
    const f12::Geometry& g = manifest_.storages[storage].geometry;
    return {plane(storage, store::PlaneKind::kCodes) + index * g.matrix_codes_bytes(),
            plane(storage, store::PlaneKind::kWindows) + index * g.matrix_windows_bytes(),
            plane(storage, store::PlaneKind::kRecords) + index * g.matrix_records_bytes(),
            arena_.data() + residency_.pool_offset_bytes,
            residency_.pool_bytes,
            g.n,
            g.k};
  }

 private:
  [[nodiscard]] const std::byte* plane(uint32_t storage, store::PlaneKind kind) const {
    for (const store::Placement& placement : residency_.placements) {
      if (placement.storage == storage && placement.kind == kind) return arena_.data() + placement.arena_offset_bytes;
    }
    ADD_FAILURE() << "storage " << storage << " lacks a plane";
    return nullptr;
  }
  const store::Manifest& manifest_;
  const store::Residency& residency_;
  DeviceMemory arena_;
};

/// The tensor's bytes by the device.
std::vector<unsigned char> decode(const Resident& model, const store::Manifest& manifest, const store::TensorRecord& tensor) {
  const f12::Geometry& g = manifest.storages[tensor.storage].geometry;
  std::vector<unsigned char> bytes(tensor.logical_bytes);
  const uint64_t rows = tensor.logical_bytes / (2 * g.k);  // of all matrices
  const uint64_t stack = rows > g.n ? rows / g.n : 1;
  const uint64_t rows_each = rows / stack;
  for (uint64_t i = 0; i < stack; ++i) {
    const DeviceMemory out(rows_each * g.k * 2);
    const Status status = launch_decompress(model.matrix(tensor.storage, i), tensor.row_begin, tensor.row_begin + rows_each,
                                            out.as<uint16_t>(), static_cast<int64_t>(g.k), nullptr);
    EXPECT_TRUE(status.ok()) << status.to_string();
    const std::vector<std::byte> part = out.download();
    std::memcpy(bytes.data() + i * part.size(), part.data(), part.size());
  }
  return bytes;
}

/// Weights that pay, with wild cells where `wild(row, column)` says so.
template <typename Wild>
Words weights(uint64_t n, uint64_t k, uint64_t seed, Wild&& wild) {
  Words words = testing::random_weights(n, k, 0, true, seed);
  std::mt19937_64 random(seed);
  for (uint64_t row = 0; row < n; ++row) {
    for (uint64_t c = 0; c < k; ++c) {
      if (wild(row, c, random)) words.words[row * k + c] = static_cast<uint16_t>(random());
    }
  }
  return words;
}

Words at_rate(uint64_t n, uint64_t k, double rate, uint64_t seed) {
  return weights(n, k, seed,
                 [&](uint64_t, uint64_t, std::mt19937_64& random) { return static_cast<double>(random() >> 11) * 0x1p-53 < rate; });
}

void add(testing::SafetensorsBuilder& builder, const std::string& name, const Shape& shape, const Words& words) {
  builder.add_bf16(name, shape, words.words);
}

TEST(Decoders, CO_034_CO_036_DeviceStoreAndReferenceAgreeOnEveryBit) {
  testing::SafetensorsBuilder builder;
  // Every pattern once, among ordinary weights: 200 in a group, which is a list.
  Words patterns = testing::random_weights(1290, 2100, 0, true, 1);
  for (uint64_t i = 0; i < 65536; ++i) patterns.words[i * 41] = static_cast<uint16_t>(i);
  add(builder, "patterns", {1290, 2100}, patterns);
  uint64_t seed = 2;
  for (const double rate : {0.0, 1e-4, 1e-3, 1e-2, 0.03}) {
    add(builder, "rate" + std::to_string(seed), {96, 1100}, at_rate(96, 1100, rate, seed));
    ++seed;
  }
  // One group in eight is nothing but random words, a few cells on its borders too.
  add(builder, "dense", {160, 2100}, weights(160, 2100, seed++, [](uint64_t row, uint64_t c, std::mt19937_64& random) {
        return (row / 16 + c / 512) % 8 == 0 || random() % 2000 == 0;
      }));
  for (const auto& [n, k] : {std::pair<uint64_t, uint64_t>{16, 1024}, {113, 1089}, {128, 513}, {99, 5000}, {200, 127}}) {
    add(builder, "shape" + std::to_string(seed), {n, k}, at_rate(n, k, 2e-3, seed));
    ++seed;
  }
  add(builder, "experts", {3, 47, 640}, at_rate(3 * 47, 640, 1e-3, seed++));
  for (const char* part : {"q", "k", "v"}) {
    add(builder, std::string("model.layers.0.self_attn.") + part + "_proj.weight", {64, 768}, at_rate(64, 768, 2e-3, seed++));
  }

  const testing::TempDir folder;
  builder.write(folder / "in/model.safetensors");
  store::PackOptions options;
  options.tool_version = "test";
  const auto packed = store::pack(folder / "in", folder / "out.wpk", options);
  ASSERT_TRUE(packed.ok()) << packed.status().to_string();
  EXPECT_GE(packed->merged_matrices, 1U);

  const reference::DecodedBundle reference = reference::decode_bundle(folder / "out.wpk");
  const auto bundle = store::BundleReader::open(folder / "out.wpk");
  ASSERT_TRUE(bundle.ok()) << bundle.status().to_string();
  const store::Manifest& manifest = bundle->manifest();
  uint64_t lists = 0, dense = 0;
  for (const store::Storage& storage : manifest.storages) {
    lists += storage.listed_groups;
    dense += storage.dense_groups;
  }
  EXPECT_GT(lists, 100U);
  EXPECT_GT(dense, 5U);
  for (const store::TensorRecord& tensor : manifest.tensors) {
    ASSERT_EQ(manifest.storages[tensor.storage].encoding, Encoding::kF12) << tensor.name;
    std::vector<std::byte> host(tensor.logical_bytes);
    const Status status = bundle->decode_tensor(tensor, host, 0);
    ASSERT_TRUE(status.ok()) << status.to_string();
    const std::vector<unsigned char>& want = reference.tensors.at(tensor.name).bytes;
    ASSERT_EQ(want.size(), host.size());
    EXPECT_EQ(std::memcmp(want.data(), host.data(), host.size()), 0) << tensor.name << ": store and reference";
  }
  EXPECT_EQ(manifest.tensors.size(), 16U);
  const Resident model(*bundle);
  for (const store::TensorRecord& tensor : manifest.tensors) {
    EXPECT_TRUE(decode(model, manifest, tensor) == reference.tensors.at(tensor.name).bytes)
        << tensor.name << ": device and reference";
  }
}

}  // namespace
}  // namespace weightd::kernels
