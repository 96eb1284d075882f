// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

#include "store/pack.h"
#include "tools/cli/output.h"
#include "tools/cli/program.h"
#include "tools/cli/progress_bar.h"
#include "weightd/status.h"

namespace weightd::tools {

// Each adds one verb of weightpack.
void add_pack(cli::Program& program);
void add_unpack(cli::Program& program);
void add_verify(cli::Program& program);
void add_inspect(cli::Program& program);
void add_stats(cli::Program& program);
void add_synth(cli::Program& program);

/// Draws `bar` and cancels when the user pressed Ctrl-C. Borrows both.
[[nodiscard]] store::Progress cancellable(const cli::Output& output, cli::ProgressBar& bar);

/// `status`, or "interrupted" in its place when Ctrl-C was why it failed.
[[nodiscard]] Status explain_interrupt(const cli::Output& output, Status status);

/// Whether `path` is a bundle rather than a checkpoint: a file that begins as bundles do, or is called *.wpk. False for what does
/// not exist.
[[nodiscard]] bool looks_like_bundle(const std::string& path);

/// Sets the hint that fits a bundle at `path` that could not be used, and passes the failure on.
[[nodiscard]] Status advise_about_bundle(cli::Output& output, const std::string& path, Status status);

/// Bits per weight of `bytes` bytes that hold `weights` weights; NaN for no weights.
[[nodiscard]] double bits_per_weight(uint64_t bytes, uint64_t weights);

inline constexpr std::string_view kCheckpointHelp = "Folder, .safetensors file or .safetensors.index.json";
inline constexpr std::string_view kThreadsHelp = "Threads to compute with (default: one per core)";
inline constexpr uint64_t kMaxThreads = 1024;

}  // namespace weightd::tools
