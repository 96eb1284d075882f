// SPDX-License-Identifier: Apache-2.0
// What of kernels/blas.h needs no GPU: finding the library, and sizes.
#include <gtest/gtest.h>

#include <cstdlib>
#include <limits>
#include <string>

#include "kernels/blas.h"

namespace weightd::kernels {
namespace {

class BlasLibrary : public ::testing::Test {
 protected:
  void TearDown() override { ::unsetenv("WEIGHTD_CUBLASLT"); }
};

TEST_F(BlasLibrary, NamesTheFileThatDoesNotLoad) {
  ::setenv("WEIGHTD_CUBLASLT", "/no/such\n/libcublasLt.so", 1);
  const auto blas = Blas::open();
  ASSERT_FALSE(blas.ok());
  EXPECT_EQ(blas.status().code(), StatusCode::kUnavailable);
  EXPECT_NE(blas.status().message().find("WEIGHTD_CUBLASLT names '/no/such\\n/libcublasLt.so'"), std::string::npos)
      << blas.status().message();
  EXPECT_EQ(blas.status().message().find('\n'), std::string::npos);
}

TEST_F(BlasLibrary, RefusesALibraryOfAnotherKind) {
  ::setenv("WEIGHTD_CUBLASLT", "libm.so.6", 1);
  const auto blas = Blas::open();
  ASSERT_FALSE(blas.ok());
  EXPECT_EQ(blas.status().code(), StatusCode::kUnavailable);
  EXPECT_NE(blas.status().message().find("libm.so.6 is not usable: it has no function cublasLtCreate"), std::string::npos)
      << blas.status().message();
}

TEST(BlasWorkspace, HoldsTheWordsAndWhatCublasLtWants) {
  EXPECT_EQ(exact_workspace_bytes(0, 0), Blas::kWorkspaceBytes);
  EXPECT_EQ(exact_workspace_bytes(1, 1), 256 + Blas::kWorkspaceBytes);
  EXPECT_EQ(exact_workspace_bytes(4096, 4096), uint64_t{4096} * 4096 * 2 + Blas::kWorkspaceBytes);
  EXPECT_EQ(exact_workspace_bytes(100, 333) % 256, 0U);
  EXPECT_EQ(exact_workspace_bytes(0xFFFFFFFF, 0xFFFFFFFF), std::numeric_limits<uint64_t>::max());
}

}  // namespace
}  // namespace weightd::kernels
