// SPDX-License-Identifier: Apache-2.0
// What needs gigabytes: run with WEIGHTD_LONG_TESTS=1 and 16 GB free in $TMPDIR. The same arithmetic without the bytes is in
// bundle_test.cc and pack_test.cc.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>

#include "tests/store/bundle_fixture.h"

namespace weightd::store {
namespace {

using namespace weightd::testing;  // NOLINT: the fixture's names

class PackLong : public ::testing::Test {
 protected:
  void SetUp() override {
    if (std::getenv("WEIGHTD_LONG_TESTS") == nullptr) GTEST_SKIP() << "set WEIGHTD_LONG_TESTS=1";
  }

  // `word` gives element i; written in pieces.
  template <typename Word>
  static void append_words(std::ofstream& out, uint64_t count, Word&& word) {
    std::vector<uint16_t> piece;
    for (uint64_t done = 0; done < count; done += piece.size()) {
      piece.resize(std::min<uint64_t>(count - done, 1U << 20));
      for (size_t i = 0; i < piece.size(); ++i) piece[i] = word(done + i);
      out.write(reinterpret_cast<const char*>(piece.data()), static_cast<std::streamsize>(piece.size() * 2));
    }
  }

  // Packs, verifies with the checkpoint (every bit), unpacks; unpack compares the SHA-256 of each file.
  static void pack_and_back(const TempDir& dir) {
    WEIGHTD_ASSERT_OK(pack(dir / "m.safetensors", dir / "m.wpk", pack_options()));
    WEIGHTD_EXPECT_OK(verify(dir / "m.wpk", dir / "m.safetensors", false, 2, {}));
    WEIGHTD_EXPECT_OK(unpack(dir / "m.wpk", dir / "out", 2, {}));
  }

  static uint16_t pattern(uint64_t i) { return static_cast<uint16_t>((i * 2654435761U) >> 7); }
};

TEST_F(PackLong, CO_016_DataBeyondFourGiB) {
  const TempDir dir;
  constexpr uint64_t kPad = 4294967299;
  SafetensorsBuilder file;
  file.entry("pad", "U8", {kPad}, 0, kPad).entry("w", "BF16", {64, 64}, kPad, kPad + 8192);
  const std::string head = st(file.json(), ""), w = words_to_bytes(trained(64, 64, 4));
  std::ofstream out(dir / "m.safetensors", std::ios::binary);
  out << head;
  out.seekp(static_cast<std::streamoff>(head.size() + kPad));
  out << w;
  out.close();
  pack_and_back(dir);
  EXPECT_TRUE(decode(open_bundle(dir / "m.wpk"), "w") == w);
}

TEST_F(PackLong, CO_016_OneTensorBeyondTwoGiB) {
  const TempDir dir;
  SafetensorsBuilder file;
  file.entry("w", "BF16", {131072, 8200}, 0, 2149580800);
  std::ofstream out(dir / "m.safetensors", std::ios::binary);
  out << st(file.json(), "");
  Words words(1);
  append_words(out, uint64_t{131072} * 8200, [&](uint64_t) { return static_cast<uint16_t>(0x3c00 | (words.next() & 0x83ff)); });
  out.close();
  pack_and_back(dir);
  EXPECT_EQ(storage_of(open_bundle(dir / "m.wpk"), "w").encoding, Encoding::kF12);
}

TEST_F(PackLong, CO_017_CO_045_MoreThanTwoToThe31Elements) {
  const TempDir dir;
  SafetensorsBuilder file;
  constexpr uint64_t kElements = uint64_t{262144} * 8960;
  file.entry("w", "BF16", {262144, 8960}, 0, 2 * kElements);
  std::ofstream out(dir / "m.safetensors", std::ios::binary);
  out << st(file.json(), "");
  // The pattern's low bits under a few exponents, so that it is coded; the full pattern around element 2^31 and at the end.
  append_words(out, kElements, [](uint64_t i) {
    const bool full = (i >> 12) == (uint64_t{1} << 19) || i + 4096 > kElements;
    return full ? pattern(i) : static_cast<uint16_t>(0x3c00 | (pattern(i) & 0x83ff));
  });
  out.close();
  pack_and_back(dir);
  EXPECT_EQ(storage_of(open_bundle(dir / "m.wpk"), "w").encoding, Encoding::kF12);
}

}  // namespace
}  // namespace weightd::store
