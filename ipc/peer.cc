// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <string>
#include <string_view>

#include "base/text.h"
#include "ipc/channel.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77  // Linux 6.5
#endif

namespace weightd::ipc {
namespace {

Result<std::vector<uint32_t>> peer_groups(int socket) {
  std::vector<gid_t> groups(64);
  for (;;) {
    auto bytes = static_cast<socklen_t>(groups.size() * sizeof(gid_t));
    if (::getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, groups.data(), &bytes) == 0) {
      groups.resize(bytes / sizeof(gid_t));
      return std::vector<uint32_t>(groups.begin(), groups.end());
    }
    // ERANGE says how much room is needed.
    if (errno != ERANGE || bytes / sizeof(gid_t) <= groups.size()) return status_from_errno(errno, "SO_PEERGROUPS");
    groups.resize(bytes / sizeof(gid_t));
  }
}

UniqueFd open_pidfd(int socket, int32_t pid) {
  int fd = -1;
  socklen_t bytes = sizeof(fd);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &fd, &bytes) == 0) return UniqueFd(fd);
  if (errno != ENOPROTOOPT || pid <= 0) return UniqueFd();  // it ended already, or is of another PID namespace
  // Older kernels: the number could have been reused since connect(), so this names a process, not surely the peer.
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

bool is_alive(const UniqueFd& pidfd) {
  pollfd entry{pidfd.get(), POLLIN, 0};
  return ::poll(&entry, 1, 0) == 0;
}

/// A small file of /proc; empty when it cannot be read.
std::string read_proc(int32_t pid, std::string_view file) {
  const std::string path = "/proc/" + std::to_string(pid) + "/" + std::string(file);
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::array<char, 1024> text{};
  const ssize_t got = fd.valid() ? ::read(fd.get(), text.data(), text.size()) : -1;
  return got > 0 ? std::string(text.data(), static_cast<size_t>(got)) : std::string();
}

/// Field 22 of /proc/<pid>/stat. Counted from behind the last ')': the command, field 2, may hold spaces and parentheses.
uint64_t start_ticks_of(std::string_view stat) {
  const size_t command_end = stat.rfind(')');
  if (command_end == std::string_view::npos) return 0;
  size_t at = command_end;
  for (int field = 2; field < 22; ++field) {
    at = stat.find(' ', at + 1);
    if (at == std::string_view::npos) return 0;
  }
  uint64_t ticks = 0;
  (void)std::from_chars(stat.data() + at + 1, stat.data() + stat.size(), ticks);
  return ticks;
}

}  // namespace

Result<Peer> peer_of(int socket) {
  ucred credentials{};
  socklen_t bytes = sizeof(credentials);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &bytes) != 0) return status_from_errno(errno, "SO_PEERCRED");
  Peer peer;
  peer.pid = credentials.pid;
  peer.uid = credentials.uid;
  peer.gid = credentials.gid;
  WEIGHTD_ASSIGN_OR_RETURN(peer.groups, peer_groups(socket));
  peer.pidfd = open_pidfd(socket, peer.pid);
  if (peer.pid > 0 && peer.pidfd.valid()) {
    const uint64_t ticks = start_ticks_of(read_proc(peer.pid, "stat"));
    std::string command = read_proc(peer.pid, "comm");
    if (!command.empty() && command.back() == '\n') command.pop_back();
    // Still alive after reading: so /proc/<pid> was its own, not that of a successor with the same number.
    if (is_alive(peer.pidfd)) {
      peer.start_ticks = ticks;
      peer.command = printable(command);
    } else {
      peer.pidfd.reset();
    }
  }
  return peer;
}

}  // namespace weightd::ipc
