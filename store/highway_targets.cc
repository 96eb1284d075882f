// SPDX-License-Identifier: Apache-2.0
// Static builds only: what Highway's shared library supplies to dispatching code. The choice is one object per program by its interface.
#include <hwy/targets.h>

namespace hwy {
namespace {

std::atomic<int64_t>& limit_for_tests() {
  static std::atomic<int64_t> limit{0};
  return limit;
}

#if HWY_ARCH_X86
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}
bool has_avx3() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
}
bool has_avx3_dl() {
  return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") &&
         __builtin_cpu_supports("avx512bitalg") && __builtin_cpu_supports("avx512vpopcntdq") && __builtin_cpu_supports("vpclmulqdq") &&
         __builtin_cpu_supports("gfni");
}
#endif

}  // namespace

int64_t SupportedTargets() {
  if (const int64_t limit = limit_for_tests().load(); limit != 0) return limit;
  int64_t targets = HWY_ENABLED_BASELINE;
#if HWY_ARCH_X86
  __builtin_cpu_init();
  if (has_avx2()) targets |= HWY_AVX2;
  if (has_avx2() && has_avx3()) targets |= HWY_AVX3;
  if (has_avx2() && has_avx3() && has_avx3_dl()) targets |= HWY_AVX3_DL;
#endif
  return targets;
}

void SetSupportedTargetsForTest(int64_t targets) { limit_for_tests().store(targets); }

ChosenTarget& GetChosenTarget() {
  static ChosenTarget chosen;
  return chosen;
}

}  // namespace hwy
