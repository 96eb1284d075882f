// SPDX-License-Identifier: Apache-2.0
#include "store/storage_decoder.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "base/text.h"
#include "store/f12.h"

namespace weightd::store {
namespace {

// Small enough that reading, coding, hashing and writing of one tensor overlap, large enough for the start of the threads to
// vanish.
constexpr uint64_t kThreadSlabBytes = uint64_t{4} << 20;
constexpr uint64_t kMaxSlabThreads = 16;

}  // namespace

uint64_t slab_bytes(int threads) {
  const uint64_t count = threads > 0 ? static_cast<uint64_t>(threads) : std::max(1U, std::thread::hardware_concurrency());
  return std::clamp<uint64_t>(count, 1, kMaxSlabThreads) * kThreadSlabBytes;
}

uint64_t slab_units(const f12::Geometry& geometry, int threads) {
  return std::max<uint64_t>(1, slab_bytes(threads) / (geometry.tiles() * f12::kTileCols * f12::kUnitRows * 2));
}

StorageDecoder::StorageDecoder(const Storage& storage, uint64_t pool_base, uint64_t pool_bytes, SectionRead read, int threads)
    : storage_(storage), pool_base_(pool_base), pool_bytes_(pool_bytes), read_(std::move(read)), threads_(threads) {}

Status StorageDecoder::load() {
  if (storage_.encoding != Encoding::kF12) return {};
  windows_.resize(storage_.geometry.windows_bytes());
  records_.resize(storage_.geometry.records_bytes());
  pool_.resize(pool_bytes_);
  WEIGHTD_RETURN_IF_ERROR(read_(storage_.planes[1].section, 0, windows_));
  WEIGHTD_RETURN_IF_ERROR(read_(storage_.planes[2].section, 0, records_));
  return read_(storage_.planes[3].section, 0, pool_);
}

Status StorageDecoder::stream_all(const ByteSink& sink) {
  if (storage_.encoding == Encoding::kRaw) return stream_raw(sink);
  for (uint64_t matrix = 0; matrix < storage_.geometry.batch; ++matrix) {
    WEIGHTD_RETURN_IF_ERROR(stream_matrix(matrix, 0, storage_.geometry.n, sink));
  }
  return {};
}

Status StorageDecoder::stream_rows(uint64_t row_begin, uint64_t row_end, const ByteSink& sink) {
  WEIGHTD_CHECK(storage_.encoding == Encoding::kF12 && storage_.geometry.batch == 1 && row_begin % f12::kUnitRows == 0);
  return stream_matrix(0, row_begin, row_end, sink);
}

Status StorageDecoder::stream_raw(const ByteSink& sink) {
  for (uint64_t done = 0; done < storage_.logical_bytes;) {
    const uint64_t step = std::min(slab_bytes(threads_), storage_.logical_bytes - done);
    slab_.resize(step);
    WEIGHTD_RETURN_IF_ERROR(read_(storage_.planes[0].section, done, slab_));
    WEIGHTD_RETURN_IF_ERROR(sink(slab_));
    done += step;
  }
  return {};
}

Status StorageDecoder::stream_matrix(uint64_t matrix, uint64_t row_begin, uint64_t row_end, const ByteSink& sink) {
  const f12::Geometry& g = storage_.geometry;
  const uint64_t unit_codes = g.tiles() * f12::kTileBytes;
  const uint64_t unit_records = g.groups() * f12::kRecordBytes;
  const uint64_t end = (row_end + f12::kUnitRows - 1) / f12::kUnitRows;
  for (uint64_t unit = row_begin / f12::kUnitRows; unit < end;) {
    const uint64_t count = std::min(slab_units(g, threads_), end - unit);
    const uint64_t plane_unit = matrix * g.units() + unit;
    slab_.resize(count * unit_codes);
    WEIGHTD_RETURN_IF_ERROR(read_(storage_.planes[0].section, plane_unit * unit_codes, slab_));
    words_.resize((std::min(g.n, (unit + count) * f12::kUnitRows) - unit * f12::kUnitRows) * g.k * 2);
    const Status decoded = f12_decode(
        g, unit, unit + count, slab_, std::span(windows_).subspan(plane_unit * f12::kUnitRows, count * f12::kUnitRows),
        std::span(records_).subspan(plane_unit * unit_records, count * unit_records), pool_, pool_base_, words_, threads_);
    if (!decoded.ok()) {
      const std::string part = g.batch > 1 ? ": matrix " + std::to_string(matrix) : "";
      return decoded.with_context("'" + printable(storage_.name) + "'" + part);
    }
    WEIGHTD_RETURN_IF_ERROR(sink(words_));
    unit += count;
  }
  return {};
}

}  // namespace weightd::store
