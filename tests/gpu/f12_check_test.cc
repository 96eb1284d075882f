// SPDX-License-Identifier: Apache-2.0
#include "kernels/f12_check.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>

#include "store/f12.h"
#include "tests/gpu/test_matrix.h"

namespace weightd::kernels {
namespace {

using testing::DeviceF12;
using testing::DeviceMemory;
using testing::HostF12;
using testing::Words;
using Bytes = std::vector<std::byte>;

/// Units of every kind: without escapes, with inline entries, with lists, dense, and all of it mixed along K.
Words mixed_weights(uint64_t n, uint64_t k, uint64_t seed) {
  constexpr double kRates[] = {0, 3e-4, 1e-2, 0.3, 2e-3};
  Words words{n, k, {}};
  for (uint64_t row = 0; row < n; row += 16) {
    const Words unit = testing::random_weights(std::min<uint64_t>(16, n - row), k, kRates[row / 16 % 5], false, seed + row);
    words.words.insert(words.words.end(), unit.words.begin(), unit.words.end());
  }
  return words;
}

/// The planes, with a pool that starts `pool_base` bytes into the model's.
HostF12 encode_at(const Words& words, uint64_t pool_base) {
  HostF12 host = testing::encode(words);
  host.pool.clear();
  const Status status = store::f12_encode(std::as_bytes(std::span(words.words)), host.geometry, 0, host.geometry.units(),
                                          host.codes, host.windows, host.records, host.pool, pool_base, 0);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return host;
}

/// The lowest unit that f12_validate refuses: the first that makes the units from 0 to it invalid.
uint64_t first_damaged_on_host(const HostF12& host, uint64_t pool_base) {
  const f12::Geometry& g = host.geometry;
  const auto valid = [&](uint64_t units) {
    return store::f12_validate(g, 0, units, std::span(host.codes).first(units * g.tiles() * f12::kTileBytes),
                               std::span(host.windows).first(units * f12::kUnitRows),
                               std::span(host.records).first(units * g.groups() * f12::kRecordBytes), host.pool, pool_base)
        .ok();
  };
  if (valid(g.units())) return kNoDamage;
  uint64_t low = 0;  // valid
  uint64_t high = g.units();
  while (high - low > 1) {
    const uint64_t middle = low + (high - low) / 2;
    (valid(middle) ? low : high) = middle;
  }
  return low;
}

/// Planes on the device that are damaged and repaired again and again.
class Checker {
 public:
  explicit Checker(const HostF12& host) : device_(host), result_(sizeof(uint64_t)) {}

  void upload(const HostF12& host) const {
    device_.codes.upload(host.codes);
    device_.windows.upload(host.windows);
    device_.records.upload(host.records);
    device_.pool.upload(host.pool);
  }
  [[nodiscard]] uint64_t check(uint64_t pool_base, uint64_t pool_bytes) const {
    set(kNoDamage);
    F12DeviceMatrix w = device_.matrix();
    w.pool_bytes = pool_bytes;
    const Status status = launch_check_f12(w, pool_base, result_.as<uint64_t>(), nullptr);
    EXPECT_TRUE(status.ok()) << status.to_string();
    EXPECT_TRUE(result_.fences_intact());
    return testing::from_device<uint64_t>(result_)[0];
  }
  void set(uint64_t value) const { result_.upload(std::as_bytes(std::span(&value, 1))); }
  [[nodiscard]] const DeviceF12& device() const { return device_; }

 private:
  DeviceF12 device_;
  DeviceMemory result_;
};

TEST(F12Check, AcceptsWhatTheEncoderMakes) {
  for (const auto& [n, k] : {std::pair<uint64_t, uint64_t>{1, 1},
                             {16, 64},
                             {17, 65},
                             {15, 63},
                             {33, 511},
                             {48, 512},
                             {7, 513},
                             {100, 2056},
                             {160, 1100},
                             {330, 4096}}) {
    SCOPED_TRACE("n " + std::to_string(n) + " k " + std::to_string(k));
    for (const double wild : {0.0, 1e-3, 1e-2, 1.0}) {
      const HostF12 host = testing::encode(testing::random_weights(n, k, wild, false, n + k));
      EXPECT_EQ(Checker(host).check(0, host.pool.size()), kNoDamage);
    }
    const HostF12 host = encode_at(mixed_weights(n, k, n), 0);
    const Checker checker(host);
    EXPECT_EQ(checker.check(0, host.pool.size()), kNoDamage);
    EXPECT_TRUE(checker.device().fences_intact());
  }
}

uint32_t word_at(const Bytes& bytes, uint64_t at) {
  uint32_t word = 0;
  std::memcpy(&word, bytes.data() + at, sizeof word);
  return word;
}
void set_word(Bytes& bytes, uint64_t at, uint32_t word) { std::memcpy(bytes.data() + at, &word, sizeof word); }

/// One random damage; some change nothing that a rule is about.
void damage(HostF12& host, std::mt19937_64& random) {
  const auto flip = [&](Bytes& bytes) {
    if (!bytes.empty()) bytes[random() % bytes.size()] ^= static_cast<std::byte>(1U << random() % 8);
  };
  const uint64_t record = random() % (host.records.size() / f12::kRecordBytes) * f12::kRecordBytes;
  const uint64_t word = record + f12::kRecordWordsOffset + random() % f12::kRecordWords * 4;
  const uint64_t entry = host.pool.size() < 8 ? 0 : random() % (host.pool.size() / 4 - 1) * 4;
  switch (random() % 12) {
    case 0:
      return flip(host.windows);
    case 1:
      return flip(host.codes);
    case 2:
      return flip(host.pool);
    case 3:
      return flip(host.records);
    case 4:
      host.records[record + random() % 8] = static_cast<std::byte>(random());
      return;
    case 5: {  // a count and all behind it, so that they still rise
      const auto step = static_cast<uint8_t>(random() % 2 == 0 ? 1 : 255);
      for (uint64_t i = random() % 8; i < 8; ++i) {
        host.records[record + i] = static_cast<std::byte>(static_cast<uint8_t>(host.records[record + i]) + step);
      }
      return;
    }
    case 6:
      return set_word(host.records, word, word_at(host.records, word) + static_cast<uint32_t>(random() % 5) - 2);
    case 7:
      return set_word(host.records, word, static_cast<uint32_t>(random()));
    case 8:  // two neighbours change places
      if (host.pool.size() >= 8) {
        const uint32_t first = word_at(host.pool, entry);
        set_word(host.pool, entry, word_at(host.pool, entry + 4));
        set_word(host.pool, entry + 4, first);
      }
      return;
    case 9:
      if (host.pool.size() >= 8) set_word(host.pool, entry, word_at(host.pool, entry) + static_cast<uint32_t>(random() % 3) - 1);
      return;
    case 10:  // one group's offset becomes another's
      set_word(host.records, record + f12::kRecordWordsOffset,
               word_at(host.records,
                       random() % (host.records.size() / f12::kRecordBytes) * f12::kRecordBytes + f12::kRecordWordsOffset));
      return;
    default:
      host.windows[random() % host.windows.size()] = static_cast<std::byte>(118 + random() % 5);
  }
}

TEST(F12Check, CO_050_AgreesWithTheHostOnEveryKindOfDamage) {
  std::mt19937_64 random(17);
  for (const auto& [n, k] : {std::pair<uint64_t, uint64_t>{160, 1100}, {17, 65}, {83, 513}, {90, 64}, {96, 1024}, {5, 3000}}) {
    for (const uint64_t pool_base : {0U, 1U << 20}) {
      SCOPED_TRACE("n " + std::to_string(n) + " k " + std::to_string(k) + " pool at " + std::to_string(pool_base));
      const HostF12 good = encode_at(mixed_weights(n, k, k), pool_base);
      const Checker checker(good);
      ASSERT_EQ(checker.check(pool_base, good.pool.size()), kNoDamage);
      int damaged = 0;
      int unnoticed = 0;
      for (int round = 0; round < 400; ++round) {
        HostF12 host = good;
        for (uint64_t i = 0; i <= random() % 3; ++i) damage(host, random);
        checker.upload(host);
        const uint64_t want = first_damaged_on_host(host, pool_base);
        ASSERT_EQ(checker.check(pool_base, host.pool.size()), want) << "round " << round;
        (want == kNoDamage ? unnoticed : damaged) += 1;
      }
      EXPECT_GT(damaged, 50);
      EXPECT_GT(unnoticed, 5);
      EXPECT_TRUE(checker.device().fences_intact());
    }
  }
}

/// Lists hundreds of groups apart: each must begin where the one before it ends.
TEST(F12Check, OrderOfListsFarApart) {
  constexpr uint64_t kColumns = 1024;  // two groups a unit
  Words words = testing::random_weights(6400, kColumns, 0, false, 21);
  for (const uint64_t unit : {3U, 4U, 90U, 250U, 399U}) {
    const Words wild = testing::random_weights(16, kColumns, 5e-3, false, unit);
    std::copy(wild.words.begin(), wild.words.end(), words.words.begin() + static_cast<int64_t>(unit * 16 * kColumns));
  }
  const HostF12 good = testing::encode(words);
  const Checker checker(good);
  ASSERT_EQ(checker.check(0, good.pool.size()), kNoDamage);
  std::vector<uint64_t> users;  // of the pool
  for (uint64_t record = 0; record < good.records.size(); record += f12::kRecordBytes) {
    if (static_cast<uint8_t>(good.records[record + 7]) > f12::kInlineEscapes) users.push_back(record);
  }
  ASSERT_GE(users.size(), 8U);
  for (const uint64_t record : users) {
    for (const uint32_t step : {1U, 0xFFFFFFFFU, 3U}) {
      HostF12 host = good;
      set_word(host.records, record + f12::kRecordWordsOffset, word_at(good.records, record + f12::kRecordWordsOffset) + step);
      checker.upload(host);
      const uint64_t want = first_damaged_on_host(host, 0);
      EXPECT_EQ(checker.check(0, host.pool.size()), want) << "record at " << record << ", step " << step;
      EXPECT_TRUE(record == users.front() || want != kNoDamage);
    }
  }
  // Without the pool's last 16 bytes the last list is outside.
  checker.upload(good);
  EXPECT_EQ(checker.check(0, good.pool.size() - 16), users.back() / f12::kRecordBytes / 2);
  // And with the part said to begin elsewhere, the first.
  EXPECT_EQ(checker.check(16, good.pool.size()), users.front() / f12::kRecordBytes / 2);
}

/// Any bytes at all: the same verdict, and nothing outside is read (compute-sanitizer sees it) or written.
TEST(F12Check, RandomPlanes) {
  std::mt19937_64 random(23);
  const HostF12 good = testing::encode(mixed_weights(100, 1100, 5));
  const Checker checker(good);
  for (int round = 0; round < 30; ++round) {
    HostF12 host = good;
    for (std::byte& b : host.records) {
      if (round % 2 == 0 || random() % 64 == 0) b = static_cast<std::byte>(random());
    }
    for (std::byte& b : host.pool) b = static_cast<std::byte>(random());
    checker.upload(host);
    EXPECT_EQ(checker.check(0, host.pool.size()), first_damaged_on_host(host, 0)) << "round " << round;
  }
  EXPECT_TRUE(checker.device().fences_intact());
}

TEST(F12Check, MatrixWithoutColumns) {
  HostF12 host;
  host.geometry = f12::Geometry{40, 0, 1};
  host.windows.resize(host.geometry.windows_bytes());
  const Checker checker(host);
  EXPECT_EQ(checker.check(0, 0), kNoDamage);
  host.windows[41] = std::byte{1};  // past the rows
  checker.upload(host);
  ASSERT_EQ(first_damaged_on_host(host, 0), 2U);
  EXPECT_EQ(checker.check(0, 0), 2U);
}

TEST(F12Check, LaunchesShareTheResult) {
  HostF12 host = testing::encode(testing::random_weights(64, 100, 0, false, 1));
  host.windows[33] = std::byte{121};
  const Checker checker(host);
  const DeviceMemory result(sizeof(uint64_t));
  const auto check_from = [&](uint64_t value) {
    result.upload(std::as_bytes(std::span(&value, 1)));
    EXPECT_TRUE(launch_check_f12(checker.device().matrix(), 0, result.as<uint64_t>(), nullptr).ok());
    return testing::from_device<uint64_t>(result)[0];
  };
  EXPECT_EQ(check_from(kNoDamage), 2U);
  EXPECT_EQ(check_from(1), 1U);
  EXPECT_EQ(check_from(3), 2U);
}

TEST(F12Check, RefusesWhatItsContractForbids) {
  const HostF12 host = testing::encode(testing::random_weights(32, 64, 0, false, 2));
  const Checker checker(host);
  const DeviceMemory result(16);
  const auto code = [&](F12DeviceMatrix w, uint64_t pool_base, uint64_t* to) {
    return launch_check_f12(w, pool_base, to, nullptr).code();
  };
  F12DeviceMatrix misaligned = checker.device().matrix();
  misaligned.records += 8;
  F12DeviceMatrix missing = checker.device().matrix();
  missing.windows = nullptr;
  EXPECT_EQ(code(misaligned, 0, result.as<uint64_t>()), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(missing, 0, result.as<uint64_t>()), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(checker.device().matrix(), 8, result.as<uint64_t>()), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(checker.device().matrix(), 0, nullptr), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(checker.device().matrix(), 0, reinterpret_cast<uint64_t*>(result.data() + 4)), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(F12DeviceMatrix{}, 0, result.as<uint64_t>()), StatusCode::kOk);
  EXPECT_EQ(testing::from_device<uint64_t>(result)[0], 0xA5A5A5A5A5A5A5A5U);
}

}  // namespace
}  // namespace weightd::kernels
