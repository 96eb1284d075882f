// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

namespace weightd::tools {

/// A model of trained weights: w = s · exp(b · z_row) · N(0,1) rounded to BF16, where z_row is standard normal per row, plus a share
/// of outliers at 2^-40..2^-20 and 2^3..2^10. b = 0.3 reproduces the exponent statistics that are published for trained LLMs.
struct WeightModel {
  double scale = 0.02;            // s
  double row_scale_sigma = 0.3;   // b
  double outlier_rate = 0.0002;
};

/// Fills rows [row_begin, row_begin + words.size() / k) of a matrix with k columns. Every row depends only on (seed, row, model), so any
/// cut into calls, and any thread count, gives the same words. words.size() is a multiple of k.
void synth_bf16(std::span<uint16_t> words, uint64_t k, uint64_t row_begin, uint64_t seed, const WeightModel& model, int threads);

/// Uniform random 16-bit patterns (NaNs, infinities, subnormals included): what cannot be compressed.
void random_words(std::span<uint16_t> words, uint64_t seed);

}  // namespace weightd::tools
