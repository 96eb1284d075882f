// SPDX-License-Identifier: Apache-2.0
#include "base/parallel.h"

#include <gtest/gtest.h>

#include <mutex>
#include <set>
#include <utility>

namespace weightd {
namespace {

using Ranges = std::set<std::pair<uint64_t, uint64_t>>;

Ranges ranges_of(uint64_t count, uint64_t grain, int threads) {
  std::mutex mutex;
  Ranges ranges;
  parallel_ranges(count, grain, threads, [&](uint64_t begin, uint64_t end) {
    const std::lock_guard<std::mutex> lock(mutex);
    EXPECT_TRUE(ranges.emplace(begin, end).second);
  });
  return ranges;
}

TEST(ParallelRanges, CoverEverythingOnceOnGrainBounds) {
  for (const uint64_t count : {1U, 2U, 7U, 64U, 65U, 1000U}) {
    for (const uint64_t grain : {1U, 2U, 16U, 64U, 5000U}) {
      for (const int threads : {1, 2, 3, 8, 100}) {
        const Ranges ranges = ranges_of(count, grain, threads);
        EXPECT_LE(ranges.size(), static_cast<size_t>(threads));
        uint64_t expected = 0;
        for (const auto& [begin, end] : ranges) {
          EXPECT_EQ(begin, expected);
          EXPECT_EQ(begin % grain, 0U);
          EXPECT_LT(begin, end);
          expected = end;
        }
        EXPECT_EQ(expected, count) << count << " by " << grain << " with " << threads;
      }
    }
  }
}

TEST(ParallelRanges, NothingToDoCallsNothing) { EXPECT_TRUE(ranges_of(0, 16, 4).empty()); }

TEST(ParallelRanges, TheCutDependsOnTheArgumentsAlone) {
  EXPECT_EQ(ranges_of(1000, 16, 3), ranges_of(1000, 16, 3));
  EXPECT_EQ(ranges_of(64, 16, 4), (Ranges{{0, 16}, {16, 32}, {32, 48}, {48, 64}}));
  EXPECT_EQ(ranges_of(65, 16, 2), (Ranges{{0, 32}, {32, 65}}));
}

TEST(ParallelRanges, OneThreadIsTheCaller) {
  const std::thread::id caller = std::this_thread::get_id();
  parallel_ranges(10, 1, 1, [&](uint64_t, uint64_t) { EXPECT_EQ(std::this_thread::get_id(), caller); });
}

TEST(ParallelRanges, NoThreadCountMeansOnePerCore) {
  const size_t cores = std::max(1U, std::thread::hardware_concurrency());
  EXPECT_EQ(ranges_of(100000, 1, 0).size(), cores);
  EXPECT_EQ(ranges_of(100000, 1, -1).size(), cores);
}

}  // namespace
}  // namespace weightd
