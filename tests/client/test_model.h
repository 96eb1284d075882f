// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/fd.h"
#include "ipc/messages.h"
#include "weightd/types.h"

namespace weightd::test {

/// BF16 words with a plausible spread of exponents and a few far outside of it.
[[nodiscard]] std::vector<uint16_t> random_weights(uint64_t count, uint64_t seed);
/// BF16 words of magnitude about 1.
[[nodiscard]] std::vector<uint16_t> random_activations(uint64_t count, uint64_t seed);
[[nodiscard]] std::vector<std::byte> bytes_of(const std::vector<uint16_t>& words);

/// A resident generation made by hand: what a loader would put into chunks and table.
struct SealedModel {
  ipc::TensorTable table;  // as sealed, unless a test changes it and calls seal_table()
  ipc::ModelSummary summary;
  std::vector<uint64_t> chunk_bytes;
  std::vector<UniqueFd> chunks;
  UniqueFd table_fd;
  uint64_t table_bytes = 0;

  void seal_table();
  [[nodiscard]] std::vector<UniqueFd> copies_of_fds() const;  // the table, then the chunks
};

/// Collects tensors, then lays them out.
class ModelBuilder {
 public:
  void add_raw(const std::string& name, DType dtype, const Shape& shape, const std::vector<std::byte>& bytes);
  void add_raw(const std::string& name, const Shape& shape, const std::vector<uint16_t>& words) {
    add_raw(name, DType::kBF16, shape, bytes_of(words));
  }
  /// shape: [n, k] or [batch, n, k].
  void add_f12(const std::string& name, const Shape& shape, const std::vector<uint16_t>& words);
  struct Part {
    std::string name;
    uint64_t rows = 0;
  };
  void add_merged(const std::string& name, const std::vector<Part>& parts, uint64_t k, const std::vector<uint16_t>& words);

  /// A chunk size below the arena's makes several chunks.
  [[nodiscard]] SealedModel seal(const std::string& name, uint64_t generation, uint64_t chunk_bytes = uint64_t{1} << 30);

 private:
  uint64_t place(const std::vector<std::byte>& plane);
  uint32_t add_f12_storage(const std::string& name, uint64_t batch, uint64_t n, uint64_t k, bool merged,
                           const std::vector<uint16_t>& words);

  std::vector<std::byte> arena_;
  std::vector<std::byte> pool_;
  ipc::TensorTable table_;
};

}  // namespace weightd::test
