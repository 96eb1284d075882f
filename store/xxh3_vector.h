/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* xxHash's own XXH3 (xxhash.h, inlined), compiled for wider vectors than the distribution's library. Same bits. The caller makes sure that
 * the processor has the instructions. `state` is an XXH3_state_t of the library. */
#ifdef __cplusplus
extern "C" {
#endif
void weightd_xxh3_update_avx2(void* state, const void* data, size_t size);
uint64_t weightd_xxh3_64_avx2(const void* data, size_t size);
void weightd_xxh3_update_avx512(void* state, const void* data, size_t size);
uint64_t weightd_xxh3_64_avx512(const void* data, size_t size);
#ifdef __cplusplus
}
#endif
