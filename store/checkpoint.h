// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/fd.h"
#include "weightd/status.h"
#include "weightd/types.h"

namespace weightd::store {

/// Limits of the safetensors reader. A header over kMaxHeaderBytes, a name over kMaxNameBytes, a rank over kMaxRank or an
/// index over kMaxIndexBytes is refused (kUnsupported) with the limit in the message.
inline constexpr uint64_t kMaxHeaderBytes = 100'000'000;
inline constexpr uint64_t kMaxNameBytes = 65'535;
inline constexpr uint64_t kMaxRank = 32;
inline constexpr uint64_t kMaxIndexBytes = 100'000'000;

struct SafetensorsEntry {
  std::string name;  // decoded UTF-8; any bytes but control characters are not excluded: treat as opaque
  DType dtype{};
  Shape shape;
  uint64_t offset_bytes = 0;  // from the start of the file's data area (not of the file)
  uint64_t size_bytes = 0;
};

/// A validated safetensors header. Entries are in the order of the header's JSON; by offset they cover the data area
/// exactly once, without gap or overlap.
struct SafetensorsHeader {
  uint64_t header_bytes = 0;  // N of the format: the JSON's length; data start at 8 + N
  uint64_t data_bytes = 0;
  std::vector<SafetensorsEntry> entries;
  std::string json;  // the N header bytes, verbatim
};

/// Checks all rules of the format over the N header bytes and the data area's size. `name` names the file in messages
/// (printable already). The rules are those of the format's own reader, and beyond them: a name, and a key of an entry, occurs
/// once after unescaping; an entry has no key but dtype, shape and data_offsets; numbers are plain digits; the product of the
/// non-zero dimensions and the element's bits is below 2^64. White space behind the closing brace is allowed.
/// kCorruption with one line that names file, tensor and rule; kUnsupported for an unknown dtype or over a limit.
[[nodiscard]] Result<SafetensorsHeader> parse_safetensors_header(std::string json, uint64_t data_bytes, std::string_view name);
/// Reads and checks the header of an open file of `file_bytes`. Recognises Git-LFS pointers, HTML and zip/pickle files.
[[nodiscard]] Result<SafetensorsHeader> read_safetensors_header(int fd, uint64_t file_bytes, std::string_view name);

/// One line of an index: where a tensor is stored.
struct IndexEntry {
  std::string tensor;  // decoded UTF-8, opaque
  std::string shard;   // a path below the index's folder: '/'-separated, never absolute, no ".", ".." or empty parts
};
/// The weight_map of an index file's text, sorted by tensor; each tensor once. Other keys are skipped. `name` names the file in
/// messages (printable already). kCorruption with one line that names file, tensor and rule.
[[nodiscard]] Result<std::vector<IndexEntry>> parse_checkpoint_index(std::string_view json, std::string_view name);

/// One file of a checkpoint, open for reading.
struct CheckpointFile {
  // As the index spells it (less any "." parts), or the file's own name; '/'-separated, never absolute, no "..".
  std::string relative_name;
  UniqueFd fd;
  uint64_t file_bytes = 0;
  SafetensorsHeader header;
};

/// A tensor that the checkpoint defines, or a stored one that the index gives to another shard or leaves out.
struct CheckpointTensor {
  uint32_t file_index = 0;
  uint32_t entry_index = 0;  // in files[file_index].header.entries
  bool indexed = true;       // false: stored, but not part of the model (stale or unindexed)
};

struct CheckpointOptions {
  bool strict = false;  // unindexed files and stored tensors are refused (kFailedPrecondition) instead of reported
  // Tensors whose names the index lacks become part of the model, each name once at most. A stored tensor whose name the index
  // gives to another shard is stale and stays out.
  bool include_unindexed = false;
};

/// An opened, validated checkpoint. Moves only.
struct Checkpoint {
  std::vector<CheckpointFile> files;        // by relative name, bytewise; files that only include_unindexed brings in come last
  std::vector<CheckpointTensor> tensors;    // by file, then by offset, then by header order: deterministic
  std::string index_name;                   // "model.safetensors.index.json", or empty
  std::string index_json;                   // verbatim bytes, or empty
  std::vector<std::string> warnings;        // one line each, for people; names are printable already
  std::vector<std::string> left_out_files;  // *.safetensors files of the folder that the index does not name

  [[nodiscard]] const SafetensorsEntry& entry(const CheckpointTensor& t) const {
    return files[t.file_index].header.entries[t.entry_index];
  }
  /// Reads out.size() bytes of the tensor's data from `offset_bytes` on. Detects that the file shrank (kCorruption).
  Status read(const CheckpointTensor& tensor, uint64_t offset_bytes, std::span<std::byte> out) const;
  /// kFailedPrecondition when a file's size, mtime or inode differs from when it was opened (CO-089).
  Status check_unchanged() const;

  struct Stamp {
    uint64_t inode, size_bytes;
    int64_t mtime_s, mtime_ns;
  };
  std::vector<Stamp> stamps;  // per file
};

/// Opens `path`: a safetensors file, a *.safetensors.index.json file, or a folder that holds an index or exactly one
/// set of files. In a folder an index wins over a model.safetensors beside it, with a warning (CO-026); two indexes are
/// refused as ambiguous; without an index every *.safetensors file of the folder (any case, not hidden, sorted by name) is read
/// and a name in two of them is refused. The index alone says which shard a tensor comes from; its shard names are paths below
/// its folder, '/'-separated: absolute ones, ".." and backslashes are refused, "./x" means "x". Symbolic links are followed.
/// All headers are read and checked, no tensor data.
/// Errors: kNotFound, kPermissionDenied, kResourceExhausted, kIo, kCorruption, kUnsupported, kInvalidArgument,
/// kFailedPrecondition (strict); the message lists every shard that is missing or cannot be opened.
[[nodiscard]] Result<Checkpoint> open_checkpoint(const std::string& path, const CheckpointOptions& options = {});

}  // namespace weightd::store
