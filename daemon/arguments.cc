// SPDX-License-Identifier: Apache-2.0
#include "daemon/arguments.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <deque>
#include <sstream>

#include "base/version.h"
#include "daemon/config.h"

namespace weightd::daemon {
namespace {

std::string flag_of(std::string_view key) {
  std::string flag = "--" + std::string(key);
  std::replace(flag.begin() + 2, flag.end(), '_', '-');
  return flag;
}

std::string_view type_name(Option::Kind kind) {
  switch (kind) {
    case Option::Kind::kText:
    case Option::Kind::kChoice:
      return "TEXT";
    case Option::Kind::kPath:
      return "PATH";
    case Option::Kind::kFlag:
      return "true|false";
    case Option::Kind::kCount:
      return "N";
    case Option::Kind::kBytes:
      return "SIZE";
    case Option::Kind::kMode:
      return "OCTAL";
    case Option::Kind::kNames:
      return "NAME,...";
    case Option::Kind::kPaths:
      return "PATH:...";
  }
  return "";
}

std::string help_of(const Option& option) {
  std::string help(option.help);
  if (!option.choices.empty()) help += " (" + std::string(option.choices) + ")";
  const std::string built_in = print_value(Config{}, option);
  return built_in == "\"\"" || built_in == "[]" ? help : help + " [" + built_in + "]";
}

}  // namespace

Arguments parse_arguments(int argc, const char* const* argv) {
  Arguments arguments;
  CLI::App app(
      "weightd keeps LLM weights resident, compressed and shared.\n"
      "Every option below is also a key of the configuration file and an environment variable (WEIGHTD_<KEY>);\n"
      "the command line wins over the environment, the environment over the file.");
  app.footer(
      "Exit status: 0 stopped as asked; 1 failed; 2 wrong command line; 69 backend cuda and no usable GPU;\n"
      "78 wrong configuration.");
  bool version = false, check = false, print = false;
  std::string config_file;
  app.add_flag("--version", version, "print the version and exit");
  app.add_flag("--check-config", check, "check the configuration and exit (0, or 78)");
  app.add_flag("--print-config", print, "print the configuration in force, with the origin of each value, and exit");
  const auto* config =
      app.add_option("--config", config_file, "configuration file [" + std::string(kDefaultConfigFile) + "]")->type_name("PATH");
  std::deque<std::string> values;  // stable addresses
  std::vector<std::pair<const Option*, const CLI::Option*>> given;
  for (const Option& option : options()) {
    values.emplace_back();
    const auto* cli = app.add_option(flag_of(option.key), values.back(), help_of(option))
                          ->type_name(std::string(type_name(option.kind)))
                          ->group("Configuration");
    given.emplace_back(&option, cli);
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::ostringstream out, err;
    const bool help = error.get_exit_code() == 0;
    app.exit(error, out, err);
    arguments.action = Arguments::Action::kSayAndExit;
    arguments.text = help ? out.str() : "weightd: " + err.str();
    arguments.exit_code = help ? 0 : kExitUsage;
    return arguments;
  }
  if (version) {
    arguments.action = Arguments::Action::kSayAndExit;
    arguments.text = "weightd " + std::string(build_id()) + "\n";
    return arguments;
  }
  if (check) arguments.action = Arguments::Action::kCheckConfig;
  if (print) arguments.action = Arguments::Action::kPrintConfig;
  if (config->count() > 0) arguments.config_file = config_file;
  for (size_t i = 0; i < given.size(); ++i) {
    if (given[i].second->count() > 0) arguments.options.emplace_back(given[i].first->key, values[i]);
  }
  return arguments;
}

}  // namespace weightd::daemon
