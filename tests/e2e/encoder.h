// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/e2e/trace.h"
#include "weightd/client.h"

namespace weightd::e2e {

/// A BERT-architecture sentence encoder (post layer norm, GELU, mean pooling) whose weights stay in the mapped arena: linear layers
/// run through Tensor::gemm, embeddings through Tensor::decompress_rows; norms, softmax and biases in fp32 here.
class Encoder {
 public:
  /// Finds sizes and layers from the tensors' names and shapes. kNotFound: not a BERT-architecture model.
  [[nodiscard]] static Result<Encoder> create(const Model& model);

  /// The mean-pooled, normalised embedding of one token sequence; appends what it computed to `trace`.
  [[nodiscard]] Result<std::vector<float>> encode(const std::vector<uint32_t>& tokens, std::vector<TraceRecord>& trace) const;

 private:
  using Floats = std::vector<float>;
  explicit Encoder(Model model) : model_(std::move(model)) {}
  [[nodiscard]] Result<Floats> vector(const std::string& name) const;
  [[nodiscard]] Result<Floats> gather(const std::string& name, const std::vector<uint64_t>& rows, std::vector<TraceRecord>& trace) const;
  [[nodiscard]] Result<Floats> linear(const std::string& name, const Floats& input, std::vector<TraceRecord>& trace) const;
  Status layer_norm(const std::string& name, Floats& values) const;
  [[nodiscard]] Result<Floats> attention(const std::string& layer, const Floats& hidden, std::vector<TraceRecord>& trace) const;
  Status layer(uint64_t index, Floats& hidden, std::vector<TraceRecord>& trace) const;

  Model model_;
  std::string prefix_;
  uint64_t hidden_ = 0, heads_ = 0, layers_ = 0;
};

}  // namespace weightd::e2e
