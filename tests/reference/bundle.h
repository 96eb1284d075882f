// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tests/reference/safetensors.h"

namespace weightd::reference {

/// What a bundle holds, decoded by a second implementation that was written from store/FORMAT.md alone and shares nothing with store/:
/// plain scalar code, a Cap'n Proto reader of its own, every rule checked that it relies on, every checksum recomputed.
struct DecodedBundle {
  std::map<std::string, SourceTensor> tensors;                // the indexed ones
  std::map<std::string, std::vector<unsigned char>> files;    // restored sources by name, header and index included
  std::string content_id;                                     // hexadecimal
  uint64_t arena_bytes = 0;
};

/// Throws std::runtime_error that names the rule. Reads the whole file into memory; for small bundles.
[[nodiscard]] DecodedBundle decode_bundle(const std::string& path);

}  // namespace weightd::reference
