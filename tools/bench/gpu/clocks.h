// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "tools/bench/row.h"

namespace weightd::tools {

struct Clocks {
  double sm_mhz = kAbsent, power_w = kAbsent, temperature_c = kAbsent;
  [[nodiscard]] std::string to_string() const;  // "1980 MHz, 512 W, 45 C"
};

/// What NVML says of one GPU. Without NVML (it is loaded at run time) every answer is absent.
class ClockReader {
 public:
  explicit ClockReader(const std::string& uuid);
  ~ClockReader();
  ClockReader(const ClockReader&) = delete;
  ClockReader& operator=(const ClockReader&) = delete;

  [[nodiscard]] Clocks read() const;
  [[nodiscard]] const std::string& driver_version() const { return driver_version_; }  // "580.159.04", or ""

 private:
  struct Nvml;
  std::unique_ptr<Nvml> nvml_;
  std::string driver_version_;
};

}  // namespace weightd::tools
