// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "tests/client/fake_daemon.h"
#include "tests/reference/gemm.h"
#include "weightd/client.h"

namespace weightd {
namespace {

using test::bytes_of;
using test::FakeDaemon;
using test::ModelBuilder;
using test::random_activations;
using test::random_weights;
using test::SealedModel;
using test::TempFolder;
using testing::Each;
using testing::HasSubstr;

constexpr uint16_t kCanary = 0xDEAD;
constexpr int64_t kMostNegative = std::numeric_limits<int64_t>::min();
constexpr int64_t kMostPositive = std::numeric_limits<int64_t>::max();

/// The matrices of the model, and what they hold.
struct Matrix {
  const char* name;
  uint64_t n, k;
  std::vector<uint16_t> words;
};

std::vector<uint16_t> rows_of(const std::vector<uint16_t>& words, uint64_t begin, uint64_t end, uint64_t k) {
  return {words.begin() + static_cast<ptrdiff_t>(begin * k), words.begin() + static_cast<ptrdiff_t>(end * k)};
}

class TensorTest : public testing::Test {
 protected:
  TensorTest() : daemon_(folder_ / "s") {
    ModelBuilder builder;
    builder.add_f12("coded", {50, 130}, coded_);
    builder.add_raw("plain", {37, 61}, plain_);
    builder.add_merged("qkv", {{"q", 32}, {"k", 16}, {"v", 48}}, 72, merged_);
    builder.add_f12("experts", {3, 20, 65}, experts_);
    builder.add_raw("plain_experts", {2, 5, 7}, plain_experts_);
    builder.add_f12("square", {64, 64}, square_);
    builder.add_raw("vector", {40}, vector_);
    builder.add_raw("scalar", DType::kF32, {}, {std::byte{1}, std::byte{2}, std::byte{3}, std::byte{4}});
    builder.add_raw("floats", DType::kF32, {2, 2}, std::vector<std::byte>(16, std::byte{9}));
    builder.add_raw("nibbles", DType::kF4, {4, 3}, nibbles_);
    builder.add_raw("no_columns", {6, 0}, {});
    builder.add_raw("no_rows", {0, 6}, {});
    ClientOptions options;
    options.socket_path = folder_ / "s";
    daemon_.publish(std::make_shared<SealedModel>(builder.seal("m", 1)));
    model_.emplace(Client::connect(options).value().acquire("m").value());
  }

  [[nodiscard]] Tensor tensor(const char* name) const { return model_->tensor(name).value(); }
  [[nodiscard]] std::vector<Matrix> matrices() const {
    return {{"coded", 50, 130, coded_},
            {"plain", 37, 61, plain_},
            {"q", 32, 72, rows_of(merged_, 0, 32, 72)},
            {"k", 16, 72, rows_of(merged_, 32, 48, 72)},
            {"v", 48, 72, rows_of(merged_, 48, 96, 72)},
            {"qkv", 96, 72, merged_}};
  }

  const std::vector<uint16_t> coded_ = random_weights(50 * 130, 1), plain_ = random_weights(37 * 61, 2),
                              merged_ = random_weights(96 * 72, 3), experts_ = random_weights(3 * 20 * 65, 4),
                              plain_experts_ = random_weights(2 * 5 * 7, 5), square_ = random_weights(64 * 64, 6),
                              vector_ = random_weights(40, 7);
  const std::vector<std::byte> nibbles_{std::byte{0x10}, std::byte{0x32}, std::byte{0x54},
                                        std::byte{0x76}, std::byte{0x98}, std::byte{0xba}};
  const TempFolder folder_;
  FakeDaemon daemon_;
  std::optional<Model> model_;
};

std::vector<uint16_t> decompressed(const Tensor& tensor, const GemmOptions& options = {}) {
  std::vector<uint16_t> words(tensor.info().logical_bytes / 2, kCanary);
  const Status status = tensor.decompress(std::as_writable_bytes(std::span(words)), options);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return words;
}

TEST_F(TensorTest, DecompressGivesTheOriginalBits) {
  for (const Matrix& matrix : matrices()) EXPECT_EQ(decompressed(tensor(matrix.name)), matrix.words) << matrix.name;
  EXPECT_EQ(decompressed(tensor("experts")), experts_);
  EXPECT_EQ(decompressed(tensor("plain_experts")), plain_experts_);
  EXPECT_EQ(decompressed(tensor("vector")), vector_);
  EXPECT_TRUE(decompressed(tensor("no_columns")).empty());
  std::vector<std::byte> scalar(4);
  EXPECT_TRUE(tensor("scalar").decompress(scalar).ok());
  EXPECT_EQ(scalar, (std::vector<std::byte>{std::byte{1}, std::byte{2}, std::byte{3}, std::byte{4}}));
}

TEST_F(TensorTest, ThreadsChangeNothing) {
  for (const int threads : {1, 2, 7}) {
    GemmOptions options;
    options.threads = threads;
    EXPECT_EQ(decompressed(tensor("coded"), options), coded_);
    EXPECT_EQ(decompressed(tensor("experts"), options), experts_);
    EXPECT_EQ(decompressed(tensor("plain"), options), plain_);
  }
}

TEST_F(TensorTest, RowsOfMatricesPartsAndStacks) {
  const auto check = [&](const char* name, const std::vector<uint16_t>& words, uint64_t rows, uint64_t k) {
    for (uint64_t begin = 0; begin <= rows; ++begin) {
      const uint64_t end = std::min(rows, begin + 1 + begin % 23);
      std::vector<uint16_t> out((end - begin) * k + 1, kCanary);
      const Status status = tensor(name).decompress_rows(begin, end, std::as_writable_bytes(std::span(out)));
      ASSERT_TRUE(status.ok()) << status.to_string();
      EXPECT_EQ(out.back(), kCanary);
      out.pop_back();
      EXPECT_EQ(out, rows_of(words, begin, end, k)) << name << " rows " << begin << " to " << end;
    }
  };
  for (const Matrix& matrix : matrices()) check(matrix.name, matrix.words, matrix.n, matrix.k);
  check("experts", experts_, 60, 65);
  check("plain_experts", plain_experts_, 10, 7);
  check("vector", vector_, 1, 40);
}

TEST_F(TensorTest, RowsOutsideTheTensorAreRefused) {
  std::vector<std::byte> out(1 << 16);
  for (const auto& [begin, end] : {std::pair<uint64_t, uint64_t>{0, 17}, {17, 17}, {3, 2}, {~uint64_t{0}, ~uint64_t{0}}}) {
    EXPECT_EQ(tensor("k").decompress_rows(begin, end, out).code(), StatusCode::kInvalidArgument) << begin << " " << end;
  }
  EXPECT_EQ(tensor("vector").decompress_rows(0, 2, out).code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(tensor("k").decompress_rows(16, 16, {}).ok());
}

TEST_F(TensorTest, RowsOfNarrowTypesEndAtWholeBytes) {
  std::vector<std::byte> out(6);
  EXPECT_TRUE(tensor("nibbles").decompress_rows(2, 4, out).ok());  // rows of 12 bits
  EXPECT_EQ((std::vector<std::byte>(out.begin(), out.begin() + 3)), (std::vector<std::byte>(nibbles_.begin() + 3, nibbles_.end())));
  EXPECT_EQ(tensor("nibbles").decompress_rows(1, 2, out).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(tensor("nibbles").decompress_rows(0, 3, out).code(), StatusCode::kInvalidArgument);
}

TEST_F(TensorTest, CO_042_AnOutputThatIsTooSmallIsNotTouched) {
  constexpr size_t kFrame = 4096, kBytes = 8192;
  std::vector<std::byte> framed(kFrame + kBytes + kFrame, std::byte{0xA5});
  const std::span<std::byte> out = std::span(framed).subspan(kFrame, kBytes);
  const Status status = tensor("square").decompress(out.first(8190));
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("8190"));
  EXPECT_THAT(status.message(), HasSubstr("8192"));
  EXPECT_THAT(framed, Each(std::byte{0xA5}));
  EXPECT_EQ(tensor("square").decompress({}).code(), StatusCode::kInvalidArgument);

  ASSERT_TRUE(tensor("square").decompress(out).ok());
  const std::vector<std::byte> expected = bytes_of(square_);
  EXPECT_EQ(std::memcmp(out.data(), expected.data(), kBytes), 0);
  EXPECT_THAT(std::vector<std::byte>(framed.begin(), framed.begin() + kFrame), Each(std::byte{0xA5}));
  EXPECT_THAT(std::vector<std::byte>(framed.end() - kFrame, framed.end()), Each(std::byte{0xA5}));
  EXPECT_EQ(tensor("square").decompress_rows(0, 2, out.first(255)).code(), StatusCode::kInvalidArgument);
}

template <typename Index>
void check_gather(const Tensor& tensor, const Matrix& matrix) {
  std::vector<Index> rows;
  for (uint64_t i = 0; i < 3 * matrix.n; ++i)
    rows.push_back(static_cast<Index>(i * i * 7 % matrix.n));  // some many times, some never
  const uint64_t stride = matrix.k + 3;
  for (const int threads : {1, 4}) {
    GemmOptions options;
    options.threads = threads;
    std::vector<uint16_t> out(rows.size() * stride, kCanary), expected(rows.size() * stride, kCanary);
    for (size_t i = 0; i < rows.size(); ++i) {
      std::copy_n(&matrix.words[static_cast<uint64_t>(rows[i]) * matrix.k], matrix.k, &expected[i * stride]);
    }
    const Status status = tensor.gather_rows(rows, {out.data(), rows.size(), matrix.k, static_cast<int64_t>(stride)}, options);
    ASSERT_TRUE(status.ok()) << status.to_string();
    EXPECT_EQ(out, expected) << matrix.name << ", " << threads << " threads";
  }
}

TEST_F(TensorTest, GatherGivesTheRowsAskedFor) {
  for (const Matrix& matrix : matrices()) {
    check_gather<int32_t>(tensor(matrix.name), matrix);
    check_gather<int64_t>(tensor(matrix.name), matrix);
  }
}

TEST_F(TensorTest, GatherRefusesWhatIsNotThereAndWritesNothing) {
  std::vector<uint16_t> out(4 * 130, kCanary);
  const auto code = [&](const char* name, std::vector<int64_t> rows, Bf16Matrix to) {
    return tensor(name).gather_rows(rows, to).code();
  };
  const Bf16Matrix two{out.data(), 2, 130, 130};
  for (const int64_t outside : {int64_t{50}, int64_t{-1}, kMostNegative, kMostPositive}) {
    const std::vector<int64_t> rows{0, outside};
    const Status status = tensor("coded").gather_rows(rows, two);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr("tensor 'coded'"));
    EXPECT_THAT(status.message(), HasSubstr(std::to_string(outside)));
  }
  EXPECT_EQ(code("k", {16}, {out.data(), 1, 72, 72}), StatusCode::kInvalidArgument) << "v's first row";
  EXPECT_EQ(code("plain", {37}, {out.data(), 1, 61, 61}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code("coded", {0, 1, 2}, two), StatusCode::kInvalidArgument) << "more indexes than rows";
  EXPECT_EQ(code("coded", {0, 1}, {out.data(), 2, 129, 130}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code("coded", {0, 1}, {nullptr, 2, 130, 130}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code("coded", {0, 1}, {out.data(), 2, 130, 129}), StatusCode::kInvalidArgument) << "stride";
  EXPECT_EQ(code("coded", {0, 1}, {out.data(), 2, 130, -130}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code("vector", {0}, {out.data(), 1, 40, 40}), StatusCode::kInvalidArgument) << "rank 1";
  EXPECT_EQ(code("experts", {0}, {out.data(), 1, 65, 65}), StatusCode::kInvalidArgument) << "rank 3";
  EXPECT_EQ(code("floats", {0}, {out.data(), 1, 2, 2}), StatusCode::kInvalidArgument) << "no BF16";
  EXPECT_EQ(code("no_rows", {0}, {out.data(), 1, 6, 6}), StatusCode::kInvalidArgument);
  // Indexes: at an odd address, none at all, inside the output.
  const std::vector<std::byte> bytes(32);
  const auto* odd = reinterpret_cast<const int32_t*>(bytes.data() + 1);
  EXPECT_EQ(tensor("coded").gather_rows(std::span(odd, 2), two).code(), StatusCode::kInvalidArgument);
  const std::span<const int64_t> inside(reinterpret_cast<const int64_t*>(out.data()), 2);
  EXPECT_EQ(tensor("coded").gather_rows(inside, two).code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(out, Each(kCanary));
  // Into the weights.
  const std::vector<int32_t> row{0};
  auto* weights = const_cast<uint16_t*>(reinterpret_cast<const uint16_t*>(tensor("vector").data().data()));
  EXPECT_EQ(tensor("k").gather_rows(row, {weights, 1, 72, 72}).code(), StatusCode::kInvalidArgument);
  // Nothing is asked of nothing.
  EXPECT_TRUE(tensor("coded").gather_rows(std::span<const int32_t>(), {nullptr, 0, 130, 130}).ok());
  EXPECT_TRUE(tensor("no_columns").gather_rows(row, {nullptr, 1, 0, 0}).ok());
}

TEST_F(TensorTest, NothingOnTheHostNeedsAWorkspace) {
  for (const char* name : {"coded", "plain", "experts", "vector", "floats"}) EXPECT_EQ(tensor(name).workspace_bytes(), 0U) << name;
}

TEST_F(TensorTest, GemmEqualsTheReferenceBitForBit) {
  for (const Matrix& matrix : matrices()) {
    for (const uint64_t m : {1U, 2U, 5U, 17U}) {
      const std::vector<uint16_t> x = random_activations(m * matrix.k, m);
      std::vector<uint16_t> expected(m * matrix.n), y(m * matrix.n, kCanary);
      reference::gemm_bf16(x, matrix.words, expected, m, matrix.n, matrix.k);
      const Status status = tensor(matrix.name)
                                .gemm({x.data(), m, matrix.k, static_cast<int64_t>(matrix.k)},
                                      {y.data(), m, matrix.n, static_cast<int64_t>(matrix.n)});
      ASSERT_TRUE(status.ok()) << status.to_string();
      EXPECT_EQ(y, expected) << matrix.name << ", " << m << " tokens";
    }
  }
}

TEST_F(TensorTest, GemmWithEachExpert) {
  const auto check = [&](const char* name, const std::vector<uint16_t>& words, uint64_t experts, uint64_t n, uint64_t k) {
    for (uint64_t e = 0; e < experts; ++e) {
      const std::vector<uint16_t> x = random_activations(3 * k, e);
      std::vector<uint16_t> expected(3 * n), y(3 * n, kCanary);
      reference::gemm_bf16(x, rows_of(words, e * n, (e + 1) * n, k), expected, 3, n, k);
      ASSERT_TRUE(tensor(name).gemm(e, {x.data(), 3, k, static_cast<int64_t>(k)}, {y.data(), 3, n, static_cast<int64_t>(n)}).ok());
      EXPECT_EQ(y, expected) << name << " " << e;
    }
  };
  check("experts", experts_, 3, 20, 65);
  check("plain_experts", plain_experts_, 2, 5, 7);
}

TEST_F(TensorTest, GapsBetweenRowsAreNeitherReadNorWritten) {
  constexpr uint64_t kM = 3, kN = 50, kK = 130, kXStride = 141, kYStride = 53;
  const std::vector<uint16_t> dense = random_activations(kM * kK, 8);
  std::vector<uint16_t> x(kM * kXStride, 0x7fc0), y(kM * kYStride, kCanary), expected(kM * kN);  // NaN in the gaps
  for (uint64_t i = 0; i < kM; ++i) std::copy_n(&dense[i * kK], kK, &x[i * kXStride]);
  reference::gemm_bf16(dense, coded_, expected, kM, kN, kK);
  ASSERT_TRUE(tensor("coded").gemm({x.data(), kM, kK, kXStride}, {y.data(), kM, kN, kYStride}).ok());
  for (uint64_t i = 0; i < kM; ++i) {
    for (uint64_t j = 0; j < kYStride; ++j) {
      ASSERT_EQ(y[i * kYStride + j], j < kN ? expected[i * kN + j] : kCanary) << i << ", " << j;
    }
  }
}

TEST_F(TensorTest, CO_054_RowStridesBelowTheRow) {
  constexpr int64_t kK = 130, kN = 50;
  const std::vector<uint16_t> x = random_activations(2 * kK, 1);
  std::vector<uint16_t> y(2 * kN, kCanary);
  for (const int64_t stride : {kK - 1, int64_t{0}, -kK, kMostNegative}) {
    const Status status = tensor("coded").gemm({x.data(), 2, kK, stride}, {y.data(), 2, kN, kN});
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << stride;
    EXPECT_THAT(status.message(), HasSubstr("x: row stride " + std::to_string(stride)));
  }
  for (const int64_t stride : {kN - 1, int64_t{0}, -kN}) {
    const Status status = tensor("coded").gemm({x.data(), 2, kK, kK}, {y.data(), 2, kN, stride});
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << stride;
    EXPECT_THAT(status.message(), HasSubstr("y: row stride"));
  }
  EXPECT_EQ(tensor("coded").gemm({x.data(), 2, kK, kMostPositive}, {y.data(), 2, kN, kN}).code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(y, Each(kCanary));

  // One row has no stride.
  std::vector<uint16_t> expected(kN);
  reference::gemm_bf16(std::span(x).first(kK), coded_, expected, 1, kN, kK);
  for (const int64_t stride : {kK - 1, int64_t{0}, -kK, kMostNegative}) {
    std::vector<uint16_t> row(kN, kCanary);
    ASSERT_TRUE(tensor("coded").gemm({x.data(), 1, kK, stride}, {row.data(), 1, kN, stride}).ok()) << stride;
    EXPECT_EQ(row, expected);
  }
}

TEST_F(TensorTest, CO_055_AnyAddressThatAWordCanHave) {
  constexpr uint64_t kK = 72, kN = 16, kM = 2;
  const std::vector<uint16_t> x = random_activations(kM * kK + 8, 1);
  for (const size_t shift : {0U, 1U, 2U, 4U}) {  // 2, 4 and 8 bytes
    std::vector<uint16_t> expected(kM * kN), y(kM * kN + 8, kCanary);
    const std::vector<uint16_t> shifted(x.begin() + static_cast<ptrdiff_t>(shift),
                                        x.begin() + static_cast<ptrdiff_t>(shift + kM * kK));
    reference::gemm_bf16(shifted, rows_of(merged_, 32, 48, 72), expected, kM, kN, kK);
    ASSERT_TRUE(tensor("k").gemm({&x[shift], kM, kK, kK}, {&y[shift], kM, kN, kN}).ok());
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), y.begin() + static_cast<ptrdiff_t>(shift))) << shift;
    EXPECT_EQ(std::count(y.begin(), y.end(), kCanary), 8);
  }
  // Odd addresses, and odd strides (which are fine).
  std::vector<uint16_t> y(kM * kN + 8, kCanary);
  const auto* odd = reinterpret_cast<const uint16_t*>(reinterpret_cast<uintptr_t>(x.data()) + 1);
  auto* odd_y = reinterpret_cast<uint16_t*>(reinterpret_cast<uintptr_t>(y.data()) + 1);
  EXPECT_EQ(tensor("k").gemm({odd, kM, kK, kK}, {y.data(), kM, kN, kN}).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(tensor("k").gemm({x.data(), kM, kK, kK}, {odd_y, kM, kN, kN}).code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(y, Each(kCanary));
  EXPECT_TRUE(tensor("k").gemm({x.data(), kM, kK, kK + 1}, {y.data(), kM, kN, kN + 1}).ok());
}

TEST_F(TensorTest, CO_058_TheOutputOverlapsNothing) {
  constexpr uint64_t kM = 2, kSide = 64;
  std::vector<uint16_t> buffer = random_activations(4 * kM * kSide, 1);
  const std::vector<uint16_t> before = buffer;
  const auto gemm = [&](const uint16_t* x, uint16_t* y) {
    return tensor("square").gemm({x, kM, kSide, kSide}, {y, kM, kSide, kSide}).code();
  };
  uint16_t* const x = buffer.data() + kM * kSide;
  EXPECT_EQ(gemm(x, x), StatusCode::kInvalidArgument);
  EXPECT_EQ(gemm(x, x + 8), StatusCode::kInvalidArgument);
  EXPECT_EQ(gemm(x, x - 8), StatusCode::kInvalidArgument);
  EXPECT_EQ(gemm(x, x + kM * kSide - 1), StatusCode::kInvalidArgument);
  EXPECT_EQ(buffer, before);

  // Into the weights: refused by address, not by a fault.
  const std::span<const std::byte> mapped = tensor("vector").data();
  auto* weights = const_cast<uint16_t*>(reinterpret_cast<const uint16_t*>(mapped.data()));
  EXPECT_EQ(gemm(x, weights), StatusCode::kInvalidArgument);
  EXPECT_EQ(gemm(x, weights - 64), StatusCode::kInvalidArgument);
  EXPECT_EQ(tensor("vector").decompress({reinterpret_cast<std::byte*>(weights), 80}).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(tensor("square").decompress({reinterpret_cast<std::byte*>(weights) - 64, 8192}).code(), StatusCode::kInvalidArgument);

  EXPECT_EQ(gemm(x, x + kM * kSide), StatusCode::kOk) << "side by side is fine";
  EXPECT_EQ(gemm(x, x - kM * kSide), StatusCode::kOk);
  EXPECT_EQ(decompressed(tensor("square")), square_) << "the weights are what they were";
  EXPECT_EQ(decompressed(tensor("vector")), vector_);
}

TEST_F(TensorTest, ShapesThatDoNotFitAreNamed) {
  const std::vector<uint16_t> x = random_activations(4 * 130, 1);
  std::vector<uint16_t> y(4 * 130, kCanary);
  const auto code = [&](const char* name, ConstBf16Matrix a, Bf16Matrix b) { return tensor(name).gemm(a, b).code(); };
  EXPECT_EQ(code("coded", {x.data(), 2, 129, 129}, {y.data(), 2, 50, 50}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code("coded", {x.data(), 2, 130, 130}, {y.data(), 2, 49, 50}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code("coded", {x.data(), 2, 130, 130}, {y.data(), 3, 50, 50}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code("coded", {nullptr, 2, 130, 130}, {y.data(), 2, 50, 50}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code("coded", {x.data(), 2, 130, 130}, {nullptr, 2, 50, 50}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code("coded", {x.data(), ~uint64_t{0}, 130, 130}, {y.data(), ~uint64_t{0}, 50, 50}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code("vector", {x.data(), 1, 40, 40}, {y.data(), 1, 1, 1}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code("floats", {x.data(), 1, 2, 2}, {y.data(), 1, 2, 2}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code("scalar", {x.data(), 1, 1, 1}, {y.data(), 1, 1, 1}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code("experts", {x.data(), 1, 65, 65}, {y.data(), 1, 20, 20}), StatusCode::kInvalidArgument);
  EXPECT_EQ(tensor("experts").gemm(3, {x.data(), 1, 65, 65}, {y.data(), 1, 20, 20}).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(tensor("coded").gemm(0, {x.data(), 1, 130, 130}, {y.data(), 1, 50, 50}).code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(y, Each(kCanary));
  EXPECT_THAT(tensor("coded").gemm({x.data(), 2, 129, 129}, {y.data(), 2, 50, 50}).message(), HasSubstr("tensor 'coded'"));
}

TEST_F(TensorTest, EmptyProblems) {
  std::vector<uint16_t> y(12, kCanary);
  const std::vector<uint16_t> x(12, 0x3f80);
  EXPECT_TRUE(tensor("coded").gemm({nullptr, 0, 130, 130}, {nullptr, 0, 50, 50}).ok());
  EXPECT_TRUE(tensor("no_rows").gemm({x.data(), 2, 6, 6}, {nullptr, 2, 0, 0}).ok());
  EXPECT_THAT(y, Each(kCanary));
  // K = 0: a sum of nothing is +0.
  EXPECT_TRUE(tensor("no_columns").gemm({nullptr, 2, 0, 0}, {y.data(), 2, 6, 6}).ok());
  EXPECT_THAT(y, Each(0));
}

}  // namespace
}  // namespace weightd
