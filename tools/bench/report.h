// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "tools/bench/row.h"

namespace weightd::tools {

/// Markdown: where it was measured, then a table for each kind of row that is there: ratios by shape and tokens, every product,
/// decompression and copies, chains, loading. Cells that were not measured are "-".
[[nodiscard]] std::string markdown_report(const std::vector<Row>& rows);

}  // namespace weightd::tools
