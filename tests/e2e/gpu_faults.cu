// SPDX-License-Identifier: Apache-2.0
// Kernels that do what no kernel may.
#include "tests/e2e/gpu_faults.h"

namespace weightd::e2e {
namespace {

__global__ void store_kernel(volatile unsigned char* address) { *address = 0x5A; }

__global__ void trap_kernel() { asm volatile("trap;"); }

}  // namespace

cudaError_t launch_store(std::byte* address) {
  store_kernel<<<1, 1>>>(reinterpret_cast<unsigned char*>(address));
  return cudaGetLastError();
}

cudaError_t launch_trap() {
  trap_kernel<<<1, 1>>>();
  return cudaGetLastError();
}

}  // namespace weightd::e2e
