// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/fd.h"
#include "store/hash.h"
#include "store/tile_layout.h"
#include "weightd/status.h"
#include "weightd/types.h"

/// The bundle file `.wpk` (normative: store/FORMAT.md). Plain structs; the Cap'n Proto manifest stays inside bundle.cc.
namespace weightd::store {

inline constexpr uint64_t kSectionAlign = 4096;
inline constexpr uint64_t kArenaAlign = 256;  // every plane and raw tensor in the arena

/// A checksummed, aligned range of the file.
struct Section {
  uint64_t offset_bytes = 0;  // from the start of the file, multiple of kSectionAlign
  uint64_t size_bytes = 0;
  Xxh128 xxh;
  Sha256 sha{};
};

enum class PlaneKind : uint16_t { kRaw = 0, kCodes = 1, kWindows = 2, kRecords = 3, kPool = 4 };

struct Plane {
  PlaneKind kind{};
  uint32_t section = 0;  // index into Manifest::sections
};

/// One coded (or raw) piece of storage: a tensor, or several merged or identical ones.
struct Storage {
  std::string name;  // of the tensor, or of the merged matrix ("...qkv_proj.weight")
  Encoding encoding{};
  DType dtype{};
  bool merged = false;     // several tensors, one below the other
  bool resident = true;    // false: kept only so that unpack restores the files (stale tensors)
  f12::Geometry geometry;  // f12: batch matrices [n, k]; raw: zero
  uint64_t logical_bytes = 0;
  std::vector<Plane> planes;  // f12: codes, windows, records, pool; raw: one. Planes of no bytes have a section of size 0.
  // f12 only, for inspect and stats:
  uint64_t escapes = 0, listed_groups = 0, dense_groups = 0;
};

struct TensorRecord {
  std::string name;
  DType dtype{};
  Shape shape;
  uint32_t storage = 0;
  uint64_t row_begin = 0;            // first row inside the storage (merged matrices), else 0
  uint32_t source = 0;               // index into Manifest::sources
  uint64_t source_offset_bytes = 0;  // inside that file's data area
  uint64_t logical_bytes = 0;
  Xxh128 logical_xxh;   // of the original bytes
  bool indexed = true;  // false: stored by the file but not part of the model
};

struct SourceFile {
  std::string relative_name;
  uint64_t file_bytes = 0;
  Sha256 sha{};                 // of the whole original file
  uint32_t header_section = 0;  // safetensors: 8 length bytes and the JSON, verbatim; index: the whole file
  bool is_index = false;
};

/// Where each plane lies in the arena when the model is resident in `form`.
struct Placement {
  uint32_t storage = 0;
  PlaneKind kind{};
  uint64_t arena_offset_bytes = 0;  // multiple of kArenaAlign; pool parts: of 16
  uint64_t size_bytes = 0;
};
struct Residency {
  std::string form;                // "fast": placements and sizes follow from the storages (FORMAT.md, section 5)
  uint64_t arena_bytes = 0;        // multiple of kBlockBytes
  uint64_t pool_offset_bytes = 0;  // start of the pool: the end of the rest, at a multiple of kArenaAlign, also when there is none
  uint64_t pool_bytes = 0;
  std::vector<Placement> placements;   // ascending offsets, disjoint; gaps are zeros
  std::vector<uint64_t> block_hashes;  // one per kBlockBytes
};

struct Manifest {
  std::string tool_version;
  std::vector<SourceFile> sources;
  std::vector<Section> sections;
  std::vector<Storage> storages;
  std::vector<TensorRecord> tensors;  // in checkpoint order
  std::vector<Residency> residencies;
  std::vector<std::string> left_out_files;
  Sha256 tensors_id{};  // over the model's tensors (name, dtype, shape, logical hash; sorted by name): equal for equal tensors,
                        // however sharded or encoded
};

[[nodiscard]] Sha256 compute_tensors_id(const std::vector<TensorRecord>& tensors);

/// Writes a bundle to a sibling temporary file (O_EXCL). commit() checks the manifest against every rule of the format (kInternal:
/// our bug), writes manifest and header, fsyncs file and folder, and renames over `path`. Destruction without commit removes the
/// temporary file and nothing else. One thread at a time; several may read() at once.
class BundleWriter {
 public:
  /// Checks the folder, that `path` is not taken by something else than a regular file, and that `expected_bytes` are free
  /// (kResourceExhausted with the arithmetic).
  [[nodiscard]] static Result<BundleWriter> create(const std::string& path, uint64_t expected_bytes);
  BundleWriter(BundleWriter&&) noexcept;
  BundleWriter& operator=(BundleWriter&&) noexcept;
  ~BundleWriter();

  /// Sections are written one at a time, in file order. end_section() gives the index for the manifest.
  void begin_section();
  Status append(std::span<const std::byte> data);
  [[nodiscard]] Result<uint32_t> end_section();
  /// Forgets every section from index `first` on, one that was begun and not ended too, and continues at its place (an encoding
  /// that did not pay).
  Status rewind(uint32_t first);
  [[nodiscard]] const std::vector<Section>& sections() const;
  /// Reads back from the temporary file, for the comparison before the rename. Ended sections only.
  Status read(uint32_t section, uint64_t offset_bytes, std::span<std::byte> out) const;

  /// `manifest.sections` is filled in by the writer. Returns the content id (SHA-256 of the manifest bytes).
  [[nodiscard]] Result<Sha256> commit(Manifest manifest);
  /// Size of the file so far; after commit() of the whole bundle.
  [[nodiscard]] uint64_t file_bytes() const;

 private:
  struct State;
  explicit BundleWriter(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

/// An opened bundle: header and manifest read, checksummed and validated; no data section read. Borrow-free; move-only.
/// Never maps the file; every read is bounds-checked against the real file size (CO-100 to CO-102).
class BundleReader {
 public:
  [[nodiscard]] static Result<BundleReader> open(const std::string& path);
  /// Takes the descriptor; `name` is for messages.
  [[nodiscard]] static Result<BundleReader> open_fd(UniqueFd fd, std::string name);
  BundleReader(BundleReader&&) noexcept;
  BundleReader& operator=(BundleReader&&) noexcept;
  ~BundleReader();

  [[nodiscard]] const Manifest& manifest() const;
  [[nodiscard]] const Sha256& content_id() const;
  [[nodiscard]] uint64_t file_bytes() const;
  [[nodiscard]] const std::string& name() const;
  [[nodiscard]] const Residency* residency(std::string_view form) const;

  Status read(uint32_t section, uint64_t offset_bytes, std::span<std::byte> out) const;
  /// Streams the section through its XXH3-128 (and SHA-256 when `deep`), and checks that the padding behind it is zero. kCorruption
  /// names file, section, tensor and both hashes.
  Status check_section(uint32_t section, bool deep) const;
  /// The same for whoever has read the section already and hashed it.
  Status check_hashes(uint32_t section, const Xxh128& xxh, const Sha256& sha) const;
  /// "section 7 (codes of 'name')", for messages.
  [[nodiscard]] std::string describe_section(uint32_t section) const;
  /// Offset of a storage's pool part from the start of the model's pool; 0 for raw storages.
  [[nodiscard]] uint64_t pool_base(uint32_t storage) const;
  /// Decodes rows of nothing but whole tensors: `out` holds exactly tensor.logical_bytes.
  Status decode_tensor(const TensorRecord& tensor, std::span<std::byte> out, int threads) const;
  /// The same in pieces of a few MiB, in order; stops at the first failure of `sink`.
  Status stream_tensor(const TensorRecord& tensor, int threads,
                       const std::function<Status(std::span<const std::byte>)>& sink) const;
  Status check_unchanged() const;  // CO-089, as for Checkpoint

 private:
  struct State;
  explicit BundleReader(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace weightd::store
