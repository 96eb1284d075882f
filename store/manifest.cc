// SPDX-License-Identifier: Apache-2.0
#include "store/manifest.h"

#include <capnp/message.h>
#include <capnp/serialize.h>
#include <kj/exception.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <exception>
#include <limits>
#include <string>
#include <tuple>
#include <utility>

#include "base/text.h"
#include "store/checkpoint.h"
#include "store/manifest.capnp.h"

namespace weightd::store {
namespace {

constexpr std::array<unsigned char, 8> kMagic = {0x89, 'W', 'P', 'K', 0x0d, 0x0a, 0x1a, 0x0a};
constexpr size_t kVersionOffset = 0x08, kFileBytesOffset = 0x10, kManifestShaOffset = 0x28, kReservedOffset = 0x48,
                 kHashOffset = 0xff0;
constexpr int kNestingLimit = 8;

static_assert(std::endian::native == std::endian::little, "the bundle's integers are copied as they are");

template <typename T>
void put(std::span<std::byte> out, size_t offset, T value) {
  std::memcpy(out.data() + offset, &value, sizeof(value));
}

template <typename T>
T get(std::span<const std::byte> in, size_t offset) {
  T value;
  std::memcpy(&value, in.data() + offset, sizeof(value));
  return value;
}

bool all_zero(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}

std::string number(uint64_t value) { return std::to_string(value); }

std::string in_quotes(std::string_view name) { return "'" + printable(name) + "'"; }

// --- to and from Cap'n Proto ---------------------------------------------------------------------------------------------

capnp::Data::Reader to_data(const Sha256& sha) { return {sha.data(), sha.size()}; }
capnp::Text::Reader to_text(const std::string& text) { return {text.c_str(), text.size()}; }
std::string from_text(capnp::Text::Reader text) { return {text.begin(), text.size()}; }

// Thrown inside this file only: a rule broken or a number unknown while the message is read.
struct Refusal {
  Status status;
};

Sha256 from_data(capnp::Data::Reader data, const std::string& field) {
  Sha256 sha{};
  if (data.size() != sha.size()) {
    throw Refusal{Status::corruption(field + ": expected a hash of 32 bytes, have " + number(data.size()))};
  }
  std::copy(data.begin(), data.end(), sha.begin());
  return sha;
}

template <typename Enum>
Enum from_number(uint16_t value, uint16_t count, const std::string& field) {
  if (value >= count) throw Refusal{Status::unsupported(field + " " + number(value) + " is not known to this version")};
  return static_cast<Enum>(value);
}

void require_count(uint64_t count, uint64_t limit, std::string_view field) {
  if (count > limit) {
    throw Refusal{
        Status::unsupported(std::string(field) + ": " + number(count) + " entries, this version reads at most " + number(limit))};
  }
}

template <typename Values, typename Init, typename Fill>
void write_list(const Values& values, Init&& init, Fill&& fill) {
  auto list = init(static_cast<unsigned>(values.size()));
  for (unsigned i = 0; i < list.size(); ++i) fill(list[i], values[i]);
}

void write_storage(wire::Storage::Builder out, const Storage& storage) {
  const bool coded = storage.encoding == Encoding::kF12;
  out.setName(to_text(storage.name));
  out.setEncoding(static_cast<uint16_t>(storage.encoding));
  out.setDtype(static_cast<uint16_t>(storage.dtype));
  out.setMerged(storage.merged);
  out.setResident(storage.resident);
  out.setN(coded ? storage.geometry.n : 0);
  out.setK(coded ? storage.geometry.k : 0);
  out.setBatch(coded ? storage.geometry.batch : 0);
  out.setLogicalBytes(storage.logical_bytes);
  write_list(
      storage.planes, [&](unsigned count) { return out.initPlanes(count); },
      [](wire::Plane::Builder to, const Plane& plane) {
        to.setSection(plane.section);
        to.setKind(static_cast<uint16_t>(plane.kind));
      });
  out.setEscapes(storage.escapes);
  out.setListedGroups(storage.listed_groups);
  out.setDenseGroups(storage.dense_groups);
}

void write_tensor(wire::Tensor::Builder out, const TensorRecord& tensor) {
  out.setName(to_text(tensor.name));
  auto shape = out.initShape(static_cast<unsigned>(tensor.shape.size()));
  for (unsigned i = 0; i < shape.size(); ++i) shape.set(i, tensor.shape[i]);
  out.setDtype(static_cast<uint16_t>(tensor.dtype));
  out.setIndexed(tensor.indexed);
  out.setStorage(tensor.storage);
  out.setRowBegin(tensor.row_begin);
  out.setSource(tensor.source);
  out.setSourceOffsetBytes(tensor.source_offset_bytes);
  out.setLogicalBytes(tensor.logical_bytes);
  out.setXxh128Low(tensor.logical_xxh.low);
  out.setXxh128High(tensor.logical_xxh.high);
}

void write_residency(wire::Residency::Builder out, const Residency& residency) {
  out.setForm(to_text(residency.form));
  out.setArenaBytes(residency.arena_bytes);
  out.setPoolOffsetBytes(residency.pool_offset_bytes);
  out.setPoolBytes(residency.pool_bytes);
  write_list(
      residency.placements, [&](unsigned count) { return out.initPlacements(count); },
      [](wire::Placement::Builder to, const Placement& placement) {
        to.setStorage(placement.storage);
        to.setKind(static_cast<uint16_t>(placement.kind));
        to.setArenaOffsetBytes(placement.arena_offset_bytes);
        to.setSizeBytes(placement.size_bytes);
      });
  auto hashes = out.initBlockHashes(static_cast<unsigned>(residency.block_hashes.size()));
  for (unsigned i = 0; i < hashes.size(); ++i) hashes.set(i, residency.block_hashes[i]);
}

void write_manifest(wire::Manifest::Builder out, const Manifest& manifest) {
  out.setToolVersion(to_text(manifest.tool_version));
  out.setTensorsId(to_data(manifest.tensors_id));
  write_list(
      manifest.sources, [&](unsigned count) { return out.initSources(count); },
      [](wire::Source::Builder to, const SourceFile& source) {
        to.setName(to_text(source.relative_name));
        to.setFileBytes(source.file_bytes);
        to.setSha256(to_data(source.sha));
        to.setHeaderSection(source.header_section);
        to.setIsIndex(source.is_index);
      });
  write_list(
      manifest.sections, [&](unsigned count) { return out.initSections(count); },
      [](wire::Section::Builder to, const Section& section) {
        to.setOffsetBytes(section.offset_bytes);
        to.setSizeBytes(section.size_bytes);
        to.setXxh128Low(section.xxh.low);
        to.setXxh128High(section.xxh.high);
        to.setSha256(to_data(section.sha));
      });
  write_list(
      manifest.storages, [&](unsigned count) { return out.initStorages(count); }, write_storage);
  write_list(
      manifest.tensors, [&](unsigned count) { return out.initTensors(count); }, write_tensor);
  write_list(
      manifest.residencies, [&](unsigned count) { return out.initResidencies(count); }, write_residency);
  auto left_out = out.initLeftOutFiles(static_cast<unsigned>(manifest.left_out_files.size()));
  for (unsigned i = 0; i < left_out.size(); ++i) left_out.set(i, to_text(manifest.left_out_files[i]));
}

Storage read_storage(wire::Storage::Reader in, const std::string& field) {
  Storage storage;
  storage.name = from_text(in.getName());
  storage.encoding = from_number<Encoding>(in.getEncoding(), kEncodingCount, field + ": encoding");
  storage.dtype = from_number<DType>(in.getDtype(), kDTypeCount, field + ": dtype");
  storage.merged = in.getMerged();
  storage.resident = in.getResident();
  storage.geometry = {in.getN(), in.getK(), in.getBatch()};
  storage.logical_bytes = in.getLogicalBytes();
  const auto planes = in.getPlanes();
  for (const auto plane : planes) {
    const auto kind = from_number<PlaneKind>(plane.getKind(), static_cast<uint16_t>(PlaneKind::kPool) + 1, field + ": plane kind");
    storage.planes.push_back({kind, plane.getSection()});
  }
  storage.escapes = in.getEscapes();
  storage.listed_groups = in.getListedGroups();
  storage.dense_groups = in.getDenseGroups();
  return storage;
}

TensorRecord read_tensor(wire::Tensor::Reader in, const std::string& field) {
  TensorRecord tensor;
  tensor.name = from_text(in.getName());
  const auto shape = in.getShape();
  if (shape.size() > kMaxRank) {
    throw Refusal{
        Status::corruption(field + ": " + number(shape.size()) + " dimensions, at most " + number(kMaxRank) + " are allowed")};
  }
  for (const uint64_t dimension : shape) tensor.shape.push_back(dimension);
  tensor.dtype = from_number<DType>(in.getDtype(), kDTypeCount, field + ": dtype");
  tensor.indexed = in.getIndexed();
  tensor.storage = in.getStorage();
  tensor.row_begin = in.getRowBegin();
  tensor.source = in.getSource();
  tensor.source_offset_bytes = in.getSourceOffsetBytes();
  tensor.logical_bytes = in.getLogicalBytes();
  tensor.logical_xxh = {in.getXxh128Low(), in.getXxh128High()};
  return tensor;
}

Residency read_residency(wire::Residency::Reader in, const std::string& field) {
  Residency residency;
  residency.form = from_text(in.getForm());
  residency.arena_bytes = in.getArenaBytes();
  residency.pool_offset_bytes = in.getPoolOffsetBytes();
  residency.pool_bytes = in.getPoolBytes();
  const auto placements = in.getPlacements();
  require_count(placements.size(), 4 * kMaxRecords, field + ": placements");
  residency.placements.reserve(placements.size());
  for (const auto placement : placements) {
    const auto kind =
        from_number<PlaneKind>(placement.getKind(), static_cast<uint16_t>(PlaneKind::kPool) + 1, field + ": plane kind");
    residency.placements.push_back({placement.getStorage(), kind, placement.getArenaOffsetBytes(), placement.getSizeBytes()});
  }
  const auto hashes = in.getBlockHashes();
  residency.block_hashes.reserve(hashes.size());
  for (const uint64_t hash : hashes) residency.block_hashes.push_back(hash);
  return residency;
}

std::string indexed_field(std::string_view list, size_t index) { return std::string(list) + "[" + number(index) + "]"; }

Manifest read_manifest(wire::Manifest::Reader in) {
  Manifest manifest;
  manifest.tool_version = from_text(in.getToolVersion());
  manifest.tensors_id = from_data(in.getTensorsId(), "tensorsId");
  const auto sources = in.getSources();
  require_count(sources.size(), kMaxRecords, "sources");
  for (const auto source : sources) {
    manifest.sources.push_back({from_text(source.getName()), source.getFileBytes(),
                                from_data(source.getSha256(), indexed_field("sources", manifest.sources.size())),
                                source.getHeaderSection(), source.getIsIndex()});
  }
  const auto sections = in.getSections();
  require_count(sections.size(), 4 * kMaxRecords, "sections");
  manifest.sections.reserve(sections.size());
  for (const auto section : sections) {
    manifest.sections.push_back({section.getOffsetBytes(),
                                 section.getSizeBytes(),
                                 {section.getXxh128Low(), section.getXxh128High()},
                                 from_data(section.getSha256(), indexed_field("sections", manifest.sections.size()))});
  }
  const auto storages = in.getStorages();
  require_count(storages.size(), kMaxRecords, "storages");
  manifest.storages.reserve(storages.size());
  for (const auto storage : storages) {
    manifest.storages.push_back(read_storage(storage, indexed_field("storages", manifest.storages.size())));
  }
  const auto tensors = in.getTensors();
  require_count(tensors.size(), kMaxRecords, "tensors");
  manifest.tensors.reserve(tensors.size());
  for (const auto tensor : tensors) {
    manifest.tensors.push_back(read_tensor(tensor, indexed_field("tensors", manifest.tensors.size())));
  }
  const auto residencies = in.getResidencies();
  require_count(residencies.size(), 64, "residencies");
  for (const auto residency : residencies) {
    manifest.residencies.push_back(read_residency(residency, indexed_field("residencies", manifest.residencies.size())));
  }
  const auto left_out = in.getLeftOutFiles();
  require_count(left_out.size(), kMaxRecords, "leftOutFiles");
  for (const auto file : left_out) manifest.left_out_files.push_back(from_text(file));
  return manifest;
}

// --- the rules -----------------------------------------------------------------------------------------------------------

class Validator {
 public:
  Validator(const Manifest& manifest, uint64_t manifest_offset_bytes)
      : manifest_(manifest), manifest_offset_(manifest_offset_bytes), section_used_(manifest.sections.size(), false) {}

  Status run() {
    WEIGHTD_RETURN_IF_ERROR(check_counts());
    if (!is_utf8(manifest_.tool_version)) return Status::corruption("toolVersion is not UTF-8");
    WEIGHTD_RETURN_IF_ERROR(check_sections());
    WEIGHTD_RETURN_IF_ERROR(check_sources());
    for (size_t i = 0; i < manifest_.storages.size(); ++i) WEIGHTD_RETURN_IF_ERROR(check_storage(i));
    WEIGHTD_RETURN_IF_ERROR(check_section_use());
    WEIGHTD_RETURN_IF_ERROR(check_tensors());
    WEIGHTD_RETURN_IF_ERROR(check_merged_rows());
    WEIGHTD_RETURN_IF_ERROR(check_storage_use());
    WEIGHTD_RETURN_IF_ERROR(check_names());
    WEIGHTD_RETURN_IF_ERROR(check_residencies());
    if (compute_tensors_id(manifest_.tensors) != manifest_.tensors_id)
      return Status::corruption("tensorsId does not match the tensors");
    return {};
  }

 private:
  struct StorageUse {
    bool named = false, indexed = false, has_name = false;
  };
  struct MergedRows {
    uint32_t storage;
    uint64_t row_begin, row_end;
    auto operator<=>(const MergedRows&) const = default;
  };

  Status check_counts() const {
    const uint64_t most = std::max({manifest_.sources.size(), manifest_.storages.size(), manifest_.tensors.size(),
                                    manifest_.left_out_files.size(), manifest_.sections.size() / 4});
    if (most > kMaxRecords) return Status::unsupported("more than " + number(kMaxRecords) + " sources, storages or tensors");
    for (const std::string& file : manifest_.left_out_files) {
      if (!is_utf8(file)) return Status::corruption("leftOutFiles: a name is not UTF-8");
    }
    return {};
  }

  Status check_sections() const {
    uint64_t expected = kHeaderBytes;
    for (size_t i = 0; i < manifest_.sections.size(); ++i) {
      const Section& section = manifest_.sections[i];
      const std::string field = indexed_field("sections", i);
      if (section.offset_bytes != expected) {
        return Status::corruption(field + ": offset " + number(section.offset_bytes) + ", expected " + number(expected));
      }
      if (section.size_bytes > manifest_offset_ - expected) {
        return Status::corruption(field + ": " + number(section.size_bytes) + " bytes at offset " + number(expected) +
                                  " reach past the manifest's offset " + number(manifest_offset_));
      }
      // manifest_offset_ is a multiple of the alignment, so this cannot pass it.
      expected = f12::align_up(expected + section.size_bytes, kSectionAlign);
    }
    if (expected != manifest_offset_) {
      return Status::corruption("sections end at " + number(expected) + ", the manifest begins at " + number(manifest_offset_));
    }
    return {};
  }

  Status use_section(uint32_t section, const std::string& field) {
    if (section >= section_used_.size()) {
      return Status::corruption(field + ": section " + number(section) + " of " + number(section_used_.size()));
    }
    if (section_used_[section]) return Status::corruption(field + ": section " + number(section) + " is used twice");
    section_used_[section] = true;
    return {};
  }

  Status check_sources() {
    std::vector<std::string_view> names;
    for (size_t i = 0; i < manifest_.sources.size(); ++i) {
      const SourceFile& source = manifest_.sources[i];
      const std::string field = indexed_field("sources", i) + " " + in_quotes(source.relative_name);
      if (!is_safe_relative_name(source.relative_name)) return Status::corruption(field + ": the name is not a safe relative path");
      WEIGHTD_RETURN_IF_ERROR(use_section(source.header_section, field));
      const uint64_t header_bytes = manifest_.sections[source.header_section].size_bytes;
      if (header_bytes > source.file_bytes) {
        return Status::corruption(field + ": header of " + number(header_bytes) + " bytes in a file of " +
                                  number(source.file_bytes));
      }
      if (source.is_index && header_bytes != source.file_bytes)
        return Status::corruption(field + ": the index is not stored whole");
      if (source.is_index && i + 1 != manifest_.sources.size())
        return Status::corruption(field + ": the index is not the last source");
      if (!source.is_index && header_bytes < 8) return Status::corruption(field + ": header of less than 8 bytes");
      names.push_back(source.relative_name);
    }
    return check_source_names(std::move(names));
  }

  static Status check_source_names(std::vector<std::string_view> names) {
    std::sort(names.begin(), names.end());
    if (const auto twin = std::adjacent_find(names.begin(), names.end()); twin != names.end()) {
      return Status::corruption("sources: the name " + in_quotes(*twin) + " occurs twice");
    }
    for (const std::string_view name : names) {
      for (size_t slash = name.find('/'); slash != std::string_view::npos; slash = name.find('/', slash + 1)) {
        if (std::binary_search(names.begin(), names.end(), name.substr(0, slash))) {
          return Status::corruption("sources: " + in_quotes(name.substr(0, slash)) + " is a file and a folder");
        }
      }
    }
    return {};
  }

  Status check_storage(size_t index) {
    const Storage& storage = manifest_.storages[index];
    const std::string field = indexed_field("storages", index) + " " + in_quotes(storage.name);
    if (storage.name.size() > kMaxNameBytes || !is_utf8(storage.name)) {
      return Status::corruption(field + ": the name is not UTF-8 of at most " + number(kMaxNameBytes) + " bytes");
    }
    for (const Plane& plane : storage.planes) WEIGHTD_RETURN_IF_ERROR(use_section(plane.section, field));
    return storage.encoding == Encoding::kRaw ? check_raw_storage(storage, field) : check_f12_storage(storage, field);
  }

  uint64_t plane_bytes(const Storage& storage, size_t plane) const {
    return manifest_.sections[storage.planes[plane].section].size_bytes;
  }

  Status check_raw_storage(const Storage& storage, const std::string& field) const {
    if (storage.merged) return Status::corruption(field + ": raw storages are never merged");
    if (storage.geometry.n != 0 || storage.geometry.k != 0 || storage.geometry.batch != 0) {
      return Status::corruption(field + ": n, k and batch of a raw storage must be 0");
    }
    if (storage.escapes != 0 || storage.listed_groups != 0 || storage.dense_groups != 0) {
      return Status::corruption(field + ": escape counts of a raw storage must be 0");
    }
    if (storage.planes.size() != 1 || storage.planes[0].kind != PlaneKind::kRaw) {
      return Status::corruption(field + ": a raw storage has exactly one plane, of kind raw");
    }
    return expect_bytes(field + ": raw", plane_bytes(storage, 0), storage.logical_bytes);
  }

  static Status expect_bytes(const std::string& field, uint64_t have, uint64_t expected) {
    if (have == expected) return {};
    return Status::corruption(field + ": expected " + number(expected) + " bytes, have " + number(have));
  }

  Status check_f12_storage(const Storage& storage, const std::string& field) const {
    const f12::Geometry& g = storage.geometry;
    constexpr uint64_t kMaxSide = std::numeric_limits<uint32_t>::max();
    if (storage.dtype != DType::kBF16)
      return Status::corruption(field + ": f12 with dtype " + std::string(dtype_name(storage.dtype)));
    if (!storage.resident) return Status::corruption(field + ": f12 storages are resident");
    if (g.n == 0 || g.k == 0 || g.batch == 0 || g.n > kMaxSide || g.k > kMaxSide) {
      return Status::corruption(field + ": n, k or batch is out of range");
    }
    const uint64_t tiles = g.units() * g.tiles();  // below 2^54
    if (g.batch > (uint64_t{1} << 48) / tiles) return Status::corruption(field + ": more than 2^48 tiles");
    if (storage.merged && g.batch != 1) return Status::corruption(field + ": a merged storage has batch 1");
    WEIGHTD_RETURN_IF_ERROR(expect_bytes(field + ": logicalBytes", storage.logical_bytes, g.raw_bytes()));
    if (storage.planes.size() != 4) return Status::corruption(field + ": an f12 storage has four planes");
    for (size_t i = 0; i < 4; ++i) {
      if (storage.planes[i].kind != static_cast<PlaneKind>(i + 1)) {
        return Status::corruption(field + ": planes must be codes, windows, records, pool");
      }
    }
    WEIGHTD_RETURN_IF_ERROR(expect_bytes(field + ": codes", plane_bytes(storage, 0), g.codes_bytes()));
    WEIGHTD_RETURN_IF_ERROR(expect_bytes(field + ": windows", plane_bytes(storage, 1), g.windows_bytes()));
    WEIGHTD_RETURN_IF_ERROR(expect_bytes(field + ": records", plane_bytes(storage, 2), g.records_bytes()));
    if (plane_bytes(storage, 3) % f12::kPoolAlign != 0) return Status::corruption(field + ": pool is not a multiple of 16 bytes");
    return {};
  }

  Status check_section_use() const {
    const auto unused = std::find(section_used_.begin(), section_used_.end(), false);
    if (unused == section_used_.end()) return {};
    return Status::corruption("section " + number(static_cast<uint64_t>(unused - section_used_.begin())) + " belongs to nothing");
  }

  Status check_tensors() {
    use_.resize(manifest_.storages.size());
    uint64_t covered = 0;      // of the data area of `source`
    uint64_t last_offset = 0;  // of any tensor in it
    uint32_t source = 0;
    for (size_t i = 0; i < manifest_.tensors.size(); ++i) {
      const TensorRecord& tensor = manifest_.tensors[i];
      const std::string field = indexed_field("tensors", i) + " " + in_quotes(tensor.name);
      if (tensor.source >= manifest_.sources.size() || tensor.source < source || manifest_.sources[tensor.source].is_index) {
        return Status::corruption(field + ": source " + number(tensor.source) + " is out of range, out of order or an index");
      }
      for (; source < tensor.source; ++source, covered = 0, last_offset = 0)
        WEIGHTD_RETURN_IF_ERROR(check_covered(source, covered));
      WEIGHTD_RETURN_IF_ERROR(check_tensor(tensor, field));
      const uint64_t offset = tensor.source_offset_bytes;
      const uint64_t area = data_bytes(source);
      if (tensor.logical_bytes > 0 && (offset != covered || tensor.logical_bytes > area - covered)) {
        return Status::corruption(field + ": " + number(tensor.logical_bytes) + " bytes at " + number(offset) +
                                  ", expected to begin at " + number(covered) + " of a data area of " + number(area));
      }
      if (offset < last_offset || offset > area) return Status::corruption(field + ": the offset descends or leaves the data area");
      last_offset = offset;
      covered += tensor.logical_bytes;
    }
    for (; source < manifest_.sources.size(); ++source, covered = 0) WEIGHTD_RETURN_IF_ERROR(check_covered(source, covered));
    return {};
  }

  uint64_t data_bytes(uint32_t source) const {
    const SourceFile& file = manifest_.sources[source];
    return file.file_bytes - manifest_.sections[file.header_section].size_bytes;
  }

  Status check_covered(uint32_t source, uint64_t covered) const {
    return expect_bytes(indexed_field("sources", source) + " " + in_quotes(manifest_.sources[source].relative_name) + ": tensors",
                        covered, data_bytes(source));
  }

  Status check_tensor(const TensorRecord& tensor, const std::string& field) {
    if (tensor.name.size() > kMaxNameBytes || !is_utf8(tensor.name)) {
      return Status::corruption(field + ": the name is not UTF-8 of at most " + number(kMaxNameBytes) + " bytes");
    }
    if (tensor.storage >= manifest_.storages.size())
      return Status::corruption(field + ": storage " + number(tensor.storage) + " does not exist");
    const Storage& storage = manifest_.storages[tensor.storage];
    if (tensor.dtype != storage.dtype) return Status::corruption(field + ": its dtype differs from its storage's");
    WEIGHTD_RETURN_IF_ERROR(check_logical_bytes(tensor, field));
    StorageUse& use = use_[tensor.storage];
    use.named = true;
    use.indexed |= tensor.indexed;
    use.has_name |= tensor.name == storage.name;
    if (storage.merged) return check_merged_member(tensor, storage, field);
    if (tensor.row_begin != 0) return Status::corruption(field + ": rowBegin in a storage that is not merged");
    if (storage.encoding == Encoding::kRaw) return expect_bytes(field + ": logicalBytes", tensor.logical_bytes, storage.logical_bytes);
    return check_matrix_shape(tensor, storage, field);
  }

  static Status check_logical_bytes(const TensorRecord& tensor, const std::string& field) {
    if (tensor.shape.size() > kMaxRank) return Status::corruption(field + ": more than " + number(kMaxRank) + " dimensions");
    uint64_t bits = dtype_bits(tensor.dtype);
    const bool empty = std::find(tensor.shape.begin(), tensor.shape.end(), uint64_t{0}) != tensor.shape.end();
    if (empty) bits = 0;
    for (const uint64_t dimension : tensor.shape) {
      if (!empty && __builtin_mul_overflow(bits, dimension, &bits))
        return Status::corruption(field + ": the shape overflows 64 bits");
    }
    if (bits % 8 != 0) return Status::corruption(field + ": the shape is not a whole number of bytes");
    return expect_bytes(field + ": logicalBytes", tensor.logical_bytes, bits / 8);
  }

  Status check_merged_member(const TensorRecord& tensor, const Storage& storage, const std::string& field) {
    if (!tensor.indexed) return Status::corruption(field + ": a merged storage holds indexed tensors only");
    if (tensor.shape.size() != 2 || tensor.shape[1] != storage.geometry.k) {
      return Status::corruption(field + ": its shape does not fit a merged storage of " + number(storage.geometry.k) + " columns");
    }
    if (tensor.row_begin % f12::kUnitRows != 0 || tensor.shape[0] % f12::kUnitRows != 0 || tensor.row_begin > storage.geometry.n ||
        tensor.shape[0] > storage.geometry.n - tensor.row_begin) {
      return Status::corruption(field + ": its rows are not whole units inside the merged storage");
    }
    merged_rows_.push_back({tensor.storage, tensor.row_begin, tensor.row_begin + tensor.shape[0]});
    return {};
  }

  static Status check_matrix_shape(const TensorRecord& tensor, const Storage& storage, const std::string& field) {
    const size_t rank = tensor.shape.size();
    const f12::Geometry& g = storage.geometry;
    // The product of all dimensions fits (check_logical_bytes), so equal bytes and equal last dimensions give equal batches.
    if (rank < 2 || tensor.shape[rank - 1] != g.k || tensor.shape[rank - 2] != g.n ||
        tensor.logical_bytes != storage.logical_bytes) {
      return Status::corruption(field + ": shape " + shape_to_string(tensor.shape) + " does not fit the f12 storage");
    }
    return {};
  }

  Status check_merged_rows() {
    std::sort(merged_rows_.begin(), merged_rows_.end());
    size_t next = 0;
    for (uint32_t s = 0; s < manifest_.storages.size(); ++s) {
      const Storage& storage = manifest_.storages[s];
      if (!storage.merged) continue;
      uint64_t covered = 0;
      bool exact = true;
      for (; next < merged_rows_.size() && merged_rows_[next].storage == s; ++next) {
        exact &= merged_rows_[next].row_begin == covered && merged_rows_[next].row_end > covered;
        covered = merged_rows_[next].row_end;
      }
      if (!exact || covered != storage.geometry.n) {
        return Status::corruption(indexed_field("storages", s) + " " + in_quotes(storage.name) +
                                  ": its tensors do not cover its rows exactly");
      }
    }
    return {};
  }

  Status check_storage_use() const {
    for (size_t i = 0; i < use_.size(); ++i) {
      const Storage& storage = manifest_.storages[i];
      const std::string field = indexed_field("storages", i) + " " + in_quotes(storage.name);
      if (!use_[i].named) return Status::corruption(field + ": no tensor is stored in it");
      if (use_[i].indexed != storage.resident)
        return Status::corruption(field + ": resident must be true exactly for indexed tensors");
      if (!storage.merged && !use_[i].has_name) return Status::corruption(field + ": its name is not one of its tensors'");
    }
    return {};
  }

  Status check_names() const {
    std::vector<std::string_view> names;
    names.reserve(manifest_.tensors.size());
    for (const TensorRecord& tensor : manifest_.tensors) {
      if (tensor.indexed) names.push_back(tensor.name);
    }
    for (const Storage& storage : manifest_.storages) {
      if (storage.merged) names.push_back(storage.name);
    }
    std::sort(names.begin(), names.end());
    const auto twin = std::adjacent_find(names.begin(), names.end());
    if (twin != names.end()) return Status::corruption("the tensor name " + in_quotes(*twin) + " occurs twice");
    return {};
  }

  Status check_residencies() const {
    for (size_t i = 0; i < manifest_.residencies.size(); ++i) {
      const Residency& residency = manifest_.residencies[i];
      const std::string field = indexed_field("residencies", i) + " " + in_quotes(residency.form);
      if (!is_utf8(residency.form)) return Status::corruption(field + ": the form is not UTF-8");
      for (size_t j = 0; j < i; ++j) {
        if (manifest_.residencies[j].form == residency.form) return Status::corruption(field + ": the form occurs twice");
      }
      WEIGHTD_RETURN_IF_ERROR(residency.form == kFastForm ? check_fast(residency, field) : check_other_form(residency, field));
    }
    return {};
  }

  Status check_fast(const Residency& residency, const std::string& field) const {
    const Residency plan = plan_residency(manifest_);
    if (residency.placements.size() != plan.placements.size()) {
      return Status::corruption(field + ": expected " + number(plan.placements.size()) + " placements, have " +
                                number(residency.placements.size()));
    }
    for (size_t i = 0; i < plan.placements.size(); ++i) {
      const Placement& have = residency.placements[i];
      const Placement& want = plan.placements[i];
      if (have.storage != want.storage || have.kind != want.kind || have.arena_offset_bytes != want.arena_offset_bytes ||
          have.size_bytes != want.size_bytes) {
        return Status::corruption(field + ": " + indexed_field("placements", i) + ": expected " +
                                  std::string(plane_name(want.kind)) + " of storage " + number(want.storage) + ", " +
                                  number(want.size_bytes) + " bytes at " + number(want.arena_offset_bytes));
      }
    }
    WEIGHTD_RETURN_IF_ERROR(expect_bytes(field + ": poolOffsetBytes", residency.pool_offset_bytes, plan.pool_offset_bytes));
    WEIGHTD_RETURN_IF_ERROR(expect_bytes(field + ": poolBytes", residency.pool_bytes, plan.pool_bytes));
    WEIGHTD_RETURN_IF_ERROR(expect_bytes(field + ": arenaBytes", residency.arena_bytes, plan.arena_bytes));
    return check_block_hashes(residency, field);
  }

  static Status check_block_hashes(const Residency& residency, const std::string& field) {
    if (residency.arena_bytes % kBlockBytes != 0) return Status::corruption(field + ": arenaBytes is not a multiple of 2^20");
    if (residency.block_hashes.size() == residency.arena_bytes / kBlockBytes) return {};
    return Status::corruption(field + ": expected " + number(residency.arena_bytes / kBlockBytes) + " block hashes, have " +
                              number(residency.block_hashes.size()));
  }

  Status check_other_form(const Residency& residency, const std::string& field) const {
    uint64_t end = 0;
    for (size_t i = 0; i < residency.placements.size(); ++i) {
      const Placement& placement = residency.placements[i];
      if (placement.storage >= manifest_.storages.size() || placement.arena_offset_bytes < end ||
          placement.arena_offset_bytes > residency.arena_bytes ||
          placement.size_bytes > residency.arena_bytes - placement.arena_offset_bytes) {
        return Status::corruption(field + ": " + indexed_field("placements", i) + " is outside the arena or out of order");
      }
      end = placement.arena_offset_bytes + placement.size_bytes;
    }
    return check_block_hashes(residency, field);
  }

  const Manifest& manifest_;
  const uint64_t manifest_offset_;
  std::vector<bool> section_used_;
  std::vector<StorageUse> use_;
  std::vector<MergedRows> merged_rows_;
};

}  // namespace

// --- header --------------------------------------------------------------------------------------------------------------

std::array<std::byte, kHeaderBytes> encode_header(const BundleHeader& header) {
  std::array<std::byte, kHeaderBytes> bytes{};
  std::memcpy(bytes.data(), kMagic.data(), kMagic.size());
  put(bytes, kVersionOffset, header.major);
  put(bytes, kVersionOffset + 2, header.minor);
  put(bytes, kVersionOffset + 4, static_cast<uint32_t>(kHeaderBytes));
  put(bytes, kFileBytesOffset, header.file_bytes);
  put(bytes, kFileBytesOffset + 8, header.manifest_offset_bytes);
  put(bytes, kFileBytesOffset + 16, header.manifest_bytes);
  std::memcpy(bytes.data() + kManifestShaOffset, header.manifest_sha.data(), header.manifest_sha.size());
  const Xxh128 hash = xxh128(std::span(bytes).first(kHashOffset));
  put(bytes, kHashOffset, hash.low);
  put(bytes, kHashOffset + 8, hash.high);
  return bytes;
}

Result<BundleHeader> decode_header(std::span<const std::byte> head, uint64_t real_file_bytes, std::string_view name) {
  const std::string file(name);
  const size_t magic_bytes = std::min(head.size(), kMagic.size());
  if (magic_bytes > 0 && std::memcmp(head.data(), kMagic.data(), magic_bytes) != 0) {
    return Status::corruption(file + ": not a weightd bundle: the file does not begin with the magic of one");
  }
  if (head.size() < kHeaderBytes) {
    return Status::corruption(file + ": header: expected " + number(kHeaderBytes) + " bytes, have " + number(real_file_bytes) +
                              ": the file is truncated");
  }
  head = head.first(kHeaderBytes);
  const Xxh128 hash = xxh128(head.first(kHashOffset));
  const Xxh128 stored{get<uint64_t>(head, kHashOffset), get<uint64_t>(head, kHashOffset + 8)};
  if (hash != stored) {
    return Status::corruption(file + ": header: XXH3-128 is " + to_hex(hash) + ", the header says " + to_hex(stored));
  }
  BundleHeader header;
  header.major = get<uint16_t>(head, kVersionOffset);
  header.minor = get<uint16_t>(head, kVersionOffset + 2);
  if (header.major != kFormatMajor) {
    return Status::unsupported(file + ": bundle format " + number(header.major) + "." + number(header.minor) +
                               ", this version reads " + number(kFormatMajor) + ".x");
  }
  if (get<uint32_t>(head, kVersionOffset + 4) != kHeaderBytes)
    return Status::corruption(file + ": header: header_bytes must be 4096");
  if (!all_zero(head.subspan(kReservedOffset, kHashOffset - kReservedOffset))) {
    return Status::corruption(file + ": header: reserved bytes must be 0");
  }
  header.file_bytes = get<uint64_t>(head, kFileBytesOffset);
  header.manifest_offset_bytes = get<uint64_t>(head, kFileBytesOffset + 8);
  header.manifest_bytes = get<uint64_t>(head, kFileBytesOffset + 16);
  std::memcpy(header.manifest_sha.data(), head.data() + kManifestShaOffset, header.manifest_sha.size());
  if (header.file_bytes != real_file_bytes) {
    return Status::corruption(file + ": expected " + number(header.file_bytes) + " bytes, have " + number(real_file_bytes) +
                              (real_file_bytes < header.file_bytes ? ": the file is truncated" : ": bytes after the end"));
  }
  if (header.manifest_bytes > kMaxManifestBytes || header.manifest_bytes > header.file_bytes ||
      header.manifest_offset_bytes != header.file_bytes - header.manifest_bytes ||
      header.manifest_offset_bytes % kSectionAlign != 0 || header.manifest_offset_bytes < kHeaderBytes) {
    return Status::corruption(file + ": header: manifest of " + number(header.manifest_bytes) + " bytes at " +
                              number(header.manifest_offset_bytes) + " does not end a file of " + number(header.file_bytes) +
                              " bytes");
  }
  return header;
}

// --- manifest ------------------------------------------------------------------------------------------------------------

Result<std::vector<std::byte>> encode_manifest(const Manifest& manifest) {
  try {
    capnp::MallocMessageBuilder builder;
    write_manifest(builder.initRoot<wire::Manifest>(), manifest);
    const uint64_t rough_bytes = builder.sizeInWords() * sizeof(capnp::word);
    if (rough_bytes > kMaxManifestBytes) {
      return Status::unsupported("the manifest takes " + number(rough_bytes) + " bytes, at most " + number(kMaxManifestBytes) +
                                 " are allowed");
    }
    const kj::Array<capnp::word> words = capnp::canonicalize(builder.getRoot<wire::Manifest>().asReader());
    std::vector<std::byte> bytes(8 + words.asBytes().size());
    put(bytes, 0, uint32_t{0});
    put(bytes, 4, static_cast<uint32_t>(words.size()));
    std::memcpy(bytes.data() + 8, words.asBytes().begin(), words.asBytes().size());
    return bytes;
  } catch (const kj::Exception& exception) {
    return Status::internal(std::string("manifest: ") + exception.getDescription().cStr());
  } catch (const std::exception& exception) {
    return Status::resource_exhausted(std::string("manifest: ") + exception.what());
  }
}

Result<Manifest> decode_manifest(std::span<const std::byte> bytes, std::string_view name) {
  const std::string context = std::string(name) + ": manifest";
  if (bytes.size() < 16 || bytes.size() % 8 != 0 || bytes.size() > kMaxManifestBytes || get<uint32_t>(bytes, 0) != 0 ||
      get<uint32_t>(bytes, 4) != bytes.size() / 8 - 1) {
    return Status::corruption(context + ": expected one segment that fills " + number(bytes.size()) + " bytes");
  }
  const size_t word_count = bytes.size() / 8 - 1;
  kj::Array<capnp::word> copy;
  const auto* words = reinterpret_cast<const capnp::word*>(bytes.data() + 8);
  if (reinterpret_cast<uintptr_t>(words) % alignof(capnp::word) != 0) {
    copy = kj::heapArray<capnp::word>(word_count);
    std::memcpy(copy.begin(), bytes.data() + 8, word_count * 8);
    words = copy.begin();
  }
  try {
    const kj::ArrayPtr<const capnp::word> segment(words, word_count);
    // Every object is read once, so a sound message never passes its own size.
    capnp::SegmentArrayMessageReader reader(kj::arrayPtr(&segment, 1), {word_count + 64, kNestingLimit});
    return read_manifest(reader.getRoot<wire::Manifest>());
  } catch (const Refusal& refusal) {
    return refusal.status.with_context(context);
  } catch (const kj::Exception& exception) {
    return Status::corruption(context + ": " + printable(exception.getDescription().cStr()));
  } catch (const std::exception& exception) {
    return Status::resource_exhausted(context + ": " + exception.what());
  }
}

Status validate_manifest(const Manifest& manifest, uint64_t manifest_offset_bytes, std::string_view name) {
  return Validator(manifest, manifest_offset_bytes).run().with_context(std::string(name) + ": manifest");
}

Residency plan_residency(const Manifest& manifest) {
  Residency residency;
  residency.form = kFastForm;
  uint64_t position = 0;
  for (uint32_t s = 0; s < manifest.storages.size(); ++s) {
    if (!manifest.storages[s].resident) continue;
    for (const Plane& plane : manifest.storages[s].planes) {
      if (plane.kind == PlaneKind::kPool) continue;
      position = f12::align_up(position, kArenaAlign);
      const uint64_t bytes = manifest.sections[plane.section].size_bytes;
      residency.placements.push_back({s, plane.kind, position, bytes});
      position += bytes;
    }
  }
  residency.pool_offset_bytes = f12::align_up(position, kArenaAlign);
  for (uint32_t s = 0; s < manifest.storages.size(); ++s) {
    if (!manifest.storages[s].resident) continue;
    for (const Plane& plane : manifest.storages[s].planes) {
      if (plane.kind != PlaneKind::kPool) continue;
      const uint64_t bytes = manifest.sections[plane.section].size_bytes;
      residency.placements.push_back({s, plane.kind, residency.pool_offset_bytes + residency.pool_bytes, bytes});
      residency.pool_bytes += bytes;
    }
  }
  residency.arena_bytes = f12::align_up(residency.pool_offset_bytes + residency.pool_bytes, kBlockBytes);
  return residency;
}

std::vector<uint64_t> pool_bases(const Manifest& manifest) {
  std::vector<uint64_t> bases(manifest.storages.size(), 0);
  uint64_t base = 0;
  for (size_t s = 0; s < bases.size(); ++s) {
    const Storage& storage = manifest.storages[s];
    if (storage.encoding != Encoding::kF12) continue;
    bases[s] = base;
    base += manifest.sections[storage.planes.back().section].size_bytes;
  }
  return bases;
}

bool is_safe_relative_name(std::string_view name) {
  if (name.empty() || name.size() > 4095 || !is_utf8(name) || name.find('\0') != std::string_view::npos) return false;
  for (size_t begin = 0; begin <= name.size();) {
    const size_t end = std::min(name.find('/', begin), name.size());
    const std::string_view part = name.substr(begin, end - begin);
    if (part.empty() || part.size() > 255 || part == "." || part == "..") return false;
    begin = end + 1;
  }
  return true;
}

std::string_view plane_name(PlaneKind kind) {
  switch (kind) {
    case PlaneKind::kRaw:
      return "raw";
    case PlaneKind::kCodes:
      return "codes";
    case PlaneKind::kWindows:
      return "windows";
    case PlaneKind::kRecords:
      return "records";
    case PlaneKind::kPool:
      return "pool";
  }
  return "unknown";
}

Sha256 compute_tensors_id(const std::vector<TensorRecord>& tensors) {
  std::vector<const TensorRecord*> sorted;
  sorted.reserve(tensors.size());
  for (const TensorRecord& tensor : tensors) {
    if (tensor.indexed) sorted.push_back(&tensor);
  }
  std::sort(sorted.begin(), sorted.end(), [](const TensorRecord* a, const TensorRecord* b) { return a->name < b->name; });
  Sha256Stream stream;
  std::vector<std::byte> buffer;
  const auto add_bytes = [&](std::string_view text) {
    const auto* begin = reinterpret_cast<const std::byte*>(text.data());
    buffer.insert(buffer.end(), begin, begin + text.size());
  };
  const auto add = [&](uint64_t value) { add_bytes({reinterpret_cast<const char*>(&value), sizeof(value)}); };
  add_bytes({"weightd tensors\0", 16});
  add(sorted.size());
  for (const TensorRecord* tensor : sorted) {
    add(tensor->name.size());
    add_bytes(tensor->name);
    add(static_cast<uint64_t>(tensor->dtype));
    add(tensor->shape.size());
    for (const uint64_t dimension : tensor->shape) add(dimension);
    add(tensor->logical_bytes);
    add(tensor->logical_xxh.low);
    add(tensor->logical_xxh.high);
    stream.update(buffer);
    buffer.clear();
  }
  stream.update(buffer);
  return stream.finish();
}

}  // namespace weightd::store
