// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "weightd/types.h"

/// Makes safetensors files and checkpoints for tests, right or wrong on purpose. Shares no code with the reader.
/// All functions abort on a failed write: a test cannot go on without its input.
namespace weightd::testing {

inline void require(bool condition, const std::string& what) {
  if (condition) return;
  std::fprintf(stderr, "test support: %s\n", what.c_str());
  std::abort();
}

/// A fresh folder, removed with all it holds at the end.
class TempDir {
 public:
  TempDir() {
    std::string name = (std::filesystem::temp_directory_path() / "weightd_test_XXXXXX").string();
    require(::mkdtemp(name.data()) != nullptr, "mkdtemp " + name);
    path_ = name;
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  [[nodiscard]] const std::string& path() const { return path_; }
  /// The path of `name` inside the folder.
  [[nodiscard]] std::string operator/(std::string_view name) const { return path_ + "/" + std::string(name); }

 private:
  std::string path_;
};

/// Creates or replaces a file; missing folders of `path` are created.
inline void write_file(const std::string& path, std::string_view bytes) {
  std::error_code ignored;
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), ignored);
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  out.close();
  require(out.good(), "write " + path);
}

inline std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  require(in.good(), "read " + path);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

inline std::string little_endian_u64(uint64_t value) {
  std::string bytes(8, '\0');
  for (size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(value >> (8 * i) & 0xFFU);
  return bytes;
}

/// ST(J, D): 8 little-endian length bytes, the JSON, the data.
inline std::string st(std::string_view json, std::string_view data) {
  std::string file = little_endian_u64(json.size());
  file += json;
  file += data;
  return file;
}

/// The little-endian bytes of 16-bit words.
inline std::string words_to_bytes(std::span<const uint16_t> words) {
  std::string bytes;
  bytes.reserve(2 * words.size());
  for (const uint16_t word : words) {
    bytes += static_cast<char>(word & 0xFFU);
    bytes += static_cast<char>(word >> 8);
  }
  return bytes;
}
/// `count` equal words.
inline std::string repeat_word(uint16_t word, size_t count) { return words_to_bytes(std::vector<uint16_t>(count, word)); }

inline std::span<const std::byte> as_bytes(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

/// A JSON string literal with quotes; bytes from 0x20 on other than '"' and '\' are copied as they are.
inline std::string json_quote(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      std::array<char, 8> escape{};
      std::snprintf(escape.data(), escape.size(), "\\u%04x", static_cast<unsigned>(c));
      out += escape.data();
    } else {
      out += c;
    }
  }
  return out + "\"";
}

/// One safetensors file, built in memory. Tensors lie in the data area in the order of add(), without padding.
class SafetensorsBuilder {
 public:
  /// `data` has the size that dtype and shape ask for (not checked: tests also want wrong files).
  SafetensorsBuilder& add(std::string_view name, std::string_view dtype, const Shape& shape, std::string_view data) {
    const uint64_t begin = data_.size();
    data_ += data;
    return entry(name, dtype, shape, begin, data_.size());
  }
  SafetensorsBuilder& add_bf16(std::string_view name, const Shape& shape, std::span<const uint16_t> words) {
    return add(name, "BF16", shape, words_to_bytes(words));
  }
  /// A header entry alone, with any offsets; its data come from raw_data() or other entries.
  SafetensorsBuilder& entry(std::string_view name, std::string_view dtype, const Shape& shape, uint64_t begin, uint64_t end) {
    std::string dims;
    for (const uint64_t dim : shape) dims += (dims.empty() ? "" : ",") + std::to_string(dim);
    entries_.push_back(json_quote(name) + ":{\"dtype\":" + json_quote(dtype) + ",\"shape\":[" + dims + "],\"data_offsets\":[" +
                       std::to_string(begin) + "," + std::to_string(end) + "]}");
    return *this;
  }
  SafetensorsBuilder& raw_data(std::string_view data) {
    data_ += data;
    return *this;
  }
  /// The value of "__metadata__", which then comes first.
  SafetensorsBuilder& metadata(const std::map<std::string, std::string>& values) {
    std::string body;
    for (const auto& [key, value] : values) body += (body.empty() ? "" : ",") + json_quote(key) + ":" + json_quote(value);
    metadata_ = "\"__metadata__\":{" + body + "}";
    return *this;
  }
  /// Blanks after the closing brace, as exporters write them for alignment.
  SafetensorsBuilder& padding(size_t blanks) {
    padding_ = blanks;
    return *this;
  }

  [[nodiscard]] std::string json() const {
    std::string out = "{" + metadata_;
    for (const std::string& entry : entries_) out += (out.size() == 1 ? "" : ",") + entry;
    return out + "}" + std::string(padding_, ' ');
  }
  [[nodiscard]] const std::string& data() const { return data_; }
  [[nodiscard]] std::string bytes() const { return st(json(), data_); }
  void write(const std::string& path) const { write_file(path, bytes()); }

 private:
  std::string metadata_;
  std::vector<std::string> entries_;
  std::string data_;
  size_t padding_ = 0;
};

/// The text of an index file: tensor name -> shard name, in the given order.
inline std::string index_json(const std::vector<std::pair<std::string, std::string>>& weight_map) {
  std::string out = "{\"metadata\": {\"total_size\": 0}, \"weight_map\": {";
  for (size_t i = 0; i < weight_map.size(); ++i) {
    out += (i == 0 ? "\n  " : ",\n  ") + json_quote(weight_map[i].first) + ": " + json_quote(weight_map[i].second);
  }
  return out + "\n}}\n";
}

/// Writes shards (name -> file) and "model.safetensors.index.json" into `folder`.
inline void write_sharded(const std::string& folder, const std::vector<std::pair<std::string, SafetensorsBuilder>>& shards,
                          const std::vector<std::pair<std::string, std::string>>& weight_map) {
  for (const auto& [name, shard] : shards) shard.write(folder + "/" + name);
  write_file(folder + "/model.safetensors.index.json", index_json(weight_map));
}

}  // namespace weightd::testing
