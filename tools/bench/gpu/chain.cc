// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <functional>
#include <memory>
#include <utility>

#include "tools/bench/gpu/session.h"
#include "tools/bench/gpu_work.h"
#include "tools/bench/weights.h"

namespace weightd::tools {
namespace {

constexpr uint64_t kSeed = 1;

/// One product of every layer: its weights in as many copies as there are layers, and how each side does it.
struct Link {
  BenchShape shape;
  DeviceWeights weights;
};

/// A link with a number of tokens.
struct Step {
  const Link* link = nullptr;
  Batch batch;
  bool fused = false;
  FusedProduct product;
  std::unique_ptr<CublasProduct> cublas;
  int best_algorithm = CublasProduct::kGemmEx;
};

Result<std::vector<Link>> make_links(const ChainBench& bench, const Session& session, const Recorder& recorder) {
  std::vector<Link> links;
  for (const BenchShape& shape : bench.shapes) {
    WEIGHTD_RETURN_IF_ERROR(recorder.check_interrupt());
    WEIGHTD_ASSIGN_OR_RETURN(const HostMatrix host, make_matrix(shape.n, shape.k, {}, kSeed, 0));
    WEIGHTD_ASSIGN_OR_RETURN(DeviceWeights weights, DeviceWeights::upload(host, session.cold, bench.layers));
    links.push_back({shape, std::move(weights)});
  }
  return links;
}

Result<Step> make_step(const Session& session, const Link& link, uint64_t m, int repeats) {
  Step step;
  step.link = &link;
  WEIGHTD_ASSIGN_OR_RETURN(step.batch, Batch::make(link.shape.n, link.shape.k, m));
  step.fused = kernels::choose_route(session.device.traits, link.shape.n, link.shape.k, m) == kernels::Route::kFused;
  WEIGHTD_ASSIGN_OR_RETURN(step.product, FusedProduct::make(session, step.batch));
  WEIGHTD_ASSIGN_OR_RETURN(CublasProduct cublas, CublasProduct::make(session, link.weights, step.batch));
  step.cublas = std::make_unique<CublasProduct>(std::move(cublas));
  std::vector<Contender> contenders;
  for (const int algorithm : {CublasProduct::kGemmEx, step.cublas->best_algorithm}) {
    Contender contender;
    contender.name = step.cublas->describe(algorithm);
    contender.copies = link.weights.raw_copies();
    contender.launch = [&, algorithm](int i, cudaStream_t stream) {
      return step.cublas->launch(algorithm, session, link.weights, step.batch, i, stream);
    };
    contenders.push_back(std::move(contender));
  }
  WEIGHTD_RETURN_IF_ERROR(race(contenders, repeats));
  if (contenders[1].us < contenders[0].us) step.best_algorithm = step.cublas->best_algorithm;
  return step;
}

/// A pass over all layers is one launch of the race.
Contender chain_contender(std::string name, const std::vector<Step>& steps, int layers,
                          std::function<Status(const Step&, int layer, cudaStream_t)> launch) {
  Contender contender;
  contender.name = std::move(name);
  contender.launch = [&steps, layers, launch = std::move(launch)](int, cudaStream_t stream) -> Status {
    for (int layer = 0; layer < layers; ++layer) {
      for (const Step& step : steps) WEIGHTD_RETURN_IF_ERROR(launch(step, layer, stream));
    }
    return {};
  };
  return contender;
}

std::string routes_of(const std::vector<Step>& steps) {
  std::string text;
  for (const Step& step : steps) {
    text += (text.empty() ? "" : ", ") + step.link->shape.name + (step.fused ? " fused" : " decompressed");
  }
  return text;
}

Status bench_tokens(const ChainBench& bench, const Session& session, const std::vector<Link>& links, uint64_t m,
                    Recorder& recorder) {
  std::vector<Step> steps;
  for (const Link& link : links) {
    WEIGHTD_ASSIGN_OR_RETURN(Step step, make_step(session, link, m, bench.repeats));
    steps.push_back(std::move(step));
  }
  std::vector<Contender> contenders;
  contenders.push_back(chain_contender("chain", steps, bench.layers, [&](const Step& step, int layer, cudaStream_t stream) {
    if (step.fused) return step.product.launch(session, step.link->weights, step.batch, layer, stream);
    return launch_exact(session, step.link->weights, step.batch, layer, stream);
  }));
  contenders.push_back(chain_contender("chain_cublas", steps, bench.layers, [&](const Step& step, int layer, cudaStream_t stream) {
    return step.cublas->launch(step.best_algorithm, session, step.link->weights, step.batch, layer, stream);
  }));
  contenders.push_back(chain_contender("chain_gemm_ex", steps, bench.layers, [&](const Step& step, int layer, cudaStream_t stream) {
    return step.cublas->launch(CublasProduct::kGemmEx, session, step.link->weights, step.batch, layer, stream);
  }));
  WEIGHTD_RETURN_IF_ERROR(race(contenders, bench.repeats));
  uint64_t coded_bytes = 0, raw_bytes = 0;
  for (const Step& step : steps) {
    coded_bytes += step.link->weights.coded_bytes();
    raw_bytes += step.link->weights.raw_bytes();
  }
  const auto layers = static_cast<uint64_t>(bench.layers);
  const double best_cublas_us = std::min(contenders[1].us, contenders[2].us);
  std::vector<Row> rows;
  for (const Contender& contender : contenders) {
    const bool ours = contender.name == "chain";
    Row row = session.row(contender.name, std::to_string(bench.layers) + " layers");
    row.model = bench.shapes.front().model;
    row.m = m;
    row.us = contender.us;
    row.best_cublas_us = best_cublas_us;
    row.bits_per_weight = ours ? 16.0 * static_cast<double>(coded_bytes) / static_cast<double>(raw_bytes) : 16.0;
    if (ours) row.plan = routes_of(steps);
    fill_rates(row, layers * (ours ? coded_bytes : raw_bytes), session.copy_gbps);
    row.tflops = static_cast<double>(layers * raw_bytes * m) / row.us / 1e6;  // two operations a weight, two bytes a weight
    rows.push_back(std::move(row));
  }
  return recorder.add(std::move(rows));
}

}  // namespace

Status run_chain_bench(const ChainBench& bench, Recorder& recorder) {
  WEIGHTD_ASSIGN_OR_RETURN(const Session session, Session::open(bench.device, bench.repeats, true));
  recorder.say(session.describe());
  recorder.say("clocks before: " + session.clocks->read().to_string());
  WEIGHTD_ASSIGN_OR_RETURN(const std::vector<Link> links, make_links(bench, session, recorder));
  for (const uint64_t m : bench.tokens) {
    WEIGHTD_RETURN_IF_ERROR(recorder.check_interrupt());
    WEIGHTD_RETURN_IF_ERROR(bench_tokens(bench, session, links, m, recorder).with_context(std::to_string(m) + " tokens"));
  }
  recorder.say("clocks after: " + session.clocks->read().to_string());
  return {};
}

}  // namespace weightd::tools
