// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "kernels/blas.h"

namespace weightd::kernels {
namespace {

/// Fitted to measured times (H200, 132 multiprocessors; kWgmmaRates to those of gemm_tune); a new kernel is entered by fitting its
/// line again. Bytes and floating-point operations a microsecond.
struct FusedRates {
  double coded_bytes;             // weights streamed at few tokens
  double operations;              // of whole token blocks, where they bind
  double fixed_us;                // start and end of a launch, or of a wave of blocks for the next tokens
  uint64_t smallest_token_block;  // blocks are this wide or a power of two wider
  uint64_t token_block;           // tokens at most for which the weights are read and decoded once
};
constexpr FusedRates kBulkRates{4.2e6, 235e6, 2, 8, 64};     // gate_up 8B: 41.1 us at one token, 60.5 us at 64
constexpr FusedRates kDirectRates{2.85e6, 147e6, 2, 8, 64};  // gate_up 8B: 61.7 us at one token, 102.5 us at 64
constexpr FusedRates kWgmmaRates{3.8e6, 470e6, 6, 64, 128};  // gate_up 8B: 50.4 us at 64 tokens, 69.0 us at 128
constexpr uint64_t kMostBulkTokens = 32;                     // where plan_gemm turns to warpgroup products

constexpr double kCodedBytesPerWeight = 12.04 / 8;
constexpr double kRawBytesPerWeight = 2;
// Decompression, bytes read and written: 16.8 us for 4096 x 4096, 452 us for 128256 x 4096.
constexpr double kDecompressBytes = 4.05e6;
constexpr double kDecompressFixedUs = 2;
// cuBLAS: 13.1 us for 4096 x 4096 and 108.5 us for 28672 x 8192 at one token; 700 to 800 TFLOP/s from 256 tokens on.
constexpr double kBlasBytes = 4.2e6;
constexpr double kBlasOperations = 750e6;
constexpr double kBlasFixedUs = 4;

/// Tokens that the fused kernel computes for m: whole token blocks, and a single one is a power of two.
uint64_t padded_tokens(const FusedRates& rates, uint64_t m) {
  uint64_t block = rates.smallest_token_block;
  while (block < rates.token_block && block < m) block *= 2;
  return (m + block - 1) / block * block;
}

}  // namespace

RouteCost route_cost(const DeviceTraits& device, uint64_t n, uint64_t k, uint64_t m) {
  const FusedRates& few = device.bulk_copy ? kBulkRates : kDirectRates;
  const FusedRates& rates = device.wgmma && m > kMostBulkTokens ? kWgmmaRates : few;
  const double weights = static_cast<double>(n) * static_cast<double>(k);
  const uint64_t padded = padded_tokens(rates, m);
  const auto passes = static_cast<double>((padded + rates.token_block - 1) / rates.token_block);
  RouteCost cost;
  cost.fused_us = passes * rates.fixed_us + std::max(passes * weights * kCodedBytesPerWeight / rates.coded_bytes,
                                                     2 * weights * static_cast<double>(padded) / rates.operations);
  cost.decompressed_us =
      kDecompressFixedUs + weights * (kCodedBytesPerWeight + kRawBytesPerWeight) / kDecompressBytes + kBlasFixedUs +
      std::max(weights * kRawBytesPerWeight / kBlasBytes, 2 * weights * static_cast<double>(m) / kBlasOperations);
  return cost;
}

Route choose_route(const DeviceTraits& device, uint64_t n, uint64_t k, uint64_t m) {
  if (n == 0 || k == 0 || m == 0) return Route::kFused;  // it writes what there is to write
  const RouteCost cost = route_cost(device, n, k, m);
  return cost.decompressed_us < cost.fused_us ? Route::kDecompressed : Route::kFused;
}

}  // namespace weightd::kernels
