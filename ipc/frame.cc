// SPDX-License-Identifier: Apache-2.0
#include "ipc/frame.h"

#include <algorithm>
#include <string>

namespace weightd::ipc {
namespace {

constexpr std::array<unsigned char, 8> kMagic = {0x89, 'W', 'T', 'D', 'I', 'P', 'C', 0x0A};
constexpr uint32_t kByteOrderMark = 0x01020304;

/// Little endian, by shifts: the same on every host.
template <typename T>
void put(std::byte* out, T value) {
  for (size_t i = 0; i < sizeof(T); ++i) out[i] = static_cast<std::byte>(value >> (8 * i) & 0xFF);
}

template <typename T>
T get(const std::byte* in) {
  uint64_t value = 0;
  for (size_t i = 0; i < sizeof(T); ++i) value |= std::to_integer<uint64_t>(in[i]) << (8 * i);
  return static_cast<T>(value);
}

}  // namespace

std::array<std::byte, kPreambleBytes> encode_preamble(const Preamble& preamble) {
  std::array<std::byte, kPreambleBytes> bytes{};
  std::transform(kMagic.begin(), kMagic.end(), bytes.begin(), [](unsigned char c) { return std::byte{c}; });
  put(bytes.data() + 8, preamble.version);
  put(bytes.data() + 10, preamble.oldest);
  put(bytes.data() + 12, kByteOrderMark);
  return bytes;
}

Result<Preamble> decode_preamble(std::span<const std::byte, kPreambleBytes> bytes) {
  const bool magic =
      std::equal(kMagic.begin(), kMagic.end(), bytes.begin(), [](unsigned char c, std::byte b) { return std::byte{c} == b; });
  if (!magic) return Status::invalid_argument("preamble: the peer does not speak the weightd protocol (wrong magic)");
  const auto mark = get<uint32_t>(bytes.data() + 12);
  if (mark == 0x04030201) return Status::invalid_argument("preamble: the peer has the other byte order");
  if (mark != kByteOrderMark) return Status::invalid_argument("preamble: wrong byte order mark");
  return Preamble{get<uint16_t>(bytes.data() + 8), get<uint16_t>(bytes.data() + 10)};
}

Status check_versions(const Preamble& theirs) {
  const bool overlap =
      theirs.oldest <= theirs.version && theirs.version >= kOldestProtocolVersion && theirs.oldest <= kProtocolVersion;
  if (overlap) return {};
  const auto range = [](uint16_t oldest, uint16_t newest) { return std::to_string(oldest) + " to " + std::to_string(newest); };
  return Status::unsupported("the peer speaks protocol versions " + range(theirs.oldest, theirs.version) + ", this build " +
                             range(kOldestProtocolVersion, kProtocolVersion) +
                             ": update the older of the two, and restart the daemon after an update of it");
}

std::array<std::byte, kFrameHeaderBytes> encode_frame_header(const FrameHeader& header) {
  std::array<std::byte, kFrameHeaderBytes> bytes{};
  put(bytes.data(), header.body_bytes);
  put(bytes.data() + 4, header.fd_count);
  return bytes;
}

Result<FrameHeader> decode_frame_header(std::span<const std::byte, kFrameHeaderBytes> bytes, const FrameLimits& limits) {
  const FrameHeader header{get<uint32_t>(bytes.data()), get<uint16_t>(bytes.data() + 4)};
  if (header.body_bytes == 0 || header.body_bytes % 8 != 0) {
    return Status::invalid_argument("frame: body_bytes is " + std::to_string(header.body_bytes) +
                                    ", must be a multiple of 8, at least 8");
  }
  if (header.body_bytes > limits.body_bytes) {
    return Status::invalid_argument("frame: body_bytes is " + std::to_string(header.body_bytes) + ", at most " +
                                    std::to_string(limits.body_bytes) + " are accepted here");
  }
  const uint32_t most_fds = std::min(limits.fd_count, kMaxFdsPerFrame);
  if (header.fd_count > most_fds) {
    return Status::invalid_argument("frame: " + std::to_string(header.fd_count) + " descriptors, at most " +
                                    std::to_string(most_fds) + " are accepted here");
  }
  if (get<uint16_t>(bytes.data() + 6) != 0) return Status::invalid_argument("frame: the reserved field is not 0");
  return header;
}

}  // namespace weightd::ipc
