// SPDX-License-Identifier: Apache-2.0
#include <sys/mman.h>

#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/fd.h"
#include "store/checkpoint.h"
#include "tests/support/safetensors_builder.h"

namespace weightd::store {
namespace {

/// One line for people, whatever the input says.
void check_refusal(const Status& status) {
  WEIGHTD_CHECK(status.code() != StatusCode::kInternal);
  WEIGHTD_CHECK(!status.message().empty() && status.message().size() < 100'000);
  for (const char c : status.message()) WEIGHTD_CHECK(static_cast<unsigned char>(c) >= 0x20 && c != 0x7F);
}

/// What the header's contract promises, checked in the plainest way.
void check_header(const SafetensorsHeader& header, uint64_t file_bytes) {
  WEIGHTD_CHECK(header.json.size() == header.header_bytes);
  WEIGHTD_CHECK(8 + header.header_bytes + header.data_bytes == file_bytes);
  std::set<std::string_view> names;
  uint64_t sum = 0;
  for (const SafetensorsEntry& entry : header.entries) {
    WEIGHTD_CHECK(names.insert(entry.name).second);
    WEIGHTD_CHECK(entry.name != "__metadata__" && entry.name.size() <= kMaxNameBytes && entry.shape.size() <= kMaxRank);
    WEIGHTD_CHECK(entry.offset_bytes <= header.data_bytes && entry.size_bytes <= header.data_bytes - entry.offset_bytes);
    unsigned __int128 bits = dtype_bits(entry.dtype);
    for (const uint64_t dim : entry.shape) bits *= dim;  // a product below 2^64 by contract
    WEIGHTD_CHECK(bits == static_cast<unsigned __int128>(entry.size_bytes) * 8);
    sum += entry.size_bytes;
    for (const SafetensorsEntry& other : header.entries) {
      const bool apart = &other == &entry || entry.size_bytes == 0 || other.offset_bytes + other.size_bytes <= entry.offset_bytes ||
                         other.offset_bytes >= entry.offset_bytes + entry.size_bytes;
      WEIGHTD_CHECK(apart);
    }
  }
  WEIGHTD_CHECK(sum == header.data_bytes);
}

void try_file(std::string_view bytes) {
  const UniqueFd fd(::memfd_create("fuzz", MFD_CLOEXEC));
  WEIGHTD_CHECK(pwrite_full(fd.get(), testing::as_bytes(bytes), 0, "fuzz").ok());
  const Result<SafetensorsHeader> header = read_safetensors_header(fd.get(), bytes.size(), "fuzz");
  if (header.ok()) {
    check_header(*header, bytes.size());
  } else {
    check_refusal(header.status());
  }
}

void try_index(std::string_view text) {
  const Result<std::vector<IndexEntry>> index = parse_checkpoint_index(text, "fuzz");
  if (!index.ok()) return check_refusal(index.status());
  std::set<std::string_view> tensors;
  for (const IndexEntry& entry : *index) {
    WEIGHTD_CHECK(tensors.insert(entry.tensor).second);
    // With slashes around, each forbidden part has one spelling.
    const std::string path = "/" + entry.shard + "/";
    for (const char* part : {"//", "/./", "/../", "\\"}) WEIGHTD_CHECK(path.find(part) == std::string::npos);
    WEIGHTD_CHECK(path.find('\0') == std::string::npos);
  }
}

}  // namespace
}  // namespace weightd::store

/// A text that begins with a brace is an index, anything else a safetensors file.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  if (input.starts_with('{')) {
    weightd::store::try_index(input);
  } else {
    weightd::store::try_file(input);
  }
  return 0;
}
