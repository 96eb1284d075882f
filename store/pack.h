// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "store/bundle.h"
#include "store/checkpoint.h"
#include "weightd/status.h"

/// The way from checkpoint to bundle and back (design: checkpoint -> bundle -> resident chunks).
namespace weightd::store {

/// Called now and then from the calling thread: bytes of source done, and of how many. False cancels: the operation ends with
/// kCancelled at its next step and leaves nothing behind. May be empty.
using Progress = std::function<bool(uint64_t done_bytes, uint64_t total_bytes)>;

struct PackOptions {
  Encoding encoding = Encoding::kF12;  // kRaw: nothing is coded
  bool merge = true;                   // q/k/v and gate/up become one matrix, by the table in merge_rules.h
  int threads = 0;                     // <= 0: one per core
  CheckpointOptions checkpoint;
  std::string tool_version;
  Progress progress;
};

struct PackReport {
  Sha256 content_id{};
  uint64_t source_bytes = 0, bundle_bytes = 0;
  uint64_t coded_logical_bytes = 0, coded_stored_bytes = 0;
  uint64_t coded_tensors = 0, raw_tensors = 0, deduplicated_tensors = 0, merged_matrices = 0;
  std::vector<std::string> warnings;  // for people, one line each
};

/// Packs `checkpoint_path` into `bundle_path`: encodes what pays (all planes under 95 % of raw), writes, reads back, decodes,
/// compares bit for bit with the source, plans the residency and hashes its blocks, then renames. Nothing is left under the final
/// name on failure. Peak memory: a few slabs of 64 MiB a thread plus windows, records and pool of the largest tensor.
[[nodiscard]] Result<PackReport> pack(const std::string& checkpoint_path, const std::string& bundle_path,
                                      const PackOptions& options);

struct UnpackReport {
  uint64_t files = 0, bytes = 0;
};
/// Restores every source file byte for byte into `folder` (created if missing; must be empty), each under a temporary name until its
/// SHA-256 matches the manifest's.
[[nodiscard]] Result<UnpackReport> unpack(const std::string& bundle_path, const std::string& folder, int threads,
                                          const Progress& progress);

struct VerifyReport {
  uint64_t sections = 0, bytes = 0, tensors = 0;
};
/// Checks every section (`deep`: SHA-256 too), decodes every tensor against its logical hash, and the arena against its block hashes.
/// With a checkpoint path also compares every tensor bit for bit, naming the first difference (tensor, index, both words).
[[nodiscard]] Result<VerifyReport> verify(const std::string& bundle_path, const std::string& checkpoint_path_or_empty, bool deep,
                                          int threads, const Progress& progress);

}  // namespace weightd::store
