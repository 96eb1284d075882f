// SPDX-License-Identifier: Apache-2.0
#include "tools/pack/verbs.h"

#include <fcntl.h>

#include <array>
#include <cstring>
#include <limits>
#include <utility>

#include "base/fd.h"

namespace weightd::tools {
namespace {

constexpr std::string_view kBundleStart = "\x89WPK";  // FORMAT.md: the same in every version

}  // namespace

store::Progress cancellable(const cli::Output& output, cli::ProgressBar& bar) {
  return [&output, &bar](uint64_t done_bytes, uint64_t total_bytes) {
    bar.update(done_bytes, total_bytes);
    return !output.interrupted();
  };
}

Status explain_interrupt(const cli::Output& output, Status status) {
  if (!status.ok() && output.interrupted()) return Status::cancelled("interrupted; nothing half-made was left");
  return status;
}

bool looks_like_bundle(const std::string& path) {
  if (path.ends_with(".wpk")) return true;
  // O_NONBLOCK: a FIFO must not hang the question.
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd.valid()) return false;
  std::array<char, kBundleStart.size()> start{};
  if (!pread_full(fd.get(), std::as_writable_bytes(std::span(start)), 0, path).ok()) return false;
  return std::string_view(start.data(), start.size()) == kBundleStart;
}

Status advise_about_bundle(cli::Output& output, const std::string& path, Status status) {
  if (status.code() != StatusCode::kCorruption || output.has_hint()) return status;
  output.set_hint(looks_like_bundle(path) ? "fetch the bundle again, or pack its checkpoint again"
                                          : "'weightpack pack' makes a bundle of a checkpoint");
  return status;
}

double bits_per_weight(uint64_t bytes, uint64_t weights) {
  if (weights == 0) return std::numeric_limits<double>::quiet_NaN();
  return static_cast<double>(bytes) * 8 / static_cast<double>(weights);
}

}  // namespace weightd::tools
