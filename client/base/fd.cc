// SPDX-License-Identifier: Apache-2.0
#include "base/fd.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace weightd {
namespace {

// Linux moves at most 2 GiB - 4 KiB in one call; a smaller step keeps every kernel and file system happy.
constexpr size_t kMaxStepBytes = size_t{1} << 30;

}  // namespace

UniqueFd& UniqueFd::operator=(UniqueFd&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = other.release();
  }
  return *this;
}

int UniqueFd::release() { return std::exchange(fd_, -1); }

void UniqueFd::reset() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

Status pread_full(int fd, std::span<std::byte> out, uint64_t offset, std::string_view name) {
  size_t done = 0;
  while (done < out.size()) {
    const ssize_t got = ::pread(fd, out.data() + done, std::min(out.size() - done, kMaxStepBytes), static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return status_from_errno(errno, std::string(name) + ": read");
    if (got == 0) {
      return Status::corruption(std::string(name) + ": expected " + std::to_string(out.size()) + " bytes at offset " +
                                std::to_string(offset) + ", have " + std::to_string(done) + ": the file is truncated");
    }
    done += static_cast<size_t>(got);
  }
  return {};
}

Status pwrite_full(int fd, std::span<const std::byte> data, uint64_t offset, std::string_view name) {
  size_t done = 0;
  while (done < data.size()) {
    const ssize_t put = ::pwrite(fd, data.data() + done, std::min(data.size() - done, kMaxStepBytes), static_cast<off_t>(offset + done));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return status_from_errno(errno, std::string(name) + ": write");
    done += static_cast<size_t>(put);
  }
  return {};
}

Status close_checked(UniqueFd fd, std::string_view name) {
  // EINTR after close() leaves the descriptor closed on Linux; a second close could hit somebody else's.
  if (::close(fd.release()) != 0 && errno != EINTR) return status_from_errno(errno, std::string(name) + ": close");
  return {};
}

}  // namespace weightd
