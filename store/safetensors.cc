// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "base/text.h"
#include "store/checkpoint.h"
#include "store/strict_json.h"

namespace weightd::store {
namespace {

constexpr std::string_view kReservedName = "__metadata__";
constexpr uint64_t kLengthBytes = 8;

std::string in_quotes(std::string_view name) { return "'" + printable(name) + "'"; }

std::string count_of(uint64_t count, std::string_view noun) {
  return std::to_string(count) + " " + std::string(noun) + (count == 1 ? "" : "s");
}

/// The tokens of a header, as a state machine: {"name": {"dtype": .., "shape": [..], "data_offsets": [.., ..]}, ..}.
class HeaderHandler : public JsonHandler {
 public:
  HeaderHandler(std::string_view file, std::vector<SafetensorsEntry>& entries) : file_(file), entries_(entries) {}

  Status begin_object() override {
    switch (at_) {
      case At::kStart:
        at_ = At::kTop;
        return {};
      case At::kTensor:
        at_ = At::kEntry;
        has_dtype_ = has_shape_ = has_offsets_ = false;
        offsets_.clear();
        return {};
      case At::kMetadata:
        at_ = At::kInMetadata;
        return {};
      default:
        return unexpected("an object");
    }
  }

  Status key(std::string& text) override {
    switch (at_) {
      case At::kTop:
        return begin_tensor(text);
      case At::kInMetadata:
        field_ = text;
        at_ = At::kMetadataValue;
        return {};
      case At::kEntry:
        return begin_field(text);
      default:
        return unexpected("a key");
    }
  }

  Status end_object() override {
    switch (at_) {
      case At::kTop:
        at_ = At::kEnd;
        return {};
      case At::kInMetadata:
        at_ = At::kTop;
        return {};
      case At::kEntry:
        at_ = At::kTop;
        return end_entry();
      default:
        return unexpected("the end of an object");
    }
  }

  Status begin_array() override {
    if (at_ == At::kShape || at_ == At::kOffsets) {
      at_ = at_ == At::kShape ? At::kShapeItems : At::kOffsetsItems;
      return {};
    }
    return unexpected("an array");
  }

  Status end_array() override {
    if (at_ == At::kOffsetsItems && offsets_.size() != 2) {
      return fail("data_offsets has " + count_of(offsets_.size(), "value") + " instead of 2");
    }
    at_ = At::kEntry;  // arrays begin nowhere else
    return {};
  }

  Status string(std::string& text) override {
    if (at_ == At::kMetadataValue) {
      at_ = At::kInMetadata;
      return {};
    }
    if (at_ != At::kDtype) return unexpected("the string " + in_quotes(text));
    const std::optional<DType> dtype = dtype_from_name(text);
    if (!dtype) return Status::unsupported(where() + "unknown dtype " + in_quotes(text));
    entries_.back().dtype = *dtype;
    at_ = At::kEntry;
    return {};
  }

  Status integer(uint64_t value) override {
    if (at_ == At::kShapeItems) {
      Shape& shape = entries_.back().shape;
      if (shape.size() == kMaxRank) {
        return Status::unsupported(where() + "more than " + std::to_string(kMaxRank) + " dimensions");
      }
      shape.push_back(value);
      return {};
    }
    if (at_ == At::kOffsetsItems) {
      if (offsets_.size() == 2) return fail("data_offsets has more than 2 values");
      offsets_.push_back(value);
      return {};
    }
    return unexpected(std::to_string(value));
  }

  Status other(std::string_view token) override { return unexpected(printable(token)); }

 private:
  enum class At {
    kStart,
    kTop,
    kEnd,  // around, inside and behind the outer object
    kTensor,
    kEntry,  // a tensor's value, and inside it
    kDtype,
    kShape,
    kShapeItems,
    kOffsets,
    kOffsetsItems,
    kMetadata,
    kInMetadata,
    kMetadataValue,
  };

  std::string where() const {
    std::string text(file_);
    text += ": ";
    if (at_ == At::kMetadata || at_ == At::kInMetadata || at_ == At::kMetadataValue) {
      text += std::string(kReservedName) + ": ";
    } else if (at_ != At::kStart && !entries_.empty() && (at_ != At::kTop && at_ != At::kEnd)) {
      text += "tensor " + in_quotes(entries_.back().name) + ": ";
    }
    return text;
  }
  Status fail(std::string_view rule) const { return Status::corruption(where() + std::string(rule)); }

  Status unexpected(const std::string& found) const {
    constexpr std::string_view kInteger = " must be a plain integer from 0 to 2^64 - 1";
    std::string rule;
    switch (at_) {
      case At::kStart:
        rule = "the header must be one JSON object";
        break;
      case At::kTensor:
        rule = "the entry must be an object";
        break;
      case At::kDtype:
        rule = "dtype must be a string";
        break;
      case At::kShape:
        rule = "shape must be an array of integers";
        break;
      case At::kShapeItems:
        rule = "shape[" + std::to_string(entries_.back().shape.size()) + "]" + std::string(kInteger);
        break;
      case At::kOffsets:
        rule = "data_offsets must be an array of two integers";
        break;
      case At::kOffsetsItems:
        rule = "data_offsets[" + std::to_string(offsets_.size()) + "]" + std::string(kInteger);
        break;
      case At::kMetadata:
        rule = "the value must be an object of strings; no tensor may have this name";
        break;
      case At::kMetadataValue:
        rule = "the value of " + in_quotes(field_) + " must be a string; no tensor may have the name " + std::string(kReservedName);
        break;
      case At::kTop:
      case At::kEnd:
      case At::kEntry:
      case At::kInMetadata:
        rule = "malformed header";
        break;
    }
    return fail(rule + ", have " + found);
  }

  Status begin_tensor(std::string& name) {
    if (name == kReservedName) {
      if (has_metadata_) return Status::corruption(std::string(file_) + ": " + std::string(kReservedName) + " occurs twice");
      has_metadata_ = true;
      at_ = At::kMetadata;
      return {};
    }
    if (name.size() > kMaxNameBytes) {
      return Status::unsupported(std::string(file_) + ": tensor " + in_quotes(name) + ": the name has " +
                                 std::to_string(name.size()) + " bytes, over the limit of " + std::to_string(kMaxNameBytes));
    }
    entries_.emplace_back();
    entries_.back().name = std::move(name);
    at_ = At::kTensor;
    return {};
  }

  Status begin_field(const std::string& field) {
    bool* seen = nullptr;
    At next = at_;
    if (field == "dtype") {
      seen = &has_dtype_;
      next = At::kDtype;
    }
    if (field == "shape") {
      seen = &has_shape_;
      next = At::kShape;
    }
    if (field == "data_offsets") {
      seen = &has_offsets_;
      next = At::kOffsets;
    }
    if (seen == nullptr) return fail("unknown key " + in_quotes(field));
    if (*seen) return fail("the key " + in_quotes(field) + " occurs twice");
    *seen = true;
    at_ = next;
    return {};
  }

  /// Checks an entry by itself: complete, and shape and offsets agree.
  Status end_entry() {
    SafetensorsEntry& entry = entries_.back();
    const auto refuse = [&](const std::string& rule) {
      return Status::corruption(std::string(file_) + ": tensor " + in_quotes(entry.name) + ": " + rule);
    };
    if (!has_dtype_) return refuse("dtype is missing");
    if (!has_shape_) return refuse("shape is missing");
    if (!has_offsets_) return refuse("data_offsets is missing");
    const uint64_t begin = offsets_[0], end = offsets_[1];
    const auto offsets = [&] { return "data_offsets [" + std::to_string(begin) + ", " + std::to_string(end) + "]"; };
    const auto what = [&] { return "shape " + shape_to_string(entry.shape) + " of " + std::string(dtype_name(entry.dtype)); };
    if (begin > end) return refuse(offsets() + " end before they begin");
    // A dimension of 0 counts as 1 here: whoever multiplies only some of the dimensions shall be safe, too.
    uint64_t bits = dtype_bits(entry.dtype);
    bool empty = false;
    for (const uint64_t dim : entry.shape) {
      empty = empty || dim == 0;
      if (__builtin_mul_overflow(bits, std::max<uint64_t>(dim, 1), &bits)) return refuse(what() + " has more than 2^64 - 1 bits");
    }
    if (empty) bits = 0;
    if (bits % 8 != 0) return refuse(what() + " has " + std::to_string(bits) + " bits: not whole bytes");
    if (bits / 8 != end - begin) {
      return refuse(what() + " needs " + count_of(bits / 8, "byte") + ", " + offsets() + " give " + std::to_string(end - begin));
    }
    entry.offset_bytes = begin;
    entry.size_bytes = end - begin;
    return {};
  }

  std::string_view file_;
  std::vector<SafetensorsEntry>& entries_;
  At at_ = At::kStart;
  bool has_metadata_ = false;
  bool has_dtype_ = false, has_shape_ = false, has_offsets_ = false;  // of the last entry
  std::vector<uint64_t> offsets_;                                     // of the last entry
  std::string field_;                                                 // of __metadata__
};

Status check_unique_names(const std::vector<SafetensorsEntry>& entries, std::string_view file) {
  std::vector<const SafetensorsEntry*> by_name;
  by_name.reserve(entries.size());
  for (const SafetensorsEntry& entry : entries) by_name.push_back(&entry);
  std::sort(by_name.begin(), by_name.end(), [](const auto* a, const auto* b) { return a->name < b->name; });
  const auto same =
      std::adjacent_find(by_name.begin(), by_name.end(), [](const auto* a, const auto* b) { return a->name == b->name; });
  if (same == by_name.end()) return {};
  return Status::corruption(std::string(file) + ": tensor " + in_quotes((*same)->name) + " occurs twice");
}

/// The entries cover [0, data_bytes) exactly once. Empty tensors may lie wherever another one begins or ends.
Status check_coverage(const std::vector<SafetensorsEntry>& entries, uint64_t header_bytes, uint64_t data_bytes,
                      std::string_view file) {
  std::vector<const SafetensorsEntry*> by_offset;
  by_offset.reserve(entries.size());
  for (const SafetensorsEntry& entry : entries) by_offset.push_back(&entry);
  std::sort(by_offset.begin(), by_offset.end(), [](const auto* a, const auto* b) {
    return std::pair(a->offset_bytes, a->size_bytes) < std::pair(b->offset_bytes, b->size_bytes);
  });
  const std::string prefix = std::string(file) + ": ";
  const SafetensorsEntry* last = nullptr;  // that has bytes
  uint64_t covered = 0;
  for (const SafetensorsEntry* entry : by_offset) {
    const uint64_t begin = entry->offset_bytes;
    if (begin < covered) {
      return Status::corruption(prefix + "tensor " + in_quotes(entry->name) + " begins at offset " + std::to_string(begin) +
                                ", inside tensor " + in_quotes(last->name) + " (" + std::to_string(last->offset_bytes) + " to " +
                                std::to_string(covered) + "): shared storage is not allowed in this format");
    }
    if (begin > covered) {
      return Status::corruption(prefix + count_of(begin - covered, "byte") + " before tensor " + in_quotes(entry->name) + " (" +
                                std::to_string(covered) + " to " + std::to_string(begin) + ") belong to no tensor");
    }
    covered += entry->size_bytes;
    if (entry->size_bytes != 0) last = entry;
  }
  if (covered == data_bytes) return {};
  const uint64_t front = kLengthBytes + header_bytes;
  const std::string sizes =
      ": the header accounts for " + std::to_string(front + covered) + " bytes, the file has " + std::to_string(front + data_bytes);
  if (covered > data_bytes) {
    return Status::corruption(prefix + "missing " + count_of(covered - data_bytes, "byte") + sizes + " (an incomplete download?)");
  }
  return Status::corruption(prefix + count_of(data_bytes - covered, "trailing byte") + " after the last tensor" + sizes);
}

/// What a file that is no safetensors file looks like to a person; empty when nothing known.
std::string recognise(std::string_view front) {
  const size_t text = front.find_first_not_of(" \t\r\n");
  const std::string_view word = text == std::string_view::npos ? std::string_view() : front.substr(text);
  std::string lower(word.substr(0, 16));
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; });
  if (front.starts_with("version https://git-lfs")) {
    return "this is a Git-LFS pointer, not a weight file: fetch the content with 'git lfs pull'";
  }
  if (lower.starts_with("<!doctype") || lower.starts_with("<html") || lower.starts_with("<head")) {
    return "this is an HTML page, not a weight file: the download gave a web page instead";
  }
  if (lower.starts_with("<?xml")) return "this is an XML text, not a weight file: the download gave an error message instead";
  if (lower.starts_with("{")) return "this is JSON text, not a weight file";
  if (front.starts_with("PK\x03\x04") || front.starts_with("PK\x05\x06")) {
    return "this is a zip/pickle file (PyTorch), not safetensors: convert it first";
  }
  if (front.size() >= 2 && front[0] == '\x80' && front[1] >= 2 && front[1] <= 5) {
    return "this is a pickle file (zip/pickle, PyTorch), not safetensors: convert it first";
  }
  if (front.starts_with("GGUF")) return "this is a GGUF file, not safetensors: convert it first";
  const std::string_view length = front.substr(0, kLengthBytes);
  if (std::all_of(length.begin(), length.end(),
                  [](char c) { return (c >= ' ' && c <= '~') || c == '\n' || c == '\r' || c == '\t'; })) {
    return "this is text (" + in_quotes(front.substr(0, 40)) + "), not a weight file";
  }
  return {};
}

uint64_t little_endian(std::string_view bytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < kLengthBytes; ++i) value |= static_cast<uint64_t>(static_cast<unsigned char>(bytes[i])) << (8 * i);
  return value;
}

}  // namespace

Result<SafetensorsHeader> parse_safetensors_header(std::string json, uint64_t data_bytes, std::string_view name) {
  if (json.size() > kMaxHeaderBytes) {
    return Status::unsupported(std::string(name) + ": a header of " + std::to_string(json.size()) + " bytes, over the limit of " +
                               std::to_string(kMaxHeaderBytes));
  }
  if (!json.starts_with('{')) return Status::corruption(std::string(name) + ": the header does not begin with '{'");
  try {
    SafetensorsHeader header;
    HeaderHandler handler(name, header.entries);
    WEIGHTD_RETURN_IF_ERROR(parse_strict_json(json, std::string(name) + ": header", handler));
    WEIGHTD_RETURN_IF_ERROR(check_unique_names(header.entries, name));
    WEIGHTD_RETURN_IF_ERROR(check_coverage(header.entries, json.size(), data_bytes, name));
    header.header_bytes = json.size();
    header.data_bytes = data_bytes;
    header.json = std::move(json);
    return header;
  } catch (const std::bad_alloc&) {
    return Status::resource_exhausted(std::string(name) + ": out of memory for a header of " + std::to_string(json.size()) +
                                      " bytes");
  }
}

Result<SafetensorsHeader> read_safetensors_header(int fd, uint64_t file_bytes, std::string_view name) {
  const std::string prefix = std::string(name) + ": ";
  if (file_bytes == 0) return Status::corruption(prefix + "the file is empty (an incomplete download?)");
  constexpr uint64_t kFrontBytes = 256;
  std::string front(std::min(file_bytes, kFrontBytes), '\0');
  WEIGHTD_RETURN_IF_ERROR(pread_full(fd, std::as_writable_bytes(std::span(front)), 0, name));
  if (file_bytes < kLengthBytes) {
    return Status::corruption(prefix + "the file has " + count_of(file_bytes, "byte") + ", less than the 8 of the header length");
  }
  const uint64_t header_bytes = little_endian(front);
  const uint64_t follow = file_bytes - kLengthBytes;
  const bool plausible = header_bytes != 0 && header_bytes <= follow && front.size() > kLengthBytes && front[kLengthBytes] == '{';
  if (const std::string hint = recognise(front); !plausible && !hint.empty()) {
    return Status::corruption(prefix + hint);
  }
  if (header_bytes > follow) {
    return Status::corruption(prefix + "the header length field says " + std::to_string(header_bytes) + ", the file has " +
                              std::to_string(file_bytes) + " bytes (not a safetensors file, or an incomplete download)");
  }
  if (header_bytes > kMaxHeaderBytes) {
    return Status::unsupported(prefix + "a header of " + std::to_string(header_bytes) + " bytes, over the limit of " +
                               std::to_string(kMaxHeaderBytes));
  }
  if (!plausible) return Status::corruption(prefix + "the header does not begin with '{': not a safetensors file");
  try {
    std::string json(header_bytes, '\0');
    WEIGHTD_RETURN_IF_ERROR(pread_full(fd, std::as_writable_bytes(std::span(json)), kLengthBytes, name));
    return parse_safetensors_header(std::move(json), follow - header_bytes, name);
  } catch (const std::bad_alloc&) {
    return Status::resource_exhausted(prefix + "out of memory for a header of " + std::to_string(header_bytes) + " bytes");
  }
}

}  // namespace weightd::store
