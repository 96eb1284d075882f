// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <utility>

#include "tools/bench/gpu/session.h"
#include "tools/bench/gpu_work.h"
#include "tools/bench/weights.h"

namespace weightd::tools {
namespace {

constexpr uint64_t kHashBytes = uint64_t{4} << 30;
constexpr uint64_t kSeed = 1;
constexpr double kMostDifference = 0.02;  // of two BF16 results of one product, relative, in the 2-norm: rounding is under 0.005

bool wants(const GpuBench& bench, std::string_view op) {
  return std::find(bench.ops.begin(), bench.ops.end(), op) != bench.ops.end();
}

bool wants_products(const GpuBench& bench) {
  return wants(bench, "cublas") || wants(bench, "gemm_f12") || wants(bench, "gemm_exact") || wants(bench, "gemm_best");
}

/// "gate_up", or "gate_up, escapes 0.001" where a rate was asked for.
std::string row_name(const BenchShape& shape, std::optional<double> escapes) {
  if (!escapes.has_value()) return shape.name;
  std::array<char, 32> rate{};
  std::snprintf(rate.data(), rate.size(), "%g", *escapes);
  return shape.name + ", escapes " + rate.data();
}

/// One shape with its weights on the device, and what all its rows say.
struct Subject {
  BenchShape shape;  // its name as row_name()
  DeviceWeights weights;
  double bits_per_weight = 0, escapes = 0;
};

Row finished_row(const Session& session, const Subject& subject, const std::string& op, uint64_t m, double us,
                 double best_cublas_us, std::string plan) {
  Row row = session.row(op, subject.shape, m);
  row.us = us;
  row.best_cublas_us = best_cublas_us;
  row.plan = std::move(plan);
  row.bits_per_weight = op == "cublas" ? 16 : subject.bits_per_weight;
  row.escapes = subject.escapes;
  fill_rates(row, counted_bytes(op, subject.weights.coded_bytes(), subject.weights.raw_bytes()), session.copy_gbps);
  return row;
}

// --- device copy, block hashes -------------------------------------------------------------------------------------------------

Status bench_large_copy(const Session& session, Recorder& recorder) {
  Row row = session.row("copy", "1 GiB");
  row.coded_gbps = session.copy_gbps;
  row.us = static_cast<double>(uint64_t{2} << 30) / session.copy_gbps / 1e3;
  row.copy_fraction = 1;
  std::vector<Row> rows;
  rows.push_back(std::move(row));
  return recorder.add(std::move(rows));
}

Status bench_hash(const Session& session, int repeats, Recorder& recorder) {
  WEIGHTD_ASSIGN_OR_RETURN(const double us, time_block_hashes(kHashBytes, repeats));
  Row row = session.row("hash", "4 GiB");
  row.us = us;
  fill_rates(row, kHashBytes, session.copy_gbps);
  std::vector<Row> rows;
  rows.push_back(std::move(row));
  return recorder.add(std::move(rows));
}

// --- decompression ---------------------------------------------------------------------------------------------------------------

Status bench_decompress(const Session& session, const Subject& subject, int repeats, Recorder& recorder) {
  const DeviceWeights& weights = subject.weights;
  const uint64_t moved = weights.coded_bytes() + weights.raw_bytes();
  WEIGHTD_ASSIGN_OR_RETURN(const Copies out, Copies::make({}, weights.raw_bytes(), weights.coded_copies()));
  std::vector<Contender> contenders(1);
  contenders[0].name = "decompress";
  contenders[0].copies = weights.coded_copies();
  contenders[0].launch = [&](int i, cudaStream_t stream) {
    return kernels::launch_decompress(weights.coded(i), 0, weights.n(), reinterpret_cast<uint16_t*>(out.at(i)),
                                      static_cast<int64_t>(weights.k()), stream);
  };
  WEIGHTD_ASSIGN_OR_RETURN(Contender copy, copy_contender(moved, session.cold));
  contenders.push_back(std::move(copy));
  WEIGHTD_RETURN_IF_ERROR(race(contenders, repeats));
  std::vector<Row> rows;
  for (const Contender& contender : contenders) {
    rows.push_back(finished_row(session, subject, contender.name, 0, contender.us, kAbsent, {}));
  }
  return recorder.add(std::move(rows));
}

// --- products
// ------------------------------------------------------------------------------------------------------------------------

float value_of(uint16_t bf16) {
  const uint32_t bits = static_cast<uint32_t>(bf16) << 16;
  float value = 0;
  static_assert(sizeof value == sizeof bits);
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

/// The first and the last row of what one launch gives, the output poisoned before.
Result<std::vector<uint16_t>> sample(const Contender& contender, const Batch& batch) {
  const uint64_t row_bytes = batch.n * 2;
  const std::array<uint64_t, 2> places = {0, (batch.m - 1) * row_bytes};
  for (const uint64_t at : places) {
    WEIGHTD_RETURN_IF_ERROR(check_cuda(cudaMemset(batch.y.data() + at, 0xFF, row_bytes), "cudaMemset"));
  }
  WEIGHTD_RETURN_IF_ERROR(check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize"));
  WEIGHTD_RETURN_IF_ERROR(contender.launch(0, nullptr));
  WEIGHTD_RETURN_IF_ERROR(check_cuda(cudaDeviceSynchronize(), contender.name.c_str()));
  std::vector<uint16_t> words(2 * batch.n);
  for (size_t i = 0; i < places.size(); ++i) {
    WEIGHTD_RETURN_IF_ERROR(check_cuda(
        cudaMemcpy(words.data() + i * batch.n, batch.y.data() + places[i], row_bytes, cudaMemcpyDeviceToHost), "cudaMemcpy"));
  }
  return words;
}

double relative_difference(const std::vector<uint16_t>& got, const std::vector<uint16_t>& want) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double a = value_of(got[i]), b = value_of(want[i]);
    difference += (a - b) * (a - b);
    size += b * b;
  }
  return std::sqrt(difference / size);
}

/// A fast wrong answer is no result: all contenders must give what the first gives, up to rounding.
Status check_agreement(const std::vector<Contender>& contenders, const Batch& batch) {
  WEIGHTD_ASSIGN_OR_RETURN(const std::vector<uint16_t> want, sample(contenders.front(), batch));
  for (size_t i = 1; i < contenders.size(); ++i) {
    WEIGHTD_ASSIGN_OR_RETURN(const std::vector<uint16_t> got, sample(contenders[i], batch));
    const double difference = relative_difference(got, want);
    if (difference <= kMostDifference) continue;  // NaN does not pass
    return Status::internal(contenders[i].name + " differs from " + contenders.front().name + " by " + std::to_string(difference) +
                            " of the result, at most " + std::to_string(kMostDifference) + " is rounding");
  }
  return {};
}

/// All ways to do the products of one subject with one number of tokens.
class Cell {
 public:
  Cell(const Session& session, const Subject& subject, const GpuBench& bench, const Batch& batch)
      : session_(session), subject_(subject), bench_(bench), batch_(batch) {}

  Status run(Recorder& recorder) {
    const kernels::Route route = kernels::choose_route(session_.device.traits, subject_.shape.n, subject_.shape.k, batch_.m);
    const std::string best = route == kernels::Route::kFused ? "gemm_f12" : "gemm_exact";
    WEIGHTD_ASSIGN_OR_RETURN(const CublasProduct cublas, CublasProduct::make(session_, subject_.weights, batch_));
    add_cublas(cublas);
    const bool any_best = wants(bench_, "gemm_best");
    if (wants(bench_, "gemm_f12") || (any_best && best == "gemm_f12")) WEIGHTD_RETURN_IF_ERROR(add_fused());
    if (wants(bench_, "gemm_exact") || (any_best && best == "gemm_exact")) add_exact();
    WEIGHTD_RETURN_IF_ERROR(check_agreement(contenders_, batch_));
    WEIGHTD_RETURN_IF_ERROR(race(contenders_, bench_.repeats));
    return recorder.add(rows(best));
  }

 private:
  void add(std::string op, std::string plan, int copies, std::function<Status(int, cudaStream_t)> launch) {
    Contender contender;
    contender.name = op;
    contender.copies = copies;
    contender.launch = std::move(launch);
    contenders_.push_back(std::move(contender));
    plans_.push_back(std::move(plan));
  }
  /// cublasGemmEx, and cuBLASLt's best.
  void add_cublas(const CublasProduct& cublas) {
    std::vector<int> algorithms = {CublasProduct::kGemmEx};
    if (cublas.best_algorithm != CublasProduct::kGemmEx) algorithms.push_back(cublas.best_algorithm);
    for (const int algorithm : algorithms) {
      add("cublas", cublas.describe(algorithm), subject_.weights.raw_copies(), [&, algorithm](int i, cudaStream_t stream) {
        return cublas.launch(algorithm, session_, subject_.weights, batch_, i, stream);
      });
    }
  }
  Status add_fused() {
    WEIGHTD_ASSIGN_OR_RETURN(const FusedProduct fused, FusedProduct::make(session_, batch_));
    add("gemm_f12", fused.plan.to_string(), subject_.weights.coded_copies(),
        [this, fused](int i, cudaStream_t stream) { return fused.launch(session_, subject_.weights, batch_, i, stream); });
    return {};
  }
  void add_exact() {
    add("gemm_exact", "decompress, cublasLt", subject_.weights.coded_copies(),
        [this](int i, cudaStream_t stream) { return launch_exact(session_, subject_.weights, batch_, i, stream); });
  }
  [[nodiscard]] size_t best_cublas() const {
    size_t best = 0;
    for (size_t i = 1; i < contenders_.size(); ++i) {
      if (contenders_[i].name == "cublas" && contenders_[i].us < contenders_[best].us) best = i;
    }
    return best;
  }
  [[nodiscard]] std::vector<Row> rows(const std::string& best) const {
    const size_t reference = best_cublas();
    const double best_cublas_us = contenders_[reference].us;
    std::vector<Row> result;
    const auto add_row = [&](const std::string& op, size_t i, const std::string& prefix) {
      if (wants(bench_, op)) {
        result.push_back(finished_row(session_, subject_, op, batch_.m, contenders_[i].us, best_cublas_us, prefix + plans_[i]));
      }
    };
    add_row("cublas", reference, "");
    for (size_t i = 0; i < contenders_.size(); ++i) {
      if (contenders_[i].name != "cublas") add_row(contenders_[i].name, i, "");
      if (contenders_[i].name == best) add_row("gemm_best", i, best + ": ");
    }
    return result;
  }

  const Session& session_;
  const Subject& subject_;
  const GpuBench& bench_;
  const Batch& batch_;
  std::vector<Contender> contenders_;
  std::vector<std::string> plans_;
};

Status bench_products(const Session& session, const Subject& subject, const GpuBench& bench, Recorder& recorder) {
  for (const uint64_t m : bench.tokens) {
    WEIGHTD_RETURN_IF_ERROR(recorder.check_interrupt());
    WEIGHTD_ASSIGN_OR_RETURN(const Batch batch, Batch::make(subject.shape.n, subject.shape.k, m));
    Cell cell(session, subject, bench, batch);
    WEIGHTD_RETURN_IF_ERROR(
        cell.run(recorder).with_context(subject.shape.model + " " + subject.shape.name + ", " + std::to_string(m) + " tokens"));
  }
  return {};
}

Result<Subject> make_subject(const Session& session, const BenchShape& shape, std::optional<double> escapes) {
  WEIGHTD_ASSIGN_OR_RETURN(const HostMatrix host, make_matrix(shape.n, shape.k, escapes, kSeed, 0));
  Subject subject;
  subject.shape = shape;
  subject.shape.name = row_name(shape, escapes);
  subject.bits_per_weight = host.coded.bits_per_weight();
  subject.escapes = host.coded.escape_rate();
  WEIGHTD_ASSIGN_OR_RETURN(subject.weights, DeviceWeights::upload(host, session.cold));
  return subject;
}

}  // namespace

Status run_gpu_bench(const GpuBench& bench, Recorder& recorder) {
  WEIGHTD_ASSIGN_OR_RETURN(const Session session, Session::open(bench.device, bench.repeats, wants_products(bench)));
  recorder.say(session.describe());
  recorder.say("clocks before: " + session.clocks->read().to_string());
  if (wants(bench, "copy")) WEIGHTD_RETURN_IF_ERROR(bench_large_copy(session, recorder));
  if (wants(bench, "hash")) WEIGHTD_RETURN_IF_ERROR(bench_hash(session, bench.repeats, recorder));
  for (const std::optional<double>& escapes : bench.escapes) {
    for (const BenchShape& shape : bench.shapes) {
      WEIGHTD_RETURN_IF_ERROR(recorder.check_interrupt());
      if (!wants_products(bench) && !wants(bench, "decompress")) continue;
      WEIGHTD_ASSIGN_OR_RETURN(const Subject subject, make_subject(session, shape, escapes));
      if (wants(bench, "decompress")) WEIGHTD_RETURN_IF_ERROR(bench_decompress(session, subject, bench.repeats, recorder));
      if (wants_products(bench)) WEIGHTD_RETURN_IF_ERROR(bench_products(session, subject, bench, recorder));
    }
  }
  recorder.say("clocks after: " + session.clocks->read().to_string());
  return {};
}

}  // namespace weightd::tools
