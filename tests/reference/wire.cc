// SPDX-License-Identifier: Apache-2.0
#include "tests/reference/wire.h"

#include <stdexcept>

namespace weightd::reference {
namespace {

constexpr uint64_t kBytesCode = 2, kWordsCode = 5, kPointersCode = 6, kCompositeCode = 7;

void demand(bool rule, const char* text) {
  if (!rule) throw std::runtime_error(std::string("manifest: ") + text);
}

/// Word that a pointer at `pointer_word` points to: its signed offset counts from the word behind it.
uint64_t target(uint64_t pointer_word, uint64_t pointer) {
  const auto offset = static_cast<int32_t>(static_cast<uint32_t>(pointer)) >> 2;
  const int64_t word = static_cast<int64_t>(pointer_word) + 1 + offset;
  demand(word >= 0, "pointer before the segment");
  return static_cast<uint64_t>(word);
}

}  // namespace

uint64_t load(Bytes bytes, uint64_t offset, int size) {
  if (offset > bytes.size() || bytes.size() - offset < static_cast<uint64_t>(size)) throw std::runtime_error("read past the end");
  uint64_t value = 0;
  for (int i = size - 1; i >= 0; --i) value = value << 8 | bytes[offset + static_cast<uint64_t>(i)];
  return value;
}

uint64_t Wire::word(uint64_t index) const {
  demand(index < segment_.size() / 8, "pointer past the segment");
  return load(segment_, index * 8, 8);
}

Wire Wire::root(Bytes message) {
  demand(message.size() >= 16 && load(message, 0, 4) == 0, "not one segment");
  demand(load(message, 4, 4) * 8 + 8 == message.size(), "the segment does not fill the manifest");
  Wire root(message.subspan(8), 0, 0, 0);
  const uint64_t pointer = root.word(0);
  demand((pointer & 3) == 0 && pointer != 0, "the root is not a struct");
  return Wire(root.segment_, target(0, pointer), (pointer >> 32) & 0xFFFF, pointer >> 48);
}

uint64_t Wire::number(uint64_t byte, int size) const {
  if (byte + static_cast<uint64_t>(size) > data_words_ * 8) return 0;
  return load(segment_, data_word_ * 8 + byte, size);
}

bool Wire::bit(uint64_t byte, int bit) const { return ((number(byte, 1) >> bit) & 1) != 0; }

Wire::List Wire::list_at(uint64_t pointer_word) const {
  const uint64_t pointer = word(pointer_word);
  if (pointer == 0) return {};
  demand((pointer & 3) == 1, "a list pointer is of another kind");
  return {target(pointer_word, pointer), pointer >> 35, (pointer >> 32) & 7};
}

Wire::List Wire::list(uint64_t pointer) const {
  if (pointer >= pointer_words_) return {};
  return list_at(data_word_ + data_words_ + pointer);
}

std::vector<Wire> Wire::structs(uint64_t pointer) const {
  const List found = list(pointer);
  if (found.first_word == 0) return {};
  demand(found.element_code == kCompositeCode, "not a list of structs");
  const uint64_t tag = word(found.first_word);
  const uint64_t count = (tag & 0xFFFFFFFF) >> 2, data_words = (tag >> 32) & 0xFFFF, pointers = tag >> 48;
  demand(count * (data_words + pointers) == found.count, "a list's tag and size differ");
  demand(found.first_word + 1 + found.count <= segment_.size() / 8, "a list passes the segment");
  std::vector<Wire> elements;
  for (uint64_t i = 0; i < count; ++i) {
    elements.push_back(Wire(segment_, found.first_word + 1 + i * (data_words + pointers), data_words, pointers));
  }
  return elements;
}

std::vector<uint64_t> Wire::numbers(uint64_t pointer) const {
  const List found = list(pointer);
  if (found.count == 0) return {};
  demand(found.element_code == kWordsCode, "not a list of 64-bit numbers");
  std::vector<uint64_t> values;
  for (uint64_t i = 0; i < found.count; ++i) values.push_back(word(found.first_word + i));
  return values;
}

std::vector<unsigned char> Wire::bytes_of(const List& found) const {
  if (found.count == 0) return {};
  demand(found.element_code == kBytesCode, "not a list of bytes");
  std::vector<unsigned char> bytes;
  for (uint64_t i = 0; i < found.count; ++i) bytes.push_back(static_cast<unsigned char>(load(segment_, found.first_word * 8 + i, 1)));
  return bytes;
}

std::vector<unsigned char> Wire::data(uint64_t pointer) const { return bytes_of(list(pointer)); }

std::string Wire::text(uint64_t pointer) const {
  const std::vector<unsigned char> bytes = data(pointer);
  if (bytes.empty()) return {};
  demand(bytes.back() == 0, "a text without its final NUL");
  return {bytes.begin(), bytes.end() - 1};
}

std::vector<std::string> Wire::texts(uint64_t pointer) const {
  const List found = list(pointer);
  if (found.count == 0) return {};
  demand(found.element_code == kPointersCode, "not a list of texts");
  std::vector<std::string> values;
  for (uint64_t i = 0; i < found.count; ++i) {
    const std::vector<unsigned char> bytes = bytes_of(list_at(found.first_word + i));
    values.emplace_back(bytes.begin(), bytes.empty() ? bytes.end() : bytes.end() - 1);
  }
  return values;
}

}  // namespace weightd::reference
