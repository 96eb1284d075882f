# SPDX-License-Identifier: Apache-2.0
# The device kernels. A kernel that spills or puts an array into local memory does not compile.
add_library(weightd_cuda_options INTERFACE)
target_compile_options(weightd_cuda_options INTERFACE
  "$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr;-Werror=all-warnings;-Xptxas=--warn-on-spills,--warn-on-local-memory-usage;-Xcompiler=-Wall,-Wextra,-Wshadow,-Werror>")
target_link_libraries(weightd_cuda_options INTERFACE weightd_options)

# cuBLASLt is loaded at run time; its header must be there.
find_path(WEIGHTD_CUBLASLT_INCLUDE cublasLt.h HINTS ${CUDAToolkit_INCLUDE_DIRS} REQUIRED)
mark_as_advanced(WEIGHTD_CUBLASLT_INCLUDE)

add_library(weightd_kernels_cuda STATIC
  blas.cc block_hash.cu decompress.cu f12_check.cu gather_raw.cu gather_rows.cu gemm_f12.cu gemm_launch.cu gemm_plan.cc launch.cc
  route.cc)
target_include_directories(weightd_kernels_cuda SYSTEM PRIVATE ${WEIGHTD_CUBLASLT_INCLUDE})
set_target_properties(weightd_kernels_cuda PROPERTIES CUDA_RUNTIME_LIBRARY Static)
target_link_libraries(weightd_kernels_cuda PUBLIC weightd_base CUDA::cudart_static PRIVATE weightd_cuda_options ${CMAKE_DL_LIBS})
add_library(weightd::kernels_cuda ALIAS weightd_kernels_cuda)
