// SPDX-License-Identifier: Apache-2.0
#include "tools/cli/units.h"

#include <array>
#include <charconv>
#include <string_view>

#include "base/text.h"
#include "tools/cli/table.h"

namespace weightd::cli {
namespace {

struct Unit {
  std::string_view name;
  uint64_t factor;
};
constexpr std::array<Unit, 10> kByteUnits = {{{"", 1},
                                              {"B", 1},
                                              {"kB", 1'000},
                                              {"MB", 1'000'000},
                                              {"GB", 1'000'000'000},
                                              {"TB", 1'000'000'000'000},
                                              {"KiB", uint64_t{1} << 10},
                                              {"MiB", uint64_t{1} << 20},
                                              {"GiB", uint64_t{1} << 30},
                                              {"TiB", uint64_t{1} << 40}}};
constexpr std::array<Unit, 5> kTimeUnits = {{{"", 1'000}, {"ms", 1}, {"s", 1'000}, {"m", 60'000}, {"h", 3'600'000}}};

/// Number times unit, or nothing when the text is not that or passes `most`.
template <size_t N>
bool parse_quantity(std::string_view text, const std::array<Unit, N>& units, uint64_t most, uint64_t& out) {
  uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) return false;
  const std::string_view suffix(end, static_cast<size_t>(text.data() + text.size() - end));
  for (const Unit& unit : units) {
    if (unit.name != suffix) continue;
    if (number == 0 || number > most / unit.factor) return false;
    out = number * unit.factor;
    return true;
  }
  return false;
}

}  // namespace

Result<uint64_t> parse_bytes(const std::string& text) {
  uint64_t bytes = 0;
  if (parse_quantity(text, kByteUnits, uint64_t{1} << 62, bytes)) return bytes;
  return Status::invalid_argument("'" + printable(text) +
                                  "' is not a size: a whole number with kB, MB, GB, TB, KiB, MiB, GiB or TiB");
}

Result<std::chrono::milliseconds> parse_duration(const std::string& text) {
  uint64_t ms = 0;
  if (parse_quantity(text, kTimeUnits, 24 * 3'600'000, ms)) return std::chrono::milliseconds(ms);
  return Status::invalid_argument("'" + printable(text) + "' is not a time: a whole number with ms, s, m or h, at most 24h");
}

std::string human_duration(std::chrono::milliseconds duration) {
  const int64_t ms = duration.count();
  if (ms < 1'000) return std::to_string(ms) + " ms";
  if (ms < 60'000) return ms % 1'000 == 0 ? std::to_string(ms / 1'000) + " s" : fixed(static_cast<double>(ms) / 1e3, 1) + " s";
  if (ms < 3'600'000)
    return std::to_string(ms / 60'000) + " min" + (ms % 60'000 < 1'000 ? "" : " " + std::to_string(ms % 60'000 / 1'000) + " s");
  return std::to_string(ms / 3'600'000) + " h" +
         (ms % 3'600'000 < 60'000 ? "" : " " + std::to_string(ms % 3'600'000 / 60'000) + " min");
}

}  // namespace weightd::cli
