// SPDX-License-Identifier: Apache-2.0
// trace_check CHECKPOINT TRACE...: recomputes every record from the original checkpoint. Weights, look-ups and products of the host
// backend must have the reference's bits. Products of a GPU must lie within the bound of kernels/f12_cuda.h around the exact sum;
// of a large output every s-th element is computed, with s the same for all tokens and prime to the number of columns.
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <numeric>
#include <span>
#include <stdexcept>

#include "base/parallel.h"
#include "tests/e2e/trace.h"
#include "tests/reference/gemm.h"
#include "tests/reference/safetensors.h"

namespace weightd::e2e {
namespace {

using Checkpoint = std::map<std::string, reference::SourceTensor>;
using Kind = TraceRecord::Kind;

constexpr uint64_t kBoundedProducts = uint64_t{1} << 28;  // multiplications spent on one record of a GPU
constexpr uint64_t kMostAdditions = 128;                  // beside k / 8: more than any plan has slices

std::span<const uint16_t> words_of(const reference::SourceTensor& tensor) {
  return {reinterpret_cast<const uint16_t*>(tensor.bytes.data()), tensor.bytes.size() / 2};
}

double widen(uint16_t word) {
  const uint32_t bits = static_cast<uint32_t>(word) << 16;
  float value = 0;
  std::memcpy(&value, &bits, 4);
  return static_cast<double>(value);
}

bool within_bound(const TraceRecord& record, std::span<const uint16_t> w, uint64_t token, uint64_t row) {
  double sum = 0, magnitude = 0;
  for (uint64_t i = 0; i < record.k; ++i) {
    const double product = widen(record.x[token * record.k + i]) * widen(w[row * record.k + i]);
    sum += product;
    magnitude += std::fabs(product);
  }
  const double additions = static_cast<double>(record.k / 8 + kMostAdditions);
  const double limit = std::ldexp(std::fabs(sum), -8) + additions * std::ldexp(magnitude, -22);
  return std::fabs(widen(record.y[token * record.n + row]) - sum) <= limit;  // false for a NaN
}

/// The step between checked elements: 1 for a small output.
uint64_t step_of(const TraceRecord& record) {
  uint64_t step = record.m * record.n * record.k / kBoundedProducts + 1;
  while (std::gcd(step, record.n) != 1) ++step;
  return step;
}

/// The number of checked outputs; -1 when one is outside of the bound.
int64_t check_bounded(const TraceRecord& record, std::span<const uint16_t> w) {
  const uint64_t step = step_of(record), count = (record.m * record.n + step - 1) / step;
  std::atomic<uint64_t> bad{record.m * record.n};
  parallel_ranges(count, 1, 0, [&](uint64_t begin, uint64_t end) {
    for (uint64_t i = begin; i < end; ++i) {
      const uint64_t element = i * step;
      if (!within_bound(record, w, element / record.n, element % record.n)) bad = element;
    }
  });
  if (bad == record.m * record.n) return static_cast<int64_t>(count);
  std::fprintf(stderr, "%s: token %llu, column %llu: %04x is not within the bound of the exact sum\n", record.tensor.c_str(),
               static_cast<unsigned long long>(bad / record.n), static_cast<unsigned long long>(bad % record.n), record.y[bad]);
  return -1;
}

std::vector<uint16_t> expected(const TraceRecord& record, std::span<const uint16_t> w) {
  if (record.kind == Kind::kWeights) return e2e::words_of(digest_of(w));
  std::vector<uint16_t> y(record.y.size());
  if (record.kind == Kind::kGemm) {
    reference::gemm_bf16(record.x, w, y, record.m, record.n, record.k);
    return y;
  }
  for (uint64_t i = 0; i < record.m; ++i) std::memcpy(y.data() + i * record.k, w.data() + record.rows[i] * record.k, record.k * 2);
  return y;
}

uint64_t output_words(const TraceRecord& record) {
  if (record.kind == Kind::kWeights) return 4;
  return record.m * (record.kind == Kind::kRows ? record.k : record.n);
}

/// The number of checked output words; throws on a record that does not fit the checkpoint; -1 on a difference.
int64_t check(const TraceRecord& record, const Checkpoint& checkpoint) {
  const auto found = checkpoint.find(record.tensor);
  if (found == checkpoint.end()) throw std::runtime_error("trace names an unknown tensor " + record.tensor);
  const reference::SourceTensor& tensor = found->second;
  if (tensor.dtype != "BF16" || tensor.shape.size() != 2 || tensor.shape[1] != record.k)
    throw std::runtime_error("shape of " + record.tensor);
  if (record.kind != Kind::kRows && tensor.shape[0] != record.n) throw std::runtime_error("rows of " + record.tensor);
  if (record.y.size() != output_words(record)) throw std::runtime_error("output size of " + record.tensor);
  const std::span<const uint16_t> w = words_of(tensor);
  if (record.kind == Kind::kBoundedGemm) return check_bounded(record, w);
  const std::vector<uint16_t> want = expected(record, w);
  if (record.kind == Kind::kWeights) {
    if (want == record.y) return static_cast<int64_t>(w.size());
    std::fprintf(stderr, "%s: the decompressed weights are not the checkpoint's\n", record.tensor.c_str());
    return -1;
  }
  const uint64_t row_words = record.kind == Kind::kGemm ? record.n : record.k;
  for (size_t i = 0; i < want.size(); ++i) {
    if (want[i] == record.y[i]) continue;
    std::fprintf(stderr, "%s: first difference at token %zu, column %zu: got %04x, want %04x\n", record.tensor.c_str(),
                 i / row_words, i % row_words, record.y[i], want[i]);
    return -1;
  }
  return static_cast<int64_t>(want.size());
}

struct Sum {
  size_t records = 0;
  long long words = 0;
};

/// False on a difference.
bool check_trace(const std::string& path, const Checkpoint& checkpoint, int number) {
  std::map<Kind, Sum> sums;
  for (const TraceRecord& record : read_trace(path)) {
    const int64_t checked = check(record, checkpoint);
    if (checked < 0) return false;
    sums[record.kind].records += 1;
    sums[record.kind].words += checked;
  }
  const Sum gemms = sums[Kind::kGemm], rows = sums[Kind::kRows], weights = sums[Kind::kWeights], bounded = sums[Kind::kBoundedGemm];
  if (gemms.records + bounded.records == 0) {
    std::fprintf(stderr, "%s: no GEMM in the trace\n", path.c_str());
    return false;
  }
  if (gemms.records + rows.records > 0) {
    std::printf("trace %d: %zu GEMMs and %zu gathers, %lld output words, all equal to the reference over the original checkpoint\n",
                number, gemms.records, rows.records, gemms.words + rows.words);
  }
  if (weights.records > 0) {
    std::printf("trace %d: %zu matrices decompressed, %lld words, all equal to the original checkpoint\n", number, weights.records,
                weights.words);
  }
  if (bounded.records > 0) {
    std::printf(
        "trace %d: %zu GEMMs, %lld outputs recomputed in double precision from the original checkpoint, all within the bound\n",
        number, bounded.records, bounded.words);
  }
  return true;
}

int run(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: trace_check CHECKPOINT TRACE...\n");
    return 2;
  }
  const Checkpoint checkpoint = reference::read_checkpoint(argv[1]);
  for (int i = 2; i < argc; ++i) {
    if (!check_trace(argv[i], checkpoint, i - 1)) return 1;
  }
  return 0;
}

}  // namespace
}  // namespace weightd::e2e

int main(int argc, char** argv) {
  try {
    return weightd::e2e::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "trace_check: %s\n", error.what());
    return 1;
  }
}
