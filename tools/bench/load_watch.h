// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "tools/bench/row.h"
#include "weightd/control.h"

namespace weightd::tools {

/// Milliseconds; a step that passed between two looks is absent.
struct LoadTimes {
  double start_ms = kAbsent;   // request to plan known
  double upload_ms = kAbsent;  // plan known to all chunks held
  double check_ms = kAbsent;   // all chunks held to published
  double total_ms = kAbsent;   // request to published
};

/// When a load came to each of its steps, from looks at the daemon's status. Pure: the clock is the caller's, in milliseconds since
/// the request.
class LoadWatch {
 public:
  void saw(const std::vector<control::Model>& models, const std::string& name, double now_ms);
  void finished(double now_ms) { finished_ms_ = now_ms; }
  [[nodiscard]] LoadTimes times() const;

 private:
  double planned_ms_ = kAbsent, uploaded_ms_ = kAbsent, finished_ms_ = kAbsent;
};

}  // namespace weightd::tools
