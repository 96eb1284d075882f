// SPDX-License-Identifier: Apache-2.0
#include "tests/support/daemon_fixture.h"

#include <dirent.h>
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <sstream>

#include "tests/support/programs.h"

namespace weightd::testing {
namespace {

std::string slurp(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

/// Fields of /proc/<pid>/stat behind the command, counted from 3 ("state").
std::vector<std::string> stat_fields(pid_t pid) {
  const std::string text = slurp("/proc/" + std::to_string(pid) + "/stat");
  std::istringstream in(text.substr(text.rfind(')') + 1));
  return {std::istream_iterator<std::string>(in), std::istream_iterator<std::string>()};
}

}  // namespace

DaemonFixture::DaemonFixture(const DaemonOptions& options) : options_(options) {
  write_config(options.config);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string path = folder_ / "notify";
  require(path.size() < sizeof(address.sun_path), "temporary folder's path is too long");
  std::memcpy(address.sun_path, path.c_str(), path.size());
  notify_ = UniqueFd(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  require(::bind(notify_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0, "bind " + path);
  if (options.uid != 0) {
    require(::chmod(path.c_str(), 0777) == 0 && ::chown(folder().c_str(), options.uid, options.gid) == 0, "giving the folder away");
    require(::chmod(folder().c_str(), 0755) == 0, "chmod");
  }
  if (options.any_user) require(::chmod(folder().c_str(), 0755) == 0, "chmod");
  if (options.start) start();
}

DaemonFixture::~DaemonFixture() {
  if (running()) kill();
  // A sanitizer's report in the daemon or a loader must not pass unseen.
  const std::string said = log();
  for (const char* report : {"ERROR: AddressSanitizer", "WARNING: ThreadSanitizer", "ERROR: LeakSanitizer", "runtime error: "}) {
    require(said.find(report) == std::string::npos, "weightd says:\n" + said);
  }
}

void DaemonFixture::write_config(const std::string& lines) {
  write_file(config_file(),
             "data_socket = \"data.sock\"\ncontrol_socket = \"control.sock\"\nbackend = \"" + options_.backend + "\"\n" +
                 (options_.any_user ? std::string("data_users = [\"*\"]\ndata_socket_mode = \"0666\"\n") : "") +
                 (lines.find("model_folders") == std::string::npos ? std::string("model_folders = [\".\"]\n") : "") + lines + "\n");
}

void DaemonFixture::start() {
  spawn();
  if (wait_ready()) return;
  require(false, "weightd did not become ready; it says:\n" + log());
}

void DaemonFixture::spawn() {
  require(!running(), "the daemon runs already");
  std::array<char, 512> old{};
  while (::recv(notify_.get(), old.data(), old.size(), 0) > 0) {  // of an earlier start
  }
  pid_ = ::fork();
  require(pid_ >= 0, "fork");
  if (pid_ == 0) become_daemon();
}

void DaemonFixture::become_daemon() const {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  const int log = ::open((folder_ / "weightd.log").c_str(), O_WRONLY | O_CREAT | O_APPEND, 0666);
  ::dup2(log, STDERR_FILENO);
  if (options_.max_open_files > 0) {
    const rlimit limit{options_.max_open_files, options_.max_open_files};
    ::setrlimit(RLIMIT_NOFILE, &limit);
  }
  if (options_.uid != 0 && (::setgroups(0, nullptr) != 0 || ::setgid(options_.gid) != 0 || ::setuid(options_.uid) != 0))
    ::_exit(126);
  ::setenv("NOTIFY_SOCKET", (folder_ / "notify").c_str(), 1);
  ::unsetenv("JOURNAL_STREAM");
  for (const auto& [name, value] : options_.environment) ::setenv(name.c_str(), value.c_str(), 1);
  std::vector<std::string> words = {program("weightd", WEIGHTD_DAEMON_PROGRAM), "--config", config_file()};
  words.insert(words.end(), options_.arguments.begin(), options_.arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  ::execv(argv.front(), argv.data());
  ::_exit(127);
}

bool DaemonFixture::wait_ready(std::chrono::milliseconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  const UniqueFd process(static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0)));
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()).count();
    std::array<pollfd, 2> entries = {pollfd{notify_.get(), POLLIN, 0}, pollfd{process.get(), POLLIN, 0}};
    if (left <= 0 || ::poll(entries.data(), entries.size(), static_cast<int>(left)) <= 0) return false;
    std::array<char, 512> text{};
    const ssize_t got = ::recv(notify_.get(), text.data(), text.size(), 0);
    if (got > 0 && std::string_view(text.data(), static_cast<size_t>(got)).find("READY=1") != std::string_view::npos) return true;
    if (got <= 0 && entries[1].revents != 0) return false;
  }
}

bool DaemonFixture::running() const { return pid_ > 0; }

void DaemonFixture::signal(int number) const { require(::kill(pid_, number) == 0, "signal to the daemon"); }

void DaemonFixture::remember_end(int wait_status) {
  exit_status_ = WIFEXITED(wait_status) ? WEXITSTATUS(wait_status) : -WTERMSIG(wait_status);
  pid_ = 0;
}

int DaemonFixture::wait() {
  int status = 0;
  while (::waitpid(pid_, &status, 0) < 0) require(errno == EINTR, "waitpid");
  remember_end(status);
  return exit_status_;
}

int DaemonFixture::stop() {
  signal(SIGTERM);
  return wait();
}

void DaemonFixture::kill() {
  signal(SIGKILL);
  (void)wait();
}

std::string DaemonFixture::log() const { return slurp(folder_ / "weightd.log"); }

void DaemonFixture::wait_for_log(const std::string& text) const {
  eventually("'" + text + "' in the log", [&] { return log().find(text) != std::string::npos; });
}

uint64_t DaemonFixture::open_files() const {
  uint64_t count = 0;
  DIR* folder = ::opendir(("/proc/" + std::to_string(pid_) + "/fd").c_str());
  require(folder != nullptr, "the daemon's descriptors");
  while (::readdir(folder) != nullptr) ++count;
  ::closedir(folder);
  return count - 2;
}

uint64_t DaemonFixture::rss_bytes() const {
  std::ifstream in("/proc/" + std::to_string(pid_) + "/statm");
  uint64_t size = 0, resident = 0;
  in >> size >> resident;
  return resident * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

std::chrono::milliseconds DaemonFixture::cpu_time() const {
  const auto fields = stat_fields(pid_);
  require(fields.size() > 12, "the daemon's CPU time");
  const uint64_t ticks = std::stoull(fields[11]) + std::stoull(fields[12]);
  return std::chrono::milliseconds(ticks * 1000 / static_cast<uint64_t>(::sysconf(_SC_CLK_TCK)));
}

std::vector<pid_t> DaemonFixture::children() const {
  const std::string pid = std::to_string(pid_);
  std::istringstream in(slurp("/proc/" + pid + "/task/" + pid + "/children"));
  return {std::istream_iterator<pid_t>(in), std::istream_iterator<pid_t>()};
}

}  // namespace weightd::testing
