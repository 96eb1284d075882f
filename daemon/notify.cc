// SPDX-License-Identifier: Apache-2.0
#include "daemon/notify.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>

#include "base/fd.h"
#include "base/text.h"

namespace weightd::daemon {

Status notify(const std::string& state) {
  const char* path = std::getenv("NOTIFY_SOCKET");
  if (path == nullptr || *path == '\0') return {};
  const size_t length = std::strlen(path);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if ((path[0] != '/' && path[0] != '@') || length >= sizeof(address.sun_path)) {
    return Status::invalid_argument("NOTIFY_SOCKET '" + printable(path) + "' is neither an absolute path nor an abstract name");
  }
  std::memcpy(address.sun_path, path, length);
  if (path[0] == '@') address.sun_path[0] = '\0';
  const UniqueFd socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return status_from_errno(errno, "NOTIFY_SOCKET");
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + length);
  const ssize_t sent = ::sendto(socket.get(), state.data(), state.size(), MSG_NOSIGNAL | MSG_DONTWAIT,
                                reinterpret_cast<const sockaddr*>(&address), size);
  if (sent < 0) return status_from_errno(errno, "NOTIFY_SOCKET");
  return {};
}

}  // namespace weightd::daemon
