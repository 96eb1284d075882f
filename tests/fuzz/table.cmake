# SPDX-License-Identifier: Apache-2.0
weightd_fuzz(NAME table SOURCES table_fuzz.cc LIBRARIES weightd::ipc)
