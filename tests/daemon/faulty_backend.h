// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "daemon/loader/backend.h"

namespace weightd::testing {

/// The host backend with a hook at every step. A hook that returns a failure fails the step.
class FaultyBackend final : public loader::Backend {
 public:
  explicit FaultyBackend(uint64_t granularity_bytes = uint64_t{1} << 20) : real_(loader::make_host_backend(granularity_bytes)) {}

  std::function<Status()> before_allocate = [] { return Status(); };
  std::function<Status(uint64_t offset_bytes, std::span<std::byte> staged)> on_upload = [](uint64_t, std::span<std::byte>) {
    return Status();
  };
  std::function<Status(uint64_t offset_bytes)> before_stage = [](uint64_t) { return Status(); };
  std::function<void(uint64_t offset_bytes, std::span<std::byte> staged)> on_retire = [](uint64_t, std::span<std::byte>) {};
  std::function<Status()> before_seal = [] { return Status(); };
  std::function<Status()> before_hash = [] { return Status(); };  // the chunks are with the daemon

  uint32_t piece_limit = 1000;  // more at once is a bug of the caller
  [[nodiscard]] uint32_t pieces_out() const { return pieces_out_; }

  uint64_t granularity_bytes() const override { return real_->granularity_bytes(); }
  Result<uint64_t> available_bytes() override { return real_->available_bytes(); }
  Status allocate(const std::vector<uint64_t>& chunk_bytes) override {
    WEIGHTD_RETURN_IF_ERROR(before_allocate());
    return real_->allocate(chunk_bytes);
  }
  uint32_t max_pieces() const override { return piece_limit; }
  Result<loader::Piece> stage(uint64_t offset_bytes, uint64_t size_bytes) override {
    WEIGHTD_RETURN_IF_ERROR(before_stage(offset_bytes));
    WEIGHTD_CHECK(pieces_out_.fetch_add(1) < piece_limit);
    return real_->stage(offset_bytes, size_bytes);
  }
  Status upload(const loader::Piece& piece) override {
    WEIGHTD_RETURN_IF_ERROR(on_upload(piece.offset_bytes, piece.bytes));
    return real_->upload(piece);
  }
  void retire(const loader::Piece& piece) override {
    on_retire(piece.offset_bytes, piece.bytes);
    real_->retire(piece);
    --pieces_out_;
  }
  Result<loader::Shares> seal() override {
    WEIGHTD_RETURN_IF_ERROR(before_seal());
    return real_->seal();
  }
  Status import(std::vector<UniqueFd> chunks, const std::vector<uint64_t>& chunk_bytes) override {
    return real_->import(std::move(chunks), chunk_bytes);
  }
  Result<std::vector<uint64_t>> hash_blocks(uint64_t arena_bytes, int threads, const loader::Advance& advance) override {
    WEIGHTD_RETURN_IF_ERROR(before_hash());
    return real_->hash_blocks(arena_bytes, threads, advance);
  }
  Status check_f12(const F12Planes& planes, int threads, const loader::Advance& advance) override {
    return real_->check_f12(planes, threads, advance);
  }

 private:
  std::unique_ptr<loader::Backend> real_;
  std::atomic<uint32_t> pieces_out_ = 0;
};

}  // namespace weightd::testing
