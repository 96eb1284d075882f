// SPDX-License-Identifier: Apache-2.0
#include "client/gpu_code.h"

#include <gtest/gtest.h>

namespace weightd::detail {
namespace {

constexpr std::string_view kShipped = "80-real,90a-real,120-real";

TEST(GpuCode, MachineCodeServesItsMajorFromItsMinorOn) {
  EXPECT_TRUE(has_gpu_code(kShipped, 8, 0));
  EXPECT_TRUE(has_gpu_code(kShipped, 8, 6));
  EXPECT_TRUE(has_gpu_code(kShipped, 8, 9));
  EXPECT_TRUE(has_gpu_code(kShipped, 12, 0));
  EXPECT_TRUE(has_gpu_code(kShipped, 12, 1));
  EXPECT_FALSE(has_gpu_code(kShipped, 7, 5));
  EXPECT_FALSE(has_gpu_code(kShipped, 10, 0));
  EXPECT_FALSE(has_gpu_code("86-real", 8, 0));
}

TEST(GpuCode, SpecificCodeServesOneCapability) {
  EXPECT_TRUE(has_gpu_code(kShipped, 9, 0));
  EXPECT_FALSE(has_gpu_code(kShipped, 9, 1));
  EXPECT_FALSE(has_gpu_code("90a", 10, 0)) << "its intermediate code is as specific";
}

TEST(GpuCode, FamilyCodeServesLaterMinors) {
  EXPECT_TRUE(has_gpu_code("100f-real", 10, 3));
  EXPECT_FALSE(has_gpu_code("103f-real", 10, 0));
  EXPECT_FALSE(has_gpu_code("100f", 12, 0));
}

TEST(GpuCode, IntermediateCodeServesWhateverIsNewer) {
  EXPECT_TRUE(has_gpu_code("80", 12, 1));
  EXPECT_TRUE(has_gpu_code("90-virtual", 10, 0));
  EXPECT_FALSE(has_gpu_code("80", 7, 5));
}

TEST(GpuCode, AListWithoutNumbersServesNobody) {
  EXPECT_FALSE(has_gpu_code("", 9, 0));
  EXPECT_FALSE(has_gpu_code("native", 9, 0));
  EXPECT_FALSE(has_gpu_code(",,", 9, 0));
}

}  // namespace
}  // namespace weightd::detail
