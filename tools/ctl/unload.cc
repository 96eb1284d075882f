// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <string>

#include "base/text.h"
#include "tools/cli/table.h"
#include "tools/cli/units.h"
#include "tools/ctl/verbs.h"

namespace weightd::tools {
namespace {

struct UnloadArguments {
  Connection connection{{}, std::chrono::seconds(60)};
  std::string name, device;
};

Status still_draining(const UnloadArguments& arguments, const control::Unloaded& unloaded, cli::Output& output) {
  output.set_hint(
      "it is freed as soon as its last holder releases it or ends; end the holders, or wait again with a longer --timeout");
  return Status::deadline_exceeded("model '" + printable(arguments.name) + "' is still draining after " +
                                   cli::human_duration(arguments.connection.timeout) + ": " + human_bytes(unloaded.bytes) +
                                   " held by " + cli::counted(unloaded.holders.size(), "lease"));
}

Status run(const UnloadArguments& arguments, cli::Output& output) {
  WEIGHTD_ASSIGN_OR_RETURN(control::Client client, connect_for_long_call(arguments.connection, output));
  const Result<control::Unloaded> unloaded = client.unload(arguments.name, arguments.device, arguments.connection.timeout);
  if (!unloaded.ok()) return advise(output, unloaded.status());
  if (!unloaded->freed) {
    output.print(leases_table(unloaded->holders));
    Status status = still_draining(arguments, *unloaded, output);
    output.set_error_details(std::move(
        cli::Json::object().set("freed", false).set("bytes", unloaded->bytes).set("holders", leases_json(unloaded->holders))));
    return status;
  }
  output.print(printable(arguments.name) + ": " + human_bytes(unloaded->bytes) + " freed\n");
  cli::Json document = cli::Json::document();
  document.set("model", arguments.name).set("freed", true).set("bytes", unloaded->bytes);
  output.emit(document);
  return {};
}

}  // namespace

void add_unload(cli::Program& program) {
  const auto arguments = std::make_shared<UnloadArguments>();
  cli::Verb verb = program.verb("unload", "Take a model out of service");
  verb.positional("NAME", &arguments->name, "Model")
      .text("--device", "UUID", &arguments->device, "Only on this GPU, or host (default: the only one)");
  add_connection_options(verb, &arguments->connection);
  verb.details(
          "No new leases; the memory is freed after the last one. Returns when it is freed, or after the time limit with exit code "
          "8 and the list of who holds it; the model goes on draining then.")
      .example("weightctl unload llama-8b --timeout 5m")
      .run([arguments](cli::Output& output) { return run(*arguments, output); });
}

}  // namespace weightd::tools
