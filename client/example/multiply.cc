// SPDX-License-Identifier: Apache-2.0
// Multiplies a vector of ones with one tensor of a model that weightd holds: multiply MODEL TENSOR
#include <cstdint>
#include <cstdio>
#include <vector>

#include "weightd/client.h"

namespace {

constexpr uint16_t kOne = 0x3f80;  // 1.0 as BF16

weightd::Status run(const char* model_name, const char* tensor_name) {
  // $WEIGHTD_SOCKET, or the installed service's socket.
  WEIGHTD_ASSIGN_OR_RETURN(weightd::Client client, weightd::Client::connect());
  // A lease on the model: its compressed bytes are mapped read-only, shared with every other process.
  WEIGHTD_ASSIGN_OR_RETURN(weightd::Model model, client.acquire(model_name));
  WEIGHTD_ASSIGN_OR_RETURN(const weightd::Tensor weight, model.tensor(tensor_name));
  if (weight.info().shape.size() != 2) return weightd::Status::invalid_argument("not a matrix");
  const uint64_t n = weight.info().shape[0], k = weight.info().shape[1];

  const std::vector<uint16_t> x(k, kOne);
  std::vector<uint16_t> y(n);
  WEIGHTD_RETURN_IF_ERROR(weight.gemm({x.data(), 1, k, static_cast<int64_t>(k)}, {y.data(), 1, n, static_cast<int64_t>(n)}));
  std::printf("%s %s: y[0] = 0x%04x, y[%llu] = 0x%04x\n", weight.info().name.c_str(),
              weightd::shape_to_string(weight.info().shape).c_str(), y.front(), static_cast<unsigned long long>(n - 1), y.back());
  return model.release();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return std::fprintf(stderr, "usage: multiply MODEL TENSOR\n"), 2;
  const weightd::Status status = run(argv[1], argv[2]);
  if (!status.ok()) std::fprintf(stderr, "multiply: %s\n", status.to_string().c_str());
  return status.ok() ? 0 : 1;
}
