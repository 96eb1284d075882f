// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "weightd/status.h"

/// What precedes every byte of Cap'n Proto on a weightd socket. The preamble is frozen for all versions; so are the frame header
/// and Response.error, so that any version can read a refusal.
namespace weightd::ipc {

inline constexpr uint16_t kProtocolVersion = 2;
inline constexpr uint16_t kOldestProtocolVersion = 1;

/// Each side sends it once, first. Little endian.
///   0x00  8 bytes  magic 89 'W' 'T' 'D' 'I' 'P' 'C' 0A
///   0x08  u16      protocol version of the sender
///   0x0A  u16      oldest version that the sender speaks
///   0x0C  u32      0x01020304, the byte order mark
inline constexpr size_t kPreambleBytes = 16;
struct Preamble {
  uint16_t version = kProtocolVersion;
  uint16_t oldest = kOldestProtocolVersion;
};
[[nodiscard]] std::array<std::byte, kPreambleBytes> encode_preamble(const Preamble& preamble = {});
/// kInvalidArgument: not a weightd peer, or of the other byte order. A foreign version is not an error here.
[[nodiscard]] Result<Preamble> decode_preamble(std::span<const std::byte, kPreambleBytes> bytes);
/// kUnsupported with both version numbers and what to do, unless the ranges overlap.
Status check_versions(const Preamble& theirs);

/// A frame: header, then `body_bytes` of one Cap'n Proto message in stream framing (segment table included).
///   0x00  u32  body_bytes, at most FrameLimits::body_bytes, a multiple of 8
///   0x04  u16  descriptors that travel with the header's first byte, at most kMaxFdsPerFrame
///   0x06  u16  reserved, 0
inline constexpr size_t kFrameHeaderBytes = 8;
inline constexpr uint32_t kMaxFdsPerFrame = 253;  // SCM_MAX_FD of Linux
struct FrameHeader {
  uint32_t body_bytes = 0;
  uint16_t fd_count = 0;
};
struct FrameLimits {
  uint32_t body_bytes = 1U << 20;
  uint32_t fd_count = 0;            // what this side accepts; a frame with more ends the connection
};
[[nodiscard]] std::array<std::byte, kFrameHeaderBytes> encode_frame_header(const FrameHeader& header);
[[nodiscard]] Result<FrameHeader> decode_frame_header(std::span<const std::byte, kFrameHeaderBytes> bytes,
                                                      const FrameLimits& limits);

}  // namespace weightd::ipc
