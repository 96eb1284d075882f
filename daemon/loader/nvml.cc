// SPDX-License-Identifier: Apache-2.0
#include "daemon/loader/nvml.h"

#include <dlfcn.h>

#include <array>
#include <memory>
#include <utility>

#include "base/text.h"

namespace weightd::loader {
namespace {

// The part of NVML's stable ABI that is used here.
constexpr int kSuccess = 0;
struct DeviceHandle;
struct Memory {
  unsigned long long total, free, used;  // NOLINT: NVML's types
};
static_assert(sizeof(Memory) == 24);

}  // namespace

struct Nvml::Entries {
  int (*init)() = nullptr;
  int (*shutdown)() = nullptr;
  const char* (*error_string)(int) = nullptr;
  int (*driver_version)(char*, unsigned) = nullptr;
  int (*by_uuid)(const char*, DeviceHandle**) = nullptr;
  int (*memory_info)(DeviceHandle*, Memory*) = nullptr;
  int (*persistence_mode)(DeviceHandle*, int*) = nullptr;
  int (*minor_number)(DeviceHandle*, unsigned*) = nullptr;

  /// The first name that is missing, or null.
  const char* find_all(void* library) {
    const char* missing = nullptr;
    const auto find = [&](auto& entry, const char* name) {
      entry = reinterpret_cast<std::remove_reference_t<decltype(entry)>>(::dlsym(library, name));
      if (entry == nullptr && missing == nullptr) missing = name;
    };
    find(init, "nvmlInit_v2");
    find(shutdown, "nvmlShutdown");
    find(error_string, "nvmlErrorString");
    find(driver_version, "nvmlSystemGetDriverVersion");
    find(by_uuid, "nvmlDeviceGetHandleByUUID");
    find(memory_info, "nvmlDeviceGetMemoryInfo");
    find(persistence_mode, "nvmlDeviceGetPersistenceMode");
    find(minor_number, "nvmlDeviceGetMinorNumber");
    return missing;
  }
};

Result<Nvml> Nvml::load(const std::string& library) {
  void* handle = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);  // stays: threads of its own may still run at the end
  if (handle == nullptr) {
    const char* why = ::dlerror();
    return Status::unavailable("no NVML: " + printable(why == nullptr ? library : why));
  }
  auto entries = std::make_unique<Entries>();
  const char* missing = entries->find_all(handle);
  if (missing != nullptr) return Status::unavailable("NVML is too old: it has no " + std::string(missing));
  const int result = entries->init();
  Nvml nvml(entries.release());
  if (result == kSuccess) return nvml;
  const Status status = nvml.failure(result, "nvmlInit");
  delete std::exchange(nvml.entries_, nullptr);
  return status;
}

Nvml::Nvml(Nvml&& other) noexcept : entries_(std::exchange(other.entries_, nullptr)) {}

Nvml::~Nvml() {
  if (entries_ == nullptr) return;
  entries_->shutdown();
  delete entries_;
}

Status Nvml::failure(int result, const std::string& call) const {
  const char* text = entries_->error_string(result);
  return Status::unavailable(call + ": " + printable(text == nullptr ? "unknown error" : text) + " (" + std::to_string(result) +
                             ")");
}

std::string Nvml::driver_version() const {
  std::array<char, 96> text{};
  const int result = entries_->driver_version(text.data(), static_cast<unsigned>(text.size()) - 1);
  return result == kSuccess ? printable(text.data()) : std::string();
}

Result<Nvml::Gpu> Nvml::gpu(const std::string& uuid) const {
  DeviceHandle* device = nullptr;
  int result = entries_->by_uuid(uuid.c_str(), &device);
  if (result != kSuccess) return failure(result, "nvmlDeviceGetHandleByUUID(" + printable(uuid) + ")");
  Memory memory{};
  result = entries_->memory_info(device, &memory);
  if (result != kSuccess) return failure(result, "nvmlDeviceGetMemoryInfo(" + printable(uuid) + ")");
  Gpu gpu{memory.total, memory.used, memory.free, std::nullopt, std::nullopt};
  int mode = 0;
  if (entries_->persistence_mode(device, &mode) == kSuccess) gpu.persistence = mode != 0;
  unsigned minor = 0;
  if (entries_->minor_number(device, &minor) == kSuccess) gpu.minor = minor;
  return gpu;
}

}  // namespace weightd::loader
