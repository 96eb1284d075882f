// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ipc/cuda_driver.h"

namespace weightd::testing {

struct FakeGpu {
  std::string name = "Fake H200";
  uint64_t total_bytes = uint64_t{4} << 30;
  bool vmm = true, fd_handles = true;
  int compute_major = 9, compute_minor = 0;
};

/// A CUDA driver whose device memory is host memory: chunks are memfds, so their bytes are really shared, also with other
/// processes, and a read-only mapping really refuses writes. Copies on a stream happen when the stream or an event on it is waited
/// for, and no sooner. Calls that the real driver would refuse are refused; those that it would not forgive are listed by misuse().
/// One at a time in a process, because a driver's entry points are plain functions. Thread-safe.
class FakeCuda {
 public:
  static constexpr uint64_t kGranularityBytes = uint64_t{2} << 20;

  explicit FakeCuda(std::vector<FakeGpu> gpus = {FakeGpu()});
  ~FakeCuda();
  FakeCuda(const FakeCuda&) = delete;
  FakeCuda& operator=(const FakeCuda&) = delete;

  [[nodiscard]] const ipc::CudaDriver& driver() const;
  /// Of the GPU with this ordinal: its bytes are 16 times the ordinal plus 0 to 15.
  [[nodiscard]] static std::string uuid(int ordinal);

  /// What was made and not given back.
  struct Live {
    int handles = 0, ranges = 0, mappings = 0;  // of virtual memory
    int allocations = 0, opened = 0;            // legacy
    int contexts = 0, current = 0;              // retained; pushed, on all threads
    int host_blocks = 0, streams = 0, events = 0;
    uint64_t host_bytes = 0;    // of the blocks
    uint64_t device_bytes = 0;  // on all GPUs, by whoever holds them here
    bool operator==(const Live&) const = default;
  };
  [[nodiscard]] Live live() const;

  /// Names of the entry points called, in order ("cuMemCreate").
  [[nodiscard]] std::vector<std::string> calls() const;
  void clear_calls();
  /// "cuMemMap of a mapped range", one line each.
  [[nodiscard]] std::vector<std::string> misuse() const;
  void clear_misuse();

  /// The n-th call from now (1: the next) fails with `result` and does nothing. Calls that give something back never fail in this
  /// way.
  void fail_call(int n, CUresult result);
  /// The n-th call from now of one entry point, and `count - 1` after it.
  void fail_entry(const std::string& entry, int n, CUresult result, int count = 1);
  /// Whether the failure asked for last has happened.
  [[nodiscard]] bool failed() const;

  /// Bytes of a GPU that another process holds.
  void occupy(int ordinal, uint64_t bytes);
  /// Called before each call of an entry point, with its name, unlocked.
  void on_call(std::function<void(const std::string& entry)> hook);

  struct State;

 private:
  std::unique_ptr<State> state_;
};

}  // namespace weightd::testing
