// SPDX-License-Identifier: Apache-2.0
#include "daemon/replies.h"

#include <utility>

#include "base/text.h"

namespace weightd::daemon {

std::string bounded_text(std::string text) {
  if (!is_utf8(text)) text = printable(text, ipc::kMaxTextBytes / 2);
  if (text.size() <= ipc::kMaxTextBytes) return text;
  size_t end = ipc::kMaxTextBytes - 3;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0U) == 0x80U) --end;
  return text.substr(0, end) + "...";
}

Status bounded(const Status& status) { return status.ok() ? status : Status(status.code(), bounded_text(status.message())); }

ipc::ModelSummary for_worker(ipc::ModelSummary model) {
  model.source.clear();
  if (!model.failure.empty()) {
    model.failure = model.state == ipc::GenerationState::kLost ? "the process that owned its memory ended" : "the load failed";
  }
  return model;
}

ipc::ModelSummary for_administrator(ipc::ModelSummary model) {
  model.source = bounded_text(std::move(model.source));
  model.failure = bounded_text(std::move(model.failure));
  return model;
}

std::vector<ipc::LeaseSummary> bounded(std::vector<ipc::LeaseSummary> leases) {
  if (leases.size() > kMaxListedLeases) leases.resize(kMaxListedLeases);
  return leases;
}

}  // namespace weightd::daemon
