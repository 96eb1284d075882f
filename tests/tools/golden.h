// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "tests/tools/process.h"

namespace weightd::testing {

/// What a user sees of one command: exit code, standard output, standard error. What differs between machines and builds is
/// replaced: `folder` by $DIR, builds by $BUILD, versions by $VERSION, 64 hexadecimal digits by $SHA256.
[[nodiscard]] std::string transcript(const Outcome& outcome, const std::string& folder);

/// Fails the test unless `transcript` equals tests/golden/cli/<name>.txt. With WEIGHTD_UPDATE_GOLDEN=1 in the environment the file
/// is written instead; then look at the difference before it is committed.
void expect_golden(const std::string& name, const std::string& transcript);

}  // namespace weightd::testing
