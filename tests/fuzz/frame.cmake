# SPDX-License-Identifier: Apache-2.0
weightd_fuzz(NAME frame SOURCES frame_fuzz.cc LIBRARIES weightd::ipc)

# Writes the seeds of frame, request and table anew: `ipc_fuzz_seeds tests/fuzz/corpus`.
add_executable(ipc_fuzz_seeds EXCLUDE_FROM_ALL ipc_seeds.cc)
target_link_libraries(ipc_fuzz_seeds PRIVATE weightd_options weightd::ipc)
