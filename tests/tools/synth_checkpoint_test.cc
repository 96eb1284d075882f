// SPDX-License-Identifier: Apache-2.0
#include "tools/pack/synth_checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>

#include "store/checkpoint.h"
#include "tests/support/safetensors_builder.h"

namespace weightd::tools {
namespace {

using testing::read_file;
using testing::TempDir;

SynthOptions tiny(const char* name = "tiny-llama") {
  SynthOptions options;
  options.architecture = *find_architecture(name);
  options.seed = 11;
  return options;
}

/// File name to bytes.
std::map<std::string, std::string> files_of(const std::string& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) files[entry.path().filename()] = read_file(entry.path());
  return files;
}

/// Tensor name to bytes, read by the product's reader.
std::map<std::string, std::vector<std::byte>> tensors_of(const std::string& folder) {
  std::map<std::string, std::vector<std::byte>> tensors;
  const Result<store::Checkpoint> checkpoint = store::open_checkpoint(folder);
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status().to_string();
  if (!checkpoint.ok()) return tensors;
  EXPECT_TRUE(checkpoint->warnings.empty());
  for (const store::CheckpointTensor& tensor : checkpoint->tensors) {
    const store::SafetensorsEntry& entry = checkpoint->entry(tensor);
    std::vector<std::byte>& bytes = tensors[entry.name];
    bytes.resize(entry.size_bytes);
    EXPECT_TRUE(checkpoint->read(tensor, 0, bytes).ok());
  }
  return tensors;
}

TEST(SynthCheckpoint, OneFileWhenItFits) {
  const TempDir dir;
  const Result<SynthReport> report = synth_checkpoint(dir / "m", tiny());
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_EQ(report->files, 1U);
  const auto files = files_of(dir / "m");
  EXPECT_EQ(files.size(), 2U);
  EXPECT_EQ(files.count("model.safetensors"), 1U);
  EXPECT_EQ(files.count("config.json"), 1U);
  EXPECT_EQ(tensors_of(dir / "m").size(), report->tensors);
}

TEST(SynthCheckpoint, ShardsHoldTheSameTensors) {
  const TempDir dir;
  SynthOptions options = tiny();
  ASSERT_TRUE(synth_checkpoint(dir / "one", options).ok());
  options.shard_bytes = 1'000'000;
  const Result<SynthReport> report = synth_checkpoint(dir / "many", options);
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_GT(report->files, 2U);
  EXPECT_TRUE(std::filesystem::exists(dir / "many/model.safetensors.index.json"));
  EXPECT_EQ(tensors_of(dir / "one"), tensors_of(dir / "many"));
}

TEST(SynthCheckpoint, BytesDependOnTheSeedAndOnNothingElse) {
  const TempDir dir;
  SynthOptions options = tiny();
  options.threads = 1;
  ASSERT_TRUE(synth_checkpoint(dir / "a", options).ok());
  options.threads = 3;
  ASSERT_TRUE(synth_checkpoint(dir / "b", options).ok());
  EXPECT_EQ(files_of(dir / "a"), files_of(dir / "b"));
  options.seed = 12;
  ASSERT_TRUE(synth_checkpoint(dir / "c", options).ok());
  const auto a = tensors_of(dir / "a");
  for (const auto& [name, bytes] : tensors_of(dir / "c")) EXPECT_NE(bytes, a.at(name)) << name;
}

TEST(SynthCheckpoint, TensorsDifferUnlessTied) {
  const TempDir dir;
  ASSERT_TRUE(synth_checkpoint(dir / "m", tiny("tiny-qwen3")).ok());
  const auto tensors = tensors_of(dir / "m");
  EXPECT_EQ(tensors.at("lm_head.weight"), tensors.at("model.embed_tokens.weight"));
  std::set<std::vector<std::byte>> distinct;
  for (const auto& [name, bytes] : tensors) distinct.insert(bytes);
  EXPECT_EQ(distinct.size() + 1, tensors.size());
}

TEST(SynthCheckpoint, NormsLieAroundOne) {
  const TempDir dir;
  ASSERT_TRUE(synth_checkpoint(dir / "m", tiny()).ok());
  const auto tensors = tensors_of(dir / "m");
  const std::vector<std::byte>& norm = tensors.at("model.norm.weight");
  std::vector<uint16_t> words(norm.size() / 2);
  std::memcpy(words.data(), norm.data(), norm.size());
  std::set<uint16_t> distinct(words.begin(), words.end());
  EXPECT_GT(distinct.size(), 10U);
  for (const uint16_t word : words) EXPECT_NEAR(std::bit_cast<float>(uint32_t{word} << 16), 1.0F, 0.5F);
}

TEST(SynthCheckpoint, RefusesAFolderThatHoldsSomething) {
  const TempDir dir;
  testing::write_file(dir / "m/notes.txt", "mine");
  const Result<SynthReport> report = synth_checkpoint(dir / "m", tiny());
  EXPECT_EQ(report.status().code(), StatusCode::kAlreadyExists);
  EXPECT_THAT(report.status().message(), ::testing::HasSubstr("notes.txt"));
  EXPECT_EQ(files_of(dir / "m"), (std::map<std::string, std::string>{{"notes.txt", "mine"}}));
}

TEST(SynthCheckpoint, NamesTheParentThatIsMissing) {
  const TempDir dir;
  EXPECT_EQ(synth_checkpoint(dir / "no/such", tiny()).status().code(), StatusCode::kNotFound);
}

TEST(SynthCheckpoint, CancelledLeavesNothing) {
  const TempDir dir;
  SynthOptions options = tiny();
  options.shard_bytes = 1'000'000;
  const uint64_t stop_at = 2'000'000;
  options.progress = [&](uint64_t done_bytes, uint64_t) { return done_bytes < stop_at; };
  EXPECT_EQ(synth_checkpoint(dir / "m", options).status().code(), StatusCode::kCancelled);
  EXPECT_FALSE(std::filesystem::exists(dir / "m"));
  // A folder that was there stays, empty.
  std::filesystem::create_directory(dir / "mine");
  EXPECT_EQ(synth_checkpoint(dir / "mine", options).status().code(), StatusCode::kCancelled);
  EXPECT_TRUE(files_of(dir / "mine").empty());
}

TEST(SynthCheckpoint, SaysHowMuchRoomIsMissingBeforeItWrites) {
  const TempDir dir;
  SynthOptions options = tiny();
  options.architecture.vocab = uint64_t{1} << 44;
  const Status status = synth_checkpoint(dir / "m", options).status();
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), ::testing::HasSubstr("bytes too few"));
  EXPECT_FALSE(std::filesystem::exists(dir / "m"));
}

}  // namespace
}  // namespace weightd::tools
