// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "client/fork_guard.h"
#include "client/mapping.h"
#include "client/rpc.h"
#include "weightd/client.h"
#include "weightd/status.h"

namespace weightd::detail {

/// What a Client is: one connection at a time to the daemon, renewed when it is lost, and the mappings leased over it.
///
/// Calls are serialised by mutex_. Ending a lease never waits for another thread's call: what is to be given back is queued, and
/// whoever holds the mutex sends it.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  [[nodiscard]] static Result<std::shared_ptr<Connection>> open(const ClientOptions& options);

  [[nodiscard]] Result<std::vector<ModelInfo>> list();
  [[nodiscard]] Result<std::shared_ptr<Lease>> acquire(std::string_view name, const AcquireOptions& options);
  [[nodiscard]] Result<std::vector<Event>> poll_events();
  [[nodiscard]] int event_fd() const { return home_.left() ? -1 : event_fd_.load(std::memory_order_relaxed); }
  [[nodiscard]] std::string daemon_version() const;
  [[nodiscard]] std::string backend() const;

  /// One lease on `mapping` has ended; the last one unmaps it and gives it back to the daemon. kFailedPrecondition: a stream is
  /// being captured, so that unmapping is put off until a later end or acquire(). kCuda: unmapped, but work that was waited for had
  /// failed.
  Status end(const std::shared_ptr<Mapping>& mapping, bool wait_for_daemon);

 private:
  /// The right to use rpc_; what was queued meanwhile is sent at its end.
  class Turn;
  /// A lease that ended while the daemon could not be told: without a word it would keep the memory for this process as an orphan.
  struct Owed {
    std::string name, device, content_id;
  };

  Connection(const ClientOptions& options, std::string socket_path, std::string name);

  [[nodiscard]] Status refuse_fork() const;
  /// Sends `body` on a live connection, renewed if need be, and tried once more when the daemon turns out to be lost.
  [[nodiscard]] Result<Rpc::Reply> ask(const RequestBody& body, std::chrono::milliseconds timeout);
  Status ensure_connected(ipc::Deadline deadline);
  Status reconnect(ipc::Deadline deadline);
  void lease_again(ipc::Deadline deadline);
  void lease_again(Mapping& mapping, ipc::Deadline deadline);
  /// The memory behind `mapping` went with an owner that this connection did not see end.
  void lose(Mapping& mapping);
  void settle_owed(ipc::Deadline deadline);
  void note_loss();
  void take_events();
  void queue_event(Event event);
  /// What `event` says of a mapping that is held here.
  void apply(const Event& event, Mapping& mapping);
  /// Leaves a lost connection to the caller, who may be in a call on it. kDeadlineExceeded: `wait_for_daemon`, and it did not
  /// answer; given back all the same.
  Status give_back_ended(bool wait_for_daemon);
  /// Unmaps what could not be unmapped when its last lease ended.
  void unmap_put_off();
  [[nodiscard]] Result<std::shared_ptr<Mapping>> share_or_map(const ipc::AcquiredReply& acquired, std::vector<UniqueFd> fds);
  /// The living mapping of this generation, with one holder more.
  [[nodiscard]] std::shared_ptr<Mapping> find_shared(const ModelInfo& info);

  const HomeProcess home_;
  const std::chrono::milliseconds call_timeout_, shortest_pause_;
  const std::string socket_path_, name_;
  std::atomic<int> event_fd_{-1};

  std::mutex mutex_;  // of all that follows, but for what says otherwise
  std::unique_ptr<Rpc> rpc_;
  Status last_failure_;
  std::chrono::milliseconds pause_;
  ipc::Deadline next_attempt_{};
  bool lease_again_wanted_ = false;
  std::deque<Event> events_;
  std::vector<std::weak_ptr<Mapping>> mappings_;
  std::deque<Owed> owed_;

  mutable std::mutex ended_mutex_;  // of Mapping::holders, ended_ and put_off_; taken last
  std::vector<std::shared_ptr<Mapping>> ended_, put_off_;

  mutable std::mutex hello_mutex_;
  std::string daemon_version_, backend_;
};

}  // namespace weightd::detail
