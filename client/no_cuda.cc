// SPDX-License-Identifier: Apache-2.0
#include "base/text.h"
#include "client/compute.h"

namespace weightd::detail {

Result<std::unique_ptr<Compute>> map_gpu_arena(ArenaSource source) {
  return Status::unsupported("the weights lie on " + printable(source.device) + ", and this library was built without CUDA");
}

}  // namespace weightd::detail
