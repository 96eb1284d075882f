// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>

#include "daemon/loader/backend.h"
#include "ipc/channel.h"
#include "ipc/messages.h"
#include "weightd/status.h"

namespace weightd::loader {

inline constexpr ipc::Deadline kNever = ipc::Deadline::max();

/// Runs `work` on a thread of its own and sends the bytes that it advances by as progress meanwhile, from the calling thread, which
/// alone may use the channel. The failure of the work, or else of the channel.
Status run_with_progress(ipc::Channel& channel, const std::function<Status(const Advance&)>& work);

/// Sends and waits until it is written.
Status send(ipc::Channel& channel, const ipc::LoaderMessage& message, std::vector<UniqueFd> fds = {});

}  // namespace weightd::loader
