// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tools/cli/output.h"
#include "weightd/status.h"

namespace CLI {
class App;
}

/// A command line of verbs. A front to a parser that costs many seconds to include, so that only program.cc pays.
namespace weightd::cli {

/// One verb under construction. The pointers are written when the verb is parsed and must live until its run function returns;
/// what they point at before is the default.
class Verb {
 public:
  Verb& positional(const std::string& name, std::string* value, const std::string& help);
  Verb& optional_positional(const std::string& name, std::string* value, const std::string& help);
  Verb& flag(const std::string& name, bool* value, const std::string& help);
  Verb& text(const std::string& name, const std::string& value_name, std::string* value, const std::string& help);
  Verb& choice(const std::string& name, std::string* value, const std::vector<std::string>& allowed, const std::string& help);
  Verb& number(const std::string& name, uint64_t* value, uint64_t least, uint64_t most, const std::string& help);
  Verb& real(const std::string& name, double* value, double least, double most, const std::string& help);
  Verb& bytes(const std::string& name, uint64_t* value, const std::string& help);
  Verb& duration(const std::string& name, std::chrono::milliseconds* value, const std::string& help);
  /// The last option added must be given.
  Verb& required();
  /// What there is to say beyond the summary; a paragraph below the options.
  Verb& details(const std::string& text);
  /// One command line that works, shown at the end of the verb's help.
  Verb& example(const std::string& line);
  Verb& run(std::function<Status(Output&)> function);

 private:
  friend class Program;
  Verb(CLI::App* app, std::function<Status(Output&)>* function) : app_(app), function_(function) {}
  CLI::App* app_;  // owned by the Program
  std::function<Status(Output&)>* function_;
};

class Program {
 public:
  /// `description` is one sentence; `version_lines` is what --version prints, one line each, the program's own first.
  Program(std::string name, const std::string& description, std::vector<std::string> version_lines);
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  ~Program();

  /// Adds a verb; it has --json and --quiet from the start. `summary` is one short line.
  Verb verb(const std::string& name, const std::string& summary);

  /// Parses, runs the verb, says what failed, and gives the process's exit code. Ends by the signal itself when one interrupted
  /// the verb. Exceptions of libraries become errors here.
  [[nodiscard]] int main(int argc, const char* const* argv);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace weightd::cli
