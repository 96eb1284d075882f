# SPDX-License-Identifier: Apache-2.0
weightd_fuzz(NAME request SOURCES request_fuzz.cc LIBRARIES weightd::ipc)
