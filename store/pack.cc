// SPDX-License-Identifier: Apache-2.0
#include "store/pack.h"

#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <limits>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/text.h"
#include "store/difference.h"
#include "store/f12.h"
#include "store/manifest.h"
#include "store/merge_rules.h"
#include "store/storage_decoder.h"
#include "store/worker.h"

namespace weightd::store {
namespace {

constexpr uint64_t kPayPercent = 95;                     // all planes must take less than this of raw
constexpr uint64_t kMaxUnitBytes = uint64_t{256} << 20;  // one unit is worked on whole: a wider matrix stays raw
constexpr uint64_t kMaxPoolBytes = uint64_t{1} << 36;    // of the model: offsets / 16 are 32 bits
constexpr uint64_t kPrefixBytes = 4096;                  // of a tensor, to find possible duplicates

bool pays(uint64_t stored_bytes, uint64_t raw_bytes) {
  return stored_bytes < raw_bytes / 100 * kPayPercent + raw_bytes % 100 * kPayPercent / 100;
}

// --- what becomes one storage ----------------------------------------------------------------------------------------------

f12::Geometry geometry_of(const Shape& shape) {
  f12::Geometry geometry;
  geometry.k = shape[shape.size() - 1];
  geometry.n = shape[shape.size() - 2];
  for (size_t i = 0; i + 2 < shape.size(); ++i) geometry.batch *= shape[i];
  return geometry;
}

uint64_t fixed_bytes(const f12::Geometry& g) { return g.codes_bytes() + g.windows_bytes() + g.records_bytes(); }

// Whether coding can pay, from dtype and shape alone.
bool is_candidate(const SafetensorsEntry& entry, bool indexed) {
  if (entry.dtype != DType::kBF16 || !indexed || entry.shape.size() < 2 || entry.size_bytes == 0) return false;
  const f12::Geometry g = geometry_of(entry.shape);
  constexpr uint64_t kMaxSide = std::numeric_limits<uint32_t>::max();
  if (g.n > kMaxSide || g.k > kMaxSide || g.tiles() * f12::kTileBytes > kMaxUnitBytes) return false;
  if (g.batch > (uint64_t{1} << 48) / (g.units() * g.tiles())) return false;
  return pays(fixed_bytes(g), g.raw_bytes());
}

// One tensor, or the parts of a merged matrix from top to bottom; indexes into Checkpoint::tensors.
struct Item {
  std::vector<uint32_t> tensors;
  std::string merged_name;  // empty: one tensor
  bool candidate = false;
};

std::vector<MergeGroup> merge_groups(const Checkpoint& checkpoint, const PackOptions& options) {
  std::vector<MergeInput> inputs;
  std::vector<uint32_t> tensor_of;
  for (uint32_t i = 0; i < checkpoint.tensors.size(); ++i) {
    if (!checkpoint.tensors[i].indexed) continue;
    const SafetensorsEntry& entry = checkpoint.entry(checkpoint.tensors[i]);
    MergeInput input{entry.name, entry.shape.size() == 2 && is_candidate(entry, true), 0, 0};
    if (input.eligible) input.n = entry.shape[0], input.k = entry.shape[1];
    inputs.push_back(input);
    tensor_of.push_back(i);
  }
  if (!options.merge || options.encoding != Encoding::kF12) return {};
  std::vector<MergeGroup> groups = find_merge_groups(inputs);
  for (MergeGroup& group : groups) {
    for (uint32_t& member : group.members) member = tensor_of[member];
  }
  return groups;
}

// Storages in checkpoint order; a merged matrix stands where its first part does.
std::vector<Item> plan_items(const Checkpoint& checkpoint, const PackOptions& options) {
  const std::vector<MergeGroup> groups = merge_groups(checkpoint, options);
  constexpr uint32_t kNoGroup = std::numeric_limits<uint32_t>::max();
  std::vector<uint32_t> group_of(checkpoint.tensors.size(), kNoGroup);
  for (uint32_t g = 0; g < groups.size(); ++g) {
    for (const uint32_t member : groups[g].members) group_of[member] = g;
  }
  std::vector<bool> planned(groups.size(), false);
  std::vector<Item> items;
  for (uint32_t i = 0; i < checkpoint.tensors.size(); ++i) {
    const uint32_t group = group_of[i];
    if (group == kNoGroup) {
      const bool candidate = options.encoding == Encoding::kF12 &&
                             is_candidate(checkpoint.entry(checkpoint.tensors[i]), checkpoint.tensors[i].indexed);
      items.push_back({{i}, "", candidate});
    } else if (!planned[group]) {
      planned[group] = true;
      items.push_back({groups[group].members, groups[group].name, true});
    }
  }
  return items;
}

// --- reading an item's bytes in order --------------------------------------------------------------------------------------

// The original bytes of an item, one tensor after the other, read once from the front; hashes each tensor on the way.
class ItemReader {
 public:
  ItemReader(const Checkpoint& checkpoint, const Item& item) : checkpoint_(checkpoint), item_(item) {}

  Status read(std::span<std::byte> out) {
    while (!out.empty()) {
      WEIGHTD_CHECK(part_ < item_.tensors.size());
      const CheckpointTensor& tensor = checkpoint_.tensors[item_.tensors[part_]];
      const uint64_t size = checkpoint_.entry(tensor).size_bytes;
      const auto piece = out.first(std::min<uint64_t>(out.size(), size - offset_));
      WEIGHTD_RETURN_IF_ERROR(checkpoint_.read(tensor, offset_, piece));
      hash_.update(piece);
      offset_ += piece.size();
      out = out.subspan(piece.size());
      if (offset_ == size) finish_part();
    }
    return {};
  }

  // One per tensor; all bytes must have been read.
  std::vector<Xxh128> hashes() {
    while (part_ < item_.tensors.size()) finish_part();  // empty tensors
    return hashes_;
  }

 private:
  void finish_part() {
    hashes_.push_back(hash_.digest());
    hash_ = Xxh128Stream();
    offset_ = 0;
    ++part_;
  }

  const Checkpoint& checkpoint_;
  const Item& item_;
  size_t part_ = 0;
  uint64_t offset_ = 0;
  Xxh128Stream hash_;
  std::vector<Xxh128> hashes_;
};

// --- duplicates ------------------------------------------------------------------------------------------------------------

std::span<const std::byte> bytes_of(const void* data, size_t size) { return {static_cast<const std::byte*>(data), size}; }

struct HashOfXxh128 {
  size_t operator()(const Xxh128& hash) const { return hash.low; }
};

// Finds tensors of equal dtype, shape and bytes. Hashes only choose whom to compare: equal means that all bytes were compared.
class DuplicateFinder {
 public:
  explicit DuplicateFinder(const Checkpoint& checkpoint) : checkpoint_(checkpoint), buffer_(2 * kCompareBytes) {}

  // An earlier tensor with the same content that `tensor` may share the storage of; `none` if there is none.
  static constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();
  Result<uint32_t> find(uint32_t tensor) {
    WEIGHTD_ASSIGN_OR_RETURN(const Xxh128 prefix, prefix_key(tensor));
    if (!prefixes_.insert(prefix).second) {
      WEIGHTD_ASSIGN_OR_RETURN(const Xxh128 whole, whole_hash(tensor));
      const auto [begin, end] = by_content_.equal_range(key(tensor, whole));
      for (auto candidate = begin; candidate != end; ++candidate) {
        if (!may_share(candidate->second, tensor)) continue;
        WEIGHTD_ASSIGN_OR_RETURN(const bool same, equal_bytes(candidate->second, tensor));
        if (same) return candidate->second;
      }
    }
    return kNone;
  }

  // `tensor` got a storage of its own.
  void add(uint32_t tensor, const Xxh128& hash) { by_content_.emplace(key(tensor, hash), tensor); }

 private:
  static constexpr uint64_t kCompareBytes = uint64_t{1} << 20;

  const SafetensorsEntry& entry(uint32_t tensor) const { return checkpoint_.entry(checkpoint_.tensors[tensor]); }

  // What is not part of the model must not decide where the model's bytes lie.
  bool may_share(uint32_t earlier, uint32_t later) const {
    return (checkpoint_.tensors[earlier].indexed || !checkpoint_.tensors[later].indexed) &&
           entry(earlier).dtype == entry(later).dtype && entry(earlier).shape == entry(later).shape;
  }

  Xxh128 key(uint32_t tensor, const Xxh128& content) const {
    Xxh128Stream stream;
    const auto dtype = static_cast<uint64_t>(entry(tensor).dtype);
    stream.update(bytes_of(&dtype, sizeof dtype));
    stream.update(bytes_of(entry(tensor).shape.data(), entry(tensor).shape.size() * sizeof(uint64_t)));
    stream.update(bytes_of(&content.low, sizeof content.low));
    stream.update(bytes_of(&content.high, sizeof content.high));
    return stream.digest();
  }

  Result<Xxh128> prefix_key(uint32_t tensor) {
    const auto prefix = std::span(buffer_).first(std::min(kPrefixBytes, entry(tensor).size_bytes));
    WEIGHTD_RETURN_IF_ERROR(checkpoint_.read(checkpoint_.tensors[tensor], 0, prefix));
    return key(tensor, xxh128(prefix));
  }

  Result<Xxh128> whole_hash(uint32_t tensor) {
    Xxh128Stream stream;
    for (uint64_t done = 0; done < entry(tensor).size_bytes;) {
      const auto piece = std::span(buffer_).first(std::min<uint64_t>(buffer_.size(), entry(tensor).size_bytes - done));
      WEIGHTD_RETURN_IF_ERROR(checkpoint_.read(checkpoint_.tensors[tensor], done, piece));
      stream.update(piece);
      done += piece.size();
    }
    return stream.digest();
  }

  Result<bool> equal_bytes(uint32_t a, uint32_t b) {
    for (uint64_t done = 0; done < entry(a).size_bytes;) {
      const uint64_t step = std::min(kCompareBytes, entry(a).size_bytes - done);
      const auto from_a = std::span(buffer_).first(step);
      const auto from_b = std::span(buffer_).subspan(kCompareBytes, step);
      WEIGHTD_RETURN_IF_ERROR(checkpoint_.read(checkpoint_.tensors[a], done, from_a));
      WEIGHTD_RETURN_IF_ERROR(checkpoint_.read(checkpoint_.tensors[b], done, from_b));
      if (std::memcmp(from_a.data(), from_b.data(), step) != 0) return false;
      done += step;
    }
    return true;
  }

  const Checkpoint& checkpoint_;
  std::unordered_set<Xxh128, HashOfXxh128> prefixes_;
  std::unordered_multimap<Xxh128, uint32_t, HashOfXxh128> by_content_;
  std::vector<std::byte> buffer_;
};

// --- the packer ------------------------------------------------------------------------------------------------------------

std::string header_bytes(const SafetensorsHeader& header) {
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &header.header_bytes, 8);
  return bytes + header.json;
}

std::span<const std::byte> text_bytes(const std::string& text) { return bytes_of(text.data(), text.size()); }

class Packer {
 public:
  Packer(const Checkpoint& checkpoint, BundleWriter& writer, const PackOptions& options)
      : checkpoint_(checkpoint), writer_(writer), options_(options), duplicates_(checkpoint) {}

  Result<PackReport> run(const std::vector<Item>& items) {
    WEIGHTD_RETURN_IF_ERROR(prepare());
    for (const Item& item : items) WEIGHTD_RETURN_IF_ERROR(store(item));
    manifest_.sections = writer_.sections();
    WEIGHTD_RETURN_IF_ERROR(read_back());
    WEIGHTD_RETURN_IF_ERROR(checkpoint_.check_unchanged());
    manifest_.tensors_id = compute_tensors_id(manifest_.tensors);
    WEIGHTD_ASSIGN_OR_RETURN(report_.content_id, writer_.commit(std::move(manifest_)));
    report_.bundle_bytes = writer_.file_bytes();
    if (options_.progress) (void)options_.progress(report_.source_bytes, report_.source_bytes);  // too late to cancel
    report_.warnings = checkpoint_.warnings;
    if (report_.coded_tensors == 0) {
      report_.warnings.push_back("no tensor could be coded: the bundle is about as large as the checkpoint");
    }
    return std::move(report_);
  }

 private:
  // --- sources and tensors, as far as the headers tell
  Status prepare() {
    for (const CheckpointFile& file : checkpoint_.files) {
      WEIGHTD_RETURN_IF_ERROR(add_source(file.relative_name, file.file_bytes, header_bytes(file.header), false));
    }
    if (!checkpoint_.index_name.empty()) {
      WEIGHTD_RETURN_IF_ERROR(add_source(checkpoint_.index_name, checkpoint_.index_json.size(), checkpoint_.index_json, true));
      manifest_.sources.back().sha = sha256(text_bytes(checkpoint_.index_json));
    }
    for (const CheckpointTensor& tensor : checkpoint_.tensors) {
      const SafetensorsEntry& entry = checkpoint_.entry(tensor);
      TensorRecord record;
      record.name = entry.name;
      record.dtype = entry.dtype;
      record.shape = entry.shape;
      record.source = tensor.file_index;
      record.source_offset_bytes = entry.offset_bytes;
      record.logical_bytes = entry.size_bytes;
      record.indexed = tensor.indexed;
      manifest_.tensors.push_back(std::move(record));
    }
    manifest_.tool_version = options_.tool_version;
    for (const std::string& file : checkpoint_.left_out_files) {
      manifest_.left_out_files.push_back(is_utf8(file) ? file : printable(file));
    }
    for (const CheckpointFile& file : checkpoint_.files) report_.source_bytes += file.file_bytes;
    report_.source_bytes += checkpoint_.index_json.size();
    return {};
  }

  Status add_source(const std::string& name, uint64_t bytes, const std::string& header, bool is_index) {
    if (!is_safe_relative_name(name)) {
      return Status::invalid_argument("file name '" + printable(name) +
                                      "' cannot be kept in a bundle: it must be a relative path in UTF-8");
    }
    SourceFile source;
    source.relative_name = name;
    source.file_bytes = bytes;
    source.is_index = is_index;
    WEIGHTD_ASSIGN_OR_RETURN(source.header_section, write_section(text_bytes(header)));
    manifest_.sources.push_back(std::move(source));
    return {};
  }

  Result<uint32_t> write_section(std::span<const std::byte> data) {
    writer_.begin_section();
    WEIGHTD_RETURN_IF_ERROR(writer_.append(data));
    return writer_.end_section();
  }

  // --- storing
  uint64_t item_bytes(const Item& item) const {
    uint64_t bytes = 0;
    for (const uint32_t tensor : item.tensors) bytes += checkpoint_.entry(checkpoint_.tensors[tensor]).size_bytes;
    return bytes;
  }

  Status store(const Item& item) {
    const uint64_t done = stored_bytes_ + item_bytes(item);
    WEIGHTD_RETURN_IF_ERROR(item.merged_name.empty() ? store_one(item) : store_merged(item));
    stored_bytes_ = done;
    return report_progress(0);
  }

  Status store_one(const Item& item) {
    const uint32_t tensor = item.tensors.front();
    WEIGHTD_ASSIGN_OR_RETURN(const uint32_t twin, duplicates_.find(tensor));
    if (twin != DuplicateFinder::kNone) {
      manifest_.tensors[tensor].storage = manifest_.tensors[twin].storage;
      manifest_.tensors[tensor].logical_xxh = manifest_.tensors[twin].logical_xxh;
      ++report_.deduplicated_tensors;
      return {};
    }
    bool coded = false;
    if (item.candidate) {
      WEIGHTD_ASSIGN_OR_RETURN(coded, try_f12(item));
    }
    if (!coded) WEIGHTD_RETURN_IF_ERROR(store_raw(item));
    duplicates_.add(tensor, manifest_.tensors[tensor].logical_xxh);
    return {};
  }

  Status store_merged(const Item& item) {
    WEIGHTD_ASSIGN_OR_RETURN(const bool coded, try_f12(item));
    if (coded) {
      ++report_.merged_matrices;
      return {};
    }
    // Each part may still pay by itself.
    for (const uint32_t tensor : item.tensors) WEIGHTD_RETURN_IF_ERROR(store_one({{tensor}, "", true}));
    return {};
  }

  Storage new_storage(const Item& item, Encoding encoding) const {
    const uint32_t first = item.tensors.front();
    Storage storage;
    storage.name = item.merged_name.empty() ? manifest_.tensors[first].name : item.merged_name;
    storage.encoding = encoding;
    storage.dtype = manifest_.tensors[first].dtype;
    storage.merged = !item.merged_name.empty();
    storage.resident = manifest_.tensors[first].indexed;
    storage.geometry = {0, 0, 0};
    storage.logical_bytes = item_bytes(item);
    return storage;
  }

  void finish_storage(const Item& item, Storage storage, const std::vector<Xxh128>& hashes) {
    uint64_t row = 0;
    for (size_t i = 0; i < item.tensors.size(); ++i) {
      TensorRecord& tensor = manifest_.tensors[item.tensors[i]];
      tensor.storage = static_cast<uint32_t>(manifest_.storages.size());
      tensor.logical_xxh = hashes[i];
      if (!storage.merged) continue;
      tensor.row_begin = row;
      row += tensor.shape[0];
    }
    manifest_.storages.push_back(std::move(storage));
  }

  Status store_raw(const Item& item) {
    Storage storage = new_storage(item, Encoding::kRaw);
    ItemReader reader(checkpoint_, item);
    const uint64_t step = slab_bytes(options_.threads);
    writer_.begin_section();
    for (uint64_t done = 0, slab = 0; done < storage.logical_bytes; ++slab) {
      std::vector<std::byte>& buffer = words_[slab % 2];
      buffer.resize(std::min(step, storage.logical_bytes - done));
      WEIGHTD_RETURN_IF_ERROR(reader.read(buffer));
      done += buffer.size();
      WEIGHTD_RETURN_IF_ERROR(write_behind(buffer, done == storage.logical_bytes && slab == 0));
      WEIGHTD_RETURN_IF_ERROR(report_progress(done));
    }
    WEIGHTD_RETURN_IF_ERROR(write_worker_.wait());
    WEIGHTD_ASSIGN_OR_RETURN(const uint32_t section, writer_.end_section());
    storage.planes.push_back({PlaneKind::kRaw, section});
    finish_storage(item, std::move(storage), reader.hashes());
    ++report_.raw_tensors;
    return {};
  }

  // Appends beside what comes next. A small item is not worth the thread.
  Status write_behind(std::span<const std::byte> data, bool whole_item) {
    WEIGHTD_RETURN_IF_ERROR(write_worker_.wait());
    if (whole_item) return writer_.append(data);
    write_worker_.start([this, data] { return writer_.append(data); });
    return {};
  }

  // A run of units of one matrix, as large as a slab.
  struct Slab {
    uint64_t matrix = 0, unit_begin = 0, unit_end = 0, words_bytes = 0;
  };

  static Slab slab_at(const f12::Geometry& g, uint64_t matrix, uint64_t unit, int threads) {
    const uint64_t end = std::min(g.units(), unit + slab_units(g, threads));
    const uint64_t rows = std::min(g.n, end * f12::kUnitRows) - unit * f12::kUnitRows;
    return {matrix, unit, end, rows * g.k * 2};
  }

  std::vector<Slab> slabs_of(const f12::Geometry& g) const {
    std::vector<Slab> slabs;
    for (uint64_t matrix = 0; matrix < g.batch; ++matrix) {
      for (uint64_t unit = 0; unit < g.units();) {
        slabs.push_back(slab_at(g, matrix, unit, options_.threads));
        unit = slabs.back().unit_end;
      }
    }
    return slabs;
  }

  // Codes the item and writes its planes; false, with nothing left in the bundle, when that does not pay.
  Result<bool> try_f12(const Item& item) {
    Storage storage = new_storage(item, Encoding::kF12);
    storage.geometry = geometry_of(manifest_.tensors[item.tensors.front()].shape);
    if (storage.merged) storage.geometry.n = storage.logical_bytes / 2 / storage.geometry.k;
    const auto first_section = static_cast<uint32_t>(writer_.sections().size());
    ItemReader reader(checkpoint_, item);
    F12Stats stats;
    WEIGHTD_ASSIGN_OR_RETURN(const bool paid, code_slabs(storage, reader, stats));
    if (!paid) {
      WEIGHTD_RETURN_IF_ERROR(writer_.rewind(first_section));
      return false;
    }
    WEIGHTD_ASSIGN_OR_RETURN(const uint32_t codes, writer_.end_section());
    WEIGHTD_ASSIGN_OR_RETURN(const uint32_t windows, write_section(windows_));
    WEIGHTD_ASSIGN_OR_RETURN(const uint32_t records, write_section(records_));
    WEIGHTD_ASSIGN_OR_RETURN(const uint32_t pool, write_section(pool_));
    storage.planes = {
        {PlaneKind::kCodes, codes}, {PlaneKind::kWindows, windows}, {PlaneKind::kRecords, records}, {PlaneKind::kPool, pool}};
    storage.escapes = stats.escapes;
    storage.listed_groups = stats.listed_groups;
    storage.dense_groups = stats.dense_groups;
    model_pool_bytes_ += pool_.size();
    report_.coded_tensors += item.tensors.size();
    report_.coded_logical_bytes += storage.logical_bytes;
    report_.coded_stored_bytes += fixed_bytes(storage.geometry) + pool_.size();
    finish_storage(item, std::move(storage), reader.hashes());
    return true;
  }

  // The section of the codes stays open. Reading runs one slab ahead, writing one behind.
  Result<bool> code_slabs(const Storage& storage, ItemReader& reader, F12Stats& stats) {
    const f12::Geometry& g = storage.geometry;
    const std::vector<Slab> slabs = slabs_of(g);
    windows_.resize(g.windows_bytes());
    records_.resize(g.records_bytes());
    pool_.clear();
    writer_.begin_section();
    words_[0].resize(slabs[0].words_bytes);
    WEIGHTD_RETURN_IF_ERROR(reader.read(words_[0]));
    uint64_t done = 0;
    for (size_t i = 0; i < slabs.size(); ++i) {
      if (i + 1 < slabs.size()) read_ahead(reader, words_[(i + 1) % 2], slabs[i + 1].words_bytes);
      const Result<bool> coded = code_slab(g, slabs[i], words_[i % 2], codes_[i % 2], stats);
      const Status read = read_worker_.wait();
      WEIGHTD_RETURN_IF_ERROR(read);
      WEIGHTD_RETURN_IF_ERROR(coded.status());
      if (!*coded || !pays(fixed_bytes(g) + pool_.size(), g.raw_bytes())) {
        WEIGHTD_RETURN_IF_ERROR(write_worker_.wait());
        return false;
      }
      WEIGHTD_RETURN_IF_ERROR(write_behind(codes_[i % 2], slabs.size() == 1));
      WEIGHTD_RETURN_IF_ERROR(report_progress(done += slabs[i].words_bytes));
    }
    WEIGHTD_RETURN_IF_ERROR(write_worker_.wait());
    return true;
  }

  void read_ahead(ItemReader& reader, std::vector<std::byte>& buffer, uint64_t bytes) {
    buffer.resize(bytes);
    read_worker_.start([&reader, &buffer] { return reader.read(buffer); });
  }

  // False: the model's pool could pass what a record can address.
  Result<bool> code_slab(const f12::Geometry& g, const Slab& slab, std::span<const std::byte> words, std::vector<std::byte>& codes,
                         F12Stats& stats) {
    const uint64_t units = slab.unit_end - slab.unit_begin;
    const uint64_t plane_unit = slab.matrix * g.units() + slab.unit_begin;
    const uint64_t unit_records = g.groups() * f12::kRecordBytes;
    codes.resize(units * g.tiles() * f12::kTileBytes);
    const uint64_t most_pool_bytes = units * g.groups() * f12::kGroupTiles * f12::kDenseTileBytes;
    if (model_pool_bytes_ + pool_.size() + most_pool_bytes > kMaxPoolBytes) return false;
    F12Stats slab_stats;
    WEIGHTD_RETURN_IF_ERROR(f12_encode(words, g, slab.unit_begin, slab.unit_end, codes,
                                       std::span(windows_).subspan(plane_unit * f12::kUnitRows, units * f12::kUnitRows),
                                       std::span(records_).subspan(plane_unit * unit_records, units * unit_records), pool_,
                                       model_pool_bytes_, options_.threads, &slab_stats));
    stats += slab_stats;
    return true;
  }

  // --- reading back
  // The bundle as written against the checkpoint as it is now: bits, section hashes; and the arena's block hashes.
  Status read_back() {
    Residency residency = plan_residency(manifest_);
    std::atomic<bool> stop = false;
    Worker arena_worker;  // destroyed, so joined, before what it uses
    arena_worker.start([&] { return hash_arena(residency, stop); });
    Status compared = compare_sources();
    if (!compared.ok()) stop = true;
    const Status hashed = arena_worker.wait();
    WEIGHTD_RETURN_IF_ERROR(compared);
    WEIGHTD_RETURN_IF_ERROR(hashed);
    manifest_.residencies.push_back(std::move(residency));
    return {};
  }

  Status hash_arena(Residency& residency, const std::atomic<bool>& stop) const {
    BlockHasher hasher;
    std::vector<std::byte> buffer;
    for (const Placement& placement : residency.placements) {
      const Storage& storage = manifest_.storages[placement.storage];
      const auto plane =
          std::find_if(storage.planes.begin(), storage.planes.end(), [&](const Plane& p) { return p.kind == placement.kind; });
      const Section& section = manifest_.sections[plane->section];
      Xxh128Stream xxh;
      for (uint64_t done = 0; done < placement.size_bytes && !stop; done += buffer.size()) {
        buffer.resize(std::min<uint64_t>(uint64_t{4} << 20, placement.size_bytes - done));
        WEIGHTD_RETURN_IF_ERROR(writer_.read(plane->section, done, buffer));
        xxh.update(buffer);
        hasher.add(placement.arena_offset_bytes + done, buffer);
      }
      if (stop) return {};
      if (xxh.digest() != section.xxh) {
        return Status::io("'" + printable(storage.name) + "': the bytes read back from the new bundle differ from those written");
      }
    }
    residency.block_hashes = hasher.finish(residency.arena_bytes);
    return {};
  }

  Status compare_sources() {
    const std::vector<uint64_t> bases = pool_bases(manifest_);
    size_t next = 0;
    for (uint32_t f = 0; f < checkpoint_.files.size(); ++f) {
      const std::string header = header_bytes(checkpoint_.files[f].header);
      WEIGHTD_RETURN_IF_ERROR(compare_header(manifest_.sources[f], header));
      Sha256Stream sha;
      sha.update(text_bytes(header));
      for (; next < checkpoint_.tensors.size() && checkpoint_.tensors[next].file_index == f; ++next) {
        Status same = compare_tensor(static_cast<uint32_t>(next), bases[manifest_.tensors[next].storage], sha);
        if (const Status drained = hash_worker_.wait(); same.ok()) same = drained;
        WEIGHTD_RETURN_IF_ERROR(same);
        compared_bytes_ += manifest_.tensors[next].logical_bytes;
        WEIGHTD_RETURN_IF_ERROR(report_progress(0));
      }
      manifest_.sources[f].sha = sha.finish();
    }
    if (checkpoint_.index_name.empty()) return {};
    return compare_header(manifest_.sources.back(), checkpoint_.index_json);
  }

  Status compare_header(const SourceFile& source, const std::string& header) {
    std::vector<std::byte> stored(header.size());
    WEIGHTD_RETURN_IF_ERROR(writer_.read(source.header_section, 0, stored));
    if (std::memcmp(stored.data(), header.data(), header.size()) == 0) return {};
    return Status::io("'" + printable(source.relative_name) + "': the header read back from the new bundle differs");
  }

  // Decodes one tensor from the new bundle and compares it with the checkpoint; the checkpoint's bytes go into `sha` beside the
  // next slab.
  Status compare_tensor(uint32_t index, uint64_t pool_base, Sha256Stream& sha) {
    const TensorRecord& tensor = manifest_.tensors[index];
    const Storage& storage = manifest_.storages[tensor.storage];
    const uint64_t pool_bytes = storage.encoding == Encoding::kF12 ? manifest_.sections[storage.planes[3].section].size_bytes : 0;
    StorageDecoder decoder(
        storage, pool_base, pool_bytes,
        [this](uint32_t section, uint64_t offset, std::span<std::byte> out) { return writer_.read(section, offset, out); },
        options_.threads);
    WEIGHTD_RETURN_IF_ERROR(decoder.load());
    uint64_t done = 0;
    size_t slab = 0;
    const ByteSink compare = [&](std::span<const std::byte> decoded) -> Status {
      std::vector<std::byte>& original = words_[slab++ % 2];
      original.resize(decoded.size());
      WEIGHTD_RETURN_IF_ERROR(checkpoint_.read(checkpoint_.tensors[index], done, original));
      if (Status same = compare_bits({tensor.name, tensor.dtype, tensor.shape}, done, decoded, original); !same.ok()) {
        WEIGHTD_RETURN_IF_ERROR(checkpoint_.check_unchanged());
        return Status::internal("the new bundle does not decode to the checkpoint: " + same.message());
      }
      done += decoded.size();
      WEIGHTD_RETURN_IF_ERROR(hash_behind(sha, original, done == tensor.logical_bytes && slab == 1));
      return report_progress(done);
    };
    if (!storage.merged) return decoder.stream_all(compare);
    return decoder.stream_rows(tensor.row_begin, tensor.row_begin + tensor.shape[0], compare);
  }

  Status hash_behind(Sha256Stream& sha, std::span<const std::byte> data, bool whole_tensor) {
    WEIGHTD_RETURN_IF_ERROR(hash_worker_.wait());
    if (whole_tensor) {
      sha.update(data);
      return {};
    }
    hash_worker_.start([&sha, data] {
      sha.update(data);
      return Status();
    });
    return {};
  }

  // Each byte of the source is gone through twice: coding, comparing. `current` bytes of the item or tensor at hand are done.
  Status report_progress(uint64_t current) {
    if (!options_.progress) return {};
    const uint64_t done = std::min(report_.source_bytes, (stored_bytes_ + compared_bytes_ + current) / 2);
    shown_bytes_ = std::max(shown_bytes_, done);  // a coding that did not pay is gone through again
    if (options_.progress(shown_bytes_, report_.source_bytes)) return {};
    return Status::cancelled("packing was cancelled");
  }

  const Checkpoint& checkpoint_;
  BundleWriter& writer_;
  const PackOptions& options_;
  Manifest manifest_;
  PackReport report_;
  DuplicateFinder duplicates_;
  uint64_t model_pool_bytes_ = 0;
  uint64_t stored_bytes_ = 0, compared_bytes_ = 0, shown_bytes_ = 0;
  std::array<std::vector<std::byte>, 2> words_, codes_;
  std::vector<std::byte> windows_, records_, pool_;
  Worker read_worker_, write_worker_, hash_worker_;  // last: their tasks use the rest
};

// --- before any work ---------------------------------------------------------------------------------------------------------

// The size if everything pays and nothing is there twice: about the least there can be.
uint64_t expected_bytes(const Checkpoint& checkpoint, const std::vector<Item>& items) {
  uint64_t bytes = kHeaderBytes + checkpoint.index_json.size();
  for (const CheckpointFile& file : checkpoint.files) bytes += file.header.json.size();
  for (const Item& item : items) {
    for (const uint32_t tensor : item.tensors) {
      const SafetensorsEntry& entry = checkpoint.entry(checkpoint.tensors[tensor]);
      bytes += item.candidate ? fixed_bytes(geometry_of(entry.shape)) : entry.size_bytes;
    }
  }
  return bytes;
}

Status refuse_own_source(const Checkpoint& checkpoint, const std::string& bundle_path) {
  struct stat target {};
  if (::stat(bundle_path.c_str(), &target) != 0) return {};
  for (const CheckpointFile& file : checkpoint.files) {
    struct stat source {};
    if (::fstat(file.fd.get(), &source) == 0 && source.st_dev == target.st_dev && source.st_ino == target.st_ino) {
      return Status::invalid_argument(printable(bundle_path) + ": the bundle would replace '" + printable(file.relative_name) +
                                      "', which it is made from");
    }
  }
  return {};
}

}  // namespace

Result<PackReport> pack(const std::string& checkpoint_path, const std::string& bundle_path, const PackOptions& options) {
  WEIGHTD_ASSIGN_OR_RETURN(const Checkpoint checkpoint, open_checkpoint(checkpoint_path, options.checkpoint));
  WEIGHTD_RETURN_IF_ERROR(refuse_own_source(checkpoint, bundle_path));
  const std::vector<Item> items = plan_items(checkpoint, options);
  WEIGHTD_ASSIGN_OR_RETURN(BundleWriter writer, BundleWriter::create(bundle_path, expected_bytes(checkpoint, items)));
  return Packer(checkpoint, writer, options).run(items);
}

}  // namespace weightd::store
