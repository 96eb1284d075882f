// SPDX-License-Identifier: Apache-2.0
#include "store/checkpoint.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <map>

#include "tests/support/safetensors_builder.h"

namespace weightd::store {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using testing::repeat_word;
using testing::SafetensorsBuilder;
using testing::TempDir;

constexpr uint16_t kOnes = 0x3F80, kTwos = 0x4000, kThrees = 0x4040, kFours = 0x4080;

/// A file of one BF16 [64] tensor, all elements `word`.
SafetensorsBuilder one_tensor(std::string_view name, uint16_t word) {
  SafetensorsBuilder file;
  file.add(name, "BF16", {64}, repeat_word(word, 64));
  return file;
}

Checkpoint opened(const std::string& path, const CheckpointOptions& options = {}) {
  Result<Checkpoint> checkpoint = open_checkpoint(path, options);
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status().to_string();
  return checkpoint.ok() ? *std::move(checkpoint) : Checkpoint();
}

std::string data_of(const Checkpoint& checkpoint, const CheckpointTensor& tensor) {
  std::string data(checkpoint.entry(tensor).size_bytes, '\0');
  const Status status = checkpoint.read(tensor, 0, std::as_writable_bytes(std::span(data)));
  EXPECT_TRUE(status.ok()) << status.to_string();
  return data;
}

/// Name -> bytes of the tensors that are part of the model.
std::map<std::string, std::string> model_of(const Checkpoint& checkpoint) {
  std::map<std::string, std::string> model;
  for (const CheckpointTensor& tensor : checkpoint.tensors) {
    if (!tensor.indexed) continue;
    EXPECT_TRUE(model.emplace(checkpoint.entry(tensor).name, data_of(checkpoint, tensor)).second);
  }
  return model;
}

std::vector<std::string> file_names(const Checkpoint& checkpoint) {
  std::vector<std::string> names;
  for (const CheckpointFile& file : checkpoint.files) names.push_back(file.relative_name);
  return names;
}

void expect_refused(const std::string& path, StatusCode code, const std::string& text, const CheckpointOptions& options = {}) {
  const Status status = open_checkpoint(path, options).status();
  EXPECT_EQ(status.code(), code) << status.to_string();
  EXPECT_THAT(status.message(), AllOf(HasSubstr(text), Not(HasSubstr("\n")))) << status.to_string();
}

// --- one file -----------------------------------------------------------------------------------------------------------------

TEST(Checkpoint, OpensASingleFileByPathOrByFolder) {
  const TempDir dir;
  one_tensor("w", kOnes).write(dir / "model.safetensors");
  for (const std::string& path : {dir.path(), dir / "model.safetensors", dir.path() + "/"}) {
    const Checkpoint checkpoint = opened(path);
    EXPECT_THAT(file_names(checkpoint), ElementsAre("model.safetensors"));
    EXPECT_EQ(model_of(checkpoint).at("w"), repeat_word(kOnes, 64));
    EXPECT_THAT(checkpoint.warnings, IsEmpty());
    EXPECT_EQ(checkpoint.index_name, "");
    EXPECT_EQ(checkpoint.files[0].file_bytes, std::filesystem::file_size(dir / "model.safetensors"));
    EXPECT_NE(::fcntl(checkpoint.files[0].fd.get(), F_GETFD) & FD_CLOEXEC, 0);
    EXPECT_EQ(::fcntl(checkpoint.files[0].fd.get(), F_GETFL) & O_ACCMODE, O_RDONLY);
  }
}

TEST(Checkpoint, TensorsComeByOffsetThenHeaderOrder) {
  const TempDir dir;
  SafetensorsBuilder file;
  file.entry("last", "BF16", {3}, 10, 16).entry("middle", "BF16", {3}, 4, 10).entry("first", "BF16", {2}, 0, 4);
  file.entry("empty2", "BF16", {0}, 4, 4).entry("empty1", "BF16", {0, 7}, 4, 4).raw_data("aaaabbbbbbcccccc");
  file.write(dir / "x.safetensors");
  const Checkpoint checkpoint = opened(dir.path());
  std::vector<std::string> names;
  for (const CheckpointTensor& tensor : checkpoint.tensors) names.push_back(checkpoint.entry(tensor).name);
  EXPECT_THAT(names, ElementsAre("first", "middle", "empty2", "empty1", "last"));
  EXPECT_EQ(model_of(checkpoint).at("middle"), "bbbbbb");
  EXPECT_EQ(model_of(checkpoint).at("empty1"), "");
}

TEST(Checkpoint, ReadsPartsOfATensor) {
  const TempDir dir;
  SafetensorsBuilder file;
  file.add("a", "U8", {3}, "abc").add("b", "U8", {8}, "01234567").padding(3).write(dir / "x.safetensors");
  const Checkpoint checkpoint = opened(dir / "x.safetensors");
  std::string part(3, '\0');
  ASSERT_TRUE(checkpoint.read(checkpoint.tensors[1], 4, std::as_writable_bytes(std::span(part))).ok());
  EXPECT_EQ(part, "456");
  ASSERT_TRUE(checkpoint.read(checkpoint.tensors[1], 8, {}).ok());
}

TEST(CheckpointDeathTest, ReadsBeyondATensorAreOurBug) {
  const TempDir dir;
  SafetensorsBuilder file;
  file.add("a", "U8", {3}, "abc").add("b", "U8", {3}, "def").write(dir / "x.safetensors");
  const Checkpoint checkpoint = opened(dir / "x.safetensors");
  std::string part(2, '\0');
  EXPECT_DEATH((void)checkpoint.read(checkpoint.tensors[0], 2, std::as_writable_bytes(std::span(part))), "check failed");
  EXPECT_DEATH((void)checkpoint.read(checkpoint.tensors[0], UINT64_MAX, std::as_writable_bytes(std::span(part))), "check failed");
}

TEST(Checkpoint, PathsThatHoldNoModel) {
  const TempDir dir;
  expect_refused(dir / "absent", StatusCode::kNotFound, "absent");
  expect_refused(dir.path(), StatusCode::kNotFound, "no *.safetensors file and no *.safetensors.index.json");
  ASSERT_EQ(::mkfifo((dir / "pipe.safetensors").c_str(), 0600), 0);
  expect_refused(dir / "pipe.safetensors", StatusCode::kInvalidArgument, "not a regular file");
  testing::write_file(dir / "notes.txt", "hello");
  testing::write_file(dir / ".hidden.safetensors", "not weights");
  std::filesystem::remove(dir / "pipe.safetensors");
  expect_refused(dir.path(), StatusCode::kNotFound, "no *.safetensors file");
  expect_refused(dir / "notes.txt", StatusCode::kCorruption, "notes.txt: the file has 5 bytes");
}

TEST(Checkpoint, MessagesShowOddPathsOnOneLine) {
  const TempDir dir;
  testing::write_file(dir / "a\nb.safetensors", "");
  expect_refused(dir.path(), StatusCode::kCorruption, "a\\nb.safetensors: the file is empty");
}

TEST(Checkpoint, CO_016_ReadsBehindFourGiB) {
  const TempDir dir;
  SafetensorsBuilder file;
  file.entry("pad", "U8", {4294967299}, 0, 4294967299).entry("w", "BF16", {64, 64}, 4294967299, 4294975491);
  const std::string path = dir / "model.safetensors";
  file.write(path);
  const uint64_t data_begin = file.bytes().size();
  std::filesystem::resize_file(path, data_begin + 4294975491);
  const UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
  const std::string words = repeat_word(kThrees, 4096);
  ASSERT_TRUE(pwrite_full(fd.get(), testing::as_bytes(words), data_begin + 4294967299, "f").ok());
  const Checkpoint checkpoint = opened(path);
  ASSERT_EQ(checkpoint.tensors.size(), 2U);
  EXPECT_EQ(data_of(checkpoint, checkpoint.tensors[1]), words);
  std::string edge(8, 'x');
  for (const uint64_t offset : {(uint64_t{1} << 31) - 4, (uint64_t{1} << 32) - 6}) {
    ASSERT_TRUE(pwrite_full(fd.get(), testing::as_bytes("12345678"), data_begin + offset, "f").ok());
    ASSERT_TRUE(checkpoint.read(checkpoint.tensors[0], offset, std::as_writable_bytes(std::span(edge))).ok());
    EXPECT_EQ(edge, "12345678");
  }
}

// --- change while open --------------------------------------------------------------------------------------------------------

TEST(Checkpoint, CO_089_ChangesUnderAnOpenCheckpointAreNoticed) {
  const TempDir dir;
  const std::string path = dir / "model.safetensors";
  one_tensor("w", kOnes).write(path);
  {
    // The same size, a nanosecond later.
    const auto set_nanosecond = [&](long nanosecond) {
      const struct timespec times[2] = {{0, UTIME_OMIT}, {1000000000, nanosecond}};
      ASSERT_EQ(::utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
    };
    set_nanosecond(0);
    const Checkpoint checkpoint = opened(path);
    EXPECT_TRUE(checkpoint.check_unchanged().ok());
    set_nanosecond(1);
    EXPECT_EQ(checkpoint.check_unchanged().code(), StatusCode::kFailedPrecondition);
    EXPECT_THAT(checkpoint.check_unchanged().message(), HasSubstr("model.safetensors: changed"));
  }
  {
    const Checkpoint checkpoint = opened(path);
    std::filesystem::resize_file(path, std::filesystem::file_size(path) - 4);
    EXPECT_EQ(checkpoint.check_unchanged().code(), StatusCode::kFailedPrecondition);
    std::string data(128, '\0');
    const Status status = checkpoint.read(checkpoint.tensors[0], 0, std::as_writable_bytes(std::span(data)));
    EXPECT_EQ(status.code(), StatusCode::kCorruption) << status.to_string();
    EXPECT_THAT(status.message(), HasSubstr("expected 128 bytes"));
  }
  one_tensor("w", kOnes).write(path);
  {
    // A new file renamed over it does not matter: the old content is still what is read.
    const Checkpoint checkpoint = opened(path);
    one_tensor("w", kTwos).write(dir / "new");
    std::filesystem::rename(dir / "new", path);
    EXPECT_TRUE(checkpoint.check_unchanged().ok());
    EXPECT_EQ(model_of(checkpoint).at("w"), repeat_word(kOnes, 64));
  }
}

// --- index: shards that are not there -----------------------------------------------------------------------------------------

class ThreeShards : public ::testing::Test {
 protected:
  ThreeShards() {
    testing::write_sharded(dir_.path(),
                           {{"model-00001-of-00003.safetensors", one_tensor("a", kOnes)},
                            {"model-00002-of-00003.safetensors", one_tensor("b", kTwos)},
                            {"model-00003-of-00003.safetensors", one_tensor("c", kThrees)}},
                           {{"a", "model-00001-of-00003.safetensors"},
                            {"b", "model-00002-of-00003.safetensors"},
                            {"c", "model-00003-of-00003.safetensors"}});
  }
  [[nodiscard]] std::string second() const { return dir_ / "model-00002-of-00003.safetensors"; }
  TempDir dir_;
};

TEST_F(ThreeShards, OpenByFolderAndByIndex) {
  const std::string index = testing::read_file(dir_ / "model.safetensors.index.json");
  for (const std::string& path : {dir_.path(), dir_ / "model.safetensors.index.json"}) {
    const Checkpoint checkpoint = opened(path);
    EXPECT_THAT(file_names(checkpoint), ElementsAre("model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors",
                                                    "model-00003-of-00003.safetensors"));
    EXPECT_EQ(checkpoint.index_name, "model.safetensors.index.json");
    EXPECT_EQ(checkpoint.index_json, index);
    EXPECT_EQ(model_of(checkpoint).at("b"), repeat_word(kTwos, 64));
    EXPECT_THAT(checkpoint.warnings, IsEmpty());
    EXPECT_TRUE(checkpoint.check_unchanged().ok());
  }
}

TEST_F(ThreeShards, CO_020_MissingShard) {
  std::filesystem::remove(second());
  expect_refused(dir_.path(), StatusCode::kNotFound,
                 "1 of 3 shards cannot be used: 'model-00002-of-00003.safetensors' (missing) (an incomplete download?)");
  testing::write_file(dir_ / "model-00002-of-00003.safetensors.incomplete", "partial");
  expect_refused(dir_.path(), StatusCode::kNotFound, "'model-00002-of-00003.safetensors' (missing)");
}

TEST_F(ThreeShards, CO_020_AllMissingShardsAreListed) {
  std::filesystem::remove(second());
  std::filesystem::remove(dir_ / "model-00003-of-00003.safetensors");
  testing::write_file(dir_ / "model-00001-of-00003.safetensors", "");
  expect_refused(
      dir_.path(), StatusCode::kNotFound,
      "3 of 3 shards cannot be used: 'model-00001-of-00003.safetensors' (empty), 'model-00002-of-00003.safetensors' (missing), "
      "'model-00003-of-00003.safetensors' (missing)");
}

TEST_F(ThreeShards, CO_020_EmptyShard) {
  testing::write_file(second(), "");
  expect_refused(dir_.path(), StatusCode::kCorruption, "'model-00002-of-00003.safetensors' (empty)");
}

TEST_F(ThreeShards, CO_020_DanglingSymlink) {
  std::filesystem::remove(second());
  std::filesystem::create_symlink("../../blobs/absent", second());
  expect_refused(dir_.path(), StatusCode::kNotFound, "'model-00002-of-00003.safetensors' (missing)");
}

TEST_F(ThreeShards, CO_020_UnreadableShard) {
  ASSERT_EQ(::chmod(second().c_str(), 0), 0);
  // Root reads everything: step down to a user without rights for the while.
  const bool root = ::geteuid() == 0;
  if (root) {
    ASSERT_EQ(::chmod(dir_.path().c_str(), 0755), 0);
    ASSERT_EQ(::seteuid(65534), 0);
  }
  const Status status = open_checkpoint(dir_.path()).status();
  if (root) {
    ASSERT_EQ(::seteuid(0), 0);
  }
  EXPECT_EQ(status.code(), StatusCode::kPermissionDenied);
  EXPECT_THAT(status.message(), HasSubstr("'model-00002-of-00003.safetensors' (Permission denied)"));
}

TEST_F(ThreeShards, CO_020_TruncatedShardNamesTheShard) {
  std::filesystem::resize_file(second(), std::filesystem::file_size(second()) - 1);
  expect_refused(dir_.path(), StatusCode::kCorruption, "model-00002-of-00003.safetensors: missing 1 byte");
}

TEST_F(ThreeShards, CO_024_ShardIsAFifoOrAFolder) {
  std::filesystem::remove(second());
  ASSERT_EQ(::mkfifo(second().c_str(), 0600), 0);
  expect_refused(dir_.path(), StatusCode::kInvalidArgument, "'model-00002-of-00003.safetensors' (not a regular file)");
  std::filesystem::remove(second());
  std::filesystem::create_directory(second());
  expect_refused(dir_.path(), StatusCode::kInvalidArgument, "'model-00002-of-00003.safetensors' (not a regular file)");
}

// --- index: which tensor from where -------------------------------------------------------------------------------------------

TEST(CheckpointIndex, CO_021_StaleTensorsOfAShardAreSkipped) {
  // The same model with the shards' names swapped: the order of the folder must not matter.
  for (const auto& [first, second] :
       {std::pair("s1.safetensors", "s2.safetensors"), std::pair("s2.safetensors", "s1.safetensors")}) {
    const TempDir dir;
    SafetensorsBuilder one, two;
    one.add("a", "BF16", {64}, repeat_word(kOnes, 64)).add("b", "BF16", {64}, repeat_word(kTwos, 64));
    two.add("b", "BF16", {64}, repeat_word(kThrees, 64)).add("c", "BF16", {64}, repeat_word(kFours, 64));
    testing::write_sharded(dir.path(), {{first, one}, {second, two}}, {{"a", first}, {"b", second}, {"c", second}});
    const Checkpoint checkpoint = opened(dir.path());
    const std::map<std::string, std::string> model = model_of(checkpoint);
    EXPECT_EQ(model.size(), 3U);
    EXPECT_EQ(model.at("a"), repeat_word(kOnes, 64));
    EXPECT_EQ(model.at("b"), repeat_word(kThrees, 64));
    EXPECT_EQ(model.at("c"), repeat_word(kFours, 64));
    // The stale one is still listed, so that the files can be restored.
    EXPECT_EQ(checkpoint.tensors.size(), 4U);
    ASSERT_EQ(checkpoint.warnings.size(), 1U);
    EXPECT_THAT(checkpoint.warnings[0],
                HasSubstr("1 stored tensor not in the index, skipped: 'b' of '" + std::string(first) + "'"));
    expect_refused(dir.path(), StatusCode::kFailedPrecondition, "1 stored tensor not in the index", {true, false});
    // It cannot come in by the other option either: the index gave its name away.
    EXPECT_EQ(model_of(opened(dir.path(), {false, true})).at("b"), repeat_word(kThrees, 64));
  }
}

TEST(CheckpointIndex, CO_022_OverlayShardWins) {
  const TempDir dir;
  const std::string base1 = "model-00001-of-00002.safetensors", base2 = "model-00002-of-00002.safetensors",
                    overlay = "model-overlay-0.safetensors";
  testing::write_sharded(dir.path(),
                         {{base1, one_tensor("x", kOnes)}, {base2, one_tensor("y", kTwos)}, {overlay, one_tensor("x", kThrees)}},
                         {{"x", overlay}, {"y", base2}});
  // base1 now holds nothing that the index wants, and is left out.
  const Checkpoint checkpoint = opened(dir.path());
  EXPECT_EQ(model_of(checkpoint).at("x"), repeat_word(kThrees, 64));
  EXPECT_THAT(checkpoint.left_out_files, ElementsAre(base1));
  std::filesystem::remove(dir / "model.safetensors.index.json");
  expect_refused(dir.path(), StatusCode::kCorruption, "tensor 'x' is in both '" + base1 + "' and '" + overlay + "'");
}

class LeftOut : public ::testing::Test {
 protected:
  LeftOut() {
    SafetensorsBuilder two;
    two.add("b", "BF16", {64}, repeat_word(kTwos, 64)).add("lost", "BF16", {64}, repeat_word(kThrees, 64));
    testing::write_sharded(dir_.path(), {{"s1.safetensors", one_tensor("a", kOnes)}, {"s2.safetensors", two}},
                           {{"a", "s1.safetensors"}, {"b", "s2.safetensors"}});
    one_tensor("mtp.a", kFours).write(dir_ / "model-mtp-of-00003.safetensors");
  }
  TempDir dir_;
};

TEST_F(LeftOut, CO_023_IsReportedByDefault) {
  const Checkpoint checkpoint = opened(dir_.path());
  EXPECT_EQ(model_of(checkpoint).size(), 2U);
  EXPECT_THAT(checkpoint.left_out_files, ElementsAre("model-mtp-of-00003.safetensors"));
  ASSERT_EQ(checkpoint.warnings.size(), 2U);
  EXPECT_THAT(checkpoint.warnings[0],
              HasSubstr("1 file not named by the index, left out: 'model-mtp-of-00003.safetensors' (1 tensor)"));
  EXPECT_THAT(checkpoint.warnings[1], HasSubstr("1 stored tensor not in the index, skipped: 'lost' of 's2.safetensors'"));
}

TEST_F(LeftOut, CO_023_IsRefusedWhenStrict) {
  expect_refused(dir_.path(), StatusCode::kFailedPrecondition, "'model-mtp-of-00003.safetensors' (1 tensor)", {true, false});
}

TEST_F(LeftOut, CO_023_JoinsTheModelWhenAsked) {
  for (const bool strict : {false, true}) {
    const Checkpoint checkpoint = opened(dir_.path(), {strict, true});
    const std::map<std::string, std::string> model = model_of(checkpoint);
    EXPECT_EQ(model.size(), 4U);
    EXPECT_EQ(model.at("mtp.a"), repeat_word(kFours, 64));
    EXPECT_EQ(model.at("lost"), repeat_word(kThrees, 64));
    EXPECT_THAT(file_names(checkpoint), ElementsAre("s1.safetensors", "s2.safetensors", "model-mtp-of-00003.safetensors"));
    EXPECT_THAT(checkpoint.left_out_files, IsEmpty());
    EXPECT_THAT(checkpoint.warnings, IsEmpty());
    EXPECT_EQ(checkpoint.stamps.size(), 3U);
    EXPECT_TRUE(checkpoint.check_unchanged().ok());
  }
}

TEST_F(LeftOut, ANameMayJoinOnlyOnce) {
  one_tensor("lost", kOnes).write(dir_ / "other.safetensors");
  expect_refused(dir_.path(), StatusCode::kCorruption,
                 "tensor 'lost', which the index lacks, is in both 's2.safetensors' and 'other.safetensors'", {false, true});
}

TEST_F(LeftOut, ABrokenFileThatIsLeftOutIsOnlyReported) {
  testing::write_file(dir_ / "broken.safetensors", "xx");
  const Checkpoint checkpoint = opened(dir_.path());
  EXPECT_THAT(checkpoint.left_out_files, ElementsAre("broken.safetensors", "model-mtp-of-00003.safetensors"));
  EXPECT_THAT(checkpoint.warnings[0], HasSubstr("'broken.safetensors' (unreadable: "));
  expect_refused(dir_.path(), StatusCode::kCorruption, "broken.safetensors: the file has 2 bytes", {false, true});
}

TEST(CheckpointIndex, NamesATensorThatTheShardLacks) {
  const TempDir dir;
  testing::write_sharded(dir.path(), {{"s1.safetensors", one_tensor("a", kOnes)}, {"s2.safetensors", one_tensor("b", kTwos)}},
                         {{"a", "s1.safetensors"}, {"b", "s1.safetensors"}, {"ghost", "s2.safetensors"}});
  expect_refused(dir.path(), StatusCode::kCorruption,
                 "tensor 'b' is given to shard 's1.safetensors', which does not hold it (and 1 more tensor likewise)");
}

TEST(CheckpointIndex, CO_025_ShardNamesComeFromTheIndexAlone) {
  const TempDir dir;
  testing::write_sharded(dir.path(),
                         {{"model-00000-of-00001.safetensors", one_tensor("a", kOnes)},
                          {"layers-22.safetensors", one_tensor("b", kTwos)},
                          {"extra.bin.safetensors", one_tensor("c", kThrees)},
                          {"UPPER.SAFETENSORS", one_tensor("d", kFours)},
                          {"with blanks .safetensors", one_tensor("e", kOnes)},
                          {"no-extension", one_tensor("f", kTwos)}},
                         {{"a", "model-00000-of-00001.safetensors"},
                          {"b", "layers-22.safetensors"},
                          {"c", "extra.bin.safetensors"},
                          {"d", "UPPER.SAFETENSORS"},
                          {"e", "with blanks .safetensors"},
                          {"f", "no-extension"}});
  const Checkpoint checkpoint = opened(dir.path());
  EXPECT_EQ(model_of(checkpoint).size(), 6U);
  EXPECT_THAT(checkpoint.warnings, IsEmpty());
  EXPECT_EQ(model_of(checkpoint).at("d"), repeat_word(kFours, 64));
}

TEST(Checkpoint, CO_025_UpperCaseNamesAreFoundWithoutAnIndex) {
  const TempDir dir;
  one_tensor("a", kOnes).write(dir / "B.SAFETENSORS");
  one_tensor("b", kTwos).write(dir / "a b.safetensors");
  const Checkpoint checkpoint = opened(dir.path());
  EXPECT_THAT(file_names(checkpoint), ElementsAre("B.SAFETENSORS", "a b.safetensors"));
  ASSERT_EQ(checkpoint.warnings.size(), 1U);
  EXPECT_THAT(checkpoint.warnings[0], HasSubstr("no index file: all 2 *.safetensors files are taken as one model"));
}

TEST(CheckpointIndex, CO_026_IndexWinsOverASingleFileBesideIt) {
  const TempDir dir;
  one_tensor("x", kOnes).write(dir / "model.safetensors");
  testing::write_sharded(dir.path(), {{"s1.safetensors", one_tensor("x", kTwos)}}, {{"x", "s1.safetensors"}});
  const Checkpoint checkpoint = opened(dir.path());
  EXPECT_EQ(model_of(checkpoint).at("x"), repeat_word(kTwos, 64));
  ASSERT_GE(checkpoint.warnings.size(), 1U);
  EXPECT_THAT(checkpoint.warnings[0],
              HasSubstr("both model.safetensors and 'model.safetensors.index.json' are there: the index wins"));
  EXPECT_THAT(checkpoint.left_out_files, ElementsAre("model.safetensors"));
  EXPECT_EQ(model_of(opened(dir / "model.safetensors")).at("x"), repeat_word(kOnes, 64));
}

TEST(CheckpointIndex, AnyNameWithTheSuffixIsAnIndexAndTwoAreAmbiguous) {
  const TempDir dir;
  one_tensor("x", kOnes).write(dir / "s1.safetensors");
  one_tensor("x", kTwos).write(dir / "s2.safetensors");
  testing::write_file(dir / "diffusion.safetensors.index.json", testing::index_json({{"x", "s1.safetensors"}}));
  EXPECT_EQ(opened(dir.path()).index_name, "diffusion.safetensors.index.json");
  testing::write_file(dir / "diffusion.fp16.safetensors.index.json", testing::index_json({{"x", "s2.safetensors"}}));
  expect_refused(dir.path(), StatusCode::kInvalidArgument,
                 "2 index files ('diffusion.fp16.safetensors.index.json', 'diffusion.safetensors.index.json'): ambiguous");
  EXPECT_EQ(model_of(opened(dir / "diffusion.fp16.safetensors.index.json")).at("x"), repeat_word(kTwos, 64));
}

TEST(Checkpoint, CO_027_HoldsExactlyWhatTheFilesHold) {
  const TempDir dir;
  SafetensorsBuilder file;
  file.add("model.embed_tokens.weight", "BF16", {256, 64}, repeat_word(kOnes, 256 * 64)).write(dir / "model.safetensors");
  testing::write_file(dir / "config.json", "{\"tie_word_embeddings\": true}");
  const std::map<std::string, std::string> model = model_of(opened(dir.path()));
  EXPECT_EQ(model.size(), 1U);
  EXPECT_EQ(model.count("lm_head.weight"), 0U);
}

TEST(Checkpoint, CO_011_EmptyTensorsKeepNameTypeShapeAndOrder) {
  const TempDir dir;
  SafetensorsBuilder file;
  file.entry("scaled_fp8", "F8_E4M3", {0}, 0, 0).entry("e1", "BF16", {2, 0}, 0, 0).add("w", "BF16", {2}, "wwww");
  file.entry("e2", "BF16", {0, 5}, 4, 4).entry("e3", "F32", {0, 0, 0}, 4, 4).write(dir / "m.safetensors");
  const Checkpoint checkpoint = opened(dir.path());
  std::vector<std::string> names;
  for (const CheckpointTensor& tensor : checkpoint.tensors) names.push_back(checkpoint.entry(tensor).name);
  EXPECT_THAT(names, ElementsAre("scaled_fp8", "e1", "w", "e2", "e3"));
  EXPECT_EQ(data_of(checkpoint, checkpoint.tensors[0]), "");
}

TEST(Checkpoint, CO_019_NoTensorsAtAll) {
  const TempDir dir;
  testing::write_file(dir / "model.safetensors", testing::st("{}", ""));
  const Checkpoint checkpoint = opened(dir.path());
  EXPECT_EQ(checkpoint.files.size(), 1U);
  EXPECT_THAT(checkpoint.tensors, IsEmpty());
  EXPECT_TRUE(checkpoint.check_unchanged().ok());
}

// --- index: paths -------------------------------------------------------------------------------------------------------------

TEST(CheckpointIndex, CO_024_PathsThatLeaveTheFolderAreRefused) {
  const TempDir dir;
  one_tensor("a", kOnes).write(dir / "secret.safetensors");
  std::filesystem::create_directories(dir / "model/sub");
  const std::vector<std::pair<std::string, const char*>> cases = {
      {"../secret.safetensors", "leaves the folder by '..'"},
      {"sub/../../secret.safetensors", "leaves the folder by '..'"},
      {"sub/..", "leaves the folder by '..'"},
      {"./../secret.safetensors", "leaves the folder by '..'"},
      {dir / "secret.safetensors", "is an absolute path"},
      {"/etc/passwd", "is an absolute path"},
      {"..\\secret.safetensors", "has a backslash"},
      {"sub\\vision.safetensors", "has a backslash"},
      {"", "is empty"},
      {".", "names no file"},
      {"./", "has an empty path part"},
      {"sub//x.safetensors", "has an empty path part"},
      {std::string("s.safetensors\0.txt", 18), "has a NUL"},
  };
  for (const auto& [shard, rule] : cases) {
    testing::write_file(dir / "model/model.safetensors.index.json", testing::index_json({{"a", shard}}));
    expect_refused(dir / "model", StatusCode::kCorruption, rule);
    expect_refused(dir / "model", StatusCode::kCorruption, "model.safetensors.index.json: tensor 'a': shard name");
  }
}

TEST(CheckpointIndex, CO_024_SubFoldersAndDotPathsAreAccepted) {
  const TempDir dir;
  testing::write_sharded(dir.path(),
                         {{"sub/vision.safetensors", one_tensor("a", kOnes)},
                          {"model-1.safetensors", one_tensor("b", kTwos)},
                          {"..odd..name.safetensors", one_tensor("c", kThrees)}},
                         {{"a", "sub/vision.safetensors"}, {"b", "./model-1.safetensors"}, {"c", "..odd..name.safetensors"}});
  const Checkpoint checkpoint = opened(dir.path());
  // A leading "./" is dropped: the shard is not taken for a second, unnamed file.
  EXPECT_THAT(file_names(checkpoint), ElementsAre("..odd..name.safetensors", "model-1.safetensors", "sub/vision.safetensors"));
  EXPECT_THAT(checkpoint.warnings, IsEmpty());
  EXPECT_EQ(model_of(checkpoint).size(), 3U);
}

TEST(CheckpointIndex, CO_024_SymlinkedCacheLayout) {
  const TempDir dir;
  std::filesystem::create_directories(dir / "snapshots/r1");
  one_tensor("a", kOnes).write(dir / "blobs/aa11");
  one_tensor("b", kTwos).write(dir / "blobs/bb22");
  testing::write_file(dir / "blobs/cc33", testing::index_json({{"a", "s1.safetensors"}, {"b", "s2.safetensors"}}));
  std::filesystem::create_symlink("../../blobs/aa11", dir / "snapshots/r1/s1.safetensors");
  std::filesystem::create_symlink("../../blobs/bb22", dir / "snapshots/r1/s2.safetensors");
  std::filesystem::create_symlink("../../blobs/cc33", dir / "snapshots/r1/model.safetensors.index.json");
  const Checkpoint checkpoint = opened(dir / "snapshots/r1");
  EXPECT_EQ(model_of(checkpoint).at("b"), repeat_word(kTwos, 64));
  EXPECT_THAT(file_names(checkpoint), ElementsAre("s1.safetensors", "s2.safetensors"));
  EXPECT_EQ(model_of(opened(dir / "snapshots/r1/s1.safetensors")).at("a"), repeat_word(kOnes, 64));
}

// --- index: its own text ------------------------------------------------------------------------------------------------------

TEST(CheckpointIndex, MalformedTextIsRefusedWithTheRule) {
  const TempDir dir;
  one_tensor("a", kOnes).write(dir / "s.safetensors");
  const std::string path = dir / "model.safetensors.index.json";
  const std::vector<std::pair<std::string, const char*>> cases = {
      {"", "not valid JSON"},
      {"[]", "the index must be one JSON object"},
      {"\"text\"", "the index must be one JSON object"},
      {"7", "the index must be one JSON object, have 7"},
      {"{}", "no weight_map"},
      {R"({"metadata":{"weight_map":{"a":"s.safetensors"}}})", "no weight_map"},
      {R"({"weight_map":[]})", "weight_map must be an object"},
      {R"({"weight_map":null})", "weight_map must be an object, have null"},
      {R"({"weight_map":"s.safetensors"})", "weight_map must be an object"},
      {R"({"weight_map":{"a":1}})", "tensor 'a': the shard name must be a string, have 1"},
      {R"({"weight_map":{"a":null}})", "tensor 'a': the shard name must be a string, have null"},
      {R"({"weight_map":{"a":["s.safetensors"]}})", "tensor 'a': the shard name must be a string"},
      {R"({"weight_map":{"a":{"b":"s.safetensors"}}})", "tensor 'a': the shard name must be a string"},
      {R"({"weight_map":{"a":"s.safetensors","a":"s.safetensors"}})", "tensor 'a' occurs twice in weight_map"},
      {R"({"weight_map":{"a":"s.safetensors","\u0061":"t.safetensors"}})", "tensor 'a' occurs twice in weight_map"},
      {R"({"weight_map":{"a":"s.safetensors"},"weight_map":{}})", "weight_map occurs twice"},
      {R"({"weight_map":{"a":"s.safetensors"}} x)", "text after the closing bracket"},
      {R"({"weight_map":{"a":"s.safetensors"})", "not valid JSON"},
      {R"({"metadata":{"size":1e999},"weight_map":{"a":"s.safetensors"}})", "not valid JSON"},
      {R"({"metadata":)" + std::string(100, '['), "nested deeper than 64 levels"},
  };
  for (const auto& [text, rule] : cases) {
    testing::write_file(path, text);
    expect_refused(dir.path(), StatusCode::kCorruption, rule);
    expect_refused(dir.path(), StatusCode::kCorruption, "model.safetensors.index.json: ");
  }
}

TEST(CheckpointIndex, OtherKeysAreSkipped) {
  const TempDir dir;
  one_tensor("a", kOnes).write(dir / "s.safetensors");
  testing::write_file(
      dir / "model.safetensors.index.json",
      R"({"metadata":{"total_size":1.5e3,"nested":[{"weight_map":{"z":"../z"}}]},"weight_map":{"a":"s.safetensors"},"x":[-1,null]})");
  EXPECT_EQ(model_of(opened(dir.path())).size(), 1U);
}

TEST(CheckpointIndex, TooLargeAnIndexIsRefusedUnread) {
  const TempDir dir;
  const std::string path = dir / "model.safetensors.index.json";
  testing::write_file(path, "{");
  std::filesystem::resize_file(path, kMaxIndexBytes + 1);
  expect_refused(dir.path(), StatusCode::kUnsupported, "over the limit of 100000000");
}

TEST(CheckpointIndex, EmptyWeightMapIsAModelWithoutTensors) {
  const TempDir dir;
  testing::write_file(dir / "model.safetensors.index.json", R"({"weight_map":{}})");
  const Checkpoint checkpoint = opened(dir.path());
  EXPECT_THAT(checkpoint.files, IsEmpty());
  EXPECT_THAT(checkpoint.tensors, IsEmpty());
}

TEST(CheckpointIndex, CO_018_IndexNamesAreComparedDecoded) {
  const TempDir dir;
  one_tensor("\xC3\xA9", kOnes).write(dir / "s.safetensors");
  testing::write_file(dir / "model.safetensors.index.json", R"({"weight_map":{"\u00e9":"s.safetensors"}})");
  EXPECT_EQ(model_of(opened(dir.path())).at("\xC3\xA9"), repeat_word(kOnes, 64));
}

}  // namespace
}  // namespace weightd::store
