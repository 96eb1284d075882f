// SPDX-License-Identifier: Apache-2.0
// weightd: keeps weights resident and lends them out. Exit status: 0 stopped as asked; 1 failed; 2 wrong command line;
// 69 backend "cuda" and no usable GPU; 78 wrong configuration.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#include "daemon/arguments.h"
#include "daemon/config.h"
#include "daemon/log.h"
#include "daemon/machine.h"
#include "daemon/server.h"

namespace weightd::daemon {
namespace {

/// With 0, 1 or 2 closed, the next socket would become stdout, and a stray line would go to a peer.
void open_standard_streams() {
  for (;;) {
    const int fd = ::open("/dev/null", O_RDWR);
    if (fd < 0) return;
    if (fd > STDERR_FILENO) {
      ::close(fd);
      return;
    }
  }
}

std::string own_folder() {
  std::array<char, PATH_MAX> path{};
  const ssize_t length = ::readlink("/proc/self/exe", path.data(), path.size());
  if (length <= 0) return "";
  const std::string file(path.data(), static_cast<size_t>(length));
  return file.substr(0, file.rfind('/'));
}

Result<EffectiveConfig> read_config(const Arguments& arguments) {
  ConfigSources sources;
  sources.file = arguments.config_file;
  sources.environment = [](const std::string& name) -> const char* { return std::getenv(name.c_str()); };
  sources.command_line = arguments.options;
  return load_config(sources);
}

/// Finds the loader where the configuration leaves it open, and makes sure that it can be started.
Status settle_loader(Config& config) {
  if (config.loader_path.empty()) {
    const std::string beside = own_folder() + "/weightd-loader";
    config.loader_path =
        ::access(beside.c_str(), X_OK) == 0 ? beside : own_folder() + "/" WEIGHTD_LIBEXEC_FROM_SBIN "/weightd-loader";
  }
  if (::access(config.loader_path.c_str(), X_OK) == 0) return {};
  return Status::not_found("key 'loader_path': '" + config.loader_path + "' is not a program that can be started");
}

int fail(const Status& status, int exit_code) {
  std::fprintf(stderr, "weightd: %s\n", status.message().c_str());
  return exit_code;
}

int serve(EffectiveConfig config, const Arguments& arguments) {
  Status loader = settle_loader(config.values);
  if (!loader.ok()) return fail(loader, kExitConfig);
  auto log = Log::open(config.values.log_target, log_level_from_name(config.values.log_level));
  if (!log.ok()) return fail(log.status(), kExitConfig);
  // A peer that went away is an error of one write; and nobody's stray signal ends the service.
  // SIGHUP until the server listens to it.
  for (const int number : {SIGPIPE, SIGUSR1, SIGUSR2, SIGHUP}) ::signal(number, SIG_IGN);
  ::signal(SIGCHLD, SIG_DFL);  // an inherited SIG_IGN would reap the loaders unseen
  raise_fd_limit();
  const auto reload = [&arguments]() -> Result<EffectiveConfig> {
    WEIGHTD_ASSIGN_OR_RETURN(EffectiveConfig wanted, read_config(arguments));
    WEIGHTD_RETURN_IF_ERROR(settle_loader(wanted.values));
    return wanted;
  };
  auto server = Server::create(config, *log, reload);
  if (!server.ok()) {
    log->error(server.status().message());
    const StatusCode code = server.status().code();
    if (code == StatusCode::kUnavailable) return kExitNoGpu;
    return code == StatusCode::kInvalidArgument || code == StatusCode::kUnsupported || code == StatusCode::kNotFound ? kExitConfig
                                                                                                                     : 1;
  }
  const Status status = (*server)->run();
  if (!status.ok()) log->error(status.message());
  return status.ok() ? 0 : 1;
}

int run(int argc, char** argv) {
  open_standard_streams();
  const Arguments arguments = parse_arguments(argc, argv);
  if (arguments.action == Arguments::Action::kSayAndExit) {
    std::fputs(arguments.text.c_str(), arguments.exit_code == 0 ? stdout : stderr);
    return arguments.exit_code;
  }
  auto config = read_config(arguments);
  if (!config.ok()) return fail(config.status(), kExitConfig);
  if (arguments.action == Arguments::Action::kPrintConfig) {
    std::fputs(print_config(*config).c_str(), stdout);
    return 0;
  }
  if (arguments.action == Arguments::Action::kCheckConfig) {
    std::printf("weightd: the configuration is valid (%s)\n", config->file.empty() ? "no file" : config->file.c_str());
    return 0;
  }
  return serve(*std::move(config), arguments);
}

}  // namespace
}  // namespace weightd::daemon

int main(int argc, char** argv) {
  try {
    return weightd::daemon::run(argc, argv);
  } catch (const std::exception& error) {
    // Out of memory, or a bug: the service manager starts a fresh process.
    std::fprintf(stderr, "weightd: %s\n", error.what());
    return 1;
  }
}
