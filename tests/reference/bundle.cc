// SPDX-License-Identifier: Apache-2.0
#include "tests/reference/bundle.h"

#include <openssl/evp.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>

#include "tests/reference/wire.h"

namespace weightd::reference {
namespace {

using Owned = std::vector<unsigned char>;
constexpr uint64_t kBlock = uint64_t{1} << 20;
enum : uint64_t { kRaw = 0, kF12 = 1 };  // section 4.1, Storage.encoding

void demand(bool rule, const std::string& text) {
  if (!rule) throw std::runtime_error(text);
}

uint64_t align(uint64_t value, uint64_t step) { return (value + step - 1) / step * step; }
uint64_t ceil_div(uint64_t value, uint64_t step) { return (value + step - 1) / step; }

Owned sha256(Bytes data) {
  Owned digest(32);
  demand(EVP_Digest(data.data(), data.size(), digest.data(), nullptr, EVP_sha256(), nullptr) == 1, "SHA-256 failed");
  return digest;
}

bool xxh_matches(Bytes data, uint64_t low, uint64_t high) {
  const XXH128_hash_t hash = XXH3_128bits(data.data(), data.size());
  return hash.low64 == low && hash.high64 == high;
}

std::string hexadecimal(Bytes data) {
  std::string text;
  for (const unsigned char byte : data) {
    constexpr char kDigits[] = "0123456789abcdef";
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

Owned read_all(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  demand(file.good(), path + ": cannot read");
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

/// Section 3: the header's rules in their order; gives the manifest's bytes.
Bytes checked_manifest(Bytes file) {
  constexpr std::array<unsigned char, 8> kMagic = {0x89, 0x57, 0x50, 0x4B, 0x0D, 0x0A, 0x1A, 0x0A};
  demand(file.size() >= 4096 && std::equal(kMagic.begin(), kMagic.end(), file.begin()), "header: magic");
  demand(xxh_matches(file.first(0xFF0), load(file, 0xFF0, 8), load(file, 0xFF8, 8)), "header: checksum");
  demand(load(file, 8, 2) == 1, "header: unsupported major version");
  demand(load(file, 0x0C, 4) == 4096, "header: size");
  demand(std::all_of(file.begin() + 0x48, file.begin() + 0xFF0, [](unsigned char b) { return b == 0; }), "header: reserved bytes");
  demand(load(file, 0x10, 8) == file.size(), "header: file size");
  const uint64_t offset = load(file, 0x18, 8), bytes = load(file, 0x20, 8);
  demand(offset % 4096 == 0 && bytes <= (1U << 30) && offset <= file.size() && file.size() - offset == bytes, "header: manifest range");
  const Bytes manifest = file.subspan(offset, bytes);
  demand(sha256(manifest) == Owned(file.begin() + 0x28, file.begin() + 0x48), "header: SHA-256 of the manifest");
  return manifest;
}

/// Sections 2 and 4.1: where each data section lies; checks both hashes and the zero padding behind it.
std::vector<Bytes> checked_sections(Bytes file, const Wire& manifest) {
  std::vector<Bytes> sections;
  uint64_t next = 4096;
  for (const Wire& section : manifest.structs(3)) {
    const uint64_t offset = section.number(0, 8), size = section.number(8, 8);
    demand(offset == next, "section: offset");
    demand(offset <= file.size() && size <= file.size() - offset, "section: range");
    const Bytes bytes = file.subspan(offset, size);
    demand(xxh_matches(bytes, section.number(16, 8), section.number(24, 8)), "section: XXH3-128");
    demand(section.data(0) == sha256(bytes), "section: SHA-256");
    next = align(offset + size, 4096);
    for (uint64_t i = offset + size; i < next; ++i) demand(file[i] == 0, "section: padding");
    sections.push_back(bytes);
  }
  demand(next == load(file, 0x18, 8), "the manifest does not follow the last section");
  return sections;
}

/// The planes of one f12 storage and where its part of the model's pool begins.
struct F12 {
  uint64_t n = 0, k = 0, batch = 0;
  Bytes codes, windows, records, pool;
  uint64_t pool_begin = 0;
  [[nodiscard]] uint64_t units() const { return ceil_div(n, 16); }
  [[nodiscard]] uint64_t tiles() const { return ceil_div(k, 64); }
  [[nodiscard]] uint64_t groups() const { return ceil_div(tiles(), 8); }
};

/// True high bytes of one tile, in scratch order, where the record gives them; -1 elsewhere (section 6.4).
using Patches = std::array<int, 1024>;

std::vector<Patches> group_patches(const F12& f, uint64_t record_index, uint64_t group) {
  const Bytes record = f.records.subspan(record_index * 32, 32);
  const uint64_t count = record[7], existing = std::min<uint64_t>(8, f.tiles() - group * 8);
  std::vector<Patches> patches(existing);
  for (Patches& tile : patches) tile.fill(-1);
  const uint64_t offset = load(record, 8, 4) * 16 - f.pool_begin;  // wraps for inline records, where it is not used
  if (count == 255) {
    for (uint64_t t = 0; t < existing; ++t) {
      for (uint64_t pos = 0; pos < 1024; ++pos) patches[t][pos] = static_cast<int>(load(f.pool, offset + t * 1024 + pos, 1));
    }
    return patches;
  }
  uint64_t entry_index = 0;
  for (uint64_t t = 0; t < existing; ++t) {
    for (; entry_index < record[t]; ++entry_index) {
      const uint64_t entry = count <= 6 ? load(record, 8 + entry_index * 4, 4) : load(f.pool, offset + entry_index * 4, 4);
      demand((entry & 0xFF00FC00U) == 0, "entry: reserved bits");
      patches[t][entry & 1023] = static_cast<int>(entry >> 16);
    }
  }
  demand(entry_index == count, "record: counts");
  return patches;
}

/// Section 6.3 for one tile: writes its words that are inside the matrix.
void decode_tile(const F12& f, uint64_t matrix, uint64_t unit, uint64_t tile, const Patches& patches, std::vector<uint16_t>& words) {
  const uint64_t unit_index = matrix * f.units() + unit;
  const Bytes codes = f.codes.subspan((unit_index * f.tiles() + tile) * 1536, 1536);
  for (uint64_t lane = 0; lane < 32; ++lane) {
    for (uint64_t j = 0; j < 4; ++j) {
      const auto c = static_cast<uint32_t>(load(codes, 1024 + lane * 16 + j * 4, 4));
      const uint32_t nibbles[2] = {c & 0x87878787U, ((c << 4) | (c >> 28)) & 0x87878787U};
      for (uint64_t half = 0; half < 2; ++half) {
        for (uint64_t b = 0; b < 4; ++b) {
          const uint64_t row = 16 * unit + lane / 4 + 8 * half;
          const uint64_t column = 64 * tile + 16 * j + 2 * (lane % 4) + 8 * (b / 2) + b % 2;
          const uint32_t nibble = (nibbles[half] >> (8 * b)) & 0xFF;
          uint32_t high = nibble + f.windows[unit_index * 16 + row % 16];
          const int patch = patches[half * 512 + lane * 16 + j * 4 + b];
          if (patch >= 0) high = static_cast<uint32_t>(patch);
          const uint32_t low = codes[half * 512 + lane * 16 + j * 4 + b];
          if (row < f.n && column < f.k) words[(matrix * f.n + row) * f.k + column] = static_cast<uint16_t>(high << 8 | low);
        }
      }
    }
  }
}

Owned decode_f12(const F12& f) {
  std::vector<uint16_t> words(f.batch * f.n * f.k);
  for (uint64_t matrix = 0; matrix < f.batch; ++matrix) {
    for (uint64_t unit = 0; unit < f.units(); ++unit) {
      for (uint64_t group = 0; group < f.groups(); ++group) {
        const auto patches = group_patches(f, (matrix * f.units() + unit) * f.groups() + group, group);
        for (uint64_t t = 0; t < patches.size(); ++t) decode_tile(f, matrix, unit, group * 8 + t, patches[t], words);
      }
    }
  }
  Owned bytes(words.size() * 2);
  for (size_t i = 0; i < words.size(); ++i) {
    bytes[2 * i] = static_cast<unsigned char>(words[i] & 0xFF);
    bytes[2 * i + 1] = static_cast<unsigned char>(words[i] >> 8);
  }
  return bytes;
}

struct StorageData {
  uint64_t encoding = 0, k = 0;
  bool resident = false;
  std::vector<Bytes> planes;
  Owned decoded;
};

std::vector<StorageData> decode_storages(const Wire& manifest, const std::vector<Bytes>& sections) {
  std::vector<StorageData> storages;
  uint64_t pool_begin = 0;
  for (const Wire& wire : manifest.structs(4)) {
    StorageData storage;
    storage.encoding = wire.number(0, 2);
    storage.k = wire.number(16, 8);
    storage.resident = wire.bit(4, 1);
    for (const Wire& plane : wire.structs(1)) storage.planes.push_back(sections.at(plane.number(0, 4)));
    if (storage.encoding == kRaw) {
      demand(storage.planes.size() == 1, "raw storage: planes");
      storage.decoded.assign(storage.planes[0].begin(), storage.planes[0].end());
    } else {
      demand(storage.encoding == kF12 && storage.planes.size() == 4, "f12 storage: planes");
      F12 f{wire.number(8, 8), storage.k, wire.number(24, 8), storage.planes[0], storage.planes[1], storage.planes[2], storage.planes[3], pool_begin};
      demand(f.codes.size() == f.batch * f.units() * f.tiles() * 1536, "f12 storage: size of the codes");
      demand(f.windows.size() == f.batch * f.units() * 16, "f12 storage: size of the windows");
      demand(f.records.size() == f.batch * f.units() * f.groups() * 32, "f12 storage: size of the records");
      storage.decoded = decode_f12(f);
      pool_begin += f.pool.size();
    }
    demand(storage.decoded.size() == wire.number(32, 8), "storage: logical bytes");
    storages.push_back(std::move(storage));
  }
  return storages;
}

/// Section 5: lays the planes out by the rules, not by the placements, and compares the block hashes.
uint64_t checked_arena(const Wire& manifest, const std::vector<StorageData>& storages) {
  for (const Wire& residency : manifest.structs(6)) {
    if (residency.text(0) != "fast") continue;
    Owned arena;
    const auto place = [&](Bytes plane, uint64_t alignment) {
      arena.resize(align(arena.size(), alignment));
      arena.insert(arena.end(), plane.begin(), plane.end());
    };
    for (const StorageData& s : storages) {
      const size_t fixed = s.encoding == kF12 ? 3 : 1;
      for (size_t i = 0; s.resident && i < fixed; ++i) place(s.planes[i], 256);
    }
    arena.resize(align(arena.size(), 256));
    demand(residency.number(8, 8) == arena.size(), "residency: pool offset");
    for (const StorageData& s : storages) {
      if (s.resident && s.encoding == kF12) place(s.planes[3], 1);
    }
    arena.resize(align(arena.size(), kBlock));
    demand(residency.number(0, 8) == arena.size(), "residency: arena bytes");
    const std::vector<uint64_t> hashes = residency.numbers(2);
    demand(hashes.size() == arena.size() / kBlock, "residency: number of block hashes");
    for (size_t i = 0; i < hashes.size(); ++i) demand(XXH3_64bits(arena.data() + i * kBlock, kBlock) == hashes[i], "residency: block hash");
    return arena.size();
  }
  throw std::runtime_error("no residency 'fast'");
}

const std::map<uint64_t, std::string>& dtype_names() {
  static const std::map<uint64_t, std::string> kNames = {
      {0, "BOOL"}, {1, "F4"}, {2, "F6_E2M3"}, {3, "F6_E3M2"}, {4, "U8"}, {5, "I8"}, {6, "F8_E5M2"}, {7, "F8_E4M3"},
      {8, "F8_E8M0"}, {9, "I16"}, {10, "U16"}, {11, "F16"}, {12, "BF16"}, {13, "I32"}, {14, "U32"}, {15, "F32"},
      {16, "C64"}, {17, "F64"}, {18, "I64"}, {19, "U64"}, {20, "F8_E4M3FNUZ"}, {21, "F8_E5M2FNUZ"}};
  return kNames;
}

/// Section 7: the files, from headers and decoded tensors.
void restore(const Wire& manifest, const std::vector<Bytes>& sections, const std::vector<StorageData>& storages, DecodedBundle& out) {
  const std::vector<Wire> sources = manifest.structs(2);
  std::vector<Owned> files;
  for (const Wire& source : sources) {
    const Bytes header = sections.at(source.number(8, 4));
    Owned file(header.begin(), header.end());
    file.resize(source.number(0, 8));
    files.push_back(std::move(file));
  }
  for (const Wire& wire : manifest.structs(5)) {
    const StorageData& storage = storages.at(wire.number(4, 4));
    const uint64_t begin = wire.number(8, 8) * storage.k * 2, bytes = wire.number(32, 8);
    demand(begin <= storage.decoded.size() && bytes <= storage.decoded.size() - begin, "tensor: rows");
    const Bytes data = Bytes(storage.decoded).subspan(begin, bytes);
    demand(xxh_matches(data, wire.number(40, 8), wire.number(48, 8)), "tensor: XXH3-128 of the original bytes");
    Owned& file = files.at(wire.number(16, 4));
    const uint64_t at = sections.at(sources.at(wire.number(16, 4)).number(8, 4)).size() + wire.number(24, 8);
    demand(at <= file.size() && bytes <= file.size() - at, "tensor: place in its file");
    std::copy(data.begin(), data.end(), file.begin() + static_cast<int64_t>(at));
    if (wire.bit(2, 0)) {
      const bool fresh = out.tensors.try_emplace(wire.text(0), SourceTensor{dtype_names().at(wire.number(0, 2)), wire.numbers(1), {data.begin(), data.end()}}).second;
      demand(fresh, "tensor: name twice");
    }
  }
  for (size_t i = 0; i < files.size(); ++i) {
    demand(sha256(files[i]) == sources[i].data(1), "source: SHA-256 of the restored file " + sources[i].text(0));
    out.files[sources[i].text(0)] = std::move(files[i]);
  }
}

}  // namespace

DecodedBundle decode_bundle(const std::string& path) {
  const Owned file = read_all(path);
  const Bytes manifest_bytes = checked_manifest(file);
  const Wire manifest = Wire::root(manifest_bytes);
  DecodedBundle out;
  out.content_id = hexadecimal(sha256(manifest_bytes));
  const std::vector<Bytes> sections = checked_sections(file, manifest);
  const std::vector<StorageData> storages = decode_storages(manifest, sections);
  out.arena_bytes = checked_arena(manifest, storages);
  restore(manifest, sections, storages, out);
  return out;
}

}  // namespace weightd::reference
