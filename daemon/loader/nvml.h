// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "weightd/status.h"

namespace weightd::loader {

/// NVIDIA's management library, found at run time and initialised while this lives. It may wait for a GPU that does not answer, so
/// it is used only in a process that somebody else watches.
class Nvml {
 public:
  /// kUnavailable: it is not installed, or does not start.
  [[nodiscard]] static Result<Nvml> load(const std::string& library = "libnvidia-ml.so.1");
  Nvml(Nvml&& other) noexcept;
  Nvml& operator=(Nvml&&) = delete;
  ~Nvml();

  /// "580.95.05"; empty when it does not say.
  [[nodiscard]] std::string driver_version() const;

  struct Gpu {
    uint64_t total_bytes = 0, used_bytes = 0, free_bytes = 0;
    std::optional<bool> persistence;
    std::optional<uint32_t> minor;  // of /dev/nvidia<minor>
  };
  /// Of a GPU (or a MIG instance) by UUID. kUnavailable: the library does not know it, or not its memory.
  [[nodiscard]] Result<Gpu> gpu(const std::string& uuid) const;

 private:
  struct Entries;
  explicit Nvml(const Entries* entries) : entries_(entries) {}
  Status failure(int result, const std::string& call) const;

  const Entries* entries_;
};

}  // namespace weightd::loader
