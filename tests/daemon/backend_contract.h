// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "daemon/loader/backend.h"

namespace weightd::testing {

/// An implementation of the seam: what makes one more backend of the same place, and what holds when all are gone.
struct BackendKind {
  std::function<Result<std::unique_ptr<loader::Backend>>()> make;
  std::function<void()> after = [] {};
};

/// A kind, begun anew for each test.
struct NamedKind {
  std::string name;
  std::function<BackendKind()> begin;
  friend void PrintTo(const NamedKind& kind, std::ostream* out) { *out << kind.name; }
};

/// What every implementation keeps to (backend_contract.cc); instantiated by each test program for its kinds.
class BackendContract : public ::testing::TestWithParam<NamedKind> {
 protected:
  BackendContract() : kind_(GetParam().begin()) {}
  void TearDown() override { kind_.after(); }
  std::unique_ptr<loader::Backend> make();

 private:
  BackendKind kind_;
};

/// A coded matrix whose planes can lie in an arena: codes, windows, records, pool, each at a multiple of 256.
struct CodedPlanes {
  loader::Backend::F12Planes planes;
  std::vector<std::byte> arena;  // whole blocks
  /// What store::f12_validate says of these bytes.
  [[nodiscard]] Status validate() const;
};
[[nodiscard]] CodedPlanes make_coded_planes(uint64_t n, uint64_t k, uint64_t batch, uint64_t seed);

/// Stages, uploads and retires all of `bytes` at offset 0, in pieces.
Status upload_all(loader::Backend& backend, const std::vector<std::byte>& bytes);
/// Chunk sizes for an arena: as many of the granularity as needed.
[[nodiscard]] std::vector<uint64_t> chunks_for(const loader::Backend& backend, uint64_t bytes);

}  // namespace weightd::testing
