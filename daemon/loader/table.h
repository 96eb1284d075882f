// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ipc/messages.h"
#include "store/bundle.h"

namespace weightd::loader {

/// The tensor table of a bundle that is resident in the form `residency`: what clients form pointers from. Storages and tensors
/// that are not part of the model are left out.
[[nodiscard]] ipc::TensorTable make_table(const store::BundleReader& bundle, const store::Residency& residency);

/// Names of the storages that touch the given blocks, each once, at most `limit`.
[[nodiscard]] std::vector<std::string> names_in_blocks(const ipc::TensorTable& table, const std::vector<uint64_t>& blocks,
                                                       size_t limit);

}  // namespace weightd::loader
