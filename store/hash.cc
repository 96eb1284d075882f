// SPDX-License-Identifier: Apache-2.0
#include "store/hash.h"

// OpenSSL 3 deprecates the SHA256_* calls in favour of EVP, which runs the same code but adds megabytes to a static binary
// (it reaches every provider). The calls themselves cannot fail for in-memory data.
#define OPENSSL_SUPPRESS_DEPRECATED
#include <openssl/sha.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/parallel.h"
#include "base/text.h"
#include "store/xxh3_vector.h"

namespace weightd::store {
namespace {

/// The two of XXH3's functions that see all bytes.
struct Xxh3 {
  void (*update)(void* state, const void* data, size_t size);
  uint64_t (*hash64)(const void* data, size_t size);
};

/// The distribution's library is compiled for the least of its processors.
Xxh3 choose_xxh3() {
#ifdef WEIGHTD_XXH3_VECTORS
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) return {weightd_xxh3_update_avx512, weightd_xxh3_64_avx512};
  if (__builtin_cpu_supports("avx2")) return {weightd_xxh3_update_avx2, weightd_xxh3_64_avx2};
#endif
  return {[](void* state, const void* data, size_t size) { XXH3_128bits_update(static_cast<XXH3_state_t*>(state), data, size); },
          [](const void* data, size_t size) -> uint64_t { return XXH3_64bits(data, size); }};
}

const Xxh3 kXxh3 = choose_xxh3();

}  // namespace

std::string to_hex(const Xxh128& hash) {
  std::array<unsigned char, 16> big_endian{};
  for (size_t i = 0; i < 8; ++i) {
    big_endian[i] = static_cast<unsigned char>(hash.high >> (56 - 8 * i));
    big_endian[8 + i] = static_cast<unsigned char>(hash.low >> (56 - 8 * i));
  }
  return hex(big_endian.data(), big_endian.size());
}

std::string to_hex(const Sha256& hash) { return hex(hash.data(), hash.size()); }

Xxh128 xxh128(std::span<const std::byte> data) {
  const XXH128_hash_t hash = XXH3_128bits(data.data(), data.size());
  return {hash.low64, hash.high64};
}

Sha256 sha256(std::span<const std::byte> data) {
  Sha256Stream stream;
  stream.update(data);
  return stream.finish();
}

struct Xxh128Stream::State {
  State() : xxh(XXH3_createState()) {
    WEIGHTD_CHECK(xxh != nullptr);  // half a KiB of memory
    XXH3_128bits_reset(xxh);
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State() { XXH3_freeState(xxh); }

  XXH3_state_t* xxh;
};

Xxh128Stream::Xxh128Stream() : state_(std::make_unique<State>()) {}
Xxh128Stream::~Xxh128Stream() = default;
Xxh128Stream::Xxh128Stream(Xxh128Stream&&) noexcept = default;
Xxh128Stream& Xxh128Stream::operator=(Xxh128Stream&&) noexcept = default;

void Xxh128Stream::update(std::span<const std::byte> data) {
  if (!data.empty()) kXxh3.update(state_->xxh, data.data(), data.size());
}

Xxh128 Xxh128Stream::digest() const {
  const XXH128_hash_t hash = XXH3_128bits_digest(state_->xxh);
  return {hash.low64, hash.high64};
}

struct Sha256Stream::State {
  SHA256_CTX sha;
};

Sha256Stream::Sha256Stream() : state_(std::make_unique<State>()) { SHA256_Init(&state_->sha); }
Sha256Stream::~Sha256Stream() = default;
Sha256Stream::Sha256Stream(Sha256Stream&&) noexcept = default;
Sha256Stream& Sha256Stream::operator=(Sha256Stream&&) noexcept = default;

void Sha256Stream::update(std::span<const std::byte> data) {
  if (!data.empty()) SHA256_Update(&state_->sha, data.data(), data.size());
}

Sha256 Sha256Stream::finish() {
  Sha256 hash{};
  SHA256_Final(hash.data(), &state_->sha);
  return hash;
}

uint64_t block_hash(std::span<const std::byte, kBlockBytes> block) { return kXxh3.hash64(block.data(), block.size()); }

std::vector<uint64_t> block_hashes(std::span<const std::byte> arena, int threads) {
  WEIGHTD_CHECK(arena.size() % kBlockBytes == 0);
  std::vector<uint64_t> hashes(arena.size() / kBlockBytes);
  parallel_ranges(hashes.size(), 1, threads, [&](uint64_t begin, uint64_t end) {
    for (uint64_t i = begin; i < end; ++i) {
      hashes[i] = block_hash(arena.subspan(i * kBlockBytes).first<kBlockBytes>());
    }
  });
  return hashes;
}

// Whole blocks are hashed where they lie; only a block that several pieces share is assembled in block_, whose first
// position_ % kBlockBytes bytes are then valid.
void BlockHasher::add(uint64_t offset_bytes, std::span<const std::byte> piece) {
  WEIGHTD_CHECK(offset_bytes >= position_);
  zeros(offset_bytes - position_);
  while (!piece.empty()) {
    const size_t filled = position_ % kBlockBytes;
    const size_t step = std::min<size_t>(piece.size(), kBlockBytes - filled);
    if (step == kBlockBytes) {
      hashes_.push_back(block_hash(piece.first<kBlockBytes>()));
    } else {
      block_.resize(kBlockBytes);
      std::memcpy(block_.data() + filled, piece.data(), step);
      if (filled + step == kBlockBytes) hashes_.push_back(block_hash(std::span<const std::byte>(block_).first<kBlockBytes>()));
    }
    position_ += step;
    piece = piece.subspan(step);
  }
}

std::vector<uint64_t> BlockHasher::finish(uint64_t arena_bytes) {
  WEIGHTD_CHECK(arena_bytes % kBlockBytes == 0 && arena_bytes >= position_);
  zeros(arena_bytes - position_);
  position_ = 0;
  return std::exchange(hashes_, {});
}

void BlockHasher::zeros(uint64_t count) {
  if (count == 0) return;
  block_.resize(kBlockBytes);
  const std::span<const std::byte, kBlockBytes> block = std::span<const std::byte>(block_).first<kBlockBytes>();
  const uint64_t filled = position_ % kBlockBytes;
  const uint64_t head = std::min(count, kBlockBytes - filled);  // completes the block that was begun
  std::memset(block_.data() + filled, 0, head);
  if (filled + head == kBlockBytes) hashes_.push_back(block_hash(block));
  const uint64_t rest = count - head;
  if (rest != 0) {
    std::memset(block_.data(), 0, kBlockBytes);
    if (rest >= kBlockBytes) hashes_.insert(hashes_.end(), rest / kBlockBytes, block_hash(block));
  }
  position_ += count;
}

}  // namespace weightd::store
