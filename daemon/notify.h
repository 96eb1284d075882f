// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "weightd/status.h"

namespace weightd::daemon {

/// Sends `state` ("READY=1", lines) to the service manager named by $NOTIFY_SOCKET; nothing without that variable. Never waits.
Status notify(const std::string& state);

}  // namespace weightd::daemon
