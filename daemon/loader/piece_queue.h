// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "daemon/loader/backend.h"

namespace weightd::loader {

/// Deals the pieces of sections out to reading threads, and takes them back in each section's order, because a section's checksum
/// runs from its first byte to its last. Reading runs ahead of the checksum, so several threads work on one large section.
///
/// A piece is counted from claim() until its checksum() is over, and at most `max_pieces` are at once. Claims of a section are in
/// order, so the piece that a section waits for is one that a thread is reading, or the next to be claimed: nobody waits in a
/// circle.
class PieceQueue {
 public:
  struct Section {
    uint64_t bytes = 0;
    bool whole = false;  // claimed in one, however large; needs no memory and no turn
  };
  PieceQueue(const std::vector<Section>& sections, uint32_t max_pieces);

  struct Claim {
    size_t section = 0;
    uint64_t offset_bytes = 0, size_bytes = 0;
  };
  /// The next piece to read: of section `last`, if nobody else is at it, so that who reads a section also hashes it, from its own
  /// cache; else of the section that has most left, so that none is left alone at the end. Waits while max_pieces are under way.
  /// Nothing: everything is claimed, or stop() was called.
  [[nodiscard]] std::optional<Claim> claim(std::optional<size_t> last = std::nullopt);

  /// A claimed piece has been read. It waits for its turn.
  void put(const Claim& claim, const Piece& piece);
  /// The piece of this section whose turn it is, if it was put already and no other thread has a turn of this section. The caller
  /// calls done() when it has dealt with it, and asks again.
  [[nodiscard]] std::optional<Piece> take(size_t section);
  /// Ends a turn. True: it was the section's last.
  [[nodiscard]] bool done(size_t section);
  /// Ends a claim of a whole section.
  void done_whole(const Claim& claim);

  /// Wakes all; there are no more claims and no more turns.
  void stop();

 private:
  struct State {
    uint64_t bytes = 0, claimed_bytes = 0;
    bool whole = false, has_turn = false;
    uint64_t claimed = 0, finished = 0;  // pieces
    std::map<uint64_t, Piece> waiting;   // by index
  };
  void offer(size_t section);

  const uint32_t max_pieces_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<State> sections_;
  std::set<std::pair<uint64_t, size_t>> claimable_;  // bytes left, section
  uint64_t unclaimed_ = 0;                           // sections that have something left
  uint32_t under_way_ = 0;
  bool stopped_ = false;
};

}  // namespace weightd::loader
