// SPDX-License-Identifier: Apache-2.0
// The daemon as a process: its life, its peers, and what bad ones can do to it.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <functional>

#include "ipc/frame.h"
#include "tests/support/daemon_fixture.h"
#include "tests/support/raw_peer.h"
#include "tests/support/test_bundle.h"

namespace weightd::daemon {
namespace {

using ::weightd::testing::DaemonFixture;
using ::weightd::testing::DaemonOptions;
using ::weightd::testing::eventually;
using ::weightd::testing::make_bundle;
using ::weightd::testing::RawPeer;
using ::weightd::testing::require;

DaemonOptions with(const std::string& config) {
  DaemonOptions options;
  options.config = config;
  return options;
}

ipc::StatusReply status_of(const DaemonFixture& daemon) {
  RawPeer admin(daemon.control_socket());
  auto status = admin.get<ipc::StatusReply>(ipc::StatusRequest{});
  require(status.ok(), "status: " + status.status().message());
  return *status;
}
/// Only this question's own connection is left.
void wait_until_alone(const DaemonFixture& daemon) {
  eventually("all other sessions closed", [&] { return status_of(daemon).session_count == 1; });
}

UniqueFd connect(const std::string& socket) {
  auto fd = ipc::connect_unix(socket);
  require(fd.ok(), fd.status().message());
  return *std::move(fd);
}
void write_all(int fd, const std::string& bytes) { (void)::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL); }
/// Everything until the peer closes.
std::string read_all(int fd) {
  std::string all;
  std::array<char, 4096> part{};
  for (ssize_t got = 0; (got = ::recv(fd, part.data(), part.size(), 0)) > 0;) all.append(part.data(), static_cast<size_t>(got));
  return all;
}

constexpr uint16_t kForeignVersion = ipc::kProtocolVersion + 1;

std::string preamble_bytes(const ipc::Preamble& preamble = {}) {
  const auto bytes = ipc::encode_preamble(preamble);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}
std::string frame_bytes(const ipc::Request& request) {
  const auto body = ipc::encode(request);
  const auto header = ipc::encode_frame_header({static_cast<uint32_t>(body.size()), 0});
  std::string bytes(reinterpret_cast<const char*>(header.data()), header.size());
  return bytes + std::string(reinterpret_cast<const char*>(body.data()), body.size());
}
/// The response in the last frame of what a daemon sent, its preamble included.
Result<ipc::Response> last_response(const std::string& bytes) {
  size_t begin = ipc::kPreambleBytes;
  Result<ipc::Response> response = Status::not_found("no frame in " + std::to_string(bytes.size()) + " bytes");
  while (begin + ipc::kFrameHeaderBytes <= bytes.size()) {
    uint32_t size = 0;
    std::memcpy(&size, bytes.data() + begin, sizeof(size));
    begin += ipc::kFrameHeaderBytes;
    if (begin + size > bytes.size()) return Status::corruption("a cut frame");
    response = ipc::decode_response(std::span(reinterpret_cast<const std::byte*>(bytes.data() + begin), size));
    begin += size;
  }
  return response;
}
Status last_error(const std::string& bytes) {
  const auto response = last_response(bytes);
  if (!response.ok()) return response.status();
  const auto* error = std::get_if<Status>(&response->body);
  return error == nullptr ? Status::internal("the last response is no error") : *error;
}

/// Runs `work` in a child, as another user if asked; the child ends with what it returns.
int in_child(const std::function<int()>& work, uint32_t uid = 0, uint32_t gid = 0) {
  const pid_t pid = ::fork();
  require(pid >= 0, "fork");
  if (pid == 0) {
    if (uid != 0 && (::setgid(gid) != 0 || ::setuid(uid) != 0)) ::_exit(100);
    ::_exit(work());
  }
  int status = 0;
  require(::waitpid(pid, &status, 0) == pid, "waitpid");
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

// --- life ----------------------------------------------------------------------------------------------------------------

TEST(Server, StartsTellsItIsReadyAndStopsCleanly) {
  DaemonFixture daemon;
  struct stat info {};
  ASSERT_EQ(::stat(daemon.data_socket().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0660U);
  const ipc::StatusReply status = status_of(daemon);
  EXPECT_EQ(status.version.backend, "host");
  EXPECT_EQ(status.version.pid, daemon.pid());
  EXPECT_EQ(status.version.protocol_version, ipc::kProtocolVersion);
  EXPECT_NE(status.version.instance, 0U);
  ASSERT_EQ(status.devices.size(), 1U);
  EXPECT_EQ(status.devices.front().uuid, "host");
  EXPECT_GT(status.devices.front().budget_bytes, 0U);
  EXPECT_GT(status.devices.front().total_bytes, status.devices.front().budget_bytes);
  EXPECT_EQ(status.session_count, 1U);
  EXPECT_NEAR(static_cast<double>(status.fd_count), static_cast<double>(daemon.open_files()), 2);
  EXPECT_GT(status.rss_bytes, 0U);
  EXPECT_EQ(daemon.stop(), 0);
  EXPECT_NE(::access(daemon.data_socket().c_str(), F_OK), 0);
  EXPECT_NE(::access(daemon.control_socket().c_str(), F_OK), 0);
  // One line at the start, two at the end, none in between.
  const std::string log = daemon.log();
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 3) << log;
  EXPECT_NE(log.find(" started: backend host"), std::string::npos);
  EXPECT_NE(log.find("weightd stopped\n"), std::string::npos);
}

TEST(Server, EndsOnSigintToo) {
  DaemonFixture daemon;
  daemon.signal(SIGINT);
  EXPECT_EQ(daemon.wait(), 0);
}

TEST(Server, EveryProcessHasAnInstanceOfItsOwn) {
  DaemonFixture daemon;
  const uint64_t first = status_of(daemon).version.instance;
  daemon.stop();
  daemon.start();
  EXPECT_NE(status_of(daemon).version.instance, first);
}

TEST(Server, CO_128_StartsAgainAfterSigkillTimeAndAgain) {
  DaemonFixture daemon;
  for (int round = 0; round < 20; ++round) {
    daemon.kill();
    EXPECT_EQ(::access(daemon.data_socket().c_str(), F_OK), 0) << "the crash left its socket";
    daemon.start();
  }
  EXPECT_EQ(status_of(daemon).session_count, 1U);
}

TEST(Server, ASecondDaemonOnTheSameSocketsIsRefused) {
  DaemonFixture daemon;
  DaemonOptions options;
  options.arguments = {"--data-socket", daemon.data_socket()};
  options.start = false;
  DaemonFixture second(options);
  second.spawn();
  EXPECT_FALSE(second.wait_ready());
  EXPECT_EQ(second.wait(), 1);
  EXPECT_NE(second.log().find("data socket"), std::string::npos) << second.log();
  EXPECT_EQ(status_of(daemon).session_count, 1U);
}

TEST(Server, CO_131_ARemovedSocketComesBackAndConnectionsStay) {
  DaemonFixture daemon;
  RawPeer worker(daemon.data_socket());
  ASSERT_TRUE(worker.ask(ipc::HelloRequest{}).ok());
  ASSERT_EQ(::unlink(daemon.data_socket().c_str()), 0);
  eventually("the socket is bound again", [&] { return ipc::connect_unix(daemon.data_socket()).ok(); });
  EXPECT_TRUE(worker.ask(ipc::HelloRequest{}).ok());
}

TEST(Server, WorkersAreToldThatItStops) {
  DaemonFixture daemon;
  RawPeer worker(daemon.data_socket());
  ASSERT_TRUE(worker.ask(ipc::HelloRequest{}).ok());
  daemon.signal(SIGTERM);
  const auto response = worker.receive();
  ASSERT_TRUE(response.ok());
  EXPECT_TRUE(std::holds_alternative<ipc::ShuttingDownEvent>(std::get<ipc::EventReply>(response->body).event));
  EXPECT_EQ(worker.receive().status().code(), StatusCode::kUnavailable);
  EXPECT_EQ(daemon.wait(), 0);
}

// --- configuration -------------------------------------------------------------------------------------------------------

int run_to_the_end(DaemonFixture& daemon) {
  daemon.spawn();
  EXPECT_FALSE(daemon.wait_ready());
  return daemon.wait();
}

TEST(Server, CO_132_AWrongConfigurationEndsWith78) {
  DaemonOptions options = with("max_sesions = 5\n");
  options.start = false;
  DaemonFixture daemon(options);
  EXPECT_EQ(run_to_the_end(daemon), 78);
  EXPECT_EQ(daemon.log(), "weightd: " + daemon.config_file() + ":5: unknown key 'max_sesions'; did you mean 'max_sessions'?\n");
  options.arguments = {"--check-config"};
  DaemonFixture check(options);
  EXPECT_EQ(run_to_the_end(check), 78);
  options.config = "";
  DaemonFixture good(options);
  EXPECT_EQ(run_to_the_end(good), 0);
}

TEST(Server, AWrongCommandLineEndsWith2) {
  DaemonOptions options;
  options.start = false;
  options.arguments = {"--no-such-option"};
  DaemonFixture daemon(options);
  EXPECT_EQ(run_to_the_end(daemon), 2);
  options.arguments = {"--max-jobs"};
  DaemonFixture missing(options);
  EXPECT_EQ(run_to_the_end(missing), 2);
  options.arguments = {"--max-jobs", "0"};
  DaemonFixture range(options);
  EXPECT_EQ(run_to_the_end(range), 78);
}

TEST(Server, CO_134_CommandLineAndEnvironmentReachTheDaemon) {
  DaemonOptions options = with("budget_bytes = \"1GiB\"\n");
  options.environment["WEIGHTD_BUDGET_BYTES"] = "2GiB";
  DaemonFixture by_environment(options);
  EXPECT_EQ(status_of(by_environment).devices.front().budget_bytes, uint64_t{2} << 30);
  options.arguments = {"--budget-bytes", "3GiB"};
  DaemonFixture by_argument(options);
  EXPECT_EQ(status_of(by_argument).devices.front().budget_bytes, uint64_t{3} << 30);
}

TEST(Server, CO_135_AGpuThatIsNotThereIsNoSilentHost) {
  DaemonOptions options;
  options.start = false;
  options.arguments = {"--backend", "cuda"};
  options.environment["CUDA_VISIBLE_DEVICES"] = "";  // where there is a GPU, nobody sees it
  DaemonFixture daemon(options);
  EXPECT_EQ(run_to_the_end(daemon), 69);
  EXPECT_NE(daemon.log().find("backend 'cuda': no usable GPU: "), std::string::npos) << daemon.log();
  DaemonOptions any = options;
  any.start = true;
  any.arguments = {"--backend", "auto"};
  DaemonFixture automatic(any);
  EXPECT_NE(automatic.log().find("backend host (auto: no usable GPU: "), std::string::npos) << automatic.log();
}

TEST(Server, UnknownUsersAndGroupsAreRefused) {
  for (const char* line :
       {"data_users = [\"no-such-user\"]\n", "control_groups = [\"no-such-group\"]\n", "data_socket_group = \"no-such-group\"\n"}) {
    DaemonOptions options = with(line);
    options.start = false;
    DaemonFixture daemon(options);
    EXPECT_EQ(run_to_the_end(daemon), 78) << line;
    EXPECT_NE(daemon.log().find("no-such-"), std::string::npos) << daemon.log();
  }
}

TEST(Server, AMissingLoaderIsFoundAtTheStart) {
  DaemonOptions options = with("loader_path = \"/nonexistent/loader\"\n");
  options.start = false;
  DaemonFixture daemon(options);
  EXPECT_EQ(run_to_the_end(daemon), 78);
  EXPECT_NE(daemon.log().find("'/nonexistent/loader'"), std::string::npos);
}

TEST(Server, ReloadIsAtomicAndSaysWhatNeedsARestart) {
  DaemonFixture daemon(with("budget_bytes = \"1GiB\"\n"));
  daemon.write_config("budget_bytes = \"2GiB\"\nmax_queued_bytes = \"1MiB\"\n");
  daemon.signal(SIGHUP);
  daemon.wait_for_log("configuration reloaded; changed: budget_bytes; needs a restart: max_queued_bytes");
  EXPECT_EQ(status_of(daemon).devices.front().budget_bytes, uint64_t{2} << 30);
  daemon.write_config("budget_bytes = \"3GiB\"\nno_such_key = 1\n");
  daemon.signal(SIGHUP);
  daemon.wait_for_log("reload refused, the old configuration stays");
  EXPECT_EQ(status_of(daemon).devices.front().budget_bytes, uint64_t{2} << 30);
  EXPECT_EQ(daemon.stop(), 0);
}

// --- log -----------------------------------------------------------------------------------------------------------------

TEST(Server, CO_154_ARotatedLogIsOpenedAgain) {
  DaemonFixture daemon(with("log_target = \"d.log\"\n"));
  ASSERT_EQ(::rename((daemon / "d.log").c_str(), (daemon / "d.log.1").c_str()), 0);
  daemon.signal(SIGHUP);
  eventually("a line in the new file", [&] {
    return ::access((daemon / "d.log").c_str(), F_OK) == 0 &&
           testing::read_file(daemon / "d.log").find("reloaded") != std::string::npos;
  });
  // Something that cannot be opened takes its place: the old file stays in use.
  ASSERT_EQ(::rename((daemon / "d.log").c_str(), (daemon / "d.log.2").c_str()), 0);
  ASSERT_EQ(::mkfifo((daemon / "d.log").c_str(), 0600), 0);
  daemon.signal(SIGHUP);
  eventually("the complaint in the old file",
             [&] { return testing::read_file(daemon / "d.log.2").find("log_target") != std::string::npos; });
  EXPECT_EQ(daemon.stop(), 0);
}

TEST(Server, CO_154_AFullDiskStopsNothing) {
  DaemonOptions options;
  options.start = false;
  DaemonFixture daemon(options);
  // Its stderr is a device that is always full.
  ASSERT_EQ(::symlink("/dev/full", (daemon / "weightd.log").c_str()), 0);
  daemon.start();
  EXPECT_EQ(status_of(daemon).session_count, 1U);
  EXPECT_EQ(daemon.stop(), 0);
  ASSERT_EQ(::unlink((daemon / "weightd.log").c_str()), 0);  // read, it would be zeros without end
}

TEST(Server, UnderSystemdLinesHaveAPriority) {
  DaemonOptions options;
  options.environment["JOURNAL_STREAM"] = "8:1";
  DaemonFixture daemon(options);
  EXPECT_EQ(daemon.log().substr(0, 11), "<6>weightd ") << daemon.log();
}

TEST(Server, CO_155_AStormOfSignalsThenACleanEnd) {
  DaemonFixture daemon(with("log_level = \"debug\"\n"));
  RawPeer admin(daemon.control_socket());
  for (int i = 0; i < 2000; ++i) {
    daemon.signal(SIGHUP);
    daemon.signal(i % 2 == 0 ? SIGUSR1 : SIGUSR2);
    if (i % 100 == 0) {
      ASSERT_TRUE(admin.ask(ipc::HelloRequest{"b", "n"}).ok());
    }
  }
  EXPECT_EQ(daemon.stop(), 0);
}

TEST(Server, CO_155_ASignalOfDeathEndsItAtOnce) {
  DaemonFixture daemon;
  daemon.signal(SIGSEGV);
  EXPECT_NE(daemon.wait(), 0);                 // -SIGSEGV, but for a sanitizer's own handler
  ::unlink((daemon / "weightd.log").c_str());  // whose report is no finding
}

TEST(Server, CO_153_ItDoesNotForkAndItsLinesArrive) {
  DaemonFixture daemon;
  EXPECT_TRUE(daemon.children().empty());
  EXPECT_EQ(status_of(daemon).version.pid, daemon.pid());
  EXPECT_EQ(daemon.stop(), 0);
  EXPECT_NE(daemon.log().find("weightd stopped"), std::string::npos);
}

// --- rights --------------------------------------------------------------------------------------------------------------

TEST(Server, CO_127_TheDataSocketAdministersNothing) {
  DaemonFixture daemon;
  RawPeer worker(daemon.data_socket());
  const auto denied = [&](auto body) {
    const auto response = worker.ask(std::move(body));
    require(response.ok(), "an answer");
    const auto* error = std::get_if<Status>(&response->body);
    return error == nullptr ? StatusCode::kOk : error->code();
  };
  EXPECT_EQ(denied(ipc::StatusRequest{}), StatusCode::kPermissionDenied);
  EXPECT_EQ(denied(ipc::LoadRequest{"m", daemon / "m.wpk", "", 0}), StatusCode::kPermissionDenied);
  EXPECT_EQ(denied(ipc::UnloadRequest{"m", "", 0}), StatusCode::kPermissionDenied);
  EXPECT_EQ(denied(ipc::LeasesRequest{}), StatusCode::kPermissionDenied);
  EXPECT_EQ(denied(ipc::VerifyRequest{"m"}), StatusCode::kPermissionDenied);
  EXPECT_EQ(denied(ipc::HelloRequest{}), StatusCode::kOk);
  EXPECT_EQ(denied(ipc::VersionRequest{}), StatusCode::kOk);
  EXPECT_EQ(denied(ipc::ListRequest{}), StatusCode::kOk);
  EXPECT_EQ(denied(ipc::AcquireRequest{"m", "", 0, ""}), StatusCode::kNotFound);
  EXPECT_EQ(denied(ipc::ReleaseRequest{1}), StatusCode::kNotFound);
}

class ServerRights : public ::testing::Test {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "needs root to act as other users";
  }
  /// 0: hello was answered; otherwise the code of the refusal.
  static int hello_as(const std::string& socket, uint32_t uid, uint32_t gid) {
    return in_child(
        [&] {
          RawPeer peer(socket);
          const auto reply = peer.get<ipc::HelloReply>(ipc::HelloRequest{});
          return static_cast<int>(reply.status().code());
        },
        uid, gid);
  }
};

TEST_F(ServerRights, CO_127_UsersAndGroupsPerSocket) {
  DaemonFixture daemon(
      with("data_socket_mode = \"0666\"\ncontrol_socket_mode = \"0666\"\ndata_users = [\"4242\"]\n"
           "data_groups = [\"5151\"]\ncontrol_users = [\"6161\"]\n"));
  ASSERT_EQ(::chmod(daemon.folder().c_str(), 0755), 0);
  const int denied = static_cast<int>(StatusCode::kPermissionDenied);
  EXPECT_EQ(hello_as(daemon.data_socket(), 4242, 4242), 0);
  EXPECT_EQ(hello_as(daemon.data_socket(), 4243, 5151), 0);
  EXPECT_EQ(hello_as(daemon.data_socket(), 4243, 4243), denied);
  EXPECT_EQ(hello_as(daemon.control_socket(), 4242, 4242), denied);
  EXPECT_EQ(hello_as(daemon.control_socket(), 4243, 5151), denied);
  EXPECT_EQ(hello_as(daemon.control_socket(), 6161, 6161), 0);
  EXPECT_EQ(hello_as(daemon.data_socket(), 6161, 6161), denied);
  wait_until_alone(daemon);
  EXPECT_NE(daemon.log().find("may not use the control socket (control_users, control_groups)"), std::string::npos) << daemon.log();
}

TEST_F(ServerRights, CO_127_TheOverflowUserHasNoRights) {
  DaemonFixture daemon(with("data_socket_mode = \"0666\"\ndata_users = [\"*\", \"65534\"]\n"));
  ASSERT_EQ(::chmod(daemon.folder().c_str(), 0755), 0);
  EXPECT_EQ(hello_as(daemon.data_socket(), 4242, 4242), 0);
  EXPECT_EQ(hello_as(daemon.data_socket(), 65534, 65534), static_cast<int>(StatusCode::kPermissionDenied));
}

TEST_F(ServerRights, AReloadChangesWhoMayConnect) {
  DaemonFixture daemon(with("data_socket_mode = \"0666\"\n"));
  ASSERT_EQ(::chmod(daemon.folder().c_str(), 0755), 0);
  EXPECT_EQ(hello_as(daemon.data_socket(), 4242, 4242), static_cast<int>(StatusCode::kPermissionDenied));
  daemon.write_config("data_socket_mode = \"0666\"\ndata_users = [\"4242\"]\n");
  daemon.signal(SIGHUP);
  daemon.wait_for_log("configuration reloaded; changed: data_users");
  EXPECT_EQ(hello_as(daemon.data_socket(), 4242, 4242), 0);
}

TEST_F(ServerRights, CO_124_TheSocketsModeIsRightWhateverTheUmask) {
  const mode_t old = ::umask(0);
  DaemonFixture daemon(with("data_socket_mode = \"0600\"\ncontrol_socket_group = \"5151\"\ncontrol_socket_mode = \"0640\"\n"));
  ::umask(old);
  struct stat info {};
  ASSERT_EQ(::stat(daemon.data_socket().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0600U);
  ASSERT_EQ(::stat(daemon.control_socket().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0640U);
  EXPECT_EQ(info.st_gid, 5151U);
}

TEST_F(ServerRights, RunsAsAnOrdinaryUser) {
  DaemonOptions options;
  options.uid = options.gid = 4242;
  DaemonFixture daemon(options);
  EXPECT_EQ(hello_as(daemon.control_socket(), 4242, 4242), 0);
  make_bundle(daemon / "m.wpk");
  RawPeer admin(daemon.control_socket());  // as root
  EXPECT_TRUE(admin.get<ipc::LoadedReply>(ipc::LoadRequest{"m", daemon / "m.wpk", "", 0}).ok());
  EXPECT_EQ(daemon.stop(), 0);
}

// --- versions ------------------------------------------------------------------------------------------------------------

TEST(Server, CO_108_HelloStatusAndVersionWorkForEveryVersion) {
  DaemonFixture daemon;
  for (const uint16_t version : {kForeignVersion, uint16_t{255}, uint16_t{65535}}) {
    const UniqueFd admin = connect(daemon.control_socket());
    write_all(admin.get(), preamble_bytes({version, version}) + frame_bytes({1, ipc::HelloRequest{}}) +
                               frame_bytes({2, ipc::VersionRequest{}}) + frame_bytes({3, ipc::StatusRequest{}}));
    ::shutdown(admin.get(), SHUT_WR);
    const auto response = last_response(read_all(admin.get()));
    ASSERT_TRUE(response.ok()) << response.status().message();
    EXPECT_EQ(response->id, 3U);
    EXPECT_TRUE(std::holds_alternative<ipc::StatusReply>(response->body)) << "version " << version;
  }
}

TEST(Server, CO_109_OtherRequestsOfAForeignVersionGetAReadableRefusal) {
  DaemonFixture daemon;
  const UniqueFd admin = connect(daemon.control_socket());
  write_all(admin.get(),
            preamble_bytes({kForeignVersion, kForeignVersion}) + frame_bytes({7, ipc::LoadRequest{"m", daemon / "m.wpk", "", 0}}));
  const std::string answer = read_all(admin.get());  // it closes
  EXPECT_EQ(last_error(answer).code(), StatusCode::kUnsupported);
  EXPECT_EQ(last_response(answer)->id, 7U);
  // A message that this version cannot read.
  const UniqueFd strange = connect(daemon.control_socket());
  write_all(strange.get(),
            preamble_bytes({kForeignVersion, kForeignVersion}) + std::string("\x08\0\0\0\0\0\0\0", 8) + std::string(8, '\x55'));
  EXPECT_EQ(last_error(read_all(strange.get())).code(), StatusCode::kUnsupported);
}

TEST(Server, CO_109_WhateverComesFirstIsAnsweredByOneReadableErrorAndTheEnd) {
  DaemonFixture daemon;
  for (const std::string& first : {std::string("GET / HTTP/1.1\r\n\r\n"), std::string(16, '\0'), std::string(16, '\xff'),
                                   preamble_bytes() + std::string(8, '\xff'),  // a frame of 4 GiB
                                   preamble_bytes() + std::string("\x10\0\0\0\0\0\0\0", 8) + std::string(16, '\x5a'),  // no message
                                   preamble_bytes() + frame_bytes({1, ipc::HelloRequest{}}) + std::string("\1\0\0\0\0\0\0\0", 8)}) {
    const UniqueFd peer = connect(daemon.data_socket());
    write_all(peer.get(), first);
    const Status error = last_error(read_all(peer.get()));
    EXPECT_EQ(error.code(), StatusCode::kInvalidArgument) << error.to_string();
    EXPECT_FALSE(error.message().empty());
  }
  wait_until_alone(daemon);
}

// --- bad peers -----------------------------------------------------------------------------------------------------------

TEST(Server, CO_070_EveryPrefixOfARequestAndThenDeath) {
  DaemonFixture daemon;
  make_bundle(daemon / "m.wpk");
  const std::string request = preamble_bytes() + frame_bytes({1, ipc::LoadRequest{"m", daemon / "m.wpk", "", 0}});
  wait_until_alone(daemon);
  const uint64_t files = daemon.open_files();
  for (size_t length = 0; length < request.size(); ++length) {
    const UniqueFd peer = connect(daemon.control_socket());
    write_all(peer.get(), request.substr(0, length));
  }
  wait_until_alone(daemon);
  eventually("descriptors back", [&] { return daemon.open_files() <= files; });
  EXPECT_TRUE(status_of(daemon).models.empty());
  EXPECT_TRUE(daemon.children().empty());
}

TEST(Server, CO_112_OutOfDescriptorsItRecovers) {
  DaemonOptions options;
  options.max_open_files = 64;
  DaemonFixture daemon(options);
  RawPeer early(daemon.data_socket());
  ASSERT_TRUE(early.ask(ipc::HelloRequest{}).ok());
  {
    std::vector<UniqueFd> many;
    for (int i = 0; i < 200; ++i) many.push_back(connect(daemon.data_socket()));
    ASSERT_TRUE(early.ask(ipc::HelloRequest{}).ok()) << "those who were there go on";
    daemon.wait_for_log("data socket:");
  }
  eventually("served again", [&] {
    RawPeer admin(daemon.control_socket());
    return admin.get<ipc::StatusReply>(ipc::StatusRequest{}).ok();
  });
  eventually("all gone but one", [&] { return status_of(daemon).session_count == 2; });
  const std::string log = daemon.log();
  EXPECT_LT(std::count(log.begin(), log.end(), '\n'), 20) << log;
  ASSERT_TRUE(early.ask(ipc::HelloRequest{}).ok());
}

TEST(Server, CO_113_UnexpectedDescriptorsAreClosedAndEndTheConnection) {
  DaemonFixture daemon;
  wait_until_alone(daemon);
  const uint64_t files = daemon.open_files();
  for (int round = 0; round < 100; ++round) {
    for (const size_t count : {size_t{1}, size_t{8}, size_t{253}}) {
      RawPeer peer(daemon.data_socket());
      std::vector<UniqueFd> fds;
      for (size_t i = 0; i < count; ++i) fds.emplace_back(::open("/dev/null", O_RDONLY | O_CLOEXEC));
      ASSERT_TRUE(peer.channel().send({ipc::encode(ipc::Request{1, ipc::HelloRequest{}}), std::move(fds)}).ok());
      const auto response = peer.receive();
      ASSERT_TRUE(response.ok()) << response.status().message();
      EXPECT_EQ(std::get<Status>(response->body).code(), StatusCode::kInvalidArgument);
    }
  }
  wait_until_alone(daemon);
  eventually("descriptors back", [&] { return daemon.open_files() <= files; });
}

TEST(Server, CO_114_ConnectAndCloseAgainAndAgain) {
  DaemonFixture daemon;
  wait_until_alone(daemon);
  const pid_t pid = daemon.pid();
  for (int i = 0; i < 3000; ++i) {
    const UniqueFd peer = connect(daemon.data_socket());
    if (i % 3 == 1) write_all(peer.get(), "\x89");
    if (i % 3 == 2) write_all(peer.get(), preamble_bytes() + frame_bytes({1, ipc::ListRequest{}}));  // the reply is never read
  }
  wait_until_alone(daemon);
  EXPECT_EQ(status_of(daemon).version.pid, pid);
}

TEST(Server, CO_115_ADeadlineForTheWholeMessage) {
  DaemonFixture daemon(with("message_deadline_ms = 200\n"));
  RawPeer idle(daemon.data_socket());
  ASSERT_TRUE(idle.ask(ipc::HelloRequest{}).ok());
  const std::string request = preamble_bytes() + frame_bytes({1, ipc::AcquireRequest{"m", "", 0, ""}});
  std::vector<UniqueFd> slow;
  for (int i = 0; i < 50; ++i) {
    slow.push_back(connect(daemon.data_socket()));
    // Some say nothing at all, some stop inside the preamble, the header, the body.
    write_all(slow.back().get(), request.substr(0, static_cast<size_t>(i) % request.size()));
  }
  for (const UniqueFd& peer : slow) {
    const Status error = last_error(read_all(peer.get()));  // returns when the daemon closes
    EXPECT_EQ(error.code(), StatusCode::kDeadlineExceeded) << error.to_string();
    EXPECT_EQ(error.message(), "message not complete within 200 ms (message_deadline_ms)");
  }
  EXPECT_TRUE(idle.ask(ipc::HelloRequest{}).ok()) << "idle time between messages is free";
}

TEST(Server, CO_115_TheDeadlineIsNotRenewedByProgress) {
  DaemonFixture daemon(with("message_deadline_ms = 300\n"));
  const UniqueFd peer = connect(daemon.data_socket());
  const std::string request = preamble_bytes() + frame_bytes({1, ipc::AcquireRequest{std::string(200, 'm'), "", 0, ""}});
  write_all(peer.get(), request.substr(0, 20));
  // A byte whenever the daemon has answered somebody else: steady progress, far too slow.
  RawPeer other(daemon.data_socket());
  for (size_t i = 20;; ++i) {
    ASSERT_LT(i + 1, request.size()) << "the message became complete";
    for (int pause = 0; pause < 200; ++pause) ASSERT_TRUE(other.ask(ipc::HelloRequest{}).ok());
    if (::send(peer.get(), request.data() + i, 1, MSG_NOSIGNAL) < 0) break;
  }
  EXPECT_EQ(last_error(read_all(peer.get())).code(), StatusCode::kDeadlineExceeded);
}

TEST(Server, CO_116_HangUpAndHalfCloseInEveryState) {
  DaemonFixture daemon;
  make_bundle(daemon / "m.wpk");
  {
    RawPeer admin(daemon.control_socket());
    ASSERT_TRUE(admin.get<ipc::LoadedReply>(ipc::LoadRequest{"m", daemon / "m.wpk", "", 0}).ok());
  }
  for (const int how : {SHUT_WR, SHUT_RD, SHUT_RDWR}) {
    std::vector<std::unique_ptr<RawPeer>> peers;
    const auto peer = [&]() -> RawPeer& { return *peers.emplace_back(std::make_unique<RawPeer>(daemon.data_socket())); };
    peer();                                                                    // before hello
    require(peer().ask(ipc::HelloRequest{}).ok(), "hello");                    // after it
    peer().send({1, ipc::AcquireRequest{"other", "", 60'000, ""}});            // waiting
    require(peer().ask(ipc::AcquireRequest{"m", "", 0, ""}).ok(), "acquire");  // with a lease
    peer().send({1, ipc::ListRequest{}});                                      // during the reply
    for (const auto& each : peers) ::shutdown(each->channel().fd(), how);
    // Reading half-closed: the daemon sees it when it next writes to that peer.
    if (how == SHUT_RD) {
      for (const auto& each : peers) (void)each->channel().send({ipc::encode(ipc::Request{9, ipc::HelloRequest{}}), {}});
    }
    wait_until_alone(daemon);
  }
  const auto before = daemon.cpu_time();
  for (int i = 0; i < 100; ++i) (void)status_of(daemon);
  EXPECT_LT((daemon.cpu_time() - before).count(), 2000) << "nothing spins";
}

TEST(Server, CO_117_APeerThatNeverReadsIsDropped) {
  DaemonFixture daemon(with("write_deadline_ms = 300\n"));
  const uint64_t rss = daemon.rss_bytes();
  const UniqueFd peer = connect(daemon.control_socket());
  write_all(peer.get(), preamble_bytes());
  const std::string request = frame_bytes({1, ipc::StatusRequest{}});
  std::string block;
  for (int i = 0; i < 1000; ++i) block += request;
  ::fcntl(peer.get(), F_SETFL, O_NONBLOCK);
  bool dropped = false;
  eventually("the peer is dropped", [&] {
    const ssize_t sent = ::send(peer.get(), block.data(), block.size(), MSG_NOSIGNAL);
    dropped = sent < 0 && (errno == EPIPE || errno == ECONNRESET);
    (void)status_of(daemon);  // others are served
    return dropped;
  });
  if (!weightd::testing::kSanitized) {
    EXPECT_LT(daemon.rss_bytes(), rss + (32U << 20));
  }
  daemon.wait_for_log("did not read its replies for 300 ms (write_deadline_ms)");
}

TEST(Server, CO_118_ImpossibleValuesInEveryField) {
  DaemonFixture daemon;
  const std::vector<std::string> texts = {
      "", std::string(1, '\0'), "a\nb", std::string(255, 'x'), std::string(4096, 'y'), "../../x", "/"};
  for (const std::string& text : texts) {
    for (const uint32_t number : {0U, 1U, 0xFFFFFFFFU}) {
      const uint32_t wait = number == 0xFFFFFFFFU ? 1 : number;  // an acquire would wait for weeks
      const std::vector<ipc::Request> requests = {{1, ipc::HelloRequest{text, text}},
                                                  {2, ipc::AcquireRequest{text, "", wait, ""}},
                                                  {3, ipc::AcquireRequest{"m", text, wait, text}},
                                                  {4, ipc::ReleaseRequest{number}},
                                                  {5, ipc::LoadRequest{text, text, text, number}},
                                                  {6, ipc::LoadRequest{"m", text, "", number}},
                                                  {7, ipc::UnloadRequest{text, text, number}},
                                                  {8, ipc::VerifyRequest{text}}};
      for (const ipc::Request& request : requests) {
        // An answer always; over the limits of a message it is the last one of the connection.
        RawPeer admin(daemon.control_socket());
        admin.send(request);
        const auto answer = admin.receive();
        ASSERT_TRUE(answer.ok()) << "request " << request.id << ": " << answer.status().message();
        EXPECT_TRUE(answer->id == request.id || answer->id == 0);
      }
    }
  }
  EXPECT_TRUE(status_of(daemon).models.empty());
  EXPECT_EQ(daemon.stop(), 0);
}

TEST(Server, ConnectionsAreLimitedPerSocket) {
  DaemonFixture daemon(with("max_sessions = 3\n"));
  std::vector<std::unique_ptr<RawPeer>> workers;
  for (int i = 0; i < 3; ++i) {
    workers.push_back(std::make_unique<RawPeer>(daemon.data_socket()));
    ASSERT_TRUE(workers.back()->ask(ipc::HelloRequest{}).ok());
  }
  RawPeer fourth(daemon.data_socket());
  EXPECT_EQ(fourth.get<ipc::HelloReply>(ipc::HelloRequest{}).status().message(),
            "there are 3 connections, the most allowed (max_sessions)");
  EXPECT_EQ(status_of(daemon).session_count, 4U) << "administrators have their own count";
  workers.pop_back();
  eventually("room again", [&] { return RawPeer(daemon.data_socket()).get<ipc::HelloReply>(ipc::HelloRequest{}).ok(); });
}

TEST(Server, UnansweredRequestsAreLimitedPerConnection) {
  DaemonFixture daemon(with("max_requests_in_flight = 2\n"));
  RawPeer worker(daemon.data_socket());
  worker.send({1, ipc::AcquireRequest{"m", "", 60'000, ""}});
  worker.send({2, ipc::AcquireRequest{"m", "", 150, ""}});
  worker.send({3, ipc::HelloRequest{}});  // not read before one of them is answered
  const auto first = worker.receive();
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(first->id, 2U);
  const auto second = worker.receive();
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(second->id, 3U);
}

TEST(Server, AHangUpIsSeenWhileNothingIsRead) {
  DaemonFixture daemon(with("max_requests_in_flight = 1\n"));
  {
    RawPeer worker(daemon.data_socket());
    worker.send({1, ipc::AcquireRequest{"m", "", 3'600'000, ""}});
    eventually("it is connected", [&] { return status_of(daemon).session_count == 2; });
  }
  wait_until_alone(daemon);
}

}  // namespace
}  // namespace weightd::daemon
