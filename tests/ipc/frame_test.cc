// SPDX-License-Identifier: Apache-2.0
#include "ipc/frame.h"

#include <gtest/gtest.h>

#include <string>

#include "ipc_test_support.h"

namespace weightd::ipc {
namespace {

using test::to_bytes;

template <size_t N>
std::span<const std::byte, N> fixed(const std::vector<std::byte>& bytes) {
  return std::span<const std::byte, N>(bytes.data(), N);
}

TEST(Preamble, IsTheDocumentedBytes) {
  const auto bytes = encode_preamble({0x0201, 0x0403});
  const auto expected = to_bytes({0x89, 'W', 'T', 'D', 'I', 'P', 'C', 0x0A, 0x01, 0x02, 0x03, 0x04, 0x04, 0x03, 0x02, 0x01});
  EXPECT_EQ(std::vector<std::byte>(bytes.begin(), bytes.end()), expected);
  const Result<Preamble> preamble = decode_preamble(fixed<kPreambleBytes>(expected));
  ASSERT_TRUE(preamble.ok());
  EXPECT_EQ(preamble->version, 0x0201);
  EXPECT_EQ(preamble->oldest, 0x0403);
}

TEST(Preamble, CO_109_VersionIsReadFromAFixedPlaceWhateverItIs) {
  for (const uint16_t version : {uint16_t{0}, uint16_t{1}, uint16_t{255}, uint16_t{65535}}) {
    const Result<Preamble> preamble = decode_preamble(encode_preamble({version, version}));
    ASSERT_TRUE(preamble.ok()) << version;
    EXPECT_EQ(preamble->version, version);
  }
}

TEST(Preamble, AnyFlippedBitOfMagicOrByteOrderMarkIsRefused) {
  for (size_t bit = 0; bit < 8 * kPreambleBytes; ++bit) {
    auto bytes = encode_preamble();
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    const bool version_field = bit / 8 >= 8 && bit / 8 < 12;
    const Result<Preamble> preamble = decode_preamble(bytes);
    EXPECT_EQ(preamble.ok(), version_field) << "bit " << bit;
    if (!preamble.ok()) {
      EXPECT_EQ(preamble.status().code(), StatusCode::kInvalidArgument);
    }
  }
}

TEST(Preamble, OtherByteOrderIsNamed) {
  auto bytes = encode_preamble();
  std::swap(bytes[12], bytes[15]);
  std::swap(bytes[13], bytes[14]);
  const Result<Preamble> preamble = decode_preamble(bytes);
  ASSERT_FALSE(preamble.ok());
  EXPECT_NE(preamble.status().message().find("byte order"), std::string::npos) << preamble.status().message();
}

TEST(Versions, CO_107_ForeignVersionsAreRefusedWithBothNumbersAndWhatToDo) {
  EXPECT_TRUE(check_versions({kProtocolVersion, kOldestProtocolVersion}).ok());
  EXPECT_TRUE(check_versions({kProtocolVersion + 5, kOldestProtocolVersion}).ok()) << "a newer peer that still speaks ours";
  const Status newer = check_versions({255, 250});
  EXPECT_EQ(newer.code(), StatusCode::kUnsupported);
  for (const char* part : {"250", "255", "restart the daemon"}) {
    EXPECT_NE(newer.message().find(part), std::string::npos) << part << " in: " << newer.message();
  }
  EXPECT_NE(newer.message().find(std::to_string(kProtocolVersion)), std::string::npos);
  EXPECT_EQ(check_versions({0, 0}).code(), StatusCode::kUnsupported) << "older than the oldest that we speak";
  EXPECT_EQ(check_versions({1, 2}).code(), StatusCode::kUnsupported) << "oldest above newest";
}

TEST(FrameHeader, IsTheDocumentedBytes) {
  const auto bytes = encode_frame_header({0x00030208, 0x00FD});
  const auto expected = to_bytes({0x08, 0x02, 0x03, 0x00, 0xFD, 0x00, 0x00, 0x00});
  EXPECT_EQ(std::vector<std::byte>(bytes.begin(), bytes.end()), expected);
  const Result<FrameHeader> header = decode_frame_header(fixed<kFrameHeaderBytes>(expected), {1U << 20, 253});
  ASSERT_TRUE(header.ok());
  EXPECT_EQ(header->body_bytes, 0x00030208U);
  EXPECT_EQ(header->fd_count, 0xFD);
}

TEST(FrameHeader, LimitsAreExact) {
  const FrameLimits limits{1024, 3};
  EXPECT_TRUE(decode_frame_header(encode_frame_header({1024, 3}), limits).ok());
  EXPECT_TRUE(decode_frame_header(encode_frame_header({8, 0}), limits).ok());
  struct Bad {
    FrameHeader header;
    const char* named;
  };
  for (const Bad& bad :
       {Bad{{0, 0}, "body_bytes"}, Bad{{4, 0}, "multiple of 8"}, Bad{{1023, 0}, "multiple of 8"}, Bad{{1032, 0}, "1024"},
        Bad{{0xFFFFFFF8U, 0}, "1024"}, Bad{{8, 4}, "descriptors"}, Bad{{8, 65535}, "descriptors"}}) {
    const Result<FrameHeader> header = decode_frame_header(encode_frame_header(bad.header), limits);
    ASSERT_FALSE(header.ok()) << bad.header.body_bytes;
    EXPECT_EQ(header.status().code(), StatusCode::kInvalidArgument);
    EXPECT_NE(header.status().message().find(bad.named), std::string::npos) << header.status().message();
  }
}

TEST(FrameHeader, MoreDescriptorsThanLinuxSendsAreRefusedUnderAnyLimit) {
  EXPECT_FALSE(decode_frame_header(encode_frame_header({8, 254}), {1024, 65535}).ok());
  EXPECT_TRUE(decode_frame_header(encode_frame_header({8, 253}), {1024, 65535}).ok());
}

TEST(FrameHeader, ReservedBytesMustBeZero) {
  for (const size_t at : {size_t{6}, size_t{7}}) {
    auto bytes = encode_frame_header({8, 0});
    bytes[at] = std::byte{1};
    EXPECT_FALSE(decode_frame_header(bytes, {}).ok());
  }
}

}  // namespace
}  // namespace weightd::ipc
