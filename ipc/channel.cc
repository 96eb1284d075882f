// SPDX-License-Identifier: Apache-2.0
#include "ipc/channel.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstddef>
#include <cstring>
#include <utility>

#include "base/text.h"

namespace weightd::ipc {
namespace {

constexpr size_t kReadStepBytes = size_t{64} << 10;
constexpr time_t kConnectSeconds = 2;

/// Room for the most descriptors that Linux sends at once. Less would not keep the surplus out: it would only hide how many came.
union ControlBuffer {
  char bytes[CMSG_SPACE(kMaxFdsPerFrame * sizeof(int))];
  cmsghdr align;
};

/// Takes every descriptor that the kernel installed, also out of a truncated control message, so that none is left open unseen.
void take_fds(msghdr& message, std::vector<UniqueFd>& fds) {
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr; part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS || part->cmsg_len < CMSG_LEN(0)) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      fds.emplace_back(fd);
    }
  }
}

/// Waits for `events`; kDeadlineExceeded when they do not come in time.
Status wait_for(int fd, short events, Deadline deadline, std::string_view what) {
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) return Status::deadline_exceeded(std::string(what) + ": the peer did not answer in time");
    pollfd entry{fd, events, 0};
    const int ready = ::poll(&entry, 1, static_cast<int>(std::min<int64_t>(left, INT_MAX)));
    if (ready > 0) return {};
    if (ready < 0 && errno != EINTR) return status_from_errno(errno, "poll");
  }
}

Result<sockaddr_un> socket_address(const std::string& path, socklen_t& length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  constexpr size_t kMaxPathBytes = sizeof(address.sun_path) - 1;
  const std::string shown = printable(path);
  if (path.size() > kMaxPathBytes) {
    return Status::invalid_argument("socket path '" + shown + "' has " + std::to_string(path.size()) + " bytes, at most " +
                                    std::to_string(kMaxPathBytes) + " are possible");
  }
  if (path.size() < 2 || (path[0] != '/' && path[0] != '@')) {
    return Status::invalid_argument("socket path '" + shown + "' must be absolute, or begin with '@'");
  }
  if (path.find('\0') != std::string::npos) return Status::invalid_argument("socket path '" + shown + "' holds a NUL byte");
  std::memcpy(address.sun_path, path.data(), path.size());
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size() + 1);
  if (path[0] == '@') {
    address.sun_path[0] = '\0';
    --length;  // an abstract name is exactly its bytes
  }
  return address;
}

Status connect_failure(int error, const std::string& path) {
  const std::string text = "socket '" + printable(path) + "'";
  const std::string reason = std::string(" (") + std::strerror(error) + ")";
  switch (error) {
    case ENOENT:
    case ECONNREFUSED:
      return Status::unavailable(text + ": no weightd listens there" + reason +
                                 ": start it, or name the socket that it listens on");
    case EACCES:
    case EPERM:
      return Status::permission_denied(text + ": not allowed to connect" + reason + ": join the group that owns the socket");
    case EAGAIN:
    case ETIMEDOUT:
      return Status::unavailable(text + ": the daemon does not accept connections: it hangs or has too many; try again later");
    case EPROTOTYPE:
      return Status::invalid_argument(text + ": not a stream socket, so not one of weightd");
    default:
      return status_from_errno(error, text + ": connect");
  }
}

}  // namespace

Channel::Channel(UniqueFd socket, const ChannelOptions& options) : socket_(std::move(socket)), options_(options) {
  const int flags = ::fcntl(socket_.get(), F_GETFL);
  if (flags < 0 || ::fcntl(socket_.get(), F_SETFL, flags | O_NONBLOCK) != 0) {
    send_failure_ = receive_failure_ = status_from_errno(errno, "channel");
    return;
  }
  const auto preamble = encode_preamble();
  queue_.push_back({{preamble.begin(), preamble.end()}, 0, {}});
  queued_bytes_ = preamble.size();
}

Status Channel::fail_receive(Status status) {
  in_.clear();
  in_fds_.clear();
  partial_since_.reset();
  return receive_failure_ = std::move(status);
}

Status Channel::fail_send(Status status) {
  queue_.clear();
  queued_bytes_ = 0;
  return send_failure_ = std::move(status);
}

Result<std::optional<size_t>> Channel::read_some(size_t want, uint32_t fds_allowed) {
  std::array<std::byte, kReadStepBytes> bytes;
  iovec part{bytes.data(), std::min(want, bytes.size())};
  ControlBuffer control;
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes;
  message.msg_controllen = sizeof(control.bytes);
  ssize_t got = 0;
  do {
    got = ::recvmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  if (got < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK) return std::optional<size_t>();
    if (errno == ECONNRESET) return Status::unavailable("closed by peer (connection reset)");
    return status_from_errno(errno, "recvmsg");
  }
  std::vector<UniqueFd> fds;
  take_fds(message, fds);
  if ((message.msg_flags & MSG_CTRUNC) != 0) {
    return Status::resource_exhausted("descriptors of the peer were lost: this process may not open so many (limit of open files)");
  }
  if (fds.size() > fds_allowed) {
    return Status::invalid_argument(std::to_string(fds.size()) + " descriptors came where at most " + std::to_string(fds_allowed) +
                                    " are accepted");
  }
  std::move(fds.begin(), fds.end(), std::back_inserter(in_fds_));
  in_.insert(in_.end(), bytes.begin(), bytes.begin() + got);
  return std::optional<size_t>(static_cast<size_t>(got));
}

Result<bool> Channel::fill(size_t size) {
  while (in_.size() < size) {
    // Descriptors belong to a frame header's first byte and come with no other.
    const bool header_begins = peer_.has_value() && !header_.has_value() && in_.empty();
    const uint32_t fds_allowed = header_begins ? std::min(options_.receive.fd_count, kMaxFdsPerFrame) : 0;
    WEIGHTD_ASSIGN_OR_RETURN(const std::optional<size_t> got, read_some(size - in_.size(), fds_allowed));
    if (!got.has_value()) return false;
    if (*got == 0) {
      if (in_.empty() && !header_.has_value()) return Status::unavailable("closed by peer");
      return Status::corruption(std::string("closed by peer inside a ") + (peer_.has_value() ? "frame" : "preamble"));
    }
    if (!partial_since_.has_value()) partial_since_ = Clock::now();
  }
  return true;
}

Result<std::optional<Frame>> Channel::try_receive() {
  if (!receive_failure_.ok()) return receive_failure_;
  const auto step = [&](size_t size) {
    Result<bool> full = fill(size);
    if (!full.ok()) return Result<bool>(fail_receive(full.status()));
    return full;
  };
  if (!peer_.has_value()) {
    WEIGHTD_ASSIGN_OR_RETURN(const bool full, step(kPreambleBytes));
    if (!full) return std::optional<Frame>();
    Result<Preamble> preamble = decode_preamble(std::span<const std::byte, kPreambleBytes>(in_.data(), kPreambleBytes));
    if (!preamble.ok()) return fail_receive(preamble.status());
    peer_ = *preamble;
    in_.clear();
    partial_since_.reset();
  }
  if (!header_.has_value()) {
    WEIGHTD_ASSIGN_OR_RETURN(const bool full, step(kFrameHeaderBytes));
    if (!full) return std::optional<Frame>();
    Result<FrameHeader> header =
        decode_frame_header(std::span<const std::byte, kFrameHeaderBytes>(in_.data(), kFrameHeaderBytes), options_.receive);
    if (!header.ok()) return fail_receive(header.status());
    if (in_fds_.size() != header->fd_count) {
      return fail_receive(Status::invalid_argument("frame: " + std::to_string(in_fds_.size()) +
                                                   " descriptors came, the header says " + std::to_string(header->fd_count)));
    }
    header_ = *header;
    in_.clear();
  }
  WEIGHTD_ASSIGN_OR_RETURN(const bool full, step(header_->body_bytes));
  if (!full) return std::optional<Frame>();
  Frame frame{std::exchange(in_, std::vector<std::byte>()), std::exchange(in_fds_, std::vector<UniqueFd>())};
  header_.reset();
  partial_since_.reset();
  return std::optional<Frame>(std::move(frame));
}

Status Channel::send(Frame frame) {
  WEIGHTD_CHECK(!frame.body.empty() && frame.body.size() % 8 == 0 && frame.body.size() <= UINT32_MAX);
  WEIGHTD_CHECK(frame.fds.size() <= kMaxFdsPerFrame);
  if (!send_failure_.ok()) return send_failure_;
  const auto header = encode_frame_header({static_cast<uint32_t>(frame.body.size()), static_cast<uint16_t>(frame.fds.size())});
  frame.body.insert(frame.body.begin(), header.begin(), header.end());
  queued_bytes_ += frame.body.size();
  queue_.push_back({std::move(frame.body), 0, std::move(frame.fds)});
  WEIGHTD_ASSIGN_OR_RETURN(const bool flushed, try_flush());
  if (!flushed && queue_.size() > 1 && queued_bytes_ > options_.max_queued_bytes) {
    return fail_send(Status::resource_exhausted("the peer does not read: " + std::to_string(queued_bytes_) +
                                                " bytes wait for it, at most " + std::to_string(options_.max_queued_bytes) +
                                                " may"));
  }
  return {};
}

Result<bool> Channel::try_flush() {
  if (!send_failure_.ok()) return send_failure_;
  while (!queue_.empty()) {
    Queued& next = queue_.front();
    iovec part{next.bytes.data() + next.written, next.bytes.size() - next.written};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    ControlBuffer control{};
    if (!next.fds.empty()) {  // only before the first byte left
      message.msg_control = control.bytes;
      message.msg_controllen = CMSG_SPACE(next.fds.size() * sizeof(int));
      cmsghdr* rights = CMSG_FIRSTHDR(&message);
      rights->cmsg_level = SOL_SOCKET;
      rights->cmsg_type = SCM_RIGHTS;
      rights->cmsg_len = CMSG_LEN(next.fds.size() * sizeof(int));
      for (size_t i = 0; i < next.fds.size(); ++i) {
        const int fd = next.fds[i].get();
        std::memcpy(CMSG_DATA(rights) + i * sizeof(int), &fd, sizeof(int));
      }
    }
    const ssize_t put = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
    if (put < 0 && (errno == EPIPE || errno == ECONNRESET)) return fail_send(Status::unavailable("closed by peer"));
    if (put < 0 && errno == ETOOMANYREFS) {
      return fail_send(Status::resource_exhausted("sending descriptors: too many are under way already (limit of open files)"));
    }
    if (put < 0) return fail_send(status_from_errno(errno, "sendmsg"));
    next.fds.clear();
    next.written += static_cast<size_t>(put);
    queued_bytes_ -= static_cast<size_t>(put);
    if (next.written == next.bytes.size()) queue_.pop_front();
  }
  return true;
}

Status Channel::flush(Deadline deadline) {
  for (;;) {
    WEIGHTD_ASSIGN_OR_RETURN(const bool empty, try_flush());
    if (empty) return {};
    WEIGHTD_RETURN_IF_ERROR(wait_for(fd(), POLLOUT, deadline, "sending"));
  }
}

Result<Frame> Channel::receive(Deadline deadline) {
  for (;;) {
    // What we still owe may be what the peer waits for. If it hung up, what it said before can be read all the same.
    if (wants_write()) (void)try_flush();
    WEIGHTD_ASSIGN_OR_RETURN(std::optional<Frame> frame, try_receive());
    if (frame.has_value()) return *std::move(frame);
    const auto events = static_cast<short>(wants_write() ? POLLIN | POLLOUT : POLLIN);
    WEIGHTD_RETURN_IF_ERROR(wait_for(fd(), events, deadline, "receiving"));
  }
}

Result<UniqueFd> connect_unix(const std::string& path) {
  socklen_t length = 0;
  WEIGHTD_ASSIGN_OR_RETURN(const sockaddr_un address, socket_address(path, length));
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return status_from_errno(errno, "socket");
  // Bounds connect() while the backlog of a daemon that hangs is full.
  const timeval limit{kConnectSeconds, 0};
  if (::setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit)) != 0)
    return status_from_errno(errno, "setsockopt");
  int outcome = 0;
  do {
    outcome = ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), length);
  } while (outcome != 0 && errno == EINTR);
  if (outcome != 0) return connect_failure(errno, path);
  return socket;
}

Result<std::pair<UniqueFd, UniqueFd>> socket_pair() {
  int fds[2] = {-1, -1};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0) return status_from_errno(errno, "socketpair");
  return std::pair<UniqueFd, UniqueFd>(UniqueFd(fds[0]), UniqueFd(fds[1]));
}

}  // namespace weightd::ipc
