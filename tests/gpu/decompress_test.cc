// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>

#include "base/parallel.h"
#include "tests/gpu/test_matrix.h"

namespace weightd::kernels {
namespace {

using testing::DeviceF12;
using testing::DeviceMemory;
using testing::HostF12;
using testing::Words;

constexpr uint16_t kPoison = 0xA5A5;

/// Where rows of `columns` elements go: `before` elements into the memory, `stride` apart.
struct OutputLayout {
  uint64_t rows, columns, stride;
  uint64_t before = 0;
  [[nodiscard]] uint64_t elements() const { return before + (rows == 0 ? 0 : (rows - 1) * stride + columns); }
  [[nodiscard]] uint64_t place(uint64_t row) const { return before + row * stride; }
};

/// The whole memory as it must be: the words of rows begin.. in their places, poison elsewhere.
std::vector<uint16_t> expected(const Words& words, uint64_t begin, const OutputLayout& layout) {
  std::vector<uint16_t> memory(layout.elements(), kPoison);
  for (uint64_t row = 0; row < layout.rows; ++row) {
    for (uint64_t c = 0; c < layout.columns; ++c) memory[layout.place(row) + c] = words.at(begin + row, c);
  }
  return memory;
}

void check_decompress(const Words& words, const DeviceF12& device, uint64_t begin, uint64_t end, uint64_t stride, uint64_t before) {
  const OutputLayout layout{end - begin, words.k, stride, before};
  const DeviceMemory out(layout.elements() * 2);
  const Status status =
      launch_decompress(device.matrix(), begin, end, out.as<uint16_t>() + before, static_cast<int64_t>(stride), nullptr);
  ASSERT_TRUE(status.ok()) << status.to_string();
  EXPECT_EQ(testing::first_difference(testing::from_device<uint16_t>(out), expected(words, begin, layout), stride), "");
  EXPECT_TRUE(out.fences_intact());
}

struct Shape {
  uint64_t n, k;
};

TEST(Decompress, EveryShapeAtEveryEscapeRate) {
  for (const Shape shape : {Shape{1, 1}, {16, 64}, {17, 65}, {15, 63}, {33, 511}, {48, 512}, {7, 513}, {40, 2056}, {130, 1000}}) {
    for (const double wild : {0.0, 1e-4, 1e-3, 1e-2, 0.1, 1.0}) {
      SCOPED_TRACE("n " + std::to_string(shape.n) + " k " + std::to_string(shape.k) + " wild " + std::to_string(wild));
      const Words words = testing::random_weights(shape.n, shape.k, wild, false, shape.n + shape.k);
      const DeviceF12 device(testing::encode(words));
      check_decompress(words, device, 0, words.n, words.k, 0);
      ASSERT_TRUE(device.fences_intact());
    }
  }
}

TEST(Decompress, RatesReachInlineListsAndDenseGroups) {
  const HostF12 rare = testing::encode(testing::random_weights(64, 1024, 2e-4, false, 1));
  const HostF12 some = testing::encode(testing::random_weights(64, 1024, 1e-2, false, 1));
  const HostF12 many = testing::encode(testing::random_weights(64, 1024, 0.3, false, 1));
  EXPECT_GT(rare.escapes, 0U);
  EXPECT_EQ(rare.dense_groups, 0U);
  EXPECT_GT(some.listed_groups, 0U);
  EXPECT_GT(many.dense_groups, 0U);
}

TEST(Decompress, CO_034_EveryPattern) {
  const Words words = testing::all_patterns(264, 520);  // 137,280 cells
  const DeviceF12 device(testing::encode(words));
  check_decompress(words, device, 0, words.n, 520, 0);
}

TEST(Decompress, CO_035_NanPayloadsAloneAndTogether) {
  const std::vector<uint16_t> nans{0x7F81, 0x7FA0, 0x7FBF, 0x7FC0, 0x7FFF, 0xFF81, 0xFFA0, 0xFFBF, 0xFFC0, 0xFFFF};
  for (const uint16_t background : {uint16_t{0x0000}, uint16_t{0x3F80}}) {
    for (size_t which = 0; which <= nans.size(); ++which) {
      Words words{1, 64, std::vector<uint16_t>(64, background)};
      for (size_t i = 0; i < nans.size(); ++i) {
        if (which == nans.size() || which == i) words.words[5 * i + 3] = nans[i];
      }
      const DeviceF12 device(testing::encode(words));
      check_decompress(words, device, 0, 1, 64, 0);
    }
  }
}

/// More than 2^31 cells, more than 4 GiB of planes.
TEST(Decompress, CO_045_IndexesBeyond32Bits) {
  Words words{(uint64_t{1} << 25) + 1, 64, {}};
  words.words.resize(words.n * words.k);
  parallel_ranges(words.words.size(), 1024, 0, [&](uint64_t begin, uint64_t end) {
    for (uint64_t i = begin; i < end; ++i) words.words[i] = static_cast<uint16_t>((i * 0x9e3779b97f4a7c15U) >> 41);
  });
  const HostF12 host = testing::encode(words);
  ASSERT_GT(host.codes.size() + host.pool.size(), uint64_t{1} << 32);
  const DeviceF12 device(host);
  const DeviceMemory out(words.words.size() * 2);
  ASSERT_TRUE(launch_decompress(device.matrix(), 0, words.n, out.as<uint16_t>(), 64, nullptr).ok());
  const std::vector<std::byte> got = out.download();
  EXPECT_EQ(std::memcmp(got.data(), words.words.data(), got.size()), 0);
  EXPECT_TRUE(out.fences_intact());

  const std::vector<int64_t> rows{0, 1 << 24, static_cast<int64_t>(words.n) - 1};
  const DeviceMemory indexes = testing::to_device(rows);
  const DeviceMemory gathered(rows.size() * 64 * 2);
  ASSERT_TRUE(launch_gather_rows(device.matrix(), indexes.as<int64_t>(), 3, gathered.as<uint16_t>(), 64, nullptr).ok());
  const auto some = testing::from_device<uint16_t>(gathered);
  for (size_t i = 0; i < rows.size(); ++i) {
    for (uint64_t c = 0; c < 64; ++c) ASSERT_EQ(some[i * 64 + c], words.at(static_cast<uint64_t>(rows[i]), c));
  }
}

TEST(Decompress, RowRangesStridesAndAlignments) {
  const Words words = testing::random_weights(67, 200, 1e-3, false, 5);
  const DeviceF12 device(testing::encode(words));
  for (const auto& [begin, end] : {std::pair<uint64_t, uint64_t>{0, 67}, {0, 1}, {66, 67}, {15, 17}, {16, 32}, {5, 60}, {31, 31}}) {
    for (const uint64_t stride : {200U, 208U, 203U}) {
      for (const uint64_t before : {0U, 1U, 8U}) {
        SCOPED_TRACE("rows " + std::to_string(begin) + ".." + std::to_string(end) + " stride " + std::to_string(stride) +
                     " before " + std::to_string(before));
        check_decompress(words, device, begin, end, stride, before);
      }
    }
  }
}

TEST(Decompress, RowsOfASlice) {
  const Words words = testing::random_weights(80, 600, 1e-3, false, 6);
  const DeviceF12 device(testing::encode(words));
  const F12DeviceMatrix slice = slice_rows(device.matrix(), 32, 71);
  ASSERT_EQ(slice.n, 39U);
  const OutputLayout layout{39, 600, 600};
  const DeviceMemory out(layout.elements() * 2);
  ASSERT_TRUE(launch_decompress(slice, 0, 39, out.as<uint16_t>(), 600, nullptr).ok());
  EXPECT_EQ(testing::first_difference(testing::from_device<uint16_t>(out), expected(words, 32, layout), 600), "");
}

TEST(Decompress, ManyUnitsBeyondOneGridRow) {
  const Words words = testing::random_weights(65540 * 16 + 3, 8, 1e-3, false, 7);
  const DeviceF12 device(testing::encode(words));
  check_decompress(words, device, 0, words.n, 8, 0);
}

/// One buffer for many matrices in a row, read by a copy in between: no launch overtakes the one before it.
TEST(Decompress, LaunchesInARowKeepTheirOrder) {
  constexpr uint64_t kRows = 512, kColumns = 1024;
  constexpr size_t kMatrices = 8;
  std::vector<Words> words;
  std::vector<DeviceF12> coded;
  for (size_t i = 0; i < kMatrices; ++i) {
    words.push_back(testing::random_weights(kRows, kColumns, i % 2 == 0 ? 0 : 1e-2, false, 60 + i));
    coded.emplace_back(testing::encode(words.back()));
  }
  const DeviceMemory out(kRows * kColumns * 2);
  std::vector<DeviceMemory> copies;
  for (size_t i = 0; i < kMatrices; ++i) copies.emplace_back(out.bytes());
  for (int repeat = 0; repeat < 20; ++repeat) {
    for (size_t i = 0; i < kMatrices; ++i) {
      for (const size_t which : {(i + 3) % kMatrices, i}) {
        ASSERT_TRUE(launch_decompress(coded[which].matrix(), 0, kRows, out.as<uint16_t>(), kColumns, nullptr).ok());
      }
      testing::require_cuda(cudaMemcpyAsync(copies[i].data(), out.data(), out.bytes(), cudaMemcpyDeviceToDevice, nullptr), "copy");
    }
    for (size_t i = 0; i < kMatrices; ++i) {
      ASSERT_EQ(testing::first_difference(testing::from_device<uint16_t>(copies[i]), words[i].words, kColumns), "")
          << "matrix " << i;
    }
  }
}

TEST(Decompress, CO_054_CO_058_RefusesWhatItsContractForbids) {
  const Words words = testing::random_weights(32, 64, 0, false, 8);
  const DeviceF12 device(testing::encode(words));
  const DeviceMemory out(32 * 64 * 2);
  const auto code = [&](F12DeviceMatrix w, uint64_t begin, uint64_t end, uint16_t* to, int64_t stride) {
    return launch_decompress(w, begin, end, to, stride, nullptr).code();
  };
  F12DeviceMatrix misaligned = device.matrix();
  misaligned.codes += 8;
  EXPECT_EQ(code(misaligned, 0, 32, out.as<uint16_t>(), 64), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(device.matrix(), 0, 33, out.as<uint16_t>(), 64), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(device.matrix(), 3, 2, out.as<uint16_t>(), 64), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(device.matrix(), 0, 32, nullptr, 64), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(device.matrix(), 0, 32, out.as<uint16_t>(), 63), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(device.matrix(), 0, 32, out.as<uint16_t>() + 31 * 64, -64), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(device.matrix(), 0, 1, out.as<uint16_t>(), 0), StatusCode::kOk);
  EXPECT_EQ(code(device.matrix(), 16, 17, device.codes.as<uint16_t>(), 64), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(device.matrix(), 16, 17, device.records.as<uint16_t>(), 64), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(device.matrix(), 0, 32, reinterpret_cast<uint16_t*>(out.data() + 1), 64), StatusCode::kInvalidArgument);
  auto memory = testing::from_device<uint16_t>(out);
  EXPECT_EQ(std::vector<uint16_t>(memory.begin() + 64, memory.end()), std::vector<uint16_t>(31 * 64, kPoison));
}

/// Records and pool of random bytes: the numbers are wrong, but nothing outside the planes is read (compute-sanitizer sees it) and
/// nothing outside the output written.
TEST(Decompress, DamagedPlanesStayInside) {
  const Words words = testing::random_weights(50, 1100, 1e-2, false, 9);
  std::mt19937 random(4);
  for (int round = 0; round < 20; ++round) {
    HostF12 host = testing::encode(words);
    for (std::byte& b : host.records) {
      if (round % 2 == 0 || random() % 8 == 0) b = static_cast<std::byte>(random());
    }
    for (std::byte& b : host.pool) b = static_cast<std::byte>(random());
    if (round % 4 == 1) host.pool.resize(host.pool.size() / 2 / 16 * 16);
    const DeviceF12 device(host);
    const DeviceMemory out(words.n * words.k * 2);
    ASSERT_TRUE(launch_decompress(device.matrix(), 0, words.n, out.as<uint16_t>(), static_cast<int64_t>(words.k), nullptr).ok());
    EXPECT_TRUE(out.fences_intact());
    const DeviceMemory rows = testing::to_device(std::vector<int32_t>{0, 7, 49});
    ASSERT_TRUE(launch_gather_rows(device.matrix(), rows.as<int32_t>(), 3, out.as<uint16_t>(), 1100, nullptr).ok());
    EXPECT_TRUE(out.fences_intact());
  }
}

}  // namespace
}  // namespace weightd::kernels
