// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "tools/bench/row.h"

namespace weightd::tools {

/// The route's gain over tokens, one line a shape, one panel a model, as an SVG document. Of gemm_best where there are such rows,
/// else of gemm_f12, else of gemm_exact. kInvalidArgument: no row of these has a ratio.
[[nodiscard]] Result<std::string> ratio_plot(const std::vector<Row>& rows);

}  // namespace weightd::tools
