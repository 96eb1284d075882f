// SPDX-License-Identifier: Apache-2.0
// Runs every legal plan of the bulk and the warpgroup kernel, compares its result with the direct kernel's and then times it (cold
// L2, inside CUDA graphs, overlapped launches, median) against cublasGemmEx and the heuristics of cuBLASLt on the same weights.
//   gemm_tune [--check] [--quick] [--copies-by-unit] [--cublas FILE] [--cublaslt FILE] [--shape N,K] [--tokens M]
// Ends with the best plan of each kind for each shape and number of tokens, and what plan_gemm chose.
// --check runs small matrices once and times nothing. --quick times a few cuts at 64 and 128 tokens and begins nothing new after 20
// seconds. --copies-by-unit leaves out the plans that load weights by tensor copies.
// A launch that has not finished after five seconds ends the program with status 3 and the plan's name; wrong results are printed
// and make its status 2.
#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/gemm_launch.h"
#include "tests/gpu/test_matrix.h"

namespace weightd::kernels {
namespace {

using testing::require_cuda;

constexpr uint64_t kColdBytes = uint64_t{420} << 20;
constexpr int kRepeats = 5;
constexpr int kLaunches = 16;
constexpr uint64_t kBaseRows = 1024;  // random ones; the matrix repeats them
constexpr uint64_t kMostTokens = 256;
constexpr uint64_t kTokens[] = {256, 128, 64, 48,
                                32,  16,  8,  1};  // descending: the first result of an order of the sum is compared later
constexpr uint64_t kQuickTokens[] = {128, 64};
constexpr auto kQuickTime = std::chrono::seconds(20);
constexpr uint64_t kFewestCutTokens = 64;  // from here on every cut of the warpgroup kernel is tried

struct Shape {
  uint64_t n, k;
};
constexpr Shape kShapes[] = {{4096, 4096}, {6144, 4096},  {14336, 4096}, {28672, 4096}, {4096, 14336},
                             {8192, 8192}, {10240, 8192}, {28672, 8192}, {8192, 28672}};
constexpr Shape kSmallShapes[] = {{16, 64}, {1000, 200}, {2048, 1032}, {4096, 2048}, {40000, 128}, {640, 4104}};

void require(const Status& status) {
  if (status.ok()) return;
  std::printf("%s\n", status.to_string().c_str());
  std::exit(2);
}

class Buffer {
 public:
  explicit Buffer(uint64_t bytes) : bytes_(bytes) { require_cuda(cudaMalloc(&data_, std::max<uint64_t>(bytes, 16)), "cudaMalloc"); }
  ~Buffer() { (void)cudaFree(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  [[nodiscard]] std::byte* data() const { return static_cast<std::byte*>(data_); }
  template <typename T>
  [[nodiscard]] T* as() const {
    return static_cast<T*>(data_);
  }
  [[nodiscard]] uint64_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  uint64_t bytes_;
};

/// `total` bytes at `to`, the `period` bytes of `host` again and again.
void fill_repeating(std::byte* to, uint64_t total, const void* host, uint64_t period) {
  if (total == 0) return;
  require_cuda(cudaMemcpy(to, host, std::min(period, total), cudaMemcpyHostToDevice), "upload");
  for (uint64_t at = period; at < total; at += period) {
    require_cuda(cudaMemcpyAsync(to + at, to, std::min(period, total - at), cudaMemcpyDeviceToDevice, nullptr), "repeat");
  }
}

int copies_for(uint64_t bytes) { return static_cast<int>(std::max<uint64_t>(2, (kColdBytes + bytes - 1) / bytes)); }

/// The weights of one shape, coded and plain, in copies that together exceed the L2.
class Weights {
 public:
  Weights(const Shape& shape, bool plain, bool cold) : shape_(shape), geometry_{shape.n, shape.k, 1} {
    const uint64_t base_rows = std::min(kBaseRows, shape.n);
    testing::Words base = testing::random_weights(base_rows, shape.k, 0, true, shape.n + shape.k);
    // Beside the natural escapes, which are tiny, some that a result shows.
    for (size_t i = 7; i < base.words.size(); i += 50021) base.words[i] = testing::bf16_from(2.0F);
    const testing::HostF12 host = testing::encode(base);
    windows_at_ = geometry_.codes_bytes();
    records_at_ = windows_at_ + f12::align_up(geometry_.windows_bytes(), 256);
    pool_at_ = records_at_ + f12::align_up(geometry_.records_bytes(), 256);
    pool_bytes_ = host.pool.size();
    coded_bytes_ = pool_at_ + pool_bytes_;
    for (int i = 0; i < (cold ? copies_for(coded_bytes_) : 1); ++i) {
      const Buffer& copy = *coded_.emplace_back(std::make_unique<Buffer>(coded_bytes_));
      fill_repeating(copy.data(), geometry_.codes_bytes(), host.codes.data(), host.codes.size());
      fill_repeating(copy.data() + windows_at_, geometry_.windows_bytes(), host.windows.data(), host.windows.size());
      fill_repeating(copy.data() + records_at_, geometry_.records_bytes(), host.records.data(), host.records.size());
      fill_repeating(copy.data() + pool_at_, pool_bytes_, host.pool.data(), pool_bytes_);
    }
    const uint64_t plain_bytes = shape.n * shape.k * 2;
    for (int i = 0; plain && i < copies_for(plain_bytes); ++i) {
      fill_repeating(plain_.emplace_back(std::make_unique<Buffer>(plain_bytes))->data(), plain_bytes, base.words.data(),
                     base.words.size() * 2);
    }
    require_cuda(cudaDeviceSynchronize(), "weights");
  }
  [[nodiscard]] F12DeviceMatrix coded(int i) const {
    const std::byte* base = coded_[static_cast<size_t>(i) % coded_.size()]->data();
    return {base, base + windows_at_, base + records_at_, base + pool_at_, pool_bytes_, shape_.n, shape_.k};
  }
  [[nodiscard]] const void* plain(int i) const { return plain_[static_cast<size_t>(i) % plain_.size()]->data(); }
  [[nodiscard]] int launches() const { return std::max(kLaunches, static_cast<int>(coded_.size())); }
  [[nodiscard]] int plain_launches() const { return std::max(kLaunches, static_cast<int>(plain_.size())); }
  [[nodiscard]] uint64_t coded_bytes() const { return coded_bytes_; }

 private:
  Shape shape_;
  f12::Geometry geometry_;
  uint64_t windows_at_ = 0, records_at_ = 0, pool_at_ = 0, pool_bytes_ = 0, coded_bytes_ = 0;
  std::vector<std::unique_ptr<Buffer>> coded_, plain_;
};

/// Waits for the stream; ends the program when `what` hangs, so that a deadlock costs seconds.
void wait_or_die(cudaStream_t stream, const std::string& what) {
  cudaEvent_t done = nullptr;
  require_cuda(cudaEventCreateWithFlags(&done, cudaEventDisableTiming), "event");
  require_cuda(cudaEventRecord(done, stream), "record");
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  for (cudaError_t state = cudaErrorNotReady; state != cudaSuccess;) {
    state = cudaEventQuery(done);
    if (state != cudaSuccess && state != cudaErrorNotReady) {
      std::printf("FAILED %s: %s\n", what.c_str(), cudaGetErrorString(state));
      std::fflush(stdout);
      _exit(2);
    }
    if (state == cudaErrorNotReady && std::chrono::steady_clock::now() > deadline) {
      std::printf("HANGS %s\n", what.c_str());
      std::fflush(stdout);
      _exit(3);
    }
  }
  require_cuda(cudaEventDestroy(done), "destroy");
}

/// Median time of one of `count` launches in a graph, in microseconds.
double time_graph(int count, const std::string& what, const std::function<void(int, cudaStream_t)>& launch) {
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  require_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  require_cuda(cudaEventCreate(&begin), "event");
  require_cuda(cudaEventCreate(&end), "event");
  require_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int i = 0; i < count; ++i) launch(i, stream);
  require_cuda(cudaStreamEndCapture(stream, &graph), "capture");
  require_cuda(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
  std::vector<float> times;
  for (int repeat = 0; repeat < kRepeats + 2; ++repeat) {
    float ms = 0;
    require_cuda(cudaEventRecord(begin, stream), "record");
    require_cuda(cudaGraphLaunch(executable, stream), "launch");
    require_cuda(cudaEventRecord(end, stream), "record");
    wait_or_die(stream, what + ", overlapped in a graph");
    require_cuda(cudaEventElapsedTime(&ms, begin, end), "elapsed");
    if (repeat >= 2) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  require_cuda(cudaGraphExecDestroy(executable), "destroy");
  require_cuda(cudaGraphDestroy(graph), "destroy");
  require_cuda(cudaEventDestroy(begin), "destroy");
  require_cuda(cudaEventDestroy(end), "destroy");
  require_cuda(cudaStreamDestroy(stream), "destroy");
  return static_cast<double>(times[times.size() / 2]) * 1000.0 / count;
}

class Library {
 public:
  explicit Library(const std::string& file) : handle_(dlopen(file.c_str(), RTLD_NOW | RTLD_GLOBAL)) {
    if (handle_ == nullptr) std::printf("not loaded: %s\n", dlerror());
  }
  template <typename Function>
  [[nodiscard]] Function* find(Function*, const char* name) const {
    return handle_ == nullptr ? nullptr : reinterpret_cast<Function*>(dlsym(handle_, name));
  }

 private:
  void* handle_;
};
#define FIND(library, function) (library).find(&function, #function)

/// cublasGemmEx, default algorithm, and each algorithm that cuBLASLt's heuristic proposes.
class Baseline {
 public:
  Baseline(const std::string& cublas, const std::string& cublaslt) : lt_(cublaslt), blas_(cublas), workspace_(kWorkspace) {
    const auto create = blas_.find(&cublasCreate_v2, "cublasCreate_v2");
    gemm_ = blas_.find(static_cast<GemmEx*>(nullptr), "cublasGemmEx");
    set_stream_ = blas_.find(&cublasSetStream_v2, "cublasSetStream_v2");
    set_workspace_ = blas_.find(&cublasSetWorkspace_v2, "cublasSetWorkspace_v2");
    if (create != nullptr && create(&handle_) != CUBLAS_STATUS_SUCCESS) handle_ = nullptr;
    const auto create_lt = FIND(lt_, cublasLtCreate);
    if (create_lt != nullptr && create_lt(&lt_handle_) != CUBLAS_STATUS_SUCCESS) lt_handle_ = nullptr;
  }

  /// 0 where there is no library.
  [[nodiscard]] double time_default(const Shape& shape, const Weights& weights, const void* x, void* y, uint64_t m) const {
    if (handle_ == nullptr) return 0;
    const float one = 1;
    const float zero = 0;
    const auto size = [](uint64_t value) { return static_cast<int>(value); };
    return time_graph(weights.plain_launches(), "cublasGemmEx", [&](int i, cudaStream_t stream) {
      check(set_stream_(handle_, stream));
      check(set_workspace_(handle_, workspace_.data(), kWorkspace));
      check(gemm_(handle_, CUBLAS_OP_T, CUBLAS_OP_N, size(shape.n), size(m), size(shape.k), &one, weights.plain(i), CUDA_R_16BF,
                  size(shape.k), x, CUDA_R_16BF, size(shape.k), &zero, y, CUDA_R_16BF, size(shape.n), CUBLAS_COMPUTE_32F,
                  CUBLAS_GEMM_DEFAULT));
    });
  }

  [[nodiscard]] double time_best_lt(const Shape& shape, const Weights& weights, const void* x, void* y, uint64_t m) const {
    if (lt_handle_ == nullptr) return 0;
    const auto multiply = FIND(lt_, cublasLtMatmul);
    cublasLtMatmulDesc_t operation = nullptr;
    cublasLtMatrixLayout_t a = nullptr;
    cublasLtMatrixLayout_t b = nullptr;
    cublasLtMatrixLayout_t c = nullptr;
    cublasLtMatmulPreference_t preference = nullptr;
    const cublasOperation_t transposed = CUBLAS_OP_T;
    const size_t workspace = kWorkspace;
    check(FIND(lt_, cublasLtMatmulDescCreate)(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    check(FIND(lt_, cublasLtMatmulDescSetAttribute)(operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed));
    const auto layout = FIND(lt_, cublasLtMatrixLayoutCreate);
    check(layout(&a, CUDA_R_16BF, shape.k, shape.n, static_cast<int64_t>(shape.k)));
    check(layout(&b, CUDA_R_16BF, shape.k, m, static_cast<int64_t>(shape.k)));
    check(layout(&c, CUDA_R_16BF, shape.n, m, static_cast<int64_t>(shape.n)));
    check(FIND(lt_, cublasLtMatmulPreferenceCreate)(&preference));
    check(FIND(lt_, cublasLtMatmulPreferenceSetAttribute)(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                                          sizeof workspace));
    cublasLtMatmulHeuristicResult_t found[kHeuristics] = {};
    int count = 0;
    check(FIND(lt_, cublasLtMatmulAlgoGetHeuristic)(lt_handle_, operation, a, b, c, c, preference, kHeuristics, found, &count));
    double best = 0;
    for (int h = 0; h < count; ++h) {
      const float one = 1;
      const float zero = 0;
      const double us = time_graph(weights.plain_launches(), "cublasLtMatmul", [&](int i, cudaStream_t stream) {
        check(multiply(lt_handle_, operation, &one, weights.plain(i), a, x, b, &zero, y, c, y, c, &found[h].algo, workspace_.data(),
                       kWorkspace, stream));
      });
      if (best == 0 || us < best) best = us;
    }
    check(FIND(lt_, cublasLtMatmulPreferenceDestroy)(preference));
    for (cublasLtMatrixLayout_t each : {a, b, c}) check(FIND(lt_, cublasLtMatrixLayoutDestroy)(each));
    check(FIND(lt_, cublasLtMatmulDescDestroy)(operation));
    return best;
  }

 private:
  using GemmEx = cublasStatus_t(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int, int, const void*, const void*,
                                cudaDataType, int, const void*, cudaDataType, int, const void*, void*, cudaDataType, int,
                                cublasComputeType_t, cublasGemmAlgo_t);
  static constexpr size_t kWorkspace = 64 << 20;
  static constexpr int kHeuristics = 6;
  static void check(cublasStatus_t status) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    std::printf("cuBLAS failed with %d\n", static_cast<int>(status));
    std::exit(2);
  }
  Library lt_, blas_;
  Buffer workspace_;
  cublasHandle_t handle_ = nullptr;
  cublasLtHandle_t lt_handle_ = nullptr;
  GemmEx* gemm_ = nullptr;
  decltype(&cublasSetStream_v2) set_stream_ = nullptr;
  decltype(&cublasSetWorkspace_v2) set_workspace_ = nullptr;
};

/// Every plan worth timing for this shape, each once. For few tokens only what plan_gemm makes. Quick: only cuts that were the best
/// of some shape, with the stages that the plan chooses.
std::vector<GemmPlan> candidates(const DeviceTraits& device, const Shape& shape, uint64_t m, bool quick) {
  std::vector<GemmPlan> plans;
  const auto add = [&](const Result<GemmPlan>& plan) {
    if (!plan.ok()) return;
    for (const GemmPlan& known : plans) {
      if (known.to_string() == plan->to_string()) return;
    }
    plans.push_back(*plan);
  };
  GemmRequest request{shape.n, shape.k, m, true, true};
  add(plan_gemm(device, request));
  request.kernel = GemmKernel::kBulk;
  add(plan_gemm(device, request));
  request.kernel = GemmKernel::kWgmma;
  add(plan_gemm(device, request));
  if (m < kFewestCutTokens) return plans;
  if (quick) {
    for (const uint32_t splits : {1U, 2U}) {
      add(plan_wgmma(device, request, {4, 1, splits}));
      add(plan_wgmma(device, request, {2, 2, splits}));
      add(plan_wgmma(device, request, {4, 1, splits, 1, 0, 0, 0, false}));
    }
    return plans;
  }
  constexpr std::pair<uint32_t, uint32_t> kWarpgroups[] = {{4, 1}, {2, 2}, {2, 1}};
  for (const auto& [warpgroups, units_per_warp] : kWarpgroups) {
    for (const uint32_t splits : {1U, 2U, 4U}) {
      for (const uint32_t sharing : {1U, 2U}) {
        for (const uint32_t tiles : {1U, 2U, 4U}) {
          for (const uint32_t token_block : {64U, 128U, 256U}) {
            if (token_block > 64 && token_block / 2 >= m) continue;  // twice what is needed
            if (token_block < std::min<uint64_t>(m, 128)) continue;
            WgmmaCut cut{warpgroups, units_per_warp, splits, sharing, tiles, 0, token_block};
            add(plan_wgmma(device, request, cut));
            cut.token_blocks_at_once = true;
            add(plan_wgmma(device, request, cut));
            if (sharing != 1 || tiles > 2) continue;
            cut.token_blocks_at_once = false;
            cut.tensor_weights = false;
            add(plan_wgmma(device, request, cut));
          }
        }
      }
    }
  }
  return plans;
}

/// The results so far of one shape, by order of the sum.
class Checker {
 public:
  explicit Checker(const Shape& shape) : shape_(shape) {}
  void set_reference(const Buffer& y, uint64_t m) { reference_ = download(y, m); }

  /// Whether y differs from the reference by rounding at most, and by no bit from a plan with the same order.
  [[nodiscard]] bool is_right(const GemmPlan& plan, const Buffer& y, uint64_t m) {
    const std::vector<uint16_t> got = download(y, m);
    double square = 0;
    for (size_t i = 0; i < got.size(); i += 97) square += std::pow(testing::value_of(reference_[i]), 2);
    const double typical = std::sqrt(square / (1.0 + static_cast<double>(got.size() / 97)));
    for (size_t i = 0; i < got.size(); ++i) {
      if (got[i] == reference_[i]) continue;
      const double a = testing::value_of(got[i]);
      const double b = testing::value_of(reference_[i]);
      if (!(std::abs(a - b) <= std::ldexp(std::max(std::abs(a), std::abs(b)), -7) + 1e-3 * typical))
        return report(plan, m, i, a, b);
    }
    const bool turns = plan.kernel == GemmKernel::kWgmma && plan.warp_slices() > 1;
    auto& first = first_[{plan.kernel == GemmKernel::kWgmma, plan.splits, plan.slices, turns ? plan.tiles_per_stage : 0}];
    if (first.empty()) first = got;
    for (size_t i = 0; i < std::min(first.size(), got.size()); ++i) {
      if (first[i] != got[i]) return report(plan, m, i, testing::value_of(got[i]), testing::value_of(first[i]));
    }
    return true;
  }

 private:
  [[nodiscard]] std::vector<uint16_t> download(const Buffer& y, uint64_t m) const {
    std::vector<uint16_t> words(m * shape_.n);
    require_cuda(cudaMemcpy(words.data(), y.data(), words.size() * 2, cudaMemcpyDeviceToHost), "download");
    return words;
  }
  bool report(const GemmPlan& plan, uint64_t m, size_t i, double got, double want) const {
    std::printf("WRONG %s, m %llu: token %llu, row %llu: got %g, want %g\n", plan.to_string().c_str(),
                static_cast<unsigned long long>(m), static_cast<unsigned long long>(i / shape_.n),
                static_cast<unsigned long long>(i % shape_.n), got, want);
    std::fflush(stdout);
    return false;
  }
  Shape shape_;
  std::vector<uint16_t> reference_;
  std::map<std::tuple<bool, uint32_t, uint32_t, uint32_t>, std::vector<uint16_t>> first_;
};

struct Options {
  bool check_only = false;
  bool quick = false;
  bool copies_by_unit = false;  // leave out the plans that load weights by tensor copies
  std::string cublas = "libcublas.so.13", cublaslt = "libcublasLt.so.13";
  std::optional<Shape> shape;
  uint64_t tokens = 0;
};

/// The best of each kind for a shape and number of tokens, and what plan_gemm chose.
struct Summary {
  struct Best {
    double us = 0;
    std::string plan;
  };
  Shape shape;
  uint64_t m;
  double blas;
  Best bulk{}, wgmma{}, chosen{};

  void add(const GemmPlan& plan, double us) {
    if (chosen.us == 0) chosen = {us, plan.to_string()};  // plan_gemm's own is the first
    Best& best = plan.kernel == GemmKernel::kWgmma ? wgmma : bulk;
    if (best.us == 0 || us < best.us) best = {us, plan.to_string()};
  }
  void print() const {
    const double best = bulk.us == 0 ? wgmma.us : wgmma.us == 0 ? bulk.us : std::min(bulk.us, wgmma.us);
    std::printf("%5llux%-5llu %3llu | %6.1f | %6.1f | %6.1f | %6.1f %5.3f %s| best %5.3f | %s\n",
                static_cast<unsigned long long>(shape.n), static_cast<unsigned long long>(shape.k),
                static_cast<unsigned long long>(m), blas, bulk.us, wgmma.us, chosen.us, blas / chosen.us,
                chosen.us > best * 1.02 ? "SLOWER " : "", blas / best, wgmma.plan.c_str());
  }
};

class Tuner {
 public:
  Tuner(const Options& options, const GemmDevice& device) : options_(options), device_(device) {
    if (!options.check_only) baseline_ = std::make_unique<Baseline>(options.cublas, options.cublaslt);
  }

  void tune(const Shape& shape) {
    const Weights weights(shape, !options_.check_only, !options_.check_only);
    const uint64_t x_stride = f12::align_up(shape.k, 8);
    const testing::Words x = testing::random_activations(kMostTokens, x_stride, 3);
    const Buffer device_x(x.words.size() * 2);
    require_cuda(cudaMemcpy(device_x.data(), x.words.data(), x.words.size() * 2, cudaMemcpyHostToDevice), "upload");
    const Buffer y(kMostTokens * shape.n * 2);
    const auto launch = [&](const GemmPlan& plan, int copy, uint64_t m, cudaStream_t stream) {
      require(launch_gemm(device_, plan, weights.coded(copy), {device_x.as<uint16_t>(), m, shape.k, static_cast<int64_t>(x_stride)},
                          {y.as<uint16_t>(), m, shape.n, static_cast<int64_t>(shape.n)}, stream));
    };
    Checker checker(shape);
    GemmRequest direct{shape.n, shape.k, kMostTokens};
    direct.kernel = GemmKernel::kDirect;
    Result<GemmPlan> reference = plan_gemm(device_.traits, direct);
    require(reference.status());
    launch(*reference, 0, kMostTokens, nullptr);
    wait_or_die(nullptr, reference->to_string());
    checker.set_reference(y, kMostTokens);

    const std::vector<uint64_t> tokens = options_.quick ? std::vector<uint64_t>(std::begin(kQuickTokens), std::end(kQuickTokens))
                                                        : std::vector<uint64_t>(std::begin(kTokens), std::end(kTokens));
    for (const uint64_t m : tokens) {
      if ((options_.tokens != 0 && options_.tokens != m) || is_late()) continue;
      double ex = 0;
      double lt = 0;
      if (baseline_ != nullptr) {
        ex = baseline_->time_default(shape, weights, device_x.data(), y.data(), m);
        lt = baseline_->time_best_lt(shape, weights, device_x.data(), y.data(), m);
      }
      const double best_blas = lt == 0 ? ex : ex == 0 ? lt : std::min(ex, lt);
      Summary summary{shape, m, best_blas};
      if (baseline_ != nullptr) {
        std::printf("%llux%llu m %llu | cublas %.1f us, lt %.1f us\n", static_cast<unsigned long long>(shape.n),
                    static_cast<unsigned long long>(shape.k), static_cast<unsigned long long>(m), ex, lt);
      }
      for (const GemmPlan& plan : candidates(device_.traits, shape, m, options_.quick)) {
        if ((options_.copies_by_unit && plan.tensor_weights) || is_late()) continue;
        require_cuda(cudaMemset(y.data(), 0xA5, y.bytes()), "poison");
        GemmPlan alone = plan;
        alone.overlap_previous = false;
        launch(alone, 0, m, nullptr);
        wait_or_die(nullptr, alone.to_string());
        if (!checker.is_right(plan, y, m)) {
          ++wrong_;
          continue;
        }
        if (options_.check_only) {
          std::printf("right m %llu %s\n", static_cast<unsigned long long>(m), plan.to_string().c_str());
          continue;
        }
        const double us =
            time_graph(weights.launches(), plan.to_string(), [&](int i, cudaStream_t stream) { launch(plan, i, m, stream); });
        std::printf("%llux%llu m %llu | %7.1f us | %5.3f | %5.0f GB/s | %s\n", static_cast<unsigned long long>(shape.n),
                    static_cast<unsigned long long>(shape.k), static_cast<unsigned long long>(m), us, best_blas / us,
                    static_cast<double>(weights.coded_bytes()) / 1000.0 / us, plan.to_string().c_str());
        summary.add(plan, us);
      }
      if (summary.chosen.us > 0) summaries_.push_back(summary);
      std::fflush(stdout);
    }
  }

  [[nodiscard]] int wrong() const { return wrong_; }
  /// Whether a quick run must come to its end.
  [[nodiscard]] bool is_late() const { return options_.quick && std::chrono::steady_clock::now() - begin_ > kQuickTime; }

  void print_summaries() {
    std::stable_sort(summaries_.begin(), summaries_.end(), [](const Summary& a, const Summary& b) { return a.m > b.m; });
    std::printf("  shape     m   | cuBLAS | bulk   | wgmma  | chosen us, ratio | best   | best wgmma\n");
    for (const Summary& summary : summaries_) summary.print();
  }

 private:
  std::vector<Summary> summaries_;
  int wrong_ = 0;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  const Options& options_;
  const GemmDevice& device_;
  std::unique_ptr<Baseline> baseline_;
};

/// How many clusters fit the device at once decides how many blocks a plan may have.
void print_cluster_limits(const GemmDevice& device) {
  for (const uint32_t cluster : {1U, 2U, 4U, 8U}) {
    cudaLaunchConfig_t config{};
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {cluster, 1, 1};
    config.gridDim = dim3(cluster * 64);
    config.blockDim = dim3(640);
    config.dynamicSmemBytes = device.traits.shared_bytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    int clusters = 0;
    const cudaError_t error = cudaOccupancyMaxActiveClusters(&clusters, f12_gemm_kernels().wgmma[0][0], &config);
    std::printf("clusters of %u: %d at once (%s)\n", cluster, clusters, cudaGetErrorName(error));
  }
}

int run(const Options& options) {
  Result<GemmDevice> device = prepare_gemm();
  require(device.status());
  std::printf("%u multiprocessors, %u bytes of shared memory, bulk %d, wgmma %d\n", device->traits.sm_count,
              device->traits.shared_bytes, device->traits.bulk_copy, device->traits.wgmma);
  print_cluster_limits(*device);
  Tuner tuner(options, *device);
  if (options.shape.has_value()) {
    tuner.tune(*options.shape);
  } else if (options.check_only) {
    for (const Shape& shape : kSmallShapes) tuner.tune(shape);
  } else {
    for (const Shape& shape : kShapes) {
      if (tuner.is_late()) {
        std::printf("no time for %llux%llu\n", static_cast<unsigned long long>(shape.n), static_cast<unsigned long long>(shape.k));
      } else {
        tuner.tune(shape);
      }
    }
  }
  tuner.print_summaries();
  std::printf("done, %d wrong\n", tuner.wrong());
  return tuner.wrong() == 0 ? 0 : 2;
}

int usage() {
  std::printf("gemm_tune [--check] [--quick] [--copies-by-unit] [--cublas FILE] [--cublaslt FILE] [--shape N,K] [--tokens M]\n");
  return 1;
}

}  // namespace
}  // namespace weightd::kernels

int main(int argc, char** argv) {
  weightd::kernels::Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--check") {
      options.check_only = true;
      continue;
    }
    if (name == "--quick") {
      options.quick = true;
      continue;
    }
    if (name == "--copies-by-unit") {
      options.copies_by_unit = true;
      continue;
    }
    if (i + 1 == argc) return weightd::kernels::usage();
    const char* value = argv[++i];
    if (name == "--cublas") {
      options.cublas = value;
    } else if (name == "--cublaslt") {
      options.cublaslt = value;
    } else if (name == "--tokens") {
      options.tokens = std::strtoull(value, nullptr, 10);
    } else if (name == "--shape") {
      char* comma = nullptr;
      const uint64_t n = std::strtoull(value, &comma, 10);
      if (*comma != ',') return weightd::kernels::usage();
      options.shape = weightd::kernels::Shape{n, std::strtoull(comma + 1, nullptr, 10)};
    } else {
      return weightd::kernels::usage();
    }
  }
  return weightd::kernels::run(options);
}
