// SPDX-License-Identifier: Apache-2.0
#include "tools/bench/gpu/clocks.h"

#include <dlfcn.h>

#include <array>

#include "tools/cli/table.h"

namespace weightd::tools {
namespace {

// NVML's interface as far as it is used; a toolkit need not have its header.
using Device = struct NvmlDevice*;
constexpr unsigned kClockSm = 1, kTemperatureGpu = 0;
constexpr int kSuccess = 0;

}  // namespace

struct ClockReader::Nvml {
  void* library = nullptr;
  Device device = nullptr;
  int (*shutdown)() = nullptr;
  int (*clock)(Device, unsigned, unsigned*) = nullptr;
  int (*power)(Device, unsigned*) = nullptr;
  int (*temperature)(Device, unsigned, unsigned*) = nullptr;

  template <typename Function>
  bool find(const char* name, Function& function) const {
    function = reinterpret_cast<Function>(::dlsym(library, name));
    return function != nullptr;
  }
};

ClockReader::ClockReader(const std::string& uuid) : nvml_(std::make_unique<Nvml>()) {
  Nvml& nvml = *nvml_;
  nvml.library = ::dlopen("libnvidia-ml.so.1", RTLD_NOW);
  int (*init)() = nullptr;
  int (*by_uuid)(const char*, Device*) = nullptr;
  int (*driver)(char*, unsigned) = nullptr;
  if (nvml.library == nullptr || !nvml.find("nvmlInit_v2", init) || !nvml.find("nvmlShutdown", nvml.shutdown) ||
      !nvml.find("nvmlDeviceGetHandleByUUID", by_uuid) || !nvml.find("nvmlSystemGetDriverVersion", driver) ||
      !nvml.find("nvmlDeviceGetClockInfo", nvml.clock) || !nvml.find("nvmlDeviceGetPowerUsage", nvml.power) ||
      !nvml.find("nvmlDeviceGetTemperature", nvml.temperature) || init() != kSuccess) {
    nvml.shutdown = nullptr;
    return;
  }
  std::array<char, 96> version{};
  if (driver(version.data(), static_cast<unsigned>(version.size() - 1)) == kSuccess) driver_version_ = version.data();
  if (by_uuid(uuid.c_str(), &nvml.device) != kSuccess) nvml.device = nullptr;
}

ClockReader::~ClockReader() {
  if (nvml_->shutdown != nullptr) (void)nvml_->shutdown();
  if (nvml_->library != nullptr) ::dlclose(nvml_->library);
}

Clocks ClockReader::read() const {
  Clocks clocks;
  if (nvml_->device == nullptr) return clocks;
  unsigned value = 0;
  if (nvml_->clock(nvml_->device, kClockSm, &value) == kSuccess) clocks.sm_mhz = value;
  if (nvml_->power(nvml_->device, &value) == kSuccess) clocks.power_w = value / 1000.0;
  if (nvml_->temperature(nvml_->device, kTemperatureGpu, &value) == kSuccess) clocks.temperature_c = value;
  return clocks;
}

std::string Clocks::to_string() const {
  return cli::fixed(sm_mhz, 0) + " MHz, " + cli::fixed(power_w, 0) + " W, " + cli::fixed(temperature_c, 0) + " C";
}

}  // namespace weightd::tools
