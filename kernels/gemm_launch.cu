// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm_launch.h"

#include <limits>

#include "kernels/gemm_device.cuh"
#include "kernels/launch.h"

namespace weightd::kernels {
namespace {

constexpr uint64_t kMaxGridX = (uint64_t{1} << 31) - 1;
constexpr uint64_t kMaxTensorExtent = std::numeric_limits<int32_t>::max();

using EncodeTensorMap = decltype(&cuTensorMapEncodeTiled);

Status refuse(const std::string& rule) { return Status::invalid_argument("launch_gemm: " + rule); }

Result<CUtensorMap> encode_x(const GemmDevice& device, const GemmPlan& plan, const ConstBf16Matrix& x) {
  const auto encode = reinterpret_cast<EncodeTensorMap>(device.encode_tensor_map);
  if (encode == nullptr) return refuse("the plan wants tensor copies, which this driver does not offer");
  CUtensorMap map;
  const cuuint64_t extents[2] = {x.cols, x.rows};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(x.rows > 1 ? x.row_stride : static_cast<int64_t>((x.cols + 7) / 8 * 8)) *
                                 2};
  const cuuint32_t box[2] = {f12::kTileCols, plan.token_block};
  const cuuint32_t element_strides[2] = {1, 1};
  const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<uint16_t*>(x.data), extents, strides, box,
                                 element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return Status(StatusCode::kCuda, "launch_gemm: cuTensorMapEncodeTiled failed with " + std::to_string(static_cast<int>(result)));
  }
  return map;
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
          BulkShared(plan, tile_bytes),
          DirectShared(plan)};
}

}  // namespace

bool allows_tensor_copy(ConstBf16Matrix x) {
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && (x.rows <= 1 || (x.row_stride > 0 && x.row_stride % 8 == 0)) &&
         x.rows <= kMaxTensorExtent && x.cols <= kMaxTensorExtent;
}

Status raise_shared_limits(const GemmKernels& kernels, uint32_t shared_bytes) {
  for (const auto& table : {kernels.direct, kernels.bulk}) {
    for (uint32_t i = 0; i < 4; ++i) {
      WEIGHTD_RETURN_IF_ERROR(status_from_cuda(
          cudaFuncSetAttribute(table[i], cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
          "prepare_gemm"));
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
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &device.encode_tensor_map, 12000, cudaEnableDefault, &found);
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) device.encode_tensor_map = nullptr;
  if (device.encode_tensor_map == nullptr) device.traits.bulk_copy = false;
  return device;
}

Status launch_gemm_kernels(const GemmKernels& kernels, const GemmDevice& device, const GemmPlan& plan, const F12DeviceMatrix& w,
                           ConstBf16Matrix x, Bf16Matrix y, cudaStream_t stream) {
  WEIGHTD_RETURN_IF_ERROR(check_call(kernels, plan, w, x, y));
  if (x.rows == 0 || w.n == 0) return {};
  GemmArgs args = make_args(plan, kernels.tile_bytes, w, x, y);
  const uint64_t blocks = uint64_t{plan.blocks} * args.token_blocks;
  if (blocks > kMaxGridX) return refuse("too many tokens for one launch");

  uint32_t index = 0;
  while (index < 3 && (8U << index) < plan.token_block) ++index;
  const uint32_t consumer_warps = plan.units_per_pass * plan.slices;
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.gridDim = dim3(static_cast<uint32_t>(blocks));
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;

  if (plan.kernel == GemmKernel::kDirect) {
    config.blockDim = dim3(32 * consumer_warps);
    void* parameters[] = {&args};
    return status_from_cuda(cudaLaunchKernelExC(&config, kernels.direct[index], parameters), "launch_gemm");
  }
  if (!allows_tensor_copy(x)) return refuse("the plan wants x 16-byte aligned with a positive stride that is a multiple of 8");
  WEIGHTD_ASSIGN_OR_RETURN(CUtensorMap x_map, encode_x(device, plan, x));
  config.blockDim = dim3(32 * (consumer_warps + 1));
  config.numAttrs = plan.overlap_previous ? 1 : 0;
  void* parameters[] = {&args, &x_map};
  return status_from_cuda(cudaLaunchKernelExC(&config, kernels.bulk[index], parameters), "launch_gemm");
}

Status launch_gemm(const GemmDevice& device, const GemmPlan& plan, const F12DeviceMatrix& w, ConstBf16Matrix x, Bf16Matrix y,
                   cudaStream_t stream) {
  return launch_gemm_kernels(f12_gemm_kernels(), device, plan, w, x, y, stream);
}

}  // namespace weightd::kernels
