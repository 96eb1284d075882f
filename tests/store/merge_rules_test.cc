// SPDX-License-Identifier: Apache-2.0
#include "store/merge_rules.h"

#include <gtest/gtest.h>

#include <set>

namespace weightd::store {
namespace {

using Members = std::vector<uint32_t>;

MergeInput matrix(std::string_view name, uint64_t n = 64, uint64_t k = 128) { return {name, true, n, k}; }

std::vector<MergeGroup> find(const std::vector<MergeInput>& tensors) { return find_merge_groups(tensors); }

TEST(MergeRules, EachMemberBelongsToOneRule) {
  std::set<std::string_view> members;
  for (const MergeRule& rule : merge_rules()) {
    for (const std::string_view member : rule.members) {
      if (member.empty()) continue;
      EXPECT_TRUE(members.insert(member).second) << member;
    }
    EXPECT_EQ(members.count(rule.merged), 0U);
  }
}

TEST(MergeRules, QkvInTheRulesOrderAndTheFirstMembersPlace) {
  const auto groups = find(
      {matrix("l.0.k_proj.weight", 16), matrix("l.0.o_proj.weight"), matrix("l.0.q_proj.weight"), matrix("l.0.v_proj.weight", 32)});
  ASSERT_EQ(groups.size(), 1U);
  EXPECT_EQ(groups[0].name, "l.0.qkv_proj.weight");
  EXPECT_EQ(groups[0].members, (Members{2, 0, 3}));
}

TEST(MergeRules, GateAndUpOfEveryExpertApart) {
  const auto groups = find(
      {matrix("e.1.gate_proj.weight"), matrix("e.1.up_proj.weight"), matrix("e.0.gate_proj.weight"), matrix("e.0.up_proj.weight")});
  ASSERT_EQ(groups.size(), 2U);
  EXPECT_EQ(groups[0].name, "e.1.gate_up_proj.weight");
  EXPECT_EQ(groups[0].members, (Members{0, 1}));
  EXPECT_EQ(groups[1].members, (Members{2, 3}));
}

TEST(MergeRules, BertMixtralAndNamesWithoutPrefix) {
  auto groups = find({matrix("enc.attention.self.query.weight"), matrix("enc.attention.self.key.weight"),
                      matrix("enc.attention.self.value.weight")});
  ASSERT_EQ(groups.size(), 1U);
  EXPECT_EQ(groups[0].name, "enc.attention.self.qkv.weight");
  groups = find({matrix("experts.7.w1.weight"), matrix("experts.7.w2.weight"), matrix("experts.7.w3.weight")});
  ASSERT_EQ(groups.size(), 1U);
  EXPECT_EQ(groups[0].name, "experts.7.w1w3.weight");
  groups = find({matrix("gate_proj.weight"), matrix("up_proj.weight")});
  ASSERT_EQ(groups.size(), 1U);
  EXPECT_EQ(groups[0].name, "gate_up_proj.weight");
}

TEST(MergeRules, WhatIsNotMerged) {
  const std::string_view gate = "m.gate_proj.weight", up = "m.up_proj.weight";
  EXPECT_TRUE(find({matrix(gate)}).empty()) << "a part is missing";
  EXPECT_TRUE(find({matrix(gate), matrix("n.up_proj.weight")}).empty()) << "another prefix";
  EXPECT_TRUE(find({matrix(gate, 64, 128), matrix(up, 64, 256)}).empty()) << "another k";
  EXPECT_TRUE(find({matrix(gate, 40), matrix(up)}).empty()) << "rows no multiple of 16";
  EXPECT_TRUE(find({matrix(gate), {up, false, 64, 128}}).empty()) << "a part is not eligible";
  EXPECT_TRUE(find({{gate, false, 64, 128}, matrix(up)}).empty()) << "the first part is not eligible";
  EXPECT_TRUE(find({matrix("m.gate_proj.bias"), matrix("m.up_proj.bias")}).empty()) << "weights only";
  EXPECT_TRUE(find({matrix("m.xgate_proj.weight"), matrix("m.xup_proj.weight")}).empty()) << "whole name parts only";
  EXPECT_TRUE(find({matrix(gate), matrix(up), {"m.gate_up_proj.weight", false, 0, 0}}).empty()) << "the name is taken";
}

TEST(MergeRules, CrossAttentionHasTwoInputs) {
  EXPECT_TRUE(
      find({matrix("d.encoder_attn.q_proj.weight"), matrix("d.encoder_attn.k_proj.weight"), matrix("d.encoder_attn.v_proj.weight")})
          .empty());
  EXPECT_TRUE(
      find({matrix("d.EncDecAttention.q.weight"), matrix("d.EncDecAttention.k.weight"), matrix("d.EncDecAttention.v.weight")})
          .empty());
}

}  // namespace
}  // namespace weightd::store
