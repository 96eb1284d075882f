// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm_launch.h"

#include <bit>
#include <limits>

#include "kernels/gemm_device.cuh"
#include "kernels/launch.h"

namespace weightd::kernels {
namespace {

constexpr uint64_t kMaxGridX = (uint64_t{1} << 31) - 1;
constexpr uint64_t kMaxTensorExtent = std::numeric_limits<int32_t>::max();

using EncodeTensorMap = decltype(&cuTensorMapEncodeTiled);

Status refuse(const std::string& rule) { return Status::invalid_argument("launch_gemm: " + rule); }

/// `extents` and `box` count elements of `element_bytes`, the fastest dimension first; `strides` are the bytes of a step in the
/// others.
template <size_t kRank>
Result<CUtensorMap> encode_map(const GemmDevice& device, CUtensorMapDataType type, CUtensorMapSwizzle swizzle, const void* base,
                               const cuuint64_t (&extents)[kRank], const cuuint64_t (&strides)[kRank - 1],
                               const cuuint32_t (&box)[kRank]) {
  const auto encode = reinterpret_cast<EncodeTensorMap>(device.encode_tensor_map);
  if (encode == nullptr) return refuse("the plan wants tensor copies, which this driver does not offer");
  CUtensorMap map;
  cuuint32_t element_strides[kRank];
  for (cuuint32_t& stride : element_strides) stride = 1;
  const CUresult result =
      encode(&map, type, kRank, const_cast<void*>(base), extents, strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
             swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return Status(StatusCode::kCuda, "launch_gemm: cuTensorMapEncodeTiled failed with " + std::to_string(static_cast<int>(result)));
  }
  return map;
}

/// Boxes of 64 columns and a block's part of the tokens.
Result<CUtensorMap> encode_x(const GemmDevice& device, const GemmPlan& plan, const ConstBf16Matrix& x) {
  const auto row_stride = static_cast<cuuint64_t>(x.rows > 1 ? x.row_stride : static_cast<int64_t>((x.cols + 7) / 8 * 8));
  return encode_map<2>(device, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_SWIZZLE_128B, x.data, {x.cols, x.rows},
                       {row_stride * 2}, {f12::kTileCols, plan.token_block / plan.sharing});
}

/// The codes as words of 8 bytes, [units][tiles][tile]; a box is one stage.
Result<CUtensorMap> encode_weights(const GemmDevice& device, const GemmPlan& plan, uint32_t tile_bytes, const F12DeviceMatrix& w) {
  const f12::Geometry geometry{w.n, w.k, 1};
  return encode_map<3>(device, CU_TENSOR_MAP_DATA_TYPE_INT64, CU_TENSOR_MAP_SWIZZLE_NONE, w.codes,
                       {tile_bytes / 8, geometry.tiles(), geometry.units()}, {tile_bytes, geometry.tiles() * tile_bytes},
                       {tile_bytes / 8, plan.tiles_per_stage, plan.units_per_pass});
}

Status check_call(const GemmKernels& kernels, const GemmPlan& plan, const F12DeviceMatrix& w, const ConstBf16Matrix& x,
                  const Bf16Matrix& y) {
  if (kernels.tile_bytes == f12::kTileBytes) WEIGHTD_RETURN_IF_ERROR(check_matrix(w, "launch_gemm"));
  if (plan.n != w.n || plan.k != w.k) return refuse("the plan " + plan.to_string() + " is for another shape");
  if (x.cols != w.k) return refuse("x has " + std::to_string(x.cols) + " columns, w has k = " + std::to_string(w.k));
  if (y.cols != w.n || y.rows != x.rows) return refuse("y is not [m, n]");
  WEIGHTD_ASSIGN_OR_RETURN(const ByteRange read, check_bf16(x.data, x.rows, x.cols, x.row_stride, "launch_gemm", "x"));
  WEIGHTD_ASSIGN_OR_RETURN(const ByteRange written, check_bf16(y.data, y.rows, y.cols, y.row_stride, "launch_gemm", "y"));
  if (written.overlaps(read)) return refuse("y overlaps x");
  return check_no_overlap(w, kernels.tile_bytes, written, "launch_gemm");
}

GemmArgs make_args(const GemmPlan& plan, uint32_t tile_bytes, const F12DeviceMatrix& w, const ConstBf16Matrix& x,
                   const Bf16Matrix& y) {
  const f12::Geometry geometry{w.n, w.k, 1};
  return {w,
          plan,
          static_cast<uint32_t>(geometry.units()),
          static_cast<uint32_t>(geometry.tiles()),
          static_cast<uint32_t>(geometry.groups()),
          static_cast<uint32_t>((x.rows + plan.token_block - 1) / plan.token_block),
          x.rows,
          x.data,
          x.row_stride,
          y.data,
          y.row_stride,
          vector_aligned(x.data, x.row_stride),
          vector_aligned(y.data, y.row_stride),
          BulkShared(plan, tile_bytes),
          DirectShared(plan),
          WgmmaShared(plan, tile_bytes)};
}

/// How many clusters of `size` blocks of the warpgroup kernel run at once.
Result<uint32_t> clusters_at_once(const void* kernel, uint32_t size, uint32_t shared_bytes) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {size, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(size);
  config.blockDim = dim3(32 * kWarpgroupWarps * (kMaxWarpgroups + 1));
  config.dynamicSmemBytes = shared_bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  WEIGHTD_RETURN_IF_ERROR(status_from_cuda(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config), "prepare_gemm"));
  return static_cast<uint32_t>(clusters);
}

const void* wgmma_kernel(const GemmKernels& kernels, const GemmPlan& plan) {
  const uint32_t shape = plan.units_per_warp == 2 ? 1 : plan.warpgroups == 2 ? 2 : 0;
  return kernels.wgmma[shape][std::countr_zero(plan.token_block / kMinWgmmaTokenBlock)];
}

/// The i with base * 2^i == extent.
uint32_t power_above(uint32_t extent, uint32_t base) { return static_cast<uint32_t>(std::countr_zero(extent / base)); }

}  // namespace

bool allows_tensor_copy(ConstBf16Matrix x) {
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && (x.rows <= 1 || (x.row_stride > 0 && x.row_stride % 8 == 0)) &&
         x.rows <= kMaxTensorExtent && x.cols <= kMaxTensorExtent;
}

Status raise_shared_limits(const GemmKernels& kernels, uint32_t shared_bytes) {
  const auto raise = [&](const void* kernel) {
    return status_from_cuda(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)), "prepare_gemm");
  };
  for (const void* kernel : kernels.direct) WEIGHTD_RETURN_IF_ERROR(raise(kernel));
  for (const void* kernel : kernels.bulk) WEIGHTD_RETURN_IF_ERROR(raise(kernel));
  for (const auto& row : kernels.wgmma) {
    for (const void* kernel : row) {
      if (kernel != nullptr) WEIGHTD_RETURN_IF_ERROR(raise(kernel));
    }
  }
  return {};
}

Result<GemmDevice> prepare_gemm() {
  GemmDevice device;
  int ordinal = 0;
  int sm_count = 0;
  int shared_bytes = 0;
  int major = 0;
  WEIGHTD_RETURN_IF_ERROR(status_from_cuda(cudaGetDevice(&ordinal), "prepare_gemm"));
  const auto read = [&](int* value, cudaDeviceAttr attribute) {
    return status_from_cuda(cudaDeviceGetAttribute(value, attribute, ordinal), "prepare_gemm");
  };
  WEIGHTD_RETURN_IF_ERROR(read(&sm_count, cudaDevAttrMultiProcessorCount));
  WEIGHTD_RETURN_IF_ERROR(read(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin));
  WEIGHTD_RETURN_IF_ERROR(read(&major, cudaDevAttrComputeCapabilityMajor));
  device.traits = {static_cast<uint32_t>(sm_count), static_cast<uint32_t>(shared_bytes), major >= 9};
  WEIGHTD_RETURN_IF_ERROR(raise_shared_limits(f12_gemm_kernels(), device.traits.shared_bytes));
  // Code for wgmma has a bound of several warpgroups; what the build made for other devices has one of a warp.
  cudaFuncAttributes attributes{};
  WEIGHTD_RETURN_IF_ERROR(status_from_cuda(cudaFuncGetAttributes(&attributes, f12_gemm_kernels().wgmma[0][0]), "prepare_gemm"));
  device.traits.wgmma = attributes.maxThreadsPerBlock > 32;
  if (device.traits.wgmma) {
    WEIGHTD_ASSIGN_OR_RETURN(device.traits.clusters_of_4,
                             clusters_at_once(f12_gemm_kernels().wgmma[0][0], 4, device.traits.shared_bytes));
  }
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &device.encode_tensor_map, 12000, cudaEnableDefault, &found);
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) device.encode_tensor_map = nullptr;
  if (device.encode_tensor_map == nullptr) device.traits.bulk_copy = device.traits.wgmma = false;
  return device;
}

Status launch_gemm_kernels(const GemmKernels& kernels, const GemmDevice& device, const GemmPlan& plan, const F12DeviceMatrix& w,
                           ConstBf16Matrix x, Bf16Matrix y, cudaStream_t stream) {
  WEIGHTD_RETURN_IF_ERROR(check_call(kernels, plan, w, x, y));
  if (x.rows == 0 || w.n == 0) return {};
  GemmArgs args = make_args(plan, kernels.tile_bytes, w, x, y);
  const uint64_t blocks = uint64_t{plan.blocks} * plan.splits * args.token_blocks;
  if (blocks > kMaxGridX) return refuse("too many tokens for one launch");

  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<uint32_t>(blocks));
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  if (plan.kernel == GemmKernel::kDirect) {
    config.blockDim = dim3(32 * plan.units_per_pass * plan.slices);
    void* parameters[] = {&args};
    return status_from_cuda(cudaLaunchKernelExC(&config, kernels.direct[power_above(plan.token_block, 8)], parameters),
                            "launch_gemm");
  }
  if (!allows_tensor_copy(x)) return refuse("the plan wants x 16-byte aligned with a positive stride that is a multiple of 8");
  WEIGHTD_ASSIGN_OR_RETURN(CUtensorMap x_map, encode_x(device, plan, x));
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  if (plan.overlap_previous) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  const void* kernel = nullptr;
  CUtensorMap w_map{};  // kWgmma only
  if (plan.kernel == GemmKernel::kBulk) {
    config.blockDim = dim3(32 * (plan.units_per_pass * plan.slices + 1));
    kernel = kernels.bulk[power_above(plan.token_block, 8)];
  } else {
    config.blockDim = dim3(32 * kWarpgroupWarps * (plan.warpgroups + 1));
    kernel = wgmma_kernel(kernels, plan);
    if (plan.tensor_weights) {
      WEIGHTD_ASSIGN_OR_RETURN(w_map, encode_weights(device, plan, kernels.tile_bytes, w));
    }
    if (plan.splits * plan.sharing > 1) {
      attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
      attributes[config.numAttrs++].val.clusterDim = {plan.splits * plan.sharing, 1, 1};
    }
  }
  void* parameters[] = {&args, &x_map, &w_map};
  return status_from_cuda(cudaLaunchKernelExC(&config, kernel, parameters), "launch_gemm");
}

Status launch_gemm(const GemmDevice& device, const GemmPlan& plan, const F12DeviceMatrix& w, ConstBf16Matrix x, Bf16Matrix y,
                   cudaStream_t stream) {
  return launch_gemm_kernels(f12_gemm_kernels(), device, plan, w, x, y, stream);
}

}  // namespace weightd::kernels
