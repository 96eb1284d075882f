// SPDX-License-Identifier: Apache-2.0
// Workers in namespaces of their own, as containers have them. Built for both backends. What the kernel does not let this process
// try is named in the output.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/e2e/system.h"

namespace weightd::e2e {
namespace {

constexpr const char* kRefused = "the kernel refuses this namespace to this process";

WorkerOptions in_new(int namespaces) {
  WorkerOptions options;
  options.namespaces = namespaces;
  return options;
}

TEST(GpuNamespaces, CO_145_AWorkerInAnotherNamespaceComputesOrSaysWhyNot) {
  System system;
  system.make_small("m", 41);
  system.must_load("m");
  WorkerProcess here = system.worker();
  here.must("acquire m 0");
  const std::string digest = here.must("compute 3 8").at("digest");
  const std::map<std::string, int> kinds = {
      {"ipc", CLONE_NEWIPC}, {"net", CLONE_NEWNET}, {"pid", CLONE_NEWPID}, {"uts", CLONE_NEWUTS}, {"user", CLONE_NEWUSER}};
  int tried = 0;
  for (const auto& [name, kind] : kinds) {
    if (!may_unshare(kind)) {
      std::printf("%s: %s\n", name.c_str(), kRefused);
      continue;
    }
    ++tried;
    WorkerProcess worker = system.worker(in_new(kind));
    const Answer answer = worker.ask("acquire m 0");
    if (answer.ok) {
      EXPECT_EQ(worker.must("compute 3 8").at("digest"), digest) << name;
      std::printf("%s: computes\n", name.c_str());
    } else {
      EXPECT_TRUE(answer.code == "unavailable" || answer.code == "permission_denied" || answer.code == "cuda")
          << name << ": " << answer.text;
      std::printf("%s: %s\n", name.c_str(), answer.text.c_str());
    }
    worker.kill();
    system.wait_for_leases(1);
  }
  if (tried == 0) GTEST_SKIP() << kRefused;
}

/// The processes of this PID namespace under /proc, which CUDA reads at its start.
bool mount_proc() {
  return ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 && ::mount("proc", "/proc", "proc", 0, nullptr) == 0;
}

TEST(GpuNamespaces, CO_146_EqualProcessIdsAreNotOneProcess) {
  constexpr int kNamespaces = CLONE_NEWPID | CLONE_NEWNS;
  if (!may_unshare(kNamespaces)) GTEST_SKIP() << kRefused;
  System system;
  system.make_small("m", 42);
  system.must_load("m");
  // Each is process 1 of its namespace.
  WorkerOptions alone = in_new(kNamespaces);
  alone.before_exec = [] {
    (void)mount_proc();  // not every container may; then CUDA says so
    return true;
  };
  WorkerProcess first = system.worker(alone), second = system.worker(alone);
  const Answer acquired = first.ask("acquire m 0");
  if (!acquired.ok && acquired.text.find("cuInit") != std::string::npos) {
    GTEST_SKIP() << "CUDA does not start in a PID namespace of this machine: " << acquired.text;
  }
  ASSERT_TRUE(acquired.ok) << acquired.text;
  second.must("acquire m 0");
  const std::string digest = first.must("compute 3 8").at("digest");
  EXPECT_EQ(second.must("compute 3 8").at("digest"), digest);
  EXPECT_EQ(system.status().lease_count, 2U);
  first.kill();
  system.wait_for_leases(1);
  EXPECT_EQ(second.must("compute 3 8").at("digest"), digest);
  EXPECT_EQ(second.must("info").at("state"), "published");
}

/// Puts `from` in the place of `to`, in a mount namespace of this process.
bool bind(const std::string& from, const std::string& to) {
  return ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         ::mount(from.c_str(), to.c_str(), nullptr, MS_BIND, nullptr) == 0;
}

TEST(GpuNamespaces, CO_148_AMountedFolderShowsTheNewSocket) {
  if (!may_unshare(CLONE_NEWNS)) GTEST_SKIP() << kRefused;
  System system;
  system.make_small("m", 43);
  system.must_load("m");
  testing::TempDir mounted;
  testing::require(::chmod(mounted.path().c_str(), 0755) == 0, "chmod");
  WorkerOptions options = in_new(CLONE_NEWNS);
  options.before_exec = [&] { return bind(system.daemon.folder(), mounted.path()); };
  WorkerProcess worker(mounted / "data.sock", options);
  worker.must("acquire m 0");
  const std::string digest = worker.must("compute 3 8").at("digest");
  system.daemon.kill();
  system.daemon.start();
  system.must_load("m");
  wait_until("the worker finds the new daemon", [&] {
    const Answer list = worker.ask("list");
    return list.ok && list.values.count("m") == 1;
  });
  worker.must("acquire m 0");
  EXPECT_EQ(worker.must("compute 3 8").at("digest"), digest);
}

}  // namespace
}  // namespace weightd::e2e
