// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace weightd::reference {

using Bytes = std::span<const unsigned char>;

/// Little-endian integer of `size` bytes.
[[nodiscard]] uint64_t load(Bytes bytes, uint64_t offset, int size);

/// A Cap'n Proto struct or list inside a one-segment message, as the encoding specification describes it. Far pointers and
/// capabilities are refused. Every access is checked against the segment; fields past a struct's end read as zero.
class Wire {
 public:
  /// The root struct of a framed message that fills `message` exactly.
  [[nodiscard]] static Wire root(Bytes message);

  [[nodiscard]] uint64_t number(uint64_t byte, int size) const;  // of the data section
  [[nodiscard]] bool bit(uint64_t byte, int bit) const;
  [[nodiscard]] std::vector<Wire> structs(uint64_t pointer) const;
  [[nodiscard]] std::vector<uint64_t> numbers(uint64_t pointer) const;  // List(UInt64)
  [[nodiscard]] std::string text(uint64_t pointer) const;
  [[nodiscard]] std::vector<unsigned char> data(uint64_t pointer) const;
  [[nodiscard]] std::vector<std::string> texts(uint64_t pointer) const;

 private:
  struct List { uint64_t first_word = 0, count = 0, element_code = 0; };
  Wire(Bytes segment, uint64_t data_word, uint64_t data_words, uint64_t pointer_words)
      : segment_(segment), data_word_(data_word), data_words_(data_words), pointer_words_(pointer_words) {}
  [[nodiscard]] uint64_t word(uint64_t index) const;
  [[nodiscard]] List list_at(uint64_t pointer_word) const;
  [[nodiscard]] List list(uint64_t pointer) const;
  [[nodiscard]] std::vector<unsigned char> bytes_of(const List& list) const;

  Bytes segment_;
  uint64_t data_word_ = 0, data_words_ = 0, pointer_words_ = 0;
};

}  // namespace weightd::reference
