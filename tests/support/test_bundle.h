// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "weightd/types.h"

namespace weightd::testing {

struct TestBundle {
  uint64_t seed = 1;
  uint64_t layers = 2;
  uint64_t rows = 64, cols = 256;  // of every layer's matrix
  Encoding encoding = Encoding::kF12;
  bool zeros = false;  // all weights 0: quick to make, however large
};

/// Packs a small random checkpoint (BF16 matrices "layers.<i>.weight", an F32 vector "norm.weight") into the bundle `path`. The
/// content depends on the options alone. Aborts on failure.
void make_bundle(const std::string& path, const TestBundle& options = {});

}  // namespace weightd::testing
