// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "base/fd.h"
#include "daemon/loader/backend.h"
#include "ipc/channel.h"
#include "ipc/messages.h"
#include "weightd/status.h"

/// The two jobs of a loader. Each speaks with the daemon over `channel` until its result is sent; a failure is returned, for the
/// caller to report. They end at the daemon's hang-up with kUnavailable.
namespace weightd::loader {

/// bundle -> planned -> admitted -> chunks -> verified.
Status run_load(ipc::Channel& channel, const ipc::Job& job, UniqueFd bundle, Backend& backend);

/// table and chunks -> scrubbed. `fds`: the table, then the chunks.
Status run_verify(ipc::Channel& channel, const ipc::Job& job, std::vector<UniqueFd> fds, Backend& backend);

/// Receives the job with all its descriptors, runs it on a backend of the job's kind, and reports a failure to the daemon.
Status serve_job(ipc::Channel& channel);

}  // namespace weightd::loader
