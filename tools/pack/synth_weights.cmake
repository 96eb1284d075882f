# SPDX-License-Identifier: Apache-2.0
# Model weights for tests and benchmarks.
add_library(weightd_synth_weights STATIC ${CMAKE_CURRENT_LIST_DIR}/synth_weights.cc)
target_link_libraries(weightd_synth_weights PUBLIC weightd_base)
add_library(weightd::synth_weights ALIAS weightd_synth_weights)
