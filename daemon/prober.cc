// SPDX-License-Identifier: Apache-2.0
#include "daemon/prober.h"

#include <algorithm>
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
  if (killed_run() != nullptr) return postpone(loader_path, deep, limit, std::move(answer));
  start(loader_path, deep, limit, std::move(answer));
}

/// One that was killed is gone in a moment, unless it hangs in the driver, and then so would the next.
const Prober::Run* Prober::killed_run() const {
  const auto it = std::find_if(runs_.begin(), runs_.end(), [](const auto& run) { return run->job->killed(); });
  return it == runs_.end() ? nullptr : it->get();
}

void Prober::postpone(const std::string& loader_path, bool deep, milliseconds limit, Answer answer) {
  const auto question = std::make_shared<Question>(io_);
  question->loader_path = loader_path;
  question->deep = deep;
  question->limit = limit;
  question->answer = std::move(answer);
  postponed_.push_back(question);
  question->timer.expires_after(limit);
  question->timer.async_wait([this, question](const error_code& error) {
    if (error || question->settled) return;
    question->settled = true;
    std::erase(postponed_, question);
    const Run* run = killed_run();
    question->answer(Status::unavailable("the process that asked the GPU driver before (pid " +
                                         std::to_string(run == nullptr ? 0 : run->job->pid()) +
                                         ") was killed and still hangs in it"));
  });
}

void Prober::ask_postponed() {
  if (killed_run() != nullptr) return;
  const std::vector<std::shared_ptr<Question>> questions = std::move(postponed_);
  postponed_.clear();
  for (const auto& question : questions) {
    question->settled = true;
    question->timer.cancel();
    ask(question->loader_path, question->deep, question->limit, std::move(question->answer));
  }
}

void Prober::start(const std::string& loader_path, bool deep, milliseconds limit, Answer answer) {
  const auto run = std::make_shared<Run>(io_);
  run->deep = deep;
  ipc::Job message;
  message.kind = ipc::ProbeJob{deep};
  auto job = LoaderJob::start(io_, {loader_path, 2 * limit + milliseconds(1'000)}, message, {}, callbacks(run));
  if (!job.ok()) {
    boost::asio::post(io_, [answer = std::move(answer), why = job.status()] { answer(why); });
    return;
  }
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
    ask_postponed();
  };
  return callbacks;
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
  for (const auto& question : postponed_) {
    question->settled = true;
    question->timer.cancel();
  }
  postponed_.clear();
  for (const auto& run : runs_) {
    run->answered = true;
    run->timer.cancel();
    run->waiting.clear();
    run->job->cancel(Status::cancelled("weightd is stopping"));
  }
}

}  // namespace weightd::daemon
