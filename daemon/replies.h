// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "ipc/messages.h"

/// What goes out on the wire, cut to the limits of the protocol and to what its reader may know.
namespace weightd::daemon {

/// At most kMaxTextBytes of UTF-8, cut at a character.
[[nodiscard]] std::string bounded_text(std::string text);
[[nodiscard]] Status bounded(const Status& status);

/// Without paths and causes: what a worker sees (CO-125).
[[nodiscard]] ipc::ModelSummary for_worker(ipc::ModelSummary model);
[[nodiscard]] ipc::ModelSummary for_administrator(ipc::ModelSummary model);

/// The first `kMaxListedLeases`; status tells the full count.
inline constexpr size_t kMaxListedLeases = 16'384;
[[nodiscard]] std::vector<ipc::LeaseSummary> bounded(std::vector<ipc::LeaseSummary> leases);

}  // namespace weightd::daemon
