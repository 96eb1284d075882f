// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "base/fd.h"
#include "weightd/status.h"

namespace boost::asio { class io_context; }

namespace weightd::ipc {

struct EndpointOptions {
  std::string path;             // absolute, at most 107 bytes
  uint32_t mode = 0660;         // of the socket file, right from the first moment (CO-124)
  int64_t gid = -1;             // group of the socket file; -1 leaves it
  int backlog = 512;
};

/// A listening Unix socket on an io_context, which must outlive it. Holds `<path>.lock` while it lives; a left-over socket that nobody
/// serves is replaced, anything else at the path is an error and stays (CO-128 to CO-130). Out of descriptors, connections are refused by
/// closing them at once, with pauses, and reported at most once a second (CO-112). The path is watched: when it vanishes, it is bound
/// again and that is reported; connections are not touched (CO-131). The callbacks run on the loop, must not throw, and may destroy the
/// Endpoint. Accepted sockets are non-blocking and close-on-exec.
/// kInvalidArgument: path (limit and length); kAlreadyExists: served or locked by another process, or no socket is there.
class Endpoint {
 public:
  using OnConnection = std::function<void(UniqueFd)>;
  using OnTrouble = std::function<void(const Status&)>;
  [[nodiscard]] static Result<std::unique_ptr<Endpoint>> listen(boost::asio::io_context& io, const EndpointOptions& options,
                                                                OnConnection on_connection, OnTrouble on_trouble);
  /// Takes a socket that is bound and listening already (socket activation). No lock, no watch, no unlink.
  [[nodiscard]] static Result<std::unique_ptr<Endpoint>> adopt(boost::asio::io_context& io, UniqueFd listening,
                                                               OnConnection on_connection, OnTrouble on_trouble);
  virtual ~Endpoint() = default;  // closes; unlinks its own socket file
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

 protected:
  Endpoint() = default;
};

}  // namespace weightd::ipc
