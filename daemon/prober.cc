// SPDX-License-Identifier: Apache-2.0
#include "daemon/prober.h"

#include <boost/asio/post.hpp>
#include <utility>

namespace weightd::daemon {

using boost::system::error_code;
using std::chrono::milliseconds;

void Prober::ask(const std::string& loader_path, bool deep, milliseconds limit, Answer answer) {
  for (const auto& run : runs_) {
    if (!run->answered && run->deep == deep) {
      run->waiting.push_back(std::move(answer));
      return;
    }
  }
  // One that answered is on its way out; one that was killed and is still there hangs in the driver, and so would the next.
  for (const auto& run : runs_) {
    if (run->job->killed()) {
      return refuse(std::move(answer), Status::unavailable("the process that asked the GPU driver before (pid " +
                                                           std::to_string(run->job->pid()) + ") was killed and still hangs in it"));
    }
  }
  const auto run = std::make_shared<Run>(io_);
  run->deep = deep;
  ipc::Job message;
  message.kind = ipc::ProbeJob{deep};
  auto job = LoaderJob::start(io_, {loader_path, 2 * limit + milliseconds(1'000)}, message, {}, callbacks(run));
  if (!job.ok()) return refuse(std::move(answer), job.status());
  run->job = *std::move(job);
  run->waiting.push_back(std::move(answer));
  runs_.push_back(run);
  run->timer.expires_after(limit);
  run->timer.async_wait([weak = std::weak_ptr<Run>(run), limit](const error_code& error) {
    const auto self = weak.lock();
    if (error || self == nullptr || self->answered) return;
    const Status late = Status::deadline_exceeded("no answer from the GPU driver within " + std::to_string(limit.count()) + " ms");
    self->job->cancel(late);
    finish(*self, late);
  });
}

LoaderJob::Callbacks Prober::callbacks(const std::shared_ptr<Run>& run) {
  LoaderJob::Callbacks callbacks;
  const std::weak_ptr<Run> weak = run;
  callbacks.probed = [weak](ipc::ProbeReply reply) {
    if (const auto self = weak.lock()) finish(*self, Result<ipc::ProbeReply>(std::move(reply)));
  };
  callbacks.ended = [this, weak](const Status& status) {
    const auto self = weak.lock();
    if (self == nullptr) return;
    runs_.remove(self);
    finish(*self, status.ok() ? Status::internal("the loader ended without an answer") : status);
  };
  return callbacks;
}

void Prober::refuse(Answer answer, const Status& why) {
  boost::asio::post(io_, [answer = std::move(answer), why] { answer(why); });
}

void Prober::finish(Run& run, const Result<ipc::ProbeReply>& reply) {
  if (run.answered) return;
  run.answered = true;
  run.timer.cancel();
  const std::vector<Answer> waiting = std::move(run.waiting);
  run.waiting.clear();
  for (const Answer& answer : waiting) answer(reply);
}

void Prober::stop() {
  for (const auto& run : runs_) {
    run->answered = true;
    run->timer.cancel();
    run->waiting.clear();
    run->job->cancel(Status::cancelled("weightd is stopping"));
  }
}

}  // namespace weightd::daemon
