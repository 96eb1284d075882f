// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace weightd {

/// `text` for a log line, a table or a message: control characters, DEL, backslashes and invalid UTF-8 are escaped as in C
/// (line feed, tab and so on by letter, others in hexadecimal); more than `max_bytes` are cut with "...". Names come from
/// untrusted files (CO-010).
[[nodiscard]] std::string printable(std::string_view text, size_t max_bytes = 200);

/// "9.8 GiB", "512 B": binary units, one decimal.
[[nodiscard]] std::string human_bytes(uint64_t bytes);

/// Whether `text` is valid UTF-8 (no surrogates, no overlong forms).
[[nodiscard]] bool is_utf8(std::string_view text);

/// Lower-case hexadecimal of `count` bytes.
[[nodiscard]] std::string hex(const unsigned char* bytes, size_t count);

}  // namespace weightd
