// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "daemon/loader/backend.h"
#include "store/bundle.h"
#include "weightd/status.h"

namespace weightd::loader {

/// Reads every section of the file and compares its checksum: those that are part of `residency` into the backend's arena, which
/// has been allocated, the others to be checked only. `threads` <= 0: one per core. The first failure stops all; kCorruption names
/// the section and the tensor.
Status read_sections(const store::BundleReader& bundle, const store::Residency& residency, Backend& backend, int threads,
                     const Advance& advance);

}  // namespace weightd::loader
