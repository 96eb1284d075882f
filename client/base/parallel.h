// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace weightd {

/// Cuts [0, count) into at most `threads` contiguous ranges whose bounds are multiples of `grain`, and calls
/// fn(begin, end) for each, in this thread and in threads that are joined before the return. threads <= 0 means one per
/// core. The cut depends only on count, grain and the thread count; fn must not throw. Where the system refuses a thread (a
/// process limit), the range is done in this one.
template <typename Fn>
void parallel_ranges(uint64_t count, uint64_t grain, int threads, Fn&& fn) {
  if (count == 0) return;
  const uint64_t grains = (count + grain - 1) / grain;
  const uint64_t cores = threads > 0 ? static_cast<uint64_t>(threads) : std::max(1U, std::thread::hardware_concurrency());
  const uint64_t parts = std::min(cores, grains);
  std::vector<std::jthread> workers;
  workers.reserve(parts);
  for (uint64_t part = 1; part < parts; ++part) {
    const uint64_t begin = grains * part / parts * grain;
    const uint64_t end = std::min(count, grains * (part + 1) / parts * grain);
    try {
      workers.emplace_back([&fn, begin, end] { fn(begin, end); });
    } catch (const std::system_error&) {
      fn(begin, end);
    }
  }
  fn(uint64_t{0}, std::min(count, grains / parts * grain));
}

}  // namespace weightd
