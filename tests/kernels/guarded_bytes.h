// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <span>

#include "weightd/status.h"

namespace weightd::test {

/// `size` bytes whose end is the end of a page; the next page may not be touched, and neither may the one before the first.
class GuardedBytes {
 public:
  explicit GuardedBytes(size_t size) : size_(size) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t body = (size + page - 1) / page * page;
    mapped_ = body + 2 * page;
    base_ = static_cast<std::byte*>(mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    WEIGHTD_CHECK(base_ != MAP_FAILED);
    WEIGHTD_CHECK(mprotect(base_, page, PROT_NONE) == 0);
    WEIGHTD_CHECK(mprotect(base_ + page + body, page, PROT_NONE) == 0);
    data_ = base_ + page + body - size;
    body_ = base_ + page;
    body_bytes_ = body;
  }
  explicit GuardedBytes(std::span<const std::byte> content) : GuardedBytes(content.size()) {
    if (!content.empty()) std::memcpy(data_, content.data(), content.size());
  }
  GuardedBytes(const GuardedBytes&) = delete;
  GuardedBytes& operator=(const GuardedBytes&) = delete;
  ~GuardedBytes() { munmap(base_, mapped_); }

  void make_read_only() { WEIGHTD_CHECK(body_bytes_ == 0 || mprotect(body_, body_bytes_, PROT_READ) == 0); }
  [[nodiscard]] std::span<std::byte> span() { return {data_, size_}; }

 private:
  std::byte* base_ = nullptr;
  std::byte* body_ = nullptr;
  std::byte* data_ = nullptr;
  size_t size_ = 0, mapped_ = 0, body_bytes_ = 0;
};

}  // namespace weightd::test
