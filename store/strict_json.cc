// SPDX-License-Identifier: Apache-2.0
#include "store/strict_json.h"

#include <algorithm>
#include <exception>
#include <new>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/text.h"

namespace weightd::store {
namespace {

constexpr uint64_t kBytesShown = 40;

/// Turns the parser's events into ours; keeps the first failure.
class Adapter {
 public:
  using number_integer_t = nlohmann::json::number_integer_t;
  using number_unsigned_t = nlohmann::json::number_unsigned_t;
  using number_float_t = nlohmann::json::number_float_t;
  using string_t = nlohmann::json::string_t;
  using binary_t = nlohmann::json::binary_t;

  Adapter(std::string_view text, std::string_view name, JsonHandler& handler) : text_(text), name_(name), handler_(handler) {}

  bool null() { return keep(handler_.other("null")); }
  bool boolean(bool value) { return keep(handler_.other(value ? "true" : "false")); }
  // Only for tokens that begin with a minus; "-0" has the value 0.
  bool number_integer(number_integer_t value) { return keep(handler_.other(value == 0 ? "-0" : std::to_string(value))); }
  bool number_unsigned(number_unsigned_t value) { return keep(handler_.integer(value)); }
  bool number_float(number_float_t, const string_t& token) { return keep(handler_.other(token)); }
  bool string(string_t& text) { return keep(handler_.string(text)); }
  bool binary(binary_t&) { return keep(Status::internal("binary value in JSON text")); }
  bool start_object(size_t) {
    ++depth_;
    return keep(handler_.begin_object());
  }
  bool key(string_t& text) { return keep(handler_.key(text)); }
  bool end_object() {
    complete_ = --depth_ == 0;
    return keep(handler_.end_object());
  }
  bool start_array(size_t) {
    ++depth_;
    return keep(handler_.begin_array());
  }
  bool end_array() {
    complete_ = --depth_ == 0;
    return keep(handler_.end_array());
  }
  bool parse_error(size_t position, const std::string& token, const nlohmann::json::exception& error) {
    // The parser stops at a number beyond the range of double; the handler may have the clearer word on it.
    constexpr int kNumberOverflow = 406;
    if (error.id == kNumberOverflow && !keep(handler_.other(token))) return false;
    const std::string_view rule = complete_ ? ": text after the closing bracket" : ": not valid JSON";
    const std::string_view read = text_.substr(0, position);
    const std::string_view near = read.substr(read.size() - std::min<size_t>(read.size(), kBytesShown));
    return keep(Status::corruption(std::string(name_) + std::string(rule) + " at byte " + std::to_string(position) + ", after '" +
                                   printable(near) + "'"));
  }

  [[nodiscard]] const Status& status() const { return status_; }

 private:
  bool keep(Status status) {
    status_ = std::move(status);
    return status_.ok();
  }

  std::string_view text_, name_;
  JsonHandler& handler_;
  Status status_;
  uint64_t depth_ = 0;
  bool complete_ = false;  // the outermost value has ended
};

}  // namespace

Status parse_strict_json(std::string_view text, std::string_view name, JsonHandler& handler) {
  // The parser takes a NUL for the end of the text, and would accept anything behind it.
  if (const size_t nul = text.find('\0'); nul != std::string_view::npos) {
    return Status::corruption(std::string(name) + ": not valid JSON at byte " + std::to_string(nul) + ": a NUL byte");
  }
  if (text.substr(0, 3) == "\xEF\xBB\xBF") return Status::corruption(std::string(name) + ": begins with a byte order mark");
  try {
    Adapter adapter(text, name, handler);
    const bool whole = nlohmann::json::sax_parse(text.begin(), text.end(), &adapter);
    if (!adapter.status().ok()) return adapter.status();
    if (!whole) return Status::corruption(std::string(name) + ": not valid JSON");
    return {};
  } catch (const std::bad_alloc&) {
    return Status::resource_exhausted(std::string(name) + ": out of memory while parsing " + std::to_string(text.size()) +
                                      " bytes of JSON");
  } catch (const std::exception& error) {
    return Status::corruption(std::string(name) + ": not valid JSON: " + printable(error.what()));
  }
}

}  // namespace weightd::store
