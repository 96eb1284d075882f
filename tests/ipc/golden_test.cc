// SPDX-License-Identifier: Apache-2.0
// Bytes that earlier builds sent, and the schema as it was: what must not change unseen.
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <sstream>
#include <string>

#include "ipc/channel.h"
#include "ipc/frame.h"
#include "ipc/messages.h"
#include "ipc_test_support.h"
#include "store/hash.h"

namespace weightd::ipc {
namespace {

using test::to_bytes;

/// The schema without comments and blanks: what a compiler sees.
std::string schema_text() {
  std::ifstream in(WEIGHTD_PROTOCOL_FILE);
  std::string text, line;
  while (std::getline(in, line)) {
    for (const char c : line.substr(0, line.find('#'))) {
      if (c != ' ' && c != '\t') text += c;
    }
  }
  return text;
}

// A line for every version ever released; lines are added, never edited (before the first release: the last one may still change).
struct Recorded {
  uint16_t version;
  const char* sha256;
};
constexpr Recorded kRecorded[] = {
    {1, "c08d6be2169d5180da4a25ce581dfededd16467ca0ab66e6f88810a797f772e7"},
    {2, "0ef19566387ea4481b3a73223277fb91161cf6a7e2349611cc41aa4d77590cc7"},
};

TEST(Golden, CO_107_SchemaChangesOnlyWithItsNumber) {
  const std::string text = schema_text();
  ASSERT_FALSE(text.empty()) << WEIGHTD_PROTOCOL_FILE;
  const std::string now = store::to_hex(store::sha256(std::as_bytes(std::span(text))));
  const Recorded& last = kRecorded[std::size(kRecorded) - 1];
  EXPECT_EQ(last.version, kProtocolVersion) << "record the hash of the schema for the new version: " << now;
  EXPECT_EQ(last.sha256, now) << "protocol.capnp changed: raise kProtocolVersion (ipc/frame.h) and record the new hash here";
}

// Version 1: preamble, then request 1 = hello("1.2.3 (abcdef0)", "worker"), then request 2 = status.
const std::vector<std::byte> kPreambleV1 =
    to_bytes({0x89, 'W', 'T', 'D', 'I', 'P', 'C', 0x0A, 0x01, 0x00, 0x01, 0x00, 0x04, 0x03, 0x02, 0x01});
// What this build sends first: version 2, and it still speaks version 1.
const std::vector<std::byte> kPreambleV2 =
    to_bytes({0x89, 'W', 'T', 'D', 'I', 'P', 'C', 0x0A, 0x02, 0x00, 0x01, 0x00, 0x04, 0x03, 0x02, 0x01});
const std::vector<std::byte> kHelloFrameV1 = to_bytes({
    0x58, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,  // 88 bytes, no descriptors
    0x00, 0x00, 0x00, 0x00, 0x0A, 0x00, 0x00, 0x00,  // one segment of 10 words
    0x00, 0x00, 0x00, 0x00, 0x03, 0x00, 0x01, 0x00,  // root: 3 data words, 1 pointer
    0x01, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,  // id 1
    0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,  // union member 0: hello
    0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,  // lease, unused
    0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x02, 0x00,  // -> Hello: 2 pointers
    0x05, 0x00, 0x00, 0x00, 0x82, 0x00, 0x00, 0x00,  // build: 16 bytes with its NUL
    0x09, 0x00, 0x00, 0x00, 0x3A, 0x00, 0x00, 0x00,  // name: 7 bytes with its NUL
    '1',  '.',  '2',  '.',  '3',  ' ',  '(',  'a',   //
    'b',  'c',  'd',  'e',  'f',  '0',  ')',  0x00,  //
    'w',  'o',  'r',  'k',  'e',  'r',  0x00, 0x00,
});
const std::vector<std::byte> kStatusFrameV1 = to_bytes({
    0x30, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,  // 48 bytes, no descriptors
    0x00, 0x00, 0x00, 0x00, 0x05, 0x00, 0x00, 0x00,  // one segment of 5 words
    0x00, 0x00, 0x00, 0x00, 0x03, 0x00, 0x01, 0x00,  // root: 3 data words, 1 pointer
    0x02, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,  // id 2
    0x04, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,  // union member 4: status
    0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,  //
    0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
});
// Response 2 = error(unsupported, "no"): the refusal that every version must be able to read.
const std::vector<std::byte> kRefusalFrameV1 = to_bytes({
    0x40, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,  // 64 bytes, no descriptors
    0x00, 0x00, 0x00, 0x00, 0x07, 0x00, 0x00, 0x00,  // one segment of 7 words
    0x00, 0x00, 0x00, 0x00, 0x02, 0x00, 0x01, 0x00,  // root: 2 data words, 1 pointer
    0x02, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,  // id 2
    0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,  // union member 0: error
    0x00, 0x00, 0x00, 0x00, 0x01, 0x00, 0x01, 0x00,  // -> Error: 1 data word, 1 pointer
    0x0A, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,  // code 10: unsupported
    0x01, 0x00, 0x00, 0x00, 0x1A, 0x00, 0x00, 0x00,  // message: 3 bytes with its NUL
    'n',  'o',  0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
});

TEST(Golden, CO_108_Version1HandshakeAndStatusRequestAreStillRead) {
  auto ends = test::RawAndChannel::make({}, false);
  for (const auto* bytes : {&kPreambleV1, &kHelloFrameV1, &kStatusFrameV1}) {
    ASSERT_EQ(test::send_raw(ends.raw.get(), *bytes), static_cast<ssize_t>(bytes->size()));
  }
  Result<Frame> first = ends.channel.receive(test::soon());
  ASSERT_TRUE(first.ok()) << first.status().to_string();
  ASSERT_TRUE(ends.channel.peer_preamble().has_value());
  EXPECT_EQ(ends.channel.peer_preamble()->version, 1);
  const Result<Request> hello = decode_request(first->body);
  ASSERT_TRUE(hello.ok()) << hello.status().to_string();
  EXPECT_EQ(hello->id, 1U);
  ASSERT_TRUE(std::holds_alternative<HelloRequest>(hello->body));
  EXPECT_EQ(std::get<HelloRequest>(hello->body).build, "1.2.3 (abcdef0)");
  EXPECT_EQ(std::get<HelloRequest>(hello->body).name, "worker");
  Result<Frame> second = ends.channel.receive(test::soon());
  ASSERT_TRUE(second.ok()) << second.status().to_string();
  const Result<Request> status = decode_request(second->body);
  ASSERT_TRUE(status.ok()) << status.status().to_string();
  EXPECT_EQ(status->id, 2U);
  EXPECT_TRUE(std::holds_alternative<StatusRequest>(status->body));
}

/// What a channel puts on the wire for one frame.
std::vector<std::byte> sent_bytes(std::vector<std::byte> body, size_t count) {
  auto ends = test::RawAndChannel::make();
  EXPECT_TRUE(ends.channel.send({std::move(body), {}}).ok());
  std::vector<std::byte> got(count + 1);
  const ssize_t size = ::recv(ends.raw.get(), got.data(), got.size(), 0);
  got.resize(size < 0 ? 0 : static_cast<size_t>(size));
  return got;
}

TEST(Golden, CO_108_TheFramesThatWeSendAreStillThoseOfVersion1) {
  const auto hello = encode(Request{1, HelloRequest{"1.2.3 (abcdef0)", "worker"}});
  EXPECT_EQ(sent_bytes(hello, kPreambleV2.size() + kHelloFrameV1.size()), test::joined(kPreambleV2, kHelloFrameV1));
  const auto status = encode(Request{2, StatusRequest{}});
  EXPECT_EQ(sent_bytes(status, kPreambleV2.size() + kStatusFrameV1.size()), test::joined(kPreambleV2, kStatusFrameV1));
  const auto refusal = encode(Response{2, Status::unsupported("no")});
  EXPECT_EQ(sent_bytes(refusal, kPreambleV2.size() + kRefusalFrameV1.size()), test::joined(kPreambleV2, kRefusalFrameV1));
}

TEST(Golden, CO_109_RefusalsOfOtherVersionsAreReadable) {
  // The same refusal from a newer build: an error code that we do not know, and longer structs.
  const auto newer = test::message_of({test::struct_pointer(0, 3, 2), 2, 0, 0x77, test::struct_pointer(1, 2, 2), 0, 999, 0x55,
                                       test::list_pointer(1, 2, 3), 0, 0x6F6E});
  const Result<Response> response = decode_response(newer);
  ASSERT_TRUE(response.ok()) << response.status().to_string();
  ASSERT_TRUE(std::holds_alternative<Status>(response->body));
  EXPECT_EQ(std::get<Status>(response->body).code(), StatusCode::kInternal);
  EXPECT_EQ(std::get<Status>(response->body).message(), "no");
}

TEST(Golden, CO_109_ExtraTrailingFieldsAndFewerFieldsInHello) {
  // Hello of a newer build: request with 4 data words and 2 pointers, hello with a data word and 3 pointers.
  const auto longer = test::message_of({test::struct_pointer(0, 4, 2), 7, 0, 0, 0x99, test::struct_pointer(1, 1, 3), 0, 0x1234,
                                        test::list_pointer(2, 2, 2), test::list_pointer(2, 2, 2), 0, 'b', 'n'});
  Result<Request> request = decode_request(longer);
  ASSERT_TRUE(request.ok()) << request.status().to_string();
  ASSERT_TRUE(std::holds_alternative<HelloRequest>(request->body));
  EXPECT_EQ(std::get<HelloRequest>(request->body).build, "b");
  EXPECT_EQ(std::get<HelloRequest>(request->body).name, "n");
  // Of an older one: no name, no pointer for it.
  const auto shorter =
      test::message_of({test::struct_pointer(0, 2, 1), 7, 0, test::struct_pointer(0, 0, 1), test::list_pointer(0, 2, 2), 'b'});
  request = decode_request(shorter);
  ASSERT_TRUE(request.ok()) << request.status().to_string();
  EXPECT_EQ(std::get<HelloRequest>(request->body).build, "b");
  EXPECT_EQ(std::get<HelloRequest>(request->body).name, "");
}

}  // namespace
}  // namespace weightd::ipc
