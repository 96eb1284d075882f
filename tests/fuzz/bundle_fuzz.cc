// SPDX-License-Identifier: Apache-2.0
#include <sys/mman.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "base/fd.h"
#include "store/bundle.h"
#include "store/manifest.h"

namespace weightd::store {
namespace {

std::span<const std::byte> as_bytes(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

/// One line for people, whatever the input says.
void check_refusal(const Status& status) {
  WEIGHTD_CHECK(status.code() == StatusCode::kCorruption || status.code() == StatusCode::kUnsupported);
  WEIGHTD_CHECK(!status.message().empty() && status.message().size() < 100'000);
  for (const char c : status.message()) WEIGHTD_CHECK(static_cast<unsigned char>(c) >= 0x20 && c != 0x7F);
}

uint64_t end_of_sections(const Manifest& manifest) {
  if (manifest.sections.empty()) return kHeaderBytes;
  const Section& last = manifest.sections.back();
  return (last.offset_bytes + last.size_bytes + kSectionAlign - 1) / kSectionAlign * kSectionAlign;
}

/// What a reader relies on, checked in the plainest way.
void check_manifest(const Manifest& manifest) {
  for (const Storage& storage : manifest.storages) {
    for (const Plane& plane : storage.planes) WEIGHTD_CHECK(plane.section < manifest.sections.size());
  }
  for (const TensorRecord& tensor : manifest.tensors) {
    WEIGHTD_CHECK(tensor.storage < manifest.storages.size() && tensor.source < manifest.sources.size());
    const Storage& storage = manifest.storages[tensor.storage];
    WEIGHTD_CHECK(tensor.logical_bytes <= storage.logical_bytes);
    if (storage.merged) WEIGHTD_CHECK(tensor.row_begin + tensor.shape.at(0) <= storage.geometry.n);
  }
  for (const Residency& residency : manifest.residencies) {
    uint64_t end = 0;
    for (const Placement& placement : residency.placements) {
      WEIGHTD_CHECK(placement.storage < manifest.storages.size() && placement.arena_offset_bytes >= end);
      end = placement.arena_offset_bytes + placement.size_bytes;
      WEIGHTD_CHECK(end >= placement.arena_offset_bytes && end <= residency.arena_bytes);
    }
  }
  const Result<std::vector<std::byte>> bytes = encode_manifest(manifest);
  WEIGHTD_CHECK(bytes.ok());
  const Result<Manifest> again = decode_manifest(*bytes, "again");
  WEIGHTD_CHECK(again.ok() && *encode_manifest(*again) == *bytes);
}

void try_manifest(std::string_view bytes) {
  const Result<Manifest> manifest = decode_manifest(as_bytes(bytes), "fuzz");
  if (!manifest.ok()) return check_refusal(manifest.status());
  const uint64_t offset = end_of_sections(*manifest);
  if (offset < kHeaderBytes) return;
  const Status valid = validate_manifest(*manifest, offset, "fuzz");
  if (!valid.ok()) return check_refusal(valid);
  check_manifest(*manifest);
}

/// A header whose own hash is right.
void try_header(std::string_view bytes) {
  std::array<std::byte, kHeaderBytes> head{};
  std::memcpy(head.data(), bytes.data(), std::min(bytes.size(), head.size()));
  const Xxh128 hash = xxh128(std::span(head).first(kHeaderBytes - 16));
  std::memcpy(head.data() + kHeaderBytes - 16, &hash.low, 8);
  std::memcpy(head.data() + kHeaderBytes - 8, &hash.high, 8);
  uint64_t file_bytes = 0;
  std::memcpy(&file_bytes, head.data() + 16, 8);
  const Result<BundleHeader> header = decode_header(head, file_bytes, "fuzz");
  if (!header.ok()) return check_refusal(header.status());
  WEIGHTD_CHECK(header->manifest_offset_bytes + header->manifest_bytes == file_bytes);
}

void read_everything(const BundleReader& bundle) {
  for (uint32_t s = 0; s < bundle.manifest().sections.size(); ++s) {
    if (const Status status = bundle.check_section(s, true); !status.ok()) check_refusal(status);
  }
  for (const TensorRecord& tensor : bundle.manifest().tensors) {
    std::vector<std::byte> out(tensor.logical_bytes);
    if (const Status status = bundle.decode_tensor(tensor, out, 1); !status.ok()) check_refusal(status);
  }
}

/// u32 size of the manifest, the manifest, the data sections; the header is made to fit.
void try_file(std::string_view bytes) {
  uint32_t manifest_bytes = 0;
  if (bytes.size() < sizeof manifest_bytes) return;
  std::memcpy(&manifest_bytes, bytes.data(), sizeof manifest_bytes);
  bytes.remove_prefix(sizeof manifest_bytes);
  const std::string_view manifest = bytes.substr(0, manifest_bytes);
  const std::string_view sections = bytes.substr(manifest.size());
  BundleHeader header;
  header.manifest_offset_bytes = kHeaderBytes + (sections.size() + kSectionAlign - 1) / kSectionAlign * kSectionAlign;
  header.manifest_bytes = manifest.size();
  header.file_bytes = header.manifest_offset_bytes + header.manifest_bytes;
  header.manifest_sha = sha256(as_bytes(manifest));
  UniqueFd fd(::memfd_create("fuzz", MFD_CLOEXEC));
  WEIGHTD_CHECK(pwrite_full(fd.get(), encode_header(header), 0, "fuzz").ok());
  WEIGHTD_CHECK(pwrite_full(fd.get(), as_bytes(sections), kHeaderBytes, "fuzz").ok());
  WEIGHTD_CHECK(pwrite_full(fd.get(), as_bytes(manifest), header.manifest_offset_bytes, "fuzz").ok());
  const Result<BundleReader> bundle = BundleReader::open_fd(std::move(fd), "fuzz");
  if (!bundle.ok()) return check_refusal(bundle.status());
  read_everything(*bundle);
}

}  // namespace
}  // namespace weightd::store

/// The first byte chooses: 'M' a manifest, 'H' a header, anything else a whole file.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view input(reinterpret_cast<const char*>(data) + 1, size - 1);
  if (data[0] == 'M') {
    weightd::store::try_manifest(input);
  } else if (data[0] == 'H') {
    weightd::store::try_header(input);
  } else {
    weightd::store::try_file(input);
  }
  return 0;
}
