// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <string>

#include "kernels/blas.h"

namespace weightd::kernels {
namespace {

constexpr DeviceTraits kHopper{132, 232448, true, true, 30};
constexpr DeviceTraits kAmpere{108, 166912};

struct Shape {
  uint64_t n, k;
};
constexpr Shape kShapes[] = {{4096, 4096},  {6144, 4096},   {14336, 4096}, {28672, 4096},
                             {4096, 14336}, {128256, 4096}, {28672, 8192}, {8192, 28672}};

TEST(Route, CO_059_FewTokensFusedManyDecompressed) {
  for (const DeviceTraits& device : {kHopper, kAmpere}) {
    for (const Shape& shape : kShapes) {
      SCOPED_TRACE(std::to_string(shape.n) + "x" + std::to_string(shape.k));
      for (uint64_t m = 1; m <= 64; ++m) ASSERT_EQ(choose_route(device, shape.n, shape.k, m), Route::kFused) << m << " tokens";
      for (const uint64_t m : {4096U, 4097U, 8192U, 131072U}) {
        EXPECT_EQ(choose_route(device, shape.n, shape.k, m), Route::kDecompressed) << m << " tokens";
      }
    }
  }
}

TEST(Route, FollowsCostsThatGrowWithTheTokens) {
  for (const Shape& shape : kShapes) {
    SCOPED_TRACE(std::to_string(shape.n) + "x" + std::to_string(shape.k));
    RouteCost last;
    for (uint64_t m = 1; m <= 8192; ++m) {
      const RouteCost cost = route_cost(kHopper, shape.n, shape.k, m);
      ASSERT_GE(cost.fused_us, last.fused_us) << m;
      ASSERT_GE(cost.decompressed_us, last.decompressed_us) << m;
      const Route route = choose_route(kHopper, shape.n, shape.k, m);
      ASSERT_EQ(route == Route::kDecompressed, cost.decompressed_us < cost.fused_us);
      // In between the fused kernel's whole token blocks make steps, and the route may turn back once more.
      if (m <= 128) {
        ASSERT_EQ(route, Route::kFused) << m;
      }
      if (m >= 1024) {
        ASSERT_EQ(route, Route::kDecompressed) << m;
      }
      last = cost;
    }
  }
}

TEST(Route, CostsGrowWithTheMatrix) {
  for (const uint64_t m : {1U, 64U, 100U, 5000U}) {
    RouteCost last;
    for (uint64_t n = 1; n < (uint64_t{1} << 32); n *= 4) {
      const RouteCost cost = route_cost(kHopper, n, 4096, m);
      EXPECT_GE(cost.fused_us, last.fused_us);
      EXPECT_GE(cost.decompressed_us, last.decompressed_us);
      last = cost;
    }
  }
}

/// The model against times measured on an H200 (above 32 tokens by gemm_tune): within a quarter.
TEST(Route, ModelIsNearTheMeasuredTimes) {
  struct Measured {
    Shape shape;
    uint64_t m;
    double fused_us, decompress_us, blas_us;
  };
  for (const Measured& row : {Measured{{28672, 4096}, 1, 41.1, 102.6, 56.5},
                              {{28672, 4096}, 64, 50.4, 102.6, 58.8},
                              {{28672, 4096}, 128, 69.0, 102.6, 63.6},
                              {{28672, 8192}, 128, 131.7, 202.9, 121.3},
                              {{4096, 14336}, 128, 41.5, 52.5, 37.0},
                              {{4096, 4096}, 128, 19.3, 16.8, 12.9},
                              {{14336, 4096}, 16, 22.8, 52.6, 30.7},
                              {{28672, 8192}, 1, 81.1, 202.9, 108.5},
                              {{128256, 4096}, 1, 177.1, 452.0, 249.2}}) {
    const RouteCost cost = route_cost(kHopper, row.shape.n, row.shape.k, row.m);
    EXPECT_NEAR(cost.fused_us / row.fused_us, 1, 0.25) << row.shape.n << " " << row.m;
    EXPECT_NEAR(cost.decompressed_us / (row.decompress_us + row.blas_us), 1, 0.25) << row.shape.n << " " << row.m;
  }
}

TEST(Route, EmptyProductsAreFused) {
  EXPECT_EQ(choose_route(kHopper, 0, 4096, 1), Route::kFused);
  EXPECT_EQ(choose_route(kHopper, 4096, 0, 5000), Route::kFused);
  EXPECT_EQ(choose_route(kHopper, 4096, 4096, 0), Route::kFused);
}

}  // namespace
}  // namespace weightd::kernels
