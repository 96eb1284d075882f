// SPDX-License-Identifier: Apache-2.0
#include "daemon/loader/backend.h"

#include "tests/daemon/backend_contract.h"

namespace weightd::testing {
namespace {

BackendKind host() {
  return {[] { return Result<std::unique_ptr<loader::Backend>>(loader::make_host_backend()); }};
}

INSTANTIATE_TEST_SUITE_P(Host, BackendContract, ::testing::Values(NamedKind{"host", host}));

}  // namespace
}  // namespace weightd::testing
