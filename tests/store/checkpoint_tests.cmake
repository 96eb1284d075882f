# SPDX-License-Identifier: Apache-2.0
weightd_test(NAME store_checkpoint_tests LABEL cpu
  SOURCES hash_test.cc strict_json_test.cc safetensors_test.cc checkpoint_test.cc
  LIBRARIES weightd::checkpoint)
