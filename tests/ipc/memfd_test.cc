// SPDX-License-Identifier: Apache-2.0
#include "ipc/memfd.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <algorithm>
#include <fstream>
#include <string>

#include "ipc_test_support.h"

namespace weightd::ipc {
namespace {

const auto kPage = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));

std::vector<UniqueFd> sealed_chunks(const std::vector<uint64_t>& sizes) {
  Result<WritableArena> arena = WritableArena::create(sizes, "test");
  if (!arena.ok()) std::abort();
  uint64_t i = 0;
  for (std::byte& byte : arena->bytes()) byte = static_cast<std::byte>(i++ * 37 >> 5);
  Result<std::vector<UniqueFd>> fds = std::move(*arena).seal();
  if (!fds.ok()) std::abort();
  return *std::move(fds);
}
/// A memfd of `bytes` with some seals only.
UniqueFd memfd_with(int seals, uint64_t bytes) {
  UniqueFd fd(::memfd_create("t", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0 || ::fcntl(fd.get(), F_ADD_SEALS, seals) != 0) std::abort();
  return fd;
}
Status map_one(UniqueFd fd, uint64_t bytes) {
  std::vector<UniqueFd> fds;
  fds.push_back(std::move(fd));
  return MappedArena::map(std::move(fds), {bytes}).status();
}

TEST(CutChunks, LastIsRoundedUp) {
  EXPECT_EQ(cut_chunks(0, 8192, 4096), std::vector<uint64_t>{});
  EXPECT_EQ(cut_chunks(1, 8192, 4096), std::vector<uint64_t>{4096});
  EXPECT_EQ(cut_chunks(8192, 8192, 4096), std::vector<uint64_t>{8192});
  EXPECT_EQ(cut_chunks(8193, 8192, 4096), (std::vector<uint64_t>{8192, 4096}));
  EXPECT_EQ(cut_chunks(20000, 8192, 4096), (std::vector<uint64_t>{8192, 8192, 4096}));
  EXPECT_EQ(cut_chunks(uint64_t{5} << 30, uint64_t{2} << 30, 2U << 20), (std::vector<uint64_t>{2U << 30, 2U << 30, 1U << 30}));
}

TEST(WritableArena, IsZeroedContiguousAndMapsBackTheSame) {
  const std::vector<uint64_t> sizes = {2 * kPage, kPage, 3 * kPage};
  Result<WritableArena> arena = WritableArena::create(sizes, "test");
  ASSERT_TRUE(arena.ok()) << arena.status().to_string();
  ASSERT_EQ(arena->bytes().size(), 6 * kPage);
  EXPECT_TRUE(std::all_of(arena->bytes().begin(), arena->bytes().end(), [](std::byte b) { return b == std::byte{0}; }));
  std::vector<std::byte> content(6 * kPage);
  for (size_t i = 0; i < content.size(); ++i) content[i] = static_cast<std::byte>(i * 31 >> 3);
  std::copy(content.begin(), content.end(), arena->bytes().begin());
  Result<std::vector<UniqueFd>> fds = std::move(*arena).seal();
  ASSERT_TRUE(fds.ok()) << fds.status().to_string();
  ASSERT_EQ(fds->size(), 3U);
  const size_t with_fds = test::open_fd_count();
  Result<MappedArena> mapped = MappedArena::map(*std::move(fds), sizes);
  ASSERT_TRUE(mapped.ok()) << mapped.status().to_string();
  EXPECT_EQ(test::open_fd_count(), with_fds - 3) << "the mapping keeps the memory, not the descriptors";
  ASSERT_EQ(mapped->bytes().size(), content.size());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(mapped->base()) % kPage, 0U);
  EXPECT_TRUE(std::equal(content.begin(), content.end(), mapped->bytes().begin()));
}

TEST(WritableArena, NothingIsLeftOpenOrMapped) {
  const size_t before = test::open_fd_count();
  {
    Result<WritableArena> dropped = WritableArena::create({kPage, kPage}, "test");
    ASSERT_TRUE(dropped.ok());
    WritableArena moved = *std::move(dropped);
    WritableArena again = std::move(moved);
    again.bytes()[0] = std::byte{1};
    EXPECT_EQ(moved.bytes().size(), 0U);  // NOLINT: what a moved-from arena holds is the point
  }
  { const MappedArena mapped = *MappedArena::map(sealed_chunks({kPage}), {kPage}); }
  EXPECT_EQ(test::open_fd_count(), before);
}

TEST(WritableArena, TooMuchIsRefusedWithTheArithmeticAndNothingIsKept) {
  const size_t before = test::open_fd_count();
  const uint64_t huge = uint64_t{1} << 50;
  const Status status = WritableArena::create({kPage, huge}, "model x").status();
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status.to_string();
  EXPECT_NE(status.message().find("model x"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find(std::to_string(huge + kPage)), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("available"), std::string::npos) << status.message();
  EXPECT_EQ(test::open_fd_count(), before);
}

TEST(WritableArena, SizesAreWholePages) {
  EXPECT_EQ(WritableArena::create({kPage + 1}, "t").status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(WritableArena::create({0}, "t").status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(WritableArena::create({~(kPage - 1), ~(kPage - 1), kPage}, "t").status().code(), StatusCode::kInvalidArgument)
      << "sum wraps";
  Result<WritableArena> empty = WritableArena::create({}, "t");
  ASSERT_TRUE(empty.ok());
  EXPECT_TRUE(empty->bytes().empty());
  EXPECT_TRUE(std::move(*empty).seal()->empty());
}

TEST(SealedChunks, NobodyCanChangeThemInAnyWay) {
  const std::vector<UniqueFd> fds = sealed_chunks({kPage});
  const UniqueFd& fd = fds[0];
  char byte = 1;
  EXPECT_LT(::pwrite(fd.get(), &byte, 1, 0), 0);
  EXPECT_LT(::ftruncate(fd.get(), 0), 0);
  EXPECT_EQ(::mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0), MAP_FAILED);
  // Opened again for writing, as any holder may try: the seals hold.
  const UniqueFd writable(::open(("/proc/self/fd/" + std::to_string(fd.get())).c_str(), O_RDWR | O_CLOEXEC));
  if (writable.valid()) {
    EXPECT_LT(::pwrite(writable.get(), &byte, 1, 0), 0);
    EXPECT_LT(::ftruncate(writable.get(), 0), 0);
    EXPECT_LT(::ftruncate(writable.get(), static_cast<off_t>(2 * kPage)), 0);
    EXPECT_LT(::fallocate(writable.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, static_cast<off_t>(kPage)), 0);
    EXPECT_EQ(::mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, writable.get(), 0), MAP_FAILED);
    EXPECT_LT(::fcntl(writable.get(), F_ADD_SEALS, F_SEAL_SEAL), 0) << "not even the seals";
  }
  EXPECT_EQ(::fcntl(fd.get(), F_GETFL) & O_ACCMODE, O_RDONLY);
  EXPECT_EQ(::fcntl(fd.get(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
}

TEST(MappedArena, IsReadOnlyAlsoForMprotect) {
  Result<MappedArena> mapped = MappedArena::map(sealed_chunks({kPage, kPage}), {kPage, kPage});
  ASSERT_TRUE(mapped.ok());
  EXPECT_NE(::mprotect(const_cast<std::byte*>(mapped->base()), 2 * kPage, PROT_READ | PROT_WRITE), 0);
}

TEST(MappedArena, AWriteIsAFaultOfTheWriterOnly) {
  Result<MappedArena> mapped = MappedArena::map(sealed_chunks({kPage}), {kPage});
  ASSERT_TRUE(mapped.ok());
  const pid_t child = ::fork();
  if (child == 0) {
    ::signal(SIGSEGV, SIG_DFL);  // sanitizers install a handler that exits instead
    *const_cast<volatile std::byte*>(mapped->base()) = std::byte{1};
    ::_exit(0);
  }
  int outcome = 0;
  ::waitpid(child, &outcome, 0);
  EXPECT_TRUE(WIFSIGNALED(outcome) && WTERMSIG(outcome) == SIGSEGV) << outcome;
}

TEST(MappedArena, AForkInheritsIt) {
  Result<MappedArena> mapped = MappedArena::map(sealed_chunks({kPage}), {kPage});
  ASSERT_TRUE(mapped.ok());
  const std::byte last = mapped->bytes().back();
  const pid_t child = ::fork();
  if (child == 0) ::_exit(mapped->bytes().back() == last ? 0 : 1);
  int outcome = -1;
  ::waitpid(child, &outcome, 0);
  EXPECT_EQ(outcome, 0);
}

TEST(MappedArena, IsLeftOutOfCoreFiles) {
  Result<MappedArena> mapped = MappedArena::map(sealed_chunks({kPage}), {kPage});
  ASSERT_TRUE(mapped.ok());
  char begin[32];
  std::snprintf(begin, sizeof(begin), "%lx-", reinterpret_cast<unsigned long>(mapped->base()));
  std::ifstream smaps("/proc/self/smaps");
  std::string line;
  bool inside = false;
  while (std::getline(smaps, line)) {
    if (line.rfind(begin, 0) == 0) inside = true;
    if (inside && line.rfind("VmFlags:", 0) == 0) break;
  }
  ASSERT_TRUE(inside);
  EXPECT_NE(line.find(" dd"), std::string::npos) << line;
  EXPECT_EQ(line.find(" mw"), std::string::npos) << "may not become writable: " << line;
}

TEST(MappedArena, WhatIsNotSealedOrNotOfTheSizeToldIsCorruption) {
  constexpr int kAll = F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW;
  EXPECT_TRUE(map_one(std::move(sealed_chunks({kPage})[0]), kPage).ok());
  struct Case {
    const char* what;
    int seals;
    uint64_t bytes;
  };
  for (const Case& bad :
       {Case{"no seals", 0, kPage}, Case{"may be written", F_SEAL_SHRINK | F_SEAL_GROW, kPage},
        Case{"may shrink", F_SEAL_WRITE | F_SEAL_GROW, kPage}, Case{"may grow", F_SEAL_WRITE | F_SEAL_SHRINK, kPage},
        Case{"only future writes are sealed", F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE, kPage},
        Case{"smaller", kAll, kPage / 2}, Case{"empty", kAll, 0}, Case{"larger", kAll, 2 * kPage}}) {
    const Status status = map_one(memfd_with(bad.seals, bad.bytes), kPage);
    EXPECT_EQ(status.code(), StatusCode::kCorruption) << bad.what << ": " << status.to_string();
    EXPECT_NE(status.message().find("chunk 0"), std::string::npos) << status.message();
  }
  const test::TempFolder folder;
  UniqueFd file(::open((folder / "f").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  ASSERT_EQ(::ftruncate(file.get(), static_cast<off_t>(kPage)), 0);
  EXPECT_EQ(map_one(std::move(file), kPage).code(), StatusCode::kCorruption) << "a file, which could be cut under the mapping";
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const UniqueFd writer(ends[1]);
  EXPECT_EQ(map_one(UniqueFd(ends[0]), kPage).code(), StatusCode::kCorruption) << "a pipe";
}

TEST(MappedArena, ASecondBadChunkLeavesNothingMapped) {
  std::vector<UniqueFd> fds = sealed_chunks({kPage});
  fds.push_back(memfd_with(0, kPage));
  const size_t before = test::open_fd_count();
  const Status status = MappedArena::map(std::move(fds), {kPage, kPage}).status();
  EXPECT_EQ(status.code(), StatusCode::kCorruption);
  EXPECT_NE(status.message().find("chunk 1"), std::string::npos) << status.message();
  EXPECT_EQ(test::open_fd_count(), before - 2);
}

TEST(MappedArena, CountsAndSizesMustAgree) {
  EXPECT_EQ(MappedArena::map(sealed_chunks({kPage}), {}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(MappedArena::map({}, {kPage}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(MappedArena::map(sealed_chunks({kPage}), {kPage + 1}).status().code(), StatusCode::kInvalidArgument);
  const Result<MappedArena> empty = MappedArena::map({}, {});
  ASSERT_TRUE(empty.ok());
  EXPECT_TRUE(empty->bytes().empty());
}

TEST(SealedMemfd, HoldsExactlyTheBytes) {
  std::vector<std::byte> bytes(10'001);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 7);
  const Result<UniqueFd> fd = sealed_memfd(bytes, "table");
  ASSERT_TRUE(fd.ok()) << fd.status().to_string();
  const Result<std::vector<std::byte>> read = read_sealed_memfd(fd->get(), bytes.size(), 1U << 20);
  ASSERT_TRUE(read.ok()) << read.status().to_string();
  EXPECT_EQ(*read, bytes);
  EXPECT_EQ(read_sealed_memfd(fd->get(), bytes.size() - 1, 1U << 20).status().code(), StatusCode::kCorruption);
  EXPECT_EQ(read_sealed_memfd(fd->get(), bytes.size() + 1, 1U << 20).status().code(), StatusCode::kCorruption);
  EXPECT_EQ(read_sealed_memfd(fd->get(), bytes.size(), bytes.size() - 1).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(read_sealed_memfd(memfd_with(0, 16).get(), 16, 64).status().code(), StatusCode::kCorruption);
  EXPECT_FALSE(read_sealed_memfd(-1, 16, 64).ok());
  EXPECT_TRUE(read_sealed_memfd(sealed_memfd({}, "empty")->get(), 0, 64)->empty());
}

}  // namespace
}  // namespace weightd::ipc
