// SPDX-License-Identifier: Apache-2.0
// Multiplies a vector of ones with one tensor of a model on a GPU: multiply_cuda MODEL TENSOR
// Run it with CUDA_VISIBLE_DEVICES=<UUID of the model's GPU, as weightctl status shows it> where there are several.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <vector>

#include "weightd/client.h"

namespace {

constexpr uint16_t kOne = 0x3f80;  // 1.0 as BF16

weightd::Status check(cudaError_t error) {
  return error == cudaSuccess ? weightd::Status() : weightd::Status::cuda(cudaGetErrorString(error));
}

weightd::Status run(const char* model_name, const char* tensor_name) {
  WEIGHTD_ASSIGN_OR_RETURN(weightd::Client client, weightd::Client::connect());
  // Mapped into this process's GPU address space, read-only: the same memory for every worker.
  WEIGHTD_ASSIGN_OR_RETURN(weightd::Model model, client.acquire(model_name));
  WEIGHTD_ASSIGN_OR_RETURN(const weightd::Tensor weight, model.tensor(tensor_name));
  if (weight.info().shape.size() != 2) return weightd::Status::invalid_argument("not a matrix");
  const uint64_t n = weight.info().shape[0], k = weight.info().shape[1];

  std::vector<uint16_t> x(k, kOne), y(n);
  uint16_t *device_x = nullptr, *device_y = nullptr;
  WEIGHTD_RETURN_IF_ERROR(check(cudaMalloc(&device_x, 2 * k)));
  WEIGHTD_RETURN_IF_ERROR(check(cudaMalloc(&device_y, 2 * n)));
  WEIGHTD_RETURN_IF_ERROR(check(cudaMemcpy(device_x, x.data(), 2 * k, cudaMemcpyHostToDevice)));
  weightd::GemmOptions options;  // of a stream of yours: options.stream
  WEIGHTD_RETURN_IF_ERROR(
      weight.gemm({device_x, 1, k, static_cast<int64_t>(k)}, {device_y, 1, n, static_cast<int64_t>(n)}, options));
  WEIGHTD_RETURN_IF_ERROR(check(cudaMemcpy(y.data(), device_y, 2 * n, cudaMemcpyDeviceToHost)));  // waits for the product
  std::printf("%s %s: y[0] = 0x%04x, y[%llu] = 0x%04x\n", weight.info().name.c_str(),
              weightd::shape_to_string(weight.info().shape).c_str(), y.front(), static_cast<unsigned long long>(n - 1), y.back());
  return model.release();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return std::fprintf(stderr, "usage: multiply_cuda MODEL TENSOR\n"), 2;
  const weightd::Status status = run(argv[1], argv[2]);
  if (!status.ok()) std::fprintf(stderr, "multiply_cuda: %s\n", status.to_string().c_str());
  return status.ok() ? 0 : 1;
}
