// SPDX-License-Identifier: Apache-2.0
#include "kernels/blas.h"

#include <cublasLt.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <bit>
#include <compare>
#include <cstdlib>
#include <limits>
#include <map>
#include <mutex>
#include <string_view>
#include <utility>

#include "base/text.h"
#include "kernels/launch.h"
#include "store/tile_layout.h"

namespace weightd::kernels {
namespace {

constexpr const char* kVariable = "WEIGHTD_CUBLASLT";
constexpr std::array<const char*, 2> kNames{"libcublasLt.so.13", "libcublasLt.so.12"};
constexpr std::string_view kUsualFolder = "/usr/local/cuda/lib64/";
constexpr uint64_t kAlignment = 256;    // the finest that the heuristic distinguishes
constexpr size_t kMaxProducts = 16384;  // kept choices; a server sees a few thousand token counts of a few shapes

/// The functions of cuBLASLt that are used, with the types of its header.
struct Functions {
  decltype(&::cublasLtCreate) create = nullptr;
  decltype(&::cublasLtDestroy) destroy = nullptr;
  decltype(&::cublasLtGetVersion) get_version = nullptr;
  decltype(&::cublasLtGetStatusName) status_name = nullptr;
  decltype(&::cublasLtMatmul) matmul = nullptr;
  decltype(&::cublasLtMatmulAlgoGetHeuristic) heuristic = nullptr;
  decltype(&::cublasLtMatmulDescCreate) operation_create = nullptr;
  decltype(&::cublasLtMatmulDescSetAttribute) operation_set = nullptr;
  decltype(&::cublasLtMatmulDescDestroy) operation_destroy = nullptr;
  decltype(&::cublasLtMatrixLayoutCreate) layout_create = nullptr;
  decltype(&::cublasLtMatrixLayoutDestroy) layout_destroy = nullptr;
  decltype(&::cublasLtMatmulPreferenceCreate) preference_create = nullptr;
  decltype(&::cublasLtMatmulPreferenceSetAttribute) preference_set = nullptr;
  decltype(&::cublasLtMatmulPreferenceDestroy) preference_destroy = nullptr;

  /// kUnavailable when the library lacks one.
  [[nodiscard]] Status find_all(void* library);
};

template <typename Function>
Status find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function != nullptr) return {};
  return Status::unavailable(std::string("it has no function ") + name);
}

Status Functions::find_all(void* library) {
  WEIGHTD_RETURN_IF_ERROR(find(library, "cublasLtCreate", create));
  WEIGHTD_RETURN_IF_ERROR(find(library, "cublasLtDestroy", destroy));
  WEIGHTD_RETURN_IF_ERROR(find(library, "cublasLtGetVersion", get_version));
  WEIGHTD_RETURN_IF_ERROR(find(library, "cublasLtGetStatusName", status_name));
  WEIGHTD_RETURN_IF_ERROR(find(library, "cublasLtMatmul", matmul));
  WEIGHTD_RETURN_IF_ERROR(find(library, "cublasLtMatmulAlgoGetHeuristic", heuristic));
  WEIGHTD_RETURN_IF_ERROR(find(library, "cublasLtMatmulDescCreate", operation_create));
  WEIGHTD_RETURN_IF_ERROR(find(library, "cublasLtMatmulDescSetAttribute", operation_set));
  WEIGHTD_RETURN_IF_ERROR(find(library, "cublasLtMatmulDescDestroy", operation_destroy));
  WEIGHTD_RETURN_IF_ERROR(find(library, "cublasLtMatrixLayoutCreate", layout_create));
  WEIGHTD_RETURN_IF_ERROR(find(library, "cublasLtMatrixLayoutDestroy", layout_destroy));
  WEIGHTD_RETURN_IF_ERROR(find(library, "cublasLtMatmulPreferenceCreate", preference_create));
  WEIGHTD_RETURN_IF_ERROR(find(library, "cublasLtMatmulPreferenceSetAttribute", preference_set));
  return find(library, "cublasLtMatmulPreferenceDestroy", preference_destroy);
}

/// Never unloaded: the library has device code and threads of its own.
constexpr int kMode = RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE;

void* open_any() {
  for (const char* name : kNames) {
    if (void* library = dlopen(name, kMode | RTLD_NOLOAD)) return library;
  }
  for (const char* name : kNames) {
    if (void* library = dlopen(name, kMode)) return library;
  }
  for (const char* name : kNames) {
    if (void* library = dlopen((std::string(kUsualFolder) + name).c_str(), kMode)) return library;
  }
  return nullptr;
}

Result<Functions> load_library() {
  const char* path = std::getenv(kVariable);
  if (path != nullptr && *path == '\0') path = nullptr;
  void* library = path != nullptr ? dlopen(path, kMode) : open_any();
  if (library == nullptr && path != nullptr) {
    const char* reason = dlerror();
    return Status::unavailable(std::string("cuBLASLt: ") + kVariable + " names '" + printable(path) +
                               "', which does not load: " + printable(reason == nullptr ? "no reason given" : reason));
  }
  if (library == nullptr) {
    return Status::unavailable(std::string("cuBLASLt: neither ") + kNames[0] + " nor " + kNames[1] + " found by the loader or in " +
                               std::string(kUsualFolder) + "; " + kVariable + " may name the file");
  }
  Functions functions;
  const std::string what = std::string("cuBLASLt: ") + (path != nullptr ? printable(path) : "the library found") + " is not usable";
  if (const Status status = functions.find_all(library); !status.ok()) return status.with_context(what);
  return functions;
}

Status refuse(const std::string& rule) { return Status::invalid_argument("multiply: " + rule); }

/// kCuda with the call's name and cuBLASLt's own.
Status status_of(const Functions& functions, cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return {};
  return Status::cuda(std::string(call) + ": " + functions.status_name(status));
}

/// What decides about the algorithm. In elements and bytes.
struct Key {
  uint64_t n = 0, k = 0, m = 0;
  int64_t w_stride = 0, x_stride = 0, y_stride = 0;
  uint32_t w_alignment = 0, x_alignment = 0, y_alignment = 0;
  bool workspace = false;
  auto operator<=>(const Key&) const = default;

  [[nodiscard]] std::string to_string() const {
    return "[" + std::to_string(m) + ", " + std::to_string(k) + "] · [" + std::to_string(n) + ", " + std::to_string(k) + "]ᵀ";
  }
};

uint32_t alignment_of(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  return static_cast<uint32_t>(uintptr_t{1} << std::countr_zero(address | kAlignment));
}

/// Rows apart; a single row may come with any stride.
int64_t stride_of(uint64_t rows, uint64_t cols, int64_t stride) { return rows > 1 ? stride : static_cast<int64_t>(cols); }

Key key_of(const ConstBf16Matrix& w, const ConstBf16Matrix& x, const Bf16Matrix& y, const std::byte* workspace) {
  Key key;
  key.n = w.rows;
  key.k = w.cols;
  key.m = x.rows;
  key.w_stride = stride_of(w.rows, w.cols, w.row_stride);
  key.x_stride = stride_of(x.rows, x.cols, x.row_stride);
  key.y_stride = stride_of(y.rows, y.cols, y.row_stride);
  key.w_alignment = alignment_of(w.data);
  key.x_alignment = alignment_of(x.data);
  key.y_alignment = alignment_of(y.data);
  key.workspace = workspace != nullptr;
  return key;
}

Status check_product(const ConstBf16Matrix& w, const ConstBf16Matrix& x, const Bf16Matrix& y, ByteRange workspace) {
  if (x.cols != w.cols || y.rows != x.rows || y.cols != w.rows) {
    return refuse("w [" + std::to_string(w.rows) + ", " + std::to_string(w.cols) + "], x [" + std::to_string(x.rows) + ", " +
                  std::to_string(x.cols) + "] and y [" + std::to_string(y.rows) + ", " + std::to_string(y.cols) +
                  "] do not fit together");
  }
  WEIGHTD_ASSIGN_OR_RETURN(const ByteRange w_bytes, check_bf16(w.data, w.rows, w.cols, w.row_stride, "multiply", "w"));
  WEIGHTD_ASSIGN_OR_RETURN(const ByteRange x_bytes, check_bf16(x.data, x.rows, x.cols, x.row_stride, "multiply", "x"));
  WEIGHTD_ASSIGN_OR_RETURN(const ByteRange y_bytes, check_bf16(y.data, y.rows, y.cols, y.row_stride, "multiply", "y"));
  if (y_bytes.overlaps(w_bytes) || y_bytes.overlaps(x_bytes)) return refuse("y overlaps w or x");
  if (workspace.begin % kAlignment != 0) return refuse("the workspace must be 256-byte aligned");
  if (workspace.overlaps(w_bytes) || workspace.overlaps(x_bytes) || workspace.overlaps(y_bytes)) {
    return refuse("the workspace overlaps a matrix");
  }
  return {};
}

/// An object of cuBLASLt, destroyed by its own function. Made by the function that fills in `object`.
template <typename T>
class Owned {
 public:
  explicit Owned(cublasStatus_t (*destroy)(T)) : destroy_(destroy) {}
  ~Owned() {
    if (object != nullptr) (void)destroy_(object);
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  T object = nullptr;

 private:
  cublasStatus_t (*destroy_)(T);
};

/// One planned product. cuBLASLt is column-major: yᵀ [n, m] = w · xᵀ, where its matrices are our rows as columns. So A is wᵀ [k, n]
/// transposed, B is xᵀ [k, m], D is yᵀ [n, m], and leading dimensions are our row strides.
struct Product {
  explicit Product(const Functions& functions)
      : operation(functions.operation_destroy),
        w(functions.layout_destroy),
        x(functions.layout_destroy),
        y(functions.layout_destroy) {}

  [[nodiscard]] Status create(const Functions& functions, cublasLtHandle_t handle, const Key& key);

  Owned<cublasLtMatmulDesc_t> operation;
  Owned<cublasLtMatrixLayout_t> w, x, y;
  cublasLtMatmulAlgo_t algorithm{};

 private:
  [[nodiscard]] Status describe(const Functions& functions, const Key& key);
  [[nodiscard]] Status choose(const Functions& functions, cublasLtHandle_t handle, const Key& key);
};

Status Product::describe(const Functions& functions, const Key& key) {
  constexpr cublasOperation_t kTranspose = CUBLAS_OP_T;
  cublasStatus_t status = functions.operation_create(&operation.object, CUBLAS_COMPUTE_32F, CUDA_R_32F);
  if (status == CUBLAS_STATUS_SUCCESS) {
    status = functions.operation_set(operation.object, CUBLASLT_MATMUL_DESC_TRANSA, &kTranspose, sizeof kTranspose);
  }
  if (status == CUBLAS_STATUS_SUCCESS) status = functions.layout_create(&w.object, CUDA_R_16BF, key.k, key.n, key.w_stride);
  if (status == CUBLAS_STATUS_SUCCESS) status = functions.layout_create(&x.object, CUDA_R_16BF, key.k, key.m, key.x_stride);
  if (status == CUBLAS_STATUS_SUCCESS) status = functions.layout_create(&y.object, CUDA_R_16BF, key.n, key.m, key.y_stride);
  return status_of(functions, status, "cuBLASLt descriptors");
}

Status Product::choose(const Functions& functions, cublasLtHandle_t handle, const Key& key) {
  Owned<cublasLtMatmulPreference_t> preference(functions.preference_destroy);
  cublasStatus_t status = functions.preference_create(&preference.object);
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    if (status == CUBLAS_STATUS_SUCCESS) status = functions.preference_set(preference.object, attribute, &value, sizeof value);
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, key.workspace ? Blas::kWorkspaceBytes : uint64_t{0});
  // The other schemes add partial sums in the output's type.
  set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key.w_alignment);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key.x_alignment);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key.y_alignment);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key.y_alignment);
  WEIGHTD_RETURN_IF_ERROR(status_of(functions, status, "cuBLASLt preferences"));

  cublasLtMatmulHeuristicResult_t result{};
  int found = 0;
  status =
      functions.heuristic(handle, operation.object, w.object, x.object, y.object, y.object, preference.object, 1, &result, &found);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE ||
      (status == CUBLAS_STATUS_SUCCESS && found == 0)) {
    return Status::unsupported("cuBLASLt has no algorithm for " + key.to_string());
  }
  WEIGHTD_RETURN_IF_ERROR(status_of(functions, status, "cublasLtMatmulAlgoGetHeuristic"));
  WEIGHTD_RETURN_IF_ERROR(status_of(functions, result.state, "cublasLtMatmulAlgoGetHeuristic"));
  algorithm = result.algo;
  return {};
}

Status Product::create(const Functions& functions, cublasLtHandle_t handle, const Key& key) {
  WEIGHTD_RETURN_IF_ERROR(describe(functions, key));
  return choose(functions, handle, key);
}

}  // namespace

struct Blas::Impl {
  Functions functions;
  cublasLtHandle_t handle = nullptr;
  int device = 0;
  std::mutex mutex;
  std::map<Key, std::shared_ptr<const Product>> products;  // under mutex

  ~Impl() {
    products.clear();
    if (handle != nullptr) (void)functions.destroy(handle);
  }

  [[nodiscard]] Result<std::shared_ptr<const Product>> product(const Key& key) {
    const std::lock_guard lock(mutex);
    if (const auto kept = products.find(key); kept != products.end()) return kept->second;
    auto made = std::make_shared<Product>(functions);
    WEIGHTD_RETURN_IF_ERROR(made->create(functions, handle, key));
    if (products.size() >= kMaxProducts) products.clear();  // the heuristic decides the same again
    products.emplace(key, made);
    return std::shared_ptr<const Product>(std::move(made));
  }
};

Blas::Blas(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Blas::~Blas() = default;

Result<std::shared_ptr<Blas>> Blas::open() {
  WEIGHTD_ASSIGN_OR_RETURN(const Functions functions, load_library());
  auto impl = std::make_unique<Impl>();
  impl->functions = functions;
  WEIGHTD_RETURN_IF_ERROR(status_from_cuda(cudaGetDevice(&impl->device), "cudaGetDevice"));
  WEIGHTD_RETURN_IF_ERROR(status_of(functions, functions.create(&impl->handle), "cublasLtCreate"));
  return std::shared_ptr<Blas>(new Blas(std::move(impl)));
}

std::string Blas::version() const {
  const size_t number = impl_->functions.get_version();  // CUBLAS_VERSION of the library
  std::string text = std::to_string(number / 10000) + "." + std::to_string(number / 100 % 100) + "." + std::to_string(number % 100);
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(impl_->functions.create), &info) == 0 || info.dli_fname == nullptr) return text;
  const std::string_view path = info.dli_fname;
  return text + " (" + printable(path.substr(path.rfind('/') + 1)) + ")";
}

Status Blas::multiply(ConstBf16Matrix w, ConstBf16Matrix x, Bf16Matrix y, std::byte* workspace, cudaStream_t stream) {
  const auto workspace_begin = reinterpret_cast<uintptr_t>(workspace);
  const ByteRange workspace_bytes{workspace_begin, workspace == nullptr ? 0 : workspace_begin + kWorkspaceBytes};
  WEIGHTD_RETURN_IF_ERROR(check_product(w, x, y, workspace_bytes));
  if (y.rows == 0 || y.cols == 0) return {};
  if (w.cols == 0) {
    const auto pitch = static_cast<size_t>(stride_of(y.rows, y.cols, y.row_stride)) * sizeof(uint16_t);
    return status_from_cuda(cudaMemset2DAsync(y.data, pitch, 0, y.cols * sizeof(uint16_t), y.rows, stream), "multiply");
  }
  int device = 0;
  WEIGHTD_RETURN_IF_ERROR(status_from_cuda(cudaGetDevice(&device), "cudaGetDevice"));
  if (device != impl_->device) {
    return refuse("device " + std::to_string(device) + " is current, the handle is for " + std::to_string(impl_->device));
  }
  WEIGHTD_ASSIGN_OR_RETURN(const std::shared_ptr<const Product> product, impl_->product(key_of(w, x, y, workspace)));
  constexpr float kOne = 1;
  constexpr float kZero = 0;
  const cublasStatus_t status =
      impl_->functions.matmul(impl_->handle, product->operation.object, &kOne, w.data, product->w.object, x.data, product->x.object,
                              &kZero, y.data, product->y.object, y.data, product->y.object, &product->algorithm, workspace,
                              workspace == nullptr ? 0 : kWorkspaceBytes, stream);
  return status_of(impl_->functions, status, "cublasLtMatmul");
}

uint64_t exact_workspace_bytes(uint64_t n, uint64_t k) {
  uint64_t bytes = 0;
  const uint64_t limit = std::numeric_limits<uint64_t>::max() - Blas::kWorkspaceBytes - kAlignment;
  if (__builtin_mul_overflow(n, k, &bytes) || __builtin_mul_overflow(bytes, sizeof(uint16_t), &bytes) || bytes > limit) {
    return std::numeric_limits<uint64_t>::max();
  }
  return f12::align_up(bytes, kAlignment) + Blas::kWorkspaceBytes;
}

Status multiply_exact(Blas& blas, const F12DeviceMatrix& w, ConstBf16Matrix x, Bf16Matrix y, std::byte* workspace,
                      cudaStream_t stream) {
  if (workspace == nullptr) return refuse("exact mode needs a workspace");
  const uint64_t bytes = exact_workspace_bytes(w.n, w.k);
  if (bytes == std::numeric_limits<uint64_t>::max()) return refuse("the weight is larger than any memory");
  auto* words = reinterpret_cast<uint16_t*>(workspace);
  std::byte* blas_workspace = workspace + (bytes - Blas::kWorkspaceBytes);
  const ConstBf16Matrix raw{words, w.n, w.k, static_cast<int64_t>(w.k)};
  // All checks come before the decompression, which may not write over x or y.
  const auto begin = reinterpret_cast<uintptr_t>(workspace);
  const ByteRange whole{begin, begin + bytes};
  WEIGHTD_RETURN_IF_ERROR(check_product(raw, x, y, {whole.end - Blas::kWorkspaceBytes, whole.end}));
  WEIGHTD_ASSIGN_OR_RETURN(const ByteRange x_bytes, check_bf16(x.data, x.rows, x.cols, x.row_stride, "multiply", "x"));
  if (x_bytes.overlaps(whole)) return refuse("the workspace overlaps a matrix");
  if (y.rows > 0) WEIGHTD_RETURN_IF_ERROR(launch_decompress(w, 0, w.n, words, static_cast<int64_t>(w.k), stream));
  return blas.multiply(raw, x, y, blas_workspace, stream);
}

}  // namespace weightd::kernels
