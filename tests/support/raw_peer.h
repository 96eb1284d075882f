// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "ipc/channel.h"
#include "ipc/messages.h"
#include "tests/support/safetensors_builder.h"

namespace weightd::testing {

/// A peer that speaks the protocol frame by frame, with nothing of the client library between test and daemon. Aborts when the
/// daemon does not answer within 30 s.
class RawPeer {
 public:
  explicit RawPeer(const std::string& socket) : channel_(connected(socket), options()) {}

  /// A daemon that has refused us already takes nothing more; what it said can be received.
  void send(const ipc::Request& request) { (void)channel_.send({ipc::encode(request), {}}); }
  /// The next response of any kind, or why there is none.
  Result<ipc::Response> receive() {
    auto frame = channel_.receive(ipc::Clock::now() + std::chrono::seconds(30));
    if (!frame.ok()) {
      require(frame.status().code() != StatusCode::kDeadlineExceeded, "no answer of the daemon within 30 s");
      return frame.status();
    }
    fds_ = std::move(frame->fds);
    return ipc::decode_response(frame->body);
  }
  /// Sends `body` and waits for its answer; events that come in between are kept in events().
  template <typename Body>
  Result<ipc::Response> ask(Body body) {
    const uint64_t id = ++last_id_;
    send({id, std::move(body)});
    return answer_to(id);
  }
  Result<ipc::Response> answer_to(uint64_t id) {
    for (;;) {
      auto response = receive();
      if (!response.ok() || response->id == id) return response;
      if (response->id == 0 && std::holds_alternative<Status>(response->body)) return response;
      if (const auto* event = std::get_if<ipc::EventReply>(&response->body)) events_.push_back(*event);
    }
  }
  /// The same for an answer of type Reply; the error otherwise.
  template <typename Reply, typename Body>
  Result<Reply> get(Body body) {
    return as<Reply>(ask(std::move(body)));
  }
  template <typename Reply>
  static Result<Reply> as(Result<ipc::Response> response) {
    if (!response.ok()) return response.status();
    if (auto* reply = std::get_if<Reply>(&response->body)) return std::move(*reply);
    if (auto* error = std::get_if<Status>(&response->body)) return *error;
    return Status::internal("an answer of another kind");
  }

  [[nodiscard]] std::vector<UniqueFd>& fds() { return fds_; }  // of the last frame
  [[nodiscard]] std::vector<ipc::EventReply>& events() { return events_; }
  [[nodiscard]] ipc::Channel& channel() { return channel_; }
  [[nodiscard]] uint64_t next_id() { return ++last_id_; }

 private:
  static UniqueFd connected(const std::string& socket) {
    auto fd = ipc::connect_unix(socket);
    require(fd.ok(), "connect to " + socket + ": " + fd.status().message());
    return *std::move(fd);
  }
  static ipc::ChannelOptions options() {
    ipc::ChannelOptions options;
    options.receive = {64U << 20, ipc::kMaxFdsPerFrame};
    return options;
  }

  ipc::Channel channel_;
  std::vector<UniqueFd> fds_;
  std::vector<ipc::EventReply> events_;
  uint64_t last_id_ = 0;
};

}  // namespace weightd::testing
