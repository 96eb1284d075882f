// SPDX-License-Identifier: Apache-2.0
// trace_check CHECKPOINT TRACE...: recomputes every record from the original checkpoint with the reference GEMM and compares bits.
#include <cstdio>
#include <cstring>
#include <exception>
#include <stdexcept>

#include "tests/e2e/trace.h"
#include "tests/reference/gemm.h"
#include "tests/reference/safetensors.h"

namespace weightd::e2e {
namespace {

using Checkpoint = std::map<std::string, reference::SourceTensor>;

std::vector<uint16_t> expected(const TraceRecord& record, const reference::SourceTensor& tensor) {
  std::vector<uint16_t> w(tensor.bytes.size() / 2);
  std::memcpy(w.data(), tensor.bytes.data(), tensor.bytes.size());
  std::vector<uint16_t> y(record.y.size());
  if (record.kind == TraceRecord::Kind::kGemm) {
    reference::gemm_bf16(record.x, w, y, record.m, record.n, record.k);
    return y;
  }
  for (uint64_t i = 0; i < record.m; ++i) std::memcpy(y.data() + i * record.k, w.data() + record.rows[i] * record.k, record.k * 2);
  return y;
}

/// The number of checked output words; throws on a record that does not fit the checkpoint; -1 on a difference.
int64_t check(const TraceRecord& record, const Checkpoint& checkpoint) {
  const auto found = checkpoint.find(record.tensor);
  if (found == checkpoint.end()) throw std::runtime_error("trace names an unknown tensor " + record.tensor);
  const reference::SourceTensor& tensor = found->second;
  if (tensor.dtype != "BF16" || tensor.shape.size() != 2 || tensor.shape[1] != record.k) throw std::runtime_error("shape of " + record.tensor);
  const uint64_t row_words = record.kind == TraceRecord::Kind::kGemm ? record.n : record.k;
  if (record.kind == TraceRecord::Kind::kGemm && tensor.shape[0] != record.n) throw std::runtime_error("rows of " + record.tensor);
  if (record.y.size() != record.m * row_words) throw std::runtime_error("output size of " + record.tensor);
  const std::vector<uint16_t> want = expected(record, tensor);
  for (size_t i = 0; i < want.size(); ++i) {
    if (want[i] == record.y[i]) continue;
    std::fprintf(stderr, "%s: first difference at token %zu, column %zu: got %04x, want %04x\n", record.tensor.c_str(), i / row_words,
                 i % row_words, record.y[i], want[i]);
    return -1;
  }
  return static_cast<int64_t>(want.size());
}

int run(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: trace_check CHECKPOINT TRACE...\n");
    return 2;
  }
  const Checkpoint checkpoint = reference::read_checkpoint(argv[1]);
  for (int i = 2; i < argc; ++i) {
    int64_t words = 0;
    size_t gemms = 0;
    const std::vector<TraceRecord> records = read_trace(argv[i]);
    for (const TraceRecord& record : records) {
      const int64_t checked = check(record, checkpoint);
      if (checked < 0) return 1;
      words += checked;
      gemms += record.kind == TraceRecord::Kind::kGemm ? 1 : 0;
    }
    if (gemms == 0) {
      std::fprintf(stderr, "%s: no GEMM in the trace\n", argv[i]);
      return 1;
    }
    std::printf("trace %d: %zu GEMMs and %zu gathers, %lld output words, all equal to the reference over the original checkpoint\n", i - 1,
                gemms, records.size() - gemms, static_cast<long long>(words));
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
