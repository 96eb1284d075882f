// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

namespace weightd::reference {

/// One dot product in the order of kernels/LAYOUT.md, "host GEMM", written from that text: sixteen partial sums, fused
/// multiply-add, fixed tree, round to nearest even. Plain scalar code.
[[nodiscard]] uint16_t dot_bf16(std::span<const uint16_t> x, std::span<const uint16_t> w);

/// y[M, N] = x[M, K] · w[N, K]ᵀ, all BF16 words, row-major without gaps; one thread per core, a row at a time.
void gemm_bf16(std::span<const uint16_t> x, std::span<const uint16_t> w, std::span<uint16_t> y, uint64_t m, uint64_t n, uint64_t k);

}  // namespace weightd::reference
