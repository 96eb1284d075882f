// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "store/bundle.h"
#include "weightd/status.h"

/// Header and manifest of a bundle as bytes (store/FORMAT.md, sections 3 to 5). Pure: no file is touched here.
namespace weightd::store {

inline constexpr uint64_t kHeaderBytes = 4096;
inline constexpr uint16_t kFormatMajor = 1;
inline constexpr uint16_t kFormatMinor = 0;
inline constexpr uint64_t kMaxManifestBytes = uint64_t{1} << 30;
inline constexpr uint64_t kMaxRecords = uint64_t{1}
                                        << 22;  // sources, storages, tensors, left-out names; sections: four times as many
inline constexpr std::string_view kFastForm = "fast";

struct BundleHeader {
  uint16_t major = kFormatMajor;
  uint16_t minor = kFormatMinor;
  uint64_t file_bytes = 0;
  uint64_t manifest_offset_bytes = 0;
  uint64_t manifest_bytes = 0;
  Sha256 manifest_sha{};
};

[[nodiscard]] std::array<std::byte, kHeaderBytes> encode_header(const BundleHeader& header);
/// Checks everything that section 3 asks but the manifest's hash. `head` holds the first min(4096, real size) bytes of the file.
/// kCorruption, or kUnsupported for another major version; messages begin with `name`.
[[nodiscard]] Result<BundleHeader> decode_header(std::span<const std::byte> head, uint64_t real_file_bytes, std::string_view name);

/// The manifest's bytes, framing included; equal manifests give equal bytes. kUnsupported when they pass kMaxManifestBytes.
[[nodiscard]] Result<std::vector<std::byte>> encode_manifest(const Manifest& manifest);
/// Structure only; numbers that this build does not know are kUnsupported. Copies `bytes` if they are not 8-byte aligned.
[[nodiscard]] Result<Manifest> decode_manifest(std::span<const std::byte> bytes, std::string_view name);

/// Every rule of section 4.1 and 5. `manifest_offset_bytes` ends the data sections. kCorruption names field and rule.
Status validate_manifest(const Manifest& manifest, uint64_t manifest_offset_bytes, std::string_view name);

/// Residency "fast" of the manifest's storages by the rules of section 5, without block hashes. Sizes come from `sections`.
[[nodiscard]] Residency plan_residency(const Manifest& manifest);

/// Offset of each storage's pool part from the start of the model's pool (0 for raw storages).
[[nodiscard]] std::vector<uint64_t> pool_bases(const Manifest& manifest);

/// The rule for SourceFile::relative_name, without uniqueness.
[[nodiscard]] bool is_safe_relative_name(std::string_view name);

/// "codes", "windows", ... Static storage.
[[nodiscard]] std::string_view plane_name(PlaneKind kind);

}  // namespace weightd::store
