// SPDX-License-Identifier: Apache-2.0
#include "ipc/vmm.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <string>
#include <utility>

#include "tests/support/fake_cuda.h"

namespace weightd::ipc {
namespace {

using ::testing::ElementsAre;
using testing::FakeCuda;
using testing::FakeGpu;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kChunk = FakeCuda::kGranularityBytes;

std::byte* at(CUdeviceptr address) { return reinterpret_cast<std::byte*>(address); }

size_t open_descriptors() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

/// Runs `work` in a child; its exit status, or 1000 + the signal that ended it.
int in_child(const std::function<int()>& work) {
  const pid_t child = ::fork();
  if (child == 0) {
    std::signal(SIGSEGV, SIG_DFL);
    std::signal(SIGBUS, SIG_DFL);
    ::_exit(work());
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

std::vector<UniqueFd> exported(const VmmArena& arena) {
  auto fds = arena.export_chunks();
  EXPECT_TRUE(fds.ok()) << fds.status().to_string();
  return fds.ok() ? *std::move(fds) : std::vector<UniqueFd>();
}

class Vmm : public ::testing::Test {
 protected:
  void TearDown() override {
    EXPECT_EQ(fake.live(), FakeCuda::Live{});
    EXPECT_THAT(fake.misuse(), IsEmpty());
  }
  FakeCuda fake{{FakeGpu(), FakeGpu()}};
  const CudaDriver& driver = fake.driver();
};

TEST_F(Vmm, GranularityIsTheDevices) {
  const auto granularity = chunk_granularity(driver, 0);
  ASSERT_TRUE(granularity.ok());
  EXPECT_EQ(*granularity, uint64_t{2} << 20);
  EXPECT_FALSE(chunk_granularity(driver, 7).ok());
}

TEST_F(Vmm, ChunksLieSideBySideAndReadBackElsewhere) {
  auto arena = VmmArena::create(driver, 0, {2 * kChunk, kChunk, 3 * kChunk});
  ASSERT_TRUE(arena.ok()) << arena.status().to_string();
  EXPECT_EQ(arena->size_bytes(), 6 * kChunk);
  for (uint64_t i = 0; i < 6 * kChunk; i += 64) *at(arena->base() + i) = static_cast<std::byte>(i * 31 >> 9);
  std::vector<UniqueFd> fds = exported(*arena);
  ASSERT_EQ(fds.size(), 3U);
  for (const UniqueFd& fd : fds) EXPECT_EQ(::fcntl(fd.get(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  auto view = VmmArena::import(driver, 0, std::move(fds), {2 * kChunk, kChunk, 3 * kChunk});
  ASSERT_TRUE(view.ok()) << view.status().to_string();
  EXPECT_NE(view->base(), arena->base());
  for (uint64_t i = 0; i < 6 * kChunk; i += 64) ASSERT_EQ(*at(view->base() + i), static_cast<std::byte>(i * 31 >> 9)) << i;
  *at(arena->base() + 5 * kChunk) = std::byte{77};  // the same memory, not a copy
  EXPECT_EQ(*at(view->base() + 5 * kChunk), std::byte{77});
}

TEST_F(Vmm, MemoryOutlivesItsMaker) {
  std::vector<UniqueFd> fds;
  {
    auto arena = VmmArena::create(driver, 0, {kChunk});
    ASSERT_TRUE(arena.ok());
    std::memset(at(arena->base()), 0x42, kChunk);
    fds = exported(*arena);
  }
  EXPECT_EQ(fake.live(), FakeCuda::Live{});
  auto view = VmmArena::import(driver, 0, std::move(fds), {kChunk});
  ASSERT_TRUE(view.ok()) << view.status().to_string();
  EXPECT_EQ(*at(view->base() + kChunk - 1), std::byte{0x42});
}

TEST_F(Vmm, AnotherProcessReadsAndCannotWrite) {
  auto arena = VmmArena::create(driver, 0, {kChunk, kChunk});
  ASSERT_TRUE(arena.ok());
  std::memset(at(arena->base()), 0x17, 2 * kChunk);
  std::vector<UniqueFd> fds = exported(*arena);
  const auto import = [&] { return VmmArena::import(driver, 0, std::move(fds), {kChunk, kChunk}); };
  EXPECT_EQ(in_child([&] {
              auto view = import();
              return view.ok() && *at(view->base() + 2 * kChunk - 1) == std::byte{0x17} ? 0 : 1;
            }),
            0);
  EXPECT_EQ(in_child([&] {
              auto view = import();
              if (view.ok()) *at(view->base()) = std::byte{1};
              return 0;
            }),
            1000 + SIGSEGV);
  EXPECT_EQ(*at(arena->base()), std::byte{0x17});
}

TEST_F(Vmm, CO_067_OwnMappingCanBecomeReadOnly) {
  auto arena = VmmArena::create(driver, 0, {kChunk, kChunk});
  ASSERT_TRUE(arena.ok());
  *at(arena->base() + kChunk) = std::byte{9};
  ASSERT_TRUE(arena->make_read_only().ok());
  EXPECT_EQ(*at(arena->base() + kChunk), std::byte{9});
  EXPECT_EQ(in_child([&] {
              *at(arena->base() + kChunk) = std::byte{1};
              return 0;
            }),
            1000 + SIGSEGV);
}

TEST_F(Vmm, GivesBackInOrder) {
  auto arena = VmmArena::create(driver, 0, {kChunk, kChunk});
  ASSERT_TRUE(arena.ok());
  fake.clear_calls();
  arena = VmmArena();
  EXPECT_THAT(fake.calls(), ElementsAre("cuMemUnmap", "cuMemUnmap", "cuMemAddressFree", "cuMemRelease", "cuMemRelease"));
}

TEST_F(Vmm, MovingKeepsTheBase) {
  auto arena = VmmArena::create(driver, 0, {kChunk});
  ASSERT_TRUE(arena.ok());
  const CUdeviceptr base = arena->base();
  VmmArena moved = *std::move(arena);
  EXPECT_EQ(moved.base(), base);
  auto other = VmmArena::create(driver, 0, {kChunk});
  ASSERT_TRUE(other.ok());
  moved = *std::move(other);
  EXPECT_NE(moved.base(), base);
  EXPECT_EQ(fake.live().handles, 1);
}

TEST_F(Vmm, CO_065_NoCallNeedsOrMakesAContext) {
  {
    auto arena = VmmArena::create(driver, 0, {kChunk});
    ASSERT_TRUE(arena.ok());
    auto view = VmmArena::import(driver, 0, exported(*arena), {kChunk});
    ASSERT_TRUE(view.ok());
  }
  for (const std::string& call : fake.calls()) EXPECT_EQ(call.find("Ctx"), std::string::npos) << call;
}

TEST_F(Vmm, ArenaOfNoChunksIsEmpty) {
  const auto arena = VmmArena::create(driver, 0, {});
  ASSERT_TRUE(arena.ok()) << arena.status().to_string();
  EXPECT_EQ(arena->size_bytes(), 0U);
  EXPECT_THAT(exported(*arena), IsEmpty());
  const auto view = VmmArena::import(driver, 0, {}, {});
  ASSERT_TRUE(view.ok()) << view.status().to_string();
}

TEST_F(Vmm, CO_060_SizesAreWholeGranules) {
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{1}, kChunk - 1, kChunk + 4096, std::numeric_limits<uint64_t>::max()}) {
    const auto arena = VmmArena::create(driver, 0, {kChunk, bytes});
    ASSERT_FALSE(arena.ok()) << bytes;
    EXPECT_EQ(arena.status().code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(arena.status().message(),
                HasSubstr("chunk 1 of 2: " + std::to_string(bytes) + " bytes are no positive multiple of 2097152"));
  }
  const uint64_t half = uint64_t{1} << 63;  // the sum wraps
  EXPECT_EQ(VmmArena::create(driver, 0, {half, half}).status().code(), StatusCode::kInvalidArgument);
}

TEST_F(Vmm, CO_091_EveryFailureOfCreateLeavesNothing) {
  int n = 0;
  for (bool failed = true; failed;) {
    fake.fail_call(++n, CUDA_ERROR_OUT_OF_MEMORY);
    const auto arena = VmmArena::create(driver, 0, {kChunk, 2 * kChunk, kChunk});
    failed = fake.failed();
    EXPECT_EQ(arena.ok(), !failed) << n;
    if (!failed) break;
    EXPECT_EQ(arena.status().code(), StatusCode::kResourceExhausted) << n;
    EXPECT_EQ(fake.live(), FakeCuda::Live{}) << n;
  }
  EXPECT_EQ(n, 1 + 3 + 1 + 3 + 1 + 1);  // granularity, create, reserve, map, access; then none fails
}

TEST_F(Vmm, CO_091_EveryFailureOfImportLeavesNothingAndClosesTheDescriptors) {
  const auto arena = VmmArena::create(driver, 0, {kChunk, 2 * kChunk});
  ASSERT_TRUE(arena.ok());
  const FakeCuda::Live before = fake.live();
  const size_t descriptors = open_descriptors();
  int n = 0;
  for (bool failed = true; failed;) {
    std::vector<UniqueFd> fds = exported(*arena);
    fake.fail_call(++n, CUDA_ERROR_ILLEGAL_ADDRESS);
    const auto view = VmmArena::import(driver, 0, std::move(fds), {kChunk, 2 * kChunk});
    failed = fake.failed();
    EXPECT_EQ(view.ok(), !failed) << n;
    EXPECT_EQ(open_descriptors(), descriptors) << n;  // also after success: the handle keeps the memory
    if (!failed) break;
    EXPECT_EQ(view.status().code(), StatusCode::kCuda) << n;
    EXPECT_EQ(fake.live(), before) << n;
  }
  EXPECT_EQ(n, 1 + 2 + 2 + 1 + 2 + 1 + 1);  // granularity, import, properties, reserve, map, access; then none fails
}

TEST_F(Vmm, EveryFailureOfExportClosesWhatWasExported) {
  const auto arena = VmmArena::create(driver, 0, {kChunk, kChunk, kChunk});
  ASSERT_TRUE(arena.ok());
  const size_t descriptors = open_descriptors();
  for (int n = 1; n <= 3; ++n) {
    fake.fail_call(n, CUDA_ERROR_NOT_SUPPORTED);
    const auto fds = arena->export_chunks();
    EXPECT_EQ(fds.status().code(), StatusCode::kCuda);
    EXPECT_THAT(fds.status().message(), HasSubstr("chunk " + std::to_string(n - 1) + " of 3: cuMemExportToShareableHandle"));
    EXPECT_EQ(open_descriptors(), descriptors);
  }
  EXPECT_EQ(exported(*arena).size(), 3U);
}

TEST_F(Vmm, FullDescriptorTableIsNotTakenForFullGpu) {
  const auto arena = VmmArena::create(driver, 0, std::vector<uint64_t>(8, kChunk));
  ASSERT_TRUE(arena.ok());
  rlimit old{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &old), 0);
  const int next = ::dup(0);
  ASSERT_GE(next, 0);
  ::close(next);
  const rlimit low{static_cast<rlim_t>(next) + 3, old.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
  const auto fds = arena->export_chunks();
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &old), 0);
  EXPECT_EQ(fds.status().code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(fds.status().message(), HasSubstr("Too many open files"));
}

TEST_F(Vmm, MoreChunksThanOneMessageCarries) {
  constexpr size_t kCount = 300;  // 253 descriptors fit in a message
  const std::vector<uint64_t> sizes(kCount, kChunk);
  auto arena = VmmArena::create(driver, 0, sizes);
  ASSERT_TRUE(arena.ok()) << arena.status().to_string();
  for (size_t i = 0; i < kCount; ++i) std::memcpy(at(arena->base() + i * kChunk + 123), &i, sizeof(i));
  auto view = VmmArena::import(driver, 0, exported(*arena), sizes);
  ASSERT_TRUE(view.ok()) << view.status().to_string();
  for (size_t i = 0; i < kCount; ++i) {
    size_t read = 0;
    std::memcpy(&read, at(view->base() + i * kChunk + 123), sizeof(read));
    ASSERT_EQ(read, i);
  }
}

TEST_F(Vmm, ForeignDescriptorIsNoChunk) {
  std::vector<UniqueFd> fds(1);
  fds[0] = UniqueFd(::memfd_create("weights", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(fds[0].get(), static_cast<off_t>(kChunk)), 0);
  const auto view = VmmArena::import(driver, 0, std::move(fds), {kChunk});
  EXPECT_EQ(view.status().code(), StatusCode::kCorruption);
  EXPECT_THAT(view.status().message(), HasSubstr("chunk 0 of 1: its descriptor is no memory of a visible GPU"));
  std::vector<UniqueFd> closed(1);
  EXPECT_EQ(VmmArena::import(driver, 0, std::move(closed), {kChunk}).status().code(), StatusCode::kCorruption);
}

TEST_F(Vmm, ChunkSmallerThanToldIsRefused) {
  const auto arena = VmmArena::create(driver, 0, {kChunk, kChunk});
  ASSERT_TRUE(arena.ok());
  const FakeCuda::Live before = fake.live();
  const auto view = VmmArena::import(driver, 0, exported(*arena), {kChunk, 2 * kChunk});
  EXPECT_EQ(view.status().code(), StatusCode::kCorruption);
  EXPECT_THAT(view.status().message(), HasSubstr("chunk 1 of 2: cannot be mapped with 4194304 bytes, its memory is smaller"));
  EXPECT_EQ(fake.live(), before);
}

TEST_F(Vmm, CountOfDescriptorsMustMatch) {
  const auto arena = VmmArena::create(driver, 0, {kChunk, kChunk});
  ASSERT_TRUE(arena.ok());
  const size_t descriptors = open_descriptors();
  EXPECT_EQ(VmmArena::import(driver, 0, exported(*arena), {kChunk}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(open_descriptors(), descriptors);
}

TEST_F(Vmm, CO_149_ChunkOfAnotherGpuIsRefused) {
  const auto arena = VmmArena::create(driver, 0, {kChunk});
  ASSERT_TRUE(arena.ok());
  const FakeCuda::Live before = fake.live();
  const auto view = VmmArena::import(driver, 1, exported(*arena), {kChunk});
  EXPECT_EQ(view.status().code(), StatusCode::kCorruption);
  EXPECT_THAT(view.status().message(), HasSubstr("chunk 0 of 1: lies on another GPU"));
  EXPECT_EQ(fake.live(), before);
}

TEST_F(Vmm, CO_092_FullGpuRefusesTheWholeArena) {
  fake.occupy(0, (uint64_t{4} << 30) - 3 * kChunk);
  EXPECT_EQ(VmmArena::create(driver, 0, std::vector<uint64_t>(4, kChunk)).status().code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(fake.live(), FakeCuda::Live{});
  EXPECT_TRUE(VmmArena::create(driver, 0, std::vector<uint64_t>(3, kChunk)).ok());
}

/// Two ends of a pipe.
struct Pipe {
  Pipe() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) std::abort();
    from = UniqueFd(ends[0]);
    to = UniqueFd(ends[1]);
  }
  UniqueFd from, to;
};

class Legacy : public Vmm {
 protected:
  void SetUp() override {
    auto retained = PrimaryContext::retain(driver, 0);
    ASSERT_TRUE(retained.ok());
    context = *std::move(retained);
  }
  void TearDown() override {
    context = PrimaryContext();
    Vmm::TearDown();
  }
  PrimaryContext context;
};

TEST_F(Legacy, AnotherProcessOpensIt) {
  const PrimaryContext::Current current(context);
  auto arena = LegacyArena::create(driver, 2 * kChunk);
  ASSERT_TRUE(arena.ok()) << arena.status().to_string();
  EXPECT_EQ(arena->size_bytes(), 2 * kChunk);
  *at(arena->base() + kChunk) = std::byte{5};
  const auto handle = arena->handle();
  ASSERT_TRUE(handle.ok());
  EXPECT_EQ(handle->size(), 64U);
  EXPECT_EQ(in_child([&] {
              auto view = LegacyArena::open(driver, *handle, 2 * kChunk);
              return view.ok() && *at(view->base() + kChunk) == std::byte{5} ? 0 : 1;
            }),
            0);
  EXPECT_EQ(in_child([&] {
              const auto view = LegacyArena::open(driver, *handle, 3 * kChunk);  // more than there is
              return view.status().code() == StatusCode::kCorruption && fake.live().opened == 0 ? 0 : 1;
            }),
            0);
}

TEST_F(Legacy, CO_061_ProcessThatMadeItCannotOpenIt) {
  const PrimaryContext::Current current(context);
  const auto arena = LegacyArena::create(driver, kChunk);
  ASSERT_TRUE(arena.ok());
  const auto handle = arena->handle();
  ASSERT_TRUE(handle.ok());
  EXPECT_EQ(LegacyArena::open(driver, *handle, kChunk).status().code(), StatusCode::kInvalidArgument);
}

TEST_F(Legacy, DeadOwnerMeansLost) {
  const PrimaryContext::Current current(context);
  Pipe pipe;
  EXPECT_EQ(in_child([&] {
              auto arena = LegacyArena::create(driver, kChunk);
              const auto handle = arena.ok() ? arena->handle() : Result<std::vector<std::byte>>(arena.status());
              return handle.ok() && ::write(pipe.to.get(), handle->data(), handle->size()) == 64 ? 0 : 1;
            }),
            0);
  std::vector<std::byte> handle(64);
  ASSERT_EQ(::read(pipe.from.get(), handle.data(), handle.size()), 64);
  const auto view = LegacyArena::open(driver, handle, kChunk);
  EXPECT_EQ(view.status().code(), StatusCode::kLost) << view.status().to_string();
}

TEST_F(Legacy, CO_060_SmallAllocationIsRefused) {
  const PrimaryContext::Current current(context);
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{65536}, kChunk + 512}) {
    EXPECT_EQ(LegacyArena::create(driver, bytes).status().code(), StatusCode::kInvalidArgument) << bytes;
  }
  const std::vector<std::byte> shorter(63);
  EXPECT_EQ(LegacyArena::open(driver, shorter, kChunk).status().code(), StatusCode::kInvalidArgument);
}

TEST_F(Legacy, MovingGivesBackOnce) {
  const PrimaryContext::Current current(context);
  auto first = LegacyArena::create(driver, kChunk);
  auto second = LegacyArena::create(driver, kChunk);
  ASSERT_TRUE(first.ok() && second.ok());
  LegacyArena arena = *std::move(first);
  EXPECT_EQ(fake.live().allocations, 2);
  arena = *std::move(second);
  EXPECT_EQ(fake.live().allocations, 1);
}

}  // namespace
}  // namespace weightd::ipc
