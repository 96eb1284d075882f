// SPDX-License-Identifier: Apache-2.0
#include "tests/daemon/fake_device_work.h"

#include <algorithm>
#include <span>

#include "store/f12.h"
#include "store/hash.h"

namespace weightd::testing {
namespace {

/// A launch comes after all that is on its stream.
Status run_stream(const FakeCuda& fake, cudaStream_t stream) {
  return ipc::status_from_driver(fake.driver(), fake.driver().stream_synchronize(stream), "cuStreamSynchronize");
}

bool unit_is_damaged(const kernels::F12DeviceMatrix& w, uint64_t pool_base, uint64_t unit) {
  const f12::Geometry g{w.n, w.k, 1};
  const uint64_t codes = g.tiles() * f12::kTileBytes, records = g.groups() * f12::kRecordBytes;
  return !store::f12_validate(g, unit, unit + 1, {w.codes + unit * codes, codes},
                              {w.windows + unit * f12::kUnitRows, f12::kUnitRows}, {w.records + unit * records, records},
                              {w.pool, w.pool_bytes}, pool_base)
              .ok();
}

}  // namespace

loader::DeviceWork fake_device_work(const FakeCuda& fake) {
  loader::DeviceWork work;
  work.block_hashes = [&fake](const std::byte* arena, uint64_t blocks, uint64_t* hashes, cudaStream_t stream) -> Status {
    WEIGHTD_RETURN_IF_ERROR(run_stream(fake, stream));
    const std::vector<uint64_t> result = store::block_hashes({arena, blocks * store::kBlockBytes}, 1);
    std::copy(result.begin(), result.end(), hashes);
    return {};
  };
  work.check_f12 = [&fake](const kernels::F12DeviceMatrix& w, uint64_t pool_base, uint64_t* first, cudaStream_t stream) -> Status {
    WEIGHTD_RETURN_IF_ERROR(run_stream(fake, stream));
    const uint64_t units = f12::Geometry{w.n, w.k, 1}.units();
    for (uint64_t unit = 0; unit < units; ++unit) {
      if (unit_is_damaged(w, pool_base, unit)) *first = std::min(*first, unit);
    }
    return {};
  };
  return work;
}

}  // namespace weightd::testing
