# SPDX-License-Identifier: Apache-2.0
weightd_fuzz(NAME bundle SOURCES bundle_fuzz.cc LIBRARIES weightd::store)
