// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace weightd {

/// "1.2.3 (abcdef0)": version and commit of this build; the same text in every binary and library of one build (CO-111).
[[nodiscard]] std::string_view build_id();
/// "1.2.3". Goes into bundles: the commit does not, so that packing is reproducible between builds of one version.
[[nodiscard]] std::string_view release_version();

}  // namespace weightd
