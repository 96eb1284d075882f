// SPDX-License-Identifier: Apache-2.0
#include "daemon/loader/pinned_memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <utility>

#include "base/parallel.h"
#include "base/text.h"

namespace weightd::loader {
namespace {

constexpr uint64_t kHugePageBytes = uint64_t{2} << 20;
constexpr uint64_t kPageBytes = 4096;

}  // namespace

Result<PinnedMemory> PinnedMemory::make(const ipc::CudaDriver& driver, uint64_t size_bytes) {
  PinnedMemory memory;
  memory.driver_ = &driver;
  const uint64_t bytes = (size_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  void* mapped = ::mmap(nullptr, bytes + kHugePageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return status_from_errno(errno, "staging memory of " + human_bytes(bytes));
  memory.mapped_ = static_cast<std::byte*>(mapped);
  memory.mapped_bytes_ = bytes + kHugePageBytes;
  const uint64_t slack = kHugePageBytes - reinterpret_cast<uintptr_t>(mapped) % kHugePageBytes;
  memory.data_ = memory.mapped_ + slack % kHugePageBytes;
  (void)::madvise(memory.data_, bytes, MADV_HUGEPAGE);  // a kernel without them does with small ones
  parallel_ranges(bytes, kHugePageBytes, 0, [&](uint64_t begin, uint64_t end) {
    for (uint64_t at = begin; at < end; at += kPageBytes) *static_cast<volatile std::byte*>(memory.data_ + at) = std::byte{0};
  });
  WEIGHTD_RETURN_IF_ERROR(ipc::status_from_driver(driver, driver.mem_host_register(memory.data_, bytes, 0),
                                                  "cuMemHostRegister of " + human_bytes(bytes)));
  memory.registered_ = true;
  return memory;
}

PinnedMemory::PinnedMemory(PinnedMemory&& other) noexcept { *this = std::move(other); }

PinnedMemory& PinnedMemory::operator=(PinnedMemory&& other) noexcept {
  if (this == &other) return *this;
  give_back();
  driver_ = other.driver_;
  mapped_ = std::exchange(other.mapped_, nullptr);
  mapped_bytes_ = std::exchange(other.mapped_bytes_, 0);
  data_ = std::exchange(other.data_, nullptr);
  registered_ = std::exchange(other.registered_, false);
  return *this;
}

PinnedMemory::~PinnedMemory() { give_back(); }

void PinnedMemory::give_back() {
  if (registered_) (void)driver_->mem_host_unregister(data_);
  registered_ = false;
  if (mapped_ != nullptr) ::munmap(mapped_, mapped_bytes_);
  mapped_ = nullptr;
}

}  // namespace weightd::loader
