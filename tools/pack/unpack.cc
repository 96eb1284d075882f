// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <string>

#include "base/text.h"
#include "tools/cli/table.h"
#include "tools/pack/verbs.h"

namespace weightd::tools {
namespace {

struct UnpackArguments {
  std::string bundle, folder;
  uint64_t threads = 0;
};

Status run(const UnpackArguments& arguments, cli::Output& output) {
  output.hold_interrupts();
  cli::ProgressBar bar(output, "unpack");
  const Result<store::UnpackReport> report =
      store::unpack(arguments.bundle, arguments.folder, static_cast<int>(arguments.threads), cancellable(output, bar));
  bar.clear();
  if (!report.ok()) {
    if (report.status().code() == StatusCode::kAlreadyExists) output.set_hint("name a folder that is empty or does not exist yet");
    return explain_interrupt(output, advise_about_bundle(output, arguments.bundle, report.status()));
  }
  output.print(printable(arguments.folder) + ": " + cli::counted(report->files, "file") + ", " + human_bytes(report->bytes) +
               ", each equal to its original by SHA-256\n");
  cli::Json document = cli::Json::document();
  document.set("folder", arguments.folder).set("files", report->files).set("bytes", report->bytes);
  output.emit(document);
  return {};
}

}  // namespace

void add_unpack(cli::Program& program) {
  const auto arguments = std::make_shared<UnpackArguments>();
  program.verb("unpack", "Restore the files that a bundle was packed from")
      .positional("BUNDLE", &arguments->bundle, "Bundle to read")
      .positional("FOLDER", &arguments->folder, "Folder to write to; made when missing, must be empty")
      .number("--threads", &arguments->threads, 1, kMaxThreads, std::string(kThreadsHelp))
      .details("The files come back byte for byte, index included; each gets its name once its SHA-256 is right.")
      .example("weightpack unpack llama-8b.wpk restored/")
      .run([arguments](cli::Output& output) { return run(*arguments, output); });
}

}  // namespace weightd::tools
