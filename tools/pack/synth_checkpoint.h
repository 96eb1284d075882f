// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "tools/pack/architectures.h"
#include "tools/pack/synth_weights.h"
#include "weightd/status.h"

namespace weightd::tools {

struct SynthOptions {
  Architecture architecture;
  uint64_t seed = 0;
  uint64_t shard_bytes = 5'000'000'000;  // most tensor bytes of one file, unless a single tensor is larger
  WeightModel weights;
  int threads = 0;                                                          // <= 0: one per core
  std::function<bool(uint64_t done_bytes, uint64_t total_bytes)> progress;  // false cancels; may be empty
};

struct SynthReport {
  uint64_t files = 0;  // safetensors files
  uint64_t tensors = 0;
  uint64_t bytes = 0;  // of tensors
};

/// Writes a checkpoint of synthetic BF16 weights to `folder` (made when missing, must be empty): config.json, safetensors files
/// and, when there are several, their index, laid out and named as published checkpoints are. Equal options give equal bytes,
/// whatever the thread count. Each tensor's values depend only on the seed, its name and its width. Peak memory: one slab of 32 MiB
/// or one row. Nothing is left behind on failure. kAlreadyExists: the folder holds something. kResourceExhausted: not enough room,
/// with the arithmetic, before anything is written. kCancelled.
[[nodiscard]] Result<SynthReport> synth_checkpoint(const std::string& folder, const SynthOptions& options);

}  // namespace weightd::tools
