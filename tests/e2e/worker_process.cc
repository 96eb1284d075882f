// SPDX-License-Identifier: Apache-2.0
#include "tests/e2e/worker_process.h"

#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <utility>

#include "tests/support/programs.h"

extern char** environ;

namespace weightd::e2e {
namespace {

using Clock = std::chrono::steady_clock;

UniqueFd pidfd_of(pid_t pid) { return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))); }

bool readable_until(int fd, Clock::time_point limit) {
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(limit - Clock::now()).count();
    if (left <= 0) return false;
    pollfd entry{fd, POLLIN, 0};
    const int ready = ::poll(&entry, 1, static_cast<int>(left));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return false;
  }
}

int reap(pid_t pid) {
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0) {
    if (errno != EINTR) return -1;
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

/// In the child, which has one thread. The program is open already: other users need no way to its folder.
[[noreturn]] void become_worker(int program, const std::string& socket, const WorkerOptions& options, int input, int output) {
  ::dup2(input, STDIN_FILENO);
  ::dup2(output, STDOUT_FILENO);
  if (options.namespaces != 0) {
    if (::unshare(options.namespaces) != 0) ::_exit(121);
    if ((options.namespaces & CLONE_NEWPID) != 0) {
      // The next child is the first process of the new namespace; this one waits for it and ends with it.
      const pid_t inner = ::fork();
      if (inner != 0) {
        ::close_range(0, ~0U, 0);  // other workers' inputs among them
        int status = 0;
        ::waitpid(inner, &status, 0);
        ::_exit(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
      }
    }
  }
  if (options.before_exec && !options.before_exec()) ::_exit(122);
  if (options.uid != 0 && (::setgroups(0, nullptr) != 0 || ::setgid(options.uid) != 0 || ::setuid(options.uid) != 0)) ::_exit(123);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // behind setuid, which takes it back
  for (const auto& [name, value] : options.environment) ::setenv(name.c_str(), value.c_str(), 1);
  std::string name = "gpu_worker", argument = socket;
  std::array<char*, 3> argv = {name.data(), argument.data(), nullptr};
  ::syscall(SYS_execveat, program, "", argv.data(), environ, AT_EMPTY_PATH);
  ::_exit(127);
}

}  // namespace

std::runtime_error test_failure(const std::string& what) { return std::runtime_error(what); }

void wait_until(const std::string& what, const std::function<bool()>& condition) {
  const auto limit = Clock::now() + std::chrono::minutes(1);
  while (!condition()) {
    if (Clock::now() > limit) throw test_failure("not within a minute: " + what);
  }
}

const std::string& Answer::at(const std::string& key) const {
  const auto found = values.find(key);
  if (found == values.end()) throw test_failure("no '" + key + "' in the answer '" + text + "'");
  return found->second;
}

uint64_t Answer::number(const std::string& key) const { return std::stoull(at(key)); }

WorkerProcess::WorkerProcess(const std::string& socket, const WorkerOptions& options) {
  const std::string path = testing::program("gpu_worker", WEIGHTD_GPU_WORKER);
  const UniqueFd program(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  int in[2], out[2];
  if (!program.valid() || ::pipe2(in, O_CLOEXEC) != 0 || ::pipe2(out, O_CLOEXEC) != 0) throw test_failure("starting " + path);
  input_ = UniqueFd(in[1]);
  output_ = UniqueFd(out[0]);
  const UniqueFd child_in(in[0]), child_out(out[1]);
  pid_ = ::fork();
  if (pid_ < 0) throw test_failure("fork");
  if (pid_ == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::close(in[1]);  // with a new process-id namespace this process stays beside the worker
    become_worker(program.get(), socket, options, child_in.get(), child_out.get());
  }
  end_ = pidfd_of(pid_);
}

WorkerProcess::WorkerProcess(WorkerProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, 0)),
      input_(std::move(other.input_)),
      output_(std::move(other.output_)),
      end_(std::move(other.end_)),
      read_(std::move(other.read_)),
      last_line_(std::move(other.last_line_)) {}

WorkerProcess::~WorkerProcess() {
  if (pid_ > 0) kill();
}

void WorkerProcess::give_up(const std::string& why) {
  const pid_t pid = pid_;
  kill();
  throw test_failure("worker " + std::to_string(pid) + ": " + why);
}

void WorkerProcess::send(const std::string& line) {
  last_line_ = line;
  const std::string text = line + "\n";
  // A worker that has ended must fail this test, not end the program.
  const auto before = ::signal(SIGPIPE, SIG_IGN);
  const ssize_t sent = ::write(input_.get(), text.data(), text.size());
  ::signal(SIGPIPE, before);
  if (sent != static_cast<ssize_t>(text.size())) give_up("takes no '" + line + "'");
}

Answer WorkerProcess::answer(std::chrono::seconds limit) {
  const auto deadline = Clock::now() + limit;
  size_t end = 0;
  while ((end = read_.find('\n')) == std::string::npos) {
    if (!readable_until(output_.get(), deadline))
      give_up("no answer to '" + last_line_ + "' within " + std::to_string(limit.count()) + " s");
    std::array<char, 4096> part{};
    const ssize_t got = ::read(output_.get(), part.data(), part.size());
    if (got <= 0) {
      const int status = wait();
      throw test_failure("a worker ended (" + std::to_string(status) + ") instead of answering '" + last_line_ + "'");
    }
    read_.append(part.data(), static_cast<size_t>(got));
  }
  Answer answer;
  answer.text = read_.substr(0, end);
  read_.erase(0, end + 1);
  std::istringstream words(answer.text);
  std::string word;
  words >> word;
  answer.ok = word == "ok";
  if (!answer.ok) {
    words >> answer.code;
    return answer;
  }
  while (words >> word) {
    const size_t equal = word.find('=');
    if (equal != std::string::npos) answer.values[word.substr(0, equal)] = word.substr(equal + 1);
  }
  return answer;
}

Answer WorkerProcess::ask(const std::string& line, std::chrono::seconds limit) {
  send(line);
  return answer(limit);
}

Answer WorkerProcess::must(const std::string& line, std::chrono::seconds limit) {
  Answer got = ask(line, limit);
  if (!got.ok) throw test_failure("worker " + std::to_string(pid_) + ": '" + line + "': " + got.text);
  return got;
}

void WorkerProcess::signal(int number) const {
  if (::kill(pid_, number) != 0) throw test_failure("signal to a worker");
}

void WorkerProcess::kill(bool reap_it) {
  ::kill(pid_, SIGKILL);
  if (!reap_it) return;
  (void)reap(pid_);
  pid_ = 0;
}

int WorkerProcess::wait(std::chrono::seconds limit) {
  if (!readable_until(end_.get(), Clock::now() + limit)) give_up("does not end within " + std::to_string(limit.count()) + " s");
  return reap(std::exchange(pid_, 0));
}

int WorkerProcess::finish(std::chrono::seconds limit) {
  input_.reset();
  return wait(limit);
}

bool may_unshare(int namespaces) {
  const pid_t pid = ::fork();
  if (pid == 0) ::_exit(::unshare(namespaces) == 0 ? 0 : 1);
  return pid > 0 && reap(pid) == 0;
}

int run_program(const std::vector<std::string>& words, std::string* output, std::chrono::seconds limit) {
  int out[2];
  if (::pipe2(out, O_CLOEXEC) != 0) throw test_failure("pipe2");
  const UniqueFd from(out[0]);
  UniqueFd to(out[1]);
  std::vector<std::string> copies = words;
  std::vector<char*> argv;
  for (std::string& word : copies) argv.push_back(word.data());
  argv.push_back(nullptr);
  const pid_t pid = ::fork();
  if (pid < 0) throw test_failure("fork");
  if (pid == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (output != nullptr && (::dup2(to.get(), STDOUT_FILENO) < 0 || ::dup2(to.get(), STDERR_FILENO) < 0)) ::_exit(126);
    ::execv(argv.front(), argv.data());
    ::_exit(127);
  }
  to.reset();
  const UniqueFd end = pidfd_of(pid);
  const auto deadline = Clock::now() + limit;
  std::array<char, 4096> part{};
  for (ssize_t got = 1; got > 0;) {
    if (!readable_until(from.get(), deadline)) break;
    got = ::read(from.get(), part.data(), part.size());
    if (got > 0 && output != nullptr) output->append(part.data(), static_cast<size_t>(got));
  }
  const bool ended = readable_until(end.get(), deadline);
  if (!ended) ::kill(pid, SIGKILL);
  const int status = reap(pid);
  if (!ended) throw test_failure(words.front() + " does not end within " + std::to_string(limit.count()) + " s");
  return status;
}

}  // namespace weightd::e2e
