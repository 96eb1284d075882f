// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>

#include "base/version.h"
#include "tools/cli/build_check.h"
#include "tools/cli/units.h"
#include "tools/ctl/verbs.h"
#include "weightd/client.h"

namespace weightd::tools {
namespace {

std::string advice(StatusCode code) {
  switch (code) {
    case StatusCode::kPermissionDenied:
      return "run as root, or as a member of the group that may administer the daemon";
    case StatusCode::kNotFound:
      return "'weightctl models' lists what the daemon holds";
    case StatusCode::kAlreadyExists:
      return "unload the model first, or load under another name";
    case StatusCode::kDeadlineExceeded:
      return "'weightctl status' tells what the daemon is doing; --timeout gives it more time";
    case StatusCode::kResourceExhausted:
      return "'weightctl status' shows the budget; unload a model to make room";
    case StatusCode::kLost:
      return "unload the model, which forgets it, and load it again";
    case StatusCode::kUnsupported:
      return "'weightctl version' shows both releases; install the same on both sides";
    default:
      return {};
  }
}

}  // namespace

void add_connection_options(cli::Verb& verb, Connection* connection) {
  verb.text("--socket", "PATH", &connection->socket,
            "Control socket (default: $WEIGHTD_CONTROL_SOCKET or /run/weightd/control.sock)");
  verb.duration(
      "--timeout", &connection->timeout,
      "Longest wait for the daemon, exit code 8 when it passes (default: " + cli::human_duration(connection->timeout) + ")");
}

Status advise(cli::Output& output, Status status) {
  if (!status.ok() && !output.has_hint()) output.set_hint(advice(status.code()));
  return status;
}

Result<control::Client> connect(const Connection& connection, cli::Output& output) {
  WEIGHTD_RETURN_IF_ERROR(cli::check_same_release(build_id(), version()));
  control::Options options;
  options.socket_path = connection.socket;
  options.timeout = connection.timeout;
  Result<control::Client> client = control::Client::connect(options);
  if (client.ok()) return client;
  // A path that leads nowhere means that no daemon listens there.
  Status status = client.status();
  if (status.code() == StatusCode::kNotFound) status = Status::unavailable(status.message());
  return advise(output, status);
}

Result<control::Client> connect_for_long_call(const Connection& connection, cli::Output& output) {
  return connect({connection.socket, std::min(connection.timeout, kConnectTimeout)}, output);
}

}  // namespace weightd::tools
