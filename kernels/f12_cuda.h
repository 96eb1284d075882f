// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/gemm_plan.h"
#include "weightd/status.h"
#include "weightd/types.h"

/// Device kernels over the resident form f12 (store/FORMAT.md; lane maps in kernels/LAYOUT.md).
///
/// Every launch below works on `stream` of the current device, allocates nothing, waits for nothing, keeps no state, and may be
/// captured into a CUDA graph. Pointers are device pointers, borrowed until the stream has passed the launch. The planes have
/// passed f12 validation (the loader does that): damaged planes give wrong numbers, but never an access outside the planes.
/// kInvalidArgument: a shape, stride or alignment breaks the rule stated here. kCuda: the launch was refused. Nothing is written in
/// either case.
namespace weightd::kernels {

/// One f12 matrix [n, k] on the device. codes, windows, records and pool are 16-byte aligned (an arena aligns them to 256); pool is
/// the start of the model's pool and may be null when pool_bytes is 0. n and k are at most 2^32 - 1.
struct F12DeviceMatrix {
  const std::byte* codes = nullptr;
  const std::byte* windows = nullptr;
  const std::byte* records = nullptr;
  const std::byte* pool = nullptr;
  uint64_t pool_bytes = 0;
  uint64_t n = 0, k = 0;
};

/// Rows [begin, end) of w as a matrix of its own (a view: q out of a merged q/k/v). begin is a multiple of 16 and begin <= end <=
/// w.n; anything else is the caller's bug and aborts.
[[nodiscard]] F12DeviceMatrix slice_rows(const F12DeviceMatrix& w, uint64_t begin, uint64_t end);

/// out[r - begin, :] = w[r, :] for r in [begin, end): the BF16 words, bit for bit.
///   out  2-byte aligned; rows `out_stride` elements apart, at least k if there is more than one row; overlaps no plane of w.
///        Fast when out is 16-byte aligned and out_stride a multiple of 8.
/// begin and end may be any rows. Elements between the rows are not touched.
[[nodiscard]] Status launch_decompress(const F12DeviceMatrix& w, uint64_t begin, uint64_t end, uint16_t* out, int64_t out_stride,
                                       cudaStream_t stream);

/// out[i, :] = w[rows[i], :] for i in [0, count): an embedding look-up. `rows` is on the device. An index outside [0, n) fills its
/// row with NaN (0x7fff), so that it is not taken for a weight. Strides and alignment as in launch_decompress.
[[nodiscard]] Status launch_gather_rows(const F12DeviceMatrix& w, const int32_t* rows, uint64_t count, uint16_t* out,
                                        int64_t out_stride, cudaStream_t stream);
[[nodiscard]] Status launch_gather_rows(const F12DeviceMatrix& w, const int64_t* rows, uint64_t count, uint16_t* out,
                                        int64_t out_stride, cudaStream_t stream);

/// What a launch needs to know of a device. Made once per device by prepare_gemm; plain data, copyable, shared by threads.
struct GemmDevice {
  DeviceTraits traits;
  void* encode_tensor_map = nullptr;  // the driver's cuTensorMapEncodeTiled; null where there is none
};

/// Reads the current device's traits and raises the shared-memory limit of the GEMM kernels there. Call it once for each device
/// (and again after a device reset) before launch_gemm. kCuda: no device, or one that this build has no code for.
[[nodiscard]] Result<GemmDevice> prepare_gemm();

/// Whether x meets the tensor copy's conditions: 16-byte aligned base, positive stride that is a multiple of 8 elements, extents
/// below 2^31. Feed the answer to plan_gemm.
[[nodiscard]] bool allows_tensor_copy(ConstBf16Matrix x);

/// y = x · wᵀ on `stream`; decodes w tile by tile in registers and never writes it out.
///   x  BF16 [m, k];  y  BF16 [m, n]; any alignment and stride that the views allow; y overlaps neither x nor w
///   plan  from plan_gemm for this device, this n and k, and at least m tokens
/// m or n of 0: nothing is written. k of 0: y is +0.
/// Products are exact and summed in fp32 by the tensor core, rounded once to BF16, to nearest even. With A = k/8 + plan.slices + 4
/// additions on the way, |y - (exact)| <= 2^-8 |exact| + A · 2^-22 · sum |x w|, if no partial sum leaves fp32's normal range. The
/// order of the sum is fixed by plan.slices for kDirect and kBulk, and by plan.slices and plan.splits for kWgmma: same bits at
/// every launch, and for a token whatever other tokens are in the batch. kDirect and kBulk give the same bits as each other, kWgmma
/// others. plan_gemm picks kWgmma for more tokens than kBulk is fast with, so a token's last bit may differ between plans made for
/// few and for many tokens; who must exclude that names the kernel in the request.
[[nodiscard]] Status launch_gemm(const GemmDevice& device, const GemmPlan& plan, const F12DeviceMatrix& w, ConstBf16Matrix x,
                                 Bf16Matrix y, cudaStream_t stream);

}  // namespace weightd::kernels
