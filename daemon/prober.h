// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "daemon/loader_job.h"
#include "ipc/messages.h"
#include "weightd/status.h"

namespace weightd::daemon {

/// Asks a child what the driver says of the GPUs, within a time limit: a driver that hangs takes the child along, never the daemon.
/// Questions that overlap share one child. Not thread-safe; lives on the event loop.
class Prober {
 public:
  using Answer = std::function<void(const Result<ipc::ProbeReply>&)>;
  explicit Prober(boost::asio::io_context& io) : io_(io) {}
  Prober(const Prober&) = delete;
  Prober& operator=(const Prober&) = delete;

  /// `answer` comes once, from the event loop. kDeadlineExceeded: no answer within `limit`, the child is killed. kUnavailable: a
  /// child that was killed before has not ended within `limit`, so it hangs in the driver, and none is started. Else why the child
  /// failed.
  void ask(const std::string& loader_path, bool deep, std::chrono::milliseconds limit, Answer answer);
  /// Kills the children; nothing is answered any more.
  void stop();

 private:
  struct Run {
    bool deep = false, answered = false;
    std::shared_ptr<LoaderJob> job;
    boost::asio::steady_timer timer;
    std::vector<Answer> waiting;
    explicit Run(boost::asio::io_context& io) : timer(io) {}
  };
  /// Asked while a child that was killed is still there.
  struct Question {
    std::string loader_path;
    bool deep = false, settled = false;
    std::chrono::milliseconds limit{};
    Answer answer;
    boost::asio::steady_timer timer;
    explicit Question(boost::asio::io_context& io) : timer(io) {}
  };
  void start(const std::string& loader_path, bool deep, std::chrono::milliseconds limit, Answer answer);
  void postpone(const std::string& loader_path, bool deep, std::chrono::milliseconds limit, Answer answer);
  void ask_postponed();
  [[nodiscard]] const Run* killed_run() const;
  LoaderJob::Callbacks callbacks(const std::shared_ptr<Run>& run);
  static void finish(Run& run, const Result<ipc::ProbeReply>& reply);

  boost::asio::io_context& io_;
  std::list<std::shared_ptr<Run>> runs_;  // until their process is gone
  std::vector<std::shared_ptr<Question>> postponed_;
};

}  // namespace weightd::daemon
