// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "ipc/channel.h"
#include "weightd/status.h"

namespace weightd::ipc::test {

/// A fresh folder, removed with all in it.
class TempFolder {
 public:
  TempFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "ipcXXXXXX").string();
    if (::mkdtemp(pattern.data()) != nullptr) path_ = pattern;
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  [[nodiscard]] std::string path() const { return path_; }
  [[nodiscard]] std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

inline size_t open_fd_count() {
  size_t count = 0;
  DIR* folder = ::opendir("/proc/self/fd");
  while (folder != nullptr && ::readdir(folder) != nullptr) ++count;
  if (folder != nullptr) ::closedir(folder);
  return count;
}

/// Resident bytes of this process.
inline int64_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t size = 0, resident = 0;
  statm >> size >> resident;
  return resident * ::sysconf(_SC_PAGESIZE);
}

/// CPU time of this thread, in seconds: what a step costs, however busy the machine is.
inline double cpu_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

/// Sets the soft limit of open files for its lifetime.
class OpenFilesLimit {
 public:
  explicit OpenFilesLimit(rlim_t files) {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    const rlimit now{files, before_.rlim_max};
    set_ = ::setrlimit(RLIMIT_NOFILE, &now) == 0;
  }
  ~OpenFilesLimit() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  OpenFilesLimit(const OpenFilesLimit&) = delete;
  OpenFilesLimit& operator=(const OpenFilesLimit&) = delete;
  [[nodiscard]] bool set() const { return set_; }

 private:
  rlimit before_{};
  bool set_ = false;
};

inline std::vector<std::byte> to_bytes(std::initializer_list<unsigned> values) {
  std::vector<std::byte> bytes;
  for (const unsigned value : values) bytes.push_back(static_cast<std::byte>(value));
  return bytes;
}

template <typename A, typename B>
std::vector<std::byte> joined(const A& a, const B& b) {
  std::vector<std::byte> both(a.begin(), a.end());
  both.insert(both.end(), b.begin(), b.end());
  return both;
}

/// One message of one segment in stream framing, from its words.
inline std::vector<std::byte> message_of(const std::vector<uint64_t>& words) {
  std::vector<std::byte> bytes(8 * (words.size() + 1));
  const uint64_t table = static_cast<uint64_t>(words.size()) << 32;
  std::memcpy(bytes.data(), &table, 8);
  std::memcpy(bytes.data() + 8, words.data(), 8 * words.size());
  return bytes;
}
inline uint64_t struct_pointer(uint64_t offset, uint64_t data_words, uint64_t pointers) {
  return offset << 2 | data_words << 32 | pointers << 48;
}
inline uint64_t list_pointer(uint64_t offset, uint64_t element_size, uint64_t count) {
  return offset << 2 | 1 | (element_size | count << 3) << 32;
}

/// Sends bytes with descriptors (borrowed) in one sendmsg. How many bytes went out, -1 on failure.
inline ssize_t send_raw(int socket, const void* data, size_t size, const std::vector<int>& fds = {}) {
  iovec part{const_cast<void*>(data), size};
  std::vector<char> control(CMSG_SPACE(fds.size() * sizeof(int)));
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    std::memcpy(CMSG_DATA(rights), fds.data(), fds.size() * sizeof(int));
  }
  return ::sendmsg(socket, &message, MSG_NOSIGNAL);
}
inline ssize_t send_raw(int socket, const std::vector<std::byte>& bytes, const std::vector<int>& fds = {}) {
  return send_raw(socket, bytes.data(), bytes.size(), fds);
}

/// One end raw, the other a Channel whose preamble the raw end has read and answered, if asked to.
struct RawAndChannel {
  UniqueFd raw;
  Channel channel;

  static RawAndChannel make(const ChannelOptions& options = {}, bool with_preamble = true) {
    Result<std::pair<UniqueFd, UniqueFd>> pair = socket_pair();
    if (!pair.ok()) std::abort();
    RawAndChannel made{std::move(pair->first), Channel(std::move(pair->second), options)};
    if (with_preamble) {
      const auto preamble = encode_preamble();
      if (send_raw(made.raw.get(), preamble.data(), preamble.size()) != static_cast<ssize_t>(preamble.size())) std::abort();
    }
    return made;
  }
};

inline Deadline soon() { return Clock::now() + std::chrono::seconds(20); }

}  // namespace weightd::ipc::test
