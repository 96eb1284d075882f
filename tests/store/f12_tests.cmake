# SPDX-License-Identifier: Apache-2.0
weightd_test(NAME store_f12_tests LABEL cpu
  SOURCES f12_test.cc
  LIBRARIES weightd::f12 weightd::synth_weights weightd_highway)
