// SPDX-License-Identifier: Apache-2.0
#include "tools/bench/percentiles.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "weightd/status.h"

namespace weightd::tools {

Percentiles percentiles(std::vector<double> times) {
  WEIGHTD_CHECK(!times.empty());
  std::sort(times.begin(), times.end());
  const auto count = static_cast<double>(times.size());
  const auto rank = [&](double percent) {
    const auto nth = static_cast<size_t>(std::ceil(percent / 100 * count));
    return times[std::max<size_t>(nth, 1) - 1];
  };
  Percentiles result;
  result.least = times.front();
  result.p50 = rank(50);
  result.p90 = rank(90);
  result.p99 = rank(99);
  result.most = times.back();
  result.mean = std::accumulate(times.begin(), times.end(), 0.0) / count;
  return result;
}

}  // namespace weightd::tools
