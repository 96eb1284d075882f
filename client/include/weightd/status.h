// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace weightd {

/// What went wrong, in the terms a caller acts on. The numbers cross the wire and are never reused.
enum class StatusCode : uint16_t {
  kOk = 0,
  kInvalidArgument = 1,     // the call itself is wrong: shape, stride, name, option
  kNotFound = 2,            // no such model, tensor, file
  kAlreadyExists = 3,       // the name is taken by something else
  kPermissionDenied = 4,    // the peer or the process may not do this
  kResourceExhausted = 5,   // memory, budget, descriptors, disk: the message has the arithmetic
  kFailedPrecondition = 6,  // not now: the state forbids it
  kUnavailable = 7,         // the daemon (or the GPU) cannot be reached; trying again later is sensible
  kDeadlineExceeded = 8,    // the time limit named in the message passed
  kCancelled = 9,           // another request decided otherwise
  kUnsupported = 10,        // well-formed, but of a version or kind this build does not know
  kCorruption = 11,         // bytes violate the format or do not match their checksum
  kIo = 12,                 // the operating system refused a read, write, open or rename
  kCuda = 13,               // a CUDA call failed
  kInternal = 14,           // our fault
  kRevoked = 15,            // the lease behind this object has ended; its weights may not be used
  kForked = 16,             // the object belongs to the parent of this process
  kLost = 17,               // the generation's memory is gone (legacy transport: its owner died)
};

/// The code's fixed name, for example "not_found". Static storage.
[[nodiscard]] std::string_view status_code_name(StatusCode code);

/// Success, or a code and one line for people (it names the file, tensor, field or call, and the rule).
/// Copyable; success allocates nothing.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  [[nodiscard]] bool ok() const { return code_ == StatusCode::kOk; }
  [[nodiscard]] StatusCode code() const { return code_; }
  [[nodiscard]] const std::string& message() const { return message_; }
  /// "not_found: no model 'x'", or "ok".
  [[nodiscard]] std::string to_string() const;
  /// The same code with `context + ": "` in front of the message; success stays success.
  [[nodiscard]] Status with_context(std::string_view context) const;

  static Status invalid_argument(std::string m) { return {StatusCode::kInvalidArgument, std::move(m)}; }
  static Status not_found(std::string m) { return {StatusCode::kNotFound, std::move(m)}; }
  static Status already_exists(std::string m) { return {StatusCode::kAlreadyExists, std::move(m)}; }
  static Status permission_denied(std::string m) { return {StatusCode::kPermissionDenied, std::move(m)}; }
  static Status resource_exhausted(std::string m) { return {StatusCode::kResourceExhausted, std::move(m)}; }
  static Status failed_precondition(std::string m) { return {StatusCode::kFailedPrecondition, std::move(m)}; }
  static Status unavailable(std::string m) { return {StatusCode::kUnavailable, std::move(m)}; }
  static Status deadline_exceeded(std::string m) { return {StatusCode::kDeadlineExceeded, std::move(m)}; }
  static Status cancelled(std::string m) { return {StatusCode::kCancelled, std::move(m)}; }
  static Status unsupported(std::string m) { return {StatusCode::kUnsupported, std::move(m)}; }
  static Status corruption(std::string m) { return {StatusCode::kCorruption, std::move(m)}; }
  static Status io(std::string m) { return {StatusCode::kIo, std::move(m)}; }
  static Status internal(std::string m) { return {StatusCode::kInternal, std::move(m)}; }
  static Status revoked(std::string m) { return {StatusCode::kRevoked, std::move(m)}; }
  static Status forked(std::string m) { return {StatusCode::kForked, std::move(m)}; }
  static Status cuda(std::string m) { return {StatusCode::kCuda, std::move(m)}; }
  static Status lost(std::string m) { return {StatusCode::kLost, std::move(m)}; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

/// Status of a failed system call: `what + ": " + strerror(error_number)`. ENOSPC, EDQUOT, EFBIG, EMFILE, ENFILE and
/// ENOMEM become kResourceExhausted, ENOENT kNotFound, EACCES and EPERM kPermissionDenied, the rest kIo.
[[nodiscard]] Status status_from_errno(int error_number, std::string_view what);

/// A value, or the Status that says why there is none. The interface is the part of std::expected<T, Status> that this
/// project uses, so that it can become that once C++23 is the floor. Reading the absent side aborts: it is our bug.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}          // NOLINT: implicit by design
  Result(Status status) : state_(std::in_place_index<1>, std::move(status)) {}   // NOLINT: implicit by design

  [[nodiscard]] bool ok() const { return state_.index() == 0; }
  explicit operator bool() const { return ok(); }

  [[nodiscard]] T& value() & { return require(); }
  [[nodiscard]] const T& value() const& { return const_cast<Result*>(this)->require(); }
  [[nodiscard]] T value() && { return std::move(require()); }  // not T&&: that would dangle in a range-for over f().value()
  T& operator*() & { return require(); }
  const T& operator*() const& { return value(); }
  T operator*() && { return std::move(require()); }
  T* operator->() { return &require(); }
  const T* operator->() const { return &value(); }

  /// The failure; ok() for a value.
  [[nodiscard]] Status status() const { return ok() ? Status() : std::get<1>(state_); }

 private:
  T& require() {
    if (!ok()) {
      std::fprintf(stderr, "weightd: value() of a failed Result: %s\n", std::get<1>(state_).to_string().c_str());
      std::abort();
    }
    return std::get<0>(state_);
  }
  std::variant<T, Status> state_;
};

}  // namespace weightd

/// Returns the Status of `expression` (a Status) from this function unless it is success.
#define WEIGHTD_RETURN_IF_ERROR(expression)                        \
  do {                                                             \
    if (::weightd::Status weightd_status_ = (expression); !weightd_status_.ok()) return weightd_status_; \
  } while (false)

#define WEIGHTD_CONCAT_INNER_(a, b) a##b
#define WEIGHTD_CONCAT_(a, b) WEIGHTD_CONCAT_INNER_(a, b)
/// `WEIGHTD_ASSIGN_OR_RETURN(auto x, f());` declares x from a Result, or returns its Status.
#define WEIGHTD_ASSIGN_OR_RETURN(declaration, expression) \
  WEIGHTD_ASSIGN_OR_RETURN_IMPL_(WEIGHTD_CONCAT_(weightd_result_, __LINE__), declaration, expression)
#define WEIGHTD_ASSIGN_OR_RETURN_IMPL_(result, declaration, expression) \
  auto result = (expression);                                          \
  if (!result.ok()) return result.status();                            \
  declaration = *std::move(result)

/// An invariant of ours, kept in release builds. Never on input.
#define WEIGHTD_CHECK(condition)                                                                \
  do {                                                                                          \
    if (!(condition)) {                                                                         \
      std::fprintf(stderr, "weightd: %s:%d: check failed: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                             \
    }                                                                                           \
  } while (false)
