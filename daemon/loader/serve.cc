// SPDX-License-Identifier: Apache-2.0
#include <iterator>
#include <utility>

#include "base/text.h"
#include "daemon/loader/gpu.h"
#include "daemon/loader/jobs.h"
#include "daemon/loader/reporter.h"

namespace weightd::loader {
namespace {

void take(std::vector<UniqueFd>& to, std::vector<UniqueFd>& from) {
  to.insert(to.end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
}

Status run(ipc::Channel& channel, ReceivedJob received, Backend& backend) {
  if (std::holds_alternative<ipc::VerifyJob>(received.job.kind)) {
    return run_verify(channel, received.job, std::move(received.fds), backend);
  }
  if (received.fds.size() != 1) return Status::internal("a load job comes with one descriptor");
  return run_load(channel, received.job, std::move(received.fds.front()), backend);
}

Result<std::unique_ptr<Backend>> make_backend(const ipc::Job& job) {
  if (job.backend == "cuda") return make_gpu_backend(job);
  if (job.backend != "host") return Status::unsupported("backend '" + printable(job.backend) + "': 'cuda' and 'host' are known");
  if (job.transport == "legacy") return Status::unsupported("transport 'legacy' is for GPU memory: the backend is 'host'");
  return make_host_backend();
}

/// Without the daemon there is nobody to tell.
Status report(ipc::Channel& channel, const Status& status) {
  if (status.ok()) return status;
  const bool fits = status.message().size() <= ipc::kMaxTextBytes;
  (void)send(channel, {fits ? status : Status(status.code(), printable(status.message(), ipc::kMaxTextBytes / 2))});
  return status;
}

}  // namespace

Result<ReceivedJob> receive_job(ipc::Channel& channel) {
  WEIGHTD_ASSIGN_OR_RETURN(ipc::Frame frame, channel.receive(kNever));
  WEIGHTD_ASSIGN_OR_RETURN(ipc::LoaderMessage message, ipc::decode_loader_message(frame.body));
  auto* job = std::get_if<ipc::Job>(&message.body);
  if (job == nullptr) return Status::internal("the daemon's first message is not a job");
  ReceivedJob received{std::move(*job), {}};
  take(received.fds, frame.fds);
  while (received.fds.size() < received.job.fd_count) {
    WEIGHTD_ASSIGN_OR_RETURN(ipc::Frame more, channel.receive(kNever));
    WEIGHTD_ASSIGN_OR_RETURN(const ipc::LoaderMessage next, ipc::decode_loader_message(more.body));
    if (!std::holds_alternative<ipc::MoreFdsReply>(next.body) || more.fds.empty()) {
      return Status::internal("the daemon did not send all descriptors of the job");
    }
    take(received.fds, more.fds);
  }
  if (received.fds.size() != received.job.fd_count) return Status::internal("the daemon sent more descriptors than it announced");
  return received;
}

Status run_job(ipc::Channel& channel, ReceivedJob received, Backend& backend) {
  return report(channel, run(channel, std::move(received), backend));
}

Served serve_job(ipc::Channel& channel) {
  auto received = receive_job(channel);
  if (!received.ok()) return {report(channel, received.status()), nullptr};
  if (const auto* job = std::get_if<ipc::ProbeJob>(&received->job.kind)) {
    return {send(channel, {probe_gpus(job->deep)}), nullptr};
  }
  auto backend = make_backend(received->job);
  if (!backend.ok()) return {report(channel, backend.status()), nullptr};
  const bool owns = received->job.transport == "legacy";
  Status status = run_job(channel, *std::move(received), **backend);
  const bool stays = owns && status.ok();
  return {std::move(status), stays ? *std::move(backend) : nullptr};
}

}  // namespace weightd::loader
