// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/ptx.cuh"

/// The instructions that only the wgmma kernel uses: warpgroup products, register budgets, clusters. They exist where the compiler
/// targets sm_90a.
namespace weightd::kernels::ptx {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// --- warpgroup matrix unit ---

#define WEIGHTD_ACCUMULATORS(i)                                                                                             \
  "+f"(d[(i)]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3]), "+f"(d[(i) + 4]), "+f"(d[(i) + 5]), "+f"(d[(i) + 6]), \
      "+f"(d[(i) + 7])

/// d[64, 2 * |d|] += a · bᵀ for a [64, 16] in the registers of the four warps (16 rows each, the fragment of mma.m16n8k16), b the
/// tile that the descriptor names. d[4i ..] is the warp's 16 rows of tokens 8i .. 8i + 7, as mma.m16n8k16 has them.
__device__ __forceinline__ void wgmma(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{\n .reg .pred add;\n setp.eq.b32 add, 0, 0;\n"
      " wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, add, 1, 1, 0;\n}"
      : WEIGHTD_ACCUMULATORS(0), WEIGHTD_ACCUMULATORS(8), WEIGHTD_ACCUMULATORS(16), WEIGHTD_ACCUMULATORS(24)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void wgmma(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{\n .reg .pred add;\n setp.eq.b32 add, 0, 0;\n"
      " wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, add, 1, 1, 0;\n}"
      : WEIGHTD_ACCUMULATORS(0), WEIGHTD_ACCUMULATORS(8), WEIGHTD_ACCUMULATORS(16), WEIGHTD_ACCUMULATORS(24),
        WEIGHTD_ACCUMULATORS(32), WEIGHTD_ACCUMULATORS(40), WEIGHTD_ACCUMULATORS(48), WEIGHTD_ACCUMULATORS(56)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void wgmma(float (&d)[128], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{\n .reg .pred add;\n setp.eq.b32 add, 0, 0;\n"
      " wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
      "{%128, %129, %130, %131}, %132, add, 1, 1, 0;\n}"
      : WEIGHTD_ACCUMULATORS(0), WEIGHTD_ACCUMULATORS(8), WEIGHTD_ACCUMULATORS(16), WEIGHTD_ACCUMULATORS(24),
        WEIGHTD_ACCUMULATORS(32), WEIGHTD_ACCUMULATORS(40), WEIGHTD_ACCUMULATORS(48), WEIGHTD_ACCUMULATORS(56),
        WEIGHTD_ACCUMULATORS(64), WEIGHTD_ACCUMULATORS(72), WEIGHTD_ACCUMULATORS(80), WEIGHTD_ACCUMULATORS(88),
        WEIGHTD_ACCUMULATORS(96), WEIGHTD_ACCUMULATORS(104), WEIGHTD_ACCUMULATORS(112), WEIGHTD_ACCUMULATORS(120)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#undef WEIGHTD_ACCUMULATORS

/// For accumulators: a zero that the compiler knows it may get other registers, and moves, where a loop of products ends.
__device__ __forceinline__ float opaque_zero() {
  float zero;
  asm volatile("mov.f32 %0, 0f00000000;" : "=f"(zero));
  return zero;
}

/// A value of which the compiler knows nothing.
__device__ __forceinline__ uint32_t opaque(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

/// Keeps the compiler from computing these registers behind the next wgmma_fence.
__device__ __forceinline__ void wgmma_define(uint32_t (&a)[4]) {
  asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
}

/// Orders the registers written so far before the products that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/// Until the products of all committed groups but the last kGroups are done: their registers and tiles are free.
template <int kGroups>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}

/// Of a tile [tokens][64] of bf16 with the 128-byte swizzle, 1 KiB aligned; add 2 for each 16 columns. Eight tokens are 1024 bytes.
__device__ __forceinline__ uint64_t swizzled_descriptor(uint32_t shared) {
  constexpr uint64_t stride = uint64_t{1024 / 16} << 32;
  constexpr uint64_t swizzle_128 = uint64_t{1} << 62;
  constexpr uint64_t unused_stride = uint64_t{1} << 16;
  return swizzle_128 | stride | unused_stride | (shared >> 4);
}

template <int kRegisters>
__device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// --- transposed stores ---

/// Two or four 8x8 matrices of 16-bit words, each stored by columns; lanes 8i .. 8i+7 give the addresses of matrix i's columns.
__device__ __forceinline__ void store_matrix_transposed(uint32_t address, uint32_t r0, uint32_t r1) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(r0), "r"(r1) : "memory");
}

__device__ __forceinline__ void store_matrix_transposed(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1), "r"(r2),
               "r"(r3)
               : "memory");
}

// --- clusters ---

/// Orders no memory: a release at cluster scope waits for every write of the thread to reach the L2. It is for meetings where
/// nothing written before is read after: the barriers' initial state has a fence of its own, and memory to be reused was read to
/// the end.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }

/// What the thread did before is seen by all who wait.
__device__ __forceinline__ void cluster_arrive_release() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

/// The address in block `rank` of the cluster of what this block has at `shared`.
__device__ __forceinline__ uint32_t map_shared(uint32_t shared, uint32_t rank) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(shared), "r"(rank));
  return mapped;
}

/// Block scope is enough: what is handed back is a buffer, not data. A release at cluster scope stalls every stage.
__device__ __forceinline__ void mbarrier_arrive_mapped(uint32_t mapped_barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapped_barrier) : "memory");
}

__device__ __forceinline__ void store_mapped(uint32_t mapped, float a, float b, float c, float d) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(mapped), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

/// Sixteen bytes, which the barrier of the same block counts when they are there.
__device__ __forceinline__ void send_mapped(uint32_t mapped, uint32_t mapped_barrier, float a, float b, float c, float d) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(mapped),
               "f"(a), "f"(b), "f"(c), "f"(d), "r"(mapped_barrier)
               : "memory");
}

__device__ __forceinline__ void tensor_copy_3d(uint32_t shared, uint64_t map, uint32_t x, uint32_t y, uint32_t z, uint32_t barrier,
                                               uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], "
      "%6;" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "l"(policy)
      : "memory");
}

/// To the same place, and the same barrier, in each block whose rank's bit is set.
__device__ __forceinline__ void tensor_copy_2d_multicast(uint32_t shared, uint64_t map, uint32_t x, uint32_t y, uint32_t barrier,
                                                         uint16_t ranks, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(ranks), "l"(policy)
      : "memory");
}

/// Also for what other blocks of the cluster sent.
__device__ __forceinline__ void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity) {
  uint32_t done = 0;
  do {
    asm volatile(
        "{\n .reg .pred p;\n mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (done == 0);
}

/// Meets `threads` threads at a named barrier; whether the predicate holds for all of them.
__device__ __forceinline__ bool barrier_all(uint32_t id, uint32_t threads, bool predicate) {
  uint32_t all = 0;
  asm volatile("{\n .reg .pred p, q;\n setp.ne.u32 p, %3, 0;\n bar.red.and.pred q, %1, %2, p;\n selp.u32 %0, 1, 0, q;\n}"
               : "=r"(all)
               : "r"(id), "r"(threads), "r"(static_cast<uint32_t>(predicate))
               : "memory");
  return all != 0;
}

/// Whether the phase has ended; never sleeps.
__device__ __forceinline__ bool mbarrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t done = 0;
  asm volatile("{\n .reg .pred p;\n mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done != 0;
}

#endif

}  // namespace weightd::kernels::ptx
