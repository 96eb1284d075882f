// SPDX-License-Identifier: Apache-2.0
// The library against the real weightd, each test with a daemon of its own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <thread>

#include "ipc/channel.h"
#include "ipc/messages.h"
#include "tests/client/child_process.h"
#include "tests/reference/gemm.h"
#include "tests/support/daemon_fixture.h"
#include "tests/support/test_bundle.h"
#include "weightd/client.h"
#include "weightd/control.h"

namespace weightd {
namespace {

using std::chrono::milliseconds;
using test::in_forked_child;

constexpr uint64_t kRows = 64, kCols = 256;
constexpr milliseconds kLong{60'000};

/// Mappings of chunks and tables; what threads and sanitizers map comes and goes.
size_t map_count() {
  std::ifstream maps("/proc/self/maps");
  size_t count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find("memfd:") != std::string::npos ? 1 : 0;
  return count;
}

size_t open_descriptors() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

class RealDaemon : public ::testing::Test {
 protected:
  RealDaemon() { weightd::testing::make_bundle(daemon_ / "a.wpk", {}); }

  [[nodiscard]] Client client() const {
    ClientOptions options;
    options.socket_path = daemon_.data_socket();
    options.name = "real_daemon_test";
    options.call_timeout = kLong;
    options.reconnect_backoff = milliseconds(0);
    return Client::connect(options).value();
  }
  [[nodiscard]] control::Client control() const { return control::Client::connect({daemon_.control_socket(), kLong}).value(); }
  void load(const std::string& name, const std::string& file) const {
    const Status status = control().load(name, daemon_ / file, "", kLong).status();
    ASSERT_TRUE(status.ok()) << status.to_string() << "\n" << daemon_.log();
  }
  [[nodiscard]] uint32_t leases() const { return control().status().value().lease_count; }

  weightd::testing::DaemonFixture daemon_;
};

/// A GEMM and what the reference says it gives, over the tensor's own decompressed words.
class ExactGemm {
 public:
  explicit ExactGemm(const Model& model, const std::string& name = "layers.1.weight") : tensor_(model.tensor(name).value()) {
    std::vector<uint16_t> words(kRows * kCols);
    EXPECT_TRUE(tensor_.decompress(std::as_writable_bytes(std::span(words))).ok());
    for (uint64_t i = 0; i < kCols; ++i) x_.push_back(static_cast<uint16_t>(0x3f00 + 37 * i % 256));
    reference::gemm_bf16(x_, words, expected_, 1, kRows, kCols);
  }
  [[nodiscard]] Status run() const {
    std::vector<uint16_t> y(kRows);
    GemmOptions options;
    options.threads = 1;
    WEIGHTD_RETURN_IF_ERROR(tensor_.gemm({x_.data(), 1, kCols, kCols}, {y.data(), 1, kRows, kRows}, options));
    return y == expected_ ? Status() : Status::corruption("not exact");
  }

 private:
  Tensor tensor_;
  std::vector<uint16_t> x_;
  std::vector<uint16_t> expected_ = std::vector<uint16_t>(kRows);
};

TEST_F(RealDaemon, TwoClientsTwoProcessesOneCopy) {
  load("a", "a.wpk");
  Client first = client();
  const Model model = first.acquire("a").value();
  EXPECT_TRUE(ExactGemm(model).run().ok());
  // A process of its own, which connects on its own.
  EXPECT_EQ(in_forked_child([&] {
              Client other = client();
              const Model theirs = other.acquire("a").value();
              if (!ExactGemm(theirs).run().ok()) return 1;
              const control::DaemonStatus status = control().status().value();
              return status.lease_count == 2 && status.models.at(0).lease_count == 2 ? 0 : 2;
            }),
            0);
  weightd::testing::eventually("the child's lease ends with it", [&] { return leases() == 1; });
}

TEST_F(RealDaemon, CO_111_LibraryAndDaemonSayTheSameBuild) {
  EXPECT_EQ(client().daemon_version(), version());
  EXPECT_EQ(client().backend(), "host");
}

TEST_F(RealDaemon, CO_094_SharedBytesAgreeOnBothSides) {
  const uint64_t before = control().status().value().devices.at(0).owned_bytes;
  load("a", "a.wpk");
  const uint64_t rise = control().status().value().devices.at(0).owned_bytes - before;
  std::vector<Client> clients;
  std::vector<Model> models;
  for (int i = 0; i < 3; ++i) {
    clients.push_back(client());
    models.push_back(clients.back().acquire("a").value());
  }
  EXPECT_GT(rise, 0U);
  for (const Model& model : models) {
    EXPECT_EQ(model.memory().shared_bytes, rise);
    EXPECT_EQ(model.info().resident_bytes, rise);
    EXPECT_LT(model.memory().private_bytes, uint64_t{1} << 20);
  }
  const control::Device device = control().status().value().devices.at(0);
  EXPECT_EQ(device.owned_bytes - before, rise) << "three leases, one copy";
  EXPECT_EQ(device.leased_bytes, rise);
}

TEST_F(RealDaemon, CO_074_KilledAndStartedAgainWhileClientsCompute) {
  load("a", "a.wpk");
  std::vector<Client> clients;
  std::vector<Model> models;
  for (int i = 0; i < 3; ++i) {
    clients.push_back(client());
    models.push_back(clients.back().acquire("a").value());
  }
  std::atomic<bool> stop{false};
  std::atomic<int> done{0};
  std::vector<std::thread> workers;
  for (const Model& model : models) {
    workers.emplace_back([&stop, &done, gemm = ExactGemm(model)] {
      while (!stop) {
        const Status status = gemm.run();
        EXPECT_TRUE(status.ok()) << status.to_string();
        ++done;
      }
    });
  }
  const auto progress = [&done] {
    const int before = done;
    weightd::testing::eventually("the workers go on", [&] { return done > before + 30; });
  };
  progress();
  daemon_.kill();
  progress();
  for (Client& each : clients) EXPECT_EQ(each.list().status().code(), StatusCode::kUnavailable);
  daemon_.start();
  load("a", "a.wpk");
  progress();
  for (Client& each : clients) EXPECT_TRUE(each.list().ok());
  EXPECT_EQ(leases(), 3U) << "each holds its content again";
  for (const Model& model : models) EXPECT_EQ(model.info().state, "published");
  stop = true;
  for (std::thread& worker : workers) worker.join();
  for (Model& model : models) EXPECT_TRUE(model.release().ok());
  EXPECT_EQ(leases(), 0U);
  EXPECT_TRUE(control().unload("a", "", kLong).value().freed);
}

TEST_F(RealDaemon, CO_065_AForkedChildLeavesTheParentsLeaseAlone) {
  load("a", "a.wpk");
  Client mine = client();
  Model model = mine.acquire("a").value();
  const ExactGemm gemm(model);
  EXPECT_EQ(in_forked_child([&] {
              Client theirs = mine;
              Model copy = model;
              const bool refused = theirs.list().status().code() == StatusCode::kForked &&
                                   gemm.run().code() == StatusCode::kForked && copy.release().code() == StatusCode::kForked;
              return refused ? 0 : 1;
            }),
            0);
  EXPECT_TRUE(gemm.run().ok());
  ASSERT_TRUE(mine.list().ok());
  const std::vector<control::Lease> held = control().leases().value();
  ASSERT_EQ(held.size(), 1U);
  EXPECT_EQ(held[0].pid, ::getpid());
  EXPECT_FALSE(held[0].orphan);
}

TEST_F(RealDaemon, CO_062_CyclesReturnToTheBaseLine) {
  load("a", "a.wpk");
  const auto cycles = [&](int count) {
    for (int i = 0; i < count; ++i) {
      Client each = client();
      Model model = each.acquire("a").value();
      EXPECT_TRUE(model.tensor("layers.0.weight").ok());
      // Half by release(), half by the end of the objects.
      const Status released = i % 2 == 0 ? model.release() : Status();
      EXPECT_TRUE(released.ok());
    }
  };
  cycles(2);
  weightd::testing::eventually("leases end", [&] { return leases() == 0; });
  const size_t mine = open_descriptors(), maps = map_count();
  const uint64_t daemons = daemon_.open_files();
  cycles(250);
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) threads.emplace_back([&] { cycles(32); });
  for (std::thread& thread : threads) thread.join();
  weightd::testing::eventually("leases end", [&] { return leases() == 0; });
  weightd::testing::eventually("sessions end", [&] { return daemon_.open_files() <= daemons; });
  EXPECT_EQ(open_descriptors(), mine);
  EXPECT_EQ(map_count(), maps);
  EXPECT_TRUE(control().unload("a", "", kLong).value().freed);
}

TEST_F(RealDaemon, CO_063_TwentyThousandTensors) {
  weightd::testing::TestBundle wide;
  wide.layers = 20'000;
  wide.rows = 1;
  wide.cols = 4;
  weightd::testing::make_bundle(daemon_ / "wide.wpk", wide);
  load("wide", "wide.wpk");
  Client mine = client();
  const size_t before = map_count();
  const Model model = mine.acquire("wide").value();
  EXPECT_EQ(model.tensors().size(), 20'001U);
  EXPECT_GT(map_count(), before);
  EXPECT_LT(map_count(), before + 100);
  std::vector<std::byte> words(8);
  EXPECT_TRUE(model.tensor("layers.19999.weight")->decompress(words).ok());
}

TEST_F(RealDaemon, CO_151_AClientThatDiesBeforeItReadsTheAnswer) {
  load("a", "a.wpk");
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(in_forked_child([&] {
                ipc::Channel channel(ipc::connect_unix(daemon_.data_socket()).value(), {});
                const ipc::Deadline deadline = ipc::Clock::now() + kLong;
                (void)channel.send({ipc::encode(ipc::Request{1, ipc::HelloRequest{"x", "dies"}}), {}});
                (void)channel.receive(deadline);
                (void)channel.send({ipc::encode(ipc::Request{2, ipc::AcquireRequest{"a", "", 0, ""}}), {}});
                (void)channel.flush(deadline);
                ::raise(SIGKILL);
                return 0;
              }),
              -SIGKILL);
  }
  weightd::testing::eventually("no lease is left", [&] { return leases() == 0; });
  EXPECT_TRUE(control().unload("a", "", kLong).value().freed);
}

TEST_F(RealDaemon, AnUnloadIsSeenAndEndsWithTheLastLease) {
  load("a", "a.wpk");
  Client mine = client();
  Model model = mine.acquire("a").value();
  const ExactGemm gemm(model);
  const control::Unloaded unloaded = control().unload("a", "", milliseconds(1)).value();
  EXPECT_FALSE(unloaded.freed);
  ASSERT_EQ(unloaded.holders.size(), 1U);
  EXPECT_EQ(unloaded.holders[0].pid, ::getpid());
  std::vector<Event> events;
  weightd::testing::eventually("the drain is announced", [&] {
    const std::vector<Event> arrived = mine.poll_events().value();
    events.insert(events.end(), arrived.begin(), arrived.end());
    return std::any_of(events.begin(), events.end(), [](const Event& event) { return event.kind == Event::Kind::kDrainRequested; });
  });
  EXPECT_EQ(model.info().state, "draining");
  EXPECT_TRUE(gemm.run().ok()) << "draining weights are whole";
  EXPECT_EQ(mine.acquire("a").status().code(), StatusCode::kFailedPrecondition) << "no new leases";
  EXPECT_TRUE(model.release().ok());
  EXPECT_EQ(gemm.run().code(), StatusCode::kRevoked);
  weightd::testing::eventually("the memory is free", [&] { return control().status().value().devices.at(0).owned_bytes == 0; });
}

TEST_F(RealDaemon, WaitsForAModelToBePublished) {
  Client mine = client();
  EXPECT_EQ(mine.acquire("a").status().code(), StatusCode::kNotFound);
  std::thread loader([&] { load("a", "a.wpk"); });
  AcquireOptions options;
  options.wait = kLong;
  const Result<Model> model = mine.acquire("a", options);
  loader.join();
  ASSERT_TRUE(model.ok()) << model.status().to_string();
  EXPECT_TRUE(ExactGemm(*model).run().ok());
  options.wait = milliseconds(1);
  EXPECT_EQ(mine.acquire("never", options).status().code(), StatusCode::kDeadlineExceeded);
}

TEST_F(RealDaemon, AReloadAfterARestartWithoutTheModelIsAttachedAgain) {
  load("a", "a.wpk");
  Client mine = client();
  Model model = mine.acquire("a").value();
  daemon_.kill();
  daemon_.start();
  ASSERT_TRUE(mine.list().ok());
  EXPECT_EQ(model.info().state, "detached");
  EXPECT_TRUE(ExactGemm(model).run().ok());
  load("a", "a.wpk");
  weightd::testing::eventually("the lease is back", [&] {
    EXPECT_TRUE(mine.list().ok());
    return leases() == 1;
  });
  EXPECT_EQ(model.info().state, "published");
  EXPECT_TRUE(model.release().ok());
  EXPECT_EQ(leases(), 0U);
}

}  // namespace
}  // namespace weightd
