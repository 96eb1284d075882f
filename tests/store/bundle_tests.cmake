# SPDX-License-Identifier: Apache-2.0
weightd_test(NAME store_bundle_tests LABEL cpu
  SOURCES merge_rules_test.cc pack_test.cc pack_long_test.cc unpack_test.cc verify_test.cc
  LIBRARIES weightd::store weightd::synth_weights)
