// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "base/fd.h"
#include "daemon/loader/backend.h"
#include "ipc/channel.h"
#include "ipc/messages.h"
#include "weightd/status.h"

/// The jobs of a loader. Each speaks with the daemon over `channel` until its result is sent; a failure is returned, for the
/// caller to report. They end at the daemon's hang-up with kUnavailable.
namespace weightd::loader {

/// bundle -> planned -> admitted -> chunks -> verified.
Status run_load(ipc::Channel& channel, const ipc::Job& job, UniqueFd bundle, Backend& backend);

/// table and chunks -> scrubbed. `fds`: the table, then the chunks.
Status run_verify(ipc::Channel& channel, const ipc::Job& job, std::vector<UniqueFd> fds, Backend& backend);

struct ReceivedJob {
  ipc::Job job;
  std::vector<UniqueFd> fds;  // all of them
};
[[nodiscard]] Result<ReceivedJob> receive_job(ipc::Channel& channel);
/// Runs the job and reports a failure to the daemon, too.
Status run_job(ipc::Channel& channel, ReceivedJob received, Backend& backend);

/// What remains of a job that was served.
struct Served {
  Status status;
  std::unique_ptr<Backend> owner;  // of memory that lives no longer than this process (legacy transport); null: nothing to stay for
};
/// receive_job and run_job on a backend of the job's kind; or the answer to a probe.
[[nodiscard]] Served serve_job(ipc::Channel& channel);

}  // namespace weightd::loader
