// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <signal.h>
#include <sys/types.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/fd.h"
#include "daemon/registry.h"
#include "ipc/channel.h"
#include "ipc/messages.h"
#include "weightd/status.h"

namespace weightd::daemon {

/// One weightd-loader process and the talk with it. Everything that it says is checked as if it were foreign: it parses files that
/// nobody vouches for. It never outlives this daemon: its end of the socket tells it. Not thread-safe; lives on the event loop.
class LoaderJob : public std::enable_shared_from_this<LoaderJob> {
 public:
  struct Options {
    std::string program;                      // weightd-loader
    std::chrono::milliseconds stall{60'000};  // without any progress for so long it fails
  };
  /// All from the event loop. Nothing but `ended` comes after cancel(). Unused ones may be empty.
  struct Callbacks {
    std::function<void(const ipc::Planned&)> planned;  // answer with admit() or cancel()
    std::function<void(uint64_t bytes)> progress;
    std::function<void()> uploaded;  // all chunks are held
    std::function<void(ChunkSet)> verified;
    std::function<void(ipc::VerifiedReply)> scrubbed;
    std::function<void(ipc::ProbeReply)> probed;
    std::function<void(const Status&)> ended;  // once, after the process is gone: ok, or why it failed
  };
  [[nodiscard]] static Result<std::shared_ptr<LoaderJob>> start(boost::asio::io_context& io, const Options& options,
                                                                const ipc::Job& job, std::vector<UniqueFd> fds,
                                                                Callbacks callbacks);
  LoaderJob(const LoaderJob&) = delete;
  LoaderJob& operator=(const LoaderJob&) = delete;
  ~LoaderJob();  // a process that still runs is killed, and waited for within reason

  void admit();
  void cancel(const Status& why);
  /// After `verified` of a load for the legacy transport the process stays, as the owner of the memory. This lets it go: it ends,
  /// and is ended by force if it has not within the stall limit; then comes `ended`, ok. When it ends by itself: `ended` with the
  /// reason.
  [[nodiscard]] bool owns_memory() const { return owner_; }
  void let_go();
  [[nodiscard]] pid_t pid() const { return pid_; }
  [[nodiscard]] bool killed() const { return pid_ > 0 && killed_; }  // and not yet gone

 private:
  LoaderJob(boost::asio::io_context& io, const Options& options, Callbacks callbacks);
  Status spawn(UniqueFd child_socket);
  void send_job(const ipc::Job& job, std::vector<UniqueFd> fds);
  void send(const ipc::LoaderMessage& message, std::vector<UniqueFd> fds = {});
  void pump();
  bool read_one();
  void handle(ipc::LoaderMessage message, std::vector<UniqueFd> fds);
  Status on_planned(const ipc::Planned& plan);
  Status on_chunks(uint32_t count, std::vector<UniqueFd> fds);
  Status on_verified(const ipc::LoadResult& result, std::vector<UniqueFd> fds);
  [[nodiscard]] Status check_memory(const ipc::LoadResult& result) const;
  void fail(const Status& why);
  void hang_up();
  void kill();
  void wait_for_exit();
  void on_exit(const siginfo_t& info);
  void expect_progress();
  void expect_exit();

  boost::asio::io_context& io_;
  Options options_;
  Callbacks callbacks_;
  pid_t pid_ = 0;
  ipc::Job job_;
  bool owner_ = false, let_go_ = false, killed_ = false;
  std::unique_ptr<ipc::Channel> channel_;
  boost::asio::posix::stream_descriptor descriptor_;  // borrows the channel's socket for waiting
  boost::asio::posix::stream_descriptor exit_;        // the child's pidfd
  boost::asio::steady_timer stall_timer_;
  bool read_armed_ = false, write_armed_ = false;
  std::optional<ipc::Planned> plan_;
  bool admitted_ = false, done_ = false;
  uint64_t progress_bytes_ = 0, held_bytes_ = 0;
  ChunkSet memory_;
  std::optional<Status> failure_;  // the first one counts
};

}  // namespace weightd::daemon
