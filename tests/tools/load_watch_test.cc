// SPDX-License-Identifier: Apache-2.0
#include "tools/bench/load_watch.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

namespace weightd::tools {
namespace {

std::vector<control::Model> models(const std::string& state, uint64_t resident_bytes) {
  control::Model other;
  other.name = "other";
  other.state = "verifying";
  other.resident_bytes = 1;
  control::Model model;
  model.name = "m";
  model.state = state;
  model.resident_bytes = resident_bytes;
  return {other, model};
}

TEST(LoadWatch, StepsByWhatIsSeenFirst) {
  LoadWatch watch;
  watch.saw({}, "m", 1);
  watch.saw(models("loading", 0), "m", 2);
  watch.saw(models("loading", 100), "m", 300);
  watch.saw(models("loading", 100), "m", 301);
  watch.saw(models("verifying", 100), "m", 500);
  watch.saw(models("verifying", 100), "m", 510);
  watch.finished(520);
  const LoadTimes times = watch.times();
  EXPECT_EQ(times.start_ms, 300);
  EXPECT_EQ(times.upload_ms, 200);
  EXPECT_EQ(times.check_ms, 20);
  EXPECT_EQ(times.total_ms, 520);
}

TEST(LoadWatch, AStepThatPassedUnseenIsAbsent) {
  LoadWatch quick;
  quick.finished(3);
  EXPECT_EQ(quick.times().total_ms, 3);
  EXPECT_TRUE(std::isnan(quick.times().start_ms));
  EXPECT_TRUE(std::isnan(quick.times().upload_ms));
  EXPECT_TRUE(std::isnan(quick.times().check_ms));

  LoadWatch late;  // the plan was never seen, so where the upload began is not known
  late.saw(models("verifying", 100), "m", 5);
  late.finished(9);
  EXPECT_TRUE(std::isnan(late.times().upload_ms));
  EXPECT_EQ(late.times().check_ms, 4);
}

}  // namespace
}  // namespace weightd::tools
