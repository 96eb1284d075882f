// SPDX-License-Identifier: Apache-2.0
#include "tests/support/programs.h"

#include <unistd.h>

#include <cstdlib>

#include "tests/support/safetensors_builder.h"

namespace weightd::testing {

std::string program(std::string_view name, const std::string& built) {
  const char* folder = std::getenv("WEIGHTD_TEST_BIN_DIR");
  if (folder == nullptr || *folder == '\0') return built;
  for (const char* part : {"/", "/bin/", "/sbin/", "/libexec/weightd/"}) {
    std::string path = std::string(folder) + part + std::string(name);
    if (::access(path.c_str(), X_OK) == 0) return path;
  }
  require(false, "no program " + std::string(name) + " in WEIGHTD_TEST_BIN_DIR=" + folder);
  return "";
}

}  // namespace weightd::testing
