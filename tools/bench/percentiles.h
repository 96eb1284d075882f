// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

namespace weightd::tools {

/// Of a set of times, in the unit of the times. Percentiles are nearest-rank: p90 is the smallest time that at least 90 % of the
/// times do not pass.
struct Percentiles {
  double least = 0, p50 = 0, p90 = 0, p99 = 0, most = 0, mean = 0;
};
/// `times` is not empty.
[[nodiscard]] Percentiles percentiles(std::vector<double> times);

}  // namespace weightd::tools
