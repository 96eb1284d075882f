// SPDX-License-Identifier: Apache-2.0
#include "daemon/loader/read_sections.h"

#include <algorithm>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "daemon/loader/piece_queue.h"

namespace weightd::loader {
namespace {

constexpr uint32_t kPiecesPerThread = 4;  // one being read, one being hashed, two being copied
constexpr uint64_t kMaxThreads = 4096;

/// Where the bytes of a section go.
struct Target {
  bool resident = false;
  uint64_t arena_offset = 0;
  std::optional<store::Xxh128Stream> hash;  // belongs to whoever has the section's turn
};

std::vector<Target> make_targets(const store::Manifest& manifest, const store::Residency& residency) {
  std::vector<Target> targets(manifest.sections.size());
  for (const store::Placement& placement : residency.placements) {
    for (const store::Plane& plane : manifest.storages[placement.storage].planes) {
      if (plane.kind != placement.kind || placement.size_bytes == 0) continue;
      targets[plane.section].resident = true;
      targets[plane.section].arena_offset = placement.arena_offset_bytes;
    }
  }
  return targets;
}

std::vector<PieceQueue::Section> make_queue(const store::Manifest& manifest, const std::vector<Target>& targets) {
  std::vector<PieceQueue::Section> sections(targets.size());
  for (size_t i = 0; i < sections.size(); ++i) sections[i] = {manifest.sections[i].size_bytes, !targets[i].resident};
  return sections;
}

/// More threads than pieces have nothing to do.
int thread_count(int threads, const store::Manifest& manifest) {
  const auto cores = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  uint64_t pieces = 1;
  for (const store::Section& section : manifest.sections) pieces += section.size_bytes / kPieceBytes + 1;
  return static_cast<int>(std::min<uint64_t>({static_cast<uint64_t>(threads > 0 ? threads : cores), kMaxThreads, pieces}));
}

class Reading {
 public:
  Reading(const store::BundleReader& bundle, const store::Residency& residency, Backend& backend, int threads,
          const Advance& advance)
      : bundle_(bundle),
        backend_(backend),
        advance_(advance),
        targets_(make_targets(bundle.manifest(), residency)),
        queue_(make_queue(bundle.manifest(), targets_),
               std::min(backend.max_pieces(), kPiecesPerThread * static_cast<uint32_t>(threads))) {}

  /// Of each thread.
  void work() {
    std::optional<size_t> last;
    while (const auto claim = queue_.claim(last)) {
      last = claim->section;
      Status status = targets_[claim->section].resident ? read(*claim) : check(*claim);
      if (status.ok()) continue;
      queue_.stop();
      const std::lock_guard<std::mutex> lock(mutex_);
      if (failure_.ok()) failure_ = std::move(status);
    }
  }
  const Status& failure() const { return failure_; }

 private:
  Status check(const PieceQueue::Claim& claim) {
    WEIGHTD_RETURN_IF_ERROR(bundle_.check_section(static_cast<uint32_t>(claim.section), false));
    queue_.done_whole(claim);
    return {};
  }

  Status read(const PieceQueue::Claim& claim) {
    const Target& target = targets_[claim.section];
    WEIGHTD_ASSIGN_OR_RETURN(const Piece piece, backend_.stage(target.arena_offset + claim.offset_bytes, claim.size_bytes));
    WEIGHTD_RETURN_IF_ERROR(bundle_.read(static_cast<uint32_t>(claim.section), claim.offset_bytes, piece.bytes));
    WEIGHTD_RETURN_IF_ERROR(backend_.upload(piece));
    queue_.put(claim, piece);
    return take_turns(claim.section);
  }

  /// The checksum of what has been read of this section, as far as it goes.
  Status take_turns(size_t section) {
    Target& target = targets_[section];
    while (const auto piece = queue_.take(section)) {
      if (!target.hash) target.hash.emplace();
      target.hash->update(piece->bytes);
      advance_(piece->bytes.size());
      backend_.retire(*piece);
      const store::Xxh128 digest = target.hash->digest();
      if (queue_.done(section)) return finish(section, digest);
    }
    return {};
  }

  Status finish(size_t section, const store::Xxh128& digest) {
    targets_[section].hash.reset();
    const auto index = static_cast<uint32_t>(section);
    return bundle_.check_hashes(index, digest, bundle_.manifest().sections[section].sha);
  }

  const store::BundleReader& bundle_;
  Backend& backend_;
  const Advance& advance_;
  std::vector<Target> targets_;
  PieceQueue queue_;
  std::mutex mutex_;
  Status failure_;
};

}  // namespace

Status read_sections(const store::BundleReader& bundle, const store::Residency& residency, Backend& backend, int threads,
                     const Advance& advance) {
  const int workers = thread_count(threads, bundle.manifest());
  Reading reading(bundle, residency, backend, workers, advance);
  {
    std::vector<std::jthread> others;
    for (int i = 1; i < workers; ++i) {
      try {
        others.emplace_back([&] { reading.work(); });
      } catch (const std::system_error&) {
        break;  // a limit of processes: those that there are do all
      }
    }
    reading.work();
  }
  return reading.failure();
}

}  // namespace weightd::loader
