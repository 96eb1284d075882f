// SPDX-License-Identifier: Apache-2.0
// The library against the real weightd on a GPU, bit for bit the same as on the host.
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <vector>

#include "tests/client/gpu_model.h"
#include "tests/support/daemon_fixture.h"
#include "tests/support/test_bundle.h"
#include "weightd/client.h"
#include "weightd/control.h"

namespace weightd {
namespace {

using std::chrono::milliseconds;
using test::DeviceInput;
using test::DeviceOutput;
using weightd::testing::DaemonFixture;
using weightd::testing::DaemonOptions;

constexpr uint64_t kRows = 512, kCols = 1096;
constexpr milliseconds kLong{60'000};

DaemonOptions on(const std::string& backend) {
  DaemonOptions options;
  options.backend = backend;
  return options;
}

/// A daemon with one model, and a client.
struct Served {
  explicit Served(const std::string& backend) : daemon(on(backend)) {
    weightd::testing::TestBundle bundle;
    bundle.rows = kRows;
    bundle.cols = kCols;
    weightd::testing::make_bundle(daemon / "a.wpk", bundle);
    const Status loaded = control().load("a", daemon / "a.wpk", "", kLong).status();
    EXPECT_TRUE(loaded.ok()) << loaded.to_string() << "\n" << daemon.log();
  }
  [[nodiscard]] control::Client control() const { return control::Client::connect({daemon.control_socket(), kLong}).value(); }
  [[nodiscard]] Client client() const {
    ClientOptions options;
    options.socket_path = daemon.data_socket();
    options.call_timeout = kLong;
    options.reconnect_backoff = milliseconds(0);
    return Client::connect(options).value();
  }
  DaemonFixture daemon;
};

std::vector<uint16_t> words_on_gpu(const Tensor& tensor) {
  const DeviceOutput out(1, tensor.info().logical_bytes / 2);
  const Status status = tensor.decompress(out.bytes());
  EXPECT_TRUE(status.ok()) << status.to_string();
  return out.take();
}

TEST(GpuDaemon, TheHostAndTheGpuServeTheSameBits) {
  const Served host("host"), gpu("cuda");
  Client host_client = host.client(), gpu_client = gpu.client();
  EXPECT_EQ(gpu_client.backend(), "cuda");
  const Model expected = host_client.acquire("a").value();
  const Model model = gpu_client.acquire("a").value();
  EXPECT_EQ(model.info().device, test::gpu_or_die().uuid);
  EXPECT_EQ(model.info().content_id, expected.info().content_id);
  ASSERT_EQ(model.tensors().size(), expected.tensors().size());
  for (const TensorInfo& info : model.tensors()) {
    std::vector<uint16_t> words(info.logical_bytes / 2);
    ASSERT_TRUE(expected.tensor(info.name)->decompress(std::as_writable_bytes(std::span(words))).ok());
    EXPECT_EQ(words_on_gpu(model.tensor(info.name).value()), words) << info.name;
    if (info.dtype != DType::kBF16 || info.shape.size() != 2) continue;
    const DeviceInput x(test::random_activations(3 * info.shape[1], 31), info.shape[1]);
    const DeviceOutput y(3, info.shape[0]);
    ASSERT_TRUE(model.tensor(info.name)->gemm(x.view(), y.view()).ok());
    EXPECT_EQ(y.take(), test::best_product(words, info.shape[0], x.view())) << info.name;
  }
}

TEST(GpuDaemon, CO_094_SharedBytesAgreeOnBothSides) {
  const Served gpu("cuda");
  Client first = gpu.client(), second = gpu.client();
  const Model a = first.acquire("a").value(), b = second.acquire("a").value();
  const control::DaemonStatus status = gpu.control().status().value();
  EXPECT_EQ(a.memory().shared_bytes, a.info().resident_bytes);
  EXPECT_EQ(b.memory().shared_bytes, a.memory().shared_bytes);
  EXPECT_EQ(status.lease_count, 2U);
  EXPECT_EQ(status.models.at(0).resident_bytes, a.memory().shared_bytes);
}

TEST(GpuDaemon, CO_074_TheWeightsOutliveTheDaemon) {
  Served gpu("cuda");
  Client client = gpu.client();
  Model model = client.acquire("a").value();
  const Tensor tensor = model.tensor("layers.1.weight").value();
  const std::vector<uint16_t> words = words_on_gpu(tensor);
  gpu.daemon.kill();
  EXPECT_EQ(words_on_gpu(tensor), words);
  EXPECT_EQ(client.list().status().code(), StatusCode::kUnavailable);
  gpu.daemon.start();
  ASSERT_TRUE(client.list().ok());
  EXPECT_EQ(words_on_gpu(tensor), words) << "the mapping is the one it was";
  EXPECT_TRUE(model.release().ok());
  EXPECT_EQ(tensor.decompress({}).code(), StatusCode::kRevoked);
}

}  // namespace
}  // namespace weightd
