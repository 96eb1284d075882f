// SPDX-License-Identifier: Apache-2.0
#include "tests/e2e/trace.h"

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

}  // namespace

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
