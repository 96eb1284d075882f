// SPDX-License-Identifier: Apache-2.0
#include "tools/bench/load_watch.h"

#include <cmath>

namespace weightd::tools {

void LoadWatch::saw(const std::vector<control::Model>& models, const std::string& name, double now_ms) {
  for (const control::Model& model : models) {
    if (model.name != name) continue;
    // Its size is known with the plan.
    if (model.state == "loading" && model.resident_bytes > 0 && std::isnan(planned_ms_)) planned_ms_ = now_ms;
    if (model.state == "verifying" && std::isnan(uploaded_ms_)) uploaded_ms_ = now_ms;
  }
}

LoadTimes LoadWatch::times() const {
  LoadTimes times;
  times.start_ms = planned_ms_;
  times.upload_ms = uploaded_ms_ - planned_ms_;
  times.check_ms = finished_ms_ - uploaded_ms_;
  times.total_ms = finished_ms_;
  return times;
}

}  // namespace weightd::tools
