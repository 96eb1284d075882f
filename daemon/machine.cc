// SPDX-License-Identifier: Apache-2.0
#include "daemon/machine.h"

#include <dirent.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <unistd.h>

#include <charconv>
#include <fstream>
#include <sstream>
#include <string_view>

#include "base/text.h"

namespace weightd::daemon {
namespace {

uint64_t leading_number(std::string_view text) {
  const size_t begin = text.find_first_of("0123456789");
  if (begin == std::string_view::npos) return 0;
  uint64_t value = 0;
  std::from_chars(text.data() + begin, text.data() + text.size(), value);
  return value;
}

}  // namespace

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) return printable(line.substr(colon + 2));
  }
  return "unknown";
}

HostMemory host_memory() {
  HostMemory memory;
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("MemTotal:", 0) == 0) memory.total_bytes = leading_number(line) * 1024;
    if (line.rfind("MemAvailable:", 0) == 0) memory.available_bytes = leading_number(line) * 1024;
  }
  return memory;
}

uint64_t own_rss_bytes() {
  std::ifstream file("/proc/self/statm");
  uint64_t size = 0, resident = 0;
  if (!(file >> size >> resident)) return 0;
  return resident * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

uint32_t own_fd_count() {
  DIR* folder = ::opendir("/proc/self/fd");
  if (folder == nullptr) return 0;
  uint32_t entries = 0;
  while (::readdir(folder) != nullptr) ++entries;
  ::closedir(folder);
  return entries > 3 ? entries - 3 : 0;  // ".", ".." and the folder itself
}

uint64_t random_id() {
  uint64_t id = 0;
  while (id == 0) {
    if (::getrandom(&id, sizeof(id), 0) != static_cast<ssize_t>(sizeof(id))) id = 0;
  }
  return id;
}

void raise_fd_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  (void)::setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace weightd::daemon
