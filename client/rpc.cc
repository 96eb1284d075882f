// SPDX-License-Identifier: Apache-2.0
#include "client/rpc.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <limits>
#include <utility>

#include "base/text.h"
#include "base/version.h"

namespace weightd::detail {
namespace {

using std::chrono::milliseconds;

// A list of models is the largest answer; the tensor table travels in a memfd.
constexpr uint32_t kMaxReplyBytes = 64U << 20;
constexpr size_t kMaxQueuedEvents = 1024;
constexpr size_t kMaxOverdueCalls = 8;  // more: this daemon does not answer, a new connection may
constexpr milliseconds kMeanwhileEvery{100};
constexpr milliseconds kLongest{std::chrono::hours(24 * 365)};

ipc::ChannelOptions channel_options() {
  ipc::ChannelOptions options;
  options.receive.body_bytes = kMaxReplyBytes;
  options.receive.fd_count = ipc::kMaxFdsPerFrame;
  return options;
}

}  // namespace

ipc::Deadline deadline_in(milliseconds timeout) { return ipc::Clock::now() + std::clamp(timeout, milliseconds{0}, kLongest); }

std::string socket_path_or(const std::string& given, const char* variable, const char* built_in) {
  if (!given.empty()) return given;
  const char* set = ::secure_getenv(variable);
  return set != nullptr && *set != '\0' ? set : built_in;
}

uint32_t wire_milliseconds(milliseconds timeout) {
  constexpr milliseconds::rep kMost = std::numeric_limits<uint32_t>::max();
  return static_cast<uint32_t>(std::clamp<milliseconds::rep>(timeout.count(), 0, kMost));
}

Status check_model_name(std::string_view model) {
  if (ipc::valid_model_name(model)) return {};
  return Status::invalid_argument("'" + printable(model, 80) + "' is no model name: 1 to " +
                                  std::to_string(ipc::kMaxModelNameBytes) +
                                  " letters, digits, '.', '_', '-', ':', in parts between '/' that begin with a letter or a digit");
}

Status check_text(std::string_view what, std::string_view text, size_t max_bytes) {
  if (text.size() > max_bytes) {
    return Status::invalid_argument(std::string(what) + " has " + std::to_string(text.size()) + " bytes; at most " +
                                    std::to_string(max_bytes) + " are allowed");
  }
  if (!is_utf8(text) || text.find('\0') != std::string_view::npos) {
    return Status::invalid_argument(std::string(what) + " '" + printable(text, 80) + "' is not UTF-8 text without NUL");
  }
  return {};
}

Rpc::Rpc(UniqueFd socket)
    : channel_(std::make_shared<ipc::Channel>(std::move(socket), channel_options())), closed_in_child_(channel_->fd()) {}

Rpc::~Rpc() {
  if (home_.left()) abandon(std::move(channel_));
}

Result<std::unique_ptr<Rpc>> Rpc::open(const std::string& path, const std::string& name, ipc::Deadline deadline) {
  WEIGHTD_ASSIGN_OR_RETURN(UniqueFd socket, ipc::connect_unix(path));
  std::unique_ptr<Rpc> rpc(new Rpc(std::move(socket)));
  Result<Reply> reply = rpc->call(ipc::HelloRequest{std::string(build_id()), name}, deadline);
  if (!reply.ok()) return reply.status().with_context("weightd at " + printable(path));
  auto* hello = std::get_if<ipc::HelloReply>(&reply->body);
  if (hello == nullptr)
    return Status::invalid_argument("weightd at " + printable(path) + ": the answer to hello is of another kind");
  rpc->hello_ = std::move(*hello);
  return rpc;
}

Result<Rpc::Reply> Rpc::call(const RequestBody& body, ipc::Deadline deadline, const std::function<void()>& meanwhile) {
  if (lost()) return failure_;
  const uint64_t id = ++last_id_;
  if (Status sent = send(id, body, deadline); !sent.ok()) {
    if (!lost()) overdue_.emplace(id, 0);
    return sent;
  }
  Result<Reply> reply = answer_to(id, deadline, meanwhile);
  if (!reply.ok() && reply.status().code() == StatusCode::kDeadlineExceeded && overdue_.size() > kMaxOverdueCalls) {
    return lose(Status::unavailable("the daemon has left " + std::to_string(overdue_.size()) + " calls unanswered"));
  }
  return reply;
}

void Rpc::post(const RequestBody& body) {
  if (lost()) return;
  const uint64_t id = ++last_id_;
  posted_.insert(id);
  if (Status sent = channel_->send({ipc::encode(ipc::Request{id, body}), {}}); !sent.ok()) (void)lose(std::move(sent));
}

void Rpc::read_arrived() {
  while (!lost()) {
    Result<std::optional<ipc::Frame>> frame = channel_->try_receive();
    if (!check_peer_version().ok()) return;
    if (!frame.ok()) {
      (void)lose(frame.status());
      return;
    }
    if (!frame->has_value()) return;
    Result<ipc::Response> response = ipc::decode_response((*frame)->body);
    if (Status status = response.ok() ? sort_in(**frame, *std::move(response)) : response.status(); !status.ok())
      (void)lose(std::move(status));
  }
}

Status Rpc::send(uint64_t id, const RequestBody& body, ipc::Deadline deadline) {
  Status status = channel_->send({ipc::encode(ipc::Request{id, body}), {}});
  if (status.ok()) status = channel_->flush(deadline);
  if (status.ok() || status.code() == StatusCode::kDeadlineExceeded) return status;
  // What the daemon said before it hung up explains more than the failed write does.
  read_arrived();
  return lost() ? failure_ : lose(std::move(status));
}

Status Rpc::check_peer_version() {
  if (version_checked_ || !channel_->peer_preamble().has_value()) return {};
  version_checked_ = true;
  Status status = ipc::check_versions(*channel_->peer_preamble());
  return status.ok() ? status : lose(std::move(status));
}

Result<ipc::Frame> Rpc::receive(ipc::Deadline deadline, const std::function<void()>& meanwhile) {
  while (true) {
    Result<std::optional<ipc::Frame>> frame = channel_->try_receive();
    // First: a daemon of another version may say no more than its preamble, or something that we cannot read.
    WEIGHTD_RETURN_IF_ERROR(check_peer_version());
    if (!frame.ok()) return lose(frame.status());
    if (frame->has_value()) return std::move(**frame);
    if (ipc::Clock::now() >= deadline) return Status::deadline_exceeded("the daemon did not answer in time");
    if (meanwhile) meanwhile();
    if (lost()) return failure_;
    WEIGHTD_RETURN_IF_ERROR(wait(meanwhile ? std::min(deadline, ipc::Clock::now() + kMeanwhileEvery) : deadline));
  }
}

// Until something can be read, or `until`. What is queued is written as the socket takes it.
Status Rpc::wait(ipc::Deadline until) {
  pollfd polled{channel_->fd(), POLLIN, 0};
  if (channel_->wants_write()) polled.events |= POLLOUT;
  const auto left = std::chrono::ceil<milliseconds>(until - ipc::Clock::now()).count();
  const int ready = ::poll(&polled, 1, static_cast<int>(std::clamp<milliseconds::rep>(left, 0, std::numeric_limits<int>::max())));
  if (ready < 0 && errno != EINTR) return lose(status_from_errno(errno, "poll"));
  // A failed write tells less than what can still be read.
  if (ready > 0 && (polled.revents & POLLOUT) != 0) (void)channel_->try_flush();
  return {};
}

Result<Rpc::Reply> Rpc::answer_to(uint64_t id, ipc::Deadline deadline, const std::function<void()>& meanwhile) {
  while (true) {
    Result<ipc::Frame> frame = receive(deadline, meanwhile);
    if (!frame.ok()) {
      if (!lost()) overdue_.emplace(id, 0);
      return frame.status();
    }
    Result<ipc::Response> response = ipc::decode_response(frame->body);
    if (!response.ok()) return lose(response.status());
    if (response->id != id) {
      if (Status status = sort_in(*frame, *std::move(response)); !status.ok()) return lose(std::move(status));
      continue;
    }
    if (auto* error = std::get_if<Status>(&response->body)) return *error;
    Reply reply{std::move(response->body), std::move(frame->fds)};
    if (const auto* acquired = std::get_if<ipc::AcquiredReply>(&reply.body)) {
      WEIGHTD_RETURN_IF_ERROR(gather_fds(id, reply, acquired->fd_count, deadline));
    } else if (!reply.fds.empty()) {
      return lose(Status::invalid_argument("the daemon sent descriptors with an answer that has none"));
    }
    return reply;
  }
}

Status Rpc::gather_fds(uint64_t id, Reply& reply, uint32_t count, ipc::Deadline deadline) {
  while (reply.fds.size() < count) {
    Result<ipc::Frame> frame = receive(deadline, {});
    if (!frame.ok()) {
      if (!lost()) {
        overdue_.emplace(id, count - reply.fds.size());
        post(ipc::ReleaseRequest{std::get<ipc::AcquiredReply>(reply.body).lease});
      }
      return frame.status();
    }
    Result<ipc::Response> response = ipc::decode_response(frame->body);
    if (!response.ok()) return lose(response.status());
    const auto* more = std::get_if<ipc::MoreFdsReply>(&response->body);
    if (response->id != id) {
      if (Status status = sort_in(*frame, *std::move(response)); !status.ok()) return lose(std::move(status));
      continue;
    }
    if (more == nullptr || more->count != frame->fds.size() || more->count == 0 || more->count > count - reply.fds.size()) {
      return lose(Status::invalid_argument("the descriptors of a lease do not arrive as announced: " +
                                           std::to_string(reply.fds.size()) + " of " + std::to_string(count) + " are here"));
    }
    std::move(frame->fds.begin(), frame->fds.end(), std::back_inserter(reply.fds));
  }
  return {};
}

// Anything but the answer that a call waits for.
Status Rpc::sort_in(const ipc::Frame& frame, ipc::Response response) {
  if (auto* event = std::get_if<ipc::EventReply>(&response.body); event != nullptr && response.id == 0) {
    if (events_.size() == kMaxQueuedEvents) events_.pop_front();
    events_.push_back(std::move(*event));
    return {};
  }
  // The daemon ends a session with an error of no call.
  if (const auto* error = std::get_if<Status>(&response.body); error != nullptr && response.id == 0) return *error;
  if (posted_.erase(response.id) != 0) return {};
  const auto overdue = overdue_.find(response.id);
  if (overdue == overdue_.end()) {
    return Status::invalid_argument("the daemon answered a call that was never made (number " + std::to_string(response.id) + ")");
  }
  if (const auto* late = std::get_if<ipc::AcquiredReply>(&response.body)) {
    overdue->second = late->fd_count;
    post(ipc::ReleaseRequest{late->lease});
  }
  overdue->second -= std::min(overdue->second, frame.fds.size());
  if (overdue->second == 0) overdue_.erase(overdue);
  return {};
}

Status Rpc::lose(Status why) {
  if (failure_.ok()) failure_ = std::move(why);
  return failure_;
}

}  // namespace weightd::detail
