// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "base/version.h"
#include "tools/bench/verbs.h"
#include "weightd/client.h"

int main(int argc, char** argv) {
  using namespace weightd;
  cli::Program program("weightbench", "Measures weightd: its kernels against cuBLAS, and as its users meet it.",
                       {"weightbench " + std::string(build_id()), "libweightd " + std::string(version())});
  tools::add_gpu(program);
  tools::add_chain(program);
  tools::add_load(program);
  tools::add_attach(program);
  tools::add_report(program);
  return program.main(argc, argv);
}
