// SPDX-License-Identifier: Apache-2.0
#include "base/text.h"

#include <gtest/gtest.h>

#include <array>

namespace weightd {
namespace {

TEST(Text, CO_010_PrintableLeavesNothingThatATerminalObeys) {
  EXPECT_EQ(printable("model.layers.0.weight"), "model.layers.0.weight");
  EXPECT_EQ(printable("a\nERROR fake line"), "a\\nERROR fake line");
  EXPECT_EQ(printable("\x1b[2J"), "\\x1b[2J");
  EXPECT_EQ(printable(std::string_view("a\0b", 3)), "a\\x00b");
  EXPECT_EQ(printable("\r\t\x7f\\"), "\\r\\t\\x7f\\\\");
  EXPECT_EQ(printable("\xC2\x9B"
                      "2J"),
            "\\xc2\\x9b2J");  // the one-character form of ESC [
  EXPECT_EQ(printable("\xC2\xA0\xC3\xA9\xE9\x87\x8D\xF0\x9F\x98\x80"), "\xC2\xA0\xC3\xA9\xE9\x87\x8D\xF0\x9F\x98\x80");
}

TEST(Text, PrintableEscapesWhatIsNotUtf8) {
  EXPECT_EQ(printable("\xff"), "\\xff");
  EXPECT_EQ(printable("a\xC3"), "a\\xc3");                           // cut short
  EXPECT_EQ(printable("\xC0\x80"), "\\xc0\\x80");                    // overlong NUL
  EXPECT_EQ(printable("\xED\xA0\x80"), "\\xed\\xa0\\x80");           // a surrogate
  EXPECT_EQ(printable("\xF4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");  // beyond U+10FFFF
}

TEST(Text, PrintableCutsLongText) {
  EXPECT_EQ(printable("abcdef", 3), "abc...");
  EXPECT_EQ(printable("abc", 3), "abc");
  EXPECT_EQ(printable("", 0), "");
  EXPECT_LT(printable(std::string(70000, 'n')).size(), 210U);
  // Never in the middle of a character.
  EXPECT_EQ(printable("\xE9\x87\x8D\xE9\x87\x8D", 4), "\xE9\x87\x8D\xE9\x87\x8D");
  EXPECT_EQ(printable("\xE9\x87\x8D\xE9\x87\x8D", 2), "\xE9\x87\x8D...");
}

TEST(Text, Utf8) {
  for (const char* good : {"", "abc", "\xC2\x80", "\xDF\xBF", "\xE0\xA0\x80", "\xED\x9F\xBF", "\xEE\x80\x80", "\xEF\xBF\xBF",
                           "\xF0\x90\x80\x80", "\xF4\x8F\xBF\xBF"}) {
    EXPECT_TRUE(is_utf8(good)) << printable(good);
  }
  for (const char* bad : {"\x80", "\xC1\xBF", "\xC2", "\xC2\x20", "\xE0\x9F\xBF", "\xED\xA0\x80", "\xED\xBF\xBF", "\xE1\x80",
                          "\xF0\x8F\xBF\xBF", "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xF0\x90\x80", "\xFE", "a\xFFz"}) {
    EXPECT_FALSE(is_utf8(bad)) << printable(bad);
  }
  EXPECT_TRUE(is_utf8(std::string_view("a\0b", 3)));
}

TEST(Text, HumanBytes) {
  EXPECT_EQ(human_bytes(0), "0 B");
  EXPECT_EQ(human_bytes(1023), "1023 B");
  EXPECT_EQ(human_bytes(1024), "1.0 KiB");
  EXPECT_EQ(human_bytes(1536), "1.5 KiB");
  EXPECT_EQ(human_bytes(uint64_t{1} << 30), "1.0 GiB");
  EXPECT_EQ(human_bytes(UINT64_MAX), "16384.0 PiB");
}

TEST(Text, Hex) {
  const std::array<unsigned char, 4> bytes = {0x00, 0x0f, 0xa5, 0xff};
  EXPECT_EQ(hex(bytes.data(), bytes.size()), "000fa5ff");
  EXPECT_EQ(hex(bytes.data(), 0), "");
}

}  // namespace
}  // namespace weightd
