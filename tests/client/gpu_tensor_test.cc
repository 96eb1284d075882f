// SPDX-License-Identifier: Apache-2.0
// The library on a GPU: a hand-made model in chunks of GPU memory, lent by the fake daemon.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <limits>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/client/child_process.h"
#include "tests/client/fake_daemon.h"
#include "tests/client/gpu_model.h"
#include "tests/gpu/test_matrix.h"
#include "weightd/client.h"

namespace weightd {
namespace {

using test::best_product;
using test::blas_product;
using test::DeviceInput;
using test::DeviceOutput;
using test::FakeDaemon;
using test::fused_product;
using test::ModelBuilder;
using test::random_activations;
using test::random_weights;
using test::SealedModel;
using test::TempFolder;
using testing::DeviceMemory;
using testing::first_difference;
using testing::from_device;
using testing::require_cuda;
using testing::to_device;

constexpr uint16_t kNoRow = 0x7fff;
constexpr uint64_t kChunk = uint64_t{2} << 20;

ClientOptions options_for(const std::string& path) {
  ClientOptions options;
  options.socket_path = path;
  options.call_timeout = std::chrono::milliseconds(60'000);
  return options;
}

std::vector<uint16_t> rows_of(const std::vector<uint16_t>& words, uint64_t begin, uint64_t end, uint64_t k) {
  return {words.begin() + static_cast<ptrdiff_t>(begin * k), words.begin() + static_cast<ptrdiff_t>(end * k)};
}

struct Matrix {
  const char* name;
  uint64_t n, k;
  std::vector<uint16_t> words;
};

class Stream {
 public:
  explicit Stream(unsigned flags = cudaStreamDefault) { require_cuda(cudaStreamCreateWithFlags(&stream_, flags), "stream"); }
  ~Stream() { (void)cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  [[nodiscard]] cudaStream_t get() const { return stream_; }
  [[nodiscard]] GemmOptions options(bool exact = false) const {
    GemmOptions made;
    made.stream = stream_;
    made.exact = exact;
    return made;
  }
  void wait() const { require_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

 private:
  cudaStream_t stream_ = nullptr;
};

class GpuTensor : public ::testing::Test {
 protected:
  GpuTensor() : daemon_(folder_ / "s"), client_(Client::connect(options_for(folder_ / "s")).value()) {
    ModelBuilder builder;
    builder.add_f12("coded", {1000, 1096}, coded_);
    builder.add_raw("plain", {300, 136}, plain_);
    builder.add_merged("qkv", {{"q", 512}, {"k", 128}, {"v", 128}}, 512, merged_);
    builder.add_f12("experts", {3, 80, 264}, experts_);
    builder.add_raw("plain_experts", {2, 24, 40}, plain_experts_);
    builder.add_f12("square", {64, 64}, square_);
    builder.add_raw("odd", {7, 13}, odd_);
    builder.add_raw("vector", {40}, vector_);
    builder.add_raw("nibbles", DType::kF4, {4, 3}, std::vector<std::byte>(6, std::byte{0x5a}));
    daemon_.publish(test::on_gpu(builder.seal("m", 1), kChunk));
    Result<Model> model = client_.acquire("m");
    EXPECT_TRUE(model.ok()) << model.status().to_string();
    model_.emplace(*std::move(model));
  }
  ~GpuTensor() override { EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess) << "a kernel of this test failed"; }

  [[nodiscard]] Tensor tensor(const char* name) const { return model_->tensor(name).value(); }
  [[nodiscard]] std::vector<Matrix> coded_matrices() const {
    return {{"coded", 1000, 1096, coded_},
            {"q", 512, 512, rows_of(merged_, 0, 512, 512)},
            {"k", 128, 512, rows_of(merged_, 512, 640, 512)},
            {"v", 128, 512, rows_of(merged_, 640, 768, 512)},
            {"qkv", 768, 512, merged_},
            {"square", 64, 64, square_}};
  }
  [[nodiscard]] std::vector<Matrix> matrices() const {
    std::vector<Matrix> all = coded_matrices();
    all.push_back({"plain", 300, 136, plain_});
    all.push_back({"odd", 7, 13, odd_});
    return all;
  }

  const std::vector<uint16_t> coded_ = random_weights(1000 * 1096, 1), plain_ = random_weights(300 * 136, 2),
                              merged_ = random_weights(768 * 512, 3), experts_ = random_weights(3 * 80 * 264, 4),
                              plain_experts_ = random_weights(2 * 24 * 40, 5), square_ = random_weights(64 * 64, 6),
                              odd_ = random_weights(7 * 13, 7), vector_ = random_weights(40, 8);
  const TempFolder folder_;
  FakeDaemon daemon_;
  Client client_;
  std::optional<Model> model_;
};

std::vector<uint16_t> decompressed(const Tensor& tensor, const GemmOptions& options = {}) {
  const DeviceOutput out(1, tensor.info().logical_bytes / 2);
  const Status status = tensor.decompress(out.bytes(), options);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return out.take();
}

std::vector<uint16_t> product(const Tensor& tensor, ConstBf16Matrix x, const GemmOptions& options = {}) {
  const DeviceOutput y(x.rows, tensor.info().shape[0]);
  const Status status = tensor.gemm(x, y.view(), options);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return y.take();
}

TEST_F(GpuTensor, SaysWhereItLies) {
  EXPECT_EQ(model_->info().device, test::gpu_or_die().uuid);
  EXPECT_EQ(model_->info().transport, "fd");
  const uint64_t shared = model_->memory().shared_bytes;
  EXPECT_EQ(shared, model_->info().resident_bytes);
  EXPECT_EQ(shared % kChunk, 0U);
  EXPECT_GT(shared, kChunk) << "several chunks, one address range";
}

TEST_F(GpuTensor, DecompressGivesTheOriginalBits) {
  for (const Matrix& matrix : matrices())
    EXPECT_EQ(first_difference(decompressed(tensor(matrix.name)), matrix.words, matrix.k), "");
  EXPECT_EQ(decompressed(tensor("experts")), experts_);
  EXPECT_EQ(decompressed(tensor("plain_experts")), plain_experts_);
  EXPECT_EQ(decompressed(tensor("vector")), vector_);
}

TEST_F(GpuTensor, RowsOfMatricesPartsAndStacks) {
  const auto check = [&](const char* name, const std::vector<uint16_t>& words, uint64_t rows, uint64_t k) {
    for (uint64_t begin = 0; begin < rows; begin += 1 + rows / 19) {
      const uint64_t end = std::min(rows, begin + 1 + begin % 97);
      const DeviceOutput out(end - begin, k);
      const Status status = tensor(name).decompress_rows(begin, end, out.bytes());
      ASSERT_TRUE(status.ok()) << status.to_string();
      ASSERT_EQ(first_difference(out.take(), rows_of(words, begin, end, k), k), "") << name << " from row " << begin;
    }
  };
  for (const Matrix& matrix : matrices()) check(matrix.name, matrix.words, matrix.n, matrix.k);
  check("experts", experts_, 240, 264);
  check("plain_experts", plain_experts_, 48, 40);
  check("vector", vector_, 1, 40);
}

TEST_F(GpuTensor, RawBytesLieAtTheirDeviceAddress) {
  const std::span<const std::byte> data = tensor("vector").data();
  ASSERT_EQ(data.size(), 80U);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(data.data()) % 256, 0U);
  std::vector<uint16_t> words(40);
  require_cuda(cudaMemcpy(words.data(), data.data(), 80, cudaMemcpyDeviceToHost), "reading the mapping");
  EXPECT_EQ(words, vector_);
  EXPECT_TRUE(tensor("coded").data().empty());
}

template <typename Index>
void check_gather(const Tensor& tensor, const Matrix& matrix) {
  std::vector<Index> rows;
  for (uint64_t i = 0; i < 2 * matrix.n; ++i) rows.push_back(static_cast<Index>(i * i * 7 % matrix.n));
  rows[1] = -1;
  rows[2] = static_cast<Index>(matrix.n);
  rows[3] = std::numeric_limits<Index>::max();
  rows[4] = std::numeric_limits<Index>::min();
  const DeviceMemory device_rows = to_device(rows);
  for (const auto& [stride, before] :
       {std::pair<uint64_t, uint64_t>{matrix.k, 0}, {matrix.k + 3, 1}, {(matrix.k + 15) / 8 * 8, 8}}) {
    std::vector<uint16_t> expected;
    for (const Index row : rows) {
      const bool valid = row >= 0 && static_cast<uint64_t>(row) < matrix.n;
      for (uint64_t c = 0; c < matrix.k; ++c) {
        expected.push_back(valid ? matrix.words[static_cast<uint64_t>(row) * matrix.k + c] : kNoRow);
      }
    }
    const DeviceOutput out(rows.size(), matrix.k, stride, before);
    const Status status = tensor.gather_rows(std::span<const Index>(device_rows.as<Index>(), rows.size()), out.view());
    ASSERT_TRUE(status.ok()) << status.to_string();
    EXPECT_EQ(first_difference(out.take(), expected, matrix.k), "") << matrix.name << ", stride " << stride;
  }
}

TEST_F(GpuTensor, GatherGivesTheRowsAndNoNumberForOthers) {
  for (const Matrix& matrix : matrices()) {
    check_gather<int32_t>(tensor(matrix.name), matrix);
    check_gather<int64_t>(tensor(matrix.name), matrix);
  }
}

TEST_F(GpuTensor, GemmEqualsTheOracleBitForBit) {
  for (const Matrix& matrix : coded_matrices()) {
    const DeviceInput x(random_activations(130 * matrix.k, 11), matrix.k);
    for (const uint64_t m : {1U, 2U, 7U, 8U, 9U, 16U, 17U, 33U, 64U, 65U, 130U}) {
      EXPECT_EQ(
          first_difference(product(tensor(matrix.name), x.rows(m)), best_product(matrix.words, matrix.n, x.rows(m)), matrix.n), "")
          << matrix.name << ", " << m << " tokens";
    }
  }
}

TEST_F(GpuTensor, ManyTokensTakeTheFasterWay) {
  const DeviceInput x(random_activations(4096 * 1096, 12), 1096);
  EXPECT_EQ(first_difference(product(tensor("coded"), x.view()), best_product(coded_, 1000, x.view()), 1000), "");
}

TEST_F(GpuTensor, GemmWithEachExpert) {
  const DeviceInput x(random_activations(5 * 264, 13), 264), small_x(random_activations(5 * 40, 14), 40);
  for (uint64_t e = 0; e < 3; ++e) {
    const DeviceOutput y(5, 80);
    ASSERT_TRUE(tensor("experts").gemm(e, x.view(), y.view()).ok());
    EXPECT_EQ(first_difference(y.take(), best_product(rows_of(experts_, e * 80, (e + 1) * 80, 264), 80, x.view()), 80), "") << e;
  }
  for (uint64_t e = 0; e < 2; ++e) {
    const DeviceOutput y(5, 24);
    ASSERT_TRUE(tensor("plain_experts").gemm(e, small_x.view(), y.view()).ok());
    EXPECT_EQ(first_difference(y.take(), blas_product(rows_of(plain_experts_, e * 24, (e + 1) * 24, 40), 24, small_x.view()), 24),
              "");
  }
}

TEST_F(GpuTensor, RawTensorsAndExactModeGiveTheBitsOfCublasLt) {
  GemmOptions exact;
  exact.exact = true;
  for (const Matrix& matrix : matrices()) {
    const DeviceInput x(random_activations(40 * matrix.k, 15), matrix.k);
    for (const uint64_t m : {1U, 16U, 40U}) {
      EXPECT_EQ(first_difference(product(tensor(matrix.name), x.rows(m), exact), blas_product(matrix.words, matrix.n, x.rows(m)),
                                 matrix.n),
                "")
          << matrix.name << ", " << m << " tokens";
    }
  }
}

TEST_F(GpuTensor, CO_043_TheWorkspaceIsTheCallersOrThePools) {
  const Tensor coded = tensor("coded");
  const DeviceInput x(random_activations(3 * 1096, 16), 1096);
  const std::vector<uint16_t> expected = blas_product(coded_, 1000, x.view());
  const uint64_t bytes = coded.workspace_bytes();
  EXPECT_GE(bytes, 1000U * 1096 * 2);
  EXPECT_LE(bytes, 1000U * 1096 * 2 + (uint64_t{64} << 20)) << "bounded: the matrix and a constant";
  EXPECT_EQ(tensor("vector").workspace_bytes(), 0U);
  const DeviceMemory workspace(bytes);
  GemmOptions options;
  options.exact = true;
  options.workspace = {workspace.data(), bytes};
  EXPECT_EQ(first_difference(product(coded, x.view(), options), expected, 1000), "");
  EXPECT_TRUE(workspace.fences_intact());
  const std::vector<std::byte> used = workspace.download();
  EXPECT_FALSE(std::all_of(used.begin(), used.end(), [](std::byte b) { return b == std::byte{0xA5}; })) << "it was not used";

  // One byte too small: the pool's, and this one stays as it is.
  const DeviceMemory small(bytes);
  options.workspace = {small.data(), bytes - 1};
  EXPECT_EQ(first_difference(product(coded, x.view(), options), expected, 1000), "");
  const std::vector<std::byte> unused = small.download();
  EXPECT_TRUE(std::all_of(unused.begin(), unused.end(), [](std::byte b) { return b == std::byte{0xA5}; }));

  // Misaligned, or where x lies.
  const DeviceOutput y(3, 1000);
  options.workspace = {workspace.data() + 128, bytes};
  EXPECT_EQ(coded.gemm(x.view(), y.view(), options).code(), StatusCode::kInvalidArgument);
  const DeviceMemory both(bytes + 512);
  options.workspace = {both.data(), bytes};
  const ConstBf16Matrix inside{both.as<uint16_t>(), 3, 1096, 1096};
  EXPECT_EQ(coded.gemm(inside, y.view(), options).code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(y.untouched());
}

TEST_F(GpuTensor, GapsBetweenRowsAreNeitherReadNorWritten) {
  constexpr uint64_t kM = 5, kN = 1000, kK = 1096, kXStride = 1111, kYStride = 1003;
  const std::vector<uint16_t> dense = random_activations(kM * kK, 17);
  std::vector<uint16_t> spread(kM * kXStride, 0x7fc0);  // NaN in the gaps
  for (uint64_t i = 0; i < kM; ++i) std::copy_n(&dense[i * kK], kK, &spread[i * kXStride]);
  const DeviceMemory x = to_device(spread);
  const ConstBf16Matrix view{x.as<uint16_t>(), kM, kK, kXStride};
  for (const bool exact : {false, true}) {
    GemmOptions options;
    options.exact = exact;
    const DeviceOutput y(kM, kN, kYStride);
    ASSERT_TRUE(tensor("coded").gemm(view, y.view(), options).ok());
    const std::vector<uint16_t> expected = exact ? blas_product(coded_, kN, view) : best_product(coded_, kN, view);
    EXPECT_EQ(first_difference(y.take(), expected, kN), "") << exact;
  }
}

TEST_F(GpuTensor, CO_042_AnOutputThatIsTooSmallIsNotTouched) {
  const DeviceOutput out(64, 64);
  EXPECT_EQ(tensor("square").decompress(out.bytes().first(8190)).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(tensor("square").decompress_rows(0, 2, out.bytes().first(255)).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(tensor("square").decompress({}).code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(out.untouched());
  EXPECT_TRUE(tensor("square").decompress(out.bytes()).ok());
  EXPECT_EQ(out.take(), square_);
}

TEST_F(GpuTensor, CO_054_RowStridesBelowTheRow) {
  const DeviceInput x(random_activations(2 * 1096, 18), 1096);
  const DeviceOutput y(2, 1000);
  for (const int64_t stride : {int64_t{1095}, int64_t{0}, int64_t{-1096}}) {
    EXPECT_EQ(tensor("coded").gemm({x.view().data, 2, 1096, stride}, y.view()).code(), StatusCode::kInvalidArgument) << stride;
  }
  EXPECT_EQ(tensor("coded").gemm(x.view(), {y.view().data, 2, 1000, 999}).code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(y.untouched());
  const DeviceOutput one(1, 1000);
  ASSERT_TRUE(tensor("coded").gemm({x.view().data, 1, 1096, -5}, {one.view().data, 1, 1000, 0}).ok()) << "one row has no stride";
  EXPECT_EQ(first_difference(one.take(), best_product(coded_, 1000, x.rows(1)), 1000), "");
}

TEST_F(GpuTensor, CO_055_AnyAddressThatAWordCanHave) {
  const std::vector<uint16_t> words = random_activations(2 * 512 + 8, 19);
  const DeviceMemory memory = to_device(words);
  for (const uint64_t shift : {0U, 1U, 2U, 4U}) {  // 2, 4 and 8 bytes
    for (const bool exact : {false, true}) {
      GemmOptions options;
      options.exact = exact;
      const ConstBf16Matrix x{memory.as<uint16_t>() + shift, 2, 512, 512};
      const DeviceOutput y(2, 128, 128, shift);
      ASSERT_TRUE(tensor("k").gemm(x, y.view(), options).ok());
      const std::vector<uint16_t> k = rows_of(merged_, 512, 640, 512);
      EXPECT_EQ(first_difference(y.take(), exact ? blas_product(k, 128, x) : best_product(k, 128, x), 128), "") << shift;
    }
  }
  const DeviceOutput y(2, 128);
  const auto* odd = reinterpret_cast<const uint16_t*>(memory.data() + 1);
  EXPECT_EQ(tensor("k").gemm({odd, 2, 512, 512}, y.view()).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(tensor("k").decompress({y.bytes().data() + 1, y.bytes().size()}).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(tensor("square").decompress({memory.data() + 1, 8192}).code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(y.untouched());
}

TEST_F(GpuTensor, CO_058_TheOutputOverlapsNothing) {
  const DeviceMemory buffer = to_device(random_activations(6 * 64, 20));
  auto* const x = buffer.as<uint16_t>() + 2 * 64;
  const auto code = [&](uint16_t* y) { return tensor("square").gemm({x, 2, 64, 64}, {y, 2, 64, 64}).code(); };
  EXPECT_EQ(code(x), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(x + 8), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(x - 127), StatusCode::kInvalidArgument);
  auto* const weights = const_cast<uint16_t*>(reinterpret_cast<const uint16_t*>(tensor("vector").data().data()));
  EXPECT_EQ(code(weights), StatusCode::kInvalidArgument);
  EXPECT_EQ(tensor("square").decompress({reinterpret_cast<std::byte*>(weights) - 64, 8192}).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(x + 128), StatusCode::kOk) << "side by side is fine";
  EXPECT_EQ(decompressed(tensor("square")), square_);
  EXPECT_EQ(decompressed(tensor("vector")), vector_);
}

TEST_F(GpuTensor, WorkIsOrderedOnItsStream) {
  const Stream first(cudaStreamNonBlocking), second(cudaStreamNonBlocking);
  const DeviceInput x(random_activations(4 * 512, 21), 512);
  const DeviceOutput q(4, 512), again(4, 128);
  // x of the second product is y of the first: right only if the stream's order holds, overlapped launches or not.
  ASSERT_TRUE(tensor("q").gemm(x.view(), q.view(), first.options()).ok());
  const ConstBf16Matrix between{q.view().data, 4, 512, 512};
  ASSERT_TRUE(tensor("v").gemm(between, again.view(), first.options()).ok());
  const DeviceOutput elsewhere(4, 128);
  ASSERT_TRUE(tensor("k").gemm(x.view(), elsewhere.view(), second.options()).ok());
  first.wait();
  second.wait();
  EXPECT_EQ(first_difference(q.take(), best_product(rows_of(merged_, 0, 512, 512), 512, x.view()), 512), "");
  EXPECT_EQ(first_difference(again.take(), best_product(rows_of(merged_, 640, 768, 512), 128, between), 128), "");
  EXPECT_EQ(first_difference(elsewhere.take(), best_product(rows_of(merged_, 512, 640, 512), 128, x.view()), 128), "");
}

TEST_F(GpuTensor, FourThreadsEachOnItsStream) {
  const DeviceInput x(random_activations(3 * 1096, 22), 1096);
  const std::vector<uint16_t> fused = best_product(coded_, 1000, x.view()), exact = blas_product(coded_, 1000, x.view());
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const Stream stream(cudaStreamNonBlocking);
      for (int i = 0; i < 50; ++i) {
        const DeviceOutput y(3, 1000);
        ASSERT_TRUE(tensor("coded").gemm(x.view(), y.view(), stream.options(t % 2 == 1)).ok());
        stream.wait();
        ASSERT_EQ(first_difference(y.take(), t % 2 == 1 ? exact : fused, 1000), "");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

/// Captures `work` on a stream, and replays it.
class Graph {
 public:
  template <typename Work>
  Graph(const Stream& stream, Work work) : stream_(stream) {
    require_cuda(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
    work();
    require_cuda(cudaStreamEndCapture(stream.get(), &graph_), "cudaStreamEndCapture");
    require_cuda(cudaGraphInstantiate(&executable_, graph_, 0), "cudaGraphInstantiate");
  }
  ~Graph() {
    (void)cudaGraphExecDestroy(executable_);
    (void)cudaGraphDestroy(graph_);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void replay() const {
    require_cuda(cudaGraphLaunch(executable_, stream_.get()), "cudaGraphLaunch");
    stream_.wait();
  }

 private:
  const Stream& stream_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

TEST_F(GpuTensor, EveryCallMayBeCapturedAndReplayed) {
  const Stream stream(cudaStreamNonBlocking);
  const DeviceInput x(random_activations(4 * 1096, 23), 1096), small_x(random_activations(4 * 136, 24), 136);
  const std::vector<int32_t> rows{5, 0, 299, 5};
  const DeviceMemory device_rows = to_device(rows);
  const DeviceMemory workspace(tensor("coded").workspace_bytes());
  GemmOptions with_workspace = stream.options(true);
  with_workspace.workspace = {workspace.data(), workspace.bytes()};
  const DeviceOutput fused(4, 1000), exact(4, 1000), pooled(4, 1000), raw(4, 300), square(64, 64), gathered(4, 136);
  const auto work = [&] {
    EXPECT_TRUE(tensor("coded").gemm(x.view(), fused.view(), stream.options()).ok());
    EXPECT_TRUE(tensor("coded").gemm(x.view(), exact.view(), with_workspace).ok());
    EXPECT_TRUE(tensor("coded").gemm(x.view(), pooled.view(), stream.options(true)).ok());
    EXPECT_TRUE(tensor("plain").gemm(small_x.view(), raw.view(), stream.options()).ok());
    EXPECT_TRUE(tensor("square").decompress(square.bytes(), stream.options()).ok());
    const std::span<const int32_t> indexes(device_rows.as<int32_t>(), rows.size());
    EXPECT_TRUE(tensor("plain").gather_rows(indexes, gathered.view(), stream.options()).ok());
  };
  work();  // loads what is to be loaded
  stream.wait();
  const Graph graph(stream, work);
  for (uint64_t round = 0; round < 3; ++round) {
    const std::vector<uint16_t> fresh = random_activations(4 * 1096, 100 + round);
    x.upload(fresh);
    graph.replay();
    EXPECT_EQ(first_difference(fused.take(), best_product(coded_, 1000, x.view()), 1000), "") << round;
    const std::vector<uint16_t> expected = blas_product(coded_, 1000, x.view());
    EXPECT_EQ(first_difference(exact.take(), expected, 1000), "") << round;
    EXPECT_EQ(first_difference(pooled.take(), expected, 1000), "") << round;
    EXPECT_EQ(first_difference(raw.take(), blas_product(plain_, 300, small_x.view()), 300), "") << round;
    EXPECT_EQ(square.take(), square_);
    const std::vector<uint16_t> got = gathered.take();
    for (uint64_t i = 0; i < 4; ++i) {
      const auto row = static_cast<uint64_t>(rows[i]);
      EXPECT_EQ(rows_of(got, i, i + 1, 136), rows_of(plain_, row, row + 1, 136));
    }
  }
}

TEST_F(GpuTensor, ACaptureThatIsSeenRefusesTheReleaseAndIsNotSpoilt) {
  const Stream stream;
  const Tensor square = tensor("square");
  const DeviceInput x(random_activations(2 * 64, 25), 64);
  const DeviceOutput y(2, 64);
  ASSERT_TRUE(square.gemm(x.view(), y.view(), stream.options()).ok());  // code is loaded
  stream.wait();
  const Graph graph(stream, [&] {
    EXPECT_TRUE(square.gemm(x.view(), y.view(), stream.options()).ok());
    EXPECT_EQ(model_->release().code(), StatusCode::kFailedPrecondition);
    EXPECT_TRUE(model_->tensor("square").ok()) << "the lease is as it was";
    std::thread([&] { EXPECT_EQ(model_->release().code(), StatusCode::kFailedPrecondition) << "from another thread too"; }).join();
    EXPECT_TRUE(square.gemm(x.view(), y.view(), stream.options()).ok());
  });
  graph.replay();
  EXPECT_EQ(first_difference(y.take(), best_product(square_, 64, x.view()), 64), "");
  EXPECT_TRUE(model_->release().ok());
  EXPECT_EQ(daemon_.lease_count(), 0U);
}

TEST_F(GpuTensor, AModelThatEndsInsideACaptureIsUnmappedAtTheNextAcquire) {
  const Stream stream;
  const DeviceInput x(random_activations(2 * 64, 26), 64);
  const DeviceOutput y(2, 64);
  ASSERT_TRUE(tensor("square").gemm(x.view(), y.view(), stream.options()).ok());
  stream.wait();
  ModelBuilder builder;
  builder.add_raw("w", {2, 2}, {1, 2, 3, 4});
  daemon_.publish(std::make_shared<SealedModel>(builder.seal("other", 1)));
  {
    const Graph graph(stream, [&] {
      EXPECT_TRUE(tensor("square").gemm(x.view(), y.view(), stream.options()).ok());
      model_.reset();
    });
    graph.replay();
    EXPECT_EQ(first_difference(y.take(), best_product(square_, 64, x.view()), 64), "") << "the weights are still there";
    EXPECT_EQ(daemon_.lease_count(), 1U);
  }
  const Model other = client_.acquire("other").value();
  EXPECT_TRUE(daemon_.wait_for_leases(1)) << "the other's alone";
}

TEST_F(GpuTensor, ACaptureThatIsNotSeenPutsUnmappingOff) {
  const Stream stream(cudaStreamNonBlocking);
  const DeviceInput x(random_activations(2 * 64, 27), 64);
  const DeviceOutput y(2, 64);
  const Tensor square = tensor("square");
  ASSERT_TRUE(square.gemm(x.view(), y.view(), stream.options()).ok());
  stream.wait();
  require_cuda(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
  EXPECT_TRUE(square.gemm(x.view(), y.view(), stream.options()).ok());
  EXPECT_EQ(model_->release().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(square.gemm(x.view(), y.view(), stream.options()).code(), StatusCode::kRevoked);
  cudaGraph_t graph = nullptr;
  EXPECT_NE(cudaStreamEndCapture(stream.get(), &graph), cudaSuccess) << "waiting for the device ends such a capture";
  if (graph != nullptr) (void)cudaGraphDestroy(graph);
  (void)cudaGetLastError();
  EXPECT_EQ(daemon_.lease_count(), 1U) << "still mapped, so still leased";
  const Model again = client_.acquire("m").value();
  EXPECT_TRUE(daemon_.wait_for_leases(1));
  EXPECT_EQ(decompressed(again.tensor("square").value()), square_);
}

TEST_F(GpuTensor, CO_066_ReleaseWaitsForWorkThatStillReads) {
  const Stream stream(cudaStreamNonBlocking);
  const DeviceInput x(random_activations(8 * 1096, 28), 1096);
  const DeviceOutput y(8, 1000);
  const Tensor coded = tensor("coded");
  ASSERT_TRUE(coded.gemm(x.view(), y.view(), stream.options()).ok());
  stream.wait();
  // The stream stands still until release() has been called; behind that lies work that reads the weights.
  struct Gate {
    std::promise<void> open;
    std::atomic<bool> released{false}, early{false};
  } gate;
  require_cuda(cudaLaunchHostFunc(
                   stream.get(),
                   [](void* data) {
                     auto* const shared = static_cast<Gate*>(data);
                     shared->open.get_future().wait();
                     shared->early = shared->released.load();
                   },
                   &gate),
               "cudaLaunchHostFunc");
  for (int i = 0; i < 500; ++i) ASSERT_TRUE(coded.gemm(x.view(), y.view(), stream.options()).ok());
  std::atomic<bool> calling{false};
  std::thread releasing([&] {
    calling = true;
    EXPECT_TRUE(model_->release().ok());
    gate.released = true;
    EXPECT_EQ(cudaStreamQuery(stream.get()), cudaSuccess) << "release() came back before the work was done";
  });
  while (!calling) std::this_thread::yield();
  gate.open.set_value();
  releasing.join();
  EXPECT_FALSE(gate.early);
  EXPECT_EQ(coded.gemm(x.view(), y.view(), stream.options()).code(), StatusCode::kRevoked);
  EXPECT_EQ(first_difference(y.take(), best_product(coded_, 1000, x.view()), 1000), "");
  EXPECT_EQ(daemon_.lease_count(), 0U);
}

TEST_F(GpuTensor, TwoClientsShareOneMapping) {
  Client second = Client::connect(options_for(folder_ / "s")).value();
  Model theirs = second.acquire("m").value();
  EXPECT_EQ(theirs.tensor("vector")->data().data(), tensor("vector").data().data());
  EXPECT_EQ(daemon_.lease_count(), 2U) << "but each has its lease";
  EXPECT_TRUE(model_->release().ok());
  EXPECT_EQ(daemon_.lease_count(), 1U);
  EXPECT_EQ(decompressed(theirs.tensor("coded").value()), coded_);
  EXPECT_TRUE(theirs.release().ok());
}

TEST_F(GpuTensor, CO_149_TheCallersContextIsPutBack) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
  require_cuda(cudaGetDriverEntryPointByVersion("cuCtxGetCurrent", &entry, 12000, cudaEnableDefault, &found), "cuCtxGetCurrent");
  const auto get_current = reinterpret_cast<decltype(&cuCtxGetCurrent)>(entry);
  const DeviceInput x(random_activations(64, 29), 64);
  const DeviceOutput y(1, 64), out(64, 64);
  // A thread that has never used CUDA has no context, before and after.
  std::thread([&] {
    CUcontext current = nullptr;
    ASSERT_EQ(get_current(&current), CUDA_SUCCESS);
    ASSERT_EQ(current, nullptr);
    EXPECT_TRUE(tensor("square").gemm(x.view(), y.view()).ok());
    EXPECT_TRUE(tensor("square").decompress(out.bytes()).ok());
    ASSERT_EQ(get_current(&current), CUDA_SUCCESS);
    EXPECT_EQ(current, nullptr);
  }).join();
  EXPECT_EQ(out.take(), square_);
}

size_t open_descriptors() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

TEST_F(GpuTensor, CO_062_MemoryAndDescriptorsReturnToTheBaseLine) {
  const DeviceInput x(random_activations(1096, 30), 1096);
  const DeviceOutput y(1, 1000);
  GemmOptions exact;
  exact.exact = true;
  const auto cycles = [&](int count) {
    for (int i = 0; i < count; ++i) {
      Model model = client_.acquire("m").value();
      EXPECT_TRUE(model.tensor("coded")->gemm(x.view(), y.view(), exact).ok());
      if (i % 2 == 0) {
        EXPECT_TRUE(model.release().ok());
      }
    }
  };
  EXPECT_TRUE(model_->release().ok());
  cycles(3);
  EXPECT_TRUE(daemon_.wait_for_leases(0));
  size_t free_before = 0, free_after = 0, total = 0;
  require_cuda(cudaMemGetInfo(&free_before, &total), "cudaMemGetInfo");
  const size_t descriptors = open_descriptors();
  cycles(200);
  EXPECT_TRUE(daemon_.wait_for_leases(0));
  require_cuda(cudaMemGetInfo(&free_after, &total), "cudaMemGetInfo");
  EXPECT_EQ(open_descriptors(), descriptors);
  EXPECT_GE(free_after + (uint64_t{4} << 20), free_before) << "GPU memory was lost";
}

TEST_F(GpuTensor, CO_065_AForkedChildCallsNothingAndEndsInPeace) {
  const Tensor square = tensor("square");
  EXPECT_EQ(test::in_forked_child([&] {
              std::vector<std::byte> out(8192);
              Model copy = *model_;
              Client other = client_;
              const bool refused = square.decompress(out).code() == StatusCode::kForked &&
                                   model_->tensor("square").status().code() == StatusCode::kForked &&
                                   copy.release().code() == StatusCode::kForked &&
                                   other.acquire("m").status().code() == StatusCode::kForked;
              if (!refused) return 1;
              model_.reset();
              // A connection of its own works; a GPU it cannot have.
              Client own = Client::connect(options_for(folder_ / "s")).value();
              return own.list().ok() && own.acquire("m").status().code() == StatusCode::kForked ? 0 : 2;
            }),
            0);
  EXPECT_EQ(decompressed(square), square_);
  EXPECT_TRUE(daemon_.wait_for_leases(1));
}

TEST(GpuExit, CO_065_AModelThatLivesUntilTheProcessEndsDoesNoHarm) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // in a process of its own, started anew
  EXPECT_EXIT(
      {
        // Destroyed at the very end, after whatever CUDA does at its own.
        static std::optional<Model> last;
        static const TempFolder folder;
        static FakeDaemon daemon(folder / "s");
        ModelBuilder builder;
        builder.add_raw("w", {2, 2}, {1, 2, 3, 4});
        daemon.publish(test::on_gpu(builder.seal("m", 1)));
        static Client client = Client::connect(options_for(folder / "s")).value();
        last.emplace(client.acquire("m").value());
        static const Model first = *last;  // and this before it
        std::exit(last->tensor("w")->data().size() == 8 ? 0 : 1);
      },
      ::testing::ExitedWithCode(0), "");
}

TEST(GpuVisibility, CO_144_AGpuThatIsHiddenFromThisProcessIsNamed) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  // CUDA reads the variable when it starts: it is set here, and the new process starts with it.
  constexpr const char* kHidden = "WEIGHTD_TEST_HIDDEN_GPU";
  if (::getenv(kHidden) == nullptr) {
    ASSERT_EQ(::setenv(kHidden, test::gpu_or_die().uuid.c_str(), 1), 0);
    ASSERT_EQ(::setenv("CUDA_VISIBLE_DEVICES", "", 1), 0);
  }
  EXPECT_EXIT(
      {
        const TempFolder folder;
        FakeDaemon daemon(folder / "s");
        ModelBuilder builder;
        builder.add_raw("w", {2, 2}, {1, 2, 3, 4});
        auto model = std::make_shared<SealedModel>(builder.seal("m", 1));
        model->summary.device = ::getenv(kHidden);
        daemon.publish(model);
        Client client = Client::connect(options_for(folder / "s")).value();
        const Status status = client.acquire("m").status();
        std::fprintf(stderr, "%s\n", status.to_string().c_str());
        std::exit(status.code() == StatusCode::kUnavailable && daemon.wait_for_leases(0) ? 0 : 1);
      },
      ::testing::ExitedWithCode(0), "unavailable");
  ASSERT_EQ(::unsetenv(kHidden), 0);
  ASSERT_EQ(::unsetenv("CUDA_VISIBLE_DEVICES"), 0);
}

}  // namespace
}  // namespace weightd
