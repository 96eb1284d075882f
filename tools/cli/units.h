// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "weightd/status.h"

namespace weightd::cli {

/// "5000000", "5GB" (10^9), "512MiB" (2^20), case as written here; a whole number, at least 1. kInvalidArgument says what is
/// allowed.
[[nodiscard]] Result<uint64_t> parse_bytes(const std::string& text);

/// "30" and "30s" (seconds), "250ms", "5m", "1h"; at least 1 ms, at most 24 h.
[[nodiscard]] Result<std::chrono::milliseconds> parse_duration(const std::string& text);
/// "250 ms", "1.5 s", "5 min".
[[nodiscard]] std::string human_duration(std::chrono::milliseconds duration);

}  // namespace weightd::cli
