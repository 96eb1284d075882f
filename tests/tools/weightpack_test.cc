// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/inotify.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "tests/support/safetensors_builder.h"
#include "tests/tools/golden.h"
#include "tests/tools/process.h"
#include "tests/tools/terminal.h"

/// The real program, as users start it.
namespace weightd::testing {
namespace {

using nlohmann::json;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;

std::vector<std::string> weightpack(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), WEIGHTPACK_PROGRAM);
  return arguments;
}

/// splitmix64: integers only, so the words are the same everywhere.
uint64_t mixed(uint64_t i) {
  uint64_t z = (i + 1) * 0x9E3779B97F4A7C15ULL;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

/// Words whose exponents are distributed roughly as those of weights: each below the top one half as often.
std::vector<uint16_t> weight_words(size_t count, uint64_t seed) {
  std::vector<uint16_t> words(count);
  for (size_t i = 0; i < count; ++i) {
    const uint64_t bits = mixed(seed << 32 | i);
    const int below = __builtin_ctzll(bits | 1ULL << 12);
    const auto exponent = static_cast<uint64_t>(122 - below);
    words[i] = static_cast<uint16_t>((bits >> 63) << 15 | exponent << 7 | (bits >> 40 & 0x7F));
  }
  return words;
}

std::string zeros(size_t bytes) { return std::string(bytes, '\0'); }

/// A small model: merged matrices, a raw vector, another dtype, equal tensors.
void write_model(const std::string& path) {
  const auto embedding = weight_words(size_t{128} * 256, 1);
  SafetensorsBuilder builder;
  builder.add_bf16("model.embed_tokens.weight", {128, 256}, embedding)
      .add_bf16("model.layers.0.input_layernorm.weight", {256}, weight_words(256, 2))
      .add_bf16("model.layers.0.self_attn.q_proj.weight", {64, 256}, weight_words(size_t{64} * 256, 3))
      .add_bf16("model.layers.0.self_attn.k_proj.weight", {16, 256}, weight_words(size_t{16} * 256, 4))
      .add_bf16("model.layers.0.self_attn.v_proj.weight", {16, 256}, weight_words(size_t{16} * 256, 5))
      .add("rotary.inv_freq", "F32", {32}, zeros(128))
      .add_bf16("lm_head.weight", {128, 256}, embedding)
      .write(path);
}

std::set<std::string> names_in(const std::string& folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) names.insert(entry.path().filename());
  return names;
}

class Weightpack : public ::testing::Test {
 protected:
  Outcome weightpack_in_dir(const std::vector<std::string>& arguments) {
    return run(weightpack(arguments), {dir_.path(), {}, -1, -1});
  }
  void expect_golden_of(const std::string& name, const std::vector<std::string>& arguments) {
    expect_golden(name, transcript(weightpack_in_dir(arguments), dir_.path()));
  }
  json json_of(const std::vector<std::string>& arguments) {
    const Outcome outcome = weightpack_in_dir(arguments);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return json::parse(outcome.out, nullptr, false);
  }
  std::vector<std::string> inspected_names(const std::string& bundle) {
    const json inspected = json_of({"inspect", bundle, "--json"});
    std::vector<std::string> names;
    for (const json& tensor : inspected["tensors"]) names.push_back(tensor["name"]);
    return names;
  }
  void pack_model() {
    write_model(dir_ / "m.safetensors");
    const Outcome outcome = weightpack_in_dir({"pack", "m.safetensors", "m.wpk"});
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  }

  TempDir dir_;
};

TEST_F(Weightpack, HelpTexts) {
  expect_golden_of("weightpack_help", {"--help"});
  for (const std::string verb : {"pack", "unpack", "verify", "inspect", "stats", "synth"}) {
    expect_golden_of("weightpack_" + verb + "_help", {verb, "--help"});
  }
  expect_golden_of("weightpack_version", {"--version"});
}

TEST_F(Weightpack, TheWholeWay) {
  write_model(dir_ / "m.safetensors");
  expect_golden_of("weightpack_pack", {"pack", "m.safetensors", "m.wpk"});
  expect_golden_of("weightpack_pack_json", {"pack", "m.safetensors", "m.wpk", "--json"});
  expect_golden_of("weightpack_inspect", {"inspect", "m.wpk"});
  expect_golden_of("weightpack_stats_checkpoint", {"stats", "m.safetensors"});
  expect_golden_of("weightpack_stats_bundle", {"stats", "m.wpk"});
  expect_golden_of("weightpack_verify", {"verify", "m.wpk", "m.safetensors", "--deep"});
  expect_golden_of("weightpack_unpack", {"unpack", "m.wpk", "restored"});
  EXPECT_EQ(read_file(dir_ / "restored/m.safetensors"), read_file(dir_ / "m.safetensors"));
  EXPECT_EQ(names_in(dir_.path()), (std::set<std::string>{"m.safetensors", "m.wpk", "restored"}));
}

TEST_F(Weightpack, InspectJsonAddsUp) {
  pack_model();
  const json bundle = json_of({"inspect", "m.wpk", "--json"});
  EXPECT_EQ(bundle["schema_version"], 1);
  EXPECT_EQ(bundle["format_version"], "1.0");
  EXPECT_EQ(bundle["content_id"].get<std::string>().size(), 64U);
  EXPECT_EQ(bundle["sources"][0]["name"], "m.safetensors");
  ASSERT_EQ(bundle["tensors"].size(), 7U);
  uint64_t stored = 0, resident = 0;
  std::map<std::string, json> tensors;
  for (const json& tensor : bundle["tensors"]) {
    stored += tensor["stored_bytes"].get<uint64_t>();
    resident += tensor["resident_bytes"].get<uint64_t>();
    tensors[tensor["name"]] = tensor;
  }
  EXPECT_EQ(bundle["total"]["stored_bytes"], stored);
  EXPECT_EQ(bundle["total"]["resident_bytes"], resident);
  EXPECT_LE(resident, bundle["residencies"][0]["arena_bytes"].get<uint64_t>());
  EXPECT_EQ(bundle["residencies"][0]["arena_bytes"], bundle["residencies"][0]["blocks"].get<uint64_t>() << 20);

  const json& k = tensors.at("model.layers.0.self_attn.k_proj.weight");
  EXPECT_EQ(k["shape"], (json{16, 256}));
  EXPECT_EQ(k["dtype"], "BF16");
  EXPECT_EQ(k["encoding"], "f12");
  EXPECT_EQ(k["row_begin"], 64);
  EXPECT_EQ(k["rows"], 16);
  EXPECT_EQ(k["matrix"], bundle["merged_matrices"][0]["name"]);
  // One unit of 16 rows and 4 tiles: 1536 bytes of codes a tile, 16 of windows, a record of 32.
  EXPECT_EQ(k["stored_bytes"], 4 * 1536 + 16 + 32);
  const json& q = tensors.at("model.layers.0.self_attn.q_proj.weight");
  EXPECT_EQ(q["stored_bytes"], 4 * (4 * 1536 + 16 + 32));

  const json& inv_freq = tensors.at("rotary.inv_freq");
  EXPECT_EQ(inv_freq["encoding"], "raw");
  EXPECT_EQ(inv_freq["stored_bytes"], 128);
  EXPECT_EQ(tensors.at("lm_head.weight")["stored_bytes"], 0);
  EXPECT_EQ(tensors.at("lm_head.weight")["same_as"], "model.embed_tokens.weight");
}

TEST_F(Weightpack, StatsJsonSaysTheSameOfCheckpointAndBundle) {
  pack_model();
  json checkpoint = json_of({"stats", "m.safetensors", "--json"});
  json bundle = json_of({"stats", "m.wpk", "--json"});
  EXPECT_EQ(checkpoint["kind"], "checkpoint");
  EXPECT_EQ(bundle["kind"], "bundle");
  EXPECT_FALSE(checkpoint["total"].contains("stored_bytes"));
  const json inspected = json_of({"inspect", "m.wpk", "--json"});
  EXPECT_EQ(bundle["total"]["stored_bytes"], inspected["total"]["stored_bytes"]);
  for (const char* field : {"weights", "exponent_entropy", "joint_entropy", "f12_escapes", "f12_bits_per_weight", "nan"}) {
    EXPECT_EQ(checkpoint["total"][field], bundle["total"][field]) << field;
  }
  EXPECT_EQ(checkpoint["classes"]["attention"]["weights"], 96 * 256);
  EXPECT_EQ(checkpoint["classes"]["head"]["weights"], 128 * 256);
  // The prediction for what was not merged with padding is what was stored.
  EXPECT_EQ(bundle["classes"]["attention"]["f12_bits_per_weight"], bundle["classes"]["attention"]["stored_bits_per_weight"]);
}

TEST_F(Weightpack, SynthWritesWhatPackReads) {
  EXPECT_EQ(
      weightpack_in_dir({"synth", "m", "--arch", "tiny-moe", "--layers", "1", "--seed", "3", "--shard-bytes", "1MB"}).exit_code, 0);
  const json report = json_of({"pack", "m", "m.wpk", "--json"});
  EXPECT_EQ(report["coded_tensors"], 18);  // embedding, head, q/k/v/o, 4 experts of 3
  EXPECT_LT(report["coded_bits_per_weight"].get<double>(), 12.15);
  EXPECT_EQ(report["warnings"], json::array());
  EXPECT_EQ(weightpack_in_dir({"unpack", "m.wpk", "r"}).exit_code, 0);
  for (const std::string& name : names_in(dir_ / "r"))
    EXPECT_EQ(read_file(dir_ / ("r/" + name)), read_file(dir_ / ("m/" + name))) << name;
  EXPECT_EQ(names_in(dir_ / "r").size() + 1, names_in(dir_ / "m").size());  // config.json is not of the tensors
}

TEST_F(Weightpack, EncodingRawAndNoMergeDoWhatTheySay) {
  write_model(dir_ / "m.safetensors");
  EXPECT_EQ(json_of({"pack", "m.safetensors", "raw.wpk", "--encoding", "raw", "--json"})["coded_tensors"], 0);
  EXPECT_EQ(json_of({"pack", "m.safetensors", "apart.wpk", "--no-merge", "--json"})["merged_matrices"], 0);
  EXPECT_EQ(json_of({"pack", "m.safetensors", "m.wpk", "--threads", "1", "--json"})["merged_matrices"], 1);
}

TEST_F(Weightpack, StrictRefusesWhatTheIndexDoesNotName) {
  SafetensorsBuilder shard;
  shard.add_bf16("a", {2}, weight_words(2, 1)).add_bf16("stale", {2}, weight_words(2, 2));
  write_sharded(dir_ / "m", {{"x.safetensors", shard}}, {{"a", "x.safetensors"}});
  const Outcome lenient = weightpack_in_dir({"pack", "m", "m.wpk"});
  EXPECT_EQ(lenient.exit_code, 0);
  EXPECT_THAT(lenient.err, HasSubstr("weightpack: warning: "));
  EXPECT_THAT(lenient.err, HasSubstr("stale"));
  const Outcome quiet = weightpack_in_dir({"pack", "m", "m.wpk", "--quiet"});
  EXPECT_EQ(quiet.exit_code, 0);
  EXPECT_EQ(quiet.out + quiet.err, "");
  EXPECT_NE(weightpack_in_dir({"pack", "m", "s.wpk", "--strict"}).exit_code, 0);
  EXPECT_FALSE(std::filesystem::exists(dir_ / "s.wpk"));
}

TEST_F(Weightpack, ErrorsSayWhatAndWhatNext) {
  pack_model();
  expect_golden_of("weightpack_no_verb", {});
  expect_golden_of("weightpack_wrong_verb", {"pakc", "a", "b"});
  expect_golden_of("weightpack_missing_argument", {"pack", "m.safetensors"});
  expect_golden_of("weightpack_wrong_option", {"pack", "m.safetensors", "b.wpk", "--fast"});
  expect_golden_of("weightpack_wrong_value", {"pack", "m.safetensors", "b.wpk", "--encoding", "zip"});
  expect_golden_of("weightpack_wrong_number", {"pack", "m.safetensors", "b.wpk", "--threads", "0"});
  expect_golden_of("weightpack_no_such_checkpoint", {"pack", "nowhere", "b.wpk"});
  expect_golden_of("weightpack_no_such_bundle", {"inspect", "nowhere.wpk"});
  expect_golden_of("weightpack_no_such_bundle_json", {"inspect", "nowhere.wpk", "--json"});
  expect_golden_of("weightpack_not_a_bundle", {"inspect", "m.safetensors"});
  expect_golden_of("weightpack_folder_in_use", {"unpack", "m.wpk", "."});
  EXPECT_EQ(names_in(dir_.path()), (std::set<std::string>{"m.safetensors", "m.wpk"}));
}

TEST_F(Weightpack, VerifyFindsTheFlippedBit) {
  pack_model();
  std::string bytes = read_file(dir_ / "m.wpk");
  bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 0x10);
  write_file(dir_ / "m.wpk", bytes);
  const Outcome outcome = weightpack_in_dir({"verify", "m.wpk"});
  EXPECT_EQ(outcome.exit_code, 3);
  EXPECT_EQ(outcome.out, "");
  EXPECT_THAT(outcome.err, HasSubstr("weightpack: error: m.wpk: "));
  EXPECT_THAT(outcome.err, HasSubstr("weightpack: hint: "));
}

TEST_F(Weightpack, VerifyFindsTheOtherCheckpoint) {
  pack_model();
  std::string bytes = read_file(dir_ / "m.safetensors");
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write_file(dir_ / "other.safetensors", bytes);
  const Outcome outcome = weightpack_in_dir({"verify", "m.wpk", "other.safetensors"});
  EXPECT_EQ(outcome.exit_code, 3);
  EXPECT_THAT(outcome.err, HasSubstr("lm_head.weight"));
}

TEST_F(Weightpack, CO_006_NamesThatDifferAfterANulStayDistinct) {
  SafetensorsBuilder builder;
  const std::vector<std::string> names = {"a", std::string("a\0b", 3), std::string("a\0c", 3)};
  for (size_t i = 0; i < names.size(); ++i) builder.add_bf16(names[i], {2}, weight_words(2, i));
  builder.write(dir_ / "m.safetensors");
  ASSERT_EQ(weightpack_in_dir({"pack", "m.safetensors", "m.wpk"}).exit_code, 0);
  const Outcome outcome = weightpack_in_dir({"inspect", "m.wpk"});
  EXPECT_THAT(outcome.out, HasSubstr("\na       "));
  EXPECT_THAT(outcome.out, HasSubstr("\na\\x00b  "));
  EXPECT_THAT(outcome.out, HasSubstr("\na\\x00c  "));
  EXPECT_EQ(inspected_names("m.wpk"), names);
}

TEST_F(Weightpack, CO_010_HostileNamesForgeNothing) {
  const std::vector<std::string> names = {
      "../../etc/x", "/abs", "a\nERROR fake line", "\x1b[2J", "", "\"quoted\"", "weights,with,commas", std::string(60'000, 'n')};
  SafetensorsBuilder builder;
  for (size_t i = 0; i < names.size(); ++i) builder.add_bf16(names[i], {2}, weight_words(2, i));
  builder.write(dir_ / "in/m.safetensors");
  std::filesystem::create_directory(dir_ / "o");
  ASSERT_EQ(weightpack_in_dir({"pack", "in/m.safetensors", "o/x"}).exit_code, 0);
  EXPECT_EQ(names_in(dir_.path()), (std::set<std::string>{"in", "o"}));
  EXPECT_EQ(names_in(dir_ / "o"), (std::set<std::string>{"x"}));

  for (const std::vector<std::string>& verb : {std::vector<std::string>{"inspect", "o/x"}, {"stats", "o/x"}}) {
    const Outcome outcome = weightpack_in_dir(verb);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    EXPECT_THAT(outcome.out, Not(HasSubstr("\x1b")));
    EXPECT_THAT(outcome.out, Not(HasSubstr("\nERROR")));
  }
  EXPECT_TRUE(inspected_names("o/x") == names);  // one of them is too long to be printed
}

TEST_F(Weightpack, CO_010_ANameOverTheLimitIsRefusedWithTheLimit) {
  SafetensorsBuilder().add_bf16(std::string(70'000, 'n'), {2}, weight_words(2, 1)).write(dir_ / "m.safetensors");
  const Outcome outcome = weightpack_in_dir({"pack", "m.safetensors", "m.wpk"});
  EXPECT_EQ(outcome.exit_code, 6);
  EXPECT_THAT(outcome.err, HasSubstr("65535"));
  EXPECT_LT(outcome.err.size(), 2000U);
}

TEST_F(Weightpack, CO_032_SaysThatNothingCompresses) {
  std::string f16, f32, u8;
  for (size_t i = 0; i < (size_t{1} << 20); ++i)
    f16 += words_to_bytes(std::vector<uint16_t>{static_cast<uint16_t>(0x2000 + mixed(i) % 0x1400)});
  for (size_t i = 0; i < (size_t{1} << 20); ++i) f32 += static_cast<char>(i % 4 == 3 ? 0x3C : static_cast<int>(mixed(i) & 0xFF));
  for (size_t i = 0; i < (size_t{1} << 20); ++i) u8 += static_cast<char>(mixed(i) & 0xFF);
  SafetensorsBuilder().add("w", "F16", {1024, 1024}, f16).write(dir_ / "f16.safetensors");
  SafetensorsBuilder().add("w", "F32", {512, 512}, f32).write(dir_ / "f32.safetensors");
  SafetensorsBuilder().add("w", "U8", {1U << 20}, u8).write(dir_ / "u8.safetensors");
  for (const std::string name : {"f16", "f32", "u8"}) {
    const Outcome outcome = weightpack_in_dir({"pack", name + ".safetensors", name + ".wpk"});
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    EXPECT_THAT(outcome.out, EndsWith("\nnothing was compressed: the checkpoint has no BF16 matrix that coding makes smaller\n"));
    const auto source = std::filesystem::file_size(dir_ / (name + ".safetensors"));
    EXPECT_LE(std::filesystem::file_size(dir_ / (name + ".wpk")), source + source / 100 + 65536);
    EXPECT_EQ(json_of({"inspect", name + ".wpk", "--json"})["tensors"][0]["encoding"], "raw");
  }
}

TEST_F(Weightpack, CO_040_StatsCountInfAndNaNPerTensor) {
  std::vector<uint16_t> words = weight_words(size_t{1024} * 1024, 1);
  words[5] = 0x7F80;
  words[1'000'000] = 0xFF80;
  words[77] = 0x7FC0;
  words[78] = 0xFFC1;
  words[1'048'575] = 0x7F81;
  SafetensorsBuilder()
      .add_bf16("bad", {1024, 1024}, words)
      .add_bf16("good", {16, 64}, weight_words(1024, 2))
      .write(dir_ / "m.safetensors");
  ASSERT_EQ(weightpack_in_dir({"pack", "m.safetensors", "m.wpk"}).exit_code, 0);
  for (const std::string path : {"m.safetensors", "m.wpk"}) {
    EXPECT_THAT(weightpack_in_dir({"stats", path}).out, EndsWith("tensors with Inf or NaN:\ntensor  Inf  NaN\nbad       2    3\n"));
    const json stats = json_of({"stats", path, "--json"});
    EXPECT_EQ(stats["tensors"][0]["inf"], 2);
    EXPECT_EQ(stats["tensors"][0]["nan"], 3);
    EXPECT_EQ(stats["tensors"][1]["inf"], 0);
    EXPECT_EQ(stats["total"]["inf"], 2);
  }
}

TEST_F(Weightpack, CO_099_AFileSizeLimitIsAnErrorAndLeavesNothing) {
  ASSERT_EQ(weightpack_in_dir({"synth", "m", "--arch", "tiny-llama"}).exit_code, 0);
  const auto limited = [&](const std::string& arguments) {
    return run({"/bin/sh", "-c", "ulimit -f 1024; exec " WEIGHTPACK_PROGRAM " " + arguments}, {dir_.path(), {}, -1, -1});
  };
  for (const std::string arguments : {"pack m m.wpk", "synth n --arch tiny-llama"}) {
    const Outcome outcome = limited(arguments);
    EXPECT_EQ(outcome.signal, 0) << arguments;
    EXPECT_EQ(outcome.exit_code, 9) << arguments;
    EXPECT_THAT(outcome.err, HasSubstr("File too large"));
    EXPECT_EQ(names_in(dir_.path()), (std::set<std::string>{"m"})) << arguments;
  }
  ASSERT_EQ(weightpack_in_dir({"pack", "m", "m.wpk"}).exit_code, 0);
  EXPECT_EQ(limited("unpack m.wpk r").exit_code, 9);
  EXPECT_TRUE(!std::filesystem::exists(dir_ / "r") || names_in(dir_ / "r").empty());
}

/// Waits until something is made in a folder.
class FolderWatch {
 public:
  explicit FolderWatch(const std::string& folder) : fd_(::inotify_init1(IN_CLOEXEC)) {
    require(fd_ >= 0 && ::inotify_add_watch(fd_, folder.c_str(), IN_CREATE) >= 0, "inotify");
  }
  ~FolderWatch() { ::close(fd_); }
  FolderWatch(const FolderWatch&) = delete;
  FolderWatch& operator=(const FolderWatch&) = delete;
  [[nodiscard]] bool wait() const {
    pollfd ready{fd_, POLLIN, 0};
    return ::poll(&ready, 1, 60'000) == 1;
  }

 private:
  int fd_;
};

class WeightpackInterrupted : public Weightpack, public ::testing::WithParamInterface<int> {};

TEST_P(WeightpackInterrupted, LeavesNothingBehind) {
  // Large enough to be still at work when the signal arrives.
  ASSERT_EQ(weightpack_in_dir({"synth", "m", "--arch", "qwen3-0.6b", "--layers", "3", "--vocab", "16"}).exit_code, 0);
  ASSERT_EQ(weightpack_in_dir({"pack", "m", "m.wpk"}).exit_code, 0);
  const std::vector<std::vector<std::string>> commands = {
      {"pack", "../m", "n.wpk"}, {"unpack", "../m.wpk", "n"}, {"synth", "n", "--arch", "qwen3-0.6b", "--layers", "3"}};
  for (const auto& command : commands) {
    const std::string out = dir_ / ("out_" + command[0]);
    std::filesystem::create_directory(out);
    const FolderWatch watch(out);
    Process process(weightpack(command), {out, {}, -1, -1});
    ASSERT_TRUE(watch.wait());
    process.send(GetParam());
    const Outcome outcome = process.wait();
    EXPECT_EQ(outcome.signal, GetParam()) << command[0] << " exit code " << outcome.exit_code;
    EXPECT_EQ(outcome.out, "");
    EXPECT_EQ(outcome.err, "weightpack: error: interrupted; nothing half-made was left\n");
    EXPECT_TRUE(names_in(out).empty()) << command[0];
  }
}
INSTANTIATE_TEST_SUITE_P(Signals, WeightpackInterrupted, ::testing::Values(SIGINT, SIGTERM, SIGHUP),
                         [](const auto& test) { return std::string(::sigabbrev_np(test.param)); });

TEST_F(Weightpack, AClosedPipeEndsItWithoutASignalAndWithoutNoise) {
  pack_model();
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  ::close(ends[0]);
  const Outcome outcome = run(weightpack({"inspect", "m.wpk"}), {dir_.path(), {}, ends[1], -1});
  ::close(ends[1]);
  EXPECT_EQ(outcome.exit_code, 141);
  EXPECT_EQ(outcome.err, "");
}

TEST_F(Weightpack, AnOutputThatCannotBeWrittenIsAFailure) {
  pack_model();
  const int full = ::open("/dev/full", O_WRONLY | O_CLOEXEC);
  ASSERT_GE(full, 0);
  const Outcome outcome = run(weightpack({"inspect", "m.wpk", "--json"}), {dir_.path(), {}, full, -1});
  ::close(full);
  EXPECT_EQ(outcome.exit_code, 9);
  EXPECT_THAT(outcome.err, HasSubstr("weightpack: error: standard output: No space left on device"));
}

TEST_F(Weightpack, ProgressIsForTerminalsOnly) {
  write_model(dir_ / "m.safetensors");
  const auto on_terminal = [&](std::vector<std::string> arguments) {
    Terminal terminal;
    Process process(weightpack(std::move(arguments)), {dir_.path(), {}, -1, terminal.program_end()});
    const std::string screen = terminal.read_to_end();
    EXPECT_EQ(process.wait().exit_code, 0);
    return screen;
  };
  const std::string screen = on_terminal({"pack", "m.safetensors", "m.wpk"});
  EXPECT_THAT(screen, HasSubstr("\r\x1b[Kpack "));
  EXPECT_THAT(screen, HasSubstr(" % ["));
  EXPECT_THAT(screen, EndsWith("\r\x1b[K"));  // and it is gone at the end
  EXPECT_EQ(on_terminal({"pack", "m.safetensors", "m.wpk", "--quiet"}), "");
  EXPECT_EQ(weightpack_in_dir({"pack", "m.safetensors", "m.wpk"}).err, "");
}

}  // namespace
}  // namespace weightd::testing
