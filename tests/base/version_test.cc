// SPDX-License-Identifier: Apache-2.0
#include "base/version.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace weightd {
namespace {

TEST(Version, CO_111_BuildIdNamesReleaseAndCommit) {
  EXPECT_THAT(std::string(release_version()), ::testing::MatchesRegex("[0-9]+\\.[0-9]+\\.[0-9]+"));
  EXPECT_THAT(std::string(build_id()), ::testing::StartsWith(std::string(release_version()) + " ("));
  EXPECT_THAT(std::string(build_id()), ::testing::EndsWith(")"));
}

}  // namespace
}  // namespace weightd
