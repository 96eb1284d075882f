// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

namespace weightd::daemon {

/// What the kernel says about this machine and this process. Unknown values are 0 or "unknown".
[[nodiscard]] std::string cpu_name();
struct HostMemory {
  uint64_t total_bytes = 0, available_bytes = 0;  // available: without swapping, page cache counted as obtainable (CO-093)
};
[[nodiscard]] HostMemory host_memory();
[[nodiscard]] uint64_t own_rss_bytes();
[[nodiscard]] uint32_t own_fd_count();
[[nodiscard]] uint64_t random_id();  // never 0
/// Raises the soft limit of open descriptors to the hard one.
void raise_fd_limit();

}  // namespace weightd::daemon
