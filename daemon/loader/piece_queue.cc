// SPDX-License-Identifier: Apache-2.0
#include "daemon/loader/piece_queue.h"

#include <algorithm>
#include <iterator>

namespace weightd::loader {
namespace {

constexpr uint64_t kPiecesAhead = 3;  // of one section's checksum

}  // namespace

PieceQueue::PieceQueue(const std::vector<Section>& sections, uint32_t max_pieces)
    : max_pieces_(std::max(1U, max_pieces)), sections_(sections.size()), unclaimed_(sections.size()) {
  for (size_t i = 0; i < sections.size(); ++i) {
    WEIGHTD_CHECK(sections[i].whole || sections[i].bytes > 0);
    sections_[i].bytes = sections[i].bytes;
    sections_[i].whole = sections[i].whole;
    offer(i);
  }
}

void PieceQueue::offer(size_t section) {
  const State& state = sections_[section];
  const bool left = state.claimed_bytes < state.bytes || state.claimed == 0;
  if (left && state.claimed - state.finished < kPiecesAhead) claimable_.insert({state.bytes - state.claimed_bytes, section});
}

std::optional<PieceQueue::Claim> PieceQueue::claim(std::optional<size_t> last) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return stopped_ || unclaimed_ == 0 || (!claimable_.empty() && under_way_ < max_pieces_); });
  if (stopped_ || unclaimed_ == 0) return std::nullopt;
  auto next = std::prev(claimable_.end());
  if (last && sections_[*last].claimed == sections_[*last].finished) {
    const auto own = claimable_.find({sections_[*last].bytes - sections_[*last].claimed_bytes, *last});
    if (own != claimable_.end()) next = own;
  }
  const size_t section = next->second;
  claimable_.erase(next);
  State& state = sections_[section];
  const uint64_t left = state.bytes - state.claimed_bytes;
  const Claim claim{section, state.claimed_bytes, state.whole ? left : std::min(left, kPieceBytes)};
  state.claimed_bytes += claim.size_bytes;
  ++state.claimed;
  ++under_way_;
  if (state.claimed_bytes < state.bytes)
    offer(section);
  else if (--unclaimed_ == 0)
    changed_.notify_all();
  return claim;
}

void PieceQueue::put(const Claim& claim, const Piece& piece) {
  const std::lock_guard<std::mutex> lock(mutex_);
  sections_[claim.section].waiting.emplace(claim.offset_bytes / kPieceBytes, piece);
}

std::optional<Piece> PieceQueue::take(size_t section) {
  const std::lock_guard<std::mutex> lock(mutex_);
  State& state = sections_[section];
  if (stopped_ || state.has_turn || state.waiting.empty() || state.waiting.begin()->first != state.finished) return std::nullopt;
  state.has_turn = true;
  const Piece piece = state.waiting.begin()->second;
  state.waiting.erase(state.waiting.begin());
  return piece;
}

bool PieceQueue::done(size_t section) {
  const std::lock_guard<std::mutex> lock(mutex_);
  State& state = sections_[section];
  state.has_turn = false;
  const bool was_blocked = state.claimed - state.finished == kPiecesAhead;
  ++state.finished;
  --under_way_;
  if (was_blocked && state.claimed_bytes < state.bytes) offer(section);
  changed_.notify_one();  // it makes room for one claim
  return state.claimed_bytes == state.bytes && state.finished == state.claimed;
}

void PieceQueue::done_whole(const Claim& claim) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++sections_[claim.section].finished;
  --under_way_;
  changed_.notify_one();
}

void PieceQueue::stop() {
  const std::lock_guard<std::mutex> lock(mutex_);
  stopped_ = true;
  changed_.notify_all();
}

}  // namespace weightd::loader
