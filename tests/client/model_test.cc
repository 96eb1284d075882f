// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <fstream>
#include <optional>
#include <string>
#include <thread>

#include "tests/client/fake_daemon.h"
#include "weightd/client.h"

namespace weightd {
namespace {

using test::FakeDaemon;
using test::ModelBuilder;
using test::random_weights;
using test::SealedModel;
using test::TempFolder;
using testing::ElementsAre;
using testing::HasSubstr;

ClientOptions options_for(const std::string& path) {
  ClientOptions options;
  options.socket_path = path;
  options.call_timeout = std::chrono::milliseconds(60'000);
  return options;
}

/// A daemon with one model of every kind of tensor, and a client.
class ModelTest : public testing::Test {
 protected:
  ModelTest() : daemon_(folder_ / "s"), client_(Client::connect(options_for(folder_ / "s")).value()) {
    ModelBuilder builder;
    builder.add_f12("embed", {48, 64}, random_weights(48 * 64, 1));
    builder.add_merged("qkv", {{"q", 32}, {"k", 16}, {"v", 16}}, 72, random_weights(64 * 72, 2));
    builder.add_raw("norm", {72}, random_weights(72, 3));
    builder.add_f12("experts", {3, 20, 65}, random_weights(3 * 20 * 65, 4));
    builder.add_raw("scale", DType::kF32, {}, std::vector<std::byte>(4, std::byte{7}));
    builder.add_raw("nothing", {0, 5}, {});
    daemon_.publish(std::make_shared<SealedModel>(builder.seal("m", 5)));
  }

  const TempFolder folder_;
  FakeDaemon daemon_;
  Client client_;
};

/// Mappings of this process whose line holds `text`; all of them for "".
size_t map_count(const std::string& text) {
  std::ifstream maps("/proc/self/maps");
  size_t count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find(text) != std::string::npos ? 1 : 0;
  return count;
}

uint64_t virtual_bytes() {
  uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

TEST_F(ModelTest, SaysWhatItHolds) {
  const Model model = client_.acquire("m").value();
  const ModelInfo info = model.info();
  EXPECT_EQ(info.name, "m");
  EXPECT_EQ(info.generation, 5U);
  EXPECT_EQ(info.state, "published");
  EXPECT_EQ(info.device, "host");
  EXPECT_EQ(info.transport, "fd");
  EXPECT_EQ(info.residency, "fast");
  EXPECT_EQ(info.tensor_count, 8U);
  EXPECT_EQ(info.logical_bytes, (48 * 64 + 64 * 72 + 72 + 3 * 20 * 65) * 2U + 4U);
  EXPECT_GT(info.resident_bytes, 0U);
}

TEST_F(ModelTest, TensorsInOrderThenTheMergedOnes) {
  const Model model = client_.acquire("m").value();
  std::vector<std::string> names;
  for (const TensorInfo& info : model.tensors()) names.push_back(info.name);
  EXPECT_THAT(names, ElementsAre("embed", "q", "k", "v", "norm", "experts", "scale", "nothing", "qkv"));

  const Tensor part = model.tensor("k").value();
  EXPECT_EQ(part.info().shape, (Shape{16, 72}));
  EXPECT_EQ(part.info().logical_bytes, 16U * 72 * 2);
  EXPECT_EQ(part.info().encoding, Encoding::kF12);
  EXPECT_FALSE(part.info().merged);
  const Tensor whole = model.tensor("qkv").value();
  EXPECT_EQ(whole.info().shape, (Shape{64, 72}));
  EXPECT_EQ(whole.info().logical_bytes, 64U * 72 * 2);
  EXPECT_TRUE(whole.info().merged);
  EXPECT_EQ(whole.info().resident_bytes, part.info().resident_bytes);
  const Tensor scalar = model.tensor("scale").value();
  EXPECT_TRUE(scalar.info().shape.empty());
  EXPECT_EQ(scalar.info().dtype, DType::kF32);
  EXPECT_EQ(scalar.info().logical_bytes, 4U);
}

TEST_F(ModelTest, AnUnknownTensorIsNotFoundAndNamedPrintably) {
  const Model model = client_.acquire("m").value();
  const Status status = model.tensor("no\nsuch").status();
  EXPECT_EQ(status.code(), StatusCode::kNotFound);
  EXPECT_THAT(status.message(), HasSubstr("no\\nsuch"));
  EXPECT_EQ(model.tensor("").status().code(), StatusCode::kNotFound);
}

TEST_F(ModelTest, RawBytesAreReadInPlaceAndAligned) {
  const Model model = client_.acquire("m").value();
  const std::vector<std::byte> expected = test::bytes_of(random_weights(72, 3));
  const std::span<const std::byte> data = model.tensor("norm")->data();
  ASSERT_EQ(data.size(), expected.size());
  EXPECT_EQ(std::memcmp(data.data(), expected.data(), expected.size()), 0);
  for (const char* name : {"norm", "scale", "nothing"}) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(model.tensor(name)->data().data()) % 256, 0U) << name;
  }
  EXPECT_TRUE(model.tensor("embed")->data().empty()) << "coded";
  EXPECT_TRUE(model.tensor("nothing")->data().empty());
}

TEST_F(ModelTest, TheSameGenerationIsMappedOnceAndCounted) {
  Model first = client_.acquire("m").value();
  const size_t maps = map_count("memfd:");
  EXPECT_GT(maps, 0U);
  Model second = client_.acquire("m").value();
  EXPECT_EQ(map_count("memfd:"), maps);
  EXPECT_EQ(first.tensor("norm")->data().data(), second.tensor("norm")->data().data());
  EXPECT_TRUE(daemon_.wait_for_leases(1));
  EXPECT_TRUE(first.release().ok());
  EXPECT_EQ(first.tensor("norm").status().code(), StatusCode::kRevoked);
  EXPECT_TRUE(second.tensor("norm").ok()) << "each acquire() is released on its own";
  EXPECT_EQ(daemon_.lease_count(), 1U);
  EXPECT_TRUE(second.release().ok());
  EXPECT_EQ(daemon_.lease_count(), 0U);
}

TEST_F(ModelTest, ANewGenerationIsAnotherMapping) {
  const Model old = client_.acquire("m").value();
  ModelBuilder builder;
  builder.add_raw("norm", {4}, random_weights(4, 9));
  daemon_.publish(std::make_shared<SealedModel>(builder.seal("m", 6)));
  const Model fresh = client_.acquire("m").value();
  EXPECT_EQ(fresh.info().generation, 6U);
  EXPECT_EQ(old.info().generation, 5U);
  EXPECT_EQ(fresh.tensors().size(), 1U);
  EXPECT_EQ(old.tensors().size(), 9U);
  EXPECT_EQ(daemon_.lease_count(), 2U);
}

TEST_F(ModelTest, CopiesShareTheLeaseUntilTheLast) {
  std::optional<Model> model = client_.acquire("m").value();
  std::optional<Model> copy = *model;
  model.reset();
  EXPECT_TRUE(copy->tensor("norm").ok());
  EXPECT_EQ(daemon_.lease_count(), 1U);
  const Tensor left_over = copy->tensor("embed").value();
  copy.reset();
  EXPECT_TRUE(daemon_.wait_for_leases(0)) << "a tensor holds no lease";
  EXPECT_EQ(left_over.info().name, "embed") << "but its description";
}

TEST_F(ModelTest, ModelsOutliveTheirClient) {
  std::optional<Client> client = Client::connect(options_for(folder_ / "s")).value();
  std::optional<Model> model = client->acquire("m").value();
  client.reset();
  EXPECT_TRUE(model->tensor("norm").ok());
  EXPECT_EQ(daemon_.lease_count(), 1U);
  model.reset();
  EXPECT_TRUE(daemon_.wait_for([&] { return true; }));
  EXPECT_TRUE(daemon_.wait_for_leases(0));
}

TEST_F(ModelTest, CO_086_AnEndedLeaseIsRevokedEverywhere) {
  Model model = client_.acquire("m").value();
  Model copy = model;
  const Tensor raw = model.tensor("norm").value();
  const Tensor coded = model.tensor("embed").value();
  const Tensor stack = model.tensor("experts").value();
  ASSERT_TRUE(model.release().ok());
  EXPECT_TRUE(model.release().ok()) << "twice is fine";
  EXPECT_TRUE(copy.release().ok());
  EXPECT_EQ(copy.tensor("norm").status().code(), StatusCode::kRevoked);

  std::vector<uint16_t> out(48 * 72, 0xDEAD);
  const std::span<std::byte> bytes = std::as_writable_bytes(std::span(out));
  const std::vector<uint16_t> x(72, 0x3f80);
  EXPECT_EQ(raw.decompress(bytes).code(), StatusCode::kRevoked);
  EXPECT_EQ(coded.decompress(bytes).code(), StatusCode::kRevoked);
  EXPECT_EQ(coded.decompress_rows(0, 1, bytes).code(), StatusCode::kRevoked);
  EXPECT_EQ(coded.gemm({x.data(), 1, 64, 64}, {out.data(), 1, 48, 48}).code(), StatusCode::kRevoked);
  EXPECT_EQ(stack.gemm(0, {x.data(), 1, 65, 65}, {out.data(), 1, 20, 20}).code(), StatusCode::kRevoked);
  EXPECT_TRUE(raw.data().empty());
  EXPECT_THAT(out, testing::Each(0xDEAD));
  EXPECT_EQ(model.info().name, "m");
}

TEST_F(ModelTest, CO_094_SharedAndPrivateBytesAreToldApart) {
  Model model = client_.acquire("m").value();
  const Model again = client_.acquire("m").value();
  const Model::Memory memory = model.memory();
  EXPECT_EQ(memory.shared_bytes, model.info().resident_bytes);
  EXPECT_EQ(again.memory().shared_bytes, memory.shared_bytes);
  EXPECT_GT(memory.private_bytes, 0U);
  EXPECT_LT(memory.private_bytes, 16'384U) << "names and places of nine tensors";
  EXPECT_TRUE(model.release().ok());
  EXPECT_EQ(model.memory().shared_bytes, 0U);
}

TEST_F(ModelTest, CO_066_ReleaseWaitsForCallsInFlight) {
  // Each round the lease ends while two threads compute: a fault in an unmapped page would end the test.
  for (int round = 0; round < 50; ++round) {
    Model model = client_.acquire("m").value();
    const Tensor tensor = model.tensor("embed").value();
    std::atomic<int> started{0};
    const auto compute = [&] {
      const std::vector<uint16_t> x = test::random_activations(8 * 64, 3);
      std::vector<uint16_t> y(8 * 48);
      GemmOptions options;
      options.threads = 1;
      while (true) {
        const Status status = tensor.gemm({x.data(), 8, 64, 64}, {y.data(), 8, 48, 48}, options);
        ++started;
        if (status.ok()) continue;
        EXPECT_EQ(status.code(), StatusCode::kRevoked);
        return;
      }
    };
    std::thread first(compute), second(compute);
    while (started < 2) std::this_thread::yield();
    EXPECT_TRUE(model.release().ok());
    first.join();
    second.join();
  }
}

TEST_F(ModelTest, CO_123_TenMillionLookups) {
  const Model model = client_.acquire("m").value();
  const char* const names[] = {"embed", "q", "norm", "qkv"};
  uint64_t rows = 0;
  for (int i = 0; i < 10'000'000; ++i) {
    const Result<Tensor> tensor = model.tensor(names[i % 4]);
    if (!tensor.ok()) {
      ADD_FAILURE() << "lookup " << i << ": " << tensor.status().to_string();
      return;
    }
    rows += tensor->info().shape[0];
  }
  EXPECT_EQ(rows, 2'500'000ULL * (48 + 32 + 72 + 64));
}

TEST(LargeModel, CO_063_TwentyThousandTensorsAreFewMappings) {
  const TempFolder folder;
  FakeDaemon daemon(folder / "s");
  ModelBuilder builder;
  for (int i = 0; i < 20'000; ++i) builder.add_raw("layers." + std::to_string(i) + ".weight", {4}, random_weights(4, 7));
  const auto model_there = std::make_shared<SealedModel>(builder.seal("wide", 1));
  daemon.publish(model_there);
  Client client = Client::connect(options_for(folder / "s")).value();
  const size_t maps = map_count("");
  const uint64_t before = virtual_bytes();
  const Model model = client.acquire("wide").value();
  EXPECT_EQ(model.tensors().size(), 20'000U);
  EXPECT_LT(map_count(""), maps + 100);
  EXPECT_LT(virtual_bytes() - before, model.info().resident_bytes + (uint64_t{256} << 20));
  const std::vector<std::byte> expected = test::bytes_of(random_weights(4, 7));
  const std::span<const std::byte> last = model.tensor("layers.19999.weight")->data();
  ASSERT_EQ(last.size(), expected.size());
  EXPECT_EQ(std::memcmp(last.data(), expected.data(), expected.size()), 0);
}

TEST(LargeModel, CO_122_ThreeHundredThousandLongNames) {
  const TempFolder folder;
  FakeDaemon daemon(folder / "s");
  constexpr int kTensors = 300'000;
  ModelBuilder builder;
  const std::string stem(92, 'n');
  for (int i = 0; i < kTensors; ++i) {
    std::string number = std::to_string(i);
    builder.add_raw(stem + std::string(8 - number.size(), '0') + number, {0}, {});
  }
  builder.add_raw("last", {1}, {0x4110});
  const auto model_there = std::make_shared<SealedModel>(builder.seal("names", 1));
  ASSERT_GT(model_there->table_bytes, uint64_t{kTensors} * 100) << "far above what one message may hold";
  daemon.publish(model_there);
  Client client = Client::connect(options_for(folder / "s")).value();
  const Result<Model> model = client.acquire("names");
  ASSERT_TRUE(model.ok()) << model.status().to_string();
  EXPECT_EQ(model->tensors().size(), size_t{kTensors} + 1);
  EXPECT_TRUE(model->tensor(stem + "00299999").ok());
  EXPECT_EQ(model->tensor("last")->data().size(), 2U);
  EXPECT_GT(model->memory().private_bytes, uint64_t{kTensors} * 100);
}

}  // namespace
}  // namespace weightd
