// SPDX-License-Identifier: Apache-2.0
#include "tools/bench/gpu/session.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <utility>

#include "base/text.h"
#include "base/version.h"
#include "kernels/block_hash.h"
#include "tools/cli/table.h"

namespace weightd::tools {
namespace {

constexpr uint64_t kLargeCopyBytes = uint64_t{2} << 30;  // 1 GiB read, 1 GiB written
constexpr int kScreenRepeats = 5;

std::string uuid_text(const cudaUUID_t& uuid) {
  std::string text = "GPU-";
  for (size_t i = 0; i < sizeof uuid.bytes; ++i) {
    std::array<char, 3> digits{};
    std::snprintf(digits.data(), digits.size(), "%02x", static_cast<unsigned>(static_cast<unsigned char>(uuid.bytes[i])));
    text += digits.data();
    if (i == 3 || i == 5 || i == 7 || i == 9) text += '-';
  }
  return text;
}

/// Whatever the kind of device is called ("GPU-" or "MIG-").
bool same_uuid(const std::string& a, const std::string& b) { return a.size() > 4 && b.size() > 4 && a.substr(4) == b.substr(4); }

BlasOperands operands_of(const DeviceWeights& weights, const Batch& batch, int i) {
  return {weights.raw(i), batch.x.as<uint16_t>(), batch.y.as<uint16_t>()};
}

}  // namespace

std::string gpu_uuid(int ordinal) {
  cudaDeviceProp properties{};
  if (cudaGetDeviceProperties(&properties, ordinal) != cudaSuccess) return {};
  return uuid_text(properties.uuid);
}

Result<int> select_gpu(const std::string& uuid) {
  int count = 0;
  const Status counted = check_cuda(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  if (!counted.ok() || count == 0) return Status::unavailable(counted.ok() ? "this machine has no GPU" : counted.message());
  std::string seen;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    const std::string candidate = gpu_uuid(ordinal);
    if (uuid.empty() || same_uuid(candidate, uuid)) {
      WEIGHTD_RETURN_IF_ERROR(check_cuda(cudaSetDevice(ordinal), "cudaSetDevice"));
      return ordinal;
    }
    seen += (seen.empty() ? "" : ", ") + candidate;
  }
  return Status::not_found("no GPU '" + printable(uuid) + "' here; there is " + seen);
}

Result<Session> Session::open(const std::string& uuid, int repeats, bool products) {
  Session session;
  WEIGHTD_ASSIGN_OR_RETURN(const int ordinal, select_gpu(uuid));
  cudaDeviceProp properties{};
  WEIGHTD_RETURN_IF_ERROR(check_cuda(cudaGetDeviceProperties(&properties, ordinal), "cudaGetDeviceProperties"));
  session.gpu = properties.name;
  session.clocks = std::make_unique<ClockReader>(uuid_text(properties.uuid));
  session.driver = session.clocks->driver_version();
  if (session.driver.empty()) {
    int version = 0;
    WEIGHTD_RETURN_IF_ERROR(check_cuda(cudaDriverGetVersion(&version), "cudaDriverGetVersion"));
    session.driver = "CUDA " + std::to_string(version / 1000) + "." + std::to_string(version / 10 % 100);
  }
  WEIGHTD_ASSIGN_OR_RETURN(session.device, kernels::prepare_gemm());
  if (products) {
    WEIGHTD_ASSIGN_OR_RETURN(session.cublas, Cublas::open());
    WEIGHTD_ASSIGN_OR_RETURN(session.blas, kernels::Blas::open());
  }
  WEIGHTD_ASSIGN_OR_RETURN(session.cold, cold_bytes());
  WEIGHTD_ASSIGN_OR_RETURN(Contender copy, copy_contender(kLargeCopyBytes, session.cold));
  std::vector<Contender> contenders;
  contenders.push_back(std::move(copy));
  WEIGHTD_RETURN_IF_ERROR(race(contenders, repeats));
  session.copy_gbps = static_cast<double>(kLargeCopyBytes) / contenders.front().us / 1e3;
  return session;
}

std::string Session::describe() const {
  std::string text = gpu + ", driver " + driver + ", copy " + cli::fixed(copy_gbps, 0) + " GB/s";
  if (cublas != nullptr) text += ", cuBLAS " + cublas->version() + ", exact mode " + blas->version();
  return text;
}

Row Session::row(std::string op, std::string name) const {
  Row row;
  row.op = std::move(op);
  row.name = std::move(name);
  row.gpu = gpu;
  row.driver = driver;
  row.commit = commit_of(build_id());
  const Clocks now = clocks->read();
  row.sm_mhz = now.sm_mhz;
  row.power_w = now.power_w;
  row.temperature_c = now.temperature_c;
  return row;
}

Row Session::row(std::string op, const BenchShape& shape, uint64_t m) const {
  Row result = row(std::move(op), shape.name);
  result.model = shape.model;
  result.n = shape.n;
  result.k = shape.k;
  result.m = m;
  return result;
}

Result<Contender> copy_contender(uint64_t bytes, uint64_t cold) {
  const uint64_t half = bytes / 2 / 16 * 16;
  const int count = copies_for(bytes, cold);
  WEIGHTD_ASSIGN_OR_RETURN(Copies from, Copies::make({}, half, count));
  WEIGHTD_ASSIGN_OR_RETURN(Copies to, Copies::make({}, half, count));
  const auto pair = std::make_shared<std::pair<Copies, Copies>>(std::move(from), std::move(to));
  Contender contender;
  contender.name = "copy";
  contender.copies = count;
  contender.in_graph = false;
  contender.launch = [pair, half](int i, cudaStream_t stream) {
    return check_cuda(cudaMemcpyAsync(pair->second.at(i), pair->first.at(i), half, cudaMemcpyDeviceToDevice, stream),
                      "cudaMemcpyAsync");
  };
  return contender;
}

Result<double> time_block_hashes(uint64_t bytes, int repeats) {
  const uint64_t blocks = bytes / kernels::kHashBlockBytes;
  WEIGHTD_ASSIGN_OR_RETURN(const Copies arena, Copies::make({}, bytes, 1));
  WEIGHTD_ASSIGN_OR_RETURN(const DeviceBytes hashes, DeviceBytes::allocate(blocks * sizeof(uint64_t)));
  std::vector<Contender> contenders(1);
  contenders[0].name = "hash";
  contenders[0].launch = [&](int, cudaStream_t stream) {
    return kernels::launch_block_hashes(arena.at(0), blocks, hashes.as<uint64_t>(), stream);
  };
  WEIGHTD_RETURN_IF_ERROR(race(contenders, repeats));
  return contenders[0].us;
}

Result<DeviceWeights> DeviceWeights::upload(const HostMatrix& host, uint64_t cold, std::optional<int> copies) {
  DeviceWeights weights;
  const CodedMatrix& coded = host.coded;
  weights.geometry_ = coded.geometry;
  weights.windows_at_ = coded.windows_at;
  weights.records_at_ = coded.records_at;
  weights.pool_at_ = coded.pool_at;
  weights.pool_bytes_ = coded.pool_bytes;
  weights.coded_bytes_ = coded.coded_bytes;
  const uint64_t raw_bytes = host.words.size() * 2;
  const auto count = [&](uint64_t bytes) { return copies.value_or(copies_for(bytes, cold)); };
  WEIGHTD_ASSIGN_OR_RETURN(weights.coded_, Copies::make(coded.arena, coded.arena.size(), count(coded.arena.size())));
  WEIGHTD_ASSIGN_OR_RETURN(weights.raw_, Copies::make(std::as_bytes(std::span(host.words)), raw_bytes, count(raw_bytes)));
  return weights;
}

kernels::F12DeviceMatrix DeviceWeights::coded(int i) const {
  const std::byte* base = coded_.at(i);
  return {base, base + windows_at_, base + records_at_, base + pool_at_, pool_bytes_, geometry_.n, geometry_.k};
}

Result<Batch> Batch::make(uint64_t n, uint64_t k, uint64_t m) {
  Batch batch;
  batch.n = n;
  batch.k = k;
  batch.m = m;
  std::vector<uint16_t> words(m * k);
  fill_activations(words, k, 3);
  WEIGHTD_ASSIGN_OR_RETURN(batch.x, DeviceBytes::allocate(m * k * 2));
  WEIGHTD_RETURN_IF_ERROR(batch.x.upload(std::as_bytes(std::span(words))));
  WEIGHTD_ASSIGN_OR_RETURN(batch.y, DeviceBytes::allocate(m * n * 2));
  WEIGHTD_ASSIGN_OR_RETURN(batch.workspace, DeviceBytes::allocate(kernels::exact_workspace_bytes(n, k)));
  return batch;
}

Result<FusedProduct> FusedProduct::make(const Session& session, const Batch& batch) {
  kernels::GemmRequest request;
  request.n = batch.n;
  request.k = batch.k;
  request.m = batch.m;
  request.tensor_copy = kernels::allows_tensor_copy(batch.input());
  request.overlap_previous = true;
  FusedProduct product;
  WEIGHTD_ASSIGN_OR_RETURN(product.plan, kernels::plan_gemm(session.device.traits, request));
  return product;
}

Status FusedProduct::launch(const Session& session, const DeviceWeights& weights, const Batch& batch, int i,
                            cudaStream_t stream) const {
  return kernels::launch_gemm(session.device, plan, weights.coded(i), batch.input(), batch.output(), stream);
}

Status launch_exact(const Session& session, const DeviceWeights& weights, const Batch& batch, int i, cudaStream_t stream) {
  return kernels::multiply_exact(*session.blas, weights.coded(i), batch.input(), batch.output(), batch.workspace.data(), stream);
}

Result<CublasProduct> CublasProduct::make(const Session& session, const DeviceWeights& weights, const Batch& batch) {
  WEIGHTD_ASSIGN_OR_RETURN(LtProblem problem, session.cublas->problem(batch.n, batch.k, batch.m));
  CublasProduct product{std::move(problem)};
  std::vector<Contender> proposals;
  for (int algorithm = 0; algorithm < product.problem.algorithms(); ++algorithm) {
    Contender contender;
    contender.name = product.describe(algorithm);
    contender.copies = weights.raw_copies();
    contender.launch = [&, algorithm](int i, cudaStream_t stream) {
      return product.launch(algorithm, session, weights, batch, i, stream);
    };
    proposals.push_back(std::move(contender));
  }
  if (proposals.empty()) return product;
  WEIGHTD_RETURN_IF_ERROR(race(proposals, kScreenRepeats));
  const auto faster = [](const Contender& a, const Contender& b) { return a.us < b.us; };
  product.best_algorithm = static_cast<int>(std::min_element(proposals.begin(), proposals.end(), faster) - proposals.begin());
  return product;
}

Status CublasProduct::launch(int algorithm, const Session& session, const DeviceWeights& weights, const Batch& batch, int i,
                             cudaStream_t stream) const {
  const BlasOperands operands = operands_of(weights, batch, i);
  if (algorithm == kGemmEx) return session.cublas->multiply(batch.n, batch.k, batch.m, operands, stream);
  return problem.multiply(algorithm, operands, stream);
}

std::string CublasProduct::describe(int algorithm) const {
  if (algorithm == kGemmEx) return "cublasGemmEx";
  return "cublasLt, proposal " + std::to_string(algorithm + 1) + " of " + std::to_string(problem.algorithms());
}

}  // namespace weightd::tools
