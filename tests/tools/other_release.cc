// SPDX-License-Identifier: Apache-2.0
#include <string_view>

#include "weightd/client.h"

namespace weightd {

std::string_view version() { return "0.0.1 (0000000)"; }

}  // namespace weightd
