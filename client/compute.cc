// SPDX-License-Identifier: Apache-2.0
#include "client/compute.h"

#include <utility>

#include "base/text.h"

namespace weightd::detail {

Result<std::unique_ptr<Compute>> map_arena(ArenaSource source) {
  const bool host = source.device == "host";
  if (source.transport != "fd" && (host || source.transport != "legacy")) {
    return Status::unsupported("transport '" + printable(source.transport) + "' on device '" + printable(source.device) +
                               "' is not known to this library");
  }
  return host ? map_host_arena(std::move(source)) : map_gpu_arena(std::move(source));
}

}  // namespace weightd::detail
