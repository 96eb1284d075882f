// SPDX-License-Identifier: Apache-2.0
#include "daemon/ledger.h"

#include <algorithm>
#include <utility>

#include "base/text.h"

namespace weightd::daemon {
namespace {

/// The fewest candidates that free enough: one alone if one suffices (the smallest such, unleased before leased), otherwise the
/// largest ones until it is enough; none when all of them together do not suffice.
std::vector<Ledger::Candidate> choose(std::vector<Ledger::Candidate> candidates, uint64_t missing_bytes) {
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const auto& a, const auto& b) { return a.leased != b.leased ? !a.leased : a.bytes < b.bytes; });
  for (const auto& candidate : candidates) {
    if (candidate.bytes >= missing_bytes) return {candidate};
  }
  std::stable_sort(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) { return a.bytes > b.bytes; });
  std::vector<Ledger::Candidate> chosen;
  uint64_t freed = 0;
  for (auto& candidate : candidates) {
    freed += candidate.bytes;
    chosen.push_back(std::move(candidate));
    if (freed >= missing_bytes) return chosen;
  }
  return {};
}

}  // namespace

Ledger::Ledger(std::vector<Device> devices) : devices_(std::move(devices)) {}

const Ledger::Device* Ledger::find(const std::string& uuid) const {
  const auto it = std::find_if(devices_.begin(), devices_.end(), [&](const Device& device) { return device.uuid == uuid; });
  return it == devices_.end() ? nullptr : &*it;
}

Ledger::Sums Ledger::sums(const std::string& uuid) const {
  Sums sums;
  for (const auto& [id, reservation] : reservations_) {
    if (reservation.device != uuid) continue;
    switch (reservation.phase) {
      case Phase::kLoading:
        sums.loading_bytes += reservation.bytes;
        break;
      case Phase::kOwned:
        sums.owned_bytes += reservation.bytes;
        break;
      case Phase::kEnding:
        sums.ending_bytes += reservation.bytes;
        break;
    }
  }
  return sums;
}

uint64_t Ledger::free_bytes(const std::string& uuid) const {
  const Device* device = find(uuid);
  WEIGHTD_CHECK(device != nullptr);
  const Sums held = sums(uuid);
  const uint64_t used = held.owned_bytes + held.loading_bytes + held.ending_bytes;
  return device->budget_bytes > used ? device->budget_bytes - used : 0;
}

uint64_t Ledger::obtainable_bytes(const std::string& uuid) const {
  const auto available = available_.find(uuid);
  const uint64_t free = free_bytes(uuid);
  return available == available_.end() ? free : std::min(free, available->second);
}

void Ledger::set_budget(const std::string& uuid, uint64_t budget_bytes) {
  for (Device& device : devices_) {
    if (device.uuid == uuid) device.budget_bytes = budget_bytes;
  }
}

void Ledger::set_available(const std::string& uuid, std::optional<uint64_t> bytes) {
  if (bytes)
    available_[uuid] = *bytes;
  else
    available_.erase(uuid);
}

Ledger::Verdict Ledger::reserve(GenerationId generation, const std::string& uuid, uint64_t bytes) {
  WEIGHTD_CHECK(reservations_.count(generation) == 0);
  const uint64_t obtainable = obtainable_bytes(uuid);
  if (bytes <= obtainable) {
    reservations_[generation] = {uuid, bytes, Phase::kLoading};
    // What is promised here is taken soon, and may not show in what the system said before.
    if (const auto available = available_.find(uuid); available != available_.end()) available->second -= bytes;
    return Verdict::kAdmitted;
  }
  return bytes - obtainable <= sums(uuid).ending_bytes ? Verdict::kLater : Verdict::kRefused;
}

void Ledger::set_phase(GenerationId generation, Phase phase) {
  const auto it = reservations_.find(generation);
  if (it != reservations_.end()) it->second.phase = phase;
}

void Ledger::release(GenerationId generation) { reservations_.erase(generation); }

uint64_t Ledger::reserved_bytes(GenerationId generation) const {
  const auto it = reservations_.find(generation);
  return it == reservations_.end() ? 0 : it->second.bytes;
}

std::string Ledger::refusal(const std::string& uuid, uint64_t bytes, std::vector<Candidate> candidates) const {
  const Device* device = find(uuid);
  WEIGHTD_CHECK(device != nullptr);
  const uint64_t free = free_bytes(uuid);
  std::string text =
      "needs " + human_bytes(bytes) + ", " + human_bytes(free) + " free of " + human_bytes(device->budget_bytes) + " on " + uuid;
  if (bytes > device->budget_bytes) return text + "; the budget is too small for it";
  if (bytes <= free) {
    return text + "; but only " + human_bytes(obtainable_bytes(uuid)) + " of it is available there: other processes use the rest";
  }
  const auto chosen = choose(std::move(candidates), bytes - free);
  if (chosen.empty()) return text;
  uint64_t freed = 0;
  std::string names;
  for (const Candidate& candidate : chosen) {
    freed += candidate.bytes;
    names += (names.empty() ? "'" : ", '") + printable(candidate.name) + "'" + (candidate.leased ? " (in use)" : "");
  }
  return text + "; unloading " + names + " would free " + human_bytes(freed);
}

}  // namespace weightd::daemon
