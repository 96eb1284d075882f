// SPDX-License-Identifier: Apache-2.0
// Runs a command with $WEIGHTD_SOCKET leading to a daemon that lends one model: lend COMMAND ARGUMENT...
// Model "demo": tensor "w", [32, 64], coded; every row is 64 times 2^-(row % 8).
#include <spawn.h>
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <memory>

#include "tests/client/fake_daemon.h"

namespace {

constexpr uint64_t kRows = 32, kCols = 64;

std::shared_ptr<const weightd::test::SealedModel> demo() {
  std::vector<uint16_t> words;
  for (uint64_t row = 0; row < kRows; ++row) words.insert(words.end(), kCols, static_cast<uint16_t>((127 - row % 8) << 7));
  weightd::test::ModelBuilder builder;
  builder.add_f12("w", {kRows, kCols}, words);
  return std::make_shared<weightd::test::SealedModel>(builder.seal("demo", 1));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return std::fprintf(stderr, "usage: lend COMMAND ARGUMENT...\n"), 2;
  const weightd::test::TempFolder folder;
  weightd::test::FakeDaemon daemon(folder / "weightd.sock");
  daemon.publish(demo());
  ::setenv("WEIGHTD_SOCKET", (folder / "weightd.sock").c_str(), 1);
  pid_t child = 0;
  int status = 0;
  if (::posix_spawnp(&child, argv[1], nullptr, nullptr, argv + 1, environ) != 0)
    return std::fprintf(stderr, "lend: cannot start %s\n", argv[1]), 2;
  if (::waitpid(child, &status, 0) != child || !WIFEXITED(status)) return 3;
  if (!daemon.wait_for_leases(0)) return std::fprintf(stderr, "lend: the lease was not given back\n"), 4;
  return WEXITSTATUS(status);
}
