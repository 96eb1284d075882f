// SPDX-License-Identifier: Apache-2.0
#include "base/version.h"

namespace weightd {

std::string_view build_id() { return WEIGHTD_VERSION " (" WEIGHTD_COMMIT ")"; }
std::string_view release_version() { return WEIGHTD_VERSION; }

}  // namespace weightd
