// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "weightd/status.h"

namespace weightd::store {

/// Receives the tokens of one JSON document in order. A call that returns a failure ends the parse with it.
class JsonHandler {
 public:
  virtual ~JsonHandler() = default;
  virtual Status begin_object() = 0;
  virtual Status key(std::string& text) = 0;  // decoded UTF-8; may be moved from
  virtual Status end_object() = 0;
  virtual Status begin_array() = 0;
  virtual Status end_array() = 0;
  virtual Status string(std::string& text) = 0;      // decoded UTF-8; may be moved from
  virtual Status integer(uint64_t value) = 0;        // written as plain decimal digits, at most 2^64 - 1
  virtual Status other(std::string_view token) = 0;  // any other number, true, false, null; the token as it is spelled
};

/// Parses `text` as one JSON document: valid UTF-8, nothing but white space behind it, no comments, no byte order mark. Not
/// recursive: depth costs nothing but what the handler allows. kCorruption, naming `name` and the byte offset, when `text` is
/// not JSON; else what the handler returned. Never throws (memory exhaustion becomes kResourceExhausted).
Status parse_strict_json(std::string_view text, std::string_view name, JsonHandler& handler);

}  // namespace weightd::store
