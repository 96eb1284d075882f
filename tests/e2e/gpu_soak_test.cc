// SPDX-License-Identifier: Apache-2.0
// Many loads and unloads. Built for both backends: 200 cycles on a GPU, where each makes a context, 1000 on the host.
#include <gtest/gtest.h>

#include "tests/e2e/system.h"
#include "tests/support/programs.h"

namespace weightd::e2e {
namespace {

TEST(GpuSoak, CO_087_LoadsAndUnloadsLeaveNothingBehind) {
  System system;
  system.make_small("m", 51);
  const int cycles = kGpu ? 200 : testing::kSanitized ? 50 : 1000;
  std::string output;
  const int status = run_program({testing::program("load_soak", WEIGHTD_LOAD_SOAK), system.daemon.control_socket(), "m",
                                  system.daemon / "m.wpk", std::to_string(cycles)},
                                 &output, std::chrono::seconds(540));
  EXPECT_EQ(status, 0) << output;
  std::printf("%s", output.c_str());
}

}  // namespace
}  // namespace weightd::e2e
