// SPDX-License-Identifier: Apache-2.0
#include "tools/bench/gpu/cublas.h"

#include <cublasLt.h>
#include <cublas_v2.h>
#include <dlfcn.h>

#include <array>
#include <cstdlib>
#include <string_view>
#include <utility>
#include <vector>

#include "base/text.h"
#include "tools/bench/gpu/measure.h"

namespace weightd::tools {
namespace {

constexpr uint64_t kWorkspaceBytes = uint64_t{64} << 20;

/// The entry points that are used. A library that lacks one is no cuBLAS.
struct Entries {
  decltype(&::cublasCreate_v2) create = nullptr;
  decltype(&::cublasDestroy_v2) destroy = nullptr;
  decltype(&::cublasGetVersion_v2) get_version = nullptr;
  decltype(&::cublasSetStream_v2) set_stream = nullptr;
  decltype(&::cublasSetWorkspace_v2) set_workspace = nullptr;
  cublasStatus_t (*gemm_ex)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int, int, const void*, const void*,
                            cudaDataType, int, const void*, cudaDataType, int, const void*, void*, cudaDataType, int,
                            cublasComputeType_t, cublasGemmAlgo_t) = nullptr;
  decltype(&::cublasLtCreate) lt_create = nullptr;
  decltype(&::cublasLtDestroy) lt_destroy = nullptr;
  decltype(&::cublasLtMatmul) lt_matmul = nullptr;
  decltype(&::cublasLtMatmulDescCreate) lt_desc_create = nullptr;
  decltype(&::cublasLtMatmulDescDestroy) lt_desc_destroy = nullptr;
  decltype(&::cublasLtMatmulDescSetAttribute) lt_desc_set = nullptr;
  decltype(&::cublasLtMatrixLayoutCreate) lt_layout_create = nullptr;
  decltype(&::cublasLtMatrixLayoutDestroy) lt_layout_destroy = nullptr;
  decltype(&::cublasLtMatmulPreferenceCreate) lt_preference_create = nullptr;
  decltype(&::cublasLtMatmulPreferenceDestroy) lt_preference_destroy = nullptr;
  decltype(&::cublasLtMatmulPreferenceSetAttribute) lt_preference_set = nullptr;
  decltype(&::cublasLtMatmulAlgoGetHeuristic) lt_heuristic = nullptr;
};

template <typename Function>
void find(void* library, const char* name, Function& function, std::string& missing) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  if (function == nullptr && missing.empty()) missing = name;
}

/// Symbols of cuBLASLt are found through cuBLAS too, which depends on it.
Result<Entries> find_entries(void* library, const std::string& name) {
  Entries entries;
  std::string missing;
  find(library, "cublasCreate_v2", entries.create, missing);
  find(library, "cublasDestroy_v2", entries.destroy, missing);
  find(library, "cublasGetVersion_v2", entries.get_version, missing);
  find(library, "cublasSetStream_v2", entries.set_stream, missing);
  find(library, "cublasSetWorkspace_v2", entries.set_workspace, missing);
  find(library, "cublasGemmEx", entries.gemm_ex, missing);
  find(library, "cublasLtCreate", entries.lt_create, missing);
  find(library, "cublasLtDestroy", entries.lt_destroy, missing);
  find(library, "cublasLtMatmul", entries.lt_matmul, missing);
  find(library, "cublasLtMatmulDescCreate", entries.lt_desc_create, missing);
  find(library, "cublasLtMatmulDescDestroy", entries.lt_desc_destroy, missing);
  find(library, "cublasLtMatmulDescSetAttribute", entries.lt_desc_set, missing);
  find(library, "cublasLtMatrixLayoutCreate", entries.lt_layout_create, missing);
  find(library, "cublasLtMatrixLayoutDestroy", entries.lt_layout_destroy, missing);
  find(library, "cublasLtMatmulPreferenceCreate", entries.lt_preference_create, missing);
  find(library, "cublasLtMatmulPreferenceDestroy", entries.lt_preference_destroy, missing);
  find(library, "cublasLtMatmulPreferenceSetAttribute", entries.lt_preference_set, missing);
  find(library, "cublasLtMatmulAlgoGetHeuristic", entries.lt_heuristic, missing);
  if (!missing.empty()) return Status::unavailable(printable(name) + ": has no " + missing);
  return entries;
}

Status check_blas(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return {};
  return Status::cuda(std::string(call) + ": status " + std::to_string(static_cast<int>(status)));
}

struct Library {
  void* handle = nullptr;
  std::string name;
};

/// Stays loaded as long as the process: cuBLAS does not like to be unloaded.
Result<Library> load_library() {
  std::vector<std::string> names = {"libcublas.so.13", "libcublas.so.12", "/usr/local/cuda/lib64/libcublas.so"};
  if (const char* named = std::getenv("WEIGHTD_CUBLAS"); named != nullptr && *named != '\0') names = {named};
  std::string tried;
  for (const std::string& name : names) {
    if (void* handle = ::dlopen(name.c_str(), RTLD_NOW | RTLD_GLOBAL); handle != nullptr) return Library{handle, name};
    const char* reason = ::dlerror();
    tried += (tried.empty() ? "" : "; ") + printable(reason != nullptr ? reason : name);
  }
  return Status::unavailable("no cuBLAS to compare with (WEIGHTD_CUBLAS can name libcublas.so): " + tried);
}

}  // namespace

struct Cublas::State {
  Entries entries;
  std::string name;
  cublasHandle_t handle = nullptr;
  cublasLtHandle_t lt = nullptr;
  DeviceBytes workspace;

  ~State() {
    if (lt != nullptr) (void)entries.lt_destroy(lt);
    if (handle != nullptr) (void)entries.destroy(handle);
  }
};

struct LtProblem::State {
  const Cublas::State* blas = nullptr;
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t w = nullptr, x = nullptr, y = nullptr;
  std::vector<cublasLtMatmulHeuristicResult_t> found;

  ~State() {
    for (const cublasLtMatrixLayout_t layout : {w, x, y}) {
      if (layout != nullptr) (void)blas->entries.lt_layout_destroy(layout);
    }
    if (operation != nullptr) (void)blas->entries.lt_desc_destroy(operation);
  }

  /// cuBLAS counts columns first: w is [k, n] transposed, x is [k, m], y is [n, m].
  Status describe(uint64_t n, uint64_t k, uint64_t m) {
    const Entries& call = blas->entries;
    WEIGHTD_RETURN_IF_ERROR(
        check_blas(call.lt_desc_create(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate"));
    const cublasOperation_t transposed = CUBLAS_OP_T;
    WEIGHTD_RETURN_IF_ERROR(check_blas(call.lt_desc_set(operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed),
                                       "cublasLtMatmulDescSetAttribute"));
    const auto layout = [&](cublasLtMatrixLayout_t* out, uint64_t rows, uint64_t cols) {
      return check_blas(call.lt_layout_create(out, CUDA_R_16BF, rows, cols, static_cast<int64_t>(rows)),
                        "cublasLtMatrixLayoutCreate");
    };
    WEIGHTD_RETURN_IF_ERROR(layout(&w, k, n));
    WEIGHTD_RETURN_IF_ERROR(layout(&x, k, m));
    return layout(&y, n, m);
  }

  Status ask_heuristics() {
    const Entries& call = blas->entries;
    cublasLtMatmulPreference_t preference = nullptr;
    WEIGHTD_RETURN_IF_ERROR(check_blas(call.lt_preference_create(&preference), "cublasLtMatmulPreferenceCreate"));
    const size_t workspace = kWorkspaceBytes;
    std::array<cublasLtMatmulHeuristicResult_t, Cublas::kMostAlgorithms> results{};
    int count = 0;
    cublasStatus_t status =
        call.lt_preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace);
    if (status == CUBLAS_STATUS_SUCCESS) {
      status = call.lt_heuristic(blas->lt, operation, w, x, y, y, preference, Cublas::kMostAlgorithms, results.data(), &count);
    }
    (void)call.lt_preference_destroy(preference);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED) return {};
    WEIGHTD_RETURN_IF_ERROR(check_blas(status, "cublasLtMatmulAlgoGetHeuristic"));
    for (int i = 0; i < count; ++i) {
      const cublasLtMatmulHeuristicResult_t& result = results[static_cast<size_t>(i)];
      if (result.state == CUBLAS_STATUS_SUCCESS && result.workspaceSize <= kWorkspaceBytes) found.push_back(result);
    }
    return {};
  }
};

LtProblem::LtProblem(std::unique_ptr<State> state) : state_(std::move(state)) {}
LtProblem::LtProblem(LtProblem&&) noexcept = default;
LtProblem::~LtProblem() = default;

int LtProblem::algorithms() const { return static_cast<int>(state_->found.size()); }

Status LtProblem::multiply(int algorithm, const BlasOperands& operands, cudaStream_t stream) const {
  const float one = 1, zero = 0;
  const cublasLtMatmulHeuristicResult_t& chosen = state_->found.at(static_cast<size_t>(algorithm));
  return check_blas(state_->blas->entries.lt_matmul(state_->blas->lt, state_->operation, &one, operands.w, state_->w, operands.x,
                                                    state_->x, &zero, operands.y, state_->y, operands.y, state_->y, &chosen.algo,
                                                    state_->blas->workspace.data(), kWorkspaceBytes, stream),
                    "cublasLtMatmul");
}

Cublas::Cublas(std::unique_ptr<State> state) : state_(std::move(state)) {}
Cublas::~Cublas() = default;

Result<std::unique_ptr<Cublas>> Cublas::open() {
  WEIGHTD_ASSIGN_OR_RETURN(const Library library, load_library());
  auto state = std::make_unique<State>();
  WEIGHTD_ASSIGN_OR_RETURN(state->entries, find_entries(library.handle, library.name));
  state->name = library.name;
  WEIGHTD_RETURN_IF_ERROR(check_blas(state->entries.create(&state->handle), "cublasCreate"));
  WEIGHTD_RETURN_IF_ERROR(check_blas(state->entries.lt_create(&state->lt), "cublasLtCreate"));
  WEIGHTD_ASSIGN_OR_RETURN(state->workspace, DeviceBytes::allocate(kWorkspaceBytes));
  return std::unique_ptr<Cublas>(new Cublas(std::move(state)));
}

Status Cublas::multiply(uint64_t n, uint64_t k, uint64_t m, const BlasOperands& operands, cudaStream_t stream) const {
  const float one = 1, zero = 0;
  const auto size = [](uint64_t value) { return static_cast<int>(value); };
  const Entries& call = state_->entries;
  // A new stream takes the workspace away.
  WEIGHTD_RETURN_IF_ERROR(check_blas(call.set_stream(state_->handle, stream), "cublasSetStream"));
  WEIGHTD_RETURN_IF_ERROR(
      check_blas(call.set_workspace(state_->handle, state_->workspace.data(), kWorkspaceBytes), "cublasSetWorkspace"));
  return check_blas(call.gemm_ex(state_->handle, CUBLAS_OP_T, CUBLAS_OP_N, size(n), size(m), size(k), &one, operands.w, CUDA_R_16BF,
                                 size(k), operands.x, CUDA_R_16BF, size(k), &zero, operands.y, CUDA_R_16BF, size(n),
                                 CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
                    "cublasGemmEx");
}

Result<LtProblem> Cublas::problem(uint64_t n, uint64_t k, uint64_t m) const {
  auto problem = std::make_unique<LtProblem::State>();
  problem->blas = state_.get();
  WEIGHTD_RETURN_IF_ERROR(problem->describe(n, k, m));
  WEIGHTD_RETURN_IF_ERROR(problem->ask_heuristics());
  return LtProblem(std::move(problem));
}

std::string Cublas::version() const {
  int version = 0;
  (void)state_->entries.get_version(state_->handle, &version);
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." + std::to_string(version % 100) + " (" +
         printable(state_->name) + ")";
}

}  // namespace weightd::tools
