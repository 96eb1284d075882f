// SPDX-License-Identifier: Apache-2.0
#include "tests/e2e/buffer.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <new>
#include <stdexcept>

#if WEIGHTD_E2E_CUDA
#include <cuda.h>
#include <cuda_runtime_api.h>

#include "tests/e2e/gpu_faults.h"
#endif

namespace weightd::e2e {
namespace {

constexpr std::byte kPoison{0xA5}, kFenceByte{0xC3};

#if WEIGHTD_E2E_CUDA
void require_cuda(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) + ")");
}

std::string words_of(cudaError_t error) { return error == cudaSuccess ? "" : cudaGetErrorName(error); }

/// A call of the driver, which programs do not link: they must start without one.
template <typename Call>
Call driver_entry(const char* name) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
  require_cuda(cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &found), "cudaGetDriverEntryPoint");
  if (found != cudaDriverEntryPointSuccess) throw std::runtime_error(std::string("the driver has no ") + name);
  return reinterpret_cast<Call>(entry);
}

std::string uuid_text(const cudaUUID_t& uuid) {
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    std::array<char, 4> digits{};
    std::snprintf(digits.data(), digits.size(), "%02x", static_cast<unsigned>(static_cast<unsigned char>(uuid.bytes[i])));
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += digits.data();
  }
  return text;
}
#else
[[noreturn]] void no_cuda() { throw std::runtime_error("this program was built without CUDA"); }
#endif

std::span<const std::byte> host_range_around(const std::byte* address) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    unsigned long long begin = 0, end = 0;
    if (std::sscanf(line.c_str(), "%llx-%llx", &begin, &end) != 2) continue;
    const auto at = reinterpret_cast<uintptr_t>(address);
    if (at >= begin && at < end) return {reinterpret_cast<const std::byte*>(begin), end - begin};
  }
  throw std::runtime_error("an address in no mapping");
}

}  // namespace

bool is_host(const std::string& device) { return device == "host"; }

#if WEIGHTD_E2E_CUDA
void use_device(const std::string& device) {
  if (is_host(device)) return;
  int count = 0;
  require_cuda(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties{};
    require_cuda(cudaGetDeviceProperties(&properties, i), "cudaGetDeviceProperties");
    if (uuid_text(properties.uuid) != device && device.compare(0, 4, "MIG-") != 0) continue;
    require_cuda(cudaSetDevice(i), "cudaSetDevice");
    require_cuda(cudaFree(nullptr), "making a context");
    return;
  }
  throw std::runtime_error("CUDA does not show " + device);
}

std::string current_device() {
  int device = -1;
  require_cuda(cudaGetDevice(&device), "cudaGetDevice");
  CUcontext context = nullptr;
  const CUresult result = driver_entry<decltype(&::cuCtxGetCurrent)>("cuCtxGetCurrent")(&context);
  if (result != CUDA_SUCCESS) throw std::runtime_error("cuCtxGetCurrent: error " + std::to_string(result));
  char text[32];
  std::snprintf(text, sizeof(text), "%d:%p", device, static_cast<void*>(context));
  return text;
}

CUstream_st* make_stream(bool host) {
  cudaStream_t stream = nullptr;
  if (!host) require_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  return stream;
}

void end_stream(CUstream_st* stream) {
  if (stream != nullptr) (void)cudaStreamDestroy(stream);
}

void wait_for(CUstream_st* stream) {
  if (stream != nullptr) require_cuda(cudaStreamSynchronize(stream), "waiting for the stream");
}

uint64_t gpu_bytes_in_use() {
  size_t free_bytes = 0, total_bytes = 0;
  require_cuda(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
  return total_bytes - free_bytes;
}

uint64_t fill_gpu(uint64_t leave_bytes) {
  uint64_t taken = 0;
  for (uint64_t piece = uint64_t{1} << 30; piece >= uint64_t{2} << 20;) {
    size_t free_bytes = 0, total_bytes = 0;
    require_cuda(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
    if (free_bytes <= leave_bytes) break;
    void* memory = nullptr;
    if (free_bytes - leave_bytes < piece || cudaMalloc(&memory, piece) != cudaSuccess) {
      (void)cudaGetLastError();
      piece /= 2;
      continue;
    }
    taken += piece;
  }
  return taken;
}

std::vector<std::byte> read_device(const std::byte* address, uint64_t bytes) {
  std::vector<std::byte> content(bytes);
  require_cuda(cudaMemcpy(content.data(), address, bytes, cudaMemcpyDefault), "cudaMemcpy to the host");
  return content;
}

std::span<const std::byte> range_around(const std::byte* address) {
  cudaPointerAttributes attributes{};
  if (cudaPointerGetAttributes(&attributes, address) != cudaSuccess || attributes.type != cudaMemoryTypeDevice) {
    (void)cudaGetLastError();
    return host_range_around(address);
  }
  CUdeviceptr base = 0;
  size_t bytes = 0;
  const CUresult result = driver_entry<decltype(&::cuMemGetAddressRange)>("cuMemGetAddressRange")(
      &base, &bytes, reinterpret_cast<CUdeviceptr>(address));
  if (result != CUDA_SUCCESS) throw std::runtime_error("cuMemGetAddressRange: error " + std::to_string(result));
  return {reinterpret_cast<const std::byte*>(base), bytes};
}

std::string memset_device(const std::byte* address, uint64_t bytes) {
  const cudaError_t launched = cudaMemset(const_cast<std::byte*>(address), 0x5A, bytes);
  return words_of(launched != cudaSuccess ? launched : cudaDeviceSynchronize());
}

std::string store_to_device(const std::byte* address) {
  const cudaError_t launched = launch_store(const_cast<std::byte*>(address));
  return words_of(launched != cudaSuccess ? launched : cudaDeviceSynchronize());
}

std::string trap_device() {
  const cudaError_t launched = launch_trap();
  return words_of(launched != cudaSuccess ? launched : cudaDeviceSynchronize());
}
#else
void use_device(const std::string& device) {
  if (!is_host(device)) no_cuda();
}
std::string current_device() { return "host"; }
CUstream_st* make_stream(bool host) {
  if (!host) no_cuda();
  return nullptr;
}
void end_stream(CUstream_st* stream) {
  if (stream != nullptr) no_cuda();
}
void wait_for(CUstream_st* stream) {
  if (stream != nullptr) no_cuda();
}
uint64_t gpu_bytes_in_use() { no_cuda(); }
uint64_t fill_gpu(uint64_t) { no_cuda(); }
std::vector<std::byte> read_device(const std::byte*, uint64_t) { no_cuda(); }
std::span<const std::byte> range_around(const std::byte* address) { return host_range_around(address); }
std::string memset_device(const std::byte*, uint64_t) { no_cuda(); }
std::string store_to_device(const std::byte*) { no_cuda(); }
std::string trap_device() { no_cuda(); }
#endif

Buffer::Buffer(bool host, uint64_t bytes) : host_(host), bytes_(bytes) {
  const uint64_t all_bytes = bytes + 2 * kFence;
#if WEIGHTD_E2E_CUDA
  if (!host_) {
    void* memory = nullptr;
    require_cuda(cudaMalloc(&memory, all_bytes), "cudaMalloc");
    base_ = static_cast<std::byte*>(memory);
    require_cuda(cudaMemset(base_, static_cast<int>(kFenceByte), all_bytes), "cudaMemset");
    require_cuda(cudaMemset(data(), static_cast<int>(kPoison), bytes), "cudaMemset");
    // Work on streams that do not wait for the default one follows.
    require_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    return;
  }
#endif
  base_ = static_cast<std::byte*>(std::aligned_alloc(kFence, (all_bytes + kFence - 1) / kFence * kFence));
  if (base_ == nullptr) throw std::bad_alloc();
  std::memset(base_, static_cast<int>(kFenceByte), all_bytes);
  std::memset(data(), static_cast<int>(kPoison), bytes);
}

Buffer::~Buffer() {
#if WEIGHTD_E2E_CUDA
  if (!host_) {
    (void)cudaFree(base_);
    return;
  }
#endif
  std::free(base_);
}

void Buffer::upload(std::span<const uint16_t> words) {
  if (words.size_bytes() > bytes_) throw std::runtime_error("more than the buffer holds");
#if WEIGHTD_E2E_CUDA
  if (!host_) {
    require_cuda(cudaMemcpy(data(), words.data(), words.size_bytes(), cudaMemcpyHostToDevice), "cudaMemcpy to the GPU");
    require_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    return;
  }
#endif
  if (!words.empty()) std::memcpy(data(), words.data(), words.size_bytes());
}

std::vector<std::byte> Buffer::all() const {
  if (!host_) return read_device(base_, bytes_ + 2 * kFence);
  return {base_, base_ + bytes_ + 2 * kFence};
}

std::vector<uint16_t> Buffer::download() const {
  const std::vector<std::byte> content = all();
  const auto is_fence = [](std::byte byte) { return byte == kFenceByte; };
  if (!std::all_of(content.begin(), content.begin() + kFence, is_fence) ||
      !std::all_of(content.end() - kFence, content.end(), is_fence)) {
    throw std::runtime_error("something was written beside an output");
  }
  std::vector<uint16_t> words(bytes_ / 2);
  if (!words.empty()) std::memcpy(words.data(), content.data() + kFence, words.size() * 2);
  return words;
}

bool Buffer::untouched() const {
  (void)download();
  const std::vector<std::byte> content = all();
  return std::all_of(content.begin() + kFence, content.end() - kFence, [](std::byte byte) { return byte == kPoison; });
}

}  // namespace weightd::e2e
