// SPDX-License-Identifier: Apache-2.0
#include "daemon/loader/piece_queue.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace weightd::loader {
namespace {

constexpr uint64_t kAhead = 3;  // pieces of one section that may wait for its checksum

Piece piece_at(const PieceQueue::Claim& claim) { return {claim.offset_bytes, {}, 0}; }

TEST(PieceQueue, SectionsAreCutIntoPieces) {
  PieceQueue queue({{2 * kPieceBytes + 5, false}}, 100);
  for (const uint64_t size : {kPieceBytes, kPieceBytes, uint64_t{5}}) {
    const auto claim = queue.claim();
    ASSERT_TRUE(claim);
    EXPECT_EQ(claim->size_bytes, size);
  }
  EXPECT_FALSE(queue.claim());
}

TEST(PieceQueue, TheSectionWithMostLeftComesFirst) {
  PieceQueue queue({{kPieceBytes, false}, {3 * kPieceBytes, false}, {2 * kPieceBytes, true}}, 100);
  EXPECT_EQ(queue.claim()->section, 1U);  // 3 left
  const auto whole = queue.claim();       // 2 and 2 left: the later one
  ASSERT_TRUE(whole);
  EXPECT_EQ(whole->section, 2U);
  EXPECT_EQ(whole->size_bytes, 2 * kPieceBytes);
  queue.done_whole(*whole);
  EXPECT_EQ(queue.claim()->section, 1U);
  EXPECT_EQ(queue.claim()->section, 1U);  // 1 and 1
  EXPECT_EQ(queue.claim()->section, 0U);
  EXPECT_FALSE(queue.claim());
}

TEST(PieceQueue, TurnsAreInOrderWhateverTheOrderOfReading) {
  PieceQueue queue({{3 * kPieceBytes, false}}, 100);
  const auto first = *queue.claim(), second = *queue.claim(), third = *queue.claim();
  queue.put(third, piece_at(third));
  EXPECT_FALSE(queue.take(0));
  queue.put(first, piece_at(first));
  const auto turn = queue.take(0);
  ASSERT_TRUE(turn);
  EXPECT_EQ(turn->offset_bytes, 0U);
  queue.put(second, piece_at(second));
  EXPECT_FALSE(queue.take(0));  // one turn at a time
  EXPECT_FALSE(queue.done(0));
  EXPECT_EQ(queue.take(0)->offset_bytes, kPieceBytes);
  EXPECT_FALSE(queue.done(0));
  EXPECT_EQ(queue.take(0)->offset_bytes, 2 * kPieceBytes);
  EXPECT_TRUE(queue.done(0));  // the last
  EXPECT_FALSE(queue.take(0));
}

TEST(PieceQueue, ReadingRunsAheadOfOneSectionOnlySoFar) {
  PieceQueue queue({{100 * kPieceBytes, false}, {kPieceBytes, false}}, 100);
  std::vector<PieceQueue::Claim> claims;
  for (uint64_t i = 0; i < kAhead; ++i) {
    claims.push_back(*queue.claim());
    EXPECT_EQ(claims.back().section, 0U);
  }
  EXPECT_EQ(queue.claim()->section, 1U);  // though the other has more left
  queue.put(claims[0], piece_at(claims[0]));
  ASSERT_TRUE(queue.take(0));
  EXPECT_FALSE(queue.done(0));
  EXPECT_EQ(queue.claim()->offset_bytes, kAhead * kPieceBytes);
}

TEST(PieceQueue, StopWakesThoseWhoWait) {
  PieceQueue queue({{10 * kPieceBytes, false}}, 1);
  const auto first = *queue.claim();
  std::atomic<bool> got = true;
  std::jthread waiting([&] { got = queue.claim().has_value(); });
  queue.stop();
  waiting.join();
  EXPECT_FALSE(got);
  queue.put(first, piece_at(first));
  EXPECT_FALSE(queue.take(0));
}

TEST(PieceQueue, NothingToReadIsOverAtOnce) {
  PieceQueue queue({}, 1);
  EXPECT_FALSE(queue.claim());
}

TEST(PieceQueue, AnEmptySectionThatIsOnlyCheckedIsClaimedOnce) {
  PieceQueue queue({{0, true}}, 1);
  const auto claim = queue.claim();
  ASSERT_TRUE(claim);
  queue.done_whole(*claim);
  EXPECT_FALSE(queue.claim());
}

/// Threads that do nothing but claim and take turns: every limit, no circle, every byte once and in order.
TEST(PieceQueue, ThreadsNeverWaitInACircle) {
  std::vector<PieceQueue::Section> sections;
  for (uint64_t i = 0; i < 40; ++i) sections.push_back({i % 7 == 3 ? kPieceBytes : 1 + i * i * 99991, i % 7 == 3});
  for (const uint32_t limit : {1U, 2U, 5U, 64U}) {
    for (const int threads : {1, 3, 16}) {
      PieceQueue queue(sections, limit);
      std::vector<uint64_t> hashed(sections.size());  // each written under its section's turn
      std::atomic<uint32_t> under_way = 0, most = 0, last_turns = 0;
      std::atomic<bool> ordered = true;
      const auto work = [&] {
        while (const auto claim = queue.claim()) {
          const uint32_t now = ++under_way;
          for (uint32_t seen = most; seen < now && !most.compare_exchange_weak(seen, now);) {
          }
          if (sections[claim->section].whole) {
            --under_way;
            queue.done_whole(*claim);
            continue;
          }
          queue.put(*claim, {claim->offset_bytes, {static_cast<std::byte*>(nullptr), 0}, static_cast<uint32_t>(claim->size_bytes)});
          while (const auto piece = queue.take(claim->section)) {
            if (piece->offset_bytes != hashed[claim->section]) ordered = false;
            hashed[claim->section] += piece->slot;
            --under_way;
            if (queue.done(claim->section)) ++last_turns;
          }
        }
      };
      {
        std::vector<std::jthread> others;
        for (int i = 0; i < threads; ++i) others.emplace_back(work);
      }
      EXPECT_TRUE(ordered);
      EXPECT_LE(most, limit);
      uint32_t coded = 0;
      for (size_t i = 0; i < sections.size(); ++i) {
        if (sections[i].whole) continue;
        ++coded;
        EXPECT_EQ(hashed[i], sections[i].bytes);
      }
      EXPECT_EQ(last_turns, coded);
    }
  }
}

}  // namespace
}  // namespace weightd::loader
