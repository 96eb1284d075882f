// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "ipc/channel.h"
#include "weightd/status.h"

namespace weightd::daemon {

/// Who may use a socket. Root and the daemon's own user always may; the overflow user (65534: unmapped in a user namespace, or
/// "nobody") never may (CO-127).
struct AccessList {
  bool everybody = false;
  std::set<uint32_t> users, groups;
  [[nodiscard]] bool allows(const ipc::Peer& peer) const;
};

/// Looks names and decimal ids up. `fallback_groups` are taken, where they exist, when `groups` is empty. kNotFound names the key's
/// entry that does not exist on this machine.
[[nodiscard]] Result<AccessList> make_access_list(const std::string& what, const std::vector<std::string>& users,
                                                  const std::vector<std::string>& groups,
                                                  const std::vector<std::string>& fallback_groups);

/// The group id for a socket's file: -1 for "" (unchanged); for "auto" the id of `automatic` if it exists and this process may give
/// files to it, else -1.
[[nodiscard]] Result<int64_t> socket_group(const std::string& what, const std::string& group, const std::string& automatic);

}  // namespace weightd::daemon
