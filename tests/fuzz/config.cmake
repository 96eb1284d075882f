# SPDX-License-Identifier: Apache-2.0
weightd_fuzz(NAME config SOURCES config_fuzz.cc LIBRARIES weightd_config)
