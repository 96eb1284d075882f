// SPDX-License-Identifier: Apache-2.0
// weightd-loader: one job, for the daemon at the other end of descriptor 3. The owner of memory of the legacy transport stays until
// the daemon hangs up. Exit status: 0 done; 1 failed, and said so; 2 not started by weightd; 3 the daemon went away.
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string_view>
#include <thread>

#include "base/version.h"
#include "daemon/loader/jobs.h"
#include "ipc/channel.h"

namespace {

constexpr int kDaemonSocket = 3;
constexpr uint32_t kMaxFrameBytes = 1U << 20;

constexpr int kDaemonWentAway = 3;

void wait_for_hang_up() {
  pollfd state{kDaemonSocket, POLLRDHUP, 0};
  while (::poll(&state, 1, -1) < 0 && errno == EINTR) {
  }
}

/// Ends the process as soon as the daemon hangs up, whatever else is going on: a load must not outlive its daemon.
void watch_daemon(const std::atomic<int>& exit_status) {
  std::thread([&exit_status] {
    wait_for_hang_up();
    ::_exit(exit_status);
  }).detach();
}

/// Until the chunks are handed over they are this process's alone: when memory runs out, it is the one to end.
void offer_to_oom_killer() {
  const weightd::UniqueFd file(::open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC));
  constexpr std::string_view kFirst = "900";
  if (file.valid()) (void)!::write(file.get(), kFirst.data(), kFirst.size());
}

bool is_socket(int fd) {
  int type = 0;
  socklen_t size = sizeof(type);
  return ::getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) == 0 && type == SOCK_STREAM;
}

int run() {
  if (!is_socket(kDaemonSocket)) {
    std::fputs("weightd-loader: started by weightd only; use weightctl load\n", stderr);
    return 2;
  }
  ::fcntl(kDaemonSocket, F_SETFD, FD_CLOEXEC);
  ::signal(SIGPIPE, SIG_IGN);
  offer_to_oom_killer();
  std::atomic<int> status_at_hang_up = kDaemonWentAway;
  watch_daemon(status_at_hang_up);
  weightd::ipc::ChannelOptions options;
  options.receive = {kMaxFrameBytes, weightd::ipc::kMaxFdsPerFrame};
  options.max_queued_bytes = size_t{64} << 20;
  weightd::ipc::Channel channel(weightd::UniqueFd(kDaemonSocket), options);
  const weightd::loader::Served served = weightd::loader::serve_job(channel);
  if (served.owner != nullptr) {
    status_at_hang_up = 0;  // it may hang up now: that is how it lets go of the memory
    wait_for_hang_up();
  }
  // Not by way of destructors: the watching thread still uses the socket, and the kernel frees memory faster.
  ::_exit(served.status.ok() ? 0 : 1);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "--version") == 0) {
    std::printf("weightd-loader %s\n", std::string(weightd::build_id()).c_str());
    return 0;
  }
  try {
    return run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "weightd-loader: %s\n", error.what());
    return 1;
  }
}
