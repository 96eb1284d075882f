// SPDX-License-Identifier: Apache-2.0
#include "tests/e2e/trace.h"

#include <cstring>
#include <fstream>
#include <stdexcept>

namespace weightd::e2e {
namespace {

template <typename T>
void put(std::ofstream& file, const T& value) {
  file.write(reinterpret_cast<const char*>(&value), sizeof(value));
}

template <typename T>
void put_all(std::ofstream& file, const std::vector<T>& values) {
  put(file, static_cast<uint64_t>(values.size()));
  file.write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(values.size() * sizeof(T)));
}

template <typename T>
T take(std::ifstream& file) {
  T value{};
  if (!file.read(reinterpret_cast<char*>(&value), sizeof(value))) throw std::runtime_error("trace: short file");
  return value;
}

template <typename T>
std::vector<T> take_all(std::ifstream& file) {
  std::vector<T> values(take<uint64_t>(file));
  if (!file.read(reinterpret_cast<char*>(values.data()), static_cast<std::streamsize>(values.size() * sizeof(T)))) {
    throw std::runtime_error("trace: short file");
  }
  return values;
}

/// The finisher of splitmix64: every bit of the input moves every bit of the output.
uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
  return z ^ (z >> 31);
}

}  // namespace

void Digest::add(std::span<const uint16_t> words) {
  count_ += words.size();
  while (!words.empty()) {
    uint64_t part = 0;
    const size_t count = words.size() < 4 ? words.size() : 4;
    std::memcpy(&part, words.data(), 2 * count);
    state_ = (state_ ^ part) * 0x9fb21c651e98df25U;
    state_ ^= state_ >> 35;
    words = words.subspan(count);
  }
}

uint64_t Digest::value() const { return mix(state_ ^ mix(count_)); }

uint64_t digest_of(std::span<const uint16_t> words) {
  Digest digest;
  digest.add(words);
  return digest.value();
}

std::vector<uint16_t> words_of(uint64_t digest) {
  std::vector<uint16_t> words(4);
  std::memcpy(words.data(), &digest, 8);
  return words;
}

void write_trace(const std::string& path, const std::vector<TraceRecord>& records) {
  std::ofstream file(path, std::ios::binary);
  put(file, static_cast<uint64_t>(records.size()));
  for (const TraceRecord& record : records) {
    put(file, record.kind);
    put_all(file, std::vector<char>(record.tensor.begin(), record.tensor.end()));
    put(file, record.m);
    put(file, record.n);
    put(file, record.k);
    put_all(file, record.x);
    put_all(file, record.rows);
    put_all(file, record.y);
  }
  file.close();
  if (!file) throw std::runtime_error(path + ": cannot write");
}

std::vector<TraceRecord> read_trace(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path + ": cannot read");
  std::vector<TraceRecord> records(take<uint64_t>(file));
  for (TraceRecord& record : records) {
    record.kind = take<TraceRecord::Kind>(file);
    const std::vector<char> name = take_all<char>(file);
    record.tensor.assign(name.begin(), name.end());
    record.m = take<uint64_t>(file);
    record.n = take<uint64_t>(file);
    record.k = take<uint64_t>(file);
    record.x = take_all<uint16_t>(file);
    record.rows = take_all<uint64_t>(file);
    record.y = take_all<uint16_t>(file);
  }
  return records;
}

}  // namespace weightd::e2e
