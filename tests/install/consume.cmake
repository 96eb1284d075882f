# SPDX-License-Identifier: Apache-2.0
# Builds the example as a stranger would, runs it, and compares what it prints. Called by CTest with
#   MODE (install, build, pkgconfig), WORK, PREFIX, BUILD, EXAMPLE, LEND, LIBDIR, GENERATOR, CXX, PKG_CONFIG
cmake_minimum_required(VERSION 3.25)

function(must)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output ECHO_ERROR_VARIABLE)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${ARGN}\nended with ${result}:\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK})
set(ENV{LD_LIBRARY_PATH} "")
if(MODE STREQUAL "pkgconfig")
  set(ENV{PKG_CONFIG_PATH} ${PREFIX}/${LIBDIR}/pkgconfig)
  must(${PKG_CONFIG} --cflags --libs weightd)
  separate_arguments(flags UNIX_COMMAND "${output}")
  must(${CXX} -std=c++20 ${EXAMPLE}/multiply.cc ${flags} -o ${WORK}/multiply)
  set(ENV{LD_LIBRARY_PATH} ${PREFIX}/${LIBDIR})
else()
  if(MODE STREQUAL "install")
    set(where -DCMAKE_PREFIX_PATH=${PREFIX})
    set(expected ${PREFIX})
  else()
    set(where -Dweightd_DIR=${BUILD})
    set(expected ${BUILD})
  endif()
  must(${CMAKE_COMMAND} -S ${EXAMPLE} -B ${WORK} -G ${GENERATOR} -DCMAKE_CXX_COMPILER=${CXX} ${where})
  must(${CMAKE_COMMAND} --build ${WORK})
  # Found where it should be, not somewhere else on this machine.
  file(STRINGS ${WORK}/CMakeCache.txt found REGEX "^weightd_DIR:")
  if(NOT found MATCHES "=${expected}")
    message(FATAL_ERROR "the package was found elsewhere: ${found}")
  endif()
endif()

must(${LEND} ${WORK}/multiply demo w)
# 64 ones times 2^-(row % 8): 64 in row 0, 0.5 in row 31.
if(NOT output STREQUAL "w [32, 64]: y[0] = 0x4280, y[31] = 0x3f00\n")
  message(FATAL_ERROR "the example printed: ${output}")
endif()
