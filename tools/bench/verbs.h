// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tools/bench/recorder.h"
#include "tools/cli/program.h"

namespace weightd::tools {

// Each adds one verb of weightbench.
void add_gpu(cli::Program& program);
void add_chain(cli::Program& program);
void add_load(cli::Program& program);
void add_attach(cli::Program& program);
void add_report(cli::Program& program);

/// --out and --append.
void add_recorder_options(cli::Verb& verb, RecorderOptions* options);

}  // namespace weightd::tools
