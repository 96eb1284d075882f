// SPDX-License-Identifier: Apache-2.0
// A worker process: leases a model, pushes activations through every linear layer from the shared copy, writes down what it computed.
//   trace_worker SOCKET MODEL TRACE tokens FILE    a BERT-architecture model; FILE: one line of token ids a sentence
//   trace_worker SOCKET MODEL TRACE random SEED    any model: random activations, 8 tokens, through every BF16 matrix
// Prints "attached ...", "computed ..." and then keeps its lease until standard input ends.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <random>
#include <sstream>
#include <stdexcept>

#include "tests/e2e/encoder.h"
#include "tests/e2e/trace.h"
#include "weightd/client.h"

namespace weightd::e2e {
namespace {

template <typename T>
T require(Result<T> result) {
  if (!result.ok()) throw std::runtime_error(result.status().to_string());
  return *std::move(result);
}

std::vector<std::vector<uint32_t>> read_sentences(const std::string& path) {
  std::vector<std::vector<uint32_t>> sentences;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::vector<uint32_t> tokens;
    for (uint32_t token = 0; words >> token;) tokens.push_back(token);
    if (!tokens.empty()) sentences.push_back(std::move(tokens));
  }
  if (sentences.empty()) throw std::runtime_error(path + ": no sentences");
  return sentences;
}

std::vector<TraceRecord> encode_sentences(const Model& model, const std::string& path) {
  std::vector<TraceRecord> trace;
  const Encoder encoder = require(Encoder::create(model));
  std::vector<std::vector<float>> embeddings;
  for (const auto& tokens : read_sentences(path)) embeddings.push_back(require(encoder.encode(tokens, trace)));
  for (size_t i = 1; i < embeddings.size(); ++i) {
    double cosine = 0;
    for (size_t d = 0; d < embeddings[i].size(); ++d) cosine += static_cast<double>(embeddings[0][d]) * static_cast<double>(embeddings[i][d]);
    std::printf("similarity of sentences 1 and %zu: %.3f\n", i + 1, cosine);
  }
  return trace;
}

std::vector<TraceRecord> random_activations(const Model& model, uint32_t seed) {
  constexpr uint64_t kTokens = 8;
  std::vector<TraceRecord> trace;
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (const TensorInfo& info : model.tensors()) {
    if (info.dtype != DType::kBF16 || info.shape.size() != 2 || info.merged || info.logical_bytes == 0) continue;
    const uint64_t n = info.shape[0], k = info.shape[1];
    TraceRecord record{TraceRecord::Kind::kGemm, info.name, kTokens, n, k, std::vector<uint16_t>(kTokens * k), {}, std::vector<uint16_t>(kTokens * n)};
    for (uint16_t& word : record.x) {
      const float value = normal(random);
      uint32_t bits = 0;
      std::memcpy(&bits, &value, 4);
      word = static_cast<uint16_t>(bits >> 16);
    }
    const Tensor tensor = require(model.tensor(info.name));
    const Status status = tensor.gemm({record.x.data(), kTokens, k, static_cast<int64_t>(k)}, {record.y.data(), kTokens, n, static_cast<int64_t>(n)});
    if (!status.ok()) throw std::runtime_error(info.name + ": " + status.to_string());
    trace.push_back(std::move(record));
  }
  return trace;
}

int run(int argc, char** argv) {
  if (argc != 6) {
    std::fprintf(stderr, "usage: trace_worker SOCKET MODEL TRACE tokens FILE | random SEED\n");
    return 2;
  }
  ClientOptions options;
  options.socket_path = argv[1];
  options.name = "trace_worker";
  Client client = require(Client::connect(options));
  Model model = require(client.acquire(argv[2]));
  const Model::Memory memory = model.memory();
  std::printf("attached %s: shared %llu bytes, private %llu bytes\n", model.info().name.c_str(),
              static_cast<unsigned long long>(memory.shared_bytes), static_cast<unsigned long long>(memory.private_bytes));
  std::fflush(stdout);
  const std::vector<TraceRecord> trace = std::strcmp(argv[4], "tokens") == 0
                                             ? encode_sentences(model, argv[5])
                                             : random_activations(model, static_cast<uint32_t>(std::stoul(argv[5])));
  write_trace(argv[3], trace);
  std::printf("computed %zu layers\n", trace.size());
  std::fflush(stdout);
  while (std::getchar() != EOF) {
  }
  const Status released = model.release();
  if (!released.ok()) throw std::runtime_error(released.to_string());
  return 0;
}

}  // namespace
}  // namespace weightd::e2e

int main(int argc, char** argv) {
  try {
    return weightd::e2e::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "trace_worker: %s\n", error.what());
    return 1;
  }
}
