// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "ipc/channel.h"
#include "ipc/messages.h"
#include "tests/support/programs.h"
#include "tests/support/safetensors_builder.h"

/// The daemon's side of a loader's channel.
namespace weightd::testing {

inline ipc::Deadline soon() { return ipc::Clock::now() + std::chrono::seconds(30); }

inline ipc::ChannelOptions channel_options() {
  ipc::ChannelOptions options;
  options.receive = {64U << 20, ipc::kMaxFdsPerFrame};
  return options;
}

/// What a load ended in, seen by the daemon.
struct Outcome {
  Status status;
  bool planned = false;
  ipc::Planned plan;
  std::vector<UniqueFd> chunks;
  UniqueFd table;
  ipc::LoadResult result;
  ipc::VerifiedReply verified;
  ipc::ProbeReply probe;
  uint64_t progress = 0;
};

/// The daemon's side of one job.
class Daemon {
 public:
  explicit Daemon(UniqueFd socket) : channel_(std::move(socket), channel_options()) {}

  Outcome run(const ipc::Job& job, std::vector<UniqueFd> fds) {
    send({job}, std::move(fds));
    while (!over_) {
      auto frame = channel_.receive(soon());
      require(frame.ok(), "the loader says something: " + frame.status().message());
      auto message = ipc::decode_loader_message(frame->body);
      require(message.ok(), "the loader's message: " + message.status().message());
      handle(*message, std::move(frame->fds));
    }
    return std::move(outcome_);
  }

 private:
  void send(const ipc::LoaderMessage& message, std::vector<UniqueFd> fds = {}) {
    require(channel_.send({ipc::encode(message), std::move(fds)}).ok() && channel_.flush(soon()).ok(), "send to the loader");
  }
  void handle(const ipc::LoaderMessage& message, std::vector<UniqueFd> fds) {
    if (const auto* plan = std::get_if<ipc::Planned>(&message.body)) {
      outcome_.planned = true;
      outcome_.plan = *plan;
      send({ipc::Admitted{}});
    } else if (const auto* chunks = std::get_if<ipc::Chunks>(&message.body)) {
      EXPECT_EQ(chunks->count, fds.size());
      for (UniqueFd& fd : fds) outcome_.chunks.push_back(std::move(fd));
      send({ipc::Received{static_cast<uint32_t>(outcome_.chunks.size())}});
    } else if (const auto* progress = std::get_if<ipc::LoadProgress>(&message.body)) {
      outcome_.progress = progress->bytes;
    } else if (const auto* result = std::get_if<ipc::LoadResult>(&message.body)) {
      outcome_.result = *result;
      outcome_.table = std::move(fds.at(0));
      over_ = true;
    } else if (const auto* verified = std::get_if<ipc::VerifiedReply>(&message.body)) {
      outcome_.verified = *verified;
      over_ = true;
    } else if (const auto* probe = std::get_if<ipc::ProbeReply>(&message.body)) {
      outcome_.probe = *probe;
      over_ = true;
    } else if (const auto* error = std::get_if<Status>(&message.body)) {
      outcome_.status = *error;
      over_ = true;
    }
  }
  ipc::Channel channel_;
  Outcome outcome_;
  bool over_ = false;
};

/// A real weightd-loader and the daemon that started it.
class LoaderProgram {
 public:
  explicit LoaderProgram(const std::string& built) {
    const std::string path = program("weightd-loader", built);
    auto sockets = ipc::socket_pair();
    require(sockets.ok(), "socket_pair");
    pid_ = ::fork();
    require(pid_ >= 0, "fork");
    if (pid_ == 0) {
      ::dup2(sockets->second.get(), 3);  // not close-on-exec
      ::execl(path.c_str(), "weightd-loader", nullptr);
      ::_exit(127);
    }
    daemon_.emplace(std::move(sockets->first));
  }
  LoaderProgram(const LoaderProgram&) = delete;
  LoaderProgram& operator=(const LoaderProgram&) = delete;
  ~LoaderProgram() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    (void)wait();
  }

  Outcome run(const ipc::Job& job, std::vector<UniqueFd> fds) { return daemon_->run(job, std::move(fds)); }
  void hang_up() { daemon_.reset(); }
  [[nodiscard]] bool runs() const { return ::waitpid(pid_, nullptr, WNOHANG) == 0; }
  /// Its exit status; -1: a signal.
  int wait() {
    int status = 0;
    require(::waitpid(std::exchange(pid_, 0), &status, 0) > 0, "waitpid");
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  pid_t pid_ = 0;
  std::optional<Daemon> daemon_;
};

inline ipc::Job make_job(const std::string& name) {
  ipc::Job job;
  job.kind = ipc::LoadJob{};
  job.backend = job.device = "host";
  job.residency = "fast";
  job.chunk_bytes = uint64_t{2} << 20;
  job.threads = 2;
  job.bundle_name = name;
  job.fd_count = 1;
  return job;
}

inline std::vector<UniqueFd> opened(const std::string& path) {
  std::vector<UniqueFd> fds;
  fds.emplace_back(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  require(fds.front().valid(), "open " + path);
  return fds;
}

}  // namespace weightd::testing
