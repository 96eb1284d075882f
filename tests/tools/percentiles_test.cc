// SPDX-License-Identifier: Apache-2.0
#include "tools/bench/percentiles.h"

#include <gtest/gtest.h>

#include <vector>

namespace weightd::tools {
namespace {

TEST(Percentiles, NearestRank) {
  std::vector<double> times;
  for (int i = 100; i >= 1; --i) times.push_back(i);
  const Percentiles p = percentiles(times);
  EXPECT_EQ(p.least, 1);
  EXPECT_EQ(p.p50, 50);
  EXPECT_EQ(p.p90, 90);
  EXPECT_EQ(p.p99, 99);
  EXPECT_EQ(p.most, 100);
  EXPECT_EQ(p.mean, 50.5);
}

TEST(Percentiles, OneTimeIsEveryPercentile) {
  const Percentiles p = percentiles({4.0});
  EXPECT_EQ(p.least, 4);
  EXPECT_EQ(p.p50, 4);
  EXPECT_EQ(p.p99, 4);
  EXPECT_EQ(p.mean, 4);
}

TEST(Percentiles, HighOnesOfFewAreTheLargest) {
  const Percentiles p = percentiles({3, 1, 2});
  EXPECT_EQ(p.p50, 2);
  EXPECT_EQ(p.p90, 3);
  EXPECT_EQ(p.p99, 3);
}

}  // namespace
}  // namespace weightd::tools
