// SPDX-License-Identifier: Apache-2.0
#include <memory>

#include "tools/ctl/verbs.h"

namespace weightd::tools {
namespace {

Status run(const Connection& connection, cli::Output& output) {
  WEIGHTD_ASSIGN_OR_RETURN(control::Client client, connect(connection, output));
  const Result<control::DaemonStatus> status = client.status();
  if (!status.ok()) return advise(output, status.status());
  output.print(models_table(status->models));
  cli::Json models = cli::Json::array();
  for (const control::Model& model : status->models) models.push(model_json(model));
  cli::Json document = cli::Json::document();
  document.set("models", std::move(models));
  output.emit(document);
  return {};
}

}  // namespace

void add_models(cli::Program& program) {
  const auto connection = std::make_shared<Connection>();
  cli::Verb verb = program.verb("models", "List the models");
  add_connection_options(verb, connection.get());
  verb.example("weightctl models --json").run([connection](cli::Output& output) { return run(*connection, output); });
}

}  // namespace weightd::tools
