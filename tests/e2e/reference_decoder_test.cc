// SPDX-License-Identifier: Apache-2.0
// The packer's bundles against the second decoder, which knows nothing but store/FORMAT.md.
#include "tests/reference/bundle.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "tests/support/safetensors_builder.h"

namespace weightd::e2e {
namespace {

using testing::SafetensorsBuilder;
using testing::TempDir;
using Words = std::vector<uint16_t>;

/// Words around one exponent, as trained weights are, with a share of wild ones.
Words weights(size_t count, double wild_rate, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0F, 0.02F);
  std::uniform_real_distribution<double> uniform;
  Words words(count);
  for (uint16_t& word : words) {
    const float value = normal(random);
    uint32_t bits = 0;
    std::memcpy(&bits, &value, 4);
    word = uniform(random) < wild_rate ? static_cast<uint16_t>(random()) : static_cast<uint16_t>(bits >> 16);
  }
  return words;
}

Words all_patterns() {
  Words words(65536);
  for (size_t i = 0; i < words.size(); ++i) words[i] = static_cast<uint16_t>(i);
  return words;
}

void pack(const std::string& checkpoint, const std::string& bundle, const std::string& options = "") {
  const std::string command = std::string(WEIGHTPACK) + " pack --quiet " + options + " '" + checkpoint + "' '" + bundle + "'";
  ASSERT_EQ(std::system(command.c_str()), 0) << command;
}

/// Every tensor and every file of the bundle equals the checkpoint's, which is read by a third reader.
void expect_equal(const std::string& checkpoint, const reference::DecodedBundle& bundle, const std::vector<std::string>& files) {
  const auto tensors = reference::read_checkpoint(checkpoint);
  ASSERT_EQ(bundle.tensors.size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    const auto found = bundle.tensors.find(name);
    ASSERT_NE(found, bundle.tensors.end()) << name;
    EXPECT_EQ(found->second.dtype, tensor.dtype) << name;
    EXPECT_EQ(found->second.shape, tensor.shape) << name;
    EXPECT_TRUE(found->second.bytes == tensor.bytes) << name;
  }
  ASSERT_EQ(bundle.files.size(), files.size());
  for (const std::string& name : files) {
    const std::string original = testing::read_file(checkpoint + "/" + name);
    const auto& restored = bundle.files.at(name);
    EXPECT_TRUE(original == std::string(restored.begin(), restored.end())) << name;
  }
}

TEST(ReferenceDecoder, EveryPatternEveryEscapeRateAndOddShapes) {
  const TempDir folder;
  SafetensorsBuilder builder;
  builder.add_bf16("patterns", {256, 256}, all_patterns());
  uint32_t seed = 1;
  // Rates for inline records, pool lists and dense groups (a group has 16 x 512 words).
  for (const double rate : {0.0, 0.0005, 0.01, 0.2}) builder.add_bf16("rate" + std::to_string(seed), {48, 1100}, weights(48 * 1100, rate, seed)), ++seed;
  for (const auto& shape : std::vector<Shape>{{1, 1}, {17, 65}, {16, 64}, {15, 63}, {100, 513}, {3, 40, 200}, {2, 2, 33, 130}}) {
    size_t count = 1;
    for (const uint64_t dim : shape) count *= dim;
    builder.add_bf16("shape" + std::to_string(seed), shape, weights(count, 0.001, seed));
    ++seed;
  }
  builder.add_bf16("vector", {1000}, weights(1000, 0, seed)).add_bf16("scalar", {}, Words{0x3F80}).add_bf16("empty", {4, 0}, Words{});
  builder.add("f32", "F32", {3}, std::string(12, '\x7f')).add("odd", "U8", {5}, "abcde");
  builder.padding(3).write(folder / "in/model.safetensors");
  for (const char* options : {"", "--encoding raw", "--threads 1"}) {
    pack(folder / "in", folder / "out.wpk", options);
    expect_equal(folder / "in", reference::decode_bundle(folder / "out.wpk"), {"model.safetensors"});
  }
}

TEST(ReferenceDecoder, MergedMatricesShardsAndDuplicates) {
  const TempDir folder;
  const std::string layer = "model.layers.0.";
  SafetensorsBuilder first, second;
  first.add_bf16(layer + "self_attn.q_proj.weight", {64, 128}, weights(64 * 128, 0.01, 1));
  first.add_bf16(layer + "self_attn.k_proj.weight", {32, 128}, weights(32 * 128, 0.01, 2));
  second.add_bf16(layer + "self_attn.v_proj.weight", {32, 128}, weights(32 * 128, 0.05, 3));
  second.add_bf16(layer + "mlp.gate_proj.weight", {96, 128}, weights(96 * 128, 0.001, 4));
  second.add_bf16(layer + "mlp.up_proj.weight", {96, 128}, weights(96 * 128, 0.001, 5));
  first.add_bf16("model.embed_tokens.weight", {128, 128}, weights(128 * 128, 0.001, 6));
  second.add_bf16("lm_head.weight", {128, 128}, weights(128 * 128, 0.001, 6));
  testing::write_sharded(folder / "in", {{"model-00001-of-00002.safetensors", first}, {"model-00002-of-00002.safetensors", second}},
                         {{layer + "self_attn.q_proj.weight", "model-00001-of-00002.safetensors"},
                          {layer + "self_attn.k_proj.weight", "model-00001-of-00002.safetensors"},
                          {"model.embed_tokens.weight", "model-00001-of-00002.safetensors"},
                          {layer + "self_attn.v_proj.weight", "model-00002-of-00002.safetensors"},
                          {layer + "mlp.gate_proj.weight", "model-00002-of-00002.safetensors"},
                          {layer + "mlp.up_proj.weight", "model-00002-of-00002.safetensors"},
                          {"lm_head.weight", "model-00002-of-00002.safetensors"}});
  const std::vector<std::string> files = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"};
  for (const char* options : {"", "--no-merge"}) {
    pack(folder / "in", folder / "out.wpk", options);
    expect_equal(folder / "in", reference::decode_bundle(folder / "out.wpk"), files);
  }
}

TEST(ReferenceDecoder, RefusesADamagedBundle) {
  const TempDir folder;
  SafetensorsBuilder().add_bf16("w", {64, 640}, weights(64 * 640, 0.01, 9)).write(folder / "in/model.safetensors");
  pack(folder / "in", folder / "out.wpk");
  std::string bytes = testing::read_file(folder / "out.wpk");
  std::mt19937 random(7);
  for (int i = 0; i < 100; ++i) {
    std::string damaged = bytes;
    damaged[random() % damaged.size()] ^= static_cast<char>(1U << (random() % 8));
    testing::write_file(folder / "bad.wpk", damaged);
    EXPECT_THROW((void)reference::decode_bundle(folder / "bad.wpk"), std::runtime_error);
  }
}

}  // namespace
}  // namespace weightd::e2e
