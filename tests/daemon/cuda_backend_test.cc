// SPDX-License-Identifier: Apache-2.0
// The GPU backend and the probe over a driver made of host memory.
#include "daemon/loader/cuda_backend.h"

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "daemon/loader/jobs.h"
#include "daemon/loader/nvml.h"
#include "daemon/loader/probe.h"
#include "ipc/vmm.h"
#include "store/hash.h"
#include "tests/daemon/backend_contract.h"
#include "tests/daemon/fake_device_work.h"
#include "tests/daemon/loader_peer.h"
#include "tests/support/test_bundle.h"

namespace weightd::testing {
namespace {

using loader::Backend;
using loader::CudaBackendOptions;
using loader::kPieceBytes;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

constexpr uint64_t kChunk = FakeCuda::kGranularityBytes;
const loader::Advance kIgnore = [](uint64_t) {};

ipc::GpuDevice gpu(const FakeCuda& fake, int ordinal = 0) {
  auto found = ipc::find_gpu(fake.driver(), FakeCuda::uuid(ordinal));
  WEIGHTD_CHECK(found.ok());
  return *std::move(found);
}

Result<std::unique_ptr<Backend>> make(const FakeCuda& fake, const ipc::GpuDevice& device, CudaBackendOptions options = {}) {
  return loader::make_cuda_backend(fake.driver(), device, fake_device_work(fake), std::move(options));
}

BackendKind fake_cuda(uint32_t max_pieces) {
  const auto fake = std::make_shared<FakeCuda>();
  const auto make_one = [fake, max_pieces] {
    CudaBackendOptions options;
    options.max_pieces = max_pieces;
    return make(*fake, gpu(*fake), options);
  };
  const auto after = [fake] {
    EXPECT_EQ(fake->live(), FakeCuda::Live{});
    EXPECT_THAT(fake->misuse(), IsEmpty());
  };
  return {make_one, after};
}

INSTANTIATE_TEST_SUITE_P(FakeCuda, BackendContract,
                         ::testing::Values(NamedKind{"many pieces", [] { return fake_cuda(64); }},
                                           NamedKind{"two pieces", [] { return fake_cuda(2); }}));

size_t open_descriptors() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

std::vector<std::byte> counted(uint64_t size) {
  std::vector<std::byte> bytes(size);
  for (uint64_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 2654435761 >> 13);
  return bytes;
}

/// The whole life of an arena.
Status fill(const FakeCuda& fake, const ipc::GpuDevice& device, const CodedPlanes& coded, CudaBackendOptions options = {}) {
  WEIGHTD_ASSIGN_OR_RETURN(const auto backend, make(fake, device, std::move(options)));
  WEIGHTD_RETURN_IF_ERROR(backend->allocate(chunks_for(*backend, coded.arena.size())));
  WEIGHTD_RETURN_IF_ERROR(upload_all(*backend, coded.arena));
  WEIGHTD_ASSIGN_OR_RETURN(const loader::Shares shares, backend->seal());
  WEIGHTD_ASSIGN_OR_RETURN(const std::vector<uint64_t> hashes, backend->hash_blocks(coded.arena.size(), 1, kIgnore));
  if (hashes != store::block_hashes(coded.arena, 1)) return Status::corruption("the bytes differ");
  return backend->check_f12(coded.planes, 1, kIgnore);
}

class CudaBackend : public ::testing::Test {
 protected:
  void TearDown() override {
    EXPECT_EQ(fake.live(), FakeCuda::Live{});
    EXPECT_THAT(fake.misuse(), IsEmpty());
  }
  FakeCuda fake{{FakeGpu()}};
  const ipc::GpuDevice device = gpu(fake);
};

TEST_F(CudaBackend, CO_091_EveryCallMayFailAndNothingStays) {
  const CodedPlanes coded = make_coded_planes(400, 4096, 1, 5);  // two pieces, two chunks
  ASSERT_GT(coded.arena.size(), kChunk);
  const size_t descriptors = open_descriptors();
  CudaBackendOptions options;
  options.attempts = 1;
  int n = 0;
  for (bool failed = true; failed && n < 1000;) {
    fake.fail_call(++n, CUDA_ERROR_ILLEGAL_ADDRESS);
    const Status status = fill(fake, device, coded, options);
    failed = fake.failed();
    EXPECT_EQ(fake.live(), FakeCuda::Live{}) << n;
    EXPECT_EQ(open_descriptors(), descriptors) << n;
    EXPECT_THAT(fake.misuse(), IsEmpty()) << n << " " << fake.calls().back() << status.to_string();
    fake.clear_misuse();
    // A question whether a copy is over may fail: then it is waited for.
    if (!status.ok()) {
      EXPECT_TRUE(failed) << status.to_string();
      EXPECT_EQ(status.code(), StatusCode::kCuda) << status.to_string();
    }
  }
  EXPECT_GT(n, 40);
}

TEST_F(CudaBackend, CO_073_ErrorsNameTheCallAndTheGpu) {
  const CodedPlanes coded = make_coded_planes(16, 64, 1, 5);
  fake.fail_entry("cuMemcpyHtoDAsync", 1, CUDA_ERROR_ILLEGAL_ADDRESS);
  const Status status = fill(fake, device, coded);
  EXPECT_EQ(status.code(), StatusCode::kCuda);
  EXPECT_THAT(status.message(), HasSubstr("GPU " + FakeCuda::uuid(0) + ": cuMemcpyHtoDAsync: an illegal memory access"));
}

TEST_F(CudaBackend, CO_092_WaitsForMemoryThatIsBeingGivenBack) {
  fake.occupy(0, (uint64_t{4} << 30) - 3 * kChunk);
  int waits = 0;
  CudaBackendOptions options;
  options.between_attempts = [&] {
    if (++waits == 3) fake.occupy(0, 0);  // the killed worker's memory arrives
  };
  {
    const auto backend = make(fake, device, options);
    ASSERT_TRUE(backend.ok());
    EXPECT_TRUE((*backend)->allocate({kChunk, kChunk, kChunk, kChunk}).ok());
  }
  EXPECT_EQ(waits, 3);
}

TEST_F(CudaBackend, CO_090_RefusalHasTheArithmetic) {
  fake.occupy(0, uint64_t{5} << 29);
  int waits = 0;
  CudaBackendOptions options;
  options.attempts = 5;
  options.between_attempts = [&] { ++waits; };
  const auto backend = make(fake, device, options);
  ASSERT_TRUE(backend.ok());
  const uint64_t before = fake.live().device_bytes;
  const Status status = (*backend)->allocate({uint64_t{1} << 30, uint64_t{1} << 30});
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), StartsWith("GPU " + FakeCuda::uuid(0) + ": needs 2.0 GiB, 1.5 GiB of 4.0 GiB are free: chunk "));
  EXPECT_EQ(waits, 4);
  EXPECT_EQ(fake.live().device_bytes, before);
  // What no GPU of this size can hold is refused at once.
  EXPECT_EQ((*backend)->allocate({uint64_t{5} << 30}).code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(waits, 4);
}

TEST_F(CudaBackend, PinnedMemoryIsBoundedAndReusedAfterItsCopyOnly) {
  CudaBackendOptions options;
  options.max_pieces = 3;
  uint64_t most = 0;
  fake.on_call([&](const std::string&) { most = std::max(most, fake.live().host_bytes); });
  const std::vector<std::byte> bytes = counted(20 * kPieceBytes);  // copies happen late here: reuse too early would lose bytes
  {
    const auto backend = make(fake, device, options);
    ASSERT_TRUE(backend.ok());
    ASSERT_TRUE((*backend)->allocate(chunks_for(**backend, bytes.size())).ok());
    ASSERT_TRUE(upload_all(**backend, bytes).ok());
    ASSERT_TRUE((*backend)->seal().ok());
    const auto hashes = (*backend)->hash_blocks(bytes.size(), 1, kIgnore);
    ASSERT_TRUE(hashes.ok());
    EXPECT_EQ(*hashes, store::block_hashes(bytes, 1));
  }
  EXPECT_EQ(most, 3 * kPieceBytes);
  fake.on_call(nullptr);
}

TEST_F(CudaBackend, CO_067_SealedArenaIsReadOnlyHereToo) {
  const auto backend = make(fake, device);
  ASSERT_TRUE(backend.ok());
  ASSERT_TRUE((*backend)->allocate({kChunk}).ok());
  ASSERT_TRUE((*backend)->seal().ok());
  const auto piece = (*backend)->stage(0, 4096);
  ASSERT_TRUE(piece.ok());
  EXPECT_EQ((*backend)->upload(*piece).code(), StatusCode::kCuda);  // the fake driver refuses at once; a GPU would fault
  EXPECT_THAT(fake.misuse(), ::testing::ElementsAre("copy to memory that is not writable"));
  fake.clear_misuse();
}

TEST_F(CudaBackend, LegacyArenaIsOneAllocationThatAnotherProcessOpens) {
  CudaBackendOptions options;
  options.legacy = true;
  const auto backend = make(fake, device, options);
  ASSERT_TRUE(backend.ok());
  const CodedPlanes coded = make_coded_planes(400, 4096, 1, 5);
  const uint64_t bytes = (coded.arena.size() + kChunk - 1) / kChunk * kChunk;
  ASSERT_TRUE((*backend)->allocate({bytes}).ok());
  ASSERT_TRUE(upload_all(**backend, coded.arena).ok());
  const auto shares = (*backend)->seal();
  ASSERT_TRUE(shares.ok()) << shares.status().to_string();
  EXPECT_THAT(shares->chunks, IsEmpty());
  ASSERT_EQ(shares->ipc_handle.size(), ipc::kIpcHandleBytes);
  EXPECT_EQ(fake.live().handles, 0);
  const auto hashes = (*backend)->hash_blocks(bytes / store::kBlockBytes * store::kBlockBytes, 1, kIgnore);
  ASSERT_TRUE(hashes.ok()) << hashes.status().to_string();
  EXPECT_TRUE((*backend)->check_f12(coded.planes, 1, kIgnore).ok());
  const pid_t child = ::fork();
  if (child == 0) {
    const auto context = ipc::PrimaryContext::retain(fake.driver(), 0);
    const ipc::PrimaryContext::Current current(*context);
    const auto view = ipc::LegacyArena::open(fake.driver(), shares->ipc_handle, bytes);
    ::_exit(view.ok() && std::equal(coded.arena.begin(), coded.arena.end(), reinterpret_cast<const std::byte*>(view->base())) ? 0
                                                                                                                              : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ((*backend)->import({}, {}).code(), StatusCode::kUnsupported);
}

TEST_F(CudaBackend, DeviceAndCodecThatDisagreeAreOurBug) {
  loader::DeviceWork work = fake_device_work(fake);
  uint64_t unit = 0;
  work.check_f12 = [&](const kernels::F12DeviceMatrix&, uint64_t, uint64_t* first, cudaStream_t stream) {
    fake.driver().stream_synchronize(stream);
    *first = unit;
    return Status();
  };
  const auto backend = loader::make_cuda_backend(fake.driver(), device, work);
  ASSERT_TRUE(backend.ok());
  const CodedPlanes coded = make_coded_planes(48, 64, 1, 5);
  ASSERT_TRUE((*backend)->allocate(chunks_for(**backend, coded.arena.size())).ok());
  ASSERT_TRUE(upload_all(**backend, coded.arena).ok());
  ASSERT_TRUE((*backend)->seal().ok());
  for (unit = 0; unit < 4; ++unit) {
    EXPECT_EQ((*backend)->check_f12(coded.planes, 1, kIgnore).code(), StatusCode::kInternal) << unit;
  }
}

TEST(CudaBackendKinds, CO_068_GpuThatCannotShareIsRefusedButForLegacy) {
  FakeCuda fake({{"Old", uint64_t{1} << 30, true, false, 7, 0}});
  const auto refused = make(fake, gpu(fake));
  EXPECT_EQ(refused.status().code(), StatusCode::kUnsupported);
  EXPECT_THAT(refused.status().message(), HasSubstr("(Old) cannot export memory as file descriptors"));
  CudaBackendOptions options;
  options.legacy = true;
  EXPECT_TRUE(make(fake, gpu(fake), options).ok());
}

/// One job on a backend, with the test as the daemon.
Outcome run(const ipc::Job& job, std::vector<UniqueFd> fds, Backend& backend) {
  auto sockets = ipc::socket_pair();
  require(sockets.ok(), "socket_pair");
  ipc::Channel channel(std::move(sockets->second), channel_options());
  std::jthread loader([&] {
    auto received = loader::receive_job(channel);
    require(received.ok(), "the job arrives");
    (void)loader::run_job(channel, *std::move(received), backend);
  });
  return Daemon(std::move(sockets->first)).run(job, std::move(fds));
}

class CudaLoad : public CudaBackend {
 protected:
  void SetUp() override { make_bundle(path, {4, 3, 1024, 3000, Encoding::kF12}); }
  ipc::Job job() const {
    ipc::Job load = make_job(path);
    load.backend = "cuda";
    load.device = device.uuid;
    load.threads = 6;
    return load;
  }
  const TempDir folder;
  const std::string path = folder / "m.wpk";
};

TEST_F(CudaLoad, ManyThreadsFillAGpuThroughFewPieces) {
  CudaBackendOptions options;
  options.max_pieces = 3;
  const auto backend = make(fake, device, options);
  ASSERT_TRUE(backend.ok());
  const uint64_t taken = fake.live().device_bytes;  // by the backend itself
  fake.occupy(0, (uint64_t{3} << 30) - taken);
  Outcome loaded = run(job(), opened(path), **backend);
  ASSERT_TRUE(loaded.status.ok()) << loaded.status.to_string();
  EXPECT_GT(loaded.chunks.size(), 3U);
  EXPECT_EQ(loaded.plan.available_bytes, uint64_t{1} << 30);
  EXPECT_TRUE(loaded.result.ipc_handle.empty());
  std::vector<UniqueFd> fds;
  fds.push_back(std::move(loaded.table));
  for (UniqueFd& chunk : loaded.chunks) fds.push_back(std::move(chunk));
  ipc::Job verify = job();
  verify.kind = ipc::VerifyJob{loaded.result.chunk_bytes, loaded.plan.arena_bytes};
  verify.fd_count = static_cast<uint32_t>(fds.size());
  const auto reader = make(fake, device);
  ASSERT_TRUE(reader.ok());
  const Outcome verified = run(verify, std::move(fds), **reader);
  ASSERT_TRUE(verified.status.ok()) << verified.status.to_string();
  EXPECT_EQ(verified.verified.blocks, loaded.plan.arena_bytes / store::kBlockBytes);
  EXPECT_THAT(verified.verified.bad_blocks, IsEmpty());
}

TEST_F(CudaLoad, LegacyLoadHasOneChunkAndAHandle) {
  CudaBackendOptions options;
  options.legacy = true;
  const auto backend = make(fake, device, options);
  ASSERT_TRUE(backend.ok());
  ipc::Job load = job();
  load.transport = "legacy";
  load.chunk_bytes = 0;  // of no account: there is one allocation
  const Outcome loaded = run(load, opened(path), **backend);
  ASSERT_TRUE(loaded.status.ok()) << loaded.status.to_string();
  EXPECT_THAT(loaded.chunks, IsEmpty());
  EXPECT_EQ(loaded.result.ipc_handle.size(), ipc::kIpcHandleBytes);
  ASSERT_EQ(loaded.result.chunk_bytes.size(), 1U);
  EXPECT_EQ(loaded.result.chunk_bytes.front(), loaded.plan.resident_bytes);
  EXPECT_EQ(loaded.plan.chunk_count, 1U);
  EXPECT_EQ(fake.live().allocations, 2);  // the arena and the results
}

TEST_F(CudaLoad, CO_091_ALoadOfManyThreadsEndsWhateverFails) {
  CudaBackendOptions options;
  options.max_pieces = 2;
  options.attempts = 1;
  for (const std::string entry :
       {"cuMemCreate", "cuMemsetD8Async", "cuMemHostRegister", "cuEventCreate", "cuMemcpyHtoDAsync", "cuEventRecord",
        "cuEventSynchronize", "cuStreamSynchronize", "cuMemSetAccess", "cuMemExportToShareableHandle", "cuMemcpyDtoH"}) {
    for (const int n : {1, 2}) {
      if (entry == "cuMemHostRegister" && n == 2) continue;  // called once
      const auto backend = make(fake, device, options);
      ASSERT_TRUE(backend.ok());
      fake.fail_entry(entry, n, CUDA_ERROR_ILLEGAL_ADDRESS);
      const Outcome outcome = run(job(), opened(path), **backend);
      EXPECT_TRUE(fake.failed()) << entry << n;
      EXPECT_EQ(outcome.status.code(), StatusCode::kCuda) << entry << n << outcome.status.to_string();
      EXPECT_THAT(outcome.status.message(), HasSubstr(entry));
    }
    EXPECT_EQ(fake.live(), FakeCuda::Live{}) << entry;
  }
}

TEST(Probe, MachineWithoutADriverIsAnAnswer) {
  const ipc::ProbeReply reply = loader::probe(Status::unavailable("no CUDA driver: x"), Status::unavailable("no NVML: y"), {});
  EXPECT_EQ(reply.problem, "no CUDA driver: x");
  EXPECT_EQ(reply.nvml_problem, "no NVML: y");
  EXPECT_EQ(reply.cuda_version, 0U);
  EXPECT_THAT(reply.gpus, IsEmpty());
}

TEST(Probe, TellsWhatDriverAndNvmlSay) {
  FakeCuda fake({FakeGpu(), {"Old", uint64_t{1} << 30, false, false, 5, 2}});
  const ipc::ProbeReply reply = loader::probe(&fake.driver(), loader::Nvml::load(WEIGHTD_FAKE_NVML), {});
  EXPECT_EQ(reply.driver_version, "580.95.05");
  EXPECT_EQ(reply.cuda_version, static_cast<uint32_t>(CUDA_VERSION));
  EXPECT_EQ(reply.problem, "");
  ASSERT_EQ(reply.gpus.size(), 2U);
  const ipc::GpuSummary& first = reply.gpus[0];
  EXPECT_EQ(first.uuid, FakeCuda::uuid(0));
  EXPECT_EQ(first.name, "Fake H200");
  EXPECT_EQ(first.total_bytes, uint64_t{4} << 30);
  EXPECT_TRUE(first.nvml_known);
  EXPECT_EQ(first.used_bytes, uint64_t{1} << 30);
  EXPECT_EQ(first.free_bytes, uint64_t{3} << 30);
  EXPECT_EQ(first.minor, 5);
  EXPECT_EQ(first.persistence, 1);
  EXPECT_EQ(first.compute_major, 9U);
  EXPECT_TRUE(first.vmm && first.fd_handles);
  EXPECT_EQ(first.granularity_bytes, kChunk);
  EXPECT_EQ(first.read_only_map, -1);
  EXPECT_EQ(first.problem, "");
  const ipc::GpuSummary& second = reply.gpus[1];
  EXPECT_EQ(second.problem, "no virtual memory management");
  EXPECT_FALSE(second.nvml_known);
  EXPECT_EQ(second.minor, -1);
  EXPECT_EQ(second.persistence, -1);
  EXPECT_THAT(reply.nvml_problem, HasSubstr("nvmlDeviceGetHandleByUUID(" + FakeCuda::uuid(1) + "): not found (6)"));
  EXPECT_EQ(fake.live(), FakeCuda::Live{});
}

TEST(Probe, CO_068_DeepOnesShareAGranuleOnEachGpu) {
  FakeCuda fake({FakeGpu(), FakeGpu(), {"Old", uint64_t{1} << 30, true, false, 7, 0}});
  const ipc::ProbeReply reply = loader::probe(&fake.driver(), Status::unavailable("no NVML"), fake_device_work(fake));
  ASSERT_EQ(reply.gpus.size(), 3U);
  EXPECT_EQ(reply.gpus[0].read_only_map, 1) << reply.gpus[0].problem;
  EXPECT_EQ(reply.gpus[1].read_only_map, 1) << reply.gpus[1].problem;
  EXPECT_EQ(reply.gpus[2].read_only_map, -1);
  EXPECT_EQ(reply.gpus[2].problem, "memory cannot be exported as file descriptors");
  EXPECT_EQ(reply.problem, "");
  EXPECT_EQ(fake.live(), FakeCuda::Live{});
}

TEST(Probe, CO_046_FailureOfAGpuIsItsProblem) {
  FakeCuda fake({FakeGpu()});
  loader::DeviceWork work = fake_device_work(fake);
  work.block_hashes = [](const std::byte*, uint64_t, uint64_t*, cudaStream_t) {
    return Status::cuda("no kernel image is available for execution on the device");
  };
  const ipc::ProbeReply reply = loader::probe(&fake.driver(), Status::unavailable("no NVML"), work);
  ASSERT_EQ(reply.gpus.size(), 1U);
  EXPECT_EQ(reply.gpus[0].read_only_map, 0);
  EXPECT_THAT(reply.gpus[0].problem, HasSubstr("no kernel image is available"));
  EXPECT_THAT(reply.problem, StartsWith("GPU " + FakeCuda::uuid(0) + ": "));
  EXPECT_EQ(fake.live(), FakeCuda::Live{});
}

TEST(Probe, EveryCallMayFail) {
  FakeCuda fake;
  int n = 0;
  for (bool failed = true; failed && n < 1000;) {
    fake.fail_call(++n, CUDA_ERROR_NOT_SUPPORTED);
    const ipc::ProbeReply reply = loader::probe(&fake.driver(), Status::unavailable("no NVML"), fake_device_work(fake));
    failed = fake.failed();
    EXPECT_EQ(fake.live(), FakeCuda::Live{}) << n;
    if (!failed) {
      EXPECT_EQ(reply.problem, "");
    }
  }
  EXPECT_GT(n, 40);
}

TEST(Nvml, LibraryThatIsMissingOrAnotherIsUnavailable) {
  const auto missing = loader::Nvml::load("libnvidia-ml-that-does-not-exist.so");
  EXPECT_EQ(missing.status().code(), StatusCode::kUnavailable);
  EXPECT_THAT(missing.status().message(), StartsWith("no NVML: libnvidia-ml-that-does-not-exist.so"));
  const auto other = loader::Nvml::load("libm.so.6");
  EXPECT_EQ(other.status().code(), StatusCode::kUnavailable);
  EXPECT_EQ(other.status().message(), "NVML is too old: it has no nvmlInit_v2");
}

}  // namespace
}  // namespace weightd::testing
