// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels/cpu/gemm.h"
#include "store/f12.h"

/// Planes of an f12 matrix from untrusted bytes. Input: u8 n, u16 k, u8 pool offset / 16, then records, windows, codes, and the
/// rest is the pool; what is missing is 0. Each plane is an allocation of its own, so that a sanitizer sees one byte too many.
/// Checked: validation and decoding agree; what they accept survives decode, encode, decode; kernels over planes that nobody
/// validated stay inside them.
namespace {

using Bytes = std::vector<std::byte>;

class Reader {
 public:
  Reader(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  Bytes take(size_t count) {
    Bytes bytes(count);
    const size_t have = std::min(count, size_);
    if (have != 0) std::memcpy(bytes.data(), data_, have);
    data_ += have;
    size_ -= have;
    return bytes;
  }
  Bytes rest() { return take(size_); }

 private:
  const uint8_t* data_;
  size_t size_;
};

void require(bool condition) {
  if (!condition) __builtin_trap();
}

void check_accepted(const weightd::f12::Geometry& g, const Bytes& words) {
  Bytes codes(g.codes_bytes()), windows(g.windows_bytes()), records(g.records_bytes()), pool, again(words.size());
  require(weightd::store::f12_encode(words, g, 0, g.units(), codes, windows, records, pool, 0, 1).ok());
  require(weightd::store::f12_decode(g, 0, g.units(), codes, windows, records, pool, 0, again, 1).ok());
  require(again == words);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Reader reader(data, size);
  const Bytes header = reader.take(4);
  uint16_t columns = 0;
  std::memcpy(&columns, &header[1], sizeof columns);
  const weightd::f12::Geometry g{static_cast<uint64_t>(header[0]) % 40, columns % 1200U, 1};
  const uint64_t pool_offset = static_cast<uint64_t>(header[3]) % 8 * 16;
  const Bytes records = reader.take(g.records_bytes());
  const Bytes windows = reader.take(g.windows_bytes());
  const Bytes codes = reader.take(g.codes_bytes());
  const Bytes pool = reader.rest();

  Bytes words(g.raw_bytes());
  const weightd::Status valid = weightd::store::f12_validate(g, 0, g.units(), codes, windows, records, pool, pool_offset);
  const weightd::Status decoded = weightd::store::f12_decode(g, 0, g.units(), codes, windows, records, pool, pool_offset, words, 1);
  require(valid.code() == decoded.code() && valid.message() == decoded.message());
  if (decoded.ok()) check_accepted(g, words);

  const weightd::kernels::cpu::F12Matrix w{codes.data(), windows.data(), records.data(), pool.data(), pool.size(), g.n, g.k};
  Bytes from_kernel(words.size());
  require(weightd::kernels::cpu::decompress(w, 0, g.n, from_kernel, 1).ok());
  if (decoded.ok() && pool_offset == 0) require(from_kernel == words);
  const std::vector<uint16_t> x(g.k, 0x3F80);
  std::vector<uint16_t> y(g.n);
  require(weightd::kernels::cpu::gemm(w, {0, g.n}, {x.data(), 1, g.k, 0}, {y.data(), 1, g.n, 0}, 1).ok());
  return 0;
}
