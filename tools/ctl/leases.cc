// SPDX-License-Identifier: Apache-2.0
#include <memory>

#include "tools/ctl/verbs.h"

namespace weightd::tools {
namespace {

Status run(const Connection& connection, cli::Output& output) {
  WEIGHTD_ASSIGN_OR_RETURN(control::Client client, connect(connection, output));
  const Result<std::vector<control::Lease>> leases = client.leases();
  if (!leases.ok()) return advise(output, leases.status());
  output.print(leases_table(*leases));
  cli::Json document = cli::Json::document();
  document.set("leases", leases_json(*leases));
  output.emit(document);
  return {};
}

}  // namespace

void add_leases(cli::Program& program) {
  const auto connection = std::make_shared<Connection>();
  cli::Verb verb = program.verb("leases", "List who holds which model");
  add_connection_options(verb, connection.get());
  verb.example("weightctl leases").run([connection](cli::Output& output) { return run(*connection, output); });
}

}  // namespace weightd::tools
