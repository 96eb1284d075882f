// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace weightd::daemon {

/// What the command line of weightd asks for.
struct Arguments {
  enum class Action { kServe, kCheckConfig, kPrintConfig, kSayAndExit };
  Action action = Action::kServe;
  std::optional<std::string> config_file;
  std::vector<std::pair<std::string, std::string>> options;  // configuration keys and values
  std::string text;                                          // kSayAndExit: help, version, or what is wrong
  int exit_code = 0;                                         // kSayAndExit
};
inline constexpr int kExitUsage = 2;
inline constexpr int kExitNoGpu = 69;   // EX_UNAVAILABLE; the unit starts again: a driver may come later
inline constexpr int kExitConfig = 78;  // EX_CONFIG; the unit does not restart on it

[[nodiscard]] Arguments parse_arguments(int argc, const char* const* argv);

}  // namespace weightd::daemon
