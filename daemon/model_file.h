// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "base/fd.h"
#include "weightd/status.h"

namespace weightd::daemon {

/// Opens a bundle that somebody asked for by its path: a regular file below one of `folders`, whatever links and ".." the path
/// contains (RESOLVE_BENEATH, no magic links). Never hangs on a FIFO, never opens a device. kInvalidArgument: not absolute, or
/// inside a folder and not a regular file. For everything that is outside, or inside and missing, the same kNotFound (CO-126).
[[nodiscard]] Result<UniqueFd> open_model_below(const std::vector<std::string>& folders, const std::string& path);

/// Opens any regular file, for the configuration and those who may read everything anyway.
[[nodiscard]] Result<UniqueFd> open_model_anywhere(const std::string& path);

}  // namespace weightd::daemon
