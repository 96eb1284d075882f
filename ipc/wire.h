// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <capnp/message.h>
#include <capnp/serialize.h>
#include <kj/exception.h>
#include <kj/io.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/text.h"
#include "weightd/status.h"

/// What messages.cc and tensor_table.cc share: Cap'n Proto kept behind one wall. Private to ipc.
namespace weightd::ipc {

/// While it lives, KJ writes nothing to stderr and collects no stack traces (a hostile peer could ask for thousands). On the stack
/// only.
class QuietKj : public kj::ExceptionCallback {
 public:
  void logMessage(kj::LogSeverity, const char*, int, int, kj::String&&) override {}
  StackTraceMode stackTraceMode() override { return StackTraceMode::NONE; }
};

/// Stream framing into a byte vector, without a copy in between.
class VectorSink : public kj::OutputStream {
 public:
  explicit VectorSink(size_t bytes) { bytes_.reserve(bytes); }
  void write(const void* data, size_t size) override {
    const auto* begin = static_cast<const std::byte*>(data);
    bytes_.insert(bytes_.end(), begin, begin + size);
  }
  [[nodiscard]] std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  std::vector<std::byte> bytes_;
};

[[nodiscard]] inline std::vector<std::byte> flatten(capnp::MessageBuilder& message) {
  VectorSink sink(capnp::computeSerializedSizeInWords(message) * sizeof(capnp::word));
  capnp::writeMessage(sink, message);
  return sink.take();
}

[[nodiscard]] inline capnp::Text::Reader text_reader(std::string_view text) { return {text.data(), text.size()}; }

/// Copies fields out of a reader and remembers the first fault, so that decoding reads as a list of fields.
class FieldDecoder {
 public:
  explicit FieldDecoder(StatusCode malformed) : malformed_(malformed) {}
  [[nodiscard]] const Status& status() const { return status_; }
  [[nodiscard]] bool ok() const { return status_.ok(); }
  void fail(Status status) {
    if (status_.ok()) status_ = std::move(status);
  }

  /// UTF-8 of at most `max_bytes`.
  [[nodiscard]] std::string text(capnp::Text::Reader reader, std::string_view field, size_t max_bytes) {
    const std::string_view view(reader.cStr(), reader.size());
    if (view.size() > max_bytes) {
      fail(Status(malformed_, std::string(field) + ": " + std::to_string(view.size()) + " bytes of text, at most " +
                                  std::to_string(max_bytes) + " are allowed"));
    } else if (!is_utf8(view)) {
      fail(Status(malformed_, std::string(field) + ": not valid UTF-8"));
    } else if (ok()) {
      return std::string(view);
    }
    return {};
  }
  /// The number of items to read: 0 after any fault. Checked before anybody iterates: a few bytes may claim 2^29 items of no size
  /// (CO-119).
  [[nodiscard]] uint32_t count(uint32_t items, std::string_view field, uint32_t max_items) {
    if (items > max_items) {
      fail(Status(malformed_, std::string(field) + ": " + std::to_string(items) + " items, at most " + std::to_string(max_items) +
                                  " are allowed"));
    }
    return ok() ? items : 0;
  }

 private:
  StatusCode malformed_;
  Status status_;
};

/// Reads one message in stream framing and calls fn(reader, fields), which copies everything out: no reader outlives the call, so
/// that no traversal budget runs out later (CO-123). The budget is what an honest reader needs: each word once, with some slack;
/// never "infinite". Nothing that KJ throws leaves this function.
template <typename Fn>
Status read_message(std::span<const std::byte> bytes, std::string_view what, StatusCode malformed, Fn&& fn) {
  const auto refuse = [&](const std::string& why) { return Status(malformed, std::string(what) + ": " + why); };
  if (bytes.empty() || bytes.size() % sizeof(capnp::word) != 0) {
    return refuse(std::to_string(bytes.size()) + " bytes are no message: the length must be a multiple of 8, at least 8");
  }
  const QuietKj quiet;
  FieldDecoder fields(malformed);
  try {
    const size_t words = bytes.size() / sizeof(capnp::word);
    kj::Array<capnp::word> aligned;
    const auto* begin = reinterpret_cast<const capnp::word*>(bytes.data());
    if (reinterpret_cast<uintptr_t>(bytes.data()) % sizeof(capnp::word) != 0) {
      aligned = kj::heapArray<capnp::word>(words);
      std::memcpy(aligned.begin(), bytes.data(), bytes.size());
      begin = aligned.begin();
    }
    capnp::ReaderOptions options;
    options.traversalLimitInWords = 2 * words + 64;
    options.nestingLimit = 16;
    capnp::FlatArrayMessageReader reader(kj::arrayPtr(begin, words), options);
    if (reader.getEnd() != begin + words) return refuse("bytes follow the end of the message");
    fn(reader, fields);
  } catch (const kj::Exception& error) {
    // A fault that we found ourselves says more than what KJ makes of it later.
    if (fields.ok()) return refuse("malformed message: " + printable(error.getDescription().cStr(), 160));
  } catch (const std::bad_alloc&) {
    return Status::resource_exhausted(std::string(what) + ": no memory to decode " + human_bytes(bytes.size()));
  }
  return fields.ok() ? Status() : Status(fields.status().code(), std::string(what) + ": " + fields.status().message());
}

}  // namespace weightd::ipc
