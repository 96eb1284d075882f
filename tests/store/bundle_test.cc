// SPDX-License-Identifier: Apache-2.0
#include "store/bundle.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>

#include "base/fd.h"
#include "store/manifest.h"
#include "tests/store/bundle_fixture.h"

namespace weightd::store {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace weightd::testing;  // NOLINT: the fixture's names

std::vector<std::string> entries(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

uint32_t add_section(BundleWriter& writer, std::string_view data) {
  writer.begin_section();
  require(writer.append(as_bytes(data)).ok(), "append");
  const auto index = writer.end_section();
  require(index.ok(), "end_section");
  return *index;
}

// One source "m" with one raw tensor "t" of the data, in the sections 0 and 1.
Manifest one_tensor(std::string_view data) {
  Manifest m;
  m.sources = {{"m", 8 + 2 + data.size(), {}, 0, false}};
  Storage storage;
  storage.name = "t";
  storage.dtype = DType::kU8;
  storage.geometry = {0, 0, 0};
  storage.logical_bytes = data.size();
  storage.planes = {{PlaneKind::kRaw, 1}};
  m.storages = {storage};
  m.tensors = {{"t", DType::kU8, {data.size()}, 0, 0, 0, 0, data.size(), xxh128(as_bytes(data)), true}};
  m.tensors_id = compute_tensors_id(m.tensors);
  return m;
}

// --- writer -------------------------------------------------------------------------------------------------------------------

TEST(BundleWriter, SectionsAreAlignedAndTheGapsAreZeros) {
  const TempDir dir;
  auto writer = BundleWriter::create(dir / "m.wpk", 1000);
  WEIGHTD_ASSERT_OK(writer);
  EXPECT_EQ(add_section(*writer, st("{}", "")), 0U);
  EXPECT_EQ(add_section(*writer, "hello"), 1U);
  std::string back(3, ' ');
  WEIGHTD_EXPECT_OK(writer->read(1, 2, std::as_writable_bytes(std::span(back.data(), back.size()))));
  EXPECT_EQ(back, "llo");
  const auto id = writer->commit(one_tensor("hello"));
  WEIGHTD_ASSERT_OK(id);
  const std::string bytes = read_file(dir / "m.wpk");
  EXPECT_EQ(bytes.substr(8192, 5), "hello");
  EXPECT_EQ(bytes.substr(8197, 4096 - 5), std::string(4096 - 5, '\0'));
  EXPECT_EQ(writer->file_bytes(), bytes.size());
  EXPECT_EQ(*id, sha256(as_bytes(std::string_view(bytes).substr(12288))));
  EXPECT_EQ(open_bundle(dir / "m.wpk").content_id(), *id);
  EXPECT_EQ(entries(dir.path()), std::vector<std::string>{"m.wpk"});
}

TEST(BundleWriter, RewindLeavesNoTraces) {
  const TempDir dir;
  auto writer = BundleWriter::create(dir / "m.wpk", 0);
  WEIGHTD_ASSERT_OK(writer);
  add_section(*writer, st("{}", ""));
  add_section(*writer, std::string(100'000, 'x'));
  writer->begin_section();
  WEIGHTD_ASSERT_OK(writer->append(as_bytes("half")));
  WEIGHTD_ASSERT_OK(writer->rewind(1));
  EXPECT_EQ(add_section(*writer, "hello"), 1U);
  EXPECT_EQ(writer->sections()[1].offset_bytes, 8192U);
  WEIGHTD_ASSERT_OK(writer->commit(one_tensor("hello")));
  auto straight = BundleWriter::create(dir / "s.wpk", 0);
  WEIGHTD_ASSERT_OK(straight);
  add_section(*straight, st("{}", ""));
  add_section(*straight, "hello");
  WEIGHTD_ASSERT_OK(straight->commit(one_tensor("hello")));
  EXPECT_TRUE(read_file(dir / "m.wpk") == read_file(dir / "s.wpk"));
}

TEST(BundleWriter, WithoutCommitNothingIsLeft) {
  const TempDir dir;
  write_file(dir / "m.wpk", "old");
  {
    auto writer = BundleWriter::create(dir / "m.wpk", 0);
    WEIGHTD_ASSERT_OK(writer);
    add_section(*writer, "data");
    EXPECT_EQ(entries(dir.path()).size(), 2U);
  }
  EXPECT_EQ(entries(dir.path()), std::vector<std::string>{"m.wpk"});
  EXPECT_EQ(read_file(dir / "m.wpk"), "old");
}

TEST(BundleWriter, RefusesAManifestThatNobodyCouldRead) {
  const TempDir dir;
  auto writer = BundleWriter::create(dir / "m.wpk", 0);
  WEIGHTD_ASSERT_OK(writer);
  add_section(*writer, st("{}", ""));
  add_section(*writer, "hello");
  Manifest m = one_tensor("hello");
  m.tensors[0].storage = 1;
  EXPECT_EQ(writer->commit(std::move(m)).status().code(), StatusCode::kInternal);
  writer = Status::internal("dropped");
  EXPECT_EQ(entries(dir.path()), std::vector<std::string>{});
}

TEST(BundleWriter, PermissionsFollowTheUmask) {
  const TempDir dir;
  const mode_t before = ::umask(0027);
  auto writer = BundleWriter::create(dir / "m.wpk", 0);
  ::umask(before);
  WEIGHTD_ASSERT_OK(writer);
  add_section(*writer, st("{}", ""));
  add_section(*writer, "hello");
  WEIGHTD_ASSERT_OK(writer->commit(one_tensor("hello")));
  struct stat info {};
  ASSERT_EQ(::stat((dir / "m.wpk").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0640U);
}

TEST(BundleWriter, CO_083_TemporaryFilesOfOthersAreNotTouched) {
  const TempDir dir;
  std::filesystem::create_symlink(dir / "victim", dir / ".m.wpk.0000000000000000.tmp");
  write_file(dir / ".m.wpk.tmp", "mine");
  { WEIGHTD_ASSERT_OK(BundleWriter::create(dir / "m.wpk", 0)); }
  EXPECT_EQ(entries(dir.path()), (std::vector<std::string>{".m.wpk.0000000000000000.tmp", ".m.wpk.tmp"}));
  EXPECT_EQ(read_file(dir / ".m.wpk.tmp"), "mine");
}

TEST(BundleWriter, CO_098_BadTargetsFailBeforeAnyWork) {
  const TempDir dir;
  write_file(dir / "file", "x");
  std::filesystem::create_directory(dir / "folder");
  const auto code = [&](const std::string& path) { return BundleWriter::create(path, 0).status().code(); };
  EXPECT_EQ(code(dir / "missing/m.wpk"), StatusCode::kNotFound);
  EXPECT_EQ(code(dir / "file/m.wpk"), StatusCode::kIo);
  EXPECT_EQ(code(dir / "folder"), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(dir / "folder/"), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(dir / std::string(256, 'n')), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(""), StatusCode::kInvalidArgument);
  EXPECT_EQ(code("/dev/full"), StatusCode::kInvalidArgument);
  const Status missing = BundleWriter::create(dir / "missing/m.wpk", 0).status();
  EXPECT_THAT(missing.message(), HasSubstr("missing"));
  { WEIGHTD_EXPECT_OK(BundleWriter::create(dir / std::string(255, 'n'), 0)); }
  if (::geteuid() != 0) {  // root may write anywhere
    ASSERT_EQ(::chmod((dir / "folder").c_str(), 0555), 0);
    EXPECT_EQ(code(dir / "folder/m.wpk"), StatusCode::kPermissionDenied);
  }
  EXPECT_EQ(entries(dir.path()), (std::vector<std::string>{"file", "folder"}));
}

TEST(BundleWriter, CO_098_FreeSpaceIsCheckedFirst) {
  const TempDir dir;
  const Status status = BundleWriter::create(dir / "m.wpk", uint64_t{1} << 60).status();
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("m.wpk: no space"), HasSubstr("1152921504606846976 bytes"), HasSubstr("free")));
  EXPECT_EQ(entries(dir.path()), std::vector<std::string>{});
}

TEST(BundleWriter, CO_099_FileSizeLimitIsAnError) {
  const TempDir dir;
  SafetensorsBuilder file;
  file.add("w", "U8", {4'000'000}, Words(1).bytes(4'000'000));
  file.write(dir / "m.safetensors");
  std::filesystem::create_directory(dir / "out");
  struct rlimit before {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  struct rlimit small = before;
  small.rlim_cur = 1U << 20;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const Status status = pack(dir / "m.safetensors", dir / "out/m.wpk", pack_options()).status();
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, old_handler);
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("no space"), HasSubstr("m.wpk"), HasSubstr("free")));
  EXPECT_EQ(entries(dir / "out"), std::vector<std::string>{});
}

// --- reader -------------------------------------------------------------------------------------------------------------------

TEST(BundleReader, RefusesWhatIsNoRegularFile) {
  const TempDir dir;
  EXPECT_EQ(BundleReader::open(dir.path()).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(BundleReader::open("/dev/null").status().code(), StatusCode::kInvalidArgument);
  ASSERT_EQ(::mkfifo((dir / "fifo").c_str(), 0600), 0);
  EXPECT_EQ(BundleReader::open(dir / "fifo").status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(BundleReader::open(dir / "missing").status().code(), StatusCode::kNotFound);
}

TEST(BundleReader, ReadsStayInsideTheirSection) {
  const TempDir dir;
  auto writer = BundleWriter::create(dir / "m.wpk", 0);
  WEIGHTD_ASSERT_OK(writer);
  add_section(*writer, st("{}", ""));
  add_section(*writer, "hello");
  WEIGHTD_ASSERT_OK(writer->commit(one_tensor("hello")));
  const BundleReader bundle = open_bundle(dir / "m.wpk");
  std::vector<std::byte> out(5);
  WEIGHTD_EXPECT_OK(bundle.read(1, 0, out));
  WEIGHTD_EXPECT_OK(bundle.read(1, 5, {}));
  EXPECT_EQ(bundle.read(1, 1, out).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(bundle.read(1, UINT64_MAX, out).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(bundle.read(2, 0, out).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(bundle.check_section(2, true).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(bundle.describe_section(1), "section 1 (raw of 't')");
  EXPECT_EQ(bundle.describe_section(0), "section 0 (header of 'm')");
  out.resize(4);
  EXPECT_EQ(bundle.decode_tensor(bundle.manifest().tensors[0], out, 1).code(), StatusCode::kInvalidArgument);
}

TEST(BundleReader, CO_102_AFileThatShrinksIsAnErrorNotASignal) {
  const TempDir dir;
  SafetensorsBuilder file;
  file.add_bf16("w", {512, 512}, trained(512, 512, 1));
  file.write(dir / "m.safetensors");
  WEIGHTD_ASSERT_OK(pack(dir / "m.safetensors", dir / "m.wpk", pack_options()));
  const BundleReader bundle = open_bundle(dir / "m.wpk");
  std::filesystem::resize_file(dir / "m.wpk", 100'000);
  std::vector<std::byte> out(512 * 512 * 2);
  const Status status = bundle.decode_tensor(bundle.manifest().tensors[0], out, 2);
  EXPECT_EQ(status.code(), StatusCode::kCorruption);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("m.wpk"), HasSubstr("expected")));
  EXPECT_EQ(bundle.check_unchanged().code(), StatusCode::kFailedPrecondition);
}

TEST(BundleReader, CO_089_AnOverwrittenFileIsNoticedARenamedOneDoesNotMatter) {
  const TempDir dir;
  SafetensorsBuilder file;
  file.add_bf16("w", {512, 512}, trained(512, 512, 1));
  file.write(dir / "m.safetensors");
  WEIGHTD_ASSERT_OK(pack(dir / "m.safetensors", dir / "m.wpk", pack_options()));
  const BundleReader bundle = open_bundle(dir / "m.wpk");
  WEIGHTD_EXPECT_OK(bundle.check_unchanged());
  write_file(dir / "new", "new");
  std::filesystem::rename(dir / "new", dir / "m.wpk");
  EXPECT_TRUE(decode(bundle, "w") == words_to_bytes(trained(512, 512, 1)));
}

// Section offsets past 4 GiB, in a file of holes: what pack would write for a tensor of that size.
TEST(BundleReader, CO_016_CO_045_SectionsPastFourGiB) {
  const TempDir dir;
  constexpr uint64_t kPad = (uint64_t{4} << 30) + 3;
  Manifest m = one_tensor("hello");
  m.sections = {{4096, 10, {}, {}}, {8192, kPad, {}, {}}, {f12::align_up(8192 + kPad, 4096), 5, {}, {}}};
  m.sources[0].file_bytes = 10 + kPad + 5;
  m.storages.insert(m.storages.begin(), m.storages[0]);
  m.storages[0].name = "pad";
  m.storages[0].logical_bytes = kPad;
  m.storages[1].planes[0].section = 2;
  m.tensors.insert(m.tensors.begin(), {"pad", DType::kU8, {kPad}, 0, 0, 0, 0, kPad, {}, true});
  m.tensors[1].storage = 1;
  m.tensors[1].source_offset_bytes = kPad;
  m.residencies = {plan_residency(m)};
  m.residencies[0].block_hashes.resize(m.residencies[0].arena_bytes / kBlockBytes);
  m.tensors_id = compute_tensors_id(m.tensors);
  const std::vector<std::byte> manifest = *encode_manifest(m);
  BundleHeader header;
  header.manifest_offset_bytes = m.sections[2].offset_bytes + 4096;
  header.manifest_bytes = manifest.size();
  header.file_bytes = header.manifest_offset_bytes + manifest.size();
  header.manifest_sha = sha256(manifest);
  {
    const UniqueFd fd(::open((dir / "m.wpk").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
    WEIGHTD_ASSERT_OK(pwrite_full(fd.get(), encode_header(header), 0, "m"));
    WEIGHTD_ASSERT_OK(pwrite_full(fd.get(), as_bytes("hello"), m.sections[2].offset_bytes, "m"));
    WEIGHTD_ASSERT_OK(pwrite_full(fd.get(), manifest, header.manifest_offset_bytes, "m"));
  }
  const BundleReader bundle = open_bundle(dir / "m.wpk");
  EXPECT_EQ(decode(bundle, "t"), "hello");
  std::vector<std::byte> end(3, std::byte{1});
  WEIGHTD_EXPECT_OK(bundle.read(1, kPad - 3, end));
  EXPECT_EQ(end, std::vector<std::byte>(3));
  EXPECT_EQ(bundle.residency("fast")->placements[1].arena_offset_bytes, (uint64_t{4} << 30) + 256);
}

}  // namespace
}  // namespace weightd::store
