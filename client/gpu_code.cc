// SPDX-License-Identifier: Apache-2.0
#include "client/gpu_code.h"

#include <charconv>

namespace weightd::detail {
namespace {

bool entry_serves(std::string_view entry, uint32_t major, uint32_t minor) {
  uint32_t number = 0;
  const auto [end, error] = std::from_chars(entry.data(), entry.data() + entry.size(), number);
  if (error != std::errc{}) return false;
  const std::string_view suffix = entry.substr(static_cast<size_t>(end - entry.data()));
  const bool specific = suffix.substr(0, 1) == "a", family = suffix.substr(0, 1) == "f";
  const bool intermediate = !suffix.ends_with("-real");
  if (specific) return number == 10 * major + minor;
  if (number / 10 == major && number % 10 <= minor) return true;
  return intermediate && !family && number <= 10 * major + minor;
}

}  // namespace

bool has_gpu_code(std::string_view architectures, uint32_t major, uint32_t minor) {
  while (!architectures.empty()) {
    const size_t comma = architectures.find(',');
    if (entry_serves(architectures.substr(0, comma), major, minor)) return true;
    if (comma == std::string_view::npos) return false;
    architectures.remove_prefix(comma + 1);
  }
  return false;
}

}  // namespace weightd::detail
