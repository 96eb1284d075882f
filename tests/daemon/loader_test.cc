// SPDX-License-Identifier: Apache-2.0
// The loader's jobs with the test as the daemon, on a backend that can be made to fail at every step.
#include <dlfcn.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>

#include "daemon/loader/jobs.h"
#include "daemon/loader/table.h"
#include "ipc/memfd.h"
#include "store/bundle.h"
#include "tests/daemon/faulty_backend.h"
#include "tests/daemon/loader_peer.h"
#include "tests/support/safetensors_builder.h"
#include "tests/support/test_bundle.h"

namespace weightd::loader {
namespace {

using ::weightd::testing::channel_options;
using ::weightd::testing::Daemon;
using ::weightd::testing::FaultyBackend;
using ::weightd::testing::LoaderProgram;
using ::weightd::testing::make_bundle;
using ::weightd::testing::make_job;
using ::weightd::testing::opened;
using ::weightd::testing::Outcome;
using ::weightd::testing::read_file;
using ::weightd::testing::require;
using ::weightd::testing::soon;
using ::weightd::testing::TempDir;
using ::weightd::testing::write_file;

constexpr uint64_t kMiB = uint64_t{1} << 20;

Outcome run(const ipc::Job& job, std::vector<UniqueFd> fds, Backend& backend) {
  auto sockets = ipc::socket_pair();
  require(sockets.ok(), "socket_pair");
  ipc::Channel channel(std::move(sockets->second), channel_options());
  std::thread loader([&] {
    auto received = receive_job(channel);
    require(received.ok(), "the job arrives");
    (void)run_job(channel, *std::move(received), backend);
  });
  Outcome outcome = Daemon(std::move(sockets->first)).run(job, std::move(fds));
  loader.join();
  return outcome;
}

Outcome load(const std::string& path, Backend& backend) { return run(make_job(path), opened(path), backend); }
Outcome load(const std::string& path) {
  FaultyBackend backend;
  return load(path, backend);
}

void overwrite(const std::string& path, uint64_t offset, const std::string& bytes) {
  const UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
  require(pwrite_full(fd.get(), weightd::testing::as_bytes(bytes), offset, path).ok(), "overwrite");
}

TEST(Loader, TheArenaHoldsWhatTheManifestSays) {
  const TempDir folder;
  make_bundle(folder / "m.wpk", {3, 4, 256, 512, Encoding::kF12});
  Outcome outcome = load(folder / "m.wpk");
  ASSERT_TRUE(outcome.status.ok()) << outcome.status.message();
  const auto bundle = store::BundleReader::open(folder / "m.wpk");
  ASSERT_TRUE(bundle.ok());
  const store::Residency& residency = *bundle->residency("fast");
  EXPECT_EQ(outcome.plan.content_id, store::to_hex(bundle->content_id()));
  EXPECT_EQ(outcome.plan.tensors_id, store::to_hex(bundle->manifest().tensors_id));
  EXPECT_EQ(outcome.plan.arena_bytes, residency.arena_bytes);
  EXPECT_EQ(outcome.plan.resident_bytes,
            std::accumulate(outcome.result.chunk_bytes.begin(), outcome.result.chunk_bytes.end(), uint64_t{0}));
  EXPECT_EQ(outcome.plan.chunk_count, outcome.chunks.size());
  EXPECT_EQ(outcome.plan.tensor_count, 5U);

  const auto arena = ipc::MappedArena::map(std::move(outcome.chunks), outcome.result.chunk_bytes);
  ASSERT_TRUE(arena.ok()) << arena.status().message();
  EXPECT_EQ(store::block_hashes(arena->bytes().first(residency.arena_bytes), 1), residency.block_hashes);
  // Byte by byte against the file.
  for (const store::Placement& placement : residency.placements) {
    for (const store::Plane& plane : bundle->manifest().storages[placement.storage].planes) {
      if (plane.kind != placement.kind) continue;
      std::vector<std::byte> bytes(placement.size_bytes);
      ASSERT_TRUE(bundle->read(plane.section, 0, bytes).ok());
      EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), arena->base() + placement.arena_offset_bytes));
    }
  }
  const auto encoded = ipc::read_sealed_memfd(outcome.table.get(), outcome.result.table_bytes, ipc::kMaxTableBytes);
  ASSERT_TRUE(encoded.ok());
  const auto table = ipc::decode_table(*encoded);
  ASSERT_TRUE(table.ok()) << table.status().message();
  EXPECT_EQ(table->block_hashes, residency.block_hashes);
  ASSERT_EQ(table->tensors.size(), 5U);
  for (const ipc::TensorEntry& tensor : table->tensors) {
    const ipc::StorageEntry& storage = table->storages.at(tensor.storage);
    EXPECT_EQ(storage.name, tensor.name);
    EXPECT_EQ(storage.encoding, tensor.dtype == DType::kBF16 ? Encoding::kF12 : Encoding::kRaw);
    EXPECT_LE(storage.data_offset + storage.data_bytes, table->arena_bytes);
  }
}

TEST(Loader, TheNumberOfThreadsChangesNothing) {
  const TempDir folder;
  make_bundle(folder / "m.wpk", {3, 4, 256, 512, Encoding::kF12});
  for (const uint32_t threads : {0U, 1U, 7U}) {
    FaultyBackend backend;
    ipc::Job job = make_job(folder / "m.wpk");
    job.threads = threads;
    const Outcome outcome = run(job, opened(folder / "m.wpk"), backend);
    EXPECT_TRUE(outcome.status.ok()) << outcome.status.message();
  }
}

TEST(Loader, ManyThreadsReadOneLargeSection) {
  const TempDir folder;
  make_bundle(folder / "m.wpk", {4, 2, 3001, 1024, Encoding::kRaw});  // 5.9 MiB each: three pieces, the last one short
  const auto bundle = store::BundleReader::open(folder / "m.wpk");
  ASSERT_TRUE(bundle.ok());
  for (const uint32_t threads : {1U, 2U, 8U}) {
    for (const uint32_t limit : {1U, 2U, 100U}) {
      FaultyBackend backend;
      backend.piece_limit = limit;
      ipc::Job job = make_job(folder / "m.wpk");
      job.threads = threads;
      Outcome outcome = run(job, opened(folder / "m.wpk"), backend);
      ASSERT_TRUE(outcome.status.ok()) << outcome.status.message();
      EXPECT_EQ(backend.pieces_out(), 0U);
      const auto arena = ipc::MappedArena::map(std::move(outcome.chunks), outcome.result.chunk_bytes);
      ASSERT_TRUE(arena.ok());
      const store::Residency& residency = *bundle->residency("fast");
      EXPECT_EQ(store::block_hashes(arena->bytes().first(residency.arena_bytes), 1), residency.block_hashes);
    }
  }
}

TEST(Loader, PiecesThatAreReadOutOfOrderAreHashedInOrder) {
  const TempDir folder;
  make_bundle(folder / "m.wpk", {4, 1, 3001, 1024, Encoding::kRaw});
  FaultyBackend backend;
  ipc::Job job = make_job(folder / "m.wpk");
  job.threads = 3;
  // The first piece of the large section arrives after the second and the third.
  std::atomic<int> others = 0;
  std::mutex mutex;
  std::condition_variable arrived;
  backend.on_upload = [&](uint64_t offset, std::span<std::byte> staged) {
    std::unique_lock<std::mutex> lock(mutex);
    if (staged.size() == kPieceBytes && offset % kPieceBytes == 0 && offset < kPieceBytes)
      arrived.wait(lock, [&] { return others >= 2; });
    else
      ++others;
    arrived.notify_all();
    return Status();
  };
  const Outcome outcome = run(job, opened(folder / "m.wpk"), backend);
  EXPECT_TRUE(outcome.status.ok()) << outcome.status.message();
}

TEST(Loader, CO_103_DamageInTheMiddleOfALargeSection) {
  const TempDir folder;
  for (const uint64_t position : {uint64_t{0}, kPieceBytes - 1, kPieceBytes, 2 * kPieceBytes + 77}) {
    make_bundle(folder / "m.wpk", {4, 2, 3001, 1024, Encoding::kRaw});
    const auto bundle = store::BundleReader::open(folder / "m.wpk");
    ASSERT_TRUE(bundle.ok());
    const store::Storage& storage = bundle->manifest().storages.at(1);
    const store::Section& section = bundle->manifest().sections.at(storage.planes.at(0).section);
    const UniqueFd fd(::open((folder / "m.wpk").c_str(), O_RDWR | O_CLOEXEC));
    std::byte byte{};
    ASSERT_TRUE(pread_full(fd.get(), {&byte, 1}, section.offset_bytes + position, "m").ok());
    byte ^= std::byte{16};
    ASSERT_TRUE(pwrite_full(fd.get(), {&byte, 1}, section.offset_bytes + position, "m").ok());
    ipc::Job job = make_job(folder / "m.wpk");
    job.threads = 4;
    FaultyBackend backend;
    backend.piece_limit = 3;
    const Outcome outcome = run(job, opened(folder / "m.wpk"), backend);
    EXPECT_EQ(outcome.status.code(), StatusCode::kCorruption);
    EXPECT_NE(outcome.status.message().find("'" + storage.name + "'"), std::string::npos) << outcome.status.message();
    EXPECT_TRUE(outcome.chunks.empty());
  }
}

TEST(Loader, CO_091_EveryPieceMayFail) {
  const TempDir folder;
  make_bundle(folder / "m.wpk", {4, 2, 3001, 1024, Encoding::kRaw});
  for (const bool stage : {false, true}) {
    bool succeeded = false;
    for (int n = 1; n < 100 && !succeeded; ++n) {
      FaultyBackend backend;
      backend.piece_limit = 2;
      std::atomic<int> step = 0;
      const auto fail_at = [&] { return ++step == n ? Status::cuda("piece " + std::to_string(n)) : Status(); };
      if (stage)
        backend.before_stage = [&](uint64_t) { return fail_at(); };
      else
        backend.on_upload = [&](uint64_t, std::span<std::byte>) { return fail_at(); };
      ipc::Job job = make_job(folder / "m.wpk");
      job.threads = 4;
      const Outcome outcome = run(job, opened(folder / "m.wpk"), backend);
      succeeded = step < n;
      EXPECT_EQ(outcome.status.code(), succeeded ? StatusCode::kOk : StatusCode::kCuda) << outcome.status.message();
      EXPECT_EQ(outcome.chunks.empty(), !succeeded);
    }
    EXPECT_TRUE(succeeded);
  }
}

TEST(Loader, ThePlanSumsUpTheEncodings) {
  const TempDir folder;
  make_bundle(folder / "m.wpk", {4, 3, 64, 256, Encoding::kF12});
  const Outcome outcome = load(folder / "m.wpk");
  ASSERT_TRUE(outcome.status.ok()) << outcome.status.message();
  const auto bundle = store::BundleReader::open(folder / "m.wpk");
  ASSERT_TRUE(bundle.ok());
  ASSERT_EQ(outcome.plan.encodings.size(), 2U);
  const ipc::EncodingSum& raw = outcome.plan.encodings[0];
  EXPECT_EQ(raw.encoding, "raw");
  EXPECT_EQ(raw.tensors, 1U);  // norm.weight
  EXPECT_EQ(raw.resident_bytes, raw.logical_bytes);
  const ipc::EncodingSum& f12 = outcome.plan.encodings[1];
  EXPECT_EQ(f12.encoding, "f12");
  EXPECT_EQ(f12.tensors, 3U);
  EXPECT_EQ(f12.logical_bytes, 3 * 64 * 256 * 2U);
  // 4 units of 4 tiles of 1536 bytes, 64 windows, 4 records of 32 bytes; and the escapes that are in the pool.
  EXPECT_EQ(f12.resident_bytes, 3 * (4 * 4 * 1536 + 64 + 4 * 32) + bundle->residency("fast")->pool_bytes);
  EXPECT_EQ(raw.logical_bytes + f12.logical_bytes, outcome.plan.logical_bytes);
}

TEST(Loader, ManyChunksComeInBatches) {
  const TempDir folder;
  make_bundle(folder / "m.wpk", {1, 3, 256, 1024, Encoding::kRaw});
  FaultyBackend backend(4096);
  ipc::Job job = make_job(folder / "m.wpk");
  job.chunk_bytes = 4096;
  const Outcome outcome = run(job, opened(folder / "m.wpk"), backend);
  ASSERT_TRUE(outcome.status.ok()) << outcome.status.message();
  EXPECT_EQ(outcome.chunks.size(), 2 * kMiB / 4096);
}

TEST(Loader, JobsThatMakeNoSense) {
  const TempDir folder;
  make_bundle(folder / "m.wpk");
  const auto refusal = [&](const ipc::Job& job, std::vector<UniqueFd> fds) {
    FaultyBackend backend;
    return run(job, std::move(fds), backend).status.code();
  };
  ipc::Job job = make_job("m");
  job.residency = "dense";
  EXPECT_EQ(refusal(job, opened(folder / "m.wpk")), StatusCode::kUnsupported);
  job = make_job("m");
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{4096}, kMiB + 1}) {
    job.chunk_bytes = bytes;
    EXPECT_EQ(refusal(job, opened(folder / "m.wpk")), StatusCode::kInvalidArgument);
  }
  job = make_job("m");
  job.kind = ipc::VerifyJob{{2 * kMiB}, kMiB};
  EXPECT_EQ(refusal(job, opened(folder / "m.wpk")), StatusCode::kCorruption) << "the table is not a sealed memfd";
}

TEST(Loader, CO_103_EveryFlippedBitIsFound) {
  const TempDir folder;
  make_bundle(folder / "m.wpk", {5, 2, 64, 256, Encoding::kF12});
  const std::string good = read_file(folder / "m.wpk");
  std::mt19937_64 random(1);
  std::vector<uint64_t> positions = {0, 8, 0x10, 0x28, 0x48, 0xff0, 4095, 4096, good.size() - 1};
  while (positions.size() < 200) positions.push_back(random() % good.size());
  for (const uint64_t position : positions) {
    std::string bad = good;
    bad[position] = static_cast<char>(bad[position] ^ (1 << random() % 8));
    write_file(folder / "bad.wpk", bad);
    const Outcome outcome = load(folder / "bad.wpk");
    EXPECT_TRUE(outcome.status.code() == StatusCode::kCorruption || outcome.status.code() == StatusCode::kUnsupported)
        << "byte " << position << ": " << outcome.status.to_string();
    EXPECT_TRUE(outcome.chunks.empty()) << "nothing of it is handed over";
    EXPECT_NE(outcome.status.message().find("bad.wpk"), std::string::npos);
  }
}

TEST(Loader, CO_103_TheMessageNamesSectionAndTensor) {
  const TempDir folder;
  make_bundle(folder / "m.wpk", {5, 2, 64, 256, Encoding::kF12});
  const auto bundle = store::BundleReader::open(folder / "m.wpk");
  ASSERT_TRUE(bundle.ok());
  const store::Storage& storage = bundle->manifest().storages.at(1);
  const store::Section& codes = bundle->manifest().sections.at(storage.planes.at(0).section);
  overwrite(folder / "m.wpk", codes.offset_bytes + 100, "X");
  const Outcome outcome = load(folder / "m.wpk");
  EXPECT_NE(outcome.status.message().find("codes of '" + storage.name + "'"), std::string::npos) << outcome.status.message();
  EXPECT_EQ(outcome.status.message().find("copy"), std::string::npos) << "the file is bad, not the copy";
}

TEST(Loader, CO_105_AGoodFileAndABadCopy) {
  const TempDir folder;
  make_bundle(folder / "m.wpk", {5, 2, 64, 256, Encoding::kF12});
  FaultyBackend backend;
  std::atomic<int> retired = 0;
  backend.on_retire = [&](uint64_t, std::span<std::byte> staged) {
    if (retired++ == 1) staged.back() ^= std::byte{1};  // after the file's checksum saw it
  };
  const Outcome outcome = load(folder / "m.wpk", backend);
  EXPECT_EQ(outcome.status.code(), StatusCode::kCorruption);
  EXPECT_NE(outcome.status.message().find("the file is good, the copy in memory is not: block 0 of 1"), std::string::npos)
      << outcome.status.message();
}

TEST(Loader, CO_089_CO_102_TheFileIsOverwrittenOrTruncatedWhileItIsRead) {
  const TempDir folder;
  for (const bool truncate : {false, true}) {
    make_bundle(folder / "m.wpk", {5, 6, 64, 256, Encoding::kRaw});
    FaultyBackend backend;
    std::atomic<bool> changed = false;
    ipc::Job job = make_job(folder / "m.wpk");
    job.threads = 1;
    backend.on_upload = [&](uint64_t, std::span<std::byte>) {
      if (changed.exchange(true)) return Status();
      if (truncate)
        require(::truncate((folder / "m.wpk").c_str(), 20'000) == 0, "truncate");
      else
        overwrite(folder / "m.wpk", 40'000, std::string(60'000, '\0'));
      return Status();
    };
    const Outcome outcome = run(job, opened(folder / "m.wpk"), backend);
    EXPECT_EQ(outcome.status.code(), StatusCode::kCorruption) << outcome.status.message();
    EXPECT_TRUE(outcome.chunks.empty());
  }
}

TEST(Loader, CO_089_AChangeBehindTheReadersBackFailsTheLoadToo) {
  const TempDir folder;
  make_bundle(folder / "m.wpk", {5, 2, 64, 256, Encoding::kRaw});
  FaultyBackend backend;
  std::atomic<uint64_t> uploads = 0;
  backend.on_upload = [&](uint64_t, std::span<std::byte>) {
    // The same bytes again: no checksum can see it, but somebody writes to this file.
    if (++uploads == 3) {
      const std::string same = read_file(folder / "m.wpk").substr(0, 1);
      overwrite(folder / "m.wpk", 0, same);
      const timespec times[2] = {{1, 0}, {1, 0}};
      require(::utimensat(AT_FDCWD, (folder / "m.wpk").c_str(), times, 0) == 0, "utimensat");
    }
    return Status();
  };
  const Outcome outcome = load(folder / "m.wpk", backend);
  EXPECT_FALSE(outcome.status.ok());
  EXPECT_TRUE(outcome.chunks.empty());
}

TEST(Loader, CO_089_ANewFileUnderTheNameChangesNothing) {
  const TempDir folder;
  make_bundle(folder / "m.wpk", {5});
  make_bundle(folder / "n.wpk", {6});
  FaultyBackend backend;
  backend.on_upload = [&](uint64_t, std::span<std::byte>) {
    (void)::rename((folder / "n.wpk").c_str(), (folder / "m.wpk").c_str());
    return Status();
  };
  const auto before = store::BundleReader::open(folder / "m.wpk");
  ASSERT_TRUE(before.ok());
  const Outcome outcome = load(folder / "m.wpk", backend);
  // A rename over it changes the link count of the open file only; whether that counts as a change is the reader's business, but
  // what is loaded is the old content.
  if (outcome.status.ok()) {
    EXPECT_EQ(outcome.plan.content_id, store::to_hex(before->content_id()));
  }
  EXPECT_TRUE(outcome.planned);
}

TEST(Loader, CO_091_TheNthStepFails) {
  const TempDir folder;
  make_bundle(folder / "m.wpk", {5, 3, 64, 256, Encoding::kRaw});
  bool succeeded = false;
  for (int n = 1; n < 100 && !succeeded; ++n) {
    FaultyBackend backend;
    std::atomic<int> step = 0;
    const auto fail_at = [&] { return ++step == n ? Status::resource_exhausted("step " + std::to_string(n)) : Status(); };
    backend.before_allocate = fail_at;
    backend.on_upload = [&](uint64_t, std::span<std::byte>) { return fail_at(); };
    backend.before_seal = fail_at;
    backend.before_hash = fail_at;
    const Outcome outcome = load(folder / "m.wpk", backend);
    succeeded = step < n;
    EXPECT_EQ(outcome.status.ok(), succeeded);
    if (succeeded) continue;
    EXPECT_EQ(outcome.status.code(), StatusCode::kResourceExhausted);
    EXPECT_NE(outcome.status.message().find("step " + std::to_string(n)), std::string::npos) << outcome.status.message();
  }
  EXPECT_TRUE(succeeded);
}

TEST(Loader, BytesThatADecoderCouldNotTrustAreRefused) {
  const TempDir folder;
  make_bundle(folder / "m.wpk", {5, 1, 64, 256, Encoding::kF12});
  const auto bundle = store::BundleReader::open(folder / "m.wpk");
  ASSERT_TRUE(bundle.ok());
  // The same bundle written again with a window that no encoder makes, and every checksum right.
  const std::string path = folder / "evil.wpk";
  {
    auto writer = store::BundleWriter::create(path, 0);
    ASSERT_TRUE(writer.ok());
    store::Manifest manifest = bundle->manifest();
    std::vector<std::byte> arena(manifest.residencies[0].arena_bytes);
    const store::Storage& coded = *std::find_if(manifest.storages.begin(), manifest.storages.end(),
                                                [](const store::Storage& s) { return s.encoding == Encoding::kF12; });
    for (uint32_t i = 0; i < manifest.sections.size(); ++i) {
      std::vector<std::byte> bytes(manifest.sections[i].size_bytes);
      ASSERT_TRUE(bundle->read(i, 0, bytes).ok());
      if (i == coded.planes[1].section) bytes[3] = std::byte{121};
      writer->begin_section();
      ASSERT_TRUE(writer->append(bytes).ok());
      ASSERT_TRUE(writer->end_section().ok());
      for (const store::Placement& placement : manifest.residencies[0].placements) {
        for (const store::Plane& plane : manifest.storages[placement.storage].planes) {
          if (plane.section == i && plane.kind == placement.kind) {
            std::copy(bytes.begin(), bytes.end(), arena.begin() + static_cast<ptrdiff_t>(placement.arena_offset_bytes));
          }
        }
      }
    }
    manifest.residencies[0].block_hashes = store::block_hashes(arena, 1);
    ASSERT_TRUE(writer->commit(manifest).ok());
  }
  const Outcome outcome = load(path);
  EXPECT_EQ(outcome.status.code(), StatusCode::kCorruption) << outcome.status.message();
  EXPECT_NE(outcome.status.message().find("'layers.0.weight'"), std::string::npos) << outcome.status.message();
}

TEST(Loader, CO_105_VerificationFindsTheDamagedBlockAndNamesTheTensors) {
  const TempDir folder;
  make_bundle(folder / "m.wpk", {5, 3, 512, 1024, Encoding::kRaw});
  const auto bundle = store::BundleReader::open(folder / "m.wpk");
  ASSERT_TRUE(bundle.ok());
  const store::Residency& residency = *bundle->residency("fast");
  const ipc::TensorTable table = make_table(*bundle, residency);
  ASSERT_EQ(table.storages.at(1).name, "layers.1.weight");
  // An arena as loaded, with one bit of the second layer flipped.
  const auto chunk_bytes = ipc::cut_chunks(residency.arena_bytes, 2 * kMiB, kMiB);
  auto arena = ipc::WritableArena::create(chunk_bytes, "test");
  ASSERT_TRUE(arena.ok());
  for (const store::Placement& placement : residency.placements) {
    const auto& planes = bundle->manifest().storages[placement.storage].planes;
    const auto out = arena->bytes().subspan(placement.arena_offset_bytes, placement.size_bytes);
    ASSERT_TRUE(bundle->read(planes.front().section, 0, out).ok());
  }
  const uint64_t position = table.storages.at(1).data_offset + kMiB / 2;
  arena->bytes()[position] ^= std::byte{4};
  auto chunks = std::move(*arena).seal();
  ASSERT_TRUE(chunks.ok());
  std::vector<UniqueFd> fds(1);
  auto sealed = ipc::sealed_memfd(ipc::encode(table), "table");
  ASSERT_TRUE(sealed.ok());
  fds.front() = *std::move(sealed);
  for (UniqueFd& chunk : *chunks) fds.push_back(std::move(chunk));
  ipc::Job job = make_job("m");
  job.kind = ipc::VerifyJob{chunk_bytes, residency.arena_bytes};
  job.fd_count = static_cast<uint32_t>(fds.size());
  FaultyBackend backend;
  const Outcome outcome = run(job, std::move(fds), backend);
  ASSERT_TRUE(outcome.status.ok()) << outcome.status.message();
  EXPECT_EQ(outcome.verified.blocks, residency.arena_bytes / kMiB);
  EXPECT_EQ(outcome.verified.bad_blocks, std::vector<uint64_t>{position / kMiB});
  const auto& names = outcome.verified.bad_tensors;
  EXPECT_NE(std::find(names.begin(), names.end(), "layers.1.weight"), names.end());
  EXPECT_EQ(std::find(names.begin(), names.end(), "layers.2.weight") != names.end(),
            table.storages.at(2).data_offset / kMiB == position / kMiB);
}

TEST(Loader, TheProgramEndsWithItsDaemon) {
  auto sockets = ipc::socket_pair();
  ASSERT_TRUE(sockets.ok());
  const pid_t pid = ::fork();
  ASSERT_GE(pid, 0);
  if (pid == 0) {
    ::dup2(sockets->second.get(), 3);
    ::execl(WEIGHTD_LOADER_PROGRAM, "weightd-loader", nullptr);
    ::_exit(127);
  }
  sockets->second.reset();
  // It lives as long as its daemon: its preamble shows that it runs.
  ipc::Channel channel(std::move(sockets->first), channel_options());
  ASSERT_TRUE(channel.flush(soon()).ok());
  pollfd spoken{channel.fd(), POLLIN, 0};
  ASSERT_EQ(::poll(&spoken, 1, 30'000), 1);
  ASSERT_EQ(spoken.revents, POLLIN);
  ::shutdown(channel.fd(), SHUT_RDWR);
  int status = 0;
  ASSERT_EQ(::waitpid(pid, &status, 0), pid);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_NE(WEXITSTATUS(status), 0);
  EXPECT_NE(WEXITSTATUS(status), 127);
}

bool driver_is_here() { return ::dlopen("libcuda.so.1", RTLD_NOW) != nullptr; }

TEST(Loader, TheProgramAnswersAProbeAlsoWithoutADriver) {
  LoaderProgram loader(WEIGHTD_LOADER_PROGRAM);
  ipc::Job job;
  job.kind = ipc::ProbeJob{true};
  job.backend = "cuda";
  const Outcome outcome = loader.run(job, {});
  ASSERT_TRUE(outcome.status.ok()) << outcome.status.message();
  if (!driver_is_here()) {
    EXPECT_NE(outcome.probe.problem.find("CUDA"), std::string::npos) << outcome.probe.problem;
    EXPECT_TRUE(outcome.probe.gpus.empty());
  }
  EXPECT_EQ(loader.wait(), 0);
}

TEST(Loader, TheProgramRefusesWhatThisMachineCannotDo) {
  const TempDir folder;
  make_bundle(folder / "m.wpk");
  ipc::Job job = make_job(folder / "m.wpk");
  job.transport = "legacy";
  LoaderProgram legacy(WEIGHTD_LOADER_PROGRAM);
  EXPECT_EQ(legacy.run(job, opened(folder / "m.wpk")).status.code(), StatusCode::kUnsupported);
  EXPECT_EQ(legacy.wait(), 1);
  job = make_job(folder / "m.wpk");
  job.backend = "cuda";
  job.device = "GPU-00000000-0000-0000-0000-000000000000";
  LoaderProgram cuda(WEIGHTD_LOADER_PROGRAM);
  const Outcome outcome = cuda.run(job, opened(folder / "m.wpk"));
  EXPECT_FALSE(outcome.status.ok());
  EXPECT_FALSE(outcome.planned);
  if (!driver_is_here()) {
    EXPECT_TRUE(outcome.status.code() == StatusCode::kUnavailable || outcome.status.code() == StatusCode::kUnsupported);
  }
  EXPECT_EQ(cuda.wait(), 1);
}

TEST(Loader, TheProgramLoadsOnTheHost) {
  const TempDir folder;
  make_bundle(folder / "m.wpk");
  LoaderProgram loader(WEIGHTD_LOADER_PROGRAM);
  const Outcome outcome = loader.run(make_job(folder / "m.wpk"), opened(folder / "m.wpk"));
  EXPECT_TRUE(outcome.status.ok()) << outcome.status.message();
  EXPECT_EQ(outcome.chunks.size(), 1U);
  EXPECT_EQ(loader.wait(), 0);
}

TEST(Loader, TheProgramIsNotForPeople) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::close(3);
    const int null = ::open("/dev/null", O_WRONLY);
    ::dup2(null, STDERR_FILENO);
    ::close(3);
    ::execl(WEIGHTD_LOADER_PROGRAM, "weightd-loader", nullptr);
    ::_exit(127);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(pid, &status, 0), pid);
  EXPECT_EQ(WIFEXITED(status) ? WEXITSTATUS(status) : -1, 2);
}

}  // namespace
}  // namespace weightd::loader
