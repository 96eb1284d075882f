// SPDX-License-Identifier: Apache-2.0
#include "tests/e2e/encoder.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

namespace weightd::e2e {
namespace {

constexpr uint64_t kHeadWidth = 32;
constexpr float kNormEpsilon = 1e-12F;

float widen(uint16_t word) { return std::bit_cast<float>(static_cast<uint32_t>(word) << 16); }

uint16_t narrow(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

float gelu(float x) { return 0.5F * x * (1.0F + std::erf(x * 0.70710678F)); }

void softmax(std::vector<float>& row) {
  const float top = *std::max_element(row.begin(), row.end());
  for (float& v : row) v = std::exp(v - top);
  const float sum = std::accumulate(row.begin(), row.end(), 0.0F);
  for (float& v : row) v /= sum;
}

}  // namespace

Result<Encoder> Encoder::create(const Model& model) {
  Encoder encoder(model);
  for (const char* prefix : {"", "bert."}) {
    const auto words = model.tensor(std::string(prefix) + "embeddings.word_embeddings.weight");
    if (!words.ok()) continue;
    encoder.prefix_ = prefix;
    encoder.hidden_ = words->info().shape[1];
    encoder.heads_ = encoder.hidden_ / kHeadWidth;
    while (model.tensor(encoder.prefix_ + "encoder.layer." + std::to_string(encoder.layers_) + ".output.dense.weight").ok()) ++encoder.layers_;
    return encoder;
  }
  return Status::not_found("no embeddings.word_embeddings.weight: not a BERT-architecture model");
}

Result<Encoder::Floats> Encoder::vector(const std::string& name) const {
  WEIGHTD_ASSIGN_OR_RETURN(const Tensor tensor, model_.tensor(prefix_ + name));
  std::vector<uint16_t> words(tensor.info().logical_bytes / 2);
  WEIGHTD_RETURN_IF_ERROR(tensor.decompress(std::as_writable_bytes(std::span(words))));
  Floats values(words.size());
  std::transform(words.begin(), words.end(), values.begin(), widen);
  return values;
}

Result<Encoder::Floats> Encoder::gather(const std::string& name, const std::vector<uint64_t>& rows, std::vector<TraceRecord>& trace) const {
  WEIGHTD_ASSIGN_OR_RETURN(const Tensor tensor, model_.tensor(prefix_ + name));
  TraceRecord record{TraceRecord::Kind::kRows, prefix_ + name, rows.size(), 0, hidden_, {}, rows, std::vector<uint16_t>(rows.size() * hidden_)};
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto out = std::span(record.y).subspan(i * hidden_, hidden_);
    WEIGHTD_RETURN_IF_ERROR(tensor.decompress_rows(rows[i], rows[i] + 1, std::as_writable_bytes(out)));
  }
  Floats values(record.y.size());
  std::transform(record.y.begin(), record.y.end(), values.begin(), widen);
  trace.push_back(std::move(record));
  return values;
}

Result<Encoder::Floats> Encoder::linear(const std::string& name, const Floats& input, std::vector<TraceRecord>& trace) const {
  WEIGHTD_ASSIGN_OR_RETURN(const Tensor weight, model_.tensor(prefix_ + name + ".weight"));
  WEIGHTD_ASSIGN_OR_RETURN(const Floats bias, vector(name + ".bias"));
  const uint64_t n = weight.info().shape[0], k = weight.info().shape[1], m = input.size() / k;
  TraceRecord record{TraceRecord::Kind::kGemm, prefix_ + name + ".weight", m, n, k, std::vector<uint16_t>(m * k), {}, std::vector<uint16_t>(m * n)};
  std::transform(input.begin(), input.end(), record.x.begin(), narrow);
  WEIGHTD_RETURN_IF_ERROR(weight.gemm({record.x.data(), m, k, static_cast<int64_t>(k)}, {record.y.data(), m, n, static_cast<int64_t>(n)}));
  Floats output(m * n);
  for (uint64_t i = 0; i < m * n; ++i) output[i] = widen(record.y[i]) + bias[i % n];
  trace.push_back(std::move(record));
  return output;
}

Status Encoder::layer_norm(const std::string& name, Floats& values) const {
  WEIGHTD_ASSIGN_OR_RETURN(const Floats gain, vector(name + ".weight"));
  WEIGHTD_ASSIGN_OR_RETURN(const Floats bias, vector(name + ".bias"));
  for (uint64_t row = 0; row < values.size() / hidden_; ++row) {
    float* v = values.data() + row * hidden_;
    const float mean = std::accumulate(v, v + hidden_, 0.0F) / static_cast<float>(hidden_);
    float variance = 0;
    for (uint64_t i = 0; i < hidden_; ++i) variance += (v[i] - mean) * (v[i] - mean);
    const float scale = 1.0F / std::sqrt(variance / static_cast<float>(hidden_) + kNormEpsilon);
    for (uint64_t i = 0; i < hidden_; ++i) v[i] = (v[i] - mean) * scale * gain[i] + bias[i];
  }
  return {};
}

Result<Encoder::Floats> Encoder::attention(const std::string& layer, const Floats& hidden, std::vector<TraceRecord>& trace) const {
  WEIGHTD_ASSIGN_OR_RETURN(const Floats q, linear(layer + "attention.self.query", hidden, trace));
  WEIGHTD_ASSIGN_OR_RETURN(const Floats k, linear(layer + "attention.self.key", hidden, trace));
  WEIGHTD_ASSIGN_OR_RETURN(const Floats v, linear(layer + "attention.self.value", hidden, trace));
  const uint64_t tokens = hidden.size() / hidden_;
  Floats context(hidden.size());
  for (uint64_t head = 0; head < heads_; ++head) {
    for (uint64_t i = 0; i < tokens; ++i) {
      Floats weights(tokens);
      for (uint64_t j = 0; j < tokens; ++j) {
        const uint64_t a = i * hidden_ + head * kHeadWidth, b = j * hidden_ + head * kHeadWidth;
        weights[j] = std::inner_product(q.begin() + static_cast<int64_t>(a), q.begin() + static_cast<int64_t>(a + kHeadWidth),
                                        k.begin() + static_cast<int64_t>(b), 0.0F) / std::sqrt(static_cast<float>(kHeadWidth));
      }
      softmax(weights);
      for (uint64_t j = 0; j < tokens; ++j) {
        for (uint64_t d = 0; d < kHeadWidth; ++d) {
          context[i * hidden_ + head * kHeadWidth + d] += weights[j] * v[j * hidden_ + head * kHeadWidth + d];
        }
      }
    }
  }
  return context;
}

Status Encoder::layer(uint64_t index, Floats& hidden, std::vector<TraceRecord>& trace) const {
  const std::string name = "encoder.layer." + std::to_string(index) + ".";
  const auto add_to_hidden = [&](const Floats& delta) { std::transform(hidden.begin(), hidden.end(), delta.begin(), hidden.begin(), std::plus<>()); };
  WEIGHTD_ASSIGN_OR_RETURN(const Floats context, attention(name, hidden, trace));
  WEIGHTD_ASSIGN_OR_RETURN(const Floats mixed, linear(name + "attention.output.dense", context, trace));
  add_to_hidden(mixed);
  WEIGHTD_RETURN_IF_ERROR(layer_norm(name + "attention.output.LayerNorm", hidden));
  WEIGHTD_ASSIGN_OR_RETURN(Floats wide, linear(name + "intermediate.dense", hidden, trace));
  std::transform(wide.begin(), wide.end(), wide.begin(), gelu);
  WEIGHTD_ASSIGN_OR_RETURN(const Floats back, linear(name + "output.dense", wide, trace));
  add_to_hidden(back);
  return layer_norm(name + "output.LayerNorm", hidden);
}

Result<std::vector<float>> Encoder::encode(const std::vector<uint32_t>& tokens, std::vector<TraceRecord>& trace) const {
  std::vector<uint64_t> positions(tokens.size());
  std::iota(positions.begin(), positions.end(), uint64_t{0});
  WEIGHTD_ASSIGN_OR_RETURN(Floats hidden, gather("embeddings.word_embeddings.weight", {tokens.begin(), tokens.end()}, trace));
  WEIGHTD_ASSIGN_OR_RETURN(const Floats places, gather("embeddings.position_embeddings.weight", positions, trace));
  WEIGHTD_ASSIGN_OR_RETURN(const Floats types,
                           gather("embeddings.token_type_embeddings.weight", std::vector<uint64_t>(tokens.size(), 0), trace));
  for (size_t i = 0; i < hidden.size(); ++i) hidden[i] += places[i] + types[i];
  WEIGHTD_RETURN_IF_ERROR(layer_norm("embeddings.LayerNorm", hidden));
  for (uint64_t index = 0; index < layers_; ++index) WEIGHTD_RETURN_IF_ERROR(layer(index, hidden, trace));
  // The pooler is a linear layer of the checkpoint too, though sentence embeddings are the mean of the hidden states.
  const Floats first(hidden.begin(), hidden.begin() + static_cast<int64_t>(hidden_));
  WEIGHTD_ASSIGN_OR_RETURN(const Floats pooled, linear("pooler.dense", first, trace));

  std::vector<float> embedding(hidden_);
  for (size_t i = 0; i < hidden.size(); ++i) embedding[i % hidden_] += hidden[i];
  const float norm = std::sqrt(std::inner_product(embedding.begin(), embedding.end(), embedding.begin(), 0.0F));
  for (float& v : embedding) v /= norm;
  return embedding;
}

}  // namespace weightd::e2e
