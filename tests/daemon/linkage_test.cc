// SPDX-License-Identifier: Apache-2.0
// What the programs need to start, by their dynamic sections: none may need a driver or a CUDA library, so that each starts, and
// can say what is missing, on a machine without (the loader opens the driver at run time).
#include <elf.h>
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace weightd {
namespace {

std::string read_program(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

template <typename T>
T at(const std::string& bytes, uint64_t offset) {
  T value{};
  if (offset + sizeof(T) <= bytes.size()) std::memcpy(&value, bytes.data() + offset, sizeof(T));
  return value;
}

/// DT_NEEDED of a 64-bit ELF file.
std::vector<std::string> needed_libraries(const std::string& path) {
  const std::string bytes = read_program(path);
  EXPECT_EQ(bytes.substr(0, 4), ELFMAG) << path;
  const auto header = at<Elf64_Ehdr>(bytes, 0);
  std::vector<std::string> names;
  for (uint16_t i = 0; i < header.e_shnum; ++i) {
    const auto section = at<Elf64_Shdr>(bytes, header.e_shoff + uint64_t{i} * header.e_shentsize);
    if (section.sh_type != SHT_DYNAMIC) continue;
    const auto strings = at<Elf64_Shdr>(bytes, header.e_shoff + uint64_t{section.sh_link} * header.e_shentsize);
    for (uint64_t entry = 0; entry < section.sh_size; entry += sizeof(Elf64_Dyn)) {
      const auto dynamic = at<Elf64_Dyn>(bytes, section.sh_offset + entry);
      if (dynamic.d_tag == DT_NEEDED) names.emplace_back(bytes.c_str() + strings.sh_offset + dynamic.d_un.d_val);
    }
  }
  EXPECT_FALSE(names.empty()) << path << ": at least libc is needed";
  return names;
}

void expect_none_of(const std::string& path, const std::vector<std::string>& unwanted) {
  for (const std::string& library : needed_libraries(path)) {
    for (const std::string& word : unwanted) EXPECT_EQ(library.find(word), std::string::npos) << path << " needs " << library;
  }
}

TEST(Linkage, DaemonAndToolLinkNoCuda) {
  for (const char* program : {WEIGHTD_DAEMON_PROGRAM, WEIGHTCTL_PROGRAM})
    expect_none_of(program, {"cuda", "cublas", "nvidia", "nvrtc"});
}

TEST(Linkage, TheLoaderStartsWithoutADriver) { expect_none_of(WEIGHTD_LOADER_PROGRAM, {"libcuda.so", "libnvidia", "cublas"}); }

}  // namespace
}  // namespace weightd
