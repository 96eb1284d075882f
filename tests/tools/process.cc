// SPDX-License-Identifier: Apache-2.0
#include "tests/tools/process.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>

namespace weightd::testing {
namespace {

void require(bool condition, const char* what) {
  if (condition) return;
  std::perror(what);
  std::abort();
}

std::string read_all(int fd) {
  std::string text;
  std::array<char, 65536> buffer{};
  require(::lseek(fd, 0, SEEK_SET) == 0, "lseek");
  while (true) {
    const ssize_t got = ::read(fd, buffer.data(), buffer.size());
    require(got >= 0, "read");
    if (got == 0) return text;
    text.append(buffer.data(), static_cast<size_t>(got));
  }
}

/// In the child, between fork and exec: only calls that are safe there.
[[noreturn]] void become(char* const* arguments, const RunOptions& options, char* const* environment, int out, int err) {
  // Whatever started the tests may ignore or block them (nohup, a shell's background job).
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGPIPE, SIGXFSZ}) std::signal(signal, SIG_DFL);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  const int null = ::open("/dev/null", O_RDONLY);
  if (::dup2(null, STDIN_FILENO) < 0 || ::dup2(out, STDOUT_FILENO) < 0 || ::dup2(err, STDERR_FILENO) < 0) ::_exit(126);
  if (!options.folder.empty() && ::chdir(options.folder.c_str()) != 0) ::_exit(126);
  ::execve(arguments[0], arguments, environment);
  ::_exit(127);
}

}  // namespace

Process::Process(const std::vector<std::string>& command, const RunOptions& options) {
  out_ = ::memfd_create("stdout", MFD_CLOEXEC);
  err_ = ::memfd_create("stderr", MFD_CLOEXEC);
  require(out_ >= 0 && err_ >= 0, "memfd_create");
  std::vector<char*> arguments, environment;
  for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  for (char** entry = environ; *entry != nullptr; ++entry) environment.push_back(*entry);
  for (const std::string& entry : options.environment) environment.insert(environment.begin(), const_cast<char*>(entry.c_str()));
  environment.push_back(nullptr);
  pid_ = ::fork();
  require(pid_ >= 0, "fork");
  if (pid_ == 0) {
    become(arguments.data(), options, environment.data(), options.out_fd >= 0 ? options.out_fd : out_,
           options.err_fd >= 0 ? options.err_fd : err_);
  }
}

Process::~Process() {
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  ::close(out_);
  ::close(err_);
}

void Process::send(int signal) const { require(::kill(pid_, signal) == 0, "kill"); }

Outcome Process::wait() {
  int status = 0;
  while (::waitpid(pid_, &status, 0) < 0) require(errno == EINTR, "waitpid");
  pid_ = -1;
  Outcome outcome;
  if (WIFEXITED(status)) outcome.exit_code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) outcome.signal = WTERMSIG(status);
  outcome.out = read_all(out_);
  outcome.err = read_all(err_);
  return outcome;
}

}  // namespace weightd::testing
