// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tools/cli/program.h"

namespace weightd::tools {

// Each adds one verb of weightbench.
void add_attach(cli::Program& program);

}  // namespace weightd::tools
