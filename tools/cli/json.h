// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

/// JSON for programs. A front to a JSON library that costs seconds to include, so that only json.cc pays.
namespace weightd::cli {

/// Version of everything that --json prints; rises when a field changes its meaning or goes away, not when one is added.
inline constexpr int kJsonSchemaVersion = 1;

/// One JSON value. Move-only. Keys keep the order in which they were set. Text that is not UTF-8 is written with U+FFFD in place
/// of each wrong byte, so the output is always valid; numbers that are not finite become null.
class Json {
 public:
  [[nodiscard]] static Json object();
  [[nodiscard]] static Json array();
  /// An object that starts with "schema_version".
  [[nodiscard]] static Json document();

  Json(std::string_view text);    // NOLINT: implicit by design, as for the following
  Json(const std::string& text);  // NOLINT
  Json(const char* text);         // NOLINT
  Json(double number);            // NOLINT
  template <std::integral T>
  Json(T number) : Json() {  // NOLINT
    if constexpr (std::same_as<T, bool>) {
      assign_bool(number);
    } else if constexpr (std::unsigned_integral<T>) {
      assign_unsigned(number);
    } else {
      assign_signed(number);
    }
  }
  Json(Json&&) noexcept;
  Json& operator=(Json&&) noexcept;
  ~Json();

  /// Objects only.
  Json& set(std::string_view key, Json value);
  /// Arrays only.
  Json& push(Json value);

  /// Indented by two, with a line feed at the end.
  [[nodiscard]] std::string dump() const;

 private:
  struct State;
  Json();
  void assign_bool(bool value);
  void assign_unsigned(uint64_t value);
  void assign_signed(int64_t value);
  std::unique_ptr<State> state_;
};

}  // namespace weightd::cli
