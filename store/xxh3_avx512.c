/* SPDX-License-Identifier: Apache-2.0 */
/* In C: inline functions of C++ heads, compiled for this processor, could take the place of the portable ones. */
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "store/xxh3_vector.h"

#if XXH_VECTOR != XXH_AVX512
#error "compile with -mavx512f"
#endif

void weightd_xxh3_update_avx512(void* state, const void* data, size_t size) {
  (void)XXH3_128bits_update((XXH3_state_t*)state, data, size);
}
uint64_t weightd_xxh3_64_avx512(const void* data, size_t size) { return XXH3_64bits(data, size); }
