// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "base/text.h"
#include "base/version.h"
#include "tools/cli/table.h"
#include "tools/cli/units.h"
#include "tools/ctl/verbs.h"

namespace weightd::tools {
namespace {

using Checks = std::vector<control::Check>;

/// Why nobody answers, and what to do about it.
control::Check unreachable(const Status& status) {
  control::Check check{"daemon", "failure", status.message(), ""};
  switch (status.code()) {
    case StatusCode::kPermissionDenied:
      check.advice = "run as root, or as a member of the group that may administer the daemon";
      break;
    case StatusCode::kDeadlineExceeded:
      check.advice = "it listens and does not answer: look at its log, then restart it (systemctl restart weightd)";
      break;
    case StatusCode::kUnsupported:
      check.advice = "'weightctl version' shows both releases; install the same on both sides";
      break;
    default:
      check.advice = "start it: systemctl start weightd, or weightd --config FILE; --socket names another control socket";
  }
  return check;
}

/// What can be said from here, and what the daemon says.
Checks examine(const Connection& connection, cli::Output& output) {
  Result<control::Client> client = connect(connection, output);
  output.set_hint("the line below each of them says what to do");
  if (!client.ok()) return {unreachable(client.status())};
  const Result<control::Version> version = client->version();
  if (!version.ok()) return {unreachable(version.status())};
  Checks checks = {{"daemon", "good", "weightd " + version->build + " answers, pid " + std::to_string(version->pid), ""}};
  if (version->build != build_id()) {
    checks.push_back({"release", "warning", "weightctl is " + std::string(build_id()) + ", weightd is " + version->build,
                      "install the same release on both sides; restart weightd after an upgrade"});
  }
  Result<Checks> found = client->doctor();
  if (!found.ok()) {
    checks.push_back(unreachable(found.status()));
    return checks;
  }
  for (control::Check& check : *found) checks.push_back(std::move(check));
  return checks;
}

std::string checks_table(const Checks& checks) {
  cli::Table table;
  table.column("").column("check").column("found");
  for (const control::Check& check : checks) {
    table.row({check.level, check.name, check.detail});
    if (!check.advice.empty()) table.row({"", "", "-> " + check.advice});
  }
  return table.to_string();
}

cli::Json checks_json(const Checks& checks) {
  cli::Json json = cli::Json::array();
  for (const control::Check& check : checks) {
    json.push(std::move(cli::Json::object()
                            .set("name", check.name)
                            .set("level", check.level)
                            .set("detail", check.detail)
                            .set("advice", check.advice)));
  }
  return json;
}

Status run(const Connection& connection, cli::Output& output) {
  const Checks checks = examine(connection, output);
  output.print(checks_table(checks));
  const auto failures = std::count_if(checks.begin(), checks.end(), [](const auto& check) { return check.level == "failure"; });
  if (failures > 0) {
    output.set_error_details(std::move(cli::Json::object().set("checks", checks_json(checks))));
    return Status::io(cli::counted(static_cast<uint64_t>(failures), "check") + " failed");
  }
  cli::Json document = cli::Json::document();
  document.set("checks", checks_json(checks));
  output.emit(document);
  return {};
}

}  // namespace

void add_doctor(cli::Program& program) {
  const auto connection = std::make_shared<Connection>();
  cli::Verb verb = program.verb("doctor", "Check the daemon and its surroundings, and say what to do");
  add_connection_options(verb, connection.get());
  verb.details("Exit code 1 when a check failed; warnings alone are 0. Works without a daemon: then that is what failed.")
      .example("weightctl doctor")
      .run([connection](cli::Output& output) { return run(*connection, output); });
}

}  // namespace weightd::tools
