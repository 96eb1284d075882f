// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include <gtest/gtest.h>
#include <hwy/targets.h>

namespace weightd::test {

/// Runs `fn` once for each instruction set that the vector code is compiled for and this machine has, the portable fallback
/// included; then gives the choice back to Highway.
template <typename Fn>
void for_each_simd_target(Fn&& fn) {
  const auto choose = [](int64_t targets) {
    hwy::SetSupportedTargetsForTest(targets);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  };
  choose(0);
  const int64_t supported = hwy::SupportedTargets();
  for (const int64_t target : {HWY_AVX3_DL, HWY_AVX2, HWY_SSE4, HWY_NEON}) {
    if ((supported & target) == 0) continue;
    SCOPED_TRACE(target == HWY_AVX3_DL ? "AVX3_DL" : hwy::TargetName(target));
    choose(target);
    fn();
  }
  {
    SCOPED_TRACE("portable");
    choose(HWY_SCALAR | HWY_EMU128);
    fn();
  }
  choose(0);
}

}  // namespace weightd::test
