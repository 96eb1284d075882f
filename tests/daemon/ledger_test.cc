// SPDX-License-Identifier: Apache-2.0
#include "daemon/ledger.h"

#include <gtest/gtest.h>

namespace weightd::daemon {
namespace {

constexpr uint64_t kGiB = uint64_t{1} << 30;
using Verdict = Ledger::Verdict;

Ledger ledger(uint64_t budget = 10 * kGiB) { return Ledger({{"host", "a CPU", 64 * kGiB, budget}}); }

TEST(Ledger, ReservesUpToTheBudgetExactly) {
  Ledger l = ledger();
  EXPECT_EQ(l.reserve(1, "host", 4 * kGiB), Verdict::kAdmitted);
  EXPECT_EQ(l.free_bytes("host"), 6 * kGiB);
  EXPECT_EQ(l.reserve(2, "host", 6 * kGiB + 1), Verdict::kRefused);
  EXPECT_EQ(l.free_bytes("host"), 6 * kGiB);
  EXPECT_EQ(l.reserve(2, "host", 6 * kGiB), Verdict::kAdmitted);
  EXPECT_EQ(l.free_bytes("host"), 0U);
  EXPECT_EQ(l.reserve(3, "host", 0), Verdict::kAdmitted);
}

TEST(Ledger, CountsByPhase) {
  Ledger l = ledger();
  ASSERT_EQ(l.reserve(1, "host", 1 * kGiB), Verdict::kAdmitted);
  ASSERT_EQ(l.reserve(2, "host", 2 * kGiB), Verdict::kAdmitted);
  ASSERT_EQ(l.reserve(3, "host", 4 * kGiB), Verdict::kAdmitted);
  l.set_phase(2, Ledger::Phase::kOwned);
  l.set_phase(3, Ledger::Phase::kEnding);
  EXPECT_EQ(l.sums("host").loading_bytes, 1 * kGiB);
  EXPECT_EQ(l.sums("host").owned_bytes, 2 * kGiB);
  EXPECT_EQ(l.sums("host").ending_bytes, 4 * kGiB);
  l.release(3);
  EXPECT_EQ(l.sums("host").ending_bytes, 0U);
  EXPECT_EQ(l.free_bytes("host"), 7 * kGiB);
}

TEST(Ledger, ReleaseOfNothingIsNothing) {
  Ledger l = ledger();
  l.release(42);
  l.set_phase(42, Ledger::Phase::kOwned);
  EXPECT_EQ(l.reserved_bytes(42), 0U);
  EXPECT_EQ(l.free_bytes("host"), 10 * kGiB);
}

TEST(Ledger, WaitsForWhatIsEndingOnlyIfThatSuffices) {
  Ledger l = ledger();
  ASSERT_EQ(l.reserve(1, "host", 4 * kGiB), Verdict::kAdmitted);
  ASSERT_EQ(l.reserve(2, "host", 5 * kGiB), Verdict::kAdmitted);
  l.set_phase(1, Ledger::Phase::kEnding);
  EXPECT_EQ(l.reserve(3, "host", 5 * kGiB), Verdict::kLater);  // 1 free + 4 ending
  EXPECT_EQ(l.reserve(3, "host", 5 * kGiB + 1), Verdict::kRefused);
  l.release(1);
  EXPECT_EQ(l.reserve(3, "host", 5 * kGiB), Verdict::kAdmitted);
}

TEST(Ledger, CO_092_WhatIsPromisedIsNotAvailableTwice) {
  Ledger l = ledger();
  l.set_available("host", 5 * kGiB);
  EXPECT_EQ(l.reserve(1, "host", 3 * kGiB), Verdict::kAdmitted);
  EXPECT_EQ(l.reserve(2, "host", 3 * kGiB), Verdict::kRefused) << "7 GiB of the budget are free, and 2 GiB are there";
  EXPECT_EQ(l.reserve(2, "host", 2 * kGiB), Verdict::kAdmitted);
  l.set_available("host", 3 * kGiB);  // both have their memory now
  EXPECT_EQ(l.reserve(3, "host", 3 * kGiB), Verdict::kAdmitted);
}

TEST(Ledger, CO_092_WhatTheSystemHasLeftIsAnUpperLimit) {
  Ledger l = ledger();
  l.set_available("host", 2 * kGiB);
  EXPECT_EQ(l.reserve(1, "host", 3 * kGiB), Verdict::kRefused);
  EXPECT_EQ(l.refusal("host", 3 * kGiB, {}),
            "needs 3.0 GiB, 10.0 GiB free of 10.0 GiB on host; but only 2.0 GiB of it is available there: other "
            "processes use the rest");
  EXPECT_EQ(l.reserve(1, "host", 2 * kGiB), Verdict::kAdmitted);
  l.set_available("host", std::nullopt);
  EXPECT_EQ(l.reserve(2, "host", 8 * kGiB), Verdict::kAdmitted);
}

TEST(Ledger, CO_090_RefusalHasTheArithmeticAndTheWayOut) {
  Ledger l = ledger();
  ASSERT_EQ(l.reserve(1, "host", 8 * kGiB), Verdict::kAdmitted);
  EXPECT_EQ(l.refusal("host", 3 * kGiB, {{"big", 8 * kGiB, true}}),
            "needs 3.0 GiB, 2.0 GiB free of 10.0 GiB on host; unloading 'big' (in use) would free 8.0 GiB");
  // One that suffices alone, rather unused than used, rather small than large.
  EXPECT_EQ(l.refusal("host", 3 * kGiB, {{"used", 1 * kGiB, true}, {"large", 6 * kGiB, false}, {"small", 1 * kGiB, false}}),
            "needs 3.0 GiB, 2.0 GiB free of 10.0 GiB on host; unloading 'small' would free 1.0 GiB");
  // Several, when no one suffices.
  EXPECT_EQ(l.refusal("host", 6 * kGiB, {{"a", 3 * kGiB, false}, {"b", 3 * kGiB, false}, {"c", 1 * kGiB, false}}),
            "needs 6.0 GiB, 2.0 GiB free of 10.0 GiB on host; unloading 'a', 'b' would free 6.0 GiB");
  EXPECT_EQ(l.refusal("host", 6 * kGiB, {{"c", 1 * kGiB, false}}), "needs 6.0 GiB, 2.0 GiB free of 10.0 GiB on host");
  EXPECT_EQ(l.refusal("host", 11 * kGiB, {{"big", 8 * kGiB, false}}),
            "needs 11.0 GiB, 2.0 GiB free of 10.0 GiB on host; the budget is too small for it");
}

TEST(Ledger, RefusalEscapesNames) {
  Ledger l = ledger(kGiB);
  ASSERT_EQ(l.reserve(1, "host", kGiB), Verdict::kAdmitted);
  EXPECT_NE(l.refusal("host", kGiB, {{"a\x1b[2J", kGiB, false}}).find("'a\\x1b[2J'"), std::string::npos);
}

TEST(Ledger, CO_082_ReservationsAreSerial) {
  Ledger l = ledger();
  EXPECT_EQ(l.reserve(1, "host", 6 * kGiB), Verdict::kAdmitted);
  EXPECT_EQ(l.reserve(2, "host", 6 * kGiB), Verdict::kRefused);
}

TEST(Ledger, AnImpossibleSizeIsRefusedWithoutOverflow) {
  Ledger l = ledger();
  ASSERT_EQ(l.reserve(1, "host", kGiB), Verdict::kAdmitted);
  EXPECT_EQ(l.reserve(2, "host", UINT64_MAX), Verdict::kRefused);
  EXPECT_EQ(l.free_bytes("host"), 9 * kGiB);
}

TEST(Ledger, ASmallerBudgetLeavesNothingFree) {
  Ledger l = ledger();
  ASSERT_EQ(l.reserve(1, "host", 8 * kGiB), Verdict::kAdmitted);
  l.set_budget("host", 4 * kGiB);
  EXPECT_EQ(l.free_bytes("host"), 0U);
  EXPECT_EQ(l.reserve(2, "host", 1), Verdict::kRefused);
}

TEST(Ledger, DevicesAreApart) {
  Ledger l({{"gpu-a", "A", 8 * kGiB, 8 * kGiB}, {"gpu-b", "B", 8 * kGiB, 4 * kGiB}});
  EXPECT_EQ(l.reserve(1, "gpu-a", 8 * kGiB), Verdict::kAdmitted);
  EXPECT_EQ(l.free_bytes("gpu-b"), 4 * kGiB);
  EXPECT_EQ(l.find("gpu-c"), nullptr);
}

}  // namespace
}  // namespace weightd::daemon
