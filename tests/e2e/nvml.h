// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

namespace weightd::e2e {

/// NVIDIA's management library, loaded at run time: a witness of a GPU's memory beside the daemon's own accounts, without a context
/// of its own. Throws std::runtime_error.
class Nvml {
 public:
  Nvml();
  ~Nvml();
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  /// Of the GPU with this UUID, by all processes.
  [[nodiscard]] uint64_t used_bytes(const std::string& uuid) const;

 private:
  [[nodiscard]] void* entry(const char* name) const;
  void* library_ = nullptr;
};

}  // namespace weightd::e2e
