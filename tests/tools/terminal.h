// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fcntl.h>
#include <pty.h>
#include <unistd.h>

#include <array>
#include <string>

#include "tests/support/safetensors_builder.h"

namespace weightd::testing {

/// A terminal to give a program as its standard error.
class Terminal {
 public:
  Terminal() {
    require(::openpty(&screen_, &program_, nullptr, nullptr, nullptr) == 0, "openpty");
    require(::fcntl(screen_, F_SETFD, FD_CLOEXEC) == 0 && ::fcntl(program_, F_SETFD, FD_CLOEXEC) == 0, "fcntl");
  }
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;
  ~Terminal() {
    close_program_end();
    ::close(screen_);
  }

  [[nodiscard]] int program_end() const { return program_; }

  /// Everything that is written until the last program that has the terminal ends.
  std::string read_to_end() {
    close_program_end();
    std::string text;
    std::array<char, 4096> buffer{};
    while (true) {
      const ssize_t got = ::read(screen_, buffer.data(), buffer.size());
      if (got <= 0) return text;  // EIO: nobody is left at the other end
      text.append(buffer.data(), static_cast<size_t>(got));
    }
  }

 private:
  void close_program_end() {
    if (program_ >= 0) ::close(program_);
    program_ = -1;
  }
  int screen_ = -1, program_ = -1;
};

}  // namespace weightd::testing
