// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <string>
#include <string_view>

#include "weightd/status.h"

/// What weightpack, weightctl and weightbench answer to the shell. One table for all three; scripts rely on the numbers. 4 and 7
/// mean what they mean for init scripts (LSB): no permission, not running.
namespace weightd::cli {

enum class ExitCode : int {
  kOk = 0,
  kFailed = 1,
  kUsage = 2,
  kDifference = 3,
  kPermission = 4,
  kNotFound = 5,
  kUnsupported = 6,
  kUnavailable = 7,
  kTimedOut = 8,
  kExhausted = 9,
  kRefused = 10,
  kInterrupted = 130,
  kPipeClosed = 141,
};

struct ExitCodeInfo {
  ExitCode code;
  std::string_view meaning;
};
inline constexpr std::array<ExitCodeInfo, 13> kExitCodes = {{
    {ExitCode::kOk, "done"},
    {ExitCode::kFailed, "failed: the system or a device refused, or a fault of ours"},
    {ExitCode::kUsage, "wrong usage: verb, option or argument"},
    {ExitCode::kDifference, "corruption, or verification found a difference"},
    {ExitCode::kPermission, "no permission"},
    {ExitCode::kNotFound, "no such file, model or tensor"},
    {ExitCode::kUnsupported, "a version or kind that this build does not know"},
    {ExitCode::kUnavailable, "the daemon is not running or cannot be reached"},
    {ExitCode::kTimedOut, "the time limit passed"},
    {ExitCode::kExhausted, "not enough disk, memory, budget or descriptors"},
    {ExitCode::kRefused, "not in this state: taken, in use, changed meanwhile or cancelled"},
    {ExitCode::kInterrupted, "ended by SIGINT (SIGTERM: 143); nothing half-made is left"},
    {ExitCode::kPipeClosed, "the reader of the output went away"},
}};

[[nodiscard]] ExitCode exit_code(StatusCode code);

/// The table as it stands at the end of --help.
[[nodiscard]] std::string exit_codes_help();

}  // namespace weightd::cli
