// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tools/bench/recorder.h"
#include "tools/bench/selection.h"
#include "weightd/status.h"

/// What the verbs do on a GPU. A build without CUDA answers kUnsupported everywhere.
namespace weightd::tools {

struct GpuBench {
  std::string device;  // UUID; empty: the first GPU
  std::vector<BenchShape> shapes;
  std::vector<uint64_t> tokens;
  std::vector<std::string> ops;
  std::vector<std::optional<double>> escapes;  // each is a run over all shapes; none: weights as trained ones are
  int repeats = 12;
};
Status run_gpu_bench(const GpuBench& bench, Recorder& recorder);

struct ChainBench {
  std::string device;
  std::vector<BenchShape> shapes;  // of one layer, in order
  std::vector<uint64_t> tokens;
  int layers = 32;
  int repeats = 12;
};
Status run_chain_bench(const ChainBench& bench, Recorder& recorder);

/// A GPU for the verbs that speak with a daemon: its context is there before anything is timed.
class GpuSide {
 public:
  /// The GPU of this UUID. kNotFound, kUnavailable, kUnsupported.
  [[nodiscard]] static Result<std::unique_ptr<GpuSide>> open(const std::string& uuid);
  virtual ~GpuSide() = default;

  [[nodiscard]] virtual double context_ms() const = 0;  // what making the context took
  /// GB/s from pinned host memory, the best of a few copies of 1 GiB.
  [[nodiscard]] virtual Result<double> host_to_device_gbps() = 0;
  /// GB/s of the block hashes' kernel over `bytes` of device memory, the median of a few.
  [[nodiscard]] virtual Result<double> hash_gbps(uint64_t bytes) = 0;
  /// Device memory of at least `bytes`, the same each time unless it must grow.
  [[nodiscard]] virtual Result<std::span<std::byte>> scratch(uint64_t bytes) = 0;
  /// Waits for all work on this GPU, and says how it ended.
  virtual Status synchronize() = 0;
  /// A row that carries GPU, driver and commit.
  [[nodiscard]] virtual Row row(std::string op, std::string name) const = 0;
};

}  // namespace weightd::tools
