// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "ipc/channel.h"
#include "ipc/messages.h"
#include "tests/client/test_model.h"

namespace weightd::test {

/// A folder of its own, removed at the end.
class TempFolder {
 public:
  TempFolder();
  ~TempFolder();
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  [[nodiscard]] std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

/// The other end of a client, in a thread: lends hand-made models, and misbehaves as told.
class FakeDaemon {
 public:
  struct Session {
    explicit Session(UniqueFd socket) : channel(std::move(socket), {}) {}
    ipc::Channel channel;
    std::set<uint64_t> leases;
    bool over = false;  // set to hang up
  };
  /// Sees each request before the daemon does, in the daemon's thread. True: that was all, the daemon does nothing.
  using Intercept = std::function<bool(FakeDaemon& daemon, Session& session, const ipc::Request& request)>;

  explicit FakeDaemon(std::string path, Intercept intercept = {}, std::string instance_name = "fake (0)");
  ~FakeDaemon();
  FakeDaemon(const FakeDaemon&) = delete;
  FakeDaemon& operator=(const FakeDaemon&) = delete;

  /// The model is published, for new leases; an earlier one of the name stays leasable by content id.
  void publish(std::shared_ptr<const SealedModel> model);
  void forget(const std::string& name);
  /// To all sessions.
  void send_event(const ipc::EventReply& event);
  /// Hangs up on everybody, and goes on listening.
  void hang_up();

  /// Blocks until `condition` holds for the number of leases, or a long time has passed; whether it holds.
  [[nodiscard]] bool wait_for_leases(size_t count);
  [[nodiscard]] bool wait_for(const std::function<bool()>& condition);
  [[nodiscard]] size_t lease_count() const;
  [[nodiscard]] size_t request_count(size_t body_index) const;  // of ipc::Request::body
  [[nodiscard]] size_t session_count() const;
  [[nodiscard]] std::vector<std::string> client_names() const;

  // For Intercept, in the daemon's thread:
  void reply(Session& session, uint64_t id, decltype(ipc::Response::body) body, std::vector<UniqueFd> fds = {});
  void serve(Session& session, const ipc::Request& request);  // what an honest daemon does
  [[nodiscard]] static ipc::AcquiredReply acquired(const SealedModel& model, uint64_t lease);
  [[nodiscard]] std::shared_ptr<const SealedModel> model(const std::string& name) const;
  uint64_t grant(Session& session);

 private:
  void run();
  void accept();
  void read(Session& session);
  void acquire(Session& session, uint64_t id, const ipc::AcquireRequest& request);
  void wake();

  const std::string path_, build_;
  const Intercept intercept_;
  UniqueFd listener_, wake_read_, wake_write_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::list<Session> sessions_;
  std::vector<std::shared_ptr<const SealedModel>> models_;  // the last one of a name is published
  std::map<size_t, size_t> requests_;
  std::vector<std::string> client_names_;
  uint64_t next_lease_ = 1;
  uint64_t rounds_ = 0;  // of the loop: sessions marked `over` before it are gone
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace weightd::test
