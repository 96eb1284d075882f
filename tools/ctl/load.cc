// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <condition_variable>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "base/text.h"
#include "tools/cli/progress_bar.h"
#include "tools/ctl/verbs.h"

namespace weightd::tools {
namespace {

constexpr std::chrono::milliseconds kPoll{200};

struct LoadArguments {
  Connection connection{{}, std::chrono::minutes(30)};
  std::string name, path, device, transport = "fd";
};

/// The daemon has another working directory. Symbolic links and ".." stay as they are: the daemon follows them.
Result<std::string> absolute_path(const std::string& path) {
  std::error_code error;
  const std::filesystem::path absolute = std::filesystem::absolute(path, error);
  if (error) return Status::invalid_argument("'" + printable(path) + "': " + error.message());
  return absolute.string();
}

/// Newest generation under the name that is not yet in service.
const control::Model* find_loading(const control::DaemonStatus& status, const std::string& name) {
  const control::Model* found = nullptr;
  for (const control::Model& model : status.models) {
    if (model.name != name || (model.state != "loading" && model.state != "verifying")) continue;
    if (found == nullptr || model.generation > found->generation) found = &model;
  }
  return found;
}

/// Calls load() in a second thread and draws, over a second connection, how far it is.
Result<control::Model> load_with_progress(control::Client& client, const LoadArguments& arguments, const std::string& path,
                                          cli::Output& output) {
  std::mutex mutex;
  std::condition_variable finished;
  std::optional<Result<control::Model>> result;
  std::jthread loading([&] {
    Result<control::Model> loaded =
        client.load(arguments.name, path, arguments.device, arguments.connection.timeout, arguments.transport);
    const std::lock_guard lock(mutex);
    result.emplace(std::move(loaded));
    finished.notify_one();
  });
  cli::ProgressBar bar(output, "load");
  Result<control::Client> watcher = control::Client::connect({arguments.connection.socket, kConnectTimeout});
  std::unique_lock lock(mutex);
  while (!finished.wait_for(lock, kPoll, [&] { return result.has_value(); })) {
    lock.unlock();
    // A picture only: when it cannot be had, the load goes on without.
    if (watcher.ok()) {
      const Result<control::DaemonStatus> status = watcher->status();
      const control::Model* model = status.ok() ? find_loading(*status, arguments.name) : nullptr;
      if (model != nullptr) bar.update(model->progress_bytes, model->resident_bytes);
    }
    lock.lock();
  }
  return *std::move(result);
}

Status run(const LoadArguments& arguments, cli::Output& output) {
  WEIGHTD_ASSIGN_OR_RETURN(const std::string path, absolute_path(arguments.path));
  WEIGHTD_ASSIGN_OR_RETURN(control::Client client, connect_for_long_call(arguments.connection, output));
  const Result<control::Model> model = output.progress_wanted() ? load_with_progress(client, arguments, path, output)
                                                                : client.load(arguments.name, path, arguments.device,
                                                                              arguments.connection.timeout, arguments.transport);
  if (!model.ok()) {
    if (model.status().code() == StatusCode::kNotFound)
      output.set_hint("the daemon must be able to read the bundle under this path");
    if (model.status().code() == StatusCode::kCorruption) output.set_hint("'weightpack verify' tells more about the bundle");
    return advise(output, model.status());
  }
  output.print(printable(model->name) + " generation " + std::to_string(model->generation) + " is " + printable(model->state) +
               " on " + printable(model->device) + ": " + human_bytes(model->resident_bytes) + " resident for " +
               human_bytes(model->logical_bytes) + "\n");
  cli::Json document = cli::Json::document();
  document.set("model", model_json(*model));
  output.emit(document);
  return {};
}

}  // namespace

void add_load(cli::Program& program) {
  const auto arguments = std::make_shared<LoadArguments>();
  cli::Verb verb = program.verb("load", "Load a bundle under a name");
  verb.positional("NAME", &arguments->name, "Name that clients ask for")
      .positional("PATH", &arguments->path, "Bundle; the daemon must be able to read it")
      .text("--device", "UUID", &arguments->device, "GPU by UUID, or host (default: the only one)")
      .choice(
          "--transport", &arguments->transport, {"fd", "legacy"},
          "How workers get the memory: as descriptors, mapped read-only; or as a CUDA IPC handle, for engines that insist (GPUs "
          "only; lost when its loader ends) (default: fd)");
  add_connection_options(verb, &arguments->connection);
  verb.details(
          "Returns when the model is published. When the name has this content already, nothing happens and that is success; when "
          "it has another, exit code 10. Ctrl-C and the time limit end the wait, not the load: 'weightctl unload' takes it back.")
      .example("weightctl load llama-8b /srv/models/llama-8b.wpk")
      .run([arguments](cli::Output& output) { return run(*arguments, output); });
}

}  // namespace weightd::tools
