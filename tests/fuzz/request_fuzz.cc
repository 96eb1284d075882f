// SPDX-License-Identifier: Apache-2.0
// The bodies of frames: byte 0 says of which kind. What decodes must encode to bytes that decode to the same.
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "ipc/messages.h"
#include "weightd/status.h"

namespace {

template <typename Decode>
void round_trip(std::span<const std::byte> body, Decode decode) {
  const auto first = decode(body);
  if (!first.ok()) {
    WEIGHTD_CHECK(!first.status().message().empty() && first.status().message().find('\n') == std::string::npos);
    return;
  }
  const std::vector<std::byte> bytes = weightd::ipc::encode(*first);
  const auto second = decode(bytes);
  WEIGHTD_CHECK(second.ok());
  WEIGHTD_CHECK(weightd::ipc::encode(*second) == bytes);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 1) return -1;
  const std::span<const std::byte> body = std::as_bytes(std::span(data + 1, size - 1));
  switch (data[0] % 3) {
    case 0:
      round_trip(body, weightd::ipc::decode_request);
      break;
    case 1:
      round_trip(body, weightd::ipc::decode_response);
      break;
    default:
      round_trip(body, weightd::ipc::decode_loader_message);
      break;
  }
  return 0;
}
