// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "weightd/status.h"

namespace weightd {

/// Owns one file descriptor; closes it at the end. Move-only.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(other.release()) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept;
  UniqueFd(const UniqueFd&) = delete;
  UniqueFd& operator=(const UniqueFd&) = delete;
  ~UniqueFd() { reset(); }

  [[nodiscard]] int get() const { return fd_; }
  [[nodiscard]] bool valid() const { return fd_ >= 0; }
  [[nodiscard]] int release();
  void reset();

 private:
  int fd_ = -1;
};

/// Reads exactly out.size() bytes at `offset`; short reads and EINTR are continued. `name` is used in messages only.
/// kCorruption ("<name>: expected N bytes at offset O, have H") when the file ends early, else status_from_errno.
Status pread_full(int fd, std::span<std::byte> out, uint64_t offset, std::string_view name);

/// Writes all of `data` at `offset`; short writes and EINTR are continued.
Status pwrite_full(int fd, std::span<const std::byte> data, uint64_t offset, std::string_view name);

/// Closes and reports what close() said (CO-096): a delayed write error counts.
Status close_checked(UniqueFd fd, std::string_view name);

}  // namespace weightd
