// SPDX-License-Identifier: Apache-2.0
#include "daemon/loader_job.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <boost/asio/post.hpp>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/text.h"

extern char** environ;

namespace weightd::daemon {
namespace {

using boost::system::error_code;
using Descriptor = boost::asio::posix::stream_descriptor;

constexpr int kLoaderSocket = 3;  // where the loader finds its end
constexpr uint32_t kMaxLoaderFrameBytes = 64U << 20;
constexpr std::chrono::milliseconds kReapLimit{1'000};
constexpr int kSealsOfChunks = F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK;

bool is_legacy(const ipc::Job& job) { return job.transport == "legacy"; }

/// Size of a descriptor that nobody can change any more.
Result<uint64_t> sealed_size(const UniqueFd& fd, const std::string& what) {
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  struct stat info {};
  if (seals < 0 || (seals & kSealsOfChunks) != kSealsOfChunks || ::fstat(fd.get(), &info) != 0) {
    return Status::internal("the loader sent " + what + " that is not sealed");
  }
  return static_cast<uint64_t>(info.st_size);
}

Status protocol_error(const std::string& what) { return Status::internal("the loader " + what); }

std::string how_it_ended(const siginfo_t& info) {
  const std::string number = std::to_string(info.si_status);
  if (info.si_code == CLD_EXITED) return "the loader ended with status " + number;
  if (info.si_status == SIGKILL) return "the loader was killed (signal " + number + ")";
  return "the loader was ended by signal " + number + " (" + ::strsignal(info.si_status) + ")";
}

Status exit_status(const siginfo_t& info) {
  const std::string how = how_it_ended(info) + " before it was done";
  if (info.si_code != CLD_EXITED && info.si_status == SIGKILL) return Status::resource_exhausted(how + ": out of memory?");
  return Status::internal(how);
}

/// posix_spawn's attributes and file actions, destroyed with the scope.
struct SpawnPlan {
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  SpawnPlan() {
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawnattr_init(&attributes);
  }
  SpawnPlan(const SpawnPlan&) = delete;
  SpawnPlan& operator=(const SpawnPlan&) = delete;
  ~SpawnPlan() {
    ::posix_spawn_file_actions_destroy(&actions);
    ::posix_spawnattr_destroy(&attributes);
  }
};

}  // namespace

LoaderJob::LoaderJob(boost::asio::io_context& io, const Options& options, Callbacks callbacks)
    : io_(io), options_(options), callbacks_(std::move(callbacks)), descriptor_(io), exit_(io), stall_timer_(io) {}

LoaderJob::~LoaderJob() {
  if (descriptor_.is_open()) (void)descriptor_.release();
  if (pid_ <= 0) return;
  ::kill(pid_, SIGKILL);
  // A process that hangs in a driver does not end even so; it must not take this one along.
  pollfd gone{exit_.native_handle(), POLLIN, 0};
  (void)::poll(&gone, 1, static_cast<int>(kReapLimit.count()));
  (void)::waitpid(pid_, nullptr, WNOHANG);
}

Result<std::shared_ptr<LoaderJob>> LoaderJob::start(boost::asio::io_context& io, const Options& options, const ipc::Job& job,
                                                    std::vector<UniqueFd> fds, Callbacks callbacks) {
  const std::shared_ptr<LoaderJob> self(new LoaderJob(io, options, std::move(callbacks)));
  self->job_ = job;
  WEIGHTD_ASSIGN_OR_RETURN(auto sockets, ipc::socket_pair());
  ipc::ChannelOptions channel;
  channel.receive = {kMaxLoaderFrameBytes, ipc::kMaxFdsPerFrame};
  channel.max_queued_bytes = kMaxLoaderFrameBytes;
  self->channel_ = std::make_unique<ipc::Channel>(std::move(sockets.first), channel);
  error_code error;
  self->descriptor_.assign(self->channel_->fd(), error);
  if (error) return Status::internal("event loop: " + error.message());
  WEIGHTD_RETURN_IF_ERROR(self->spawn(std::move(sockets.second)));
  self->wait_for_exit();
  self->send_job(job, std::move(fds));
  self->expect_progress();
  self->pump();
  return self;
}

Status LoaderJob::spawn(UniqueFd child_socket) {
  SpawnPlan plan;
  ::posix_spawn_file_actions_addopen(&plan.actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_addopen(&plan.actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
  ::posix_spawn_file_actions_adddup2(&plan.actions, child_socket.get(), kLoaderSocket);
  ::posix_spawn_file_actions_addclosefrom_np(&plan.actions, kLoaderSocket + 1);
  // Signals as after login: the daemon ignores some, and a terminal's Ctrl-C must reach the daemon alone.
  sigset_t none, ignored;
  ::sigemptyset(&none);
  ::sigemptyset(&ignored);
  for (const int number : {SIGPIPE, SIGUSR1, SIGUSR2, SIGHUP}) ::sigaddset(&ignored, number);
  ::posix_spawnattr_setsigmask(&plan.attributes, &none);
  ::posix_spawnattr_setsigdefault(&plan.attributes, &ignored);
  ::posix_spawnattr_setpgroup(&plan.attributes, 0);
  ::posix_spawnattr_setflags(&plan.attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP);
  std::string name = "weightd-loader";
  std::array<char*, 2> arguments = {name.data(), nullptr};
  const int error = ::posix_spawn(&pid_, options_.program.c_str(), &plan.actions, &plan.attributes, arguments.data(), environ);
  if (error != 0) {
    pid_ = 0;
    return status_from_errno(error, "starting '" + printable(options_.program) + "'");
  }
  UniqueFd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0)));
  if (!pidfd.valid()) return status_from_errno(errno, "pidfd_open");
  error_code failed;
  exit_.assign(pidfd.get(), failed);
  if (failed) return Status::internal("event loop: " + failed.message());
  (void)pidfd.release();
  return {};
}

void LoaderJob::wait_for_exit() {
  exit_.async_wait(Descriptor::wait_read, [self = shared_from_this()](const error_code& error) {
    if (error) return;
    siginfo_t info{};
    // Asio may wake a wait for what happened to an earlier descriptor; then the child still runs.
    const int outcome = ::waitid(P_PID, static_cast<id_t>(self->pid_), &info, WEXITED | WNOHANG);
    if (outcome == 0 && info.si_pid == 0) return self->wait_for_exit();
    self->pid_ = 0;
    self->on_exit(info);
  });
}

void LoaderJob::send_job(const ipc::Job& job, std::vector<UniqueFd> fds) {
  const size_t total = fds.size();
  for (size_t begin = 0; begin == 0 || begin < total; begin += ipc::kMaxFdsPerFrame) {
    const size_t count = std::min<size_t>(total - begin, ipc::kMaxFdsPerFrame);
    std::vector<UniqueFd> part;
    for (size_t i = 0; i < count; ++i) part.push_back(std::move(fds[begin + i]));
    if (begin == 0)
      send({job}, std::move(part));
    else
      send({ipc::MoreFdsReply{static_cast<uint32_t>(count)}}, std::move(part));
  }
}

void LoaderJob::send(const ipc::LoaderMessage& message, std::vector<UniqueFd> fds) {
  if (!channel_) return;
  const Status status = channel_->send({ipc::encode(message), std::move(fds)});
  if (!status.ok() && status.code() != StatusCode::kUnavailable) fail(status);
}

void LoaderJob::admit() {
  if (failure_ || done_) return;
  admitted_ = true;
  expect_progress();
  send({ipc::Admitted{}});
  pump();
}

void LoaderJob::cancel(const Status& why) { fail(why); }

void LoaderJob::let_go() {
  if (!owner_ || let_go_) return;
  let_go_ = true;
  if (channel_) hang_up();
  expect_exit();
}

/// It knows that it is over. One that stays nevertheless is ended by force.
void LoaderJob::expect_exit() {
  stall_timer_.expires_after(options_.stall);
  stall_timer_.async_wait([self = shared_from_this()](const error_code& error) {
    if (!error) self->kill();
  });
}

/// The process is ended by force; its end is reported by on_exit().
void LoaderJob::fail(const Status& why) {
  if (failure_ || (done_ && !owner_) || let_go_) return;
  failure_ = why;
  memory_ = {};
  hang_up();
  kill();
}

void LoaderJob::kill() {
  if (pid_ <= 0) return;
  killed_ = true;
  ::kill(pid_, SIGKILL);
}

void LoaderJob::hang_up() {
  stall_timer_.cancel();
  if (descriptor_.is_open()) (void)descriptor_.release();
  // Not at once: this may be running inside a call of the channel's owner.
  boost::asio::post(io_, [channel = std::shared_ptr<ipc::Channel>(std::move(channel_))] {});
}

void LoaderJob::on_exit(const siginfo_t& info) {
  // What it said before it ended still counts.
  while (channel_ && read_one()) {
  }
  if (!failure_ && (!done_ || (owner_ && !let_go_))) {
    failure_ = owner_ ? Status::lost(how_it_ended(info)) : exit_status(info);
    memory_ = {};
  }
  if (channel_) hang_up();
  stall_timer_.cancel();
  exit_.close();
  callbacks_.ended(failure_.value_or(Status()));
}

void LoaderJob::expect_progress() {
  // Between plan and admission it waits for us.
  if (plan_ && !admitted_) {
    stall_timer_.cancel();
    return;
  }
  stall_timer_.expires_after(options_.stall);
  stall_timer_.async_wait([self = shared_from_this()](const error_code& error) {
    if (error || (self->plan_ && !self->admitted_)) return;
    self->fail(Status::deadline_exceeded("no progress for " + std::to_string(self->options_.stall.count()) +
                                         " ms (load_stall_ms), " + human_bytes(self->progress_bytes_) + " done"));
  });
}

// --- the talk ------------------------------------------------------------------------------------------------------------

void LoaderJob::pump() {
  if (!channel_) return;
  const auto self = shared_from_this();
  if (channel_->wants_write()) (void)channel_->try_flush();  // its end shows when reading
  while (channel_ && read_one()) {
  }
  if (!channel_) return;
  if (!read_armed_) {
    read_armed_ = true;
    descriptor_.async_wait(Descriptor::wait_read, [self](const error_code& error) {
      self->read_armed_ = false;
      if (!error) self->pump();
    });
  }
  if (channel_->wants_write() && !write_armed_) {
    write_armed_ = true;
    descriptor_.async_wait(Descriptor::wait_write, [self](const error_code& error) {
      self->write_armed_ = false;
      if (!error) self->pump();
    });
  }
}

bool LoaderJob::read_one() {
  auto received = channel_->try_receive();
  if (!received.ok()) {
    // Its end, in order or in the middle of a frame, is explained by its exit status.
    const StatusCode code = received.status().code();
    if (code != StatusCode::kUnavailable && code != StatusCode::kCorruption)
      fail(received.status().with_context("loader"));
    else
      hang_up();
    if (!channel_ && owner_) expect_exit();
    return false;
  }
  if (!received->has_value()) return false;
  auto message = ipc::decode_loader_message((*received)->body);
  if (!message.ok()) {
    fail(message.status().with_context("loader"));
    return false;
  }
  handle(*std::move(message), std::move((*received)->fds));
  return channel_ != nullptr;
}

void LoaderJob::handle(ipc::LoaderMessage message, std::vector<UniqueFd> fds) {
  Status status;
  if (const auto* plan = std::get_if<ipc::Planned>(&message.body)) {
    status = on_planned(*plan);
  } else if (const auto* chunks = std::get_if<ipc::Chunks>(&message.body)) {
    status = on_chunks(chunks->count, std::move(fds));
  } else if (const auto* progress = std::get_if<ipc::LoadProgress>(&message.body)) {
    if (progress->bytes != progress_bytes_) expect_progress();
    progress_bytes_ = progress->bytes;
    if (callbacks_.progress) callbacks_.progress(progress->bytes);
  } else if (const auto* result = std::get_if<ipc::LoadResult>(&message.body)) {
    status = on_verified(*result, std::move(fds));
  } else if (const auto* error = std::get_if<Status>(&message.body)) {
    status = error->ok() ? protocol_error("reported a failure without a reason") : *error;
  } else if (auto* scrubbed = std::get_if<ipc::VerifiedReply>(&message.body)) {
    if (done_ || !std::holds_alternative<ipc::VerifyJob>(job_.kind)) {
      status = protocol_error("answered a verification that nobody asked for");
    } else {
      done_ = true;
      callbacks_.scrubbed(std::move(*scrubbed));
    }
  } else if (auto* probed = std::get_if<ipc::ProbeReply>(&message.body)) {
    if (done_ || !std::holds_alternative<ipc::ProbeJob>(job_.kind)) {
      status = protocol_error("answered a probe that nobody asked for");
    } else {
      done_ = true;
      hang_up();
      expect_exit();
      callbacks_.probed(std::move(*probed));
    }
  } else {
    status = protocol_error("sent a message that is not for the daemon");
  }
  if (!status.ok()) fail(status);
}

Status LoaderJob::on_planned(const ipc::Planned& plan) {
  if (!std::holds_alternative<ipc::LoadJob>(job_.kind) || plan_) return protocol_error("sent a plan out of turn");
  if (plan.content_id.empty() || plan.resident_bytes < plan.arena_bytes) return protocol_error("sent an impossible plan");
  plan_ = plan;
  expect_progress();
  callbacks_.planned(plan);
  return {};
}

Status LoaderJob::on_chunks(uint32_t count, std::vector<UniqueFd> fds) {
  if (!admitted_ || done_ || is_legacy(job_) || count == 0 || fds.size() != count ||
      memory_.chunks.size() + count > plan_->chunk_count) {
    return protocol_error("sent chunks out of turn");
  }
  for (UniqueFd& fd : fds) {
    // Chunks of a GPU have no size that their descriptor tells: the final report does.
    if (job_.backend == "host") {
      WEIGHTD_ASSIGN_OR_RETURN(const uint64_t bytes, sealed_size(fd, "a chunk"));
      held_bytes_ += bytes;
      if (bytes > plan_->resident_bytes || held_bytes_ > plan_->resident_bytes)
        return protocol_error("sent more than it had planned");
      memory_.chunk_bytes.push_back(bytes);
    }
    memory_.chunks.push_back(std::move(fd));
  }
  expect_progress();
  send({ipc::Received{static_cast<uint32_t>(memory_.chunks.size())}});
  if (memory_.chunks.size() == plan_->chunk_count && callbacks_.uploaded) callbacks_.uploaded();
  return {};
}

/// What the loader reports against what it planned and what was received.
Status LoaderJob::check_memory(const ipc::LoadResult& result) const {
  if (is_legacy(job_) != !result.ipc_handle.empty()) return protocol_error("reported success for another transport");
  if (!is_legacy(job_) && result.chunk_bytes.size() != memory_.chunks.size()) {
    return protocol_error("sent another number of chunks than it says");
  }
  if (job_.backend == "host" && result.chunk_bytes != memory_.chunk_bytes) {
    return protocol_error("sent chunks of other sizes than it says");
  }
  uint64_t total = 0;
  for (const uint64_t bytes : result.chunk_bytes) {
    if (bytes == 0 || bytes > plan_->resident_bytes - total) return protocol_error("reported chunks of impossible sizes");
    total += bytes;
  }
  if (total != plan_->resident_bytes) return protocol_error("reported chunks of another size than it had planned");
  return {};
}

Status LoaderJob::on_verified(const ipc::LoadResult& result, std::vector<UniqueFd> fds) {
  const size_t expected_chunks = is_legacy(job_) ? 0 : plan_ ? plan_->chunk_count : 0;
  if (!admitted_ || done_ || fds.size() != 1 || memory_.chunks.size() != expected_chunks) {
    return protocol_error("reported success out of turn");
  }
  WEIGHTD_RETURN_IF_ERROR(check_memory(result));
  WEIGHTD_ASSIGN_OR_RETURN(const uint64_t table_bytes, sealed_size(fds.front(), "a table"));
  if (table_bytes != result.table_bytes || table_bytes > ipc::kMaxTableBytes)
    return protocol_error("sent a table of another size than it says");
  memory_.chunk_bytes = result.chunk_bytes;
  memory_.table = std::move(fds.front());
  memory_.table_bytes = table_bytes;
  memory_.ipc_handle = result.ipc_handle;
  done_ = true;
  owner_ = is_legacy(job_);
  stall_timer_.cancel();
  ChunkSet memory = std::move(memory_);
  memory_ = {};
  callbacks_.verified(std::move(memory));
  if (!owner_) hang_up();
  return {};
}

}  // namespace weightd::daemon
