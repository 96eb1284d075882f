// SPDX-License-Identifier: Apache-2.0
// Times decompression and the fused GEMM against a device copy and cublasGemmEx on the same matrices: cold L2 (copies rotate over
// more than 400 MB), inside CUDA graphs, events, median of 12. Usage: kernels_gpu_bench [path of libcublas.so.13]
#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/parallel.h"
#include "kernels/f12_cuda.h"
#include "tests/gpu/test_matrix.h"

namespace weightd::kernels {
namespace {

using testing::DeviceMemory;
using testing::require_cuda;

constexpr uint64_t kColdBytes = 420 << 20;
constexpr int kRepeats = 12;

struct Shape {
  const char* name;
  uint64_t n, k;
};
constexpr Shape kShapes[] = {{"o 8B", 4096, 4096},        {"qkv 8B", 6144, 4096},   {"gate 8B", 14336, 4096},
                             {"gate_up 8B", 28672, 4096}, {"down 8B", 4096, 14336}, {"head 8B", 128256, 4096},
                             {"gate 70B", 28672, 8192},   {"down 70B", 8192, 28672}};
constexpr uint64_t kTokens[] = {1, 8, 16, 32, 64};

void require(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.to_string().c_str());
  std::exit(1);
}

/// Normal weights with a scale for each row; a table of normals keeps it fast.
testing::Words make_weights(uint64_t n, uint64_t k) {
  const testing::Words table = testing::random_activations(1, 1 << 20, 1);
  std::vector<float> normals;
  for (const uint16_t word : table.words) normals.push_back(static_cast<float>(testing::value_of(word)));
  testing::Words words{n, k, std::vector<uint16_t>(n * k)};
  parallel_ranges(n, 16, 0, [&](uint64_t begin, uint64_t end) {
    for (uint64_t row = begin; row < end; ++row) {
      uint64_t state = row * 0x9e3779b97f4a7c15U + 0x1234567;
      const float scale = 0.01F + 0.03F * static_cast<float>(row * 40503U % 1000) / 1000.0F;
      for (uint64_t c = 0; c < k; ++c) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        words.words[row * k + c] = testing::bf16_from(scale * normals[state >> 40 & 0xFFFFFU]);
      }
    }
  });
  return words;
}

/// Launches `count` calls, in one graph or one by one, and returns the median time of one, in microseconds.
double time_launches(int count, bool in_graph, const std::function<void(int, cudaStream_t)>& launch) {
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  require_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  require_cuda(cudaEventCreate(&begin), "event");
  require_cuda(cudaEventCreate(&end), "event");
  const auto launch_all = [&] {
    for (int i = 0; i < count; ++i) launch(i, stream);
  };
  if (in_graph) {
    require_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    launch_all();
    require_cuda(cudaStreamEndCapture(stream, &graph), "capture");
    require_cuda(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
  }
  std::vector<float> times;
  for (int repeat = 0; repeat < kRepeats + 2; ++repeat) {
    float ms = 0;
    require_cuda(cudaEventRecord(begin, stream), "record");
    if (in_graph) {
      require_cuda(cudaGraphLaunch(executable, stream), "launch");
    } else {
      launch_all();
    }
    require_cuda(cudaEventRecord(end, stream), "record");
    require_cuda(cudaEventSynchronize(end), "synchronize");
    require_cuda(cudaEventElapsedTime(&ms, begin, end), "elapsed");
    if (repeat >= 2) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  if (in_graph) {
    require_cuda(cudaGraphExecDestroy(executable), "destroy");
    require_cuda(cudaGraphDestroy(graph), "destroy");
  }
  require_cuda(cudaEventDestroy(begin), "destroy");
  require_cuda(cudaEventDestroy(end), "destroy");
  require_cuda(cudaStreamDestroy(stream), "destroy");
  return static_cast<double>(times[times.size() / 2]) * 1000.0 / count;
}

double time_graph(int count, const std::function<void(int, cudaStream_t)>& launch) { return time_launches(count, true, launch); }

/// `bytes` of device memory without fences; the copies of one matrix.
class Copies {
 public:
  Copies(const void* host, uint64_t bytes, int count) {
    for (int i = 0; i < count; ++i) {
      void* copy = nullptr;
      require_cuda(cudaMalloc(&copy, bytes), "cudaMalloc");
      if (host != nullptr && i == 0) require_cuda(cudaMemcpy(copy, host, bytes, cudaMemcpyHostToDevice), "upload");
      if (i > 0) require_cuda(cudaMemcpy(copy, copies_[0], bytes, cudaMemcpyDeviceToDevice), "copy");
      copies_.push_back(copy);
    }
  }
  ~Copies() {
    for (void* copy : copies_) (void)cudaFree(copy);
  }
  Copies(const Copies&) = delete;
  Copies& operator=(const Copies&) = delete;
  [[nodiscard]] void* at(int i) const { return copies_[static_cast<size_t>(i) % copies_.size()]; }
  [[nodiscard]] int count() const { return static_cast<int>(copies_.size()); }

 private:
  std::vector<void*> copies_;
};

class Cublas {
 public:
  explicit Cublas(const char* path) {
    library_ = dlopen(path, RTLD_NOW);
    if (library_ == nullptr) {
      std::printf("no cuBLAS: %s\n", dlerror());
      return;
    }
    find(create_, "cublasCreate_v2");
    find(set_stream_, "cublasSetStream_v2");
    find(set_workspace_, "cublasSetWorkspace_v2");
    find(gemm_, "cublasGemmEx");
    if (create_(&handle_) != CUBLAS_STATUS_SUCCESS) handle_ = nullptr;
    require_cuda(cudaMalloc(&workspace_, kWorkspace), "workspace");
  }
  [[nodiscard]] bool usable() const { return handle_ != nullptr; }
  void gemm(const void* w, const void* x, void* y, uint64_t m, uint64_t n, uint64_t k, cudaStream_t stream) const {
    const float one = 1;
    const float zero = 0;
    const auto size = [](uint64_t value) { return static_cast<int>(value); };
    cublasStatus_t status = set_stream_(handle_, stream);
    if (status == CUBLAS_STATUS_SUCCESS) status = set_workspace_(handle_, workspace_, kWorkspace);
    if (status == CUBLAS_STATUS_SUCCESS) {
      status = gemm_(handle_, CUBLAS_OP_T, CUBLAS_OP_N, size(n), size(m), size(k), &one, w, CUDA_R_16BF, size(k), x, CUDA_R_16BF,
                     size(k), &zero, y, CUDA_R_16BF, size(n), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    }
    if (status != CUBLAS_STATUS_SUCCESS) {
      std::fprintf(stderr, "cuBLAS failed with %d\n", static_cast<int>(status));
      std::exit(1);
    }
  }

 private:
  static constexpr size_t kWorkspace = 64 << 20;
  template <typename Function>
  void find(Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(library_, name));
    if (function == nullptr) std::exit(1);
  }
  void* library_ = nullptr;
  cublasHandle_t handle_ = nullptr;
  void* workspace_ = nullptr;
  decltype(&cublasCreate_v2) create_ = nullptr;
  decltype(&cublasSetStream_v2) set_stream_ = nullptr;
  decltype(&cublasSetWorkspace_v2) set_workspace_ = nullptr;
  cublasStatus_t (*gemm_)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int, int, const void*, const void*,
                          cudaDataType, int, const void*, cudaDataType, int, const void*, void*, cudaDataType, int,
                          cublasComputeType_t, cublasGemmAlgo_t) = nullptr;
};

int copies_for(uint64_t bytes) { return static_cast<int>(std::max<uint64_t>(2, (kColdBytes + bytes - 1) / bytes)); }

/// One coded matrix, its planes in one allocation, copied `count` times.
struct CodedCopies {
  explicit CodedCopies(const testing::HostF12& host)
      : geometry(host.geometry),
        windows_at(host.codes.size()),
        records_at(windows_at + f12::align_up(host.windows.size(), 256)),
        pool_at(records_at + f12::align_up(host.records.size(), 256)),
        pool_bytes(host.pool.size()) {
    bytes = pool_at + pool_bytes;
    std::vector<std::byte> arena(bytes);
    std::copy(host.codes.begin(), host.codes.end(), arena.begin());
    std::copy(host.windows.begin(), host.windows.end(), arena.begin() + static_cast<int64_t>(windows_at));
    std::copy(host.records.begin(), host.records.end(), arena.begin() + static_cast<int64_t>(records_at));
    std::copy(host.pool.begin(), host.pool.end(), arena.begin() + static_cast<int64_t>(pool_at));
    copies = std::make_unique<Copies>(arena.data(), bytes, copies_for(bytes));
  }
  [[nodiscard]] F12DeviceMatrix at(int i) const {
    const auto* base = static_cast<const std::byte*>(copies->at(i));
    return {base, base + windows_at, base + records_at, base + pool_at, pool_bytes, geometry.n, geometry.k};
  }
  f12::Geometry geometry;
  uint64_t windows_at, records_at, pool_at, pool_bytes;
  uint64_t bytes = 0;
  std::unique_ptr<Copies> copies;
};

/// Device-to-device copies that read and write `bytes` in all, in microseconds. Not in a graph: a copy node takes a slower engine.
double time_copy(uint64_t bytes) {
  const uint64_t half = bytes / 2 / 16 * 16;
  const Copies from(nullptr, half, 2 + static_cast<int>(kColdBytes / bytes));
  const Copies to(nullptr, half, from.count());
  for (int i = 0; i < from.count(); ++i) require_cuda(cudaMemset(from.at(i), 0x5B + i, half), "fill");
  return time_launches(20, false, [&](int i, cudaStream_t stream) {
    require_cuda(cudaMemcpyAsync(to.at(i), from.at(i), half, cudaMemcpyDeviceToDevice, stream), "copy");
  });
}

void bench_decompress(const Shape& shape, const testing::HostF12& host, double ceiling) {
  const CodedCopies coded(host);
  const uint64_t raw = shape.n * shape.k * 2;
  const uint64_t moved = coded.bytes + raw;
  const Copies out(nullptr, raw, coded.copies->count());
  const int count = std::max(20, coded.copies->count());
  const double us = time_graph(count, [&](int i, cudaStream_t stream) {
    require(launch_decompress(coded.at(i), 0, shape.n, static_cast<uint16_t*>(out.at(i)), static_cast<int64_t>(shape.k), stream));
  });
  const double copy_us = time_copy(moved);
  const double kilobytes = static_cast<double>(moved) / 1000.0;
  std::printf("| %-10s | %6llu x %5llu | %8.1f | %7.0f | %5.1f %% | %8.1f | %5.1f %% | %6.3f | %.1e |\n", shape.name,
              static_cast<unsigned long long>(shape.n), static_cast<unsigned long long>(shape.k), us, kilobytes / us,
              100 * kilobytes / us / ceiling, copy_us, 100 * copy_us / us,
              8.0 * static_cast<double>(coded.bytes) / static_cast<double>(shape.n * shape.k),
              static_cast<double>(host.escapes) / static_cast<double>(shape.n * shape.k));
  std::fflush(stdout);
}

void bench_gemm(const GemmDevice& device, const Cublas& cublas, const Shape& shape, const CodedCopies& coded, const Copies& raw) {
  for (const uint64_t m : kTokens) {
    const testing::Words x = testing::random_activations(m, shape.k, 3);
    const DeviceMemory device_x = testing::to_device(x.words);
    const DeviceMemory y(m * shape.n * 2);
    const int count = std::max(20, coded.copies->count());
    const auto fused_us = [&](bool bulk, bool overlap, std::string* text) {
      DeviceTraits traits = device.traits;
      traits.bulk_copy = traits.bulk_copy && bulk;
      Result<GemmPlan> plan = plan_gemm(traits, {shape.n, shape.k, m, true, overlap});
      require(plan.status());
      *text = plan->to_string();
      return time_graph(count, [&](int i, cudaStream_t stream) {
        require(launch_gemm(device, *plan, coded.at(i), {device_x.as<uint16_t>(), m, shape.k, static_cast<int64_t>(shape.k)},
                            {y.as<uint16_t>(), m, shape.n, static_cast<int64_t>(shape.n)}, stream));
      });
    };
    std::string text;
    const double direct = fused_us(false, false, &text);
    const double alone = fused_us(true, false, &text);
    const double overlapped = fused_us(true, true, &text);
    double reference = 0;
    if (cublas.usable()) {
      reference = time_graph(std::max(20, raw.count()), [&](int i, cudaStream_t stream) {
        cublas.gemm(raw.at(i), device_x.data(), y.data(), m, shape.n, shape.k, stream);
      });
    }
    std::printf("| %-10s | %3llu | %8.1f | %8.1f | %8.1f | %8.1f | %5.3f | %5.0f | %s |\n", shape.name,
                static_cast<unsigned long long>(m), direct, alone, overlapped, reference, reference / overlapped,
                static_cast<double>(coded.bytes) / 1000.0 / overlapped, text.c_str());
    std::fflush(stdout);
  }
}

int run(const char* cublas_path) {
  Result<GemmDevice> device = prepare_gemm();
  require(device.status());
  const Cublas cublas(cublas_path);
  constexpr uint64_t kLargeCopy = uint64_t{2} << 30;
  const double ceiling = static_cast<double>(kLargeCopy) / 1000.0 / time_copy(kLargeCopy);
  std::printf("device copy of 1 GiB: %.0f GB/s read and written\n\n", ceiling);
  for (const bool gemm : {false, true}) {
    std::printf(gemm
                    ? "\n| gemm | m | direct us | bulk us | overlapped us | cublas us | cublas / overlapped | coded GB/s | plan |\n"
                    : "| decompress | N x K | us | GB/s | of 1 GiB copy | same-size copy us | of it | bits | escapes |\n");
    for (const Shape& shape : kShapes) {
      const testing::Words words = make_weights(shape.n, shape.k);
      const testing::HostF12 host = testing::encode(words);
      if (!gemm) {
        bench_decompress(shape, host, ceiling);
        continue;
      }
      const CodedCopies coded(host);
      const uint64_t raw_bytes = words.words.size() * 2;
      const Copies raw(words.words.data(), raw_bytes, copies_for(raw_bytes));
      bench_gemm(*device, cublas, shape, coded, raw);
    }
  }
  return 0;
}

}  // namespace
}  // namespace weightd::kernels

int main(int argc, char** argv) { return weightd::kernels::run(argc > 1 ? argv[1] : "libcublas.so.13"); }
