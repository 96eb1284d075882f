// SPDX-License-Identifier: Apache-2.0
#include "daemon/session.h"

#include <poll.h>

#include <algorithm>
#include <boost/asio/post.hpp>
#include <utility>

#include "ipc/frame.h"

namespace weightd::daemon {
namespace {

constexpr int kFramesPerTurn = 16;  // then the other connections get their turn

using boost::system::error_code;
using Descriptor = boost::asio::posix::stream_descriptor;

Status foreign_version(const ipc::Channel& channel) {
  return channel.peer_preamble() ? ipc::check_versions(*channel.peer_preamble()) : Status();
}

}  // namespace

std::shared_ptr<Session> Session::start(boost::asio::io_context& io, UniqueFd socket, const SessionLimits& limits,
                                        Callbacks callbacks) {
  const std::shared_ptr<Session> session(new Session(io, std::move(socket), limits, std::move(callbacks)));
  // From the loop: the owner still has to take the session, and may want to refuse it first.
  boost::asio::post(io, [session] { session->pump(); });
  return session;
}

Session::Session(boost::asio::io_context& io, UniqueFd socket, const SessionLimits& limits, Callbacks callbacks)
    : io_(io),
      limits_(limits),
      callbacks_(std::move(callbacks)),
      channel_(std::make_unique<ipc::Channel>(std::move(socket), limits.channel)),
      descriptor_(io),
      timer_(io),
      started_(ipc::Clock::now()) {
  error_code error;
  descriptor_.assign(channel_->fd(), error);
  if (error) close(Status::internal("event loop: " + error.message()));
}

Session::~Session() {
  if (descriptor_.is_open()) (void)descriptor_.release();
}

bool Session::may_read() const { return !finishing_ && !channel_->wants_write() && in_flight_ < limits_.requests_in_flight; }

void Session::pump() {
  if (pumping_ || ended_) return;
  const auto self = shared_from_this();
  pumping_ = true;
  int frames = 0;
  while (!ended_ && flush() && may_read() && frames < kFramesPerTurn && read_one()) ++frames;
  pumping_ = false;
  if (ended_ || (finishing_ && !flush())) return;
  if (frames == kFramesPerTurn) boost::asio::post(io_, [self] { self->pump(); });
  arm();
}

/// False when the connection has ended.
bool Session::flush() {
  if (channel_->wants_write()) {
    const auto empty = channel_->try_flush();
    if (!empty.ok()) {
      close(empty.status());
      return false;
    }
  }
  if (!channel_->wants_write())
    write_since_.reset();
  else if (!write_since_)
    write_since_ = ipc::Clock::now();
  if (finishing_ && !channel_->wants_write()) {
    close(farewell_);
    return false;
  }
  return true;
}

/// True when a whole frame was taken.
bool Session::read_one() {
  auto received = channel_->try_receive();
  if (!received.ok()) {
    // The peer deserves a readable reason (CO-109), unless it is gone.
    if (received.status().code() == StatusCode::kUnavailable)
      close(received.status());
    else
      refuse(received.status());
    return false;
  }
  if (!received->has_value()) return false;
  spoken_ = true;
  const Status foreign = foreign_version(*channel_);
  auto request = ipc::decode_request((*received)->body);
  if (!request.ok()) {
    refuse(foreign.ok() ? request.status() : foreign);
    return true;
  }
  ++in_flight_;
  callbacks_.request(*std::move(request), foreign);
  return true;
}

void Session::send(const ipc::Response& response, std::vector<UniqueFd> fds) {
  const size_t first = std::min<size_t>(fds.size(), ipc::kMaxFdsPerFrame);
  std::vector<UniqueFd> rest(std::make_move_iterator(fds.begin() + static_cast<ptrdiff_t>(first)),
                             std::make_move_iterator(fds.end()));
  fds.resize(first);
  Status status = channel_->send({ipc::encode(response), std::move(fds)});
  for (size_t begin = 0; status.ok() && begin < rest.size(); begin += ipc::kMaxFdsPerFrame) {
    const size_t count = std::min<size_t>(rest.size() - begin, ipc::kMaxFdsPerFrame);
    std::vector<UniqueFd> part;
    for (size_t i = 0; i < count; ++i) part.push_back(std::move(rest[begin + i]));
    const ipc::Response more{response.id, ipc::MoreFdsReply{static_cast<uint32_t>(count)}};
    status = channel_->send({ipc::encode(more), std::move(part)});
  }
  if (!status.ok()) close(status);
}

void Session::answer(ipc::Response response, std::vector<UniqueFd> fds) {
  if (ended_) return;
  if (in_flight_ > 0) --in_flight_;
  send(response, std::move(fds));
  pump();
}

void Session::push(ipc::Response event) {
  if (ended_ || finishing_) return;
  event.id = 0;
  send(event, {});
  pump();
}

void Session::refuse(const Status& why, uint64_t request) {
  if (ended_ || finishing_) return;
  finishing_ = true;
  farewell_ = why;
  send({request, why}, {});
  pump();
}

void Session::close(const Status& why) {
  if (ended_) return;
  ended_ = true;
  if (descriptor_.is_open()) (void)descriptor_.release();
  channel_.reset();
  timer_.cancel();
  boost::asio::post(io_, [callback = std::move(callbacks_.closed), why] { callback(why); });
}

// --- waiting -------------------------------------------------------------------------------------------------------------

void Session::arm() {
  const auto self = shared_from_this();
  const auto wait = [&](Descriptor::wait_type type, bool Session::*armed) {
    if (this->*armed) return;
    this->*armed = true;
    descriptor_.async_wait(type, [self, armed, type](const error_code& error) {
      (*self).*armed = false;
      if (error || self->ended_) return;
      if (type == Descriptor::wait_error) self->on_hang_up();
      self->pump();
    });
  };
  if (may_read())
    wait(Descriptor::wait_read, &Session::read_armed_);
  else
    wait(Descriptor::wait_error, &Session::error_armed_);
  if (channel_->wants_write()) wait(Descriptor::wait_write, &Session::write_armed_);
  arm_deadline();
}

/// Nothing is being read just now, so a peer that is gone would go unnoticed.
void Session::on_hang_up() {
  pollfd state{channel_->fd(), 0, 0};
  if (::poll(&state, 1, 0) > 0 && (state.revents & (POLLHUP | POLLERR)) != 0) close(Status::unavailable("closed by peer"));
}

std::optional<ipc::Deadline> Session::deadline() const {
  std::optional<ipc::Deadline> next;
  const auto consider = [&](std::optional<ipc::Deadline> since, std::chrono::milliseconds limit) {
    if (since && (!next || *since + limit < *next)) next = *since + limit;
  };
  if (!finishing_ && !spoken_) consider(started_, limits_.message_deadline);
  if (may_read()) consider(channel_->partial_since(), limits_.message_deadline);
  consider(write_since_, limits_.write_deadline);
  return next;
}

void Session::arm_deadline() {
  const auto next = deadline();
  if (next == armed_deadline_) return;
  armed_deadline_ = next;
  if (!next) {
    timer_.cancel();
    return;
  }
  timer_.expires_at(*next);
  timer_.async_wait([self = shared_from_this()](const error_code& error) {
    if (!error && !self->ended_) self->on_deadline();
  });
}

void Session::on_deadline() {
  armed_deadline_.reset();
  const auto now = ipc::Clock::now();
  const auto next = deadline();
  if (!next || now < *next) return arm_deadline();
  if (write_since_ && now >= *write_since_ + limits_.write_deadline) {
    return close(Status::deadline_exceeded("the peer did not read its replies for " +
                                           std::to_string(limits_.write_deadline.count()) + " ms (write_deadline_ms)"));
  }
  refuse(Status::deadline_exceeded("message not complete within " + std::to_string(limits_.message_deadline.count()) +
                                   " ms (message_deadline_ms)"));
}

}  // namespace weightd::daemon
