// SPDX-License-Identifier: Apache-2.0
#include "tools/cli/build_check.h"

#include "base/text.h"

namespace weightd::cli {

Status check_same_release(std::string_view program_build, std::string_view library_build) {
  const auto release = [](std::string_view build) { return build.substr(0, build.find(' ')); };
  if (release(program_build) == release(library_build)) return {};
  return Status::failed_precondition("this program is " + printable(program_build) + " but the libweightd it found is " +
                                     printable(library_build) + ": install both from one release");
}

}  // namespace weightd::cli
