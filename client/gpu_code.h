// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

namespace weightd::detail {

/// Whether a program that was built for `architectures` ("80-real,90a-real,120", CMake's notation with commas) has code for a GPU
/// of this compute capability. "XY-real": machine code for X.Y and later minors; "XYa": for X.Y alone; "XYf": for the later minors
/// of its family; without "-real": intermediate code too, which any later GPU takes.
[[nodiscard]] bool has_gpu_code(std::string_view architectures, uint32_t major, uint32_t minor);

}  // namespace weightd::detail
