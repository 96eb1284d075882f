// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

#include "weightd/status.h"

namespace weightd::cli {

/// A program and the client library that it was started with must be of one release: the interface of the library changes between
/// releases (CO-111). Each side is a build id, "1.2.3 (abcdef0)"; builds of one release from different commits are let through.
/// kFailedPrecondition names both.
[[nodiscard]] Status check_same_release(std::string_view program_build, std::string_view library_build);

}  // namespace weightd::cli
