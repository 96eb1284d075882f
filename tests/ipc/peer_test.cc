// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>

#include "ipc/channel.h"
#include "ipc_test_support.h"

namespace weightd::ipc {
namespace {

/// Field 22 of a stat line whose command has no spaces.
uint64_t own_start_ticks() {
  std::ifstream in("/proc/self/stat");
  std::string field;
  for (int i = 0; i < 22; ++i) in >> field;
  return std::stoull(field);
}

TEST(Peer, ThisProcess) {
  const auto pair = socket_pair();
  ASSERT_TRUE(pair.ok());
  const Result<Peer> peer = peer_of(pair->first.get());
  ASSERT_TRUE(peer.ok()) << peer.status().to_string();
  EXPECT_EQ(peer->pid, ::getpid());
  EXPECT_EQ(peer->uid, ::geteuid());
  EXPECT_EQ(peer->gid, ::getegid());
  EXPECT_TRUE(peer->pidfd.valid());
  EXPECT_EQ(::fcntl(peer->pidfd.get(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  EXPECT_EQ(peer->start_ticks, own_start_ticks());
  EXPECT_EQ(peer->command, "ipc_tests");
  std::vector<gid_t> groups(65536);
  groups.resize(static_cast<size_t>(::getgroups(static_cast<int>(groups.size()), groups.data())));
  EXPECT_EQ(peer->groups, std::vector<uint32_t>(groups.begin(), groups.end()));
}

TEST(Peer, NoSocketIsAnError) { EXPECT_FALSE(peer_of(-1).ok()); }

/// A child that connects to `path` and then does `then`; its pid.
template <typename Then>
pid_t connecting_child(const std::string& path, Then then) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  Result<UniqueFd> socket = connect_unix(path);
  if (!socket.ok()) ::_exit(1);
  then();
  ::_exit(0);
}
UniqueFd listen_at(const std::string& path) {
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  if (::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 || ::listen(socket.get(), 8) != 0)
    std::abort();
  return socket;
}

TEST(Peer, CommandsThatLookLikeStatFieldsDoNotConfuse) {
  const test::TempFolder folder;
  const UniqueFd listening = listen_at(folder / "s");
  const pid_t child = ::fork();
  if (child == 0) {
    ::prctl(PR_SET_NAME, "a) R 1\n(b");
    const Result<UniqueFd> socket = connect_unix(folder / "s");
    ::pause();
    ::_exit(0);
  }
  const UniqueFd accepted(::accept(listening.get(), nullptr, nullptr));
  const Result<Peer> peer = peer_of(accepted.get());
  ASSERT_TRUE(peer.ok());
  EXPECT_EQ(peer->pid, child);
  EXPECT_GE(peer->start_ticks, own_start_ticks());
  EXPECT_LT(peer->start_ticks, own_start_ticks() + 1'000'000);
  EXPECT_EQ(peer->command, "a) R 1\\n(b");
  pollfd entry{peer->pidfd.get(), POLLIN, 0};
  EXPECT_EQ(::poll(&entry, 1, 0), 0) << "alive";
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  EXPECT_EQ(::poll(&entry, 1, 5000), 1) << "its end is seen";
}

TEST(Peer, OneThatEndedAlreadyHasCredentialsButNoProcess) {
  const test::TempFolder folder;
  const UniqueFd listening = listen_at(folder / "s");
  const pid_t child = connecting_child(folder / "s", [] {});
  int outcome = -1;
  ::waitpid(child, &outcome, 0);
  ASSERT_EQ(outcome, 0);
  const UniqueFd accepted(::accept(listening.get(), nullptr, nullptr));
  const size_t before = test::open_fd_count();
  const Result<Peer> peer = peer_of(accepted.get());
  ASSERT_TRUE(peer.ok()) << peer.status().to_string();
  EXPECT_EQ(peer->uid, ::geteuid());
  EXPECT_FALSE(peer->pidfd.valid());
  EXPECT_EQ(peer->start_ticks, 0U);
  EXPECT_EQ(peer->command, "");
  EXPECT_EQ(test::open_fd_count(), before);
}

TEST(Peer, GroupsAreThoseOfTheOtherProcess) {
  if (::getuid() != 0) GTEST_SKIP() << "needs root to set groups";
  const test::TempFolder folder;
  ::chmod(folder.path().c_str(), 0777);
  const UniqueFd listening = listen_at(folder / "s");
  ::chmod((folder / "s").c_str(), 0777);
  const pid_t child = ::fork();
  if (child == 0) {
    std::vector<gid_t> many(300);
    for (size_t i = 0; i < many.size(); ++i) many[i] = static_cast<gid_t>(10'000 + i);
    if (::setgroups(many.size(), many.data()) != 0 || ::setgid(65533) != 0 || ::setuid(65532) != 0) ::_exit(2);
    const Result<UniqueFd> socket = connect_unix(folder / "s");
    ::pause();
    ::_exit(0);
  }
  const UniqueFd accepted(::accept(listening.get(), nullptr, nullptr));
  const Result<Peer> peer = peer_of(accepted.get());
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  ASSERT_TRUE(peer.ok()) << peer.status().to_string();
  EXPECT_EQ(peer->uid, 65532U);
  EXPECT_EQ(peer->gid, 65533U);
  EXPECT_EQ(peer->groups.size(), 300U);
  EXPECT_EQ(std::count(peer->groups.begin(), peer->groups.end(), 10'299U), 1);
}

}  // namespace
}  // namespace weightd::ipc
