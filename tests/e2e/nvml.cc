// SPDX-License-Identifier: Apache-2.0
#include "tests/e2e/nvml.h"

#include <dlfcn.h>

#include <stdexcept>

namespace weightd::e2e {
namespace {

// The few parts of nvml.h that are used; its interface is binary stable.
struct Memory {
  unsigned long long total, free, used;
};
using Init = int (*)();
using HandleByUuid = int (*)(const char*, void**);
using MemoryInfo = int (*)(void*, Memory*);

void require(int result, const std::string& call) {
  if (result != 0) throw std::runtime_error(call + ": NVML error " + std::to_string(result));
}

}  // namespace

Nvml::Nvml() : library_(::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL)) {
  if (library_ == nullptr) throw std::runtime_error("no libnvidia-ml.so.1: is there a GPU?");
  require(reinterpret_cast<Init>(entry("nvmlInit_v2"))(), "nvmlInit");
}

Nvml::~Nvml() {
  (void)reinterpret_cast<Init>(entry("nvmlShutdown"))();
  ::dlclose(library_);
}

void* Nvml::entry(const char* name) const {
  void* const found = ::dlsym(library_, name);
  if (found == nullptr) throw std::runtime_error(std::string("libnvidia-ml.so.1 has no ") + name);
  return found;
}

uint64_t Nvml::used_bytes(const std::string& uuid) const {
  void* device = nullptr;
  require(reinterpret_cast<HandleByUuid>(entry("nvmlDeviceGetHandleByUUID"))(uuid.c_str(), &device),
          "nvmlDeviceGetHandleByUUID " + uuid);
  Memory memory{};
  require(reinterpret_cast<MemoryInfo>(entry("nvmlDeviceGetMemoryInfo"))(device, &memory), "nvmlDeviceGetMemoryInfo");
  return memory.used;
}

}  // namespace weightd::e2e
