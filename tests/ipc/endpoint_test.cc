// SPDX-License-Identifier: Apache-2.0
#include "ipc/endpoint.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <boost/asio/io_context.hpp>
#include <chrono>
#include <functional>
#include <string>
#include <thread>

#include "ipc/channel.h"
#include "ipc_test_support.h"

namespace weightd::ipc {
namespace {

using std::chrono::milliseconds;

/// An endpoint on its own loop, with what it reported.
struct Served {
  boost::asio::io_context io;
  std::vector<UniqueFd> accepted;
  std::vector<std::string> troubles;
  std::unique_ptr<Endpoint> endpoint;

  Status listen(const EndpointOptions& options) {
    Result<std::unique_ptr<Endpoint>> made = Endpoint::listen(
        io, options, [this](UniqueFd fd) { accepted.push_back(std::move(fd)); },
        [this](const Status& status) { troubles.push_back(status.to_string()); });
    if (!made.ok()) return made.status();
    endpoint = *std::move(made);
    return {};
  }
  Status listen(const std::string& path, uint32_t mode = 0600) {
    EndpointOptions options;
    options.path = path;
    options.mode = mode;
    return listen(options);
  }
  /// Runs the loop until `done`; false when that did not come.
  bool run_until(const std::function<bool()>& done) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (!done()) {
      if (std::chrono::steady_clock::now() > end) return false;
      io.run_one_for(milliseconds(20));
    }
    return true;
  }
  bool accept_one_more() {
    const size_t before = accepted.size();
    return run_until([&] { return accepted.size() > before; });
  }
};

bool exists(const std::string& path) {
  struct stat info {};
  return ::lstat(path.c_str(), &info) == 0;
}
mode_t mode_of(const std::string& path) {
  struct stat info {};
  return ::lstat(path.c_str(), &info) == 0 ? info.st_mode : 0;
}
bool can_connect(const std::string& path) { return connect_unix(path).ok(); }

/// A plain socket bound at `path`; listening or not.
UniqueFd foreign_socket(const std::string& path, bool listening) {
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  if (::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) std::abort();
  if (listening && ::listen(socket.get(), 8) != 0) std::abort();
  return socket;
}

TEST(Endpoint, AcceptsAndCleansUp) {
  const test::TempFolder folder;
  const size_t before = test::open_fd_count();
  {
    Served served;
    ASSERT_TRUE(served.listen(folder / "s").ok());
    const Result<UniqueFd> client = connect_unix(folder / "s");
    ASSERT_TRUE(client.ok()) << client.status().to_string();
    ASSERT_TRUE(served.accept_one_more());
    const int fd = served.accepted[0].get();
    EXPECT_NE(::fcntl(fd, F_GETFL) & O_NONBLOCK, 0);
    EXPECT_NE(::fcntl(fd, F_GETFD) & FD_CLOEXEC, 0);
    EXPECT_TRUE(served.troubles.empty());
    served.endpoint.reset();
    EXPECT_FALSE(exists(folder / "s")) << "its own socket file is removed";
    EXPECT_FALSE(can_connect(folder / "s"));
  }
  EXPECT_EQ(test::open_fd_count(), before);
}

TEST(Endpoint, MayBeDestroyedByItsOwnCallback) {
  const test::TempFolder folder;
  boost::asio::io_context io;
  std::unique_ptr<Endpoint> endpoint;
  int calls = 0;
  EndpointOptions options;
  options.path = folder / "s";
  Result<std::unique_ptr<Endpoint>> made = Endpoint::listen(
      io, options,
      [&](UniqueFd) {
        ++calls;
        endpoint.reset();
      },
      nullptr);
  ASSERT_TRUE(made.ok()) << made.status().to_string();
  endpoint = *std::move(made);
  const Result<UniqueFd> first = connect_unix(folder / "s"), second = connect_unix(folder / "s");
  ASSERT_TRUE(first.ok() && second.ok());
  io.run_for(std::chrono::seconds(10));  // ends by itself: nothing is left to wait for
  EXPECT_EQ(calls, 1);
}

// --- CO-112, CO-114: load --------------------------------------------------------------------------------------------------

/// A connection that the other side closed.
bool was_closed(const UniqueFd& fd) {
  char byte = 0;
  return ::recv(fd.get(), &byte, 1, MSG_DONTWAIT) == 0;
}

TEST(Endpoint, CO_112_OutOfDescriptorsItRefusesPausesAndRecovers) {
  const test::TempFolder folder;
  Served served;
  ASSERT_TRUE(served.listen(folder / "s").ok());
  served.accepted.reserve(300);
  // The clients' sockets are made before the limit is set.
  std::vector<UniqueFd> clients;
  for (int i = 0; i < 200; ++i) clients.emplace_back(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  UniqueFd late(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, (folder / "s").c_str(), (folder / "s").size());
  const auto connect = [&](const UniqueFd& socket) {
    return ::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  };
  const UniqueFd highest(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const test::OpenFilesLimit room_for_ten(static_cast<rlim_t>(highest.get()) + 11);
  ASSERT_TRUE(room_for_ten.set());
  for (const UniqueFd& client : clients) ASSERT_TRUE(connect(client));
  const auto closed = [&] { return std::count_if(clients.begin(), clients.end(), was_closed); };
  ASSERT_TRUE(served.run_until([&] { return closed() == 190; }))
      << closed() << " refused, " << served.accepted.size() << " accepted";
  EXPECT_EQ(served.accepted.size(), 10U) << "those before go on";
  EXPECT_LE(served.troubles.size(), 2U);
  ASSERT_FALSE(served.troubles.empty());
  EXPECT_NE(served.troubles[0].find("resource_exhausted"), std::string::npos) << served.troubles[0];
  // Exhausted and left alone, the loop rests: once the last pause is over, no handler runs at all.
  served.io.run_for(milliseconds(300));
  EXPECT_EQ(served.io.run_for(milliseconds(300)), 0U);
  EXPECT_LE(served.troubles.size(), 3U);
  served.accepted.clear();
  ASSERT_TRUE(connect(late));
  EXPECT_TRUE(served.accept_one_more()) << "recovers without a restart";
  EXPECT_FALSE(was_closed(late));
}

TEST(Endpoint, CO_112_WithoutTheSpareDescriptorItPausesAndNobodyIsLost) {
  const test::TempFolder folder;
  Served served;
  ASSERT_TRUE(served.listen(folder / "s").ok());
  const Result<UniqueFd> client = connect_unix(folder / "s");
  ASSERT_TRUE(client.ok());
  {
    const test::OpenFilesLimit nothing_at_all(3);
    ASSERT_TRUE(nothing_at_all.set());
    EXPECT_LT(served.io.run_for(milliseconds(500)), 20U) << "handlers: one a pause, not as many as fit";
    EXPECT_TRUE(served.accepted.empty());
    EXPECT_EQ(served.troubles.size(), 1U) << "at most one a second";
  }
  EXPECT_TRUE(served.accept_one_more());
  EXPECT_FALSE(was_closed(*client));
}

TEST(Endpoint, CO_114_ConnectAndCloseAgainAndAgain) {
  const test::TempFolder folder;
  Served served;
  ASSERT_TRUE(served.listen(folder / "s").ok());
  const auto serve_all = [&](size_t count) { return served.run_until([&] { return served.accepted.size() == count; }); };
  int64_t resident = 0;
  for (int round = 0; round < 200; ++round) {
    for (int i = 0; i < 50; ++i) {
      const Result<UniqueFd> client = connect_unix(folder / "s");
      ASSERT_TRUE(client.ok()) << client.status().to_string();
      if (i % 2 == 0) {
        ASSERT_EQ(test::send_raw(client->get(), "x", 1), 1);
      }
    }
    ASSERT_TRUE(serve_all(50)) << served.accepted.size();
    served.accepted.clear();
    if (round == 20) resident = test::resident_bytes();
  }
  EXPECT_LT(test::resident_bytes() - resident, int64_t{4} << 20);
  EXPECT_TRUE(served.troubles.empty());
  EXPECT_TRUE(can_connect(folder / "s"));
  EXPECT_TRUE(served.accept_one_more());
}

// --- CO-124: mode and group ------------------------------------------------------------------------------------------------

TEST(Endpoint, CO_124_ModeAndGroupAreExactWhateverTheUmask) {
  const test::TempFolder folder;
  for (const mode_t mask : {mode_t{0}, mode_t{077}, mode_t{0777}}) {
    for (const uint32_t mode : {0600U, 0660U, 0666U}) {
      const mode_t before = ::umask(mask);
      Served served;
      const Status status = served.listen(folder / "s", mode);
      EXPECT_EQ(::umask(before), mask) << "the umask is the process's";
      ASSERT_TRUE(status.ok()) << status.to_string();
      EXPECT_EQ(mode_of(folder / "s") & 0777, mode);
    }
  }
  if (::getuid() != 0) return;
  Served served;
  EndpointOptions options;
  options.path = folder / "s";
  options.gid = 12345;
  ASSERT_TRUE(served.listen(options).ok());
  struct stat info {};
  ASSERT_EQ(::lstat(options.path.c_str(), &info), 0);
  EXPECT_EQ(info.st_gid, 12345U);
  EXPECT_EQ(info.st_mode & 0777, 0660U);
}

TEST(Endpoint, CO_124_NoMomentIsWiderThanConfigured) {
  const test::TempFolder folder;
  ::chmod(folder.path().c_str(), 0755);
  const std::string path = folder / "s";
  // Somebody who may not connect tries all the time; a thread looks at the mode all the time.
  pid_t stranger = -1;
  int report[2];
  ASSERT_EQ(::pipe2(report, O_CLOEXEC), 0);
  const UniqueFd reads(report[0]);
  UniqueFd writes(report[1]);
  if (::getuid() == 0) {
    stranger = ::fork();
    if (stranger == 0) {
      if (::setgid(65534) != 0 || ::setuid(65534) != 0) ::_exit(2);
      sockaddr_un address{};
      address.sun_family = AF_UNIX;
      std::memcpy(address.sun_path, path.c_str(), path.size());
      const UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
      for (;;) {
        if (::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0 &&
            ::write(writes.get(), "!", 1) == 1) {
          ::_exit(0);
        }
      }
    }
  }
  std::atomic<bool> done{false};
  std::atomic<unsigned> seen{0}, widest{0};
  std::thread looker([&] {
    while (!done.load()) {
      const mode_t mode = mode_of(path);
      if (mode == 0) continue;
      widest.fetch_or(mode & 0777U);
      seen.fetch_add(1);
    }
  });
  const mode_t before = ::umask(0);
  for (int i = 0; i < 500; ++i) {
    Served served;
    const Status status = served.listen(path, 0600);
    EXPECT_TRUE(status.ok()) << status.to_string();
  }
  ::umask(before);
  done = true;
  looker.join();
  EXPECT_GT(seen.load(), 0U);
  EXPECT_EQ(widest.load() & ~0600U, 0U) << std::oct << widest.load();
  pollfd entry{reads.get(), POLLIN, 0};
  EXPECT_EQ(::poll(&entry, 1, 0), 0) << "the stranger was let in";
  if (stranger > 0) {
    ::kill(stranger, SIGKILL);
    ::waitpid(stranger, nullptr, 0);
  }
}

// --- CO-128 to CO-130: what is at the path already -------------------------------------------------------------------------

TEST(Endpoint, CO_128_TheSocketOfAKilledDaemonIsReplaced) {
  const test::TempFolder folder;
  for (int i = 0; i < 100; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      Served served;
      if (!served.listen(folder / "s").ok()) ::_exit(1);
      ::kill(::getpid(), SIGKILL);
    }
    int outcome = 0;
    ::waitpid(child, &outcome, 0);
    ASSERT_TRUE(WIFSIGNALED(outcome)) << i;
    ASSERT_TRUE(exists(folder / "s"));
  }
  Served served;
  ASSERT_TRUE(served.listen(folder / "s").ok());
  ASSERT_TRUE(can_connect(folder / "s"));
  EXPECT_TRUE(served.accept_one_more());
}

TEST(Endpoint, CO_128_ALivingDaemonIsNotReplaced) {
  const test::TempFolder folder;
  Served first, second;
  ASSERT_TRUE(first.listen(folder / "s").ok());
  const Status status = second.listen(folder / "s");
  EXPECT_EQ(status.code(), StatusCode::kAlreadyExists) << status.to_string();
  EXPECT_NE(status.message().find("another daemon"), std::string::npos) << status.message();
  ASSERT_TRUE(can_connect(folder / "s"));
  EXPECT_TRUE(first.accept_one_more());
  // One that does not know our lock, and one with a full backlog.
  const UniqueFd other = foreign_socket(folder / "other", true);
  EXPECT_EQ(second.listen(folder / "other").code(), StatusCode::kAlreadyExists);
  EXPECT_TRUE(can_connect(folder / "other"));
}

TEST(Endpoint, CO_129_PathLengths) {
  const test::TempFolder folder;
  const auto path_of = [&](size_t size) { return folder / std::string(size - folder.path().size() - 1, 's'); };
  {
    Served served;
    ASSERT_TRUE(served.listen(path_of(107)).ok());
    EXPECT_TRUE(can_connect(path_of(107)));
  }
  for (const size_t size : {size_t{108}, size_t{200}, size_t{5000}}) {
    Served served;
    const Status status = served.listen(path_of(size));
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("107"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find(std::to_string(size)), std::string::npos) << status.message();
  }
  for (const std::string& bad :
       {std::string(), std::string("relative"), std::string("/"), folder / "a/", std::string("/a\0b", 4)}) {
    Served served;
    EXPECT_EQ(served.listen(bad).code(), StatusCode::kInvalidArgument) << bad;
  }
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1) << "the lock of the good one, nothing else";
}

TEST(Endpoint, CO_130_WhateverElseIsThereStaysAsItIs) {
  const test::TempFolder folder;
  const UniqueFd other_service = foreign_socket(folder / "other", true);
  const UniqueFd stale = foreign_socket(folder / "stale", false);
  struct Object {
    const char* what;
    std::function<void(const std::string&)> make;
  };
  const std::vector<Object> objects = {
      {"empty file", [](const std::string& p) { std::ofstream out(p); }},
      {"file", [](const std::string& p) { std::ofstream(p) << "content"; }},
      {"folder", [](const std::string& p) { ::mkdir(p.c_str(), 0700); }},
      {"FIFO", [](const std::string& p) { ::mkfifo(p.c_str(), 0600); }},
      {"link to a socket of another service",
       [&](const std::string& p) { (void)!::symlink((folder / "other").c_str(), p.c_str()); }},
      {"link to a left-over socket", [&](const std::string& p) { (void)!::symlink((folder / "stale").c_str(), p.c_str()); }},
      {"dangling link", [](const std::string& p) { (void)!::symlink("/nonexistent/x", p.c_str()); }},
  };
  for (const Object& object : objects) {
    const std::string path = folder / "s";
    object.make(path);
    struct stat before {
    }, after{};
    ASSERT_EQ(::lstat(path.c_str(), &before), 0) << object.what;
    Served served;
    const Status status = served.listen(path);
    EXPECT_EQ(status.code(), StatusCode::kAlreadyExists) << object.what << ": " << status.to_string();
    EXPECT_NE(status.message().find(path), std::string::npos) << status.message();
    ASSERT_EQ(::lstat(path.c_str(), &after), 0) << object.what << " was removed";
    EXPECT_EQ(before.st_ino, after.st_ino) << object.what;
    EXPECT_EQ(before.st_mode, after.st_mode) << object.what;
    EXPECT_EQ(before.st_size, after.st_size) << object.what;
    std::filesystem::remove_all(path);
  }
  EXPECT_TRUE(can_connect(folder / "other"));
  EXPECT_TRUE(exists(folder / "stale"));
}

TEST(Endpoint, CO_130_TheLockFileIsCheckedToo) {
  const test::TempFolder folder;
  { std::ofstream(folder / "victim") << "content"; }
  ASSERT_EQ(::symlink((folder / "victim").c_str(), (folder / "s.lock").c_str()), 0);
  Served served;
  EXPECT_EQ(served.listen(folder / "s").code(), StatusCode::kAlreadyExists);
  EXPECT_EQ(std::filesystem::file_size(folder / "victim"), 7U);
  ::unlink((folder / "s.lock").c_str());
  ::mkfifo((folder / "s.lock").c_str(), 0600);
  EXPECT_EQ(served.listen(folder / "s").code(), StatusCode::kAlreadyExists) << "and does not hang";
  EXPECT_FALSE(exists(folder / "s"));
}

TEST(Endpoint, AMissingFolderIsNamed) {
  const test::TempFolder folder;
  Served served;
  const Status status = served.listen(folder / "none/s");
  EXPECT_EQ(status.code(), StatusCode::kNotFound) << status.to_string();
  EXPECT_NE(status.message().find("none"), std::string::npos) << status.message();
}

// --- CO-131: the path vanishes ---------------------------------------------------------------------------------------------

TEST(Endpoint, CO_131_ARemovedSocketIsBoundAgainAndConnectionsGoOn) {
  const test::TempFolder folder;
  Served served;
  ASSERT_TRUE(served.listen(folder / "s", 0660).ok());
  const Result<UniqueFd> held = connect_unix(folder / "s");
  ASSERT_TRUE(served.accept_one_more());
  const Result<UniqueFd> waiting = connect_unix(folder / "s");  // in the backlog of the old socket when it goes
  for (int round = 0; round < 3; ++round) {
    served.troubles.clear();
    ASSERT_EQ(::unlink((folder / "s").c_str()), 0);
    ASSERT_TRUE(served.run_until([&] { return can_connect(folder / "s"); })) << round;
    EXPECT_EQ(mode_of(folder / "s") & 0777, 0660U);
  }
  ASSERT_TRUE(served.run_until([&] { return served.accepted.size() >= 2 + 3; }));
  for (const UniqueFd* client : {&*held, &*waiting}) EXPECT_FALSE(was_closed(*client));
  ASSERT_EQ(test::send_raw(served.accepted[0].get(), "x", 1), 1);
  char byte = 0;
  EXPECT_EQ(::recv(held->get(), &byte, 1, 0), 1) << "an old connection still works";
}

TEST(Endpoint, CO_131_TheReportSaysWhatHappened) {
  const test::TempFolder folder;
  Served served;
  ASSERT_TRUE(served.listen(folder / "s").ok());
  ASSERT_EQ(::unlink((folder / "s").c_str()), 0);
  ASSERT_TRUE(served.run_until([&] { return !served.troubles.empty(); }));
  EXPECT_NE(served.troubles[0].find("bound again"), std::string::npos) << served.troubles[0];
}

TEST(Endpoint, CO_131_ARenamedSocketAndARemovedLock) {
  const test::TempFolder folder;
  Served served;
  ASSERT_TRUE(served.listen(folder / "s").ok());
  ASSERT_EQ(::rename((folder / "s").c_str(), (folder / "moved").c_str()), 0);
  ASSERT_TRUE(served.run_until([&] { return can_connect(folder / "s"); }));
  ASSERT_EQ(::unlink((folder / "s.lock").c_str()), 0);
  ASSERT_TRUE(served.run_until([&] { return exists(folder / "s.lock"); })) << "or a second daemon could start";
  Served second;
  ASSERT_TRUE(served.run_until([&] { return second.listen(folder / "s").code() == StatusCode::kAlreadyExists; }));
}

TEST(Endpoint, CO_131_ARemovedFolderIsTakenUpAgainWhenItIsBack) {
  const test::TempFolder folder;
  const std::string runtime = folder / "run";
  ASSERT_EQ(::mkdir(runtime.c_str(), 0700), 0);
  Served served;
  ASSERT_TRUE(served.listen(runtime + "/s").ok());
  std::filesystem::remove_all(runtime);
  ASSERT_TRUE(served.run_until([&] { return !served.troubles.empty(); }));
  ASSERT_EQ(::mkdir(runtime.c_str(), 0700), 0);
  ASSERT_TRUE(served.run_until([&] { return can_connect(runtime + "/s"); }));
  // And it is watched again.
  ASSERT_EQ(::unlink((runtime + "/s").c_str()), 0);
  ASSERT_TRUE(served.run_until([&] { return can_connect(runtime + "/s"); }));
  // The folder moved away, another in its place.
  ASSERT_EQ(::rename(runtime.c_str(), (folder / "away").c_str()), 0);
  ASSERT_EQ(::mkdir(runtime.c_str(), 0700), 0);
  ASSERT_TRUE(served.run_until([&] { return can_connect(runtime + "/s"); }));
}

TEST(Endpoint, CO_131_WhatSomebodyElsePutThereIsNotTouched) {
  const test::TempFolder folder;
  Served served;
  ASSERT_TRUE(served.listen(folder / "s").ok());
  { std::ofstream(folder / "new") << "content"; }
  ASSERT_EQ(::rename((folder / "new").c_str(), (folder / "s").c_str()), 0);
  ASSERT_TRUE(served.run_until([&] { return !served.troubles.empty(); }));
  EXPECT_NE(served.troubles[0].find("regular file"), std::string::npos) << served.troubles[0];
  EXPECT_EQ(std::filesystem::file_size(folder / "s"), 7U);
  // Once it is gone, the path is ours again.
  ASSERT_EQ(::unlink((folder / "s").c_str()), 0);
  ASSERT_TRUE(served.run_until([&] { return can_connect(folder / "s"); }));
  // At the end, only its own is removed.
  ASSERT_EQ(::unlink((folder / "s").c_str()), 0);
  const UniqueFd other = foreign_socket(folder / "s", true);
  served.endpoint.reset();
  EXPECT_TRUE(exists(folder / "s"));
}

// --- adopted sockets -------------------------------------------------------------------------------------------------------

TEST(Endpoint, AdoptedSocketsAreServedAndTheirPathLeftAlone) {
  const test::TempFolder folder;
  Served served;
  Result<std::unique_ptr<Endpoint>> made = Endpoint::adopt(
      served.io, foreign_socket(folder / "s", true), [&](UniqueFd fd) { served.accepted.push_back(std::move(fd)); }, nullptr);
  ASSERT_TRUE(made.ok()) << made.status().to_string();
  served.endpoint = *std::move(made);
  ASSERT_TRUE(can_connect(folder / "s"));
  EXPECT_TRUE(served.accept_one_more());
  served.endpoint.reset();
  EXPECT_TRUE(exists(folder / "s"));
  EXPECT_FALSE(exists(folder / "s.lock"));
}

TEST(Endpoint, OnlyListeningUnixStreamsAreAdopted) {
  const test::TempFolder folder;
  boost::asio::io_context io;
  const auto adopt = [&](UniqueFd fd) {
    return Endpoint::adopt(
               io, std::move(fd), [](UniqueFd) {}, nullptr)
        .status();
  };
  EXPECT_EQ(adopt(foreign_socket(folder / "bound", false)).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(adopt(UniqueFd(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0))).code(), StatusCode::kInvalidArgument);
  EXPECT_FALSE(adopt(UniqueFd(::open("/dev/null", O_RDONLY | O_CLOEXEC))).ok());
  EXPECT_FALSE(adopt(UniqueFd()).ok());
}

}  // namespace
}  // namespace weightd::ipc
