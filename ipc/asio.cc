// SPDX-License-Identifier: Apache-2.0
// The one translation unit that compiles Asio's own sources; every user of weightd_ipc_server links them from here.
#include <boost/asio/impl/src.hpp>
