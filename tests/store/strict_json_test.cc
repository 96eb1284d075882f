// SPDX-License-Identifier: Apache-2.0
#include "store/strict_json.h"

#include <gtest/gtest.h>

#include <string>

namespace weightd::store {
namespace {

/// Writes the tokens down; refuses the string "stop".
class Recorder : public JsonHandler {
 public:
  Status begin_object() override { return note("{"); }
  Status key(std::string& text) override { return note("key " + text); }
  Status end_object() override { return note("}"); }
  Status begin_array() override { return note("["); }
  Status end_array() override { return note("]"); }
  Status string(std::string& text) override {
    return text == "stop" ? Status::unsupported("stopped here") : note("string " + text);
  }
  Status integer(uint64_t value) override { return note("integer " + std::to_string(value)); }
  Status other(std::string_view token) override { return note("other " + std::string(token)); }

  std::string tokens;

 private:
  Status note(const std::string& token) {
    tokens += (tokens.empty() ? "" : "|") + token;
    return {};
  }
};

std::string tokens_of(std::string_view text) {
  Recorder recorder;
  const Status status = parse_strict_json(text, "f", recorder);
  return status.ok() ? recorder.tokens : status.to_string();
}

TEST(StrictJson, TokensComeInOrderAndDecoded) {
  EXPECT_EQ(tokens_of(R"( {"a": [1, "x", true], "\u0061\n": {}} )"), "{|key a|[|integer 1|string x|other true|]|key a\n|{|}|}");
  EXPECT_EQ(tokens_of(R"("\ud83d\ude00\/")"), "string \xF0\x9F\x98\x80/");
}

TEST(StrictJson, NumbersKeepTheirSpelling) {
  EXPECT_EQ(tokens_of("[0, 18446744073709551615]"), "[|integer 0|integer 18446744073709551615|]");
  EXPECT_EQ(
      tokens_of("[18446744073709551616, 2.0, 2e0, -2, -0, -0.0, 1e300, -99999999999999999999]"),
      "[|other 18446744073709551616|other 2.0|other 2e0|other -2|other -0|other -0.0|other 1e300|other -99999999999999999999|]");
  EXPECT_EQ(tokens_of("[null,false]"), "[|other null|other false|]");
}

TEST(StrictJson, NumbersBeyondDoubleEndTheParse) {
  EXPECT_EQ(tokens_of("[1e999, 5]"), "corruption: f: not valid JSON at byte 6, after '[1e999'");
}

TEST(StrictJson, WhatIsNotJsonIsRefusedWithItsPlace) {
  EXPECT_EQ(tokens_of("{} x"), "corruption: f: text after the closing bracket at byte 4, after '{} x'");
  EXPECT_EQ(tokens_of("{\"a\":007}"), "corruption: f: not valid JSON at byte 7, after '{\"a\":00'");
  EXPECT_EQ(tokens_of("{\"a\":1,}"), "corruption: f: not valid JSON at byte 8, after '{\"a\":1,}'");
  EXPECT_EQ(tokens_of(std::string_view("{}\0garbage", 10)), "corruption: f: not valid JSON at byte 2: a NUL byte");
  EXPECT_EQ(tokens_of("\xEF\xBB\xBF{}"), "corruption: f: begins with a byte order mark");
  for (const char* text : {"",       " ",          "{",      "[",           "{\"a\"",   "{\"a\":}",
                           "{a:1}",  "[1 2]",      "'a'",    "\"\\ud800\"", "\"\xff\"", "\"\xc0\x80\"",
                           "\"\n\"", "// c\n{}",   "{}}",    "[+1]",        "[.5]",     "[1.]",
                           "[NaN]",  "[Infinity]", "[0x10]", "\"abc"}) {
    EXPECT_EQ(tokens_of(text).substr(0, 10), "corruption") << text << " gave " << tokens_of(text);
  }
}

TEST(StrictJson, TheHandlersRefusalEndsTheParse) {
  Recorder recorder;
  const Status status = parse_strict_json(R"(["go", "stop", "never"] garbage)", "f", recorder);
  EXPECT_EQ(status.to_string(), "unsupported: stopped here");
  EXPECT_EQ(recorder.tokens, "[|string go");
}

TEST(StrictJson, DepthNeedsNoStack) {
  const std::string deep(1'000'000, '[');
  Recorder recorder;
  EXPECT_EQ(parse_strict_json(deep, "f", recorder).code(), StatusCode::kCorruption);
}

}  // namespace
}  // namespace weightd::store
