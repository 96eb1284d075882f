// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "store/bundle.h"
#include "store/pack.h"
#include "tests/support/safetensors_builder.h"
#include "tools/pack/synth_weights.h"

/// What the tests of packer, unpacker and verifier share.
namespace weightd::testing {

#define WEIGHTD_ASSERT_OK(expression)                                                           \
  do {                                                                                          \
    const ::weightd::Status weightd_assert_status_ = ::weightd::testing::status_of(expression); \
    ASSERT_TRUE(weightd_assert_status_.ok()) << weightd_assert_status_.to_string();             \
  } while (false)
#define WEIGHTD_EXPECT_OK(expression)                                                           \
  do {                                                                                          \
    const ::weightd::Status weightd_assert_status_ = ::weightd::testing::status_of(expression); \
    EXPECT_TRUE(weightd_assert_status_.ok()) << weightd_assert_status_.to_string();             \
  } while (false)

inline const Status& status_of(const Status& status) { return status; }
template <typename T>
Status status_of(const Result<T>& result) {
  return result.status();
}

/// A small, fixed generator: the same words on every machine.
class Words {
 public:
  explicit Words(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15U);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
    return z ^ (z >> 31);
  }
  std::vector<uint16_t> random(size_t count) {
    std::vector<uint16_t> words(count);
    for (uint16_t& word : words) word = static_cast<uint16_t>(next());
    return words;
  }
  std::string bytes(size_t count) {
    std::string out(count, '\0');
    for (char& c : out) c = static_cast<char>(next());
    return out;
  }

 private:
  uint64_t state_;
};

/// Words as trained weights have them: they code well.
inline std::vector<uint16_t> trained(uint64_t rows, uint64_t k, uint64_t seed) {
  std::vector<uint16_t> words(rows * k);
  tools::synth_bf16(words, k, 0, seed, {}, 1);
  return words;
}

inline store::PackOptions pack_options(int threads = 2) {
  store::PackOptions options;
  options.threads = threads;
  options.tool_version = "1.2.3";
  return options;
}

/// Relative names of all files below a folder, sorted.
inline std::vector<std::string> files_below(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file() || entry.is_symlink()) names.push_back(std::filesystem::relative(entry.path(), folder).string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

/// Packs `checkpoint`, verifies the bundle in every way, unpacks it and compares each file of `sources` (relative to `folder`) byte
/// for byte. `bundle` is left for further looks; `unpacked` is a folder that does not exist yet.
inline void expect_round_trip(const std::string& checkpoint, const std::string& folder, const std::vector<std::string>& sources,
                              const std::string& bundle, const std::string& unpacked,
                              const store::PackOptions& options = pack_options()) {
  const Result<store::PackReport> report = store::pack(checkpoint, bundle, options);
  WEIGHTD_ASSERT_OK(report);
  const auto opened = store::BundleReader::open(bundle);
  WEIGHTD_ASSERT_OK(opened);
  EXPECT_EQ(opened->content_id(), report->content_id);
  EXPECT_EQ(opened->file_bytes(), report->bundle_bytes);
  EXPECT_EQ(std::filesystem::file_size(bundle), report->bundle_bytes);
  WEIGHTD_EXPECT_OK(store::verify(bundle, "", false, 2, {}));
  WEIGHTD_EXPECT_OK(store::verify(bundle, checkpoint, true, 1, {}));
  const Result<store::UnpackReport> restored = store::unpack(bundle, unpacked, 2, {});
  WEIGHTD_ASSERT_OK(restored);
  EXPECT_EQ(restored->files, sources.size());
  std::vector<std::string> expected = sources;
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(files_below(unpacked), expected);
  for (const std::string& name : sources) {
    EXPECT_TRUE(read_file(folder + "/" + name) == read_file(unpacked + "/" + name)) << name << " differs";
  }
}

/// The same for one file.
inline void expect_round_trip(const TempDir& dir, const SafetensorsBuilder& file,
                              const store::PackOptions& options = pack_options()) {
  std::filesystem::create_directory(dir / "in");
  file.write(dir / "in/model.safetensors");
  expect_round_trip(dir / "in/model.safetensors", dir / "in", {"model.safetensors"}, dir / "model.wpk", dir / "out", options);
}

inline const store::TensorRecord& tensor_of(const store::BundleReader& bundle, std::string_view name) {
  for (const store::TensorRecord& tensor : bundle.manifest().tensors) {
    if (tensor.name == name && tensor.indexed) return tensor;
  }
  require(false, "no tensor " + std::string(name));
  std::abort();
}

inline const store::Storage& storage_of(const store::BundleReader& bundle, std::string_view name) {
  return bundle.manifest().storages[tensor_of(bundle, name).storage];
}

inline std::string decode(const store::BundleReader& bundle, std::string_view name) {
  const store::TensorRecord& tensor = tensor_of(bundle, name);
  std::string out(tensor.logical_bytes, '\0');
  const Status status = bundle.decode_tensor(tensor, {reinterpret_cast<std::byte*>(out.data()), out.size()}, 2);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return out;
}

inline store::BundleReader open_bundle(const std::string& path) {
  auto opened = store::BundleReader::open(path);
  require(opened.ok(), "open " + path + ": " + opened.status().to_string());
  return std::move(*opened);
}

}  // namespace weightd::testing
