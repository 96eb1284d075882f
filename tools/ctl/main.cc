// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "base/version.h"
#include "tools/ctl/verbs.h"
#include "weightd/client.h"

int main(int argc, char** argv) {
  using namespace weightd;
  cli::Program program("weightctl", "Shows and steers a running weightd: memory, models, leases.",
                       {"weightctl " + std::string(build_id()), "libweightd " + std::string(version())});
  tools::add_status(program);
  tools::add_models(program);
  tools::add_load(program);
  tools::add_unload(program);
  tools::add_leases(program);
  tools::add_verify(program);
  tools::add_memory(program);
  tools::add_doctor(program);
  tools::add_version(program);
  return program.main(argc, argv);
}
