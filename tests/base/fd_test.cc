// SPDX-License-Identifier: Apache-2.0
#include "base/fd.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>

#include "tests/support/safetensors_builder.h"

namespace weightd {
namespace {

bool is_open(int fd) { return ::fcntl(fd, F_GETFD) != -1 || errno != EBADF; }
UniqueFd memory_file() { return UniqueFd(::memfd_create("test", MFD_CLOEXEC)); }

TEST(UniqueFd, ClosesOnceAndMoves) {
  int number = -1;
  {
    UniqueFd fd = memory_file();
    ASSERT_TRUE(fd.valid());
    number = fd.get();
    UniqueFd other = std::move(fd);
    EXPECT_FALSE(fd.valid());  // NOLINT: what a moved-from one says is part of the contract
    EXPECT_EQ(other.get(), number);
    UniqueFd& self = other;
    other = std::move(self);
    EXPECT_TRUE(is_open(number));
  }
  EXPECT_FALSE(is_open(number));
}

TEST(UniqueFd, AssignmentClosesTheFormerAndReleaseGivesItUp) {
  UniqueFd a = memory_file();
  const int first = a.get();
  a = memory_file();
  const int second = a.get();
  EXPECT_TRUE(first == second || !is_open(first));
  const int released = a.release();
  EXPECT_FALSE(a.valid());
  EXPECT_TRUE(is_open(released));
  const UniqueFd closes(released);
  UniqueFd none;
  none.reset();
  EXPECT_EQ(none.get(), -1);
}

TEST(Fd, WritesAndReadsAtOffsets) {
  const UniqueFd fd = memory_file();
  ASSERT_TRUE(pwrite_full(fd.get(), testing::as_bytes("hello"), 3, "f").ok());
  ASSERT_TRUE(pwrite_full(fd.get(), {}, 100, "f").ok());
  std::string out(8, 'x');
  ASSERT_TRUE(pread_full(fd.get(), std::as_writable_bytes(std::span(out)), 0, "f").ok());
  EXPECT_EQ(out, std::string("\0\0\0hello", 8));
  ASSERT_TRUE(pread_full(fd.get(), {}, 1000, "f").ok());
}

TEST(Fd, CO_016_WorksBeyondFourGiB) {
  const UniqueFd fd = memory_file();
  const uint64_t offset = (uint64_t{1} << 32) - 2;
  ASSERT_TRUE(pwrite_full(fd.get(), testing::as_bytes("abcd"), offset, "f").ok());
  std::string out(4, 'x');
  ASSERT_TRUE(pread_full(fd.get(), std::as_writable_bytes(std::span(out)), offset, "f").ok());
  EXPECT_EQ(out, "abcd");
  std::string low(2, 'x');
  EXPECT_TRUE(pread_full(fd.get(), std::as_writable_bytes(std::span(low)), 0, "f").ok());
  EXPECT_EQ(low, std::string(2, '\0'));
}

TEST(Fd, EarlyEndOfFileIsCorruptionWithTheNumbers) {
  const UniqueFd fd = memory_file();
  ASSERT_TRUE(pwrite_full(fd.get(), testing::as_bytes("0123456789"), 0, "f").ok());
  std::string out(8, 'x');
  const Status status = pread_full(fd.get(), std::as_writable_bytes(std::span(out)), 5, "model.bin");
  EXPECT_EQ(status.code(), StatusCode::kCorruption);
  EXPECT_EQ(status.message(), "model.bin: expected 8 bytes at offset 5, have 5: the file is truncated");
}

TEST(Fd, FailuresNameTheFileAndTheCall) {
  std::string out(1, 'x');
  const Status read = pread_full(-1, std::as_writable_bytes(std::span(out)), 0, "f");
  EXPECT_EQ(read.code(), StatusCode::kIo);
  EXPECT_EQ(read.message(), "f: read: Bad file descriptor");
  EXPECT_EQ(pwrite_full(-1, testing::as_bytes("x"), 0, "f").message(), "f: write: Bad file descriptor");
  const UniqueFd fd = memory_file();
  EXPECT_EQ(pread_full(fd.get(), std::as_writable_bytes(std::span(out)), UINT64_MAX, "f").code(), StatusCode::kIo);
}

TEST(Fd, CO_095_AFullDiskIsResourceExhausted) {
  const UniqueFd fd(::open("/dev/full", O_WRONLY | O_CLOEXEC));
  if (!fd.valid()) GTEST_SKIP() << "no /dev/full here";
  EXPECT_EQ(pwrite_full(fd.get(), testing::as_bytes("x"), 0, "f").code(), StatusCode::kResourceExhausted);
}

TEST(Fd, CO_096_CloseReportsWhatItWasTold) {
  UniqueFd fd = memory_file();
  const int number = fd.get();
  EXPECT_TRUE(close_checked(std::move(fd), "f").ok());
  EXPECT_FALSE(is_open(number));
  const Status status = close_checked(UniqueFd(number), "f");
  EXPECT_EQ(status.message(), "f: close: Bad file descriptor");
}

}  // namespace
}  // namespace weightd
