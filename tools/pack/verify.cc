// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <string>

#include "base/text.h"
#include "tools/cli/table.h"
#include "tools/pack/verbs.h"

namespace weightd::tools {
namespace {

struct VerifyArguments {
  std::string bundle, checkpoint;
  bool deep = false;
  uint64_t threads = 0;
};

Status run(const VerifyArguments& arguments, cli::Output& output) {
  cli::ProgressBar bar(output, "verify");
  const Result<store::VerifyReport> report =
      store::verify(arguments.bundle, arguments.checkpoint, arguments.deep, static_cast<int>(arguments.threads),
                    [&bar](uint64_t done_bytes, uint64_t total_bytes) {
                      bar.update(done_bytes, total_bytes);
                      return true;
                    });
  bar.clear();
  if (!report.ok()) {
    return advise_about_bundle(output, arguments.bundle, report.status());
  }
  output.print(printable(arguments.bundle) + ": good: " + cli::counted(report->sections, "section") + ", " +
               cli::counted(report->tensors, "tensor") + ", " + human_bytes(report->bytes) +
               (arguments.checkpoint.empty() ? "" : "; every tensor equal to " + printable(arguments.checkpoint)) + "\n");
  cli::Json document = cli::Json::document();
  document.set("bundle", arguments.bundle)
      .set("good", true)
      .set("deep", arguments.deep)
      .set("compared", !arguments.checkpoint.empty())
      .set("sections", report->sections)
      .set("tensors", report->tensors)
      .set("bytes", report->bytes);
  output.emit(document);
  return {};
}

}  // namespace

void add_verify(cli::Program& program) {
  const auto arguments = std::make_shared<VerifyArguments>();
  program.verb("verify", "Check a bundle, by itself or against its checkpoint")
      .positional("BUNDLE", &arguments->bundle, "Bundle to check")
      .optional_positional("CHECKPOINT", &arguments->checkpoint, std::string(kCheckpointHelp))
      .flag("--deep", &arguments->deep, "Check the SHA-256 of every section too")
      .number("--threads", &arguments->threads, 1, kMaxThreads, std::string(kThreadsHelp))
      .details(
          "Checks every checksum, every decoded tensor, and the bytes that would be resident. With a checkpoint, compares every "
          "tensor with it bit for bit and names the first difference. Exit code 3 when something is wrong.")
      .example("weightpack verify llama-8b.wpk Llama-3.1-8B/ --deep")
      .run([arguments](cli::Output& output) { return run(*arguments, output); });
}

}  // namespace weightd::tools
