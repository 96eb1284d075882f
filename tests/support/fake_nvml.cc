// SPDX-License-Identifier: Apache-2.0
// An NVML for tests: knows the first GPU of a FakeCuda.
#include <cstring>

namespace {
constexpr int kNotFound = 6;
}

extern "C" {

int nvmlInit_v2() { return 0; }
int nvmlShutdown() { return 0; }
const char* nvmlErrorString(int result) { return result == kNotFound ? "not found" : "other"; }

int nvmlSystemGetDriverVersion(char* text, unsigned size) {
  std::strncpy(text, "580.95.05", size);
  return 0;
}

int nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  static int first;
  if (std::strcmp(uuid, "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f") != 0) return kNotFound;
  *device = &first;
  return 0;
}

int nvmlDeviceGetMemoryInfo(void*, unsigned long long* total_free_used) {
  total_free_used[0] = 4ULL << 30;
  total_free_used[1] = 3ULL << 30;
  total_free_used[2] = 1ULL << 30;
  return 0;
}

int nvmlDeviceGetPersistenceMode(void*, int* mode) {
  *mode = 1;
  return 0;
}

int nvmlDeviceGetMinorNumber(void*, unsigned* minor) {
  *minor = 5;
  return 0;
}
}
