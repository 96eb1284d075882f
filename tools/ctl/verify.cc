// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <string>

#include "base/text.h"
#include "tools/cli/table.h"
#include "tools/cli/units.h"
#include "tools/ctl/verbs.h"

namespace weightd::tools {
namespace {

struct VerifyArguments {
  Connection connection{{}, std::chrono::minutes(10)};
  std::string name;
};

cli::Json verified_json(const VerifyArguments& arguments, const control::Verified& verified) {
  cli::Json blocks = cli::Json::array();
  for (const uint64_t block : verified.bad_blocks) blocks.push(block);
  cli::Json tensors = cli::Json::array();
  for (const std::string& tensor : verified.bad_tensors) tensors.push(tensor);
  cli::Json json = cli::Json::object();
  json.set("model", arguments.name)
      .set("good", verified.bad_blocks.empty())
      .set("blocks", verified.blocks)
      .set("bytes", verified.bytes)
      .set("elapsed_ms", verified.elapsed_ms)
      .set("bad_blocks", std::move(blocks))
      .set("bad_tensors", std::move(tensors));
  return json;
}

Status report_damage(const VerifyArguments& arguments, const control::Verified& verified, cli::Output& output) {
  std::string list;
  for (const std::string& tensor : verified.bad_tensors) list += "damaged: " + printable(tensor) + "\n";
  output.print(list);
  output.set_error_details(verified_json(arguments, verified));
  output.set_hint("unload the model and load its bundle again");
  return Status::corruption("model '" + printable(arguments.name) + "': " + cli::counted(verified.bad_blocks.size(), "block") +
                            " of " + std::to_string(verified.blocks) + " changed since the load, the first is block " +
                            std::to_string(verified.bad_blocks.front()));
}

Status run(const VerifyArguments& arguments, cli::Output& output) {
  WEIGHTD_ASSIGN_OR_RETURN(control::Client client, connect_for_long_call(arguments.connection, output));
  const Result<control::Verified> verified = client.verify(arguments.name, arguments.connection.timeout);
  if (!verified.ok()) return advise(output, verified.status());
  if (!verified->bad_blocks.empty()) return report_damage(arguments, *verified, output);
  output.print(printable(arguments.name) + ": good: " + cli::counted(verified->blocks, "block") + ", " +
               human_bytes(verified->bytes) + ", in " + cli::human_duration(std::chrono::milliseconds(verified->elapsed_ms)) +
               "\n");
  cli::Json document = cli::Json::document();
  document.set("verified", verified_json(arguments, *verified));
  output.emit(document);
  return {};
}

}  // namespace

void add_verify(cli::Program& program) {
  const auto arguments = std::make_shared<VerifyArguments>();
  cli::Verb verb = program.verb("verify", "Hash the resident bytes of a model and compare");
  verb.positional("NAME", &arguments->name, "Model");
  add_connection_options(verb, &arguments->connection);
  verb.details("Compares with the hashes of the bundle. Exit code 3 when bytes changed since the load.")
      .example("weightctl verify llama-8b")
      .run([arguments](cli::Output& output) { return run(*arguments, output); });
}

}  // namespace weightd::tools
