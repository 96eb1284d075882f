// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>

#include "daemon/config.h"
#include "daemon/log.h"
#include "weightd/status.h"

namespace weightd::daemon {

/// weightd: two sockets, their sessions, and the keeper behind them, on one thread.
class Server {
 public:
  /// Reads the configuration again, for SIGHUP.
  using Reload = std::function<Result<EffectiveConfig>()>;

  /// Finds out which devices there are (this may take probe_timeout_ms), then listens. kUnavailable: the backend is cuda and no GPU
  /// is usable. `log` and `reload` must outlive the server.
  [[nodiscard]] static Result<std::unique_ptr<Server>> create(const EffectiveConfig& config, Log& log, Reload reload);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  /// Serves until SIGTERM or SIGINT: then tells the workers, ends the loaders, removes the sockets and returns.
  Status run();

 private:
  class State;
  explicit Server(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace weightd::daemon
