// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/fd.h"
#include "ipc/channel.h"
#include "ipc/messages.h"
#include "weightd/status.h"

namespace weightd::daemon {

struct SessionLimits {
  ipc::ChannelOptions channel;
  uint64_t requests_in_flight = 32;
  std::chrono::milliseconds message_deadline{5'000};
  std::chrono::milliseconds write_deadline{5'000};
};

/// One connection on the event loop: frames in, frames out, and every limit that a peer could strain. It knows nothing of models.
/// While replies wait to be written, or too many requests are unanswered, it reads nothing more from this peer. Not thread-safe.
class Session : public std::enable_shared_from_this<Session> {
 public:
  struct Callbacks {
    /// A request, to be answered with exactly one answer(). `foreign`: the peer speaks none of our protocol versions.
    std::function<void(ipc::Request&& request, const Status& foreign)> request;
    /// Once, from the event loop and never from inside another call: why the connection ended.
    std::function<void(const Status& why)> closed;
  };
  [[nodiscard]] static std::shared_ptr<Session> start(boost::asio::io_context& io, UniqueFd socket, const SessionLimits& limits,
                                                      Callbacks callbacks);
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  ~Session();

  /// Descriptors beyond the first frame's 253 follow in moreFds frames. After the end of the connection: nothing, descriptors
  /// closed.
  void answer(ipc::Response response, std::vector<UniqueFd> fds = {});
  void push(ipc::Response event);
  /// Sends `why` as an error that belongs to no request, or to `request`, then ends the connection.
  void refuse(const Status& why, uint64_t request = 0);
  void close(const Status& why);
  [[nodiscard]] bool ended() const { return ended_; }

 private:
  Session(boost::asio::io_context& io, UniqueFd socket, const SessionLimits& limits, Callbacks callbacks);
  void pump();
  bool flush();
  bool read_one();
  void send(const ipc::Response& response, std::vector<UniqueFd> fds);
  void arm();
  void arm_deadline();
  void on_deadline();
  void on_hang_up();
  [[nodiscard]] bool may_read() const;
  [[nodiscard]] std::optional<ipc::Deadline> deadline() const;

  boost::asio::io_context& io_;
  SessionLimits limits_;
  Callbacks callbacks_;
  std::unique_ptr<ipc::Channel> channel_;
  boost::asio::posix::stream_descriptor descriptor_;  // borrows the channel's socket for waiting; no I/O by Asio
  boost::asio::steady_timer timer_;
  ipc::Deadline started_;
  std::optional<ipc::Deadline> write_since_;
  std::optional<ipc::Deadline> armed_deadline_;
  Status farewell_;  // why it is ending, while the error is being written
  uint64_t in_flight_ = 0;
  bool read_armed_ = false, write_armed_ = false, error_armed_ = false;
  bool spoken_ = false;  // its first message is complete
  bool pumping_ = false, finishing_ = false, ended_ = false;
};

}  // namespace weightd::daemon
