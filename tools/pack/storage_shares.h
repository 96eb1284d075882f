// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "store/bundle.h"

namespace weightd::tools {

/// What one tensor takes of its storage. Tensors with the same rows of the same storage are one: the first in checkpoint order
/// takes the bytes, the others take none and point at it. Parts of a merged matrix take bytes in proportion to their rows, each
/// part rounded so that the running sum is rounded down; the last part takes the rest. So the sums over all tensors equal the sums
/// over all storages.
struct StorageShare {
  uint64_t stored_bytes = 0;    // in the file, without alignment
  uint64_t resident_bytes = 0;  // in the arena of form "fast", without alignment; 0 when not resident
  uint32_t owner = 0;           // index of the tensor that takes the bytes: itself, or the first equal one
  uint64_t rows = 0;            // rows of the storage that the tensor covers; 0 unless it is a part of a merged matrix
};

/// One per tensor of the manifest, in its order.
[[nodiscard]] std::vector<StorageShare> storage_shares(const store::Manifest& manifest);

[[nodiscard]] uint64_t stored_bytes(const store::Manifest& manifest, const store::Storage& storage);

}  // namespace weightd::tools
