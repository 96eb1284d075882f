// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/fd.h"
#include "weightd/status.h"
#include "weightd/types.h"

namespace weightd::store {

/// Limits of the safetensors reader. A header over kMaxHeaderBytes, a name over kMaxNameBytes or a rank over kMaxRank is
/// refused with the limit in the message.
inline constexpr uint64_t kMaxHeaderBytes = 100'000'000;
inline constexpr uint64_t kMaxNameBytes = 65'535;
inline constexpr uint64_t kMaxRank = 32;
inline constexpr uint64_t kMaxIndexBytes = 100'000'000;

struct SafetensorsEntry {
  std::string name;           // decoded UTF-8; any bytes but control characters are not excluded: treat as opaque
  DType dtype{};
  Shape shape;
  uint64_t offset_bytes = 0;  // from the start of the file's data area (not of the file)
  uint64_t size_bytes = 0;
};

/// A validated safetensors header. Entries are in the order of the header's JSON; by offset they cover the data area
/// exactly once, without gap or overlap.
struct SafetensorsHeader {
  uint64_t header_bytes = 0;             // N of the format: the JSON's length; data start at 8 + N
  uint64_t data_bytes = 0;
  std::vector<SafetensorsEntry> entries;
  std::string json;                      // the N header bytes, verbatim
};

/// Checks all rules of the format over the N header bytes and the data area's size. `name` names the file in messages.
/// kCorruption with one line that names file, tensor and rule; kUnsupported for an unknown dtype.
[[nodiscard]] Result<SafetensorsHeader> parse_safetensors_header(std::string json, uint64_t data_bytes,
                                                                 std::string_view name);
/// Reads and checks the header of an open file of `file_bytes`. Recognises Git-LFS pointers, HTML and zip/pickle files.
[[nodiscard]] Result<SafetensorsHeader> read_safetensors_header(int fd, uint64_t file_bytes, std::string_view name);

/// One file of a checkpoint, open for reading.
struct CheckpointFile {
  std::string relative_name;  // as the index spells it, or the file's own name; '/'-separated, never absolute, no ".."
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
  bool strict = false;             // unindexed files and tensors are refused instead of reported
  bool include_unindexed = false;  // they become part of the model (a name may still occur only once)
};

/// An opened, validated checkpoint. Moves only.
struct Checkpoint {
  std::vector<CheckpointFile> files;      // by first appearance in the index (in sorted order of shard name)
  std::vector<CheckpointTensor> tensors;  // by file, then by offset, then by header order: deterministic
  std::string index_name;                 // "model.safetensors.index.json", or empty
  std::string index_json;                 // verbatim bytes, or empty
  std::vector<std::string> warnings;      // one line each, for people; names are printable already
  std::vector<std::string> left_out_files;  // *.safetensors files of the folder that the index does not name

  [[nodiscard]] const SafetensorsEntry& entry(const CheckpointTensor& t) const {
    return files[t.file_index].header.entries[t.entry_index];
  }
  /// Reads out.size() bytes of the tensor's data from `offset_bytes` on. Detects that the file shrank (kCorruption).
  Status read(const CheckpointTensor& tensor, uint64_t offset_bytes, std::span<std::byte> out) const;
  /// kFailedPrecondition when a file's size, mtime or inode differs from when it was opened (CO-089).
  Status check_unchanged() const;

  struct Stamp { uint64_t inode, size_bytes; int64_t mtime_s, mtime_ns; };
  std::vector<Stamp> stamps;  // per file
};

/// Opens `path`: a *.safetensors file, a *.safetensors.index.json file, or a folder that holds an index or exactly one
/// set of files. In a folder an index wins over a model.safetensors beside it, with a warning (CO-026); without an index
/// every *.safetensors file of the folder is read and a name in two of them is refused. All headers are read and checked,
/// no tensor data. Errors: kNotFound, kIo, kCorruption, kUnsupported, kInvalidArgument; the message lists every missing shard.
[[nodiscard]] Result<Checkpoint> open_checkpoint(const std::string& path, const CheckpointOptions& options = {});

}  // namespace weightd::store
