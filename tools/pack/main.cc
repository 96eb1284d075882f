// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "base/version.h"
#include "tools/pack/verbs.h"

int main(int argc, char** argv) {
  using namespace weightd;
  cli::Program program("weightpack", "Packs safetensors checkpoints into compressed bundles, losslessly, and back.",
                       {"weightpack " + std::string(build_id())});
  tools::add_pack(program);
  tools::add_unpack(program);
  tools::add_verify(program);
  tools::add_inspect(program);
  tools::add_stats(program);
  tools::add_synth(program);
  return program.main(argc, argv);
}
