// SPDX-License-Identifier: Apache-2.0
// Loads, leases and what goes wrong with them, through the real daemon and loader.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <functional>

#include "ipc/memfd.h"
#include "store/hash.h"
#include "tests/support/daemon_fixture.h"
#include "tests/support/raw_peer.h"
#include "tests/support/test_bundle.h"

namespace weightd::daemon {
namespace {

using ::weightd::testing::DaemonFixture;
using ::weightd::testing::DaemonOptions;
using ::weightd::testing::eventually;
using ::weightd::testing::make_bundle;
using ::weightd::testing::RawPeer;
using ::weightd::testing::read_file;
using ::weightd::testing::require;
using ::weightd::testing::TestBundle;
using ::weightd::testing::write_file;

constexpr uint64_t kMiB = uint64_t{1} << 20;

DaemonOptions with(const std::string& config) {
  DaemonOptions options;
  options.config = config;
  return options;
}

Result<ipc::ModelSummary> load(const DaemonFixture& daemon, const std::string& model, const std::string& path,
                               uint32_t timeout_ms = 0) {
  RawPeer admin(daemon.control_socket());
  auto reply = admin.get<ipc::LoadedReply>(ipc::LoadRequest{model, path, "", timeout_ms});
  if (!reply.ok()) return reply.status();
  return reply->model;
}
Result<ipc::UnloadedReply> unload(const DaemonFixture& daemon, const std::string& model, uint32_t timeout_ms = 0) {
  RawPeer admin(daemon.control_socket());
  return admin.get<ipc::UnloadedReply>(ipc::UnloadRequest{model, "", timeout_ms});
}
ipc::StatusReply status_of(const DaemonFixture& daemon) {
  RawPeer admin(daemon.control_socket());
  auto status = admin.get<ipc::StatusReply>(ipc::StatusRequest{});
  require(status.ok(), "status: " + status.status().message());
  return *status;
}
std::vector<ipc::LeaseSummary> leases_of(const DaemonFixture& daemon) {
  RawPeer admin(daemon.control_socket());
  auto leases = admin.get<ipc::LeasesReply>(ipc::LeasesRequest{});
  require(leases.ok(), "leases");
  return leases->leases;
}
int64_t orphans_of(const DaemonFixture& daemon) {
  const auto leases = leases_of(daemon);
  return std::count_if(leases.begin(), leases.end(), [](const ipc::LeaseSummary& lease) { return lease.orphan; });
}
Result<ipc::AcquiredReply> acquire(RawPeer& worker, const std::string& model, uint32_t wait_ms = 0,
                                   const std::string& content = "") {
  return worker.get<ipc::AcquiredReply>(ipc::AcquireRequest{model, "", wait_ms, content});
}

/// The loader of test_loader.cc.
DaemonOptions test_loader(const std::string& behaviour, const std::string& config = "") {
  DaemonOptions options = with("loader_path = \"" WEIGHTD_TEST_LOADER_PROGRAM "\"\n" + config);
  options.environment["WEIGHTD_TEST_LOADER"] = behaviour;
  return options;
}

/// A loader that never gets anywhere, or ends as told: what a hung or crashed one looks like.
std::string fake_loader(const DaemonFixture& daemon, const std::string& script) {
  const std::string path = daemon / "fake-loader";
  write_file(path, "#!/bin/sh\n" + script + "\n");
  require(::chmod(path.c_str(), 0755) == 0, "chmod");
  return "loader_path = \"" + path + "\"\n";
}
/// A daemon whose loaders are fake ones.
class FakeLoaders {
 public:
  explicit FakeLoaders(const std::string& script, const std::string& config = "") : daemon(stopped()) {
    daemon.write_config(fake_loader(daemon, script) + config);
    daemon.start();
    make_bundle(daemon / "m.wpk");
  }
  DaemonFixture daemon;

 private:
  static DaemonOptions stopped() {
    DaemonOptions options;
    options.start = false;
    return options;
  }
};

/// A worker process that holds a lease on `model` until it is killed or told to end.
class Holder {
 public:
  Holder(const DaemonFixture& daemon, const std::string& model) {
    std::array<int, 2> ready{}, end{};
    require(::pipe2(ready.data(), O_CLOEXEC) == 0 && ::pipe2(end.data(), O_CLOEXEC) == 0, "pipe");
    pid_ = ::fork();
    require(pid_ >= 0, "fork");
    if (pid_ == 0) {
      ::close(end[1]);
      RawPeer worker(daemon.data_socket());
      const auto lease = acquire(worker, model, 10'000);
      const char outcome = lease.ok() ? 'y' : 'n';
      (void)!::write(ready[1], &outcome, 1);
      char byte = 0;
      (void)!::read(end[0], &byte, 1);
      ::_exit(0);
    }
    ::close(ready[1]);
    ::close(end[0]);
    end_ = UniqueFd(end[1]);
    const UniqueFd from(ready[0]);
    char outcome = 'n';
    require(::read(from.get(), &outcome, 1) == 1 && outcome == 'y', "the worker has its lease");
  }
  Holder(const Holder&) = delete;
  Holder& operator=(const Holder&) = delete;
  ~Holder() {
    if (pid_ > 0) kill();
  }
  [[nodiscard]] pid_t pid() const { return pid_; }
  void signal(int number) const { require(::kill(pid_, number) == 0, "kill"); }
  void kill() {
    signal(SIGKILL);
    reap();
  }
  void reap() {
    int status = 0;
    require(::waitpid(pid_, &status, 0) == pid_, "waitpid");
    pid_ = 0;
  }

 private:
  pid_t pid_ = 0;
  UniqueFd end_;
};

void flip_bit(const std::string& path, uint64_t offset) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(static_cast<std::streamoff>(offset));
  const char byte = static_cast<char>(file.get() ^ 0x10);
  file.seekp(static_cast<std::streamoff>(offset));
  file.put(byte);
  require(file.good(), "flip a bit in " + path);
}

// --- the good way --------------------------------------------------------------------------------------------------------

TEST(Load, AModelIsLoadedLeasedMappedVerifiedAndUnloaded) {
  DaemonFixture daemon(with("chunk_bytes = \"2MiB\"\n"));
  make_bundle(daemon / "m.wpk", {7, 5, 512, 1024, Encoding::kF12});
  const auto model = load(daemon, "m", daemon / "m.wpk");
  ASSERT_TRUE(model.ok()) << model.status().message();
  EXPECT_EQ(model->state, ipc::GenerationState::kPublished);
  EXPECT_EQ(model->source, daemon / "m.wpk");
  EXPECT_EQ(model->tensor_count, 6U);
  EXPECT_EQ(model->logical_bytes, 5 * 512 * 1024 * 2 + 4 * 1024U);
  EXPECT_EQ(model->content_id.size(), 64U);
  EXPECT_EQ(model->resident_bytes % kMiB, 0U);

  RawPeer worker(daemon.data_socket());
  const auto lease = acquire(worker, "m");
  ASSERT_TRUE(lease.ok()) << lease.status().message();
  EXPECT_EQ(lease->model.source, "") << "workers see no paths";
  EXPECT_EQ(lease->model.content_id, model->content_id);
  EXPECT_EQ(lease->fd_count, 1 + lease->chunk_bytes.size());
  EXPECT_GE(lease->chunk_bytes.size(), 2U);
  ASSERT_EQ(worker.fds().size(), lease->fd_count);

  std::vector<UniqueFd> fds = std::move(worker.fds());
  const auto encoded = ipc::read_sealed_memfd(fds.front().get(), lease->table_bytes, ipc::kMaxTableBytes);
  ASSERT_TRUE(encoded.ok()) << encoded.status().message();
  const auto table = ipc::decode_table(*encoded);
  ASSERT_TRUE(table.ok()) << table.status().message();
  EXPECT_EQ(table->content_id, model->content_id);
  EXPECT_EQ(table->tensors.size(), 6U);
  EXPECT_EQ(table->arena_bytes, lease->arena_bytes);
  fds.erase(fds.begin());
  const auto arena = ipc::MappedArena::map(std::move(fds), lease->chunk_bytes);
  ASSERT_TRUE(arena.ok()) << arena.status().message();
  EXPECT_EQ(store::block_hashes(arena->bytes().first(lease->arena_bytes), 1), table->block_hashes);

  RawPeer admin(daemon.control_socket());
  const auto verified = admin.get<ipc::VerifiedReply>(ipc::VerifyRequest{"m"});
  ASSERT_TRUE(verified.ok()) << verified.status().message();
  EXPECT_EQ(verified->blocks, lease->arena_bytes / kMiB);
  EXPECT_TRUE(verified->bad_blocks.empty());

  const ipc::StatusReply status = status_of(daemon);
  EXPECT_EQ(status.devices.front().leased_bytes, model->resident_bytes);
  EXPECT_EQ(status.lease_count, 1U);
  const auto leases = leases_of(daemon);
  ASSERT_EQ(leases.size(), 1U);
  EXPECT_EQ(leases.front().pid, ::getpid());
  EXPECT_EQ(leases.front().bytes, model->resident_bytes);
  EXPECT_FALSE(leases.front().orphan);

  ASSERT_TRUE(worker.get<ipc::ReleasedReply>(ipc::ReleaseRequest{lease->lease}).ok());
  const auto unloaded = unload(daemon, "m");
  ASSERT_TRUE(unloaded.ok());
  EXPECT_TRUE(unloaded->freed);
  EXPECT_EQ(unloaded->bytes, model->resident_bytes);
  EXPECT_TRUE(status_of(daemon).models.empty());
  EXPECT_EQ(status_of(daemon).devices.front().owned_bytes, 0U);
  const std::string log = daemon.log();
  EXPECT_NE(log.find(": load 'm' from '" + daemon / "m.wpk" + "': done\n"), std::string::npos) << log;
  EXPECT_NE(log.find("model 'm' published: generation 1, "), std::string::npos) << log;
  EXPECT_NE(log.find(": unload 'm': freed "), std::string::npos) << log;
}

TEST(Load, RawBundlesToo) {
  DaemonFixture daemon;
  make_bundle(daemon / "raw.wpk", {1, 2, 64, 256, Encoding::kRaw});
  ASSERT_TRUE(load(daemon, "raw", daemon / "raw.wpk").ok());
  RawPeer worker(daemon.data_socket());
  EXPECT_TRUE(acquire(worker, "raw").ok());
}

TEST(Load, MoreChunksThanOneMessageCarries) {
  DaemonFixture daemon(test_loader("small-chunks"));
  make_bundle(daemon / "big.wpk", {1, 3, 256, 1024, Encoding::kRaw});
  const auto model = load(daemon, "big", daemon / "big.wpk");
  ASSERT_TRUE(model.ok()) << model.status().message();
  RawPeer worker(daemon.data_socket());
  const auto lease = acquire(worker, "big");
  ASSERT_TRUE(lease.ok());
  ASSERT_GT(lease->fd_count, ipc::kMaxFdsPerFrame);
  EXPECT_EQ(worker.fds().size(), ipc::kMaxFdsPerFrame);
  size_t got = worker.fds().size();
  while (got < lease->fd_count) {
    const auto more = worker.receive();
    ASSERT_TRUE(more.ok());
    EXPECT_EQ(std::get<ipc::MoreFdsReply>(more->body).count, worker.fds().size());
    got += worker.fds().size();
  }
  EXPECT_EQ(got, lease->fd_count);
  RawPeer admin(daemon.control_socket());
  const auto verified = admin.get<ipc::VerifiedReply>(ipc::VerifyRequest{"big"});
  ASSERT_TRUE(verified.ok()) << verified.status().message();
  EXPECT_TRUE(verified->bad_blocks.empty());
}

TEST(Load, EventsReachTheWorkers) {
  DaemonFixture daemon;
  make_bundle(daemon / "m.wpk");
  RawPeer listener(daemon.data_socket()), holder(daemon.data_socket());
  ASSERT_TRUE(listener.ask(ipc::HelloRequest{}).ok() && holder.ask(ipc::HelloRequest{}).ok());
  ASSERT_TRUE(load(daemon, "m", daemon / "m.wpk").ok());
  const auto published = listener.receive();
  ASSERT_TRUE(published.ok());
  const auto& event = std::get<ipc::EventReply>(published->body).event;
  EXPECT_EQ(std::get<ipc::PublishedEvent>(event).model.name, "m");
  EXPECT_EQ(std::get<ipc::PublishedEvent>(event).model.source, "");
  ASSERT_TRUE(acquire(holder, "m").ok());
  ASSERT_TRUE(unload(daemon, "m", 1).ok());
  const auto drain = holder.receive();
  ASSERT_TRUE(drain.ok());
  EXPECT_TRUE(std::holds_alternative<ipc::DrainRequestedEvent>(std::get<ipc::EventReply>(drain->body).event));
  ASSERT_TRUE(listener.ask(ipc::HelloRequest{}).ok());
  EXPECT_TRUE(listener.events().empty()) << "a drain concerns its holders";
}

TEST(Load, CO_079_SixteenAtOnceAreOneLoad) {
  DaemonFixture daemon;
  make_bundle(daemon / "m.wpk");
  for (int round = 0; round < 5; ++round) {
    std::vector<std::unique_ptr<RawPeer>> admins;
    for (int i = 0; i < 16; ++i) {
      admins.push_back(std::make_unique<RawPeer>(daemon.control_socket()));
      admins.back()->send({1, ipc::LoadRequest{"m", daemon / "m.wpk", "", 0}});
    }
    uint64_t generation = 0;
    for (const auto& admin : admins) {
      const auto reply = RawPeer::as<ipc::LoadedReply>(admin->answer_to(1));
      ASSERT_TRUE(reply.ok()) << reply.status().message();
      if (generation == 0) generation = reply->model.generation;
      EXPECT_EQ(reply->model.generation, generation);
    }
    EXPECT_EQ(status_of(daemon).models.size(), 1U);
    EXPECT_EQ(status_of(daemon).devices.front().owned_bytes, kMiB);
    ASSERT_TRUE(unload(daemon, "m").ok());
  }
}

TEST(Load, TheSameContentIsThereAlreadyOtherContentIsRefused) {
  DaemonFixture daemon;
  make_bundle(daemon / "a.wpk", {1});
  make_bundle(daemon / "same.wpk", {1});
  make_bundle(daemon / "other.wpk", {2});
  const auto first = load(daemon, "m", daemon / "a.wpk");
  ASSERT_TRUE(first.ok());
  const auto same = load(daemon, "m", daemon / "same.wpk");
  ASSERT_TRUE(same.ok()) << same.status().message();
  EXPECT_EQ(same->generation, first->generation);
  EXPECT_EQ(load(daemon, "m", daemon / "other.wpk").status().code(), StatusCode::kAlreadyExists);
  EXPECT_EQ(status_of(daemon).models.size(), 1U);
  EXPECT_TRUE(load(daemon, "n", daemon / "other.wpk").ok());
}

TEST(Load, CO_081_TwinsShareNothing) {
  DaemonFixture daemon;
  make_bundle(daemon / "m.wpk");
  ASSERT_TRUE(load(daemon, "a", daemon / "m.wpk").ok());
  ASSERT_TRUE(load(daemon, "b", daemon / "m.wpk").ok());
  EXPECT_EQ(status_of(daemon).devices.front().owned_bytes, 2 * kMiB);
  ASSERT_TRUE(unload(daemon, "a").ok());
  RawPeer admin(daemon.control_socket());
  const auto verified = admin.get<ipc::VerifiedReply>(ipc::VerifyRequest{"b"});
  ASSERT_TRUE(verified.ok());
  EXPECT_TRUE(verified->bad_blocks.empty());
}

// --- desired state -------------------------------------------------------------------------------------------------------

TEST(Load, DesiredModelsAreLoadedAndReadyMayWaitForThem) {
  DaemonOptions options;
  options.start = false;
  DaemonFixture daemon(options);
  make_bundle(daemon / "m.wpk");
  daemon.write_config(
      "ready_after = \"models\"\n[[model]]\nname = \"good\"\npath = \"m.wpk\"\n[[model]]\nname = \"bad\"\npath = "
      "\"missing.wpk\"\n");
  daemon.start();
  const auto models = status_of(daemon).models;
  ASSERT_EQ(models.size(), 1U);
  EXPECT_EQ(models.front().name, "good");
  EXPECT_EQ(models.front().state, ipc::GenerationState::kPublished);
  daemon.wait_for_log("[[model]] 'bad' was not loaded: bundle '" + daemon / "missing.wpk" + "'");
}

TEST(Load, AWorkerMayWaitForADesiredModel) {
  DaemonOptions options;
  options.start = false;
  DaemonFixture daemon(options);
  make_bundle(daemon / "m.wpk");
  daemon.write_config("[[model]]\nname = \"m\"\npath = \"m.wpk\"\n");
  daemon.start();
  RawPeer worker(daemon.data_socket());
  EXPECT_TRUE(acquire(worker, "m", 30'000).ok());
}

TEST(Load, AReloadLoadsWhatIsNewlyDesired) {
  DaemonFixture daemon;
  make_bundle(daemon / "m.wpk");
  daemon.write_config("[[model]]\nname = \"m\"\npath = \"m.wpk\"\n");
  daemon.signal(SIGHUP);
  RawPeer worker(daemon.data_socket());
  EXPECT_TRUE(acquire(worker, "m", 30'000).ok());
}

// --- bad bundles ---------------------------------------------------------------------------------------------------------

TEST(Load, CO_085_NoBadBundleHurtsWhatIsThere) {
  DaemonFixture daemon(with("budget_bytes = \"8MiB\"\n"));
  make_bundle(daemon / "good.wpk");
  ASSERT_TRUE(load(daemon, "good", daemon / "good.wpk").ok());
  RawPeer worker(daemon.data_socket());
  ASSERT_TRUE(acquire(worker, "good").ok());
  const std::string bytes = read_file(daemon / "good.wpk");

  write_file(daemon / "truncated.wpk", bytes.substr(0, bytes.size() / 2));
  write_file(daemon / "flipped.wpk", bytes);
  flip_bit(daemon / "flipped.wpk", 3 * 4096 + 17);
  write_file(daemon / "text.wpk", "not a bundle at all");
  make_bundle(daemon / "big.wpk", {1, 4, 1024, 1024, Encoding::kRaw});
  const std::vector<std::pair<std::string, StatusCode>> cases = {{"truncated.wpk", StatusCode::kCorruption},
                                                                 {"flipped.wpk", StatusCode::kCorruption},
                                                                 {"text.wpk", StatusCode::kCorruption},
                                                                 {"missing.wpk", StatusCode::kNotFound},
                                                                 {"big.wpk", StatusCode::kResourceExhausted}};
  for (const auto& [file, code] : cases) {
    const auto refused = load(daemon, "new", daemon / file);
    EXPECT_EQ(refused.status().code(), code) << file << ": " << refused.status().message();
    EXPECT_NE(
        refused.status().message().find(code == StatusCode::kResourceExhausted ? "needs 9.0 MiB, 7.0 MiB free of 8.0 MiB" : file),
        std::string::npos)
        << refused.status().message();
    EXPECT_EQ(status_of(daemon).devices.front().owned_bytes, kMiB);
    EXPECT_EQ(status_of(daemon).devices.front().loading_bytes, 0U);
    RawPeer other(daemon.data_socket());
    const auto lease = acquire(other, "good");
    ASSERT_TRUE(lease.ok());
    ASSERT_TRUE(other.get<ipc::ReleasedReply>(ipc::ReleaseRequest{lease->lease}).ok());
  }
  // The failure stays visible to administrators; workers learn no path.
  eventually("the failure is shown", [&] {
    const auto models = status_of(daemon).models;
    return std::any_of(models.begin(), models.end(), [](const ipc::ModelSummary& model) {
      return model.name == "new" && model.state == ipc::GenerationState::kFailed && !model.failure.empty();
    });
  });
  const auto listed = worker.get<ipc::ModelsReply>(ipc::ListRequest{});
  ASSERT_TRUE(listed.ok());
  for (const auto& model : listed->models) EXPECT_EQ((model.source + model.failure).find('/'), std::string::npos);
}

TEST(Load, CO_125_NoErrorOfAWorkerHoldsAPath) {
  DaemonFixture daemon;
  write_file(daemon / "secret.wpk", "not a bundle");
  EXPECT_FALSE(load(daemon, "m", daemon / "secret.wpk").ok());
  RawPeer worker(daemon.data_socket());
  for (const char* model : {"m", "secret", "../secret.wpk"}) {
    const auto refused = acquire(worker, model, 1);
    EXPECT_EQ(refused.status().message().find(daemon.folder()), std::string::npos) << refused.status().message();
  }
}

TEST(Load, CO_100_ShorterThanItsTableSays) {
  DaemonFixture daemon;
  make_bundle(daemon / "m.wpk");
  const std::string bytes = read_file(daemon / "m.wpk");
  for (const size_t size : {size_t{0}, size_t{1}, size_t{7}, size_t{8}, size_t{64}, size_t{4095}, size_t{4096}, bytes.size() / 2,
                            bytes.size() - 4096, bytes.size() - 1}) {
    write_file(daemon / "cut.wpk", bytes.substr(0, size));
    const auto refused = load(daemon, "m", daemon / "cut.wpk");
    EXPECT_EQ(refused.status().code(), StatusCode::kCorruption) << size << ": " << refused.status().message();
    EXPECT_NE(refused.status().message().find("have " + std::to_string(size)), std::string::npos) << refused.status().message();
  }
  EXPECT_EQ(status_of(daemon).devices.front().free_bytes, status_of(daemon).devices.front().budget_bytes);
}

TEST(Load, CO_101_TheTailIsZeros) {
  DaemonFixture daemon;
  make_bundle(daemon / "m.wpk", {1, 2, 256, 256, Encoding::kRaw});
  std::string bytes = read_file(daemon / "m.wpk");
  std::fill(bytes.begin() + 4096 * 40, bytes.begin() + 4096 * 60, '\0');  // inside the second layer
  write_file(daemon / "m.wpk", bytes);
  const auto refused = load(daemon, "m", daemon / "m.wpk");
  EXPECT_EQ(refused.status().code(), StatusCode::kCorruption);
  EXPECT_NE(refused.status().message().find("'layers.1.weight'"), std::string::npos) << refused.status().message();
}

TEST(Load, CO_126_PathsOutsideTheModelFolders) {
  DaemonFixture daemon(with("model_folders = [\"store\"]\n"));
  ASSERT_EQ(::mkdir((daemon / "store").c_str(), 0755), 0);
  make_bundle(daemon / "outside.wpk");
  make_bundle(daemon / "store/inside.wpk");
  ASSERT_EQ(::symlink("../outside.wpk", (daemon / "store/link.wpk").c_str()), 0);
  ASSERT_EQ(::symlink((daemon / "outside.wpk").c_str(), (daemon / "store/abs.wpk").c_str()), 0);
  ASSERT_EQ(::symlink("inside.wpk", (daemon / "store/good-link.wpk").c_str()), 0);
  ASSERT_EQ(::mkfifo((daemon / "store/fifo").c_str(), 0600), 0);
  ASSERT_EQ(::mkdir((daemon / "store/folder").c_str(), 0755), 0);
  const auto refusal = [&](const std::string& path) { return load(daemon, "m", path).status(); };
  const auto expect_outside = [&](const std::string& path) {
    const Status status = refusal(path);
    EXPECT_EQ(status.code(), StatusCode::kNotFound) << status.message();
    EXPECT_EQ(status.message(), "bundle '" + path + "': no such file in the folders that loads are allowed from (model_folders)");
  };
  // Existing or not, outside or missing inside: no difference.
  for (const char* path :
       {"outside.wpk", "nothing.wpk", "store/../outside.wpk", "store/../nothing.wpk", "store/folder/../../outside.wpk",
        "store/link.wpk", "store/abs.wpk", "store/missing.wpk", "storehouse/x.wpk", "store"}) {
    expect_outside(daemon / path);
  }
  expect_outside("/etc/passwd");
  expect_outside("/proc/self/fd/0");
  for (const char* path : {"store/fifo", "store/folder"})
    EXPECT_EQ(refusal(daemon / path).code(), StatusCode::kInvalidArgument) << path;
  for (const char* path : {"", "inside.wpk", "../inside.wpk"})
    EXPECT_EQ(refusal(path).code(), StatusCode::kInvalidArgument) << path;
  EXPECT_TRUE(load(daemon, "m", daemon / "store/good-link.wpk").ok());
  EXPECT_TRUE(load(daemon, "n", daemon / "store//folder/.././inside.wpk").ok());
}

TEST(Load, CO_126_AnyPathIsAnOptionForThePrivileged) {
  DaemonFixture daemon(with("model_folders = []\nallow_any_path = true\n"));
  make_bundle(daemon / "m.wpk");
  EXPECT_TRUE(load(daemon, "m", daemon / "m.wpk").ok());
  EXPECT_EQ(load(daemon, "n", "/dev/zero").status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(load(daemon, "n", daemon / "missing").status().code(), StatusCode::kNotFound);
}

TEST(Load, CO_089_TheFileIsNotNeededAfterTheLoad) {
  DaemonFixture daemon;
  make_bundle(daemon / "m.wpk");
  ASSERT_TRUE(load(daemon, "m", daemon / "m.wpk").ok());
  write_file(daemon / "m.wpk", std::string(100, 'x'));
  ASSERT_EQ(::unlink((daemon / "m.wpk").c_str()), 0);
  RawPeer admin(daemon.control_socket());
  const auto verified = admin.get<ipc::VerifiedReply>(ipc::VerifyRequest{"m"});
  ASSERT_TRUE(verified.ok());
  EXPECT_TRUE(verified->bad_blocks.empty());
}

// --- budget --------------------------------------------------------------------------------------------------------------

TEST(Load, CO_090_TooBigIsRefusedWithTheArithmeticAndLaterItFits) {
  DaemonFixture daemon(with("budget_bytes = \"3MiB\"\n"));
  make_bundle(daemon / "two.wpk", {1, 1, 512, 1536, Encoding::kRaw});  // 1.5 MiB and a little: 2 blocks
  make_bundle(daemon / "other.wpk", {2, 1, 512, 1536, Encoding::kRaw});
  ASSERT_TRUE(load(daemon, "a", daemon / "two.wpk").ok());
  const auto refused = load(daemon, "b", daemon / "other.wpk");
  EXPECT_EQ(refused.status().code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(refused.status().message(),
            "model 'b': needs 2.0 MiB, 1.0 MiB free of 3.0 MiB on host; unloading 'a' would free 2.0 MiB");
  ASSERT_TRUE(unload(daemon, "a").ok());
  EXPECT_TRUE(load(daemon, "b", daemon / "other.wpk").ok());
}

TEST(Load, CO_087_ManyCyclesLeaveNothingBehind) {
  DaemonFixture daemon;
  make_bundle(daemon / "a.wpk", {1});
  make_bundle(daemon / "b.wpk", {2});
  uint64_t files = 0, rss = 0;
  for (int cycle = 0; cycle < 60; ++cycle) {
    ASSERT_TRUE(load(daemon, "m", daemon / (cycle % 2 == 0 ? "a.wpk" : "b.wpk")).ok());
    ASSERT_TRUE(unload(daemon, "m").ok());
    if (cycle != 9) continue;
    eventually("no loader is left", [&] { return daemon.children().empty(); });
    eventually("only this question's session", [&] { return status_of(daemon).session_count == 1; });
    files = daemon.open_files();
    rss = daemon.rss_bytes();
  }
  eventually("no loader is left", [&] { return daemon.children().empty(); });
  eventually("descriptors back", [&] { return daemon.open_files() <= files; });
  if (!weightd::testing::kSanitized) {
    EXPECT_LT(daemon.rss_bytes(), rss + 4 * kMiB);
  }
  EXPECT_EQ(status_of(daemon).devices.front().free_bytes, status_of(daemon).devices.front().budget_bytes);
}

TEST(Load, CO_091_FailedLoadsLeaveNothingBehind) {
  DaemonFixture daemon;
  make_bundle(daemon / "m.wpk");
  write_file(daemon / "bad.wpk", read_file(daemon / "m.wpk"));
  flip_bit(daemon / "bad.wpk", 2 * 4096 + 5);
  EXPECT_FALSE(load(daemon, "m", daemon / "bad.wpk").ok());
  eventually("no loader is left", [&] { return daemon.children().empty(); });
  const uint64_t files = daemon.open_files();
  for (int round = 0; round < 20; ++round)
    EXPECT_EQ(load(daemon, "m", daemon / "bad.wpk").status().code(), StatusCode::kCorruption);
  eventually("no loader is left", [&] { return daemon.children().empty(); });
  eventually("descriptors back", [&] { return daemon.open_files() <= files; });
  EXPECT_TRUE(load(daemon, "m", daemon / "m.wpk").ok());
}

// --- loaders that misbehave ----------------------------------------------------------------------------------------------

TEST(Load, CO_152_AStalledLoadFailsAfterTheStallLimit) {
  FakeLoaders fake("exec sleep 1000", "load_stall_ms = 200\n");
  const auto refused = load(fake.daemon, "m", fake.daemon / "m.wpk");
  EXPECT_EQ(refused.status().code(), StatusCode::kDeadlineExceeded);
  EXPECT_EQ(refused.status().message(), "no progress for 200 ms (load_stall_ms), 0 B done");
  eventually("the loader is gone", [&] { return fake.daemon.children().empty(); });
}

TEST(Load, CO_152_ASlowLoadHasTheTimeItNeedsAsLongAsThereIsProgress) {
  DaemonFixture daemon(test_loader("slow", "load_stall_ms = 300\n"));
  make_bundle(daemon / "m.wpk", {1, 20, 16, 64, Encoding::kRaw});  // 20 steps of 40 ms
  const auto model = load(daemon, "m", daemon / "m.wpk");
  EXPECT_TRUE(model.ok()) << model.status().message();
}

TEST(Load, CO_088_OthersAreServedDuringALoad) {
  DaemonFixture daemon(test_loader("slow"));
  make_bundle(daemon / "a.wpk", {1, 1, 16, 64, Encoding::kRaw});
  make_bundle(daemon / "b.wpk", {2, 20, 16, 64, Encoding::kRaw});
  ASSERT_TRUE(load(daemon, "a", daemon / "a.wpk").ok());
  RawPeer admin(daemon.control_socket());
  admin.send({1, ipc::LoadRequest{"b", daemon / "b.wpk", "", 0}});
  eventually("it makes progress", [&] {
    const auto models = status_of(daemon).models;
    return models.size() == 2 && models.back().progress_bytes > 0;
  });
  RawPeer worker(daemon.data_socket());
  for (int i = 0; i < 100; ++i) {
    const auto lease = acquire(worker, "a");
    ASSERT_TRUE(lease.ok());
    ASSERT_TRUE(worker.get<ipc::ReleasedReply>(ipc::ReleaseRequest{lease->lease}).ok());
  }
  EXPECT_EQ(status_of(daemon).models.back().state, ipc::GenerationState::kLoading) << "all that happened during the load";
  EXPECT_TRUE(RawPeer::as<ipc::LoadedReply>(admin.answer_to(1)).ok());
}

TEST(Load, ALoaderThatDiesBeforeItVerifiedLeavesNothing) {
  DaemonFixture daemon(test_loader("dies"));
  make_bundle(daemon / "m.wpk");
  EXPECT_FALSE(load(daemon, "m", daemon / "m.wpk").ok());
  eventually("only this question's session", [&] { return status_of(daemon).session_count == 1; });
  const uint64_t files = daemon.open_files();
  for (int round = 0; round < 5; ++round) {
    const auto refused = load(daemon, "m", daemon / "m.wpk");
    EXPECT_EQ(refused.status().code(), StatusCode::kResourceExhausted) << refused.status().message();
    EXPECT_EQ(status_of(daemon).devices.front().loading_bytes, 0U);
  }
  eventually("its chunks are closed", [&] { return daemon.open_files() <= files; });
}

TEST(Load, ALoadHasTheTimeLimitOfItsRequest) {
  FakeLoaders fake("exec sleep 1000");
  EXPECT_EQ(load(fake.daemon, "m", fake.daemon / "m.wpk", 100).status().code(), StatusCode::kDeadlineExceeded);
  eventually("the loader is gone", [&] { return fake.daemon.children().empty(); });
  EXPECT_TRUE(status_of(fake.daemon).models.empty());
}

TEST(Load, ALoaderThatEndsEarlyIsAFailedLoad) {
  for (const auto& [script, text] : std::map<std::string, std::string>{
           {"exit 5", "ended with status 5"}, {"kill -SEGV $$", "signal 11"}, {"kill -KILL $$", "out of memory?"}}) {
    FakeLoaders fake(script);
    const auto refused = load(fake.daemon, "m", fake.daemon / "m.wpk");
    EXPECT_NE(refused.status().message().find(text), std::string::npos) << refused.status().message();
    EXPECT_EQ(status_of(fake.daemon).devices.front().loading_bytes, 0U);
  }
}

TEST(Load, ALoaderThatTalksNonsenseIsEnded) {
  FakeLoaders fake("printf 'GET / HTTP/1.1 and more' >&3; exec sleep 1000");
  const auto refused = load(fake.daemon, "m", fake.daemon / "m.wpk");
  EXPECT_EQ(refused.status().code(), StatusCode::kInvalidArgument) << refused.status().message();
  eventually("the loader is gone", [&] { return fake.daemon.children().empty(); });
}

TEST(Load, CO_080_UnloadWhileLoadingCancelsIt) {
  FakeLoaders fake("exec sleep 1000");
  RawPeer admin(fake.daemon.control_socket());
  admin.send({1, ipc::LoadRequest{"m", fake.daemon / "m.wpk", "", 0}});
  eventually("it is loading", [&] { return !fake.daemon.children().empty(); });
  const auto unloaded = unload(fake.daemon, "m");
  ASSERT_TRUE(unloaded.ok()) << unloaded.status().message();
  EXPECT_TRUE(unloaded->freed);
  EXPECT_EQ(RawPeer::as<ipc::LoadedReply>(admin.answer_to(1)).status().code(), StatusCode::kCancelled);
  EXPECT_TRUE(fake.daemon.children().empty());
  EXPECT_TRUE(status_of(fake.daemon).models.empty());
}

TEST(Load, CO_080_LoadUnloadLoadEndsLoaded) {
  DaemonFixture daemon;
  make_bundle(daemon / "m.wpk");
  for (int round = 0; round < 20; ++round) {
    RawPeer first(daemon.control_socket()), second(daemon.control_socket()), third(daemon.control_socket());
    first.send({1, ipc::LoadRequest{"m", daemon / "m.wpk", "", 0}});
    eventually("the load is known", [&] { return !status_of(daemon).models.empty(); });
    const auto unloaded = second.get<ipc::UnloadedReply>(ipc::UnloadRequest{"m", "", 0});
    ASSERT_TRUE(unloaded.ok());
    const auto loaded = third.get<ipc::LoadedReply>(ipc::LoadRequest{"m", daemon / "m.wpk", "", 0});
    ASSERT_TRUE(loaded.ok()) << loaded.status().message();
    const auto outcome = RawPeer::as<ipc::LoadedReply>(first.answer_to(1));
    EXPECT_TRUE(outcome.ok() || outcome.status().code() == StatusCode::kCancelled);
    ASSERT_EQ(status_of(daemon).models.size(), 1U);
    ASSERT_TRUE(unload(daemon, "m").ok());
  }
}

TEST(Load, ALoadWhoseAskerHangsUpIsCancelled) {
  FakeLoaders fake("exec sleep 1000");
  {
    RawPeer admin(fake.daemon.control_socket());
    admin.send({1, ipc::LoadRequest{"m", fake.daemon / "m.wpk", "", 0}});
    eventually("it is loading", [&] { return !fake.daemon.children().empty(); });
  }
  eventually("the loader is gone", [&] { return fake.daemon.children().empty(); });
  EXPECT_TRUE(status_of(fake.daemon).models.empty());
}

TEST(Load, JobsBeyondTheLimitWait) {
  FakeLoaders fake("exec sleep 1000", "max_jobs = 2\n");
  std::vector<std::unique_ptr<RawPeer>> admins;
  for (int i = 0; i < 4; ++i) {
    admins.push_back(std::make_unique<RawPeer>(fake.daemon.control_socket()));
    admins.back()->send({1, ipc::LoadRequest{"m" + std::to_string(i), fake.daemon / "m.wpk", "", 0}});
  }
  eventually("all are accepted", [&] { return status_of(fake.daemon).models.size() == 4; });
  EXPECT_EQ(fake.daemon.children().size(), 2U);
  ASSERT_TRUE(unload(fake.daemon, "m3").ok());  // queued
  ASSERT_TRUE(unload(fake.daemon, "m0").ok());  // running, most likely
  ASSERT_TRUE(unload(fake.daemon, "m1").ok());
  eventually("the last one runs", [&] { return fake.daemon.children().size() == 1; });
  EXPECT_EQ(status_of(fake.daemon).models.size(), 1U);
}

TEST(Load, TheDaemonEndsItsLoadersWhenItStops) {
  FakeLoaders fake("exec sleep 1000");
  RawPeer admin(fake.daemon.control_socket());
  admin.send({1, ipc::LoadRequest{"m", fake.daemon / "m.wpk", "", 0}});
  eventually("it is loading", [&] { return !fake.daemon.children().empty(); });
  const pid_t loader = fake.daemon.children().front();
  EXPECT_EQ(fake.daemon.stop(), 0);
  EXPECT_EQ(::kill(loader, 0), -1);
}

// --- leases and processes ------------------------------------------------------------------------------------------------

TEST(Load, CO_069_AKilledWorkersLeaseIsGone) {
  DaemonFixture daemon;
  make_bundle(daemon / "m.wpk");
  ASSERT_TRUE(load(daemon, "m", daemon / "m.wpk").ok());
  RawPeer steady(daemon.data_socket());
  ASSERT_TRUE(acquire(steady, "m").ok());
  for (int round = 0; round < 20; ++round) {
    Holder holder(daemon, "m");
    EXPECT_EQ(status_of(daemon).lease_count, 2U);
    holder.kill();
    eventually("its lease is gone", [&] { return status_of(daemon).lease_count == 1; });
  }
}

TEST(Load, CO_072_AZombieHoldsNothing) {
  DaemonFixture daemon;
  make_bundle(daemon / "m.wpk");
  ASSERT_TRUE(load(daemon, "m", daemon / "m.wpk").ok());
  Holder holder(daemon, "m");
  holder.signal(SIGKILL);  // and is not reaped
  eventually("its lease is gone", [&] { return status_of(daemon).lease_count == 0; });
  EXPECT_TRUE(unload(daemon, "m")->freed);
  holder.reap();
}

TEST(Load, CO_071_AStoppedWorkerKeepsItsLease) {
  DaemonFixture daemon;
  make_bundle(daemon / "m.wpk");
  ASSERT_TRUE(load(daemon, "m", daemon / "m.wpk").ok());
  Holder holder(daemon, "m");
  holder.signal(SIGSTOP);
  const auto busy = unload(daemon, "m", 100);
  ASSERT_TRUE(busy.ok());
  EXPECT_FALSE(busy->freed);
  ASSERT_EQ(busy->holders.size(), 1U);
  EXPECT_EQ(busy->holders.front().pid, holder.pid());
  EXPECT_EQ(leases_of(daemon).size(), 1U);
  EXPECT_EQ(status_of(daemon).devices.front().draining_bytes, kMiB);
  holder.signal(SIGCONT);
  holder.kill();
  eventually("the model is freed", [&] { return status_of(daemon).models.empty(); });
}

TEST(Load, ALostConnectionOfALiveProcessIsAnOrphanAndComesBackByContent) {
  DaemonFixture daemon;
  make_bundle(daemon / "m.wpk");
  const auto model = load(daemon, "m", daemon / "m.wpk");
  ASSERT_TRUE(model.ok());
  {
    RawPeer worker(daemon.data_socket());
    ASSERT_TRUE(acquire(worker, "m").ok());
  }
  eventually("it is an orphan", [&] { return orphans_of(daemon) == 1; });
  EXPECT_EQ(status_of(daemon).devices.front().orphan_bytes, kMiB);
  const auto busy = unload(daemon, "m", 1);
  ASSERT_TRUE(busy.ok());
  EXPECT_FALSE(busy->freed);
  RawPeer again(daemon.data_socket());
  EXPECT_EQ(acquire(again, "m").status().code(), StatusCode::kFailedPrecondition) << "draining";
  const auto lease = acquire(again, "m", 0, model->content_id);
  ASSERT_TRUE(lease.ok()) << lease.status().message();
  EXPECT_FALSE(leases_of(daemon).front().orphan);
  ASSERT_TRUE(again.get<ipc::ReleasedReply>(ipc::ReleaseRequest{lease->lease}).ok());
  eventually("the model is freed", [&] { return status_of(daemon).models.empty(); });
}

TEST(Load, AnOrphanEndsWithItsProcess) {
  DaemonFixture daemon;
  make_bundle(daemon / "m.wpk");
  ASSERT_TRUE(load(daemon, "m", daemon / "m.wpk").ok());
  for (int round = 0; round < 10; ++round) {
    std::array<int, 2> pipe{};
    ASSERT_EQ(::pipe2(pipe.data(), O_CLOEXEC), 0);
    const pid_t child = ::fork();
    if (child == 0) {
      ::close(pipe[1]);
      {
        RawPeer worker(daemon.data_socket());
        if (!acquire(worker, "m").ok()) ::_exit(1);
      }
      char byte = 0;
      (void)!::read(pipe[0], &byte, 1);
      ::_exit(0);
    }
    ::close(pipe[0]);
    eventually("it is an orphan", [&] { return orphans_of(daemon) == 1; });
    ::close(pipe[1]);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    eventually("its lease is gone", [&] { return status_of(daemon).lease_count == 0; });
  }
}

TEST(Load, CO_125_AnotherConnectionsLeaseCannotBeReleased) {
  DaemonFixture daemon;
  make_bundle(daemon / "m.wpk");
  ASSERT_TRUE(load(daemon, "m", daemon / "m.wpk").ok());
  RawPeer one(daemon.data_socket()), two(daemon.data_socket());
  const auto lease = acquire(one, "m");
  ASSERT_TRUE(lease.ok());
  EXPECT_EQ(two.get<ipc::ReleasedReply>(ipc::ReleaseRequest{lease->lease}).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(status_of(daemon).lease_count, 1U);
  EXPECT_TRUE(one.get<ipc::ReleasedReply>(ipc::ReleaseRequest{lease->lease}).ok());
  EXPECT_TRUE(one.get<ipc::ReleasedReply>(ipc::ReleaseRequest{lease->lease}).ok()) << "twice is fine";
}

TEST(Load, CO_113_LeasesDoNotPileUpDescriptors) {
  DaemonFixture daemon;
  make_bundle(daemon / "m.wpk");
  ASSERT_TRUE(load(daemon, "m", daemon / "m.wpk").ok());
  RawPeer worker(daemon.data_socket());
  ASSERT_TRUE(acquire(worker, "m").ok());
  eventually("the loader is gone", [&] { return daemon.children().empty(); });
  eventually("only two sessions", [&] { return status_of(daemon).session_count == 2; });
  const uint64_t files = daemon.open_files();
  for (int i = 0; i < 1000; ++i) {
    const auto lease = acquire(worker, "m");
    ASSERT_TRUE(lease.ok());
    ASSERT_TRUE(worker.get<ipc::ReleasedReply>(ipc::ReleaseRequest{lease->lease}).ok());
  }
  eventually("descriptors back", [&] { return daemon.open_files() <= files; });
}

TEST(Load, AModelCannotBeVerifiedBeforeItIsThereAndAVerificationEndsWithTheModel) {
  DaemonFixture daemon;
  RawPeer admin(daemon.control_socket());
  EXPECT_EQ(admin.get<ipc::VerifiedReply>(ipc::VerifyRequest{"m"}).status().code(), StatusCode::kNotFound);
  make_bundle(daemon / "m.wpk");
  ASSERT_TRUE(load(daemon, "m", daemon / "m.wpk").ok());
  // From now on verifiers hang.
  daemon.write_config(fake_loader(daemon, "exec sleep 1000"));
  daemon.signal(SIGHUP);
  daemon.wait_for_log("configuration reloaded; changed: loader_path");
  admin.send({100, ipc::VerifyRequest{"m"}});
  eventually("it is verified", [&] { return !daemon.children().empty(); });
  ASSERT_TRUE(unload(daemon, "m")->freed);
  EXPECT_EQ(RawPeer::as<ipc::VerifiedReply>(admin.answer_to(100)).status().code(), StatusCode::kCancelled);
}

}  // namespace
}  // namespace weightd::daemon
