// SPDX-License-Identifier: Apache-2.0
// soak DATA_SOCKET CONTROL_SOCKET MODEL CYCLES KILLS
// CYCLES times acquire and release in this process, then KILLS worker processes that acquire, compute one row and are killed with
// SIGKILL while they hold the lease. Afterwards the daemon's leases, sessions and descriptors must be exactly, and its resident
// memory nearly, what they were before. Exit status 1 names what is not.
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "weightd/client.h"
#include "weightd/control.h"

extern char** environ;

namespace weightd::e2e {
namespace {

constexpr uint64_t kRssSlackBytes = 4U << 20;  // allocator noise of the daemon
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kMemoryTells = false;  // the sanitizers keep freed memory back and shadow what is in use
#else
constexpr bool kMemoryTells = true;
#endif
constexpr int kSettleAttempts = 2000;  // status calls until the daemon has seen every end of a process

template <typename T>
T require(Result<T> result) {
  if (!result.ok()) throw std::runtime_error(result.status().to_string());
  return *std::move(result);
}

void require(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.to_string());
}

/// First row of the first coded matrix: proof that the mapping is usable.
void touch(const Model& model) {
  for (const TensorInfo& info : model.tensors()) {
    if (info.shape.size() != 2 || info.logical_bytes == 0) continue;
    std::vector<std::byte> row(info.logical_bytes / info.shape[0]);
    require(require(model.tensor(info.name)).decompress_rows(0, 1, row));
    return;
  }
  throw std::runtime_error("the model has no matrix");
}

Client connect(const std::string& socket) {
  ClientOptions options;
  options.socket_path = socket;
  options.name = "soak";
  return require(Client::connect(options));
}

[[noreturn]] void hold(const std::string& socket, const std::string& model_name) {
  Client client = connect(socket);
  const Model model = require(client.acquire(model_name));
  touch(model);
  if (::write(STDOUT_FILENO, "h", 1) != 1) std::exit(1);
  for (;;) ::pause();
}

/// Starts this program as a holder, waits until it holds its lease, kills it, reaps it.
void kill_one_worker(const std::string& socket, const std::string& model) {
  int ends[2];
  if (::pipe(ends) != 0) throw std::runtime_error("pipe");
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  posix_spawn_file_actions_addclose(&actions, ends[0]);
  std::vector<std::string> words = {"soak", "hold", socket, model};
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  pid_t pid = 0;
  const int error = ::posix_spawn(&pid, "/proc/self/exe", &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  ::close(ends[1]);
  if (error != 0) throw std::runtime_error(std::string("posix_spawn: ") + std::strerror(error));
  char byte = 0;
  const bool holds = ::read(ends[0], &byte, 1) == 1;
  ::close(ends[0]);
  ::kill(pid, SIGKILL);
  ::waitpid(pid, nullptr, 0);
  if (!holds) throw std::runtime_error("a worker ended before it held its lease");
}

control::DaemonStatus settled_status(control::Client& control, const control::DaemonStatus& base) {
  control::DaemonStatus now;
  for (int attempt = 0; attempt < kSettleAttempts; ++attempt) {
    now = require(control.status());
    if (now.lease_count == base.lease_count && now.session_count == base.session_count && now.fd_count <= base.fd_count) break;
  }
  return now;
}

int compare(const control::DaemonStatus& base, const control::DaemonStatus& now) {
  std::printf("leases %u -> %u, sessions %u -> %u, descriptors %u -> %u, resident memory %.1f -> %.1f MiB\n", base.lease_count,
              now.lease_count, base.session_count, now.session_count, base.fd_count, now.fd_count,
              static_cast<double>(base.rss_bytes) / 1048576.0, static_cast<double>(now.rss_bytes) / 1048576.0);
  // The base may be taken while the warm-up's last descriptor is on its way out; what leaks, leaks in every cycle.
  const bool same = base.lease_count == now.lease_count && base.session_count == now.session_count &&
                    now.fd_count <= base.fd_count && (!kMemoryTells || now.rss_bytes <= base.rss_bytes + kRssSlackBytes) &&
                    base.version.pid == now.version.pid;
  std::printf(same ? "soak: back at the base line\n" : "soak: NOT back at the base line\n");
  return same ? 0 : 1;
}

void cycle(const std::string& socket, const std::string& model_name, int count) {
  Client client = connect(socket);
  for (int i = 0; i < count; ++i) {
    Model model = require(client.acquire(model_name));
    if (i % 100 == 0) touch(model);
    require(model.release());
  }
}

int run(int argc, char** argv) {
  if (argc == 4 && std::strcmp(argv[1], "hold") == 0) hold(argv[2], argv[3]);
  if (argc != 6) {
    std::fprintf(stderr, "usage: soak DATA_SOCKET CONTROL_SOCKET MODEL CYCLES KILLS\n");
    return 2;
  }
  const std::string socket = argv[1], model = argv[3];
  control::Options options;
  options.socket_path = argv[2];
  control::Client control = require(control::Client::connect(options));
  // One warm-up of each kind: what the daemon allocates once is not a leak.
  cycle(socket, model, 50);
  kill_one_worker(socket, model);
  control::DaemonStatus base = require(control.status());
  for (int attempt = 0; attempt < kSettleAttempts && base.session_count > 1; ++attempt) base = require(control.status());

  const auto start = std::chrono::steady_clock::now();
  cycle(socket, model, std::atoi(argv[4]));
  for (int i = 0; i < std::atoi(argv[5]); ++i) kill_one_worker(socket, model);
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  std::printf("%s acquire/release cycles and %s killed workers in %.1f s\n", argv[4], argv[5], elapsed.count());
  return compare(base, settled_status(control, base));
}

}  // namespace
}  // namespace weightd::e2e

int main(int argc, char** argv) {
  try {
    return weightd::e2e::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "soak: %s\n", error.what());
    return 1;
  }
}
