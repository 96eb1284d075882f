// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/thread_pool.hpp>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "daemon/config.h"
#include "daemon/devices.h"
#include "daemon/loader_job.h"
#include "daemon/log.h"
#include "daemon/prober.h"
#include "daemon/registry.h"

namespace weightd::daemon {

/// Descriptors of the table and then of the chunks, to be given away; kResourceExhausted when there are too many.
[[nodiscard]] Result<std::vector<UniqueFd>> duplicates(const ChunkSet& memory);

/// The registry brought to life: it opens bundles, runs loaders, closes memory, watches processes and keeps time, and hands the
/// answers on. Opening files and giving memory back happen on threads of their own, so that a slow disk or gigabytes of pages never
/// stall the loop. Not thread-safe; lives on the event loop, which must have ended before its destruction.
class Keeper {
 public:
  struct Callbacks {
    std::function<void(Answer&&)> answer;
    std::function<void(const Ticket&, Result<ipc::VerifiedReply>&&)> scrubbed;
    std::function<void(const Notice&)> notice;
  };
  Keeper(boost::asio::io_context& io, Log& log, const Config& config, DeviceSet devices, Callbacks callbacks);
  ~Keeper();
  Keeper(const Keeper&) = delete;
  Keeper& operator=(const Keeper&) = delete;

  /// `any_path`: not confined to model_folders.
  void load(const Ticket& ticket, const ipc::LoadRequest& request, bool any_path);
  void acquire(const Ticket& ticket, const ipc::AcquireRequest& request);
  void release(const Ticket& ticket, LeaseId lease);
  void take_back(LeaseId lease);
  void unload(const Ticket& ticket, const ipc::UnloadRequest& request);
  void verify(const Ticket& ticket, const std::string& model);

  SessionId open_session(const SessionInfo& info) { return registry_.open_session(info); }
  /// `pidfd` of the peer's process; invalid: unknown or gone.
  void close_session(SessionId session, const Process& process, UniqueFd pidfd);

  /// What the driver says of the GPUs now, within nvml_timeout_ms.
  void probe(Prober::Answer answer);
  /// `work` on the thread that opens bundles, then `done` on the loop, unless the daemon stops.
  void inspect(std::function<void()> work, std::function<void()> done);
  [[nodiscard]] const DeviceSet& devices() const { return devices_; }
  /// By device: loaders, verifiers and owners of memory that run there now.
  [[nodiscard]] std::map<std::string, uint64_t> processes() const;

  void set_config(const Config& config);
  /// Ends all jobs; `done` is called once the last process is gone, or refuses to go. Nothing new may be asked.
  void stop(std::function<void()> done);

  [[nodiscard]] const Registry& registry() const { return registry_; }

 private:
  struct Job {
    GenerationId generation = 0;
    Ticket ticket;  // verify
    bool verify = false;
    bool cancelled = false;              // while it was queued
    UniqueFd bundle;                     // load, until it is started
    std::shared_ptr<LoaderJob> process;  // once it is started
  };
  using JobId = uint64_t;

  Status check_place(const LoadCommand& command) const;
  void begin_load(const Ticket& ticket, const LoadCommand& command, std::optional<Time> deadline, UniqueFd bundle);
  void start_jobs();
  Status start_load(JobId id, Job& job);
  Status start_verify(JobId id, Job& job);
  LoaderJob::Callbacks load_callbacks(JobId id, GenerationId generation);
  LoaderJob::Callbacks verify_callbacks(JobId id);
  LoaderJob::Options loader_options() const;
  ipc::Job job_message(GenerationId generation) const;
  void on_planned(GenerationId generation, const ipc::Planned& plan);
  void on_verified(JobId id, GenerationId generation, ChunkSet memory);
  void on_ended(JobId id, GenerationId generation, const Status& status);
  void end_owner(GenerationId generation, const Status& status);
  void let_owners_go();
  void finish_stop();
  void end_job(JobId id, const Status& status);
  void end_later(JobId id, Job& job, const Status& why);
  void cancel_jobs(const std::function<bool(const Job&)>& which, const Status& why);
  void apply(Effects effects);
  void reclaim(Effects::Drop drop);
  void watch(const Process& process, UniqueFd pidfd);
  void wait_for_end(const Process& process);
  void forget_idle_watches();
  void give_back(GenerationId generation);
  /// Learns what is obtainable now, then `next`: at once on the host, where the kernel tells, or when nobody needs to know.
  void with_available(bool needed, std::function<void()> next);
  void note_available(const Result<ipc::ProbeReply>& reply);
  void arm_timer();

  boost::asio::io_context& io_;
  Log& log_;
  Config config_;
  DeviceSet devices_;
  Callbacks callbacks_;
  Registry registry_;
  Prober prober_;
  boost::asio::steady_timer timer_, stop_timer_;
  std::optional<Time> armed_;
  std::deque<JobId> queue_;
  std::map<JobId, Job> jobs_;  // queued and running
  JobId next_job_ = 1;
  std::map<GenerationId, std::shared_ptr<LoaderJob>> owners_;  // legacy transport: loaders that keep the memory of what they loaded
  std::map<Process, std::unique_ptr<boost::asio::posix::stream_descriptor>> watches_;
  std::function<void()> stopped_;
  boost::asio::thread_pool files_;      // opens bundles
  boost::asio::thread_pool reclaimer_;  // closes memory
};

}  // namespace weightd::daemon
