// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>

namespace weightd::test {

/// Runs `child` in a forked child that then exits as programs do (atexit handlers run). Its result is the exit status; minus the signal
/// if one ended it.
[[nodiscard]] int in_forked_child(const std::function<int()>& child);

}  // namespace weightd::test
