// SPDX-License-Identifier: Apache-2.0
#include "ipc/channel.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>

#include <array>
#include <string>
#include <thread>

#include "ipc_test_support.h"

namespace weightd::ipc {
namespace {

using test::RawAndChannel;
using test::send_raw;
using test::soon;

std::vector<std::byte> body_of(size_t size, unsigned seed = 1) {
  std::vector<std::byte> body(size);
  for (size_t i = 0; i < size; ++i) body[i] = static_cast<std::byte>((i * 2654435761U + seed) >> 7 & 0xFF);
  return body;
}
std::vector<std::byte> frame_bytes(const std::vector<std::byte>& body, uint16_t fd_count = 0) {
  return test::joined(encode_frame_header({static_cast<uint32_t>(body.size()), fd_count}), body);
}
/// A descriptor that can be told from others: a pipe's reading end with `mark` in it.
UniqueFd marked_fd(char mark) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) std::abort();
  const UniqueFd writer(ends[1]);
  if (::write(writer.get(), &mark, 1) != 1) std::abort();
  return UniqueFd(ends[0]);
}
char mark_of(const UniqueFd& fd) {
  char mark = 0;
  return ::read(fd.get(), &mark, 1) == 1 ? mark : '?';
}
ChannelOptions accepting_fds(uint32_t count) {
  ChannelOptions options;
  options.receive.fd_count = count;
  return options;
}
std::pair<Channel, Channel> channel_pair(const ChannelOptions& options = accepting_fds(kMaxFdsPerFrame)) {
  Result<std::pair<UniqueFd, UniqueFd>> pair = socket_pair();
  if (!pair.ok()) std::abort();
  return {Channel(std::move(pair->first), options), Channel(std::move(pair->second), options)};
}

// --- what works ------------------------------------------------------------------------------------------------------------

TEST(Channel, FramesAndDescriptorsArriveTogetherAndInOrder) {
  auto [left, right] = channel_pair();
  const size_t before = test::open_fd_count();
  for (unsigned i = 0; i < 20; ++i) {
    Frame frame{body_of(8 * (i + 1), i), {}};
    for (unsigned fd = 0; fd < i % 4; ++fd) frame.fds.push_back(marked_fd(static_cast<char>('a' + fd + i)));
    ASSERT_TRUE(left.send(std::move(frame)).ok());
  }
  for (unsigned i = 0; i < 20; ++i) {
    Result<Frame> frame = right.receive(soon());
    ASSERT_TRUE(frame.ok()) << frame.status().to_string();
    EXPECT_EQ(frame->body, body_of(8 * (i + 1), i));
    ASSERT_EQ(frame->fds.size(), i % 4);
    for (unsigned fd = 0; fd < i % 4; ++fd) {
      EXPECT_EQ(mark_of(frame->fds[fd]), static_cast<char>('a' + fd + i));
      EXPECT_EQ(::fcntl(frame->fds[fd].get(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
    }
  }
  const Result<std::optional<Frame>> nothing = right.try_receive();
  ASSERT_TRUE(nothing.ok());
  EXPECT_FALSE(nothing->has_value());
  EXPECT_EQ(test::open_fd_count(), before) << "descriptors that were sent are closed here";
}

TEST(Channel, TheMostDescriptorsOfOneFrame) {
  auto [left, right] = channel_pair();
  Frame frame{body_of(8), {}};
  for (unsigned i = 0; i < kMaxFdsPerFrame; ++i) frame.fds.push_back(marked_fd(static_cast<char>(i)));
  ASSERT_TRUE(left.send(std::move(frame)).ok());
  Result<Frame> got = right.receive(soon());
  ASSERT_TRUE(got.ok()) << got.status().to_string();
  ASSERT_EQ(got->fds.size(), 253U);
  for (unsigned i = 0; i < kMaxFdsPerFrame; ++i) ASSERT_EQ(mark_of(got->fds[i]), static_cast<char>(i));
}

TEST(Channel, BodiesLargerThanAnySocketBufferPassInParts) {
  ChannelOptions options = accepting_fds(1);
  options.receive.body_bytes = 64U << 20;
  auto ends = channel_pair(options);
  const std::vector<std::byte> body = body_of(size_t{16} << 20);
  Frame frame{body, {}};
  frame.fds.push_back(marked_fd('x'));
  ASSERT_TRUE(ends.first.send(std::move(frame)).ok());
  EXPECT_TRUE(ends.first.wants_write());
  EXPECT_GT(ends.first.queued_bytes(), size_t{8} << 20);
  std::thread sender([&] { EXPECT_TRUE(ends.first.flush(soon()).ok()); });
  Result<Frame> got = ends.second.receive(soon());
  sender.join();
  ASSERT_TRUE(got.ok()) << got.status().to_string();
  EXPECT_EQ(got->body, body);
  ASSERT_EQ(got->fds.size(), 1U);
  EXPECT_EQ(mark_of(got->fds[0]), 'x');
  EXPECT_FALSE(ends.first.wants_write());
  EXPECT_EQ(ends.first.queued_bytes(), 0U);
}

TEST(Channel, ByteByByteIsTheSameFrame) {
  auto ends = RawAndChannel::make(accepting_fds(1), false);
  const std::vector<std::byte> body = body_of(64);
  const std::vector<std::byte> bytes = test::joined(encode_preamble(), frame_bytes(body, 1));
  const UniqueFd carried = marked_fd('c');
  for (size_t i = 0; i < bytes.size(); ++i) {
    const bool header_begins = i == kPreambleBytes;
    ASSERT_EQ(send_raw(ends.raw.get(), &bytes[i], 1, header_begins ? std::vector<int>{carried.get()} : std::vector<int>{}), 1);
    Result<std::optional<Frame>> frame = ends.channel.try_receive();
    ASSERT_TRUE(frame.ok()) << "byte " << i << ": " << frame.status().to_string();
    ASSERT_EQ(frame->has_value(), i + 1 == bytes.size()) << "byte " << i;
    if (!frame->has_value()) continue;
    EXPECT_EQ((*frame)->body, body);
    ASSERT_EQ((*frame)->fds.size(), 1U);
    EXPECT_EQ(mark_of((*frame)->fds[0]), 'c');
  }
}

TEST(Channel, CO_109_PreambleOfAnotherVersionIsReportedNotRefused) {
  auto ends = RawAndChannel::make({}, false);
  EXPECT_FALSE(ends.channel.peer_preamble().has_value());
  const auto preamble = encode_preamble({255, 250});
  send_raw(ends.raw.get(), preamble.data(), preamble.size());
  send_raw(ends.raw.get(), frame_bytes(body_of(16)));
  ASSERT_TRUE(ends.channel.receive(soon()).ok());
  ASSERT_TRUE(ends.channel.peer_preamble().has_value());
  EXPECT_EQ(ends.channel.peer_preamble()->version, 255);
  EXPECT_EQ(ends.channel.peer_preamble()->oldest, 250);
}

// --- who breaks the rules --------------------------------------------------------------------------------------------------

TEST(Channel, CO_109_SixteenRandomBytesGetAReadableRefusalThenTheEnd) {
  auto ends = RawAndChannel::make({}, false);
  const auto garbage = body_of(16, 99);
  send_raw(ends.raw.get(), garbage);
  const Result<std::optional<Frame>> broken = ends.channel.try_receive();
  ASSERT_FALSE(broken.ok());
  EXPECT_EQ(broken.status().code(), StatusCode::kInvalidArgument);
  ASSERT_TRUE(ends.channel.send({body_of(24), {}}).ok()) << "the refusal can still be sent";
  EXPECT_EQ(ends.channel.try_receive().status().message(), broken.status().message()) << "the failure stays";
  ChannelOptions options;
  Channel peer(std::move(ends.raw), options);
  { const Channel closes = std::move(ends.channel); }
  Result<Frame> refusal = peer.receive(soon());
  ASSERT_TRUE(refusal.ok()) << refusal.status().to_string();
  EXPECT_EQ(refusal->body, body_of(24));
  EXPECT_EQ(peer.receive(soon()).status().code(), StatusCode::kUnavailable);
}

struct Violation {
  const char* what;
  std::vector<std::byte> bytes;  // after a good preamble
};

TEST(Channel, FrameHeadersOutsideTheLimitsEndTheConnection) {
  const auto header = [](uint32_t bytes, uint16_t fds) {
    const auto raw = encode_frame_header({bytes, fds});
    return std::vector<std::byte>(raw.begin(), raw.end());
  };
  for (const Violation& violation :
       {Violation{"no body", header(0, 0)}, Violation{"odd size", header(12, 0)}, Violation{"too large", header((1U << 20) + 8, 0)},
        Violation{"largest", header(0xFFFFFFF8U, 0)}, Violation{"fds announced, none sent", header(8, 1)},
        Violation{"reserved bits", test::to_bytes({8, 0, 0, 0, 0, 0, 1, 0})}}) {
    auto ends = RawAndChannel::make(accepting_fds(4));
    send_raw(ends.raw.get(), violation.bytes);
    const Status status = ends.channel.try_receive().status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << violation.what << ": " << status.to_string();
  }
}

/// Sends `fds` copies of one descriptor in the given place of a good frame; the receiver must end and hold none.
enum class Place { kPreamble, kHeader, kSecondHeaderByte, kBody };
Status receive_with_fds(Place place, size_t fds, uint32_t accepted, uint16_t announced) {
  auto ends = RawAndChannel::make(accepting_fds(accepted), false);
  const UniqueFd carried = marked_fd('x');
  const std::vector<int> many(fds, carried.get());
  const auto preamble = encode_preamble();
  const std::vector<std::byte> frame = frame_bytes(body_of(64), announced);
  const auto part = [&](const std::byte* data, size_t size, bool with_fds) {
    EXPECT_EQ(send_raw(ends.raw.get(), data, size, with_fds ? many : std::vector<int>{}), static_cast<ssize_t>(size));
  };
  part(preamble.data(), preamble.size(), place == Place::kPreamble);
  part(frame.data(), 1, place == Place::kHeader);
  part(frame.data() + 1, 7, place == Place::kSecondHeaderByte);
  part(frame.data() + 8, frame.size() - 8, place == Place::kBody);
  const Result<std::optional<Frame>> got = ends.channel.try_receive();
  return got.ok() ? Status() : got.status();
}

TEST(Channel, CO_113_UnexpectedDescriptorsAreClosedAndEndTheConnection) {
  const size_t before = test::open_fd_count();
  for (const size_t fds : {size_t{1}, size_t{8}, size_t{253}}) {
    for (const Place place : {Place::kPreamble, Place::kHeader, Place::kSecondHeaderByte, Place::kBody}) {
      // A side that accepts none, and one that accepts them with a header only.
      EXPECT_EQ(receive_with_fds(place, fds, 0, 0).code(), StatusCode::kInvalidArgument)
          << fds << " in " << static_cast<int>(place);
      EXPECT_EQ(receive_with_fds(place, fds, 253, 0).code(), StatusCode::kInvalidArgument)
          << fds << " in " << static_cast<int>(place);
    }
  }
  EXPECT_EQ(receive_with_fds(Place::kHeader, 5, 4, 5).code(), StatusCode::kInvalidArgument) << "one over the limit";
  EXPECT_EQ(receive_with_fds(Place::kHeader, 3, 4, 4).code(), StatusCode::kInvalidArgument) << "fewer than announced";
  EXPECT_EQ(receive_with_fds(Place::kHeader, 4, 4, 3).code(), StatusCode::kInvalidArgument) << "more than announced";
  EXPECT_TRUE(receive_with_fds(Place::kHeader, 4, 4, 4).ok());
  EXPECT_EQ(test::open_fd_count(), before);
}

TEST(Channel, CO_113_AnnouncedDescriptorsMustComeWithTheFirstByte) {
  // Each part is read before the next is sent: the kernel hands over descriptors with whatever is read together with their byte.
  const size_t before = test::open_fd_count();
  const auto preamble = encode_preamble();
  const std::vector<std::byte> bytes = test::joined(preamble, frame_bytes(body_of(64), 1));
  for (const size_t with_fd : {size_t{0}, size_t{15}, size_t{16}, size_t{17}, size_t{23}, size_t{24}, size_t{30}}) {
    auto ends = RawAndChannel::make(accepting_fds(4), false);
    const UniqueFd carried = marked_fd('x');
    Status status;
    for (size_t at = 0; at < bytes.size() && status.ok(); ++at) {
      ASSERT_EQ(send_raw(ends.raw.get(), &bytes[at], 1, at == with_fd ? std::vector<int>{carried.get()} : std::vector<int>{}), 1);
      status = ends.channel.try_receive().status();
    }
    EXPECT_EQ(status.ok(), with_fd == kPreambleBytes) << "at byte " << with_fd << ": " << status.to_string();
  }
  EXPECT_EQ(test::open_fd_count(), before);
}

TEST(Channel, CO_113_TenThousandMessagesWithDescriptorsLeaveNone) {
  const size_t before = test::open_fd_count();
  for (int i = 0; i < 10'000; ++i) {
    const size_t fds = i % 100 == 0 ? 253 : i % 2 == 0 ? 8 : 1;
    ASSERT_FALSE(receive_with_fds(Place::kHeader, fds, 0, static_cast<uint16_t>(fds)).ok());
  }
  EXPECT_EQ(test::open_fd_count(), before);
}

TEST(Channel, CO_113_DescriptorsThatDoNotFitIntoTheProcessAreAllClosed) {
  auto ends = RawAndChannel::make(accepting_fds(253));
  const UniqueFd carried = marked_fd('x');
  const std::vector<std::byte> frame = frame_bytes(body_of(8), 8);
  ASSERT_EQ(send_raw(ends.raw.get(), frame, std::vector<int>(8, carried.get())), static_cast<ssize_t>(frame.size()));
  const size_t before = test::open_fd_count();
  const UniqueFd highest(::fcntl(carried.get(), F_DUPFD_CLOEXEC, 0));
  {
    const test::OpenFilesLimit room_for_three(static_cast<rlim_t>(highest.get()) + 4);
    ASSERT_TRUE(room_for_three.set());
    const Status status = ends.channel.try_receive().status();
    EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status.to_string();
  }
  EXPECT_EQ(test::open_fd_count(), before + 1) << "only the one made here";
}

// --- time, ends, memory ----------------------------------------------------------------------------------------------------

TEST(Channel, CO_115_TheDeadlineCountsFromTheFirstByteAndProgressDoesNotRenewIt) {
  auto ends = RawAndChannel::make({}, false);
  EXPECT_FALSE(ends.channel.partial_since().has_value()) << "silence is no message";
  const std::vector<std::byte> bytes = test::joined(encode_preamble(), frame_bytes(body_of(200)));
  std::optional<Deadline> preamble_since, frame_since;
  for (size_t i = 0; i < bytes.size(); ++i) {
    const auto sending = Clock::now();
    ASSERT_EQ(send_raw(ends.raw.get(), &bytes[i], 1), 1);
    ASSERT_TRUE(ends.channel.try_receive().ok());
    const std::optional<Deadline> since = ends.channel.partial_since();
    if (i + 1 == kPreambleBytes || i + 1 == bytes.size()) {
      EXPECT_FALSE(since.has_value()) << "complete at byte " << i;
      continue;
    }
    ASSERT_TRUE(since.has_value()) << "byte " << i;
    std::optional<Deadline>& first = i < kPreambleBytes ? preamble_since : frame_since;
    if (!first.has_value()) {
      first = since;
      EXPECT_GE(*since, sending);
    }
    EXPECT_EQ(*since, *first) << "byte " << i;
  }
  EXPECT_GT(*frame_since, *preamble_since);
}

TEST(Channel, CO_116_EveryHangUpIsAnEndInEveryState) {
  struct State {
    const char* what;
    std::vector<std::byte> sent;
    StatusCode at_end;
  };
  const auto preamble_array = encode_preamble();
  const std::vector<std::byte> preamble(preamble_array.begin(), preamble_array.end());
  const std::vector<std::byte> frame = frame_bytes(body_of(64));
  const std::vector<State> states = {
      {"nothing sent", {}, StatusCode::kUnavailable},
      {"inside the preamble", {preamble.begin(), preamble.begin() + 5}, StatusCode::kCorruption},
      {"after the preamble", preamble, StatusCode::kUnavailable},
      {"inside a header", test::joined(preamble, std::vector<std::byte>(frame.begin(), frame.begin() + 3)),
       StatusCode::kCorruption},
      {"after a header", test::joined(preamble, std::vector<std::byte>(frame.begin(), frame.begin() + 8)), StatusCode::kCorruption},
      {"inside a body", test::joined(preamble, std::vector<std::byte>(frame.begin(), frame.begin() + 20)), StatusCode::kCorruption},
      {"after a frame", test::joined(preamble, frame), StatusCode::kUnavailable},
  };
  for (const State& state : states) {
    for (const int how : {int{SHUT_WR}, int{SHUT_RDWR}, -1}) {
      auto ends = RawAndChannel::make({}, false);
      if (!state.sent.empty()) {
        send_raw(ends.raw.get(), state.sent);
      }
      if (how < 0) {
        ends.raw.reset();
      } else {
        ::shutdown(ends.raw.get(), how);
      }
      if (state.sent.size() == preamble.size() + frame.size()) {
        const Result<std::optional<Frame>> whole = ends.channel.try_receive();
        ASSERT_TRUE(whole.ok() && whole->has_value()) << "what came before the end is delivered";
      }
      for (int again = 0; again < 3; ++again) {
        const Result<std::optional<Frame>> end = ends.channel.try_receive();
        ASSERT_FALSE(end.ok()) << state.what << " " << how << ": would wait for ever";
        EXPECT_EQ(end.status().code(), state.at_end) << state.what << " " << how << ": " << end.status().to_string();
      }
    }
  }
}

TEST(Channel, CO_116_PeerThatClosedItsReadingSideIsNoticedWhenWriting) {
  auto ends = RawAndChannel::make();
  ::shutdown(ends.raw.get(), SHUT_RD);
  Status status = ends.channel.send({body_of(8), {}});
  EXPECT_EQ(status.code(), StatusCode::kUnavailable) << status.to_string();
  EXPECT_FALSE(ends.channel.wants_write()) << "nobody waits for a socket that takes no more";
  EXPECT_EQ(ends.channel.send({body_of(8), {}}).code(), StatusCode::kUnavailable);
  EXPECT_TRUE(ends.channel.try_receive().ok()) << "its words can still come";
}

TEST(Channel, LastWordsArriveAlthoughThePeerHungUp) {
  auto [left, right] = channel_pair();
  ASSERT_TRUE(left.send({body_of(32, 5), {}}).ok());
  { const Channel gone = std::move(left); }
  EXPECT_EQ(right.send({body_of(8), {}}).code(), StatusCode::kUnavailable);
  Result<Frame> last = right.receive(soon());
  ASSERT_TRUE(last.ok()) << last.status().to_string();
  EXPECT_EQ(last->body, body_of(32, 5));
  EXPECT_EQ(right.receive(soon()).status().code(), StatusCode::kUnavailable);
}

TEST(Channel, CO_117_PeerThatNeverReadsIsGivenUpWithinItsLimit) {
  ChannelOptions options;
  options.max_queued_bytes = 1U << 20;
  auto ends = RawAndChannel::make(options);
  const size_t fds_before = test::open_fd_count();
  Status status;
  size_t accepted = 0;
  for (; status.ok() && accepted < 1'000'000; ++accepted) {
    status = ends.channel.send({body_of(4096), {}});
    if (status.ok()) {
      ASSERT_LE(ends.channel.queued_bytes(), (1U << 20) + 5000U);
    }
  }
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status.to_string();
  EXPECT_LT(accepted, 5000U);
  EXPECT_EQ(ends.channel.queued_bytes(), 0U) << "the queue is dropped";
  EXPECT_EQ(ends.channel.send({body_of(8), {}}).code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(test::open_fd_count(), fds_before);
}

TEST(Channel, ADescriptorThatWaitsInADroppedQueueIsClosed) {
  ChannelOptions options;
  options.max_queued_bytes = 64U << 10;
  auto ends = RawAndChannel::make(options);
  const size_t before = test::open_fd_count();
  Status status;
  while (status.ok()) {
    Frame frame{body_of(4096), {}};
    frame.fds.push_back(marked_fd('w'));
    status = ends.channel.send(std::move(frame));
  }
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status.to_string();
  EXPECT_EQ(test::open_fd_count(), before);
}

TEST(Channel, CO_121_AnnouncedBytesCostNothingUntilTheyCome) {
  constexpr size_t kConnections = 400;
  ChannelOptions options;
  options.receive.body_bytes = 128U << 20;
  std::vector<RawAndChannel> connections;
  connections.reserve(kConnections);
  for (size_t i = 0; i < kConnections; ++i) connections.push_back(RawAndChannel::make(options));
  const auto header = encode_frame_header({64U << 20, 0});
  const int64_t before = test::resident_bytes();
  for (RawAndChannel& connection : connections) {
    ASSERT_EQ(send_raw(connection.raw.get(), header.data(), header.size()), 8);
    const Result<std::optional<Frame>> frame = connection.channel.try_receive();
    ASSERT_TRUE(frame.ok() && !frame->has_value());
  }
  EXPECT_LT(test::resident_bytes() - before, int64_t{16} << 20);
}

TEST(Channel, DeadlinesAreKept) {
  auto ends = RawAndChannel::make();
  const Result<Frame> frame = ends.channel.receive(Clock::now() + std::chrono::milliseconds(5));
  ASSERT_FALSE(frame.ok());
  EXPECT_EQ(frame.status().code(), StatusCode::kDeadlineExceeded);
  ASSERT_TRUE(ends.channel.send({body_of(size_t{1} << 20), {}}).ok());
  ASSERT_TRUE(ends.channel.wants_write());
  EXPECT_EQ(ends.channel.flush(Clock::now() + std::chrono::milliseconds(5)).code(), StatusCode::kDeadlineExceeded);
}

// --- connecting ------------------------------------------------------------------------------------------------------------

UniqueFd listen_at(const std::string& path, int type = SOCK_STREAM, int backlog = 8) {
  UniqueFd socket(::socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size());
  if (path[0] == '@') address.sun_path[0] = '\0';
  if (::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) return UniqueFd();
  if (type == SOCK_STREAM && ::listen(socket.get(), backlog) != 0) return UniqueFd();
  return socket;
}

TEST(ConnectUnix, CO_129_PathLengths) {
  const test::TempFolder folder;
  const auto path_of = [&](size_t size) { return folder / std::string(size - folder.path().size() - 1, 's'); };
  const UniqueFd listening = listen_at(path_of(107));
  ASSERT_TRUE(listening.valid());
  EXPECT_TRUE(connect_unix(path_of(107)).ok());
  for (const size_t size : {size_t{108}, size_t{200}, size_t{5000}}) {
    const Status status = connect_unix(path_of(size)).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.to_string();
    EXPECT_NE(status.message().find("107"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find(std::to_string(size)), std::string::npos) << status.message();
  }
}

TEST(ConnectUnix, AbstractNames) {
  const std::string name = "@weightd-test-" + std::to_string(::getpid());
  const UniqueFd listening = listen_at(name);
  ASSERT_TRUE(listening.valid());
  EXPECT_TRUE(connect_unix(name).ok());
  EXPECT_EQ(connect_unix(name + "x").status().code(), StatusCode::kUnavailable);
}

TEST(ConnectUnix, FailuresSayWhatToDo) {
  const test::TempFolder folder;
  Status status = connect_unix(folder / "none.sock").status();
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  EXPECT_NE(status.message().find("start"), std::string::npos) << status.message();
  { const UniqueFd gone = listen_at(folder / "left.sock"); }
  EXPECT_EQ(connect_unix(folder / "left.sock").status().code(), StatusCode::kUnavailable) << "left over, nobody serves it";
  const UniqueFd datagram = listen_at(folder / "datagram.sock", SOCK_DGRAM);
  EXPECT_EQ(connect_unix(folder / "datagram.sock").status().code(), StatusCode::kInvalidArgument);
  for (const char* bad : {"", "relative.sock", "@"})
    EXPECT_EQ(connect_unix(bad).status().code(), StatusCode::kInvalidArgument) << bad;
  EXPECT_EQ(connect_unix(std::string("/a\0b", 4)).status().code(), StatusCode::kInvalidArgument);
}

TEST(ConnectUnix, WhoMayNotConnectIsToldToJoinTheGroup) {
  if (::getuid() != 0) GTEST_SKIP() << "needs root to become somebody else";
  const test::TempFolder folder;
  ::chmod(folder.path().c_str(), 0755);
  const UniqueFd listening = listen_at(folder / "s.sock");
  ::chmod((folder / "s.sock").c_str(), 0600);
  const pid_t child = ::fork();
  if (child == 0) {
    if (::setgid(65534) != 0 || ::setuid(65534) != 0) ::_exit(2);
    const Status status = connect_unix(folder / "s.sock").status();
    ::_exit(status.code() == StatusCode::kPermissionDenied && status.message().find("group") != std::string::npos ? 0 : 1);
  }
  int outcome = 0;
  ::waitpid(child, &outcome, 0);
  EXPECT_EQ(outcome, 0);
}

TEST(ConnectUnix, ADaemonThatAcceptsNobodyIsNotWaitedForForEver) {
  const test::TempFolder folder;
  const UniqueFd listening = listen_at(folder / "s.sock", SOCK_STREAM, 0);
  std::vector<UniqueFd> waiting;
  for (;;) {
    Result<UniqueFd> connected = connect_unix(folder / "s.sock");
    if (!connected.ok()) {
      EXPECT_EQ(connected.status().code(), StatusCode::kUnavailable) << connected.status().to_string();
      break;
    }
    waiting.push_back(*std::move(connected));
    ASSERT_LT(waiting.size(), 10U);
  }
}

}  // namespace
}  // namespace weightd::ipc
