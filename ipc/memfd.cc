// SPDX-License-Identifier: Apache-2.0
#include "ipc/memfd.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <memory>
#include <utility>

#include "base/text.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U  // Linux 6.3
#endif

namespace weightd::ipc {
namespace {

constexpr int kSealsOfShared = F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW;
constexpr uint64_t kReserveStepBytes = uint64_t{64} << 20;  // so that a signal repeats little work

uint64_t page_bytes() { return static_cast<uint64_t>(::sysconf(_SC_PAGESIZE)); }

Result<UniqueFd> create_memfd(const std::string& name) {
  // The kernel takes at most 249 bytes; the name is for /proc only.
  const std::string shown = name.substr(0, 200);
  int fd = ::memfd_create(shown.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
  if (fd < 0 && errno == EINVAL) fd = ::memfd_create(shown.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return status_from_errno(errno, "memfd_create");
  return UniqueFd(fd);
}

Status reserve(int fd, uint64_t bytes, const std::string& name) {
  for (uint64_t done = 0; done < bytes;) {
    const uint64_t step = std::min(bytes - done, kReserveStepBytes);
    if (::fallocate(fd, 0, static_cast<off_t>(done), static_cast<off_t>(step)) == 0) {
      done += step;
    } else if (errno != EINTR) {
      return status_from_errno(errno, name + ": reserving host memory");
    }
  }
  return {};
}

/// What the kernel says can still be had without swapping out everybody else; 0 when it does not say.
uint64_t available_bytes() {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen("/proc/meminfo", "re"), &std::fclose);
  char line[128];
  unsigned long long kib = 0;
  while (file && std::fgets(line, sizeof(line), file.get()) != nullptr) {
    if (std::sscanf(line, "MemAvailable: %llu kB", &kib) == 1) return kib * 1024;
  }
  return 0;
}

Result<uint64_t> total_bytes(const std::vector<uint64_t>& chunk_bytes) {
  uint64_t total = 0;
  for (const uint64_t bytes : chunk_bytes) {
    if (bytes == 0 || bytes % page_bytes() != 0) {
      return Status::invalid_argument("chunk of " + std::to_string(bytes) +
                                      " bytes: must be a positive multiple of the page size " + std::to_string(page_bytes()));
    }
    if (bytes > (uint64_t{1} << 56) || total > (uint64_t{1} << 56))
      return Status::invalid_argument("the chunks together are too large");
    total += bytes;
  }
  return total;
}

/// Address space with nothing behind it, so that the chunks lie side by side.
Result<std::byte*> reserve_addresses(uint64_t bytes) {
  void* base = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return status_from_errno(errno, "reserving " + human_bytes(bytes) + " of address space");
  return static_cast<std::byte*>(base);
}

Status map_chunk(int fd, std::byte* where, uint64_t bytes, int protection) {
  if (::mmap(where, bytes, protection, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
    return status_from_errno(errno, "mapping a chunk of " + human_bytes(bytes));
  }
  // A core file of a worker or the loader is not the place for gigabytes of weights. Best effort.
  (void)::madvise(where, bytes, MADV_DONTDUMP);
  return {};
}

void unmap(std::byte* base, uint64_t bytes) {
  if (base != nullptr) ::munmap(base, bytes);
}

/// Seals, and exchanges the descriptor for a read-only one: whoever gets it cannot map it writable, and kernels before 6.7 refuse a
/// shared mapping of a write-sealed file through a writable descriptor, even one for reading.
Result<UniqueFd> seal_read_only(UniqueFd fd, const std::string& what) {
  if (::fcntl(fd.get(), F_ADD_SEALS, kSealsOfShared | F_SEAL_SEAL) != 0) return status_from_errno(errno, what + ": sealing");
  const std::string link = "/proc/self/fd/" + std::to_string(fd.get());
  UniqueFd read_only(::open(link.c_str(), O_RDONLY | O_CLOEXEC));
  if (!read_only.valid()) return status_from_errno(errno, what + ": opening it for reading (" + link + ")");
  return read_only;
}

Status check_sealed(int fd, uint64_t bytes, const std::string& what) {
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 && errno == EBADF) return status_from_errno(EBADF, what);
  if (seals < 0 || (seals & kSealsOfShared) != kSealsOfShared) {
    return Status::corruption(what + ": not a memfd sealed against writing and resizing: its sender could change it later");
  }
  struct stat info {};
  if (::fstat(fd, &info) != 0) return status_from_errno(errno, what + ": fstat");
  if (static_cast<uint64_t>(info.st_size) != bytes) {
    return Status::corruption(what + ": has " + std::to_string(info.st_size) + " bytes, expected " + std::to_string(bytes));
  }
  return {};
}

}  // namespace

std::vector<uint64_t> cut_chunks(uint64_t arena_bytes, uint64_t max_chunk_bytes, uint64_t granularity) {
  WEIGHTD_CHECK(granularity > 0 && max_chunk_bytes >= granularity && max_chunk_bytes % granularity == 0);
  std::vector<uint64_t> chunks;
  for (uint64_t left = arena_bytes; left > 0;) {
    const uint64_t part = std::min(left, max_chunk_bytes);
    chunks.push_back((part + granularity - 1) / granularity * granularity);
    left -= part;
  }
  return chunks;
}

Result<WritableArena> WritableArena::create(const std::vector<uint64_t>& chunk_bytes, const std::string& name) {
  WritableArena arena;
  WEIGHTD_ASSIGN_OR_RETURN(const uint64_t total, total_bytes(chunk_bytes));
  if (total == 0) return arena;
  const auto with_need = [&](const Status& status) {
    return status.with_context(name + " needs " + std::to_string(total) + " bytes (" + human_bytes(total) + ") of host memory");
  };
  // Asked first: the kernel may rather kill processes than let fallocate fail.
  const uint64_t available = available_bytes();
  if (available != 0 && total > available) {
    return with_need(
        Status::resource_exhausted(std::to_string(available) + " bytes (" + human_bytes(available) + ") are available"));
  }
  for (const uint64_t bytes : chunk_bytes) {
    WEIGHTD_ASSIGN_OR_RETURN(UniqueFd fd, create_memfd(name));
    if (Status status = reserve(fd.get(), bytes, name); !status.ok()) return with_need(status);
    arena.fds_.push_back(std::move(fd));
  }
  WEIGHTD_ASSIGN_OR_RETURN(arena.base_, reserve_addresses(total));
  arena.size_ = total;
  uint64_t offset = 0;
  for (size_t i = 0; i < chunk_bytes.size(); ++i) {
    WEIGHTD_RETURN_IF_ERROR(map_chunk(arena.fds_[i].get(), arena.base_ + offset, chunk_bytes[i], PROT_READ | PROT_WRITE));
    offset += chunk_bytes[i];
  }
  return arena;
}

WritableArena::WritableArena(WritableArena&& other) noexcept
    : fds_(std::move(other.fds_)), base_(std::exchange(other.base_, nullptr)), size_(std::exchange(other.size_, 0)) {}

WritableArena& WritableArena::operator=(WritableArena&& other) noexcept {
  if (this != &other) {
    unmap(base_, size_);
    fds_ = std::move(other.fds_);
    base_ = std::exchange(other.base_, nullptr);
    size_ = std::exchange(other.size_, 0);
  }
  return *this;
}

WritableArena::~WritableArena() { unmap(base_, size_); }

std::span<std::byte> WritableArena::bytes() { return {base_, size_}; }

Result<std::vector<UniqueFd>> WritableArena::seal() && {
  // A writable mapping forbids the seal.
  unmap(std::exchange(base_, nullptr), std::exchange(size_, 0));
  std::vector<UniqueFd> sealed;
  for (UniqueFd& fd : fds_) {
    WEIGHTD_ASSIGN_OR_RETURN(UniqueFd read_only, seal_read_only(std::move(fd), "chunk " + std::to_string(sealed.size())));
    sealed.push_back(std::move(read_only));
  }
  fds_.clear();
  return sealed;
}

Result<MappedArena> MappedArena::map(std::vector<UniqueFd> fds, const std::vector<uint64_t>& chunk_bytes) {
  MappedArena arena;
  if (fds.size() != chunk_bytes.size()) {
    return Status::invalid_argument(std::to_string(fds.size()) + " descriptors for " + std::to_string(chunk_bytes.size()) +
                                    " chunks");
  }
  WEIGHTD_ASSIGN_OR_RETURN(const uint64_t total, total_bytes(chunk_bytes));
  // All are checked before any is mapped: no read of the mapping can fault later.
  for (size_t i = 0; i < fds.size(); ++i) {
    WEIGHTD_RETURN_IF_ERROR(check_sealed(fds[i].get(), chunk_bytes[i], "chunk " + std::to_string(i)));
  }
  if (total == 0) return arena;
  WEIGHTD_ASSIGN_OR_RETURN(arena.base_, reserve_addresses(total));
  arena.size_ = total;
  uint64_t offset = 0;
  for (size_t i = 0; i < fds.size(); ++i) {
    WEIGHTD_RETURN_IF_ERROR(
        map_chunk(fds[i].get(), arena.base_ + offset, chunk_bytes[i], PROT_READ).with_context("chunk " + std::to_string(i)));
    offset += chunk_bytes[i];
  }
  return arena;
}

MappedArena::MappedArena(MappedArena&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedArena& MappedArena::operator=(MappedArena&& other) noexcept {
  if (this != &other) {
    unmap(base_, size_);
    base_ = std::exchange(other.base_, nullptr);
    size_ = std::exchange(other.size_, 0);
  }
  return *this;
}

MappedArena::~MappedArena() { unmap(base_, size_); }

Result<UniqueFd> sealed_memfd(std::span<const std::byte> bytes, const std::string& name) {
  WEIGHTD_ASSIGN_OR_RETURN(UniqueFd fd, create_memfd(name));
  WEIGHTD_RETURN_IF_ERROR(reserve(fd.get(), bytes.size(), name));
  WEIGHTD_RETURN_IF_ERROR(pwrite_full(fd.get(), bytes, 0, name));
  return seal_read_only(std::move(fd), name);
}

Result<std::vector<std::byte>> read_sealed_memfd(int fd, uint64_t bytes, uint64_t max_bytes) {
  if (bytes > max_bytes) {
    return Status::invalid_argument("memfd of " + std::to_string(bytes) + " bytes: at most " + std::to_string(max_bytes) +
                                    " are read");
  }
  WEIGHTD_RETURN_IF_ERROR(check_sealed(fd, bytes, "memfd"));
  std::vector<std::byte> content(bytes);
  WEIGHTD_RETURN_IF_ERROR(pread_full(fd, content, 0, "memfd"));
  return content;
}

}  // namespace weightd::ipc
