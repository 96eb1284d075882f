# SPDX-License-Identifier: Apache-2.0
weightd_test(NAME store_bundle_tests LABEL cpu
  SOURCES bundle_test.cc golden_test.cc manifest_test.cc merge_rules_test.cc pack_test.cc pack_long_test.cc unpack_test.cc verify_test.cc
  LIBRARIES weightd::store weightd::synth_weights)

target_compile_definitions(store_bundle_tests PRIVATE "WEIGHTD_SOURCE_DIR=\"${PROJECT_SOURCE_DIR}\"")

# The packer's system calls go through the test.
weightd_test(NAME store_pack_fault_tests LABEL cpu
  SOURCES pack_fault_test.cc
  LIBRARIES weightd::store weightd::synth_weights)
foreach(call IN ITEMS pwrite pread fsync close ftruncate renameat mmap)
  target_link_options(store_pack_fault_tests PRIVATE -Wl,--wrap=${call})
endforeach()
