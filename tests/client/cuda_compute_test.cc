// SPDX-License-Identifier: Apache-2.0
// How GPU models are mapped, shared and given back, over a CUDA driver made of host memory. Kernels are not called.
#include "client/cuda_compute.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "ipc/messages.h"
#include "tests/client/child_process.h"
#include "tests/support/fake_cuda.h"

namespace weightd::detail {
namespace {

using test::in_forked_child;
using ::testing::Contains;
using testing::FakeCuda;
using testing::FakeGpu;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kChunk = FakeCuda::kGranularityBytes;

size_t open_descriptors() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

/// A loader's side and a worker's side in one process, on the second of two GPUs.
class CudaMapping : public ::testing::Test {
 protected:
  CudaMapping() {
    Result<ipc::VmmArena> arena = ipc::VmmArena::create(fake.driver(), 1, {kChunk, 2 * kChunk});
    EXPECT_TRUE(arena.ok()) << arena.status().to_string();
    loaded_ = *std::move(arena);
    for (uint64_t i = 0; i < loaded_->size_bytes(); i += 512) *writable(i) = pattern(i);
    loaders = fake.live();
  }
  ~CudaMapping() override {
    devices.reset();
    loaded_.reset();
    EXPECT_EQ(fake.live(), FakeCuda::Live{});
    EXPECT_THAT(fake.misuse(), IsEmpty());
  }

  static std::byte pattern(uint64_t offset) { return static_cast<std::byte>(offset * 37 >> 9); }
  [[nodiscard]] std::byte* writable(uint64_t offset) const { return reinterpret_cast<std::byte*>(loaded_->base() + offset); }

  [[nodiscard]] ArenaSource source(const std::string& identity = "a", int gpu = 1) const {
    ArenaSource made{FakeCuda::uuid(gpu), "fd", 3 * kChunk};
    made.chunk_bytes = {kChunk, 2 * kChunk};
    made.chunks = loaded_->export_chunks().value();
    made.identity = identity;
    return made;
  }
  [[nodiscard]] Result<std::unique_ptr<Compute>> map(ArenaSource from) { return CudaCompute::map(*devices, std::move(from)); }
  [[nodiscard]] std::unique_ptr<Compute> mapped(const std::string& identity = "a") {
    Result<std::unique_ptr<Compute>> compute = map(source(identity));
    EXPECT_TRUE(compute.ok()) << compute.status().to_string();
    return compute.ok() ? *std::move(compute) : nullptr;
  }
  [[nodiscard]] int made(int FakeCuda::Live::*what) const { return fake.live().*what - loaders.*what; }
  [[nodiscard]] std::ptrdiff_t calls_of(const std::string& entry) const {
    const std::vector<std::string> calls = fake.calls();
    return std::count(calls.begin(), calls.end(), entry);
  }

  FakeCuda fake{{FakeGpu(), FakeGpu()}};
  FakeCuda::Live loaders;
  std::optional<CudaDevices> devices{fake.driver()};

 private:
  std::optional<ipc::VmmArena> loaded_;
};

TEST_F(CudaMapping, TheBytesAreThereReadOnlyAndTheDescriptorsClosed) {
  const size_t before = open_descriptors();
  const std::unique_ptr<Compute> compute = mapped();
  EXPECT_EQ(compute->mapped_bytes(), 3 * kChunk);
  for (uint64_t i = 0; i < 3 * kChunk; i += 512) ASSERT_EQ(compute->base()[i], pattern(i)) << i;
  // The fake keeps one descriptor for each chunk that it has imported.
  EXPECT_LE(open_descriptors(), before + 2);
  EXPECT_EQ(in_forked_child([&] {
              ::signal(SIGSEGV, SIG_DFL);
              const_cast<std::byte*>(compute->base())[0] = std::byte{1};
              return 0;
            }),
            -SIGSEGV);
}

TEST_F(CudaMapping, OneImportAndOneAddressHoweverOftenAcquired) {
  const std::unique_ptr<Compute> first = mapped();
  const size_t descriptors = open_descriptors();
  const std::unique_ptr<Compute> second = mapped();
  EXPECT_EQ(second->base(), first->base());
  EXPECT_EQ(open_descriptors(), descriptors) << "what came with the second lease is closed";
  EXPECT_EQ(calls_of("cuMemImportFromShareableHandle"), 2) << "one for each chunk";
  EXPECT_TRUE(first->unmap().ok());
  EXPECT_EQ(calls_of("cuCtxSynchronize"), 0) << "somebody else still uses it: nothing to wait for";
  EXPECT_EQ(second->base()[512], pattern(512));
  EXPECT_TRUE(second->unmap().ok());
  EXPECT_EQ(made(&FakeCuda::Live::mappings), 0);
  // And it can be mapped anew.
  const std::unique_ptr<Compute> third = mapped();
  EXPECT_EQ(third->base()[512], pattern(512));
}

TEST_F(CudaMapping, OtherMemoryOfTheSameContentIsAnotherMapping) {
  const std::unique_ptr<Compute> first = mapped("1/7/m/abc");
  const std::unique_ptr<Compute> second = mapped("1/8/m/abc");
  EXPECT_NE(second->base(), first->base());
}

TEST_F(CudaMapping, CO_062_TearDownWaitsUnmapsFreesReleases) {
  const std::unique_ptr<Compute> compute = mapped();
  fake.clear_calls();
  EXPECT_TRUE(compute->unmap().ok());
  const std::vector<std::string> calls = fake.calls();
  const auto first = [&](const char* entry) { return std::find(calls.begin(), calls.end(), entry) - calls.begin(); };
  EXPECT_LT(first("cuCtxSynchronize"), first("cuMemUnmap"));
  EXPECT_LT(first("cuMemUnmap"), first("cuMemAddressFree"));
  EXPECT_LT(first("cuMemAddressFree"), first("cuMemRelease"));
  EXPECT_EQ(calls_of("cuMemUnmap"), 2);
  EXPECT_EQ(calls_of("cuMemAddressFree"), 1);
  EXPECT_EQ(calls_of("cuMemRelease"), 2);
  EXPECT_TRUE(compute->unmap().ok()) << "twice is fine";
  EXPECT_EQ(made(&FakeCuda::Live::handles), 0);
  EXPECT_EQ(made(&FakeCuda::Live::ranges), 0);
  EXPECT_EQ(fake.live().current, 0);
}

TEST_F(CudaMapping, CO_149_OnlyTheModelsGpuGetsAContext) {
  const std::unique_ptr<Compute> compute = mapped();
  EXPECT_EQ(fake.live().contexts, 1);
  EXPECT_EQ(fake.live().current, 0) << "what was current is current again";
  EXPECT_THAT(fake.calls(), Contains("cuDevicePrimaryCtxRetain").Times(1));
}

TEST_F(CudaMapping, CO_144_AGpuThatIsNotVisibleIsUnavailableByName) {
  const size_t before = open_descriptors();
  ASSERT_EQ(::setenv("CUDA_VISIBLE_DEVICES", "0", 1), 0);
  const Status status = map(source("a", 5)).status();
  ASSERT_EQ(::unsetenv("CUDA_VISIBLE_DEVICES"), 0);
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  EXPECT_THAT(status.message(), HasSubstr(FakeCuda::uuid(5)));
  EXPECT_THAT(status.message(), HasSubstr("CUDA_VISIBLE_DEVICES"));
  EXPECT_EQ(fake.live().contexts, 0) << "no context on some other GPU instead";
  EXPECT_EQ(open_descriptors(), before);
}

TEST_F(CudaMapping, EveryFailureLeavesNothingBehind) {
  const size_t descriptors = open_descriptors();
  bool finished = false;
  for (int n = 1; !finished && n < 100; ++n) {
    ArenaSource from = source();
    fake.fail_call(n, CUDA_ERROR_OUT_OF_MEMORY);
    Result<std::unique_ptr<Compute>> compute = map(std::move(from));
    finished = compute.ok();
    if (finished) {
      EXPECT_FALSE(fake.failed()) << "call " << n << " failed, and nobody noticed";
      continue;
    }
    EXPECT_EQ(made(&FakeCuda::Live::handles), 0) << n;
    EXPECT_EQ(made(&FakeCuda::Live::ranges), 0) << n;
    EXPECT_EQ(made(&FakeCuda::Live::mappings), 0) << n;
    EXPECT_EQ(fake.live().current, 0) << n;
    EXPECT_EQ(open_descriptors(), descriptors) << n;
  }
  EXPECT_TRUE(finished);
}

TEST_F(CudaMapping, ChunksThatAreNoneAreCorruption) {
  ArenaSource from = source();
  from.chunks[0] = UniqueFd(::dup(STDERR_FILENO));
  EXPECT_EQ(map(std::move(from)).status().code(), StatusCode::kCorruption);
  from = source();
  from.chunk_bytes[1] += 1;
  EXPECT_EQ(map(std::move(from)).status().code(), StatusCode::kCorruption) << "no multiple of the granularity";
}

TEST_F(CudaMapping, ACaptureIsNotSpoiltAndUnmappingIsPutOff) {
  const std::unique_ptr<Compute> compute = mapped();
  fake.fail_entry("cuStreamIsCapturing", 1, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, 2);
  EXPECT_EQ(compute->may_unmap().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(compute->unmap().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(calls_of("cuCtxSynchronize"), 0) << "waiting would have ended the capture";
  EXPECT_EQ(compute->base()[512], pattern(512)) << "still there";
  // One that only the waiting shows.
  fake.fail_entry("cuCtxSynchronize", 1, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  EXPECT_TRUE(compute->may_unmap().ok());
  EXPECT_EQ(compute->unmap().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(compute->base()[512], pattern(512));
  // Meanwhile others get a mapping of their own: this one is about to go.
  const std::unique_ptr<Compute> other = mapped();
  EXPECT_NE(other->base(), compute->base());
  EXPECT_TRUE(compute->unmap().ok());
  EXPECT_EQ(made(&FakeCuda::Live::mappings), 2) << "the other's chunks";
}

TEST_F(CudaMapping, AStickyErrorIsReportedOnceAndTheMappingGoes) {
  const std::unique_ptr<Compute> compute = mapped();
  fake.fail_entry("cuCtxSynchronize", 1, CUDA_ERROR_ILLEGAL_ADDRESS);
  const Status status = compute->unmap();
  EXPECT_EQ(status.code(), StatusCode::kCuda);
  EXPECT_THAT(status.message(), HasSubstr(FakeCuda::uuid(1)));
  EXPECT_EQ(made(&FakeCuda::Live::mappings), 0);
  EXPECT_TRUE(compute->unmap().ok());
}

TEST_F(CudaMapping, AContextThatIsGoneDoesNotKeepTheMapping) {
  const std::unique_ptr<Compute> compute = mapped();
  fake.fail_entry("cuCtxPushCurrent", 1, CUDA_ERROR_CONTEXT_IS_DESTROYED);
  EXPECT_EQ(compute->unmap().code(), StatusCode::kCuda);
  EXPECT_EQ(made(&FakeCuda::Live::mappings), 0);
}

TEST_F(CudaMapping, CO_065_InAForkedChildNothingIsCalled) {
  std::unique_ptr<Compute> compute = mapped();
  EXPECT_EQ(in_forked_child([&] {
              fake.clear_calls();
              compute.reset();
              if (!fake.calls().empty()) return 1;
              if (devices->open(FakeCuda::uuid(1)).status().code() != StatusCode::kForked) return 2;
              return fake.calls().empty() ? 0 : 3;
            }),
            0);
  EXPECT_EQ(compute->base()[512], pattern(512));
}

TEST(CudaShutDown, AfterCudasEndAtExitNothingIsTouched) {
  // In a process of its own, because what is abandoned is never given back.
  EXPECT_EQ(in_forked_child([] {
              FakeCuda fake;
              CudaDevices devices(fake.driver());
              const ipc::VmmArena loaded = ipc::VmmArena::create(fake.driver(), 0, {kChunk}).value();
              ArenaSource from{FakeCuda::uuid(0), "fd", kChunk};
              from.chunk_bytes = {kChunk};
              from.chunks = loaded.export_chunks().value();
              std::unique_ptr<Compute> compute = CudaCompute::map(devices, std::move(from)).value();
              fake.fail_entry("cuDeviceGetCount", 1, CUDA_ERROR_DEINITIALIZED, 1000);
              fake.clear_calls();
              if (!compute->may_unmap().ok() || !compute->unmap().ok()) return 1;
              compute.reset();
              for (const std::string& call : fake.calls()) {
                if (call != "cuDeviceGetCount") return 2;
              }
              std::_Exit(0);
            }),
            0);
}

TEST(CudaCode, CO_046_AGpuThatThisBuildHasNoCodeForIsNamed) {
  FakeGpu old;
  old.compute_major = 6;
  old.compute_minor = 1;
  FakeCuda fake{{old}};
  CudaDevices devices(fake.driver());
  const Status status = devices.open(FakeCuda::uuid(0)).status();
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_THAT(status.message(), HasSubstr("6.1"));
  EXPECT_THAT(status.message(), HasSubstr(FakeCuda::uuid(0)));
  EXPECT_EQ(fake.live().contexts, 0);
}

TEST_F(CudaMapping, ManyThreadsShareAndLeave) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 20; ++i) {
        const std::unique_ptr<Compute> compute = mapped(t % 2 == 0 ? "even" : "odd");
        EXPECT_EQ(compute->base()[1024], pattern(1024));
        if (i % 2 == 0) {
          EXPECT_TRUE(compute->unmap().ok());
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(made(&FakeCuda::Live::mappings), 0);
  EXPECT_EQ(made(&FakeCuda::Live::handles), 0);
  EXPECT_EQ(fake.live().contexts, 1);
}

/// A process that owns a legacy allocation until it is told to end, and its handle.
class LegacyOwner {
 public:
  LegacyOwner() {
    int ready[2], stay[2];
    EXPECT_EQ(::pipe(ready), 0);
    EXPECT_EQ(::pipe(stay), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::close(stay[1]);
      own(ready[1], stay[0]);
    }
    ::close(ready[1]);
    ::close(stay[0]);
    stay_ = UniqueFd(stay[1]);
    handle_.resize(ipc::kIpcHandleBytes);
    EXPECT_EQ(::read(ready[0], handle_.data(), handle_.size()), static_cast<ssize_t>(handle_.size()));
    ::close(ready[0]);
  }
  ~LegacyOwner() { end(); }
  void end() {
    if (pid_ == 0) return;
    stay_.reset();
    ::waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  [[nodiscard]] ArenaSource source() const {
    ArenaSource made{FakeCuda::uuid(0), "legacy", kChunk};
    made.chunk_bytes = {kChunk};
    made.ipc_handle = handle_;
    made.identity = "legacy";
    return made;
  }

 private:
  [[noreturn]] static void own(int ready, int stay) {
    FakeCuda owner;
    const ipc::PrimaryContext context = ipc::PrimaryContext::retain(owner.driver(), 0).value();
    const ipc::PrimaryContext::Current current(context);
    const ipc::LegacyArena arena = ipc::LegacyArena::create(owner.driver(), kChunk).value();
    *reinterpret_cast<std::byte*>(arena.base() + 100) = std::byte{42};
    const std::vector<std::byte> handle = arena.handle().value();
    char end = 0;
    (void)!::write(ready, handle.data(), handle.size());
    (void)!::read(stay, &end, 1);
    std::_Exit(0);
  }
  pid_t pid_ = 0;
  UniqueFd stay_;
  std::vector<std::byte> handle_;
};

TEST(LegacyMapping, OpenedOnceAndClosedInItsContext) {
  LegacyOwner owner;
  FakeCuda fake;
  {
    CudaDevices devices(fake.driver());
    const std::unique_ptr<Compute> first = CudaCompute::map(devices, owner.source()).value();
    const std::unique_ptr<Compute> second = CudaCompute::map(devices, owner.source()).value();
    EXPECT_EQ(fake.live().opened, 1);
    EXPECT_EQ(second->base(), first->base());
    EXPECT_EQ(first->base()[100], std::byte{42});
    EXPECT_EQ(first->mapped_bytes(), kChunk);
    EXPECT_TRUE(first->unmap().ok());
    EXPECT_EQ(fake.live().opened, 1);
    EXPECT_TRUE(second->unmap().ok());
    EXPECT_EQ(fake.live().opened, 0);
  }
  EXPECT_EQ(fake.live(), FakeCuda::Live{});
  EXPECT_THAT(fake.misuse(), IsEmpty());
}

TEST(LegacyMapping, AnOwnerThatIsGoneIsLost) {
  LegacyOwner owner;
  const ArenaSource source = owner.source();
  owner.end();
  FakeCuda fake;
  CudaDevices devices(fake.driver());
  ArenaSource again{source.device, source.transport, source.arena_bytes, source.chunk_bytes, {}, source.ipc_handle, "legacy"};
  EXPECT_EQ(CudaCompute::map(devices, std::move(again)).status().code(), StatusCode::kLost);
  EXPECT_EQ(fake.live().opened, 0);
  EXPECT_EQ(fake.live().current, 0);
}

TEST(LegacyMapping, CO_061_TheOwnHandleIsRefusedAndNotTakenForAnotherProcesss) {
  FakeCuda fake;
  {
    CudaDevices devices(fake.driver());
    CudaDevice* const device = devices.open(FakeCuda::uuid(0)).value();
    const ipc::PrimaryContext::Current current(device->context());
    const ipc::LegacyArena mine = ipc::LegacyArena::create(fake.driver(), kChunk).value();
    ArenaSource source{FakeCuda::uuid(0), "legacy", kChunk};
    source.chunk_bytes = {kChunk};
    source.ipc_handle = mine.handle().value();
    const Status status = CudaCompute::map(devices, std::move(source)).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(fake.live().opened, 0);
  }
  EXPECT_THAT(fake.misuse(), IsEmpty());
}

}  // namespace
}  // namespace weightd::detail
