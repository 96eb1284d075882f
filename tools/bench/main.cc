// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "base/version.h"
#include "tools/bench/verbs.h"
#include "weightd/client.h"

int main(int argc, char** argv) {
  using namespace weightd;
  cli::Program program("weightbench", "Measures weightd as its users meet it.",
                       {"weightbench " + std::string(build_id()), "libweightd " + std::string(version())});
  tools::add_attach(program);
  return program.main(argc, argv);
}
