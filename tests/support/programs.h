// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

namespace weightd::testing {

/// Where one of our programs is. Tests can be carried to another machine with the programs that they start: with
/// $WEIGHTD_TEST_BIN_DIR set it is looked for there and in the folder's bin, sbin and libexec/weightd, and a program that is not
/// there ends the test. Otherwise `built`, its place in the build tree.
[[nodiscard]] std::string program(std::string_view name, const std::string& built);

}  // namespace weightd::testing
