// SPDX-License-Identifier: Apache-2.0
#include <benchmark/benchmark.h>

#include <cstring>
#include <span>
#include <vector>

#include "kernels/cpu/gemm.h"
#include "store/f12.h"
#include "tools/pack/synth_weights.h"

/// One core, one 4096 x 4096 matrix with the exponent statistics of trained weights. Rates are of BF16 (the decoded size), so that
/// codec, kernels and memcpy can be compared.
namespace weightd {
namespace {

constexpr uint64_t kRows = 4096, kCols = 4096;
constexpr int64_t kBf16Bytes = int64_t{kRows} * kCols * 2;

struct Matrix {
  f12::Geometry geometry{kRows, kCols, 1};
  std::vector<uint16_t> words = std::vector<uint16_t>(kRows * kCols);
  std::vector<std::byte> codes = std::vector<std::byte>(geometry.codes_bytes());
  std::vector<std::byte> windows = std::vector<std::byte>(geometry.windows_bytes());
  std::vector<std::byte> records = std::vector<std::byte>(geometry.records_bytes());
  std::vector<std::byte> pool;

  Matrix() {
    tools::synth_bf16(words, kCols, 0, 1, {}, 0);
    WEIGHTD_CHECK(encode(0).ok());
  }
  Status encode(int threads) {
    pool.clear();
    return store::f12_encode(std::as_bytes(std::span(words)), geometry, 0, geometry.units(), codes, windows, records, pool, 0,
                             threads);
  }
};

void report(benchmark::State& state, uint64_t tokens) {
  state.SetBytesProcessed(state.iterations() * kBf16Bytes);
  if (tokens != 0) {
    state.counters["FLOP/s"] =
        benchmark::Counter(2.0 * static_cast<double>(kRows * kCols * tokens), benchmark::Counter::kIsIterationInvariantRate);
  }
}

void check(benchmark::State& state, const Status& status) {
  if (!status.ok()) state.SkipWithError(status.to_string().c_str());
}

void bm_memcpy(benchmark::State& state) {
  const std::vector<uint16_t> from(kRows * kCols, 1);
  std::vector<uint16_t> to(kRows * kCols);
  for (auto _ : state) {
    std::memcpy(to.data(), from.data(), kBf16Bytes);
    benchmark::DoNotOptimize(to.data());
    benchmark::ClobberMemory();
  }
  report(state, 0);
}
BENCHMARK(bm_memcpy)->Unit(benchmark::kMillisecond);

void bm_encode(benchmark::State& state) {
  Matrix matrix;
  for (auto _ : state) check(state, matrix.encode(1));
  report(state, 0);
}
BENCHMARK(bm_encode)->Unit(benchmark::kMillisecond);

void bm_decode(benchmark::State& state) {
  Matrix m;
  std::vector<uint16_t> out(kRows * kCols);
  for (auto _ : state) {
    check(state, store::f12_decode(m.geometry, 0, m.geometry.units(), m.codes, m.windows, m.records, m.pool, 0,
                                   std::as_writable_bytes(std::span(out)), 1));
  }
  report(state, 0);
}
BENCHMARK(bm_decode)->Unit(benchmark::kMillisecond);

void bm_validate(benchmark::State& state) {
  Matrix m;
  for (auto _ : state)
    check(state, store::f12_validate(m.geometry, 0, m.geometry.units(), m.codes, m.windows, m.records, m.pool, 0));
  report(state, 0);
}
BENCHMARK(bm_validate)->Unit(benchmark::kMillisecond);

/// Tokens are the argument.
template <typename View>
void run_gemm(benchmark::State& state, const View& weights) {
  const auto tokens = static_cast<uint64_t>(state.range(0));
  std::vector<uint16_t> x(tokens * kCols), y(tokens * kRows);
  tools::synth_bf16(x, kCols, 0, 2, {.scale = 1, .row_scale_sigma = 0, .outlier_rate = 0}, 0);
  for (auto _ : state) {
    check(state, kernels::cpu::gemm(weights, {0, kRows}, {x.data(), tokens, kCols, kCols}, {y.data(), tokens, kRows, kRows}, 1));
  }
  report(state, tokens);
}

void bm_gemm_f12(benchmark::State& state) {
  Matrix m;
  run_gemm(state,
           kernels::cpu::F12Matrix{m.codes.data(), m.windows.data(), m.records.data(), m.pool.data(), m.pool.size(), kRows, kCols});
}
BENCHMARK(bm_gemm_f12)->Arg(1)->Arg(8)->Arg(64)->Unit(benchmark::kMillisecond);

void bm_gemm_raw(benchmark::State& state) {
  Matrix m;
  run_gemm(state, kernels::cpu::RawMatrix{reinterpret_cast<const std::byte*>(m.words.data()), kRows, kCols, kCols});
}
BENCHMARK(bm_gemm_raw)->Arg(1)->Arg(8)->Arg(64)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace weightd
