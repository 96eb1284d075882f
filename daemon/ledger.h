// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "weightd/status.h"

namespace weightd::daemon {

using GenerationId = uint64_t;

/// Who has which bytes of a device's budget. Every generation reserves its chunks before the first byte is allocated (CO-092) and
/// gives them back only when the memory is really gone. Pure bookkeeping: no clock, no system call.
class Ledger {
 public:
  struct Device {
    std::string uuid, name;
    uint64_t total_bytes = 0, budget_bytes = 0;
  };
  enum class Phase {
    kLoading,  // admitted, not yet published
    kOwned,    // published or draining
    kEnding,   // freed or cancelled; the operating system has not yet taken the memory back
  };
  enum class Verdict { kAdmitted, kLater, kRefused };  // kLater: fits once what is ending has ended
  struct Candidate {                                   // a resident model that could be unloaded
    std::string name;
    uint64_t bytes = 0;
    bool leased = false;
  };
  struct Sums {
    uint64_t owned_bytes = 0, loading_bytes = 0, ending_bytes = 0;  // ending counts neither as owned nor as loading
  };

  explicit Ledger(std::vector<Device> devices);

  [[nodiscard]] const std::vector<Device>& devices() const { return devices_; }
  [[nodiscard]] const Device* find(const std::string& uuid) const;
  [[nodiscard]] Sums sums(const std::string& uuid) const;
  [[nodiscard]] uint64_t free_bytes(const std::string& uuid) const;  // budget minus every reservation; 0 when overdrawn

  void set_budget(const std::string& uuid, uint64_t budget_bytes);
  /// What the operating system or the driver says is obtainable there right now, if that is known: an upper limit beside the
  /// budget. Reservations made after it lower it.
  void set_available(const std::string& uuid, std::optional<uint64_t> bytes);

  /// Reserves for `generation`, which has no reservation yet (WEIGHTD_CHECK), when it is kAdmitted. The device exists
  /// (WEIGHTD_CHECK).
  [[nodiscard]] Verdict reserve(GenerationId generation, const std::string& uuid, uint64_t bytes);
  void set_phase(GenerationId generation, Phase phase);
  void release(GenerationId generation);  // without a reservation: nothing
  [[nodiscard]] uint64_t reserved_bytes(GenerationId generation) const;

  /// "needs 9.8 GiB, 7.1 GiB free of 24.0 GiB on host; unloading 'x' would free 10.2 GiB".
  [[nodiscard]] std::string refusal(const std::string& uuid, uint64_t bytes, std::vector<Candidate> candidates) const;

 private:
  struct Reservation {
    std::string device;
    uint64_t bytes = 0;
    Phase phase{};
  };
  [[nodiscard]] uint64_t obtainable_bytes(const std::string& uuid) const;

  std::vector<Device> devices_;
  std::map<std::string, uint64_t> available_;
  std::map<GenerationId, Reservation> reservations_;
};

}  // namespace weightd::daemon
