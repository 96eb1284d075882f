// SPDX-License-Identifier: Apache-2.0
#include "tests/support/test_bundle.h"

#include <bit>
#include <cmath>
#include <random>
#include <span>
#include <vector>

#include "store/pack.h"
#include "tests/support/safetensors_builder.h"

namespace weightd::testing {

void make_bundle(const std::string& path, const TestBundle& options) {
  std::mt19937_64 random(options.seed);
  std::normal_distribution<float> normal(0.0F, 0.02F);
  SafetensorsBuilder builder;
  for (uint64_t layer = 0; layer < options.layers; ++layer) {
    std::vector<uint16_t> words(options.rows * options.cols);
    for (uint16_t& word : options.zeros ? std::span<uint16_t>() : std::span(words))
      word = static_cast<uint16_t>(std::bit_cast<uint32_t>(normal(random)) >> 16);
    builder.add_bf16("layers." + std::to_string(layer) + ".weight", {options.rows, options.cols}, words);
  }
  builder.add("norm.weight", "F32", {options.cols}, std::string(4 * options.cols, '\x3f'));
  const TempDir folder;
  builder.write(folder / "model.safetensors");
  store::PackOptions pack;
  pack.encoding = options.encoding;
  pack.threads = 1;
  pack.tool_version = "test";
  const auto report = store::pack(folder / "model.safetensors", path, pack);
  require(report.ok(), "pack: " + report.status().message());
}

}  // namespace weightd::testing
