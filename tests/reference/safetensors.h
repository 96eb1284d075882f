// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace weightd::reference {

/// A tensor of a checkpoint, read the plain way: enough for checks over trusted test input, independent of store/.
struct SourceTensor {
  std::string dtype;
  std::vector<uint64_t> shape;
  std::vector<unsigned char> bytes;
};

/// Every tensor of one safetensors file, or of every *.safetensors file of a folder. Throws std::runtime_error.
[[nodiscard]] std::map<std::string, SourceTensor> read_checkpoint(const std::string& path);

}  // namespace weightd::reference
