// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/fd.h"
#include "client/fork_guard.h"
#include "ipc/channel.h"
#include "ipc/messages.h"
#include "weightd/status.h"

namespace weightd::detail {

using RequestBody = decltype(ipc::Request::body);
using ResponseBody = decltype(ipc::Response::body);

/// `timeout` from now, without overflow.
[[nodiscard]] ipc::Deadline deadline_in(std::chrono::milliseconds timeout);
/// What the options of both clients say about a socket: `given`, else the environment's, else the built-in path.
[[nodiscard]] std::string socket_path_or(const std::string& given, const char* variable, const char* built_in);
/// `timeout` as a field of the wire: 0 for negative values.
[[nodiscard]] uint32_t wire_milliseconds(std::chrono::milliseconds timeout);
/// kInvalidArgument unless the daemon takes them: it would end the session instead of answering.
Status check_model_name(std::string_view model);
Status check_text(std::string_view what, std::string_view text, size_t max_bytes = ipc::kMaxModelNameBytes);

/// One connection to a daemon: blocking calls with deadlines over an ipc::Channel. Not thread-safe. Destroyed in a forked child, it
/// touches nothing.
class Rpc {
 public:
  struct Reply {
    ResponseBody body;          // never a Status: that is the Result's
    std::vector<UniqueFd> fds;  // all of them, for `acquired`
  };

  /// Connects and says hello as `name`. kUnavailable: nobody there. kUnsupported: no common protocol version.
  [[nodiscard]] static Result<std::unique_ptr<Rpc>> open(const std::string& path, const std::string& name, ipc::Deadline deadline);
  ~Rpc();
  Rpc(const Rpc&) = delete;
  Rpc& operator=(const Rpc&) = delete;

  /// Sends and waits for the answer; the daemon's error is the result's Status. After kDeadlineExceeded the connection goes on: a
  /// late answer is dropped, a late lease given back. `meanwhile`, if any, is called several times a second while it waits.
  [[nodiscard]] Result<Reply> call(const RequestBody& body, ipc::Deadline deadline, const std::function<void()>& meanwhile = {});
  /// Sends without waiting or reading; the answer is dropped when it arrives.
  void post(const RequestBody& body);
  /// Takes in what has arrived, without waiting.
  void read_arrived();

  /// The connection is of no more use; why.
  [[nodiscard]] bool lost() const { return !failure_.ok(); }
  [[nodiscard]] const Status& failure() const { return failure_; }

  [[nodiscard]] int fd() const { return channel_->fd(); }
  [[nodiscard]] const ipc::HelloReply& hello() const { return hello_; }
  [[nodiscard]] bool left_home() const { return home_.surely_left(); }
  /// Events in order of arrival, the oldest dropped beyond a limit.
  [[nodiscard]] std::deque<ipc::EventReply>& events() { return events_; }

 private:
  explicit Rpc(UniqueFd socket);
  Status send(uint64_t id, const RequestBody& body, ipc::Deadline deadline);
  [[nodiscard]] Result<ipc::Frame> receive(ipc::Deadline deadline, const std::function<void()>& meanwhile);
  Status wait(ipc::Deadline until);
  [[nodiscard]] Result<Reply> answer_to(uint64_t id, ipc::Deadline deadline, const std::function<void()>& meanwhile);
  Status gather_fds(uint64_t id, Reply& reply, uint32_t count, ipc::Deadline deadline);
  Status sort_in(const ipc::Frame& frame, ipc::Response response);
  Status check_peer_version();
  Status lose(Status why);

  HomeProcess home_;
  std::shared_ptr<ipc::Channel> channel_;
  ClosedInChild closed_in_child_;
  ipc::HelloReply hello_;
  std::deque<ipc::EventReply> events_;
  std::set<uint64_t> posted_;           // answers that nobody waits for
  std::map<uint64_t, size_t> overdue_;  // calls given up at their deadline; descriptors still to come for a late lease
  uint64_t last_id_ = 0;
  bool version_checked_ = false;
  Status failure_;
};

}  // namespace weightd::detail
