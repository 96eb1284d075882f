// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>

#include "kernels/cpu/gemm_kernels.h"
#include "store/tile_layout.h"

/// The drawings of kernels/LAYOUT.md against the index functions that the code uses.
namespace weightd {
namespace {

std::string layout_page() {
  std::ifstream in(WEIGHTD_LAYOUT_PAGE);
  EXPECT_TRUE(in) << WEIGHTD_LAYOUT_PAGE;
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

template <typename... Values>
std::string text(const char* format, Values... values) {
  char buffer[64];
  std::snprintf(buffer, sizeof buffer, format, values...);
  return buffer;
}

TEST(Layout, LaneMapOfATile) {
  std::string drawing;
  for (uint32_t row = 0; row < 8; ++row) {
    std::string cells[16];
    for (uint32_t lane = 0; lane < 32; ++lane) {
      for (uint32_t byte = 0; byte < 4; ++byte) {
        if (f12::scratch_row(f12::scratch_pos(false, lane, 0, byte)) == row) {
          cells[f12::tile_column(lane, 0, byte)] = text("%2u.%u", lane, byte);
        }
      }
    }
    drawing += text("row %u  |", row);
    for (const std::string& cell : cells) drawing += " " + cell;
    drawing += "\n";
  }
  EXPECT_THAT(layout_page(), testing::HasSubstr(drawing));
}

TEST(Layout, ColumnsOfTheBytesOfARow) {
  std::string drawing;
  for (uint32_t b = 0; b < 64; ++b) {
    if (b % 16 == 0) drawing += text("bytes %2u..%2u |", b, b + 15);
    drawing += text(" %2u", f12::row_byte_column(b));
    if (b % 16 == 15) drawing += "\n";
  }
  EXPECT_THAT(layout_page(), testing::HasSubstr(drawing));
}

TEST(Layout, LaneOrderOfTheHostKernels) {
  std::string columns[16];
  for (uint32_t c = 0; c < 16; ++c) columns[kernels::cpu::f12_lane(c)] = text("%2u", c);
  std::string drawing = "column  |";
  for (const std::string& column : columns) drawing += " " + column;
  EXPECT_THAT(layout_page(), testing::HasSubstr(drawing + "\n"));
}

}  // namespace
}  // namespace weightd
