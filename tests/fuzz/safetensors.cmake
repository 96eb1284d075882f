# SPDX-License-Identifier: Apache-2.0
weightd_fuzz(NAME safetensors SOURCES safetensors_fuzz.cc LIBRARIES weightd::checkpoint)
