// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "tools/cli/exit_codes.h"
#include "tools/cli/interrupts.h"
#include "tools/cli/json.h"
#include "weightd/status.h"

namespace weightd::cli {

/// Where a verb puts what it has to say. Text for people and JSON exclude each other: with --json only emit() reaches standard
/// output, with --quiet nothing does but errors. Warnings and errors go to standard error, one line each, as
/// "weightpack: warning: ..." and "weightpack: error: ...".
class Output {
 public:
  explicit Output(std::string program) : program_(std::move(program)) {}

  bool json = false;
  bool quiet = false;

  /// For people, to standard output; dropped with --json or --quiet.
  void print(std::string_view text);
  /// For programs, to standard output; dropped without --json.
  void emit(const Json& document);
  void warning(std::string_view line);
  /// What to do about the failure that the verb is going to return; without one, the code's general advice is printed.
  void set_hint(std::string hint) { hint_ = std::move(hint); }
  [[nodiscard]] bool has_hint() const { return !hint_.empty(); }

  /// With --json, the error document gets this as "details".
  void set_error_details(Json details) { details_ = std::make_unique<Json>(std::move(details)); }

  /// From here on Ctrl-C waits until the verb asks interrupted(), stops and cleans up; see Interrupts.
  void hold_interrupts() { interrupts_ = std::make_unique<Interrupts>(); }
  [[nodiscard]] bool interrupted() const { return interrupts_ != nullptr && interrupts_->pending(); }
  /// Lets a waiting signal through: the process ends by it.
  void release_interrupts() { interrupts_.reset(); }

  /// Whether a progress bar has a terminal to be drawn on and is wanted.
  [[nodiscard]] bool progress_wanted() const;

  /// Says why `status` is a failure (error line, hint line, with --json an error document) and gives the exit code. An output that
  /// could not be written counts as failure too.
  [[nodiscard]] ExitCode finish(const Status& status);

 private:
  void write_out(std::string_view text);

  std::string program_, hint_;
  int write_error_ = 0;
  std::unique_ptr<Json> details_;
  std::unique_ptr<Interrupts> interrupts_;
};

/// What one can usually do about a failure of this kind, or "".
[[nodiscard]] std::string_view general_advice(StatusCode code);

}  // namespace weightd::cli
