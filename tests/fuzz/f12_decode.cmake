# SPDX-License-Identifier: Apache-2.0
weightd_fuzz(NAME f12_decode SOURCES f12_decode_fuzz.cc LIBRARIES weightd::f12 weightd::kernels_cpu)
