// SPDX-License-Identifier: Apache-2.0
// A channel that reads what a peer sends: byte 0 cuts it into pieces, byte 1 says with which of them a descriptor comes.
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>

#include "ipc/channel.h"
#include "weightd/status.h"

namespace {

using weightd::Result;
using weightd::UniqueFd;
using weightd::ipc::Channel;
using weightd::ipc::ChannelOptions;
using weightd::ipc::Frame;

constexpr size_t kMaxInputBytes = 64 << 10;  // less than a socket takes at once
constexpr uint32_t kBodyLimit = 4096, kFdLimit = 2;

int lowest_free_fd() {
  const UniqueFd fd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  return fd.get();
}

/// `carried` goes along unless it is negative. Not the socket itself: held by the channel, it would keep its own connection open.
void send_piece(int socket, const uint8_t* data, size_t size, int carried) {
  iovec part{const_cast<uint8_t*>(data), size};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (carried >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(rights), &carried, sizeof(int));
  }
  WEIGHTD_CHECK(::sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL) == static_cast<ssize_t>(size));
}

/// Takes all frames that are there; false once the channel failed.
bool drain(Channel& channel) {
  for (;;) {
    const Result<std::optional<Frame>> frame = channel.try_receive();
    if (!frame.ok()) {
      WEIGHTD_CHECK(channel.try_receive().status().message() == frame.status().message());
      WEIGHTD_CHECK(!channel.partial_since().has_value());
      return false;
    }
    if (!frame->has_value()) return true;
    WEIGHTD_CHECK((*frame)->body.size() <= kBodyLimit && (*frame)->body.size() % 8 == 0 && !(*frame)->body.empty());
    WEIGHTD_CHECK((*frame)->fds.size() <= kFdLimit);
  }
}

void run(const uint8_t* data, size_t size, uint8_t cuts, uint8_t fds) {
  Result<std::pair<UniqueFd, UniqueFd>> pair = weightd::ipc::socket_pair();
  WEIGHTD_CHECK(pair.ok());
  ChannelOptions options;
  options.receive = {kBodyLimit, kFdLimit};
  Channel channel(std::move(pair->first), options);
  const size_t step = cuts == 0 ? size : 1 + cuts % 61U;
  const UniqueFd carried(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  size_t piece = 0;
  for (size_t at = 0; at < size; at += step, ++piece) {
    send_piece(pair->second.get(), data + at, std::min(step, size - at), piece < 8 && (fds >> piece & 1) != 0 ? carried.get() : -1);
    if (!drain(channel)) return;
  }
  pair->second.reset();
  WEIGHTD_CHECK(!drain(channel));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 3 || size > kMaxInputBytes) return -1;
  const int before = lowest_free_fd();
  run(data + 2, size - 2, data[0], data[1]);
  WEIGHTD_CHECK(lowest_free_fd() == before);
  return 0;
}
