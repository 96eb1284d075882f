// SPDX-License-Identifier: Apache-2.0
#include "tests/reference/safetensors.h"

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace weightd::reference {
namespace {

void read_file(const std::filesystem::path& path, std::map<std::string, SourceTensor>& tensors) {
  std::ifstream file(path, std::ios::binary);
  unsigned char length[8];
  if (!file.read(reinterpret_cast<char*>(length), 8)) throw std::runtime_error(path.string() + ": cannot read");
  uint64_t header_bytes = 0;
  for (int i = 7; i >= 0; --i) header_bytes = header_bytes << 8 | length[i];
  std::string json(header_bytes, '\0');
  if (!file.read(json.data(), static_cast<std::streamsize>(header_bytes))) throw std::runtime_error(path.string() + ": short header");
  const nlohmann::json header = nlohmann::json::parse(json);
  for (const auto& item : header.items()) {
    if (item.key() == "__metadata__") continue;
    SourceTensor tensor;
    tensor.dtype = item.value().at("dtype").get<std::string>();
    tensor.shape = item.value().at("shape").get<std::vector<uint64_t>>();
    const auto begin = item.value().at("data_offsets").at(0).get<uint64_t>();
    const auto end = item.value().at("data_offsets").at(1).get<uint64_t>();
    tensor.bytes.resize(end - begin);
    file.seekg(static_cast<std::streamoff>(8 + header_bytes + begin));
    if (!file.read(reinterpret_cast<char*>(tensor.bytes.data()), static_cast<std::streamsize>(end - begin))) {
      throw std::runtime_error(path.string() + ": short data of " + item.key());
    }
    tensors[item.key()] = std::move(tensor);
  }
}

}  // namespace

std::map<std::string, SourceTensor> read_checkpoint(const std::string& path) {
  std::map<std::string, SourceTensor> tensors;
  if (!std::filesystem::is_directory(path)) {
    read_file(path, tensors);
    return tensors;
  }
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    if (entry.path().extension() == ".safetensors") read_file(entry.path(), tensors);
  }
  return tensors;
}

}  // namespace weightd::reference
