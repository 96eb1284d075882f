// SPDX-License-Identifier: Apache-2.0
// Every system call by which a packer writes fails once, at each place; the linker puts these functions before the C library's
// (--wrap).
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <filesystem>

#include "tests/store/bundle_fixture.h"

namespace {

enum class Call { kNone, kPwrite, kPread, kFsync, kClose, kTruncate, kRename };

// Set by one test at a time; calls come from the packer's threads too.
struct Faults {
  std::atomic<Call> call{Call::kNone};
  std::atomic<int> at{0};  // which of the calls fails, from 1
  std::atomic<int> seen{0};
  std::atomic<int> error{0};
  std::atomic<bool> short_writes{false};  // half of what was asked for, each time
  std::atomic<bool> interrupt{false};     // EINTR at each second call
  std::atomic<unsigned> interrupts{0};
  std::atomic<int> maps{0};  // of files
};
Faults faults;

bool fails(Call call) {
  if (faults.call != call || ++faults.seen != faults.at) return false;
  errno = faults.error;
  return true;
}

bool interrupted() {
  if (!faults.interrupt || faults.interrupts++ % 2 == 0) return false;
  errno = EINTR;
  return true;
}

size_t shortened(size_t count) { return faults.short_writes && count > 1 ? count / 2 : count; }

}  // namespace

extern "C" {
ssize_t __real_pwrite(int fd, const void* data, size_t count, off_t offset);
ssize_t __real_pread(int fd, void* data, size_t count, off_t offset);
int __real_fsync(int fd);
int __real_close(int fd);
int __real_ftruncate(int fd, off_t size);
void* __real_mmap(void* address, size_t size, int protection, int flags, int fd, off_t offset);
int __real_renameat(int from_dir, const char* from, int to_dir, const char* to);

ssize_t __wrap_pwrite(int fd, const void* data, size_t count, off_t offset) {
  if (fails(Call::kPwrite) || interrupted()) return -1;
  return __real_pwrite(fd, data, shortened(count), offset);
}
ssize_t __wrap_pread(int fd, void* data, size_t count, off_t offset) {
  if (fails(Call::kPread) || interrupted()) return -1;
  return __real_pread(fd, data, shortened(count), offset);
}
int __wrap_fsync(int fd) { return fails(Call::kFsync) ? -1 : __real_fsync(fd); }
int __wrap_close(int fd) {
  const bool fail = fails(Call::kClose);
  const int error = errno;
  const int result = __real_close(fd);  // Linux closes, whatever it answers
  if (fail) errno = error;
  return fail ? -1 : result;
}
int __wrap_ftruncate(int fd, off_t size) { return fails(Call::kTruncate) || interrupted() ? -1 : __real_ftruncate(fd, size); }
void* __wrap_mmap(void* address, size_t size, int protection, int flags, int fd, off_t offset) {
  if (fd >= 0) ++faults.maps;
  return __real_mmap(address, size, protection, flags, fd, offset);
}
int __wrap_renameat(int from_dir, const char* from, int to_dir, const char* to) {
  return fails(Call::kRename) ? -1 : __real_renameat(from_dir, from, to_dir, to);
}
}  // extern "C"

namespace weightd::store {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;
using namespace weightd::testing;  // NOLINT: the fixture's names

int open_fd_count() {
  const auto fds = std::filesystem::directory_iterator("/proc/self/fd");
  return static_cast<int>(std::distance(begin(fds), end(fds)));
}

class PackFault : public ::testing::Test {
 protected:
  void SetUp() override {
    Words noise(1);
    SafetensorsBuilder file;
    file.add_bf16("w", {256, 512}, trained(256, 512, 1)).add_bf16("random", {64, 1024}, noise.random(64 * 1024));
    file.add("raw", "U8", {10'000'000}, noise.bytes(10'000'000));
    file.write(dir_ / "m.safetensors");
    std::filesystem::create_directory(dir_ / "out");
    WEIGHTD_ASSERT_OK(pack(dir_ / "m.safetensors", dir_ / "sound.wpk", pack_options(1)));
    sound_ = read_file(dir_ / "sound.wpk");
  }
  void TearDown() override { reset(); }
  static void reset() {
    faults.call = Call::kNone;
    faults.short_writes = faults.interrupt = false;
  }

  Status pack_once() { return pack(dir_ / "m.safetensors", dir_ / "out/m.wpk", pack_options(1)).status(); }

  // Fails the n-th call for n = 1, 2, ... until packing succeeds; gives the number of failures.
  int fail_each(Call call, int error, const std::function<void(const Status&)>& look) {
    for (int n = 1;; ++n) {
      const int fds = open_fd_count();
      faults.error = error;
      faults.at = n;
      faults.seen = 0;
      faults.call = call;
      const Status status = pack_once();
      reset();
      EXPECT_EQ(open_fd_count(), fds) << n;
      if (status.ok()) {
        EXPECT_TRUE(read_file(dir_ / "out/m.wpk") == sound_);
        std::filesystem::remove(dir_ / "out/m.wpk");
        return n - 1;
      }
      look(status);
      // A failed flush of the folder comes after the rename: the bundle is there and whole.
      if (status.message().find("of its folder") != std::string::npos) {
        EXPECT_TRUE(read_file(dir_ / "out/m.wpk") == sound_);
        std::filesystem::remove(dir_ / "out/m.wpk");
      }
      EXPECT_EQ(files_below(dir_ / "out"), std::vector<std::string>{}) << n;
    }
  }

  TempDir dir_;
  std::string sound_;
};

TEST_F(PackFault, CO_095_CO_099_EveryWriteThatFails) {
  for (const int error : {ENOSPC, EDQUOT, EFBIG}) {
    const int failures = fail_each(Call::kPwrite, error, [](const Status& status) {
      EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
      EXPECT_THAT(status.message(), HasSubstr("m.wpk: no space: needs about"));
      EXPECT_THAT(status.message(), HasSubstr("free"));
    });
    EXPECT_GT(failures, 8) << "sections, manifest, header";
  }
  const int failures = fail_each(Call::kPwrite, EIO, [](const Status& status) { EXPECT_EQ(status.code(), StatusCode::kIo); });
  EXPECT_GT(failures, 8);
}

TEST_F(PackFault, CO_096_ErrorsOfFsyncCloseAndRename) {
  EXPECT_EQ(fail_each(Call::kFsync, EIO, [](const Status& s) { EXPECT_THAT(s.message(), HasSubstr("fsync")); }), 2)
      << "file, then folder";
  for (const int error : {ENOSPC, EDQUOT}) {
    fail_each(Call::kFsync, error, [](const Status& status) { EXPECT_EQ(status.code(), StatusCode::kResourceExhausted); });
  }
  // close() of the new file is the only one whose answer can matter; those of files that were read cannot lose data.
  int refused = 0;
  for (int n = 1; n <= 8; ++n) {
    faults.error = EIO;
    faults.at = n;
    faults.seen = 0;
    faults.call = Call::kClose;
    const Status status = pack_once();
    reset();
    if (status.ok()) continue;
    ++refused;
    EXPECT_THAT(status.message(), HasSubstr("m.wpk: close"));
    EXPECT_EQ(status.code(), StatusCode::kIo);
  }
  EXPECT_EQ(refused, 1);
  std::filesystem::remove(dir_ / "out/m.wpk");
  EXPECT_EQ(fail_each(Call::kRename, EACCES, [](const Status& s) { EXPECT_THAT(s.message(), HasSubstr("rename")); }), 1);
  EXPECT_GE(fail_each(Call::kTruncate, EIO, [](const Status& s) { EXPECT_THAT(s.message(), HasSubstr("truncate")); }), 1);
}

TEST_F(PackFault, CO_096_ShortAndInterruptedCallsAreContinued) {
  faults.short_writes = true;
  WEIGHTD_EXPECT_OK(pack_once());
  EXPECT_TRUE(read_file(dir_ / "out/m.wpk") == sound_);
  faults.short_writes = false;
  faults.interrupt = true;
  WEIGHTD_EXPECT_OK(pack_once());
  WEIGHTD_EXPECT_OK(unpack(dir_ / "out/m.wpk", dir_ / "back", 1, {}));
  faults.interrupt = false;
  EXPECT_TRUE(read_file(dir_ / "out/m.wpk") == sound_);
  EXPECT_TRUE(read_file(dir_ / "back/m.safetensors") == read_file(dir_ / "m.safetensors"));
}

TEST_F(PackFault, EveryReadThatFails) {
  const int failures = fail_each(Call::kPread, EIO, [](const Status& status) {
    EXPECT_EQ(status.code(), StatusCode::kIo);
    EXPECT_THAT(status.message(), AnyOf(HasSubstr("m.safetensors"), HasSubstr("m.wpk")));
  });
  EXPECT_GT(failures, 10);
}

// A full disk is the answer of a call, and never a signal, because no file is mapped.
TEST_F(PackFault, CO_097_NoFileIsMapped) {
  faults.maps = 0;
  WEIGHTD_EXPECT_OK(pack_once());
  WEIGHTD_EXPECT_OK(verify(dir_ / "out/m.wpk", dir_ / "m.safetensors", true, 2, {}));
  WEIGHTD_EXPECT_OK(unpack(dir_ / "out/m.wpk", dir_ / "back", 2, {}));
  EXPECT_EQ(faults.maps, 0);
}

}  // namespace
}  // namespace weightd::store
