// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <string>

#include "tests/gpu/test_matrix.h"

namespace weightd::kernels {
namespace {

using testing::DeviceF12;
using testing::DeviceMemory;
using testing::Words;

constexpr uint16_t kPoison = 0xA5A5;
constexpr uint16_t kNan = 0x7fff;

template <typename Index>
void check_gather(const Words& words, const DeviceF12& device, const std::vector<Index>& rows, uint64_t stride, uint64_t before) {
  std::vector<uint16_t> want(before + (rows.size() - 1) * stride + words.k, kPoison);
  for (size_t i = 0; i < rows.size(); ++i) {
    const bool inside = rows[i] >= 0 && static_cast<uint64_t>(rows[i]) < words.n;
    for (uint64_t c = 0; c < words.k; ++c) {
      want[before + i * stride + c] = inside ? words.at(static_cast<uint64_t>(rows[i]), c) : kNan;
    }
  }
  const DeviceMemory indexes = testing::to_device(rows);
  const DeviceMemory out(want.size() * 2);
  const Status status = launch_gather_rows(device.matrix(), indexes.template as<Index>(), rows.size(), out.as<uint16_t>() + before,
                                           static_cast<int64_t>(stride), nullptr);
  ASSERT_TRUE(status.ok()) << status.to_string();
  EXPECT_EQ(testing::first_difference(testing::from_device<uint16_t>(out), want, stride), "");
  EXPECT_TRUE(out.fences_intact());
}

template <typename Index>
std::vector<Index> some_rows(uint64_t n, size_t count) {
  std::mt19937_64 random(n);
  std::vector<Index> rows(count);
  for (Index& row : rows) row = static_cast<Index>(random() % n);
  rows.front() = static_cast<Index>(n - 1);
  rows.back() = 0;
  return rows;
}

struct Shape {
  uint64_t n, k;
};

TEST(GatherRows, EveryShapeAtEveryEscapeRate) {
  for (const Shape shape : {Shape{1, 1}, {16, 64}, {37, 65}, {300, 511}, {64, 4104}, {20, 5000}}) {
    for (const double wild : {0.0, 2e-4, 1e-3, 1e-2, 0.1, 1.0}) {
      SCOPED_TRACE("n " + std::to_string(shape.n) + " k " + std::to_string(shape.k) + " wild " + std::to_string(wild));
      const Words words = testing::random_weights(shape.n, shape.k, wild, false, shape.n * 3 + shape.k);
      const DeviceF12 device(testing::encode(words));
      check_gather(words, device, some_rows<int32_t>(words.n, 50), words.k, 0);
      check_gather(words, device, some_rows<int64_t>(words.n, 3), words.k + 5, 1);
      check_gather(words, device, some_rows<int64_t>(words.n, 9), (words.k + 15) / 8 * 8, 8);
      ASSERT_TRUE(device.fences_intact());
    }
  }
}

TEST(GatherRows, EveryRowOfEveryPattern) {
  const Words words = testing::all_patterns(136, 520);
  const DeviceF12 device(testing::encode(words));
  std::vector<int32_t> rows;
  for (int32_t row = 0; row < 136; ++row) rows.push_back(row * 5 % 136);
  check_gather(words, device, rows, 520, 0);
}

TEST(GatherRows, IndexesOutsideFillTheirRowWithNan) {
  const Words words = testing::random_weights(40, 130, 1e-3, false, 2);
  const DeviceF12 device(testing::encode(words));
  check_gather<int32_t>(words, device, {3, -1, 40, 39, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()},
                        130, 0);
  check_gather<int64_t>(words, device, {int64_t{1} << 32, 0, std::numeric_limits<int64_t>::min(), 41}, 130, 0);
}

TEST(GatherRows, CO_054_RefusesWhatItsContractForbids) {
  const Words words = testing::random_weights(32, 64, 0, false, 8);
  const DeviceF12 device(testing::encode(words));
  const DeviceMemory out(4 * 64 * 2);
  const DeviceMemory rows = testing::to_device(std::vector<int64_t>{1, 2, 3, 4});
  const auto code = [&](const int64_t* indexes, uint64_t count, int64_t stride) {
    return launch_gather_rows(device.matrix(), indexes, count, out.as<uint16_t>(), stride, nullptr).code();
  };
  EXPECT_EQ(code(nullptr, 4, 64), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(reinterpret_cast<const int64_t*>(rows.data() + 4), 3, 64), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(rows.as<int64_t>(), 4, 60), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(rows.as<int64_t>(), 0, 64), StatusCode::kOk);
  EXPECT_EQ(testing::from_device<uint16_t>(out), std::vector<uint16_t>(4 * 64, kPoison));
}

}  // namespace
}  // namespace weightd::kernels
