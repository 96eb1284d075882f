// SPDX-License-Identifier: Apache-2.0
#include "daemon/keeper.h"

#include <fcntl.h>
#include <poll.h>

#include <algorithm>
#include <boost/asio/post.hpp>
#include <cerrno>
#include <utility>

#include "base/text.h"
#include "daemon/machine.h"
#include "daemon/model_file.h"

namespace weightd::daemon {
namespace {

using boost::system::error_code;
using std::chrono::milliseconds;

constexpr milliseconds kStopLimit{10'000};  // for processes that do not end even by force

Registry::Limits registry_limits(const Config& config) {
  Registry::Limits limits;
  limits.leases_per_session = static_cast<uint32_t>(config.max_leases_per_session);
  return limits;
}

/// Whether the process behind `pidfd` lives; false for -1.
bool is_alive(int pidfd) {
  if (pidfd < 0) return false;
  pollfd state{pidfd, POLLIN, 0};
  int ready = 0;
  do {
    ready = ::poll(&state, 1, 0);
  } while (ready < 0 && errno == EINTR);
  return ready == 0;
}

}  // namespace

Result<std::vector<UniqueFd>> duplicates(const ChunkSet& memory) {
  std::vector<UniqueFd> fds;
  const auto add = [&](const UniqueFd& fd) {
    fds.emplace_back(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0));
    return fds.back().valid();
  };
  bool ok = add(memory.table);
  for (const UniqueFd& chunk : memory.chunks) ok = ok && add(chunk);
  if (!ok) return status_from_errno(errno, "duplicating chunk descriptors");
  return fds;
}

Keeper::Keeper(boost::asio::io_context& io, Log& log, const Config& config, DeviceSet devices, Callbacks callbacks)
    : io_(io),
      log_(log),
      config_(config),
      devices_(std::move(devices)),
      callbacks_(std::move(callbacks)),
      registry_(Ledger(devices_.devices), registry_limits(config)),
      prober_(io),
      timer_(io),
      stop_timer_(io),
      files_(1),
      reclaimer_(1) {}

Keeper::~Keeper() {
  files_.join();
  reclaimer_.join();
}

void Keeper::set_config(const Config& config) {
  const uint64_t old_budget = config_.budget_bytes;
  config_ = config;
  if (config.budget_bytes == old_budget || config.budget_bytes == 0) return;
  for (const auto& device : std::vector<Ledger::Device>(registry_.ledger().devices())) {
    registry_.ledger().set_budget(device.uuid, devices_.cuda() ? gpu_budget(config, device.total_bytes) : config.budget_bytes);
  }
}

// --- requests ------------------------------------------------------------------------------------------------------------

void Keeper::load(const Ticket& ticket, const ipc::LoadRequest& request, bool any_path) {
  std::optional<Time> deadline;
  if (request.timeout_ms > 0) deadline = Clock::now() + std::chrono::milliseconds(request.timeout_ms);
  const LoadCommand command{request.model, request.path, request.device, 0, request.transport.empty() ? "fd" : request.transport};
  boost::asio::post(files_, [this, ticket, command, deadline, any_path, folders = config_.model_folders] {
    auto bundle = any_path ? open_model_anywhere(command.source) : open_model_below(folders, command.source);
    const auto opened = std::make_shared<Result<UniqueFd>>(std::move(bundle));
    boost::asio::post(io_, [this, ticket, command, deadline, opened] {
      if (stopped_ || !registry_.has_session(ticket.session)) return;
      if (opened->ok())
        begin_load(ticket, command, deadline, std::move(opened->value()));
      else
        callbacks_.answer({ticket, opened->status()});
    });
  });
}

/// Whether the device can serve it at all. Which device is meant, and whether it exists, the registry says.
Status Keeper::check_place(const LoadCommand& command) const {
  const auto place = registry_.resolve(command.model, command.device);
  return place.ok() ? check_transport(devices_, place->device, command.transport) : Status();
}

void Keeper::begin_load(const Ticket& ticket, const LoadCommand& command, std::optional<Time> deadline, UniqueFd bundle) {
  if (Status status = check_place(command); !status.ok()) return callbacks_.answer({ticket, std::move(status)});
  Effects effects;
  registry_.load(ticket, command, deadline, Clock::now(), effects);
  for (const GenerationId generation : effects.start) {
    Job job;
    job.generation = generation;
    job.bundle = std::move(bundle);
    queue_.push_back(next_job_);
    jobs_.emplace(next_job_++, std::move(job));
  }
  apply(std::move(effects));
  start_jobs();
}

void Keeper::acquire(const Ticket& ticket, const ipc::AcquireRequest& request) {
  Effects effects;
  registry_.acquire(ticket, request, Clock::now(), effects);
  apply(std::move(effects));
}

void Keeper::release(const Ticket& ticket, LeaseId lease) {
  Effects effects;
  registry_.release(ticket, lease, effects);
  apply(std::move(effects));
}

void Keeper::take_back(LeaseId lease) {
  Effects effects;
  registry_.take_back(lease, effects);
  apply(std::move(effects));
}

void Keeper::unload(const Ticket& ticket, const ipc::UnloadRequest& request) {
  const uint64_t wait_ms = request.timeout_ms > 0 ? request.timeout_ms : config_.drain_timeout_ms;
  const Time now = Clock::now();
  Effects effects;
  registry_.unload(ticket, request.model, request.device, now + std::chrono::milliseconds(wait_ms), now, effects);
  apply(std::move(effects));
}

void Keeper::verify(const Ticket& ticket, const std::string& model) {
  const auto generation = registry_.published(model, "");
  if (!generation.ok()) {
    callbacks_.scrubbed(ticket, generation.status());
    return;
  }
  if (registry_.command(*generation)->transport != "fd") {
    callbacks_.scrubbed(ticket, Status::unsupported("model '" + printable(model) +
                                                    "' is on the legacy transport: its memory cannot be handed to a verifier"));
    return;
  }
  Job job;
  job.generation = *generation;
  job.ticket = ticket;
  job.verify = true;
  queue_.push_back(next_job_);
  jobs_.emplace(next_job_++, std::move(job));
  start_jobs();
}

void Keeper::close_session(SessionId session, const Process& process, UniqueFd pidfd) {
  Effects effects;
  registry_.close_session(session, is_alive(pidfd.get()), effects);
  for (const Process& orphaned : effects.watch) {
    WEIGHTD_CHECK(orphaned == process);
    watch(process, std::move(pidfd));
  }
  effects.watch.clear();
  cancel_jobs([&](const Job& job) { return job.verify && job.ticket.session == session; },
              Status::cancelled("nobody waits for this verification any more"));
  apply(std::move(effects));
}

// --- jobs ----------------------------------------------------------------------------------------------------------------

LoaderJob::Options Keeper::loader_options() const { return {config_.loader_path, milliseconds(config_.load_stall_ms)}; }

ipc::Job Keeper::job_message(GenerationId generation) const {
  const LoadCommand* command = registry_.command(generation);
  WEIGHTD_CHECK(command != nullptr);
  ipc::Job message;
  message.backend = devices_.backend;
  message.device = command->device;
  message.transport = command->transport;
  message.residency = "fast";
  message.chunk_bytes = config_.chunk_bytes;
  message.threads = static_cast<uint32_t>(config_.loader_threads);
  return message;
}

void Keeper::start_jobs() {
  const auto running = [&] {
    return static_cast<uint64_t>(
        std::count_if(jobs_.begin(), jobs_.end(), [](const auto& entry) { return entry.second.process != nullptr; }));
  };
  while (!stopped_ && !queue_.empty() && running() < config_.max_jobs) {
    const JobId id = queue_.front();
    queue_.pop_front();
    const auto job = jobs_.find(id);
    if (job == jobs_.end() || job->second.cancelled) continue;
    const Status status = job->second.verify ? start_verify(id, job->second) : start_load(id, job->second);
    if (!status.ok()) end_later(id, job->second, status);
  }
}

Status Keeper::start_load(JobId id, Job& job) {
  const LoadCommand* command = registry_.command(job.generation);
  WEIGHTD_CHECK(command != nullptr);
  ipc::Job message = job_message(job.generation);
  message.kind = ipc::LoadJob{};
  message.bundle_name = command->source;
  message.fd_count = 1;
  std::vector<UniqueFd> fds;
  fds.push_back(std::move(job.bundle));
  WEIGHTD_ASSIGN_OR_RETURN(job.process,
                           LoaderJob::start(io_, loader_options(), message, std::move(fds), load_callbacks(id, job.generation)));
  return {};
}

LoaderJob::Callbacks Keeper::load_callbacks(JobId id, GenerationId generation) {
  LoaderJob::Callbacks callbacks;
  callbacks.planned = [this, generation](const ipc::Planned& plan) { on_planned(generation, plan); };
  callbacks.progress = [this, generation](uint64_t bytes) { registry_.progress(generation, bytes); };
  callbacks.uploaded = [this, generation] { registry_.uploaded(generation); };
  callbacks.verified = [this, id, generation](ChunkSet memory) { on_verified(id, generation, std::move(memory)); };
  callbacks.ended = [this, id, generation](const Status& status) { on_ended(id, generation, status); };
  return callbacks;
}

void Keeper::on_planned(GenerationId generation, const ipc::Planned& plan) {
  const LoadCommand* command = registry_.command(generation);
  // A loader with a context knows without a further process, which would start for a tenth of a second.
  const bool known = devices_.cuda() && plan.available_bytes > 0 && command != nullptr;
  if (known) registry_.ledger().set_available(command->device, plan.available_bytes);
  with_available(!known, [this, generation, plan] {
    if (registry_.command(generation) == nullptr) return;  // it ended meanwhile
    Effects effects;
    registry_.planned(generation, plan, effects);
    apply(std::move(effects));
  });
}

void Keeper::on_verified(JobId id, GenerationId generation, ChunkSet memory) {
  Effects effects;
  registry_.verified(generation, std::move(memory), Clock::now(), effects);
  const auto job = jobs_.find(id);
  const bool owner = job != jobs_.end() && job->second.process && job->second.process->owns_memory();
  if (owner && registry_.view(generation)) {
    owners_.emplace(generation, std::move(job->second.process));
    jobs_.erase(job);
  } else if (owner) {
    job->second.process->cancel(Status::cancelled("cancelled"));
  }
  apply(std::move(effects));
  start_jobs();
}

void Keeper::on_ended(JobId id, GenerationId generation, const Status& status) {
  if (jobs_.count(id) > 0)
    end_job(id, status);
  else
    end_owner(generation, status);
}

/// ok: it was let go, so its memory is free now. Else it ended by itself, and the memory of its generation went with it.
void Keeper::end_owner(GenerationId generation, const Status& status) {
  owners_.erase(generation);
  if (status.ok()) {
    give_back(generation);
  } else {
    Effects effects;
    registry_.owner_lost(generation, status.message(), effects);
    apply(std::move(effects));
  }
  finish_stop();
}

Status Keeper::start_verify(JobId id, Job& job) {
  const auto view = registry_.view(job.generation);
  if (!view) return Status::cancelled("the model was unloaded meanwhile");
  WEIGHTD_ASSIGN_OR_RETURN(std::vector<UniqueFd> fds, duplicates(*view->memory));
  ipc::Job message = job_message(job.generation);
  message.kind = ipc::VerifyJob{view->memory->chunk_bytes, view->plan->arena_bytes};
  message.bundle_name = registry_.command(job.generation)->model;
  message.fd_count = static_cast<uint32_t>(fds.size());
  WEIGHTD_ASSIGN_OR_RETURN(job.process, LoaderJob::start(io_, loader_options(), message, std::move(fds), verify_callbacks(id)));
  return {};
}

LoaderJob::Callbacks Keeper::verify_callbacks(JobId id) {
  LoaderJob::Callbacks callbacks;
  callbacks.scrubbed = [this, id](ipc::VerifiedReply reply) {
    const auto job = jobs_.find(id);
    if (job == jobs_.end()) return;
    if (!reply.bad_blocks.empty()) {
      log_.error("model '" + printable(registry_.command(job->second.generation)->model) + "': " +
                 std::to_string(reply.bad_blocks.size()) + " of " + std::to_string(reply.blocks) + " resident blocks are damaged");
    }
    callbacks_.scrubbed(job->second.ticket, Result<ipc::VerifiedReply>(std::move(reply)));
    job->second.ticket = {};
  };
  callbacks.ended = [this, id](const Status& status) { end_job(id, status); };
  return callbacks;
}

void Keeper::end_job(JobId id, const Status& status) {
  const auto entry = jobs_.find(id);
  if (entry == jobs_.end()) return;
  const Job job = std::move(entry->second);
  jobs_.erase(entry);
  if (!job.verify) {
    with_available(registry_.awaits_room(), [this, generation = job.generation, status] {
      Effects effects;
      registry_.job_ended(generation, status, effects);
      apply(std::move(effects));
    });
  } else if (job.ticket.session != 0) {
    callbacks_.scrubbed(job.ticket, status.ok() ? Status::internal("the verifier ended without a result") : status);
  }
  finish_stop();
  start_jobs();
}

void Keeper::finish_stop() {
  if (!stopped_ || !jobs_.empty() || !owners_.empty()) return;
  stop_timer_.cancel();
  boost::asio::post(io_, stopped_);
}

void Keeper::cancel_jobs(const std::function<bool(const Job&)>& which, const Status& why) {
  for (auto& [id, job] : jobs_) {
    if (!which(job)) continue;
    if (job.process)
      job.process->cancel(why);
    else if (!job.cancelled)
      end_later(id, job, why);
  }
}

/// A job without a process: its end is reported from the loop, as that of a process is.
void Keeper::end_later(JobId id, Job& job, const Status& why) {
  job.cancelled = true;
  boost::asio::post(io_, [this, id, why] { end_job(id, why); });
}

void Keeper::stop(std::function<void()> done) {
  stopped_ = std::move(done);
  timer_.cancel();
  watches_.clear();
  prober_.stop();
  cancel_jobs([](const Job&) { return true; }, Status::cancelled("weightd is stopping"));
  let_owners_go();
  // A process that hangs in a driver cannot be waited for; it is not ours any more once this one has ended.
  stop_timer_.expires_after(kStopLimit);
  stop_timer_.async_wait([this](const error_code& error) {
    if (error) return;
    log_.error("stopping without " + std::to_string(jobs_.size() + owners_.size()) + " loaders that do not end");
    stopped_();
  });
  finish_stop();
}

/// Memory of the legacy transport ends with its owner, and the owner with the daemon: whoever computes on it must know.
void Keeper::let_owners_go() {
  Effects effects;
  for (const auto& [generation, owner] : owners_) {
    registry_.owner_lost(generation, "weightd stopped, and memory of the legacy transport cannot outlive it", effects);
    owner->let_go();
  }
  apply(std::move(effects));
}

// --- effects -------------------------------------------------------------------------------------------------------------

void Keeper::apply(Effects effects) {
  WEIGHTD_CHECK(effects.watch.empty());  // close_session has taken them
  const auto find_job = [&](GenerationId generation) {
    return std::find_if(jobs_.begin(), jobs_.end(),
                        [&](const auto& entry) { return !entry.second.verify && entry.second.generation == generation; });
  };
  for (const GenerationId generation : effects.admit) {
    const auto job = find_job(generation);
    if (job != jobs_.end() && job->second.process) job->second.process->admit();
  }
  for (const GenerationId generation : effects.cancel) {
    cancel_jobs([&](const Job& job) { return !job.verify && job.generation == generation; }, Status::cancelled("cancelled"));
  }
  for (Effects::Drop& drop : effects.drop) reclaim(std::move(drop));
  for (const Notice& notice : effects.notices) callbacks_.notice(notice);
  for (Answer& answer : effects.answers) callbacks_.answer(std::move(answer));
  forget_idle_watches();
  arm_timer();
}

void Keeper::reclaim(Effects::Drop drop) {
  cancel_jobs([&](const Job& job) { return job.verify && job.generation == drop.generation; },
              Status::cancelled("the model was unloaded meanwhile"));
  if (const auto owner = owners_.find(drop.generation); owner != owners_.end()) return owner->second->let_go();
  const auto memory = std::make_shared<ChunkSet>(std::move(drop.memory));
  boost::asio::post(reclaimer_, [this, memory, generation = drop.generation] {
    *memory = {};
    boost::asio::post(io_, [this, generation] { give_back(generation); });
  });
}

void Keeper::give_back(GenerationId generation) {
  with_available(registry_.awaits_room(), [this, generation] {
    Effects effects;
    registry_.reclaimed(generation, effects);
    apply(std::move(effects));
  });
}

void Keeper::with_available(bool needed, std::function<void()> next) {
  if (!devices_.cuda()) {
    const uint64_t available = host_memory().available_bytes;
    registry_.ledger().set_available(std::string(kHostDevice), available > 0 ? std::optional<uint64_t>(available) : std::nullopt);
    return next();
  }
  if (!needed || stopped_) return next();
  probe([this, next = std::move(next)](const Result<ipc::ProbeReply>& reply) {
    note_available(reply);
    next();
  });
}

/// A limit beside the budget; what the driver does not tell limits nothing, and then the allocation itself decides.
void Keeper::note_available(const Result<ipc::ProbeReply>& reply) {
  if (!reply.ok()) log_.warning("free memory of the GPUs is unknown: " + reply.status().message());
  for (const auto& device : std::vector<Ledger::Device>(registry_.ledger().devices())) {
    std::optional<uint64_t> free;
    if (reply.ok()) {
      for (const ipc::GpuSummary& gpu : reply->gpus) {
        if (gpu.uuid == device.uuid && (gpu.nvml_known || gpu.free_bytes > 0)) free = gpu.free_bytes;
      }
    }
    registry_.ledger().set_available(device.uuid, free);
  }
}

void Keeper::probe(Prober::Answer answer) {
  prober_.ask(config_.loader_path, false, milliseconds(config_.nvml_timeout_ms), std::move(answer));
}

void Keeper::inspect(std::function<void()> work, std::function<void()> done) {
  boost::asio::post(files_, [this, work = std::move(work), done = std::move(done)] {
    work();
    boost::asio::post(io_, [this, done] {
      if (!stopped_) done();
    });
  });
}

std::map<std::string, uint64_t> Keeper::processes() const {
  std::map<std::string, uint64_t> counts;
  const auto count = [&](GenerationId generation) {
    if (const LoadCommand* command = registry_.command(generation)) ++counts[command->device];
  };
  for (const auto& [id, job] : jobs_) {
    if (job.process) count(job.generation);
  }
  for (const auto& [generation, owner] : owners_) count(generation);
  return counts;
}

void Keeper::watch(const Process& process, UniqueFd pidfd) {
  if (stopped_ || watches_.count(process) > 0) return;
  auto descriptor = std::make_unique<boost::asio::posix::stream_descriptor>(io_);
  error_code error;
  descriptor->assign(pidfd.get(), error);
  if (error) {
    log_.error("cannot watch process " + std::to_string(process.pid) + ": " + error.message());
    return;
  }
  (void)pidfd.release();
  watches_.emplace(process, std::move(descriptor));
  wait_for_end(process);
}

void Keeper::wait_for_end(const Process& process) {
  watches_.at(process)->async_wait(boost::asio::posix::stream_descriptor::wait_read, [this, process](const error_code& failed) {
    if (failed) return;
    // Asio may wake a wait for what happened to an earlier descriptor: only the pidfd itself is believed.
    if (is_alive(watches_.at(process)->native_handle())) return wait_for_end(process);
    watches_.erase(process);
    Effects effects;
    registry_.process_ended(process, effects);
    apply(std::move(effects));
  });
}

void Keeper::forget_idle_watches() {
  std::erase_if(watches_, [&](const auto& entry) { return !registry_.has_orphans(entry.first); });
}

void Keeper::arm_timer() {
  const auto next = registry_.next_deadline();
  if (next == armed_ || stopped_) return;
  armed_ = next;
  if (!next) {
    timer_.cancel();
    return;
  }
  timer_.expires_at(*next);
  timer_.async_wait([this](const error_code& error) {
    if (error) return;
    armed_.reset();
    Effects effects;
    registry_.expire(Clock::now(), effects);
    apply(std::move(effects));
  });
}

}  // namespace weightd::daemon
