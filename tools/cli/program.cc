// SPDX-License-Identifier: Apache-2.0
#include "tools/cli/program.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <exception>
#include <list>
#include <new>
#include <string_view>
#include <utility>

#include "base/text.h"
#include "tools/cli/units.h"

namespace weightd::cli {
namespace {

/// "" when the text was understood, else what is wrong with it.
using Parser = std::function<std::string(const std::string&)>;

CLI::Option* add_parsed(CLI::App* app, const std::string& name, const std::string& value_name, const std::string& help,
                        const Parser& parse) {
  const auto store = [name, parse](const std::string& text) {
    if (const std::string problem = parse(text); !problem.empty()) throw CLI::ValidationError(name, problem);
  };
  CLI::Option* option = app->add_option_function<std::string>(name, store, help);
  return option->type_name(value_name)->take_last();
}

template <typename T>
Parser range_parser(T* value, T least, T most, const std::string& range) {
  return [value, least, most, range](const std::string& text) -> std::string {
    T number{};
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, number);
    if (error != std::errc() || stop != end || !(number >= least && number <= most))
      return "'" + printable(text) + "' is not " + range;
    *value = number;
    return {};
  };
}

std::string real_text(double value) {
  std::string text = std::to_string(value);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text;
}

/// The parser's messages end in spaces or hold line feeds at times; errors are one line.
std::string one_line(std::string text) {
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  return printable(text, 1000);
}

std::string wrapped(const std::string& text) {
  constexpr size_t kColumns = 100;
  std::string out;
  size_t column = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find(' ', at), text.size());
    if (column > 0 && column + 1 + (end - at) > kColumns) {
      out += "\n";
      column = 0;
    } else if (column > 0) {
      out += " ";
      ++column;
    }
    out.append(text, at, end - at);
    column += end - at;
    at = end + 1;
  }
  return out + "\n";
}

}  // namespace

Verb& Verb::positional(const std::string& name, std::string* value, const std::string& help) {
  app_->add_option(name, *value, help)->required()->type_name("");
  return *this;
}

Verb& Verb::optional_positional(const std::string& name, std::string* value, const std::string& help) {
  app_->add_option(name, *value, help)->type_name("");
  return *this;
}

Verb& Verb::flag(const std::string& name, bool* value, const std::string& help) {
  app_->add_flag(name, *value, help);
  return *this;
}

Verb& Verb::text(const std::string& name, const std::string& value_name, std::string* value, const std::string& help) {
  add_parsed(app_, name, value_name, help, [value](const std::string& given) {
    *value = given;
    return std::string();
  });
  return *this;
}

Verb& Verb::choice(const std::string& name, std::string* value, const std::vector<std::string>& allowed, const std::string& help) {
  std::string list;
  for (const std::string& word : allowed) list += (list.empty() ? "" : "|") + word;
  add_parsed(app_, name, list, help, [value, allowed, list](const std::string& given) -> std::string {
    for (const std::string& word : allowed) {
      if (word != given) continue;
      *value = given;
      return {};
    }
    return "'" + printable(given) + "' is not one of " + list;
  });
  return *this;
}

Verb& Verb::number(const std::string& name, uint64_t* value, uint64_t least, uint64_t most, const std::string& help) {
  const std::string range = most == UINT64_MAX
                                ? "a whole number" + (least > 0 ? " of at least " + std::to_string(least) : std::string())
                                : "a whole number from " + std::to_string(least) + " to " + std::to_string(most);
  add_parsed(app_, name, "N", help, range_parser(value, least, most, range));
  return *this;
}

Verb& Verb::real(const std::string& name, double* value, double least, double most, const std::string& help) {
  add_parsed(app_, name, "X", help,
             range_parser(value, least, most, "a number from " + real_text(least) + " to " + real_text(most)));
  return *this;
}

Verb& Verb::bytes(const std::string& name, uint64_t* value, const std::string& help) {
  add_parsed(app_, name, "SIZE", help, [value](const std::string& given) -> std::string {
    const Result<uint64_t> parsed = parse_bytes(given);
    if (!parsed.ok()) return parsed.status().message();
    *value = *parsed;
    return {};
  });
  return *this;
}

Verb& Verb::duration(const std::string& name, std::chrono::milliseconds* value, const std::string& help) {
  add_parsed(app_, name, "TIME", help, [value](const std::string& given) -> std::string {
    const Result<std::chrono::milliseconds> parsed = parse_duration(given);
    if (!parsed.ok()) return parsed.status().message();
    *value = *parsed;
    return {};
  });
  return *this;
}

Verb& Verb::required() {
  app_->get_options().back()->required();
  return *this;
}

Verb& Verb::details(const std::string& text) {
  app_->footer(wrapped(text) + app_->get_footer());
  return *this;
}

Verb& Verb::example(const std::string& line) {
  app_->footer(app_->get_footer() + (app_->get_footer().empty() ? "" : "\n") + "Example:\n  " + line);
  return *this;
}

Verb& Verb::run(std::function<Status(Output&)> function) {
  *function_ = std::move(function);
  return *this;
}

struct Program::State {
  struct Entry {
    CLI::App* app = nullptr;
    std::function<Status(Output&)> function;
  };
  explicit State(const std::string& name, const std::string& description) : app(description, name), output(name) {}

  /// Runs whichever verb was parsed. The parser's exceptions end here, so do those of every library below.
  Status run(std::string& verb) {
    for (Entry& entry : verbs) {
      if (!entry.app->parsed()) continue;
      verb = entry.app->get_name();
      try {
        return entry.function(output);
      } catch (const std::bad_alloc&) {
        return Status::resource_exhausted("not enough memory");
      } catch (const std::exception& e) {
        return Status::internal(std::string("unexpected: ") + e.what());
      }
    }
    return Status::internal("no verb was parsed");
  }

  void print_version() {
    Json builds = Json::array();
    for (const std::string& line : version_lines) {
      output.print(line + "\n");
      builds.push(line);
    }
    Json document = Json::document();
    document.set("builds", std::move(builds));
    output.emit(document);
  }

  /// One line about what could not be parsed.
  Status usage_error(const CLI::ParseError& error) {
    const std::vector<std::string> extras = app.remaining(true);
    if (error.get_exit_code() != static_cast<int>(CLI::ExitCodes::ExtrasError) || extras.empty()) {
      return Status::invalid_argument(one_line(error.what()));
    }
    const bool verb_wanted = app.get_subcommands().empty() && !extras.front().starts_with("-");
    return Status::invalid_argument((verb_wanted ? "no verb '" : "unexpected argument '") + printable(extras.front()) + "'");
  }

  CLI::App app;
  Output output;
  std::vector<std::string> version_lines;
  std::list<Entry> verbs;  // stable addresses: verbs hold pointers into it
  bool version = false;
};

Program::Program(std::string name, const std::string& description, std::vector<std::string> version_lines)
    : state_(std::make_unique<State>(name, description)) {
  state_->version_lines = std::move(version_lines);
  CLI::App& app = state_->app;
  app.get_formatter()->column_width(34);
  app.get_formatter()->label("SUBCOMMAND", "VERB");
  app.get_formatter()->label("REQUIRED", "(required)");
  app.set_help_flag("-h,--help", "Print this help and exit");
  app.add_flag("--version", state_->version, "Print version and commit and exit");
  app.add_flag("--json", state_->output.json, "Print JSON for programs instead of text for people");
  app.add_flag("--quiet", state_->output.quiet, "Print nothing but errors");
  app.require_subcommand(0, 1);
  app.footer("'" + name + " VERB --help' tells more about a verb.\n\n" + exit_codes_help());
}

Program::~Program() = default;

Verb Program::verb(const std::string& name, const std::string& summary) {
  CLI::App* app = state_->app.add_subcommand(name, summary)->group("Verbs")->footer("");
  app->add_flag("--json", state_->output.json, "Print JSON for programs instead of text for people");
  app->add_flag("--quiet", state_->output.quiet, "Print nothing but errors");
  State::Entry& entry = state_->verbs.emplace_back();
  entry.app = app;
  return {app, &entry.function};
}

int Program::main(int argc, const char* const* argv) {
  ignore_write_signals();
  State& state = *state_;
  std::string verb;
  Status status;
  try {
    state.app.parse(argc, argv);
    if (state.version) {
      state.print_version();
    } else if (state.app.get_subcommands().empty()) {
      status = Status::invalid_argument("no verb given");
    } else {
      status = state.run(verb);
    }
  } catch (const CLI::CallForHelp&) {
    state.output.json = state.output.quiet = false;
    state.output.print(state.app.help());
  } catch (const CLI::ParseError& e) {
    status = state.usage_error(e);
    for (const CLI::App* parsed : state.app.get_subcommands()) verb = parsed->get_name();
  }
  if (status.code() == StatusCode::kInvalidArgument && !state.output.has_hint()) {
    state.output.set_hint("see '" + state.app.get_name() + (verb.empty() ? "" : " " + verb) + " --help'");
  }
  const int code = static_cast<int>(state.output.finish(status));
  state.output.release_interrupts();
  return code;
}

}  // namespace weightd::cli
