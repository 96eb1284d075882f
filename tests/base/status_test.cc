// SPDX-License-Identifier: Apache-2.0
#include "weightd/status.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <memory>
#include <set>

namespace weightd {
namespace {

TEST(Status, SuccessIsTheDefault) {
  const Status status;
  EXPECT_TRUE(status.ok());
  EXPECT_EQ(status.code(), StatusCode::kOk);
  EXPECT_EQ(status.to_string(), "ok");
  EXPECT_TRUE(status.with_context("load").ok());
}

TEST(Status, FailureHasCodeAndMessage) {
  const Status status = Status::not_found("no model 'x'");
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(status.to_string(), "not_found: no model 'x'");
  const Status outer = status.with_context("load 'm'");
  EXPECT_EQ(outer.code(), StatusCode::kNotFound);
  EXPECT_EQ(outer.message(), "load 'm': no model 'x'");
}

TEST(Status, CodesAreFrozen) {
  // They cross the wire.
  const std::vector<std::pair<StatusCode, std::string>> codes = {
      {StatusCode::kOk, "ok"},
      {StatusCode::kInvalidArgument, "invalid_argument"},
      {StatusCode::kNotFound, "not_found"},
      {StatusCode::kAlreadyExists, "already_exists"},
      {StatusCode::kPermissionDenied, "permission_denied"},
      {StatusCode::kResourceExhausted, "resource_exhausted"},
      {StatusCode::kFailedPrecondition, "failed_precondition"},
      {StatusCode::kUnavailable, "unavailable"},
      {StatusCode::kDeadlineExceeded, "deadline_exceeded"},
      {StatusCode::kCancelled, "cancelled"},
      {StatusCode::kUnsupported, "unsupported"},
      {StatusCode::kCorruption, "corruption"},
      {StatusCode::kIo, "io"},
      {StatusCode::kCuda, "cuda"},
      {StatusCode::kInternal, "internal"},
      {StatusCode::kRevoked, "revoked"},
      {StatusCode::kForked, "forked"},
      {StatusCode::kLost, "lost"},
  };
  for (size_t i = 0; i < codes.size(); ++i) {
    EXPECT_EQ(static_cast<size_t>(codes[i].first), i);
    EXPECT_EQ(status_code_name(codes[i].first), codes[i].second);
  }
  EXPECT_EQ(status_code_name(static_cast<StatusCode>(9999)), "unknown");  // from a newer peer
}

TEST(Status, ErrnoBecomesTheCodeThatACallerActsOn) {
  for (const int number : {ENOSPC, EDQUOT, EFBIG, EMFILE, ENFILE, ENOMEM}) {
    EXPECT_EQ(status_from_errno(number, "w").code(), StatusCode::kResourceExhausted) << number;
  }
  EXPECT_EQ(status_from_errno(ENOENT, "w").code(), StatusCode::kNotFound);
  EXPECT_EQ(status_from_errno(EACCES, "w").code(), StatusCode::kPermissionDenied);
  EXPECT_EQ(status_from_errno(EPERM, "w").code(), StatusCode::kPermissionDenied);
  EXPECT_EQ(status_from_errno(EIO, "w").code(), StatusCode::kIo);
  EXPECT_EQ(status_from_errno(ENOENT, "/x: open").message(), "/x: open: No such file or directory");
}

TEST(Result, HoldsAValueOrAStatus) {
  Result<std::unique_ptr<int>> value = std::make_unique<int>(7);
  ASSERT_TRUE(value.ok());
  EXPECT_TRUE(value.status().ok());
  EXPECT_EQ(**value, 7);
  const std::unique_ptr<int> moved = *std::move(value);
  EXPECT_EQ(*moved, 7);

  const Result<std::unique_ptr<int>> failed = Status::io("disk");
  EXPECT_FALSE(failed.ok());
  EXPECT_FALSE(static_cast<bool>(failed));
  EXPECT_EQ(failed.status().to_string(), "io: disk");
}

TEST(ResultDeathTest, ReadingTheAbsentSideAborts) {
  const Result<int> failed = Status::io("disk");
  EXPECT_DEATH((void)failed.value(), "value\\(\\) of a failed Result: io: disk");
  EXPECT_DEATH(WEIGHTD_CHECK(1 + 1 == 3), "check failed: 1 \\+ 1 == 3");
}

Result<int> half(int n) {
  if (n % 2 != 0) return Status::invalid_argument("odd");
  return n / 2;
}
Result<int> quarter(int n) {
  WEIGHTD_ASSIGN_OR_RETURN(const int once, half(n));
  WEIGHTD_ASSIGN_OR_RETURN(const int twice, half(once));
  return twice;
}
Status check_quarter(int n, int expected) {
  WEIGHTD_RETURN_IF_ERROR(quarter(n).status());
  return *quarter(n) == expected ? Status() : Status::internal("wrong");
}

TEST(Result, MacrosReturnTheFirstFailure) {
  EXPECT_TRUE(check_quarter(12, 3).ok());
  EXPECT_EQ(check_quarter(6, 1).to_string(), "invalid_argument: odd");
  EXPECT_EQ(check_quarter(5, 1).to_string(), "invalid_argument: odd");
}

}  // namespace
}  // namespace weightd
