// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <string>

#include "base/text.h"
#include "base/version.h"
#include "tools/ctl/verbs.h"
#include "weightd/client.h"

namespace weightd::tools {
namespace {

Status run(const Connection& connection, cli::Output& output) {
  output.print("weightctl " + std::string(build_id()) + "\nlibweightd " + std::string(version()) + "\n");
  cli::Json client_json = cli::Json::object();
  client_json.set("weightctl", build_id()).set("libweightd", version());
  Result<control::Client> client = connect(connection, output);
  const Result<control::Version> daemon = client.ok() ? client->version() : Result<control::Version>(client.status());
  if (!daemon.ok()) {
    output.set_error_details(std::move(client_json));
    return advise(output, daemon.status());
  }
  output.print("weightd " + printable(daemon->build) + ", protocol " + std::to_string(daemon->protocol_version) + ", backend " +
               printable(daemon->backend) + ", pid " + std::to_string(daemon->pid) + "\n");
  cli::Json document = cli::Json::document();
  document.set("client", std::move(client_json)).set("daemon", version_json(*daemon));
  output.emit(document);
  return {};
}

}  // namespace

void add_version(cli::Program& program) {
  const auto connection = std::make_shared<Connection>();
  cli::Verb verb = program.verb("version", "Show the builds of program, library and daemon");
  add_connection_options(verb, connection.get());
  verb.details("Without a daemon: the first two, and exit code 7.")
      .example("weightctl version")
      .run([connection](cli::Output& output) { return run(*connection, output); });
}

}  // namespace weightd::tools
