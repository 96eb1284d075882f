// SPDX-License-Identifier: Apache-2.0
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <iterator>
#include <utility>

#include "base/text.h"
#include "daemon/loader/jobs.h"
#include "daemon/loader/reporter.h"
#include "daemon/loader/table.h"
#include "ipc/memfd.h"

namespace weightd::loader {
namespace {

constexpr size_t kMaxBadNames = 1000;

Result<ipc::TensorTable> read_table(const UniqueFd& fd) {
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return status_from_errno(errno, "tensor table");
  WEIGHTD_ASSIGN_OR_RETURN(const std::vector<std::byte> bytes,
                           ipc::read_sealed_memfd(fd.get(), static_cast<uint64_t>(info.st_size), ipc::kMaxTableBytes));
  return ipc::decode_table(bytes);
}

}  // namespace

Status run_verify(ipc::Channel& channel, const ipc::Job& job, std::vector<UniqueFd> fds, Backend& backend) {
  const auto begun = std::chrono::steady_clock::now();
  const int threads = static_cast<int>(std::min<uint32_t>(job.threads, 4096));
  const auto& kind = std::get<ipc::VerifyJob>(job.kind);
  if (fds.empty()) return Status::internal("the daemon sent no table to verify against");
  WEIGHTD_ASSIGN_OR_RETURN(const ipc::TensorTable table, read_table(fds.front()));
  std::vector<UniqueFd> chunks(std::make_move_iterator(fds.begin() + 1), std::make_move_iterator(fds.end()));
  WEIGHTD_RETURN_IF_ERROR(backend.import(std::move(chunks), kind.chunk_bytes));
  std::vector<uint64_t> hashes;
  const auto hash = [&](const Advance& advance) -> Status {
    WEIGHTD_ASSIGN_OR_RETURN(hashes, backend.hash_blocks(table.arena_bytes, threads, advance));
    return {};
  };
  WEIGHTD_RETURN_IF_ERROR(run_with_progress(channel, hash));
  ipc::VerifiedReply reply;
  reply.blocks = hashes.size();
  reply.bytes = table.arena_bytes;
  for (uint64_t block = 0; block < hashes.size(); ++block) {
    if (hashes[block] != table.block_hashes[block]) reply.bad_blocks.push_back(block);
  }
  reply.bad_tensors = names_in_blocks(table, reply.bad_blocks, kMaxBadNames);
  for (std::string& name : reply.bad_tensors) name = printable(name);
  if (reply.bad_blocks.size() > ipc::kMaxListItems) reply.bad_blocks.resize(ipc::kMaxListItems);
  const auto elapsed = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begun);
  reply.elapsed_ms = static_cast<uint64_t>(elapsed.count());
  return send(channel, {std::move(reply)});
}

}  // namespace weightd::loader
