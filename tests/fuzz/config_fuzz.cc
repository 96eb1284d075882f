// SPDX-License-Identifier: Apache-2.0
// Any bytes as a configuration file: refused with a one-line message, or accepted; what is accepted survives printing and reading again.
#include <cstdint>
#include <string>
#include <string_view>

#include "daemon/config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace weightd::daemon;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  EffectiveConfig config;
  const weightd::Status status = parse_config(text, "/etc/weightd/weightd.toml", config);
  if (!status.ok()) {
    WEIGHTD_CHECK(!status.message().empty() && status.message().find('\n') == std::string::npos);
    return 0;
  }
  EffectiveConfig again;
  WEIGHTD_CHECK(parse_config(print_config(config), "/elsewhere/weightd.toml", again).ok());
  WEIGHTD_CHECK(print_value(config.values, options().front()) == print_value(again.values, options().front()));
  const ConfigChanges changes = compare_configs(config.values, again.values);
  WEIGHTD_CHECK(changes.applied.empty() && changes.need_restart.empty());
  return 0;
}
