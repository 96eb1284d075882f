// SPDX-License-Identifier: Apache-2.0
// What only a GPU has: errors that end a context, memory that others fill, transports, and GPUs that a process does not see.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include "tests/e2e/system.h"

namespace weightd::e2e {
namespace {

std::string digest_by_new_worker(System& system, const WorkerOptions& options = {}) {
  WorkerProcess worker = system.worker(options);
  worker.must("acquire m 0");
  std::string digest = worker.must("compute 3 8").at("digest");
  EXPECT_EQ(worker.finish(), 0);
  return digest;
}

/// One worker breaks its context with `command`; the others and the daemon go on.
void break_one_context(const std::string& command) {
  System system;
  system.make_small("m", 31);
  system.must_load("m");
  const std::string digest = digest_by_new_worker(system);
  const pid_t daemon = system.daemon.pid();
  WorkerProcess first = system.worker(), second = system.worker(), third = system.worker();
  for (WorkerProcess* worker : {&first, &second, &third}) worker->must("acquire m 0");
  first.must("background 3 8");
  third.must("background 3 8");
  EXPECT_EQ(second.ask(command).code, "cuda");
  const Answer after = second.ask("compute 3 8");
  EXPECT_FALSE(after.ok) << "the error is sticky";
  EXPECT_EQ(first.must("join").at("digest"), digest);
  EXPECT_EQ(third.must("join").at("digest"), digest);
  EXPECT_EQ(system.status().lease_count, 3U) << "the process lives, so does its lease";
  (void)second.finish();  // by itself, whatever its status: its context is gone
  system.wait_for_leases(2);
  EXPECT_EQ(system.daemon.pid(), daemon);
  EXPECT_EQ(system.verify("m"), "");
  EXPECT_EQ(digest_by_new_worker(system), digest);
}

TEST(GpuOnly, CO_073_AnIllegalAccessOfOneWorkerHurtsNobodyElse) { break_one_context("store_nowhere"); }

TEST(GpuOnly, CO_073_ATrapOfOneWorkerHurtsNobodyElse) { break_one_context("trap"); }

TEST(GpuOnly, CO_090_CO_092_AFullGpuIsARefusalAndLaterItFits) {
  System system;
  system.make_small("m", 32);
  system.make_big("big", 1500);
  system.must_load("m");
  const std::string digest = digest_by_new_worker(system);
  system.wait_for_leases(0);
  system.wait_for_no_loader();
  const uint64_t owned = system.device().owned_bytes;
  const std::string uuid = system.device().uuid;
  // Room for the loader's context but not for the model; then for neither.
  for (const uint64_t leave_mib : {uint64_t{1200}, uint64_t{64}}) {
    WorkerProcess hog = system.worker();
    hog.must("hog " + uuid + " " + std::to_string(leave_mib * kMiB));
    const uint64_t full = hog.must("memory").number("used");
    for (int attempt = 0; attempt < 3; ++attempt) {
      const auto refused = system.load("big", "big");
      ASSERT_FALSE(refused.ok());
      EXPECT_EQ(refused.status().code(), StatusCode::kResourceExhausted) << refused.status().to_string();
      if (leave_mib == 1200) {
        EXPECT_NE(refused.status().message().find("iB"), std::string::npos) << "the arithmetic: " << refused.status().to_string();
      }
      EXPECT_EQ(system.device().owned_bytes, owned);
      EXPECT_EQ(system.device().loading_bytes, 0U);
    }
    // The refused loads hold nothing: what the hog left is there again.
    system.wait_for_no_loader();
    wait_until("the refused loads' memory comes back", [&] { return hog.must("memory").number("used") <= full + 4 * kMiB; });
    EXPECT_TRUE(system.model("m").has_value());
  }
  EXPECT_EQ(digest_by_new_worker(system), digest);
  system.must_load("big");
  EXPECT_EQ(system.verify("big"), "");
}

TEST(GpuOnly, LegacyTransportIsLostWithItsOwner) {
  System system;
  system.make_small("m", 33);
  system.must_load("m");
  const std::string digest = digest_by_new_worker(system);
  system.wait_for_leases(0);
  system.must_unload("m");
  system.wait_for_no_loader();
  const uint64_t used = system.used_bytes();

  system.must_load("m", "legacy");
  wait_until("the loader alone stays, as the owner", [&] { return system.daemon.children().size() == 1; });
  const auto owners = system.daemon.children();
  EXPECT_EQ(system.model("m")->transport, "legacy");
  WorkerProcess first = system.worker(), second = system.worker();
  for (WorkerProcess* worker : {&first, &second}) {
    EXPECT_EQ(worker->must("acquire m 0").at("transport"), "legacy");
    EXPECT_EQ(worker->must("compute 3 8").at("digest"), digest);
  }
  ASSERT_EQ(::kill(owners.front(), SIGKILL), 0);
  for (WorkerProcess* worker : {&first, &second}) {
    EXPECT_EQ(worker->must("event").at("lost"), "m");
    const Answer answer = worker->ask("compute 3 8");
    EXPECT_FALSE(answer.ok);
    EXPECT_EQ(answer.code, "lost") << answer.text;
  }
  WorkerProcess third = system.worker();
  EXPECT_FALSE(third.ask("acquire m 0").ok) << "a lost generation is lent to nobody";
  first.kill();
  EXPECT_EQ(second.finish(), 0);
  system.wait_for_leases(0);
  // A load under the name, by the default transport, is possible again; the lost one, if it is still there, has to go first.
  if (system.model("m").has_value()) (void)system.unload("m");
  system.must_load("m");
  EXPECT_EQ(digest_by_new_worker(system), digest);
  system.must_unload("m");
  system.wait_for_no_loader();
  EXPECT_EQ(third.finish(), 0);
  system.wait_for_used(used + 4 * kMiB, "the legacy owner's memory comes back");
}

TEST(GpuOnly, LegacyTransportEndsItsOwnerWithTheUnload) {
  System system;
  system.make_small("m", 34);
  system.must_load("m", "legacy");
  wait_until("the loader alone stays, as the owner", [&] { return system.daemon.children().size() == 1; });
  WorkerProcess worker = system.worker();
  worker.must("acquire m 0");
  worker.must("compute 3 8");
  worker.must("release");
  system.wait_for_leases(0);
  system.must_unload("m");
  system.wait_for_no_loader();
  EXPECT_EQ(system.device().owned_bytes, 0U);
  EXPECT_EQ(worker.finish(), 0);
}

WorkerOptions sees(const std::string& devices) {
  WorkerOptions options;
  options.environment["CUDA_VISIBLE_DEVICES"] = devices;
  return options;
}

TEST(GpuOnly, CO_144_CO_147_AWorkerSeesTheGpuUnderAnyOfItsNames) {
  System system;
  system.make_small("m", 35);
  system.must_load("m");
  const std::string digest = digest_by_new_worker(system);
  const std::string uuid = system.device().uuid;
  const std::vector<std::string> visible = {"0", "0,99,1", uuid, uuid.substr(0, 12)};
  for (const std::string& devices : visible) EXPECT_EQ(digest_by_new_worker(system, sees(devices)), digest) << devices;
  for (const char* order : {"PCI_BUS_ID", "FASTEST_FIRST"}) {
    WorkerOptions options = sees("0");
    options.environment["CUDA_DEVICE_ORDER"] = order;
    EXPECT_EQ(digest_by_new_worker(system, options), digest) << order;
  }
}

TEST(GpuOnly, CO_144_CO_147_AHiddenGpuIsATypedErrorAndNoLeaseStays) {
  System system;
  system.make_small("m", 36);
  system.must_load("m");
  for (const std::string& devices : {std::string(), std::string("-1"), std::string("99"), std::string("99,0"), std::string("none"),
                                     std::string("GPU-00000000-0000-0000-0000-000000000000")}) {
    WorkerProcess worker = system.worker(sees(devices));
    const Answer answer = worker.ask("acquire m 0");
    EXPECT_FALSE(answer.ok) << "'" << devices << "'";
    EXPECT_EQ(answer.code, "unavailable") << answer.text;
    EXPECT_NE(answer.text.find("CUDA_VISIBLE_DEVICES"), std::string::npos) << answer.text;
    system.wait_for_leases(0);
    EXPECT_TRUE(worker.must("list").at("m") == "published") << "the connection goes on";
    EXPECT_EQ(worker.finish(), 0);
  }
  system.must_unload("m");
}

TEST(GpuOnly, CO_147_WhatTheVariableMeansIsCudasToSay) {
  System system;
  system.make_small("m", 37);
  system.must_load("m");
  const std::string digest = digest_by_new_worker(system);
  for (const std::string& devices :
       {std::string("0,0"), std::string(" 0 , 1"), std::string("all"), std::string("MIG-1"), std::string("0;1")}) {
    WorkerProcess worker = system.worker(sees(devices));
    const Answer answer = worker.ask("acquire m 0");
    if (answer.ok) {
      EXPECT_EQ(worker.must("compute 3 8").at("digest"), digest) << devices;
    } else {
      EXPECT_EQ(answer.code, "unavailable") << devices << ": " << answer.text;
    }
    EXPECT_EQ(worker.finish(), 0);
    system.wait_for_leases(0);
  }
}

TEST(GpuOnly, CO_147_ADaemonThatSeesNoGpuSaysSoAndEnds) {
  for (const std::string& devices : {std::string(), std::string("-1"), std::string("99")}) {
    testing::DaemonOptions options;
    options.backend = "cuda";
    options.environment["CUDA_VISIBLE_DEVICES"] = devices;
    options.start = false;
    testing::DaemonFixture daemon(options);
    daemon.spawn();
    EXPECT_FALSE(daemon.wait_ready()) << "'" << devices << "'";
    EXPECT_NE(daemon.wait(), 0);
    EXPECT_NE(daemon.log().find("GPU"), std::string::npos) << daemon.log();
    EXPECT_NE(::access(daemon.data_socket().c_str(), F_OK), 0) << "no socket is left behind";
  }
}

TEST(GpuOnly, CO_149_TheLibraryPutsTheCurrentGpuBack) {
  System system;
  system.make_small("m", 38);
  system.must_load("m");
  WorkerProcess worker = system.worker();
  worker.must("acquire m 0");
  const Answer answer = worker.must("current");
  EXPECT_EQ(answer.at("before"), answer.at("between"));
  EXPECT_EQ(answer.at("before"), answer.at("after"));
}

}  // namespace
}  // namespace weightd::e2e
