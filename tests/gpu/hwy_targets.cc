// SPDX-License-Identifier: Apache-2.0
#include <hwy/targets.h>

// What Highway's shared library would supply to dispatching code, for programs that may not need it. Highway keeps its choice in
// one object per program; that is its interface.
namespace hwy {

int64_t SupportedTargets() {
  int64_t targets = HWY_STATIC_TARGET;
#if HWY_ARCH_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) targets |= HWY_AVX2;
#endif
  return targets;
}

ChosenTarget& GetChosenTarget() {
  static ChosenTarget chosen;
  return chosen;
}

}  // namespace hwy
