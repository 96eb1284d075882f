// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

/// Which matrices of a checkpoint are coded as one, because a model multiplies them by the same activations.
namespace weightd::store {

inline constexpr size_t kMaxMergeMembers = 3;

struct MergeRule {
  // The last part of the names before ".weight", from top to bottom in the merged matrix; unused places are empty.
  std::array<std::string_view, kMaxMergeMembers> members;
  std::string_view merged;
};
/// The table. Each member belongs to one rule only.
[[nodiscard]] std::span<const MergeRule> merge_rules();

struct MergeInput {
  std::string_view name;
  bool eligible = false;  // an indexed BF16 matrix of rank 2 without a zero dimension
  uint64_t n = 0, k = 0;
};
struct MergeGroup {
  std::string name;               // of the merged matrix
  std::vector<uint32_t> members;  // indexes into the input, in the rule's order
};

/// Groups of inputs "P.m.weight" with the same prefix P, one for each member m of a rule; all eligible, of equal k, each n a
/// multiple of 16, and "P.merged.weight" is no name of the input. Names are opaque but for this: numbers in them are not read.
/// Ordered by the first member's place in the input. Input names are unique.
[[nodiscard]] std::vector<MergeGroup> find_merge_groups(std::span<const MergeInput> tensors);

}  // namespace weightd::store
