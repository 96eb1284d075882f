// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "daemon/loader/jobs.h"
#include "daemon/loader/read_sections.h"
#include "daemon/loader/reporter.h"
#include "daemon/loader/table.h"
#include "ipc/memfd.h"
#include "store/bundle.h"

namespace weightd::loader {
namespace {

/// The file's checksums were right, so a difference here arose on the way into memory, or in it (CO-105).
Status compare_blocks(const store::BundleReader& bundle, const ipc::TensorTable& table, const std::vector<uint64_t>& hashes) {
  std::vector<uint64_t> bad;
  for (uint64_t block = 0; block < hashes.size(); ++block) {
    if (hashes[block] != table.block_hashes[block]) bad.push_back(block);
  }
  if (bad.empty()) return {};
  const std::vector<std::string> names = names_in_blocks(table, bad, 1);
  return Status::corruption(bundle.name() + ": the file is good, the copy in memory is not: block " + std::to_string(bad.front()) +
                            " of " + std::to_string(hashes.size()) +
                            (names.empty() ? "" : " ('" + printable(names.front()) + "')") + " differs from its hash, " +
                            std::to_string(bad.size()) + " in all");
}

Status check_f12(const store::BundleReader& bundle, const store::Residency& residency, Backend& backend, int threads,
                 const Advance& advance) {
  const store::Manifest& manifest = bundle.manifest();
  std::vector<Backend::F12Planes> planes(manifest.storages.size());
  for (const store::Placement& placement : residency.placements) {
    Backend::F12Planes& p = planes[placement.storage];
    if (placement.kind == store::PlaneKind::kCodes) p.codes_offset = placement.arena_offset_bytes;
    if (placement.kind == store::PlaneKind::kWindows) p.windows_offset = placement.arena_offset_bytes;
    if (placement.kind == store::PlaneKind::kRecords) p.records_offset = placement.arena_offset_bytes;
    if (placement.kind == store::PlaneKind::kPool) {
      p.pool_offset = placement.arena_offset_bytes;
      p.pool_bytes = placement.size_bytes;
    }
  }
  for (uint32_t i = 0; i < planes.size(); ++i) {
    const store::Storage& storage = manifest.storages[i];
    if (storage.encoding != Encoding::kF12 || !storage.resident) continue;
    planes[i].geometry = storage.geometry;
    planes[i].pool_base = bundle.pool_base(i);
    WEIGHTD_RETURN_IF_ERROR(
        backend.check_f12(planes[i], threads, advance).with_context(bundle.name() + ": '" + printable(storage.name) + "'"));
  }
  return {};
}

Status wait_for_admission(ipc::Channel& channel) {
  WEIGHTD_ASSIGN_OR_RETURN(const ipc::Frame frame, channel.receive(kNever));
  WEIGHTD_ASSIGN_OR_RETURN(const ipc::LoaderMessage message, ipc::decode_loader_message(frame.body));
  if (std::holds_alternative<ipc::Admitted>(message.body)) return {};
  return Status::internal("the daemon did not answer the plan");
}

/// In batches, each acknowledged: unreceived descriptors count against a limit that all processes of a user share.
Status send_chunks(ipc::Channel& channel, std::vector<UniqueFd> chunks) {
  for (size_t begin = 0; begin < chunks.size(); begin += ipc::kMaxFdsPerFrame) {
    const size_t count = std::min<size_t>(chunks.size() - begin, ipc::kMaxFdsPerFrame);
    std::vector<UniqueFd> part;
    for (size_t i = 0; i < count; ++i) part.push_back(std::move(chunks[begin + i]));
    WEIGHTD_RETURN_IF_ERROR(send(channel, {ipc::Chunks{static_cast<uint32_t>(count)}}, std::move(part)));
    WEIGHTD_ASSIGN_OR_RETURN(const ipc::Frame frame, channel.receive(kNever));
    WEIGHTD_ASSIGN_OR_RETURN(const ipc::LoaderMessage message, ipc::decode_loader_message(frame.body));
    const auto* received = std::get_if<ipc::Received>(&message.body);
    if (received == nullptr || received->count != begin + count)
      return Status::internal("the daemon did not acknowledge the chunks");
  }
  return {};
}

bool is_legacy(const ipc::Job& job) { return job.transport == "legacy"; }

/// What the model's tensors are stored as. A storage that several tensors share counts once in what is resident.
std::vector<ipc::EncodingSum> sum_encodings(const store::Manifest& manifest, const store::Residency& residency) {
  std::map<Encoding, ipc::EncodingSum> sums;
  for (const store::TensorRecord& tensor : manifest.tensors) {
    if (!tensor.indexed) continue;
    ipc::EncodingSum& sum = sums[manifest.storages[tensor.storage].encoding];
    ++sum.tensors;
    sum.logical_bytes += tensor.logical_bytes;
  }
  for (const store::Placement& placement : residency.placements) {
    sums[manifest.storages[placement.storage].encoding].resident_bytes += placement.size_bytes;
  }
  std::vector<ipc::EncodingSum> list;
  for (auto& [encoding, sum] : sums) {
    sum.encoding = encoding_name(encoding);
    list.push_back(std::move(sum));
  }
  return list;
}

ipc::Planned make_plan(const store::BundleReader& bundle, const store::Residency& residency, const std::vector<uint64_t>& chunks) {
  const store::Manifest& manifest = bundle.manifest();
  ipc::Planned plan;
  plan.content_id = store::to_hex(bundle.content_id());
  plan.tensors_id = store::to_hex(manifest.tensors_id);
  plan.arena_bytes = residency.arena_bytes;
  for (const uint64_t bytes : chunks) plan.resident_bytes += bytes;
  for (const store::TensorRecord& tensor : manifest.tensors) {
    if (!tensor.indexed) continue;
    plan.logical_bytes += tensor.logical_bytes;
    ++plan.tensor_count;
  }
  plan.chunk_count = static_cast<uint32_t>(chunks.size());
  plan.encodings = sum_encodings(manifest, residency);
  return plan;
}

Status check_job(const ipc::Job& job, const Backend& backend) {
  const uint64_t granularity = backend.granularity_bytes();
  if (is_legacy(job)) return {};
  if (job.chunk_bytes >= granularity && job.chunk_bytes % granularity == 0) return {};
  return Status::invalid_argument("chunk_bytes is " + std::to_string(job.chunk_bytes) + ", it must be a multiple of " +
                                  std::to_string(granularity));
}

/// The legacy transport has one allocation, however large.
std::vector<uint64_t> cut(const ipc::Job& job, uint64_t arena_bytes, uint64_t granularity) {
  const uint64_t whole = (arena_bytes + granularity - 1) / granularity * granularity;
  return ipc::cut_chunks(arena_bytes, is_legacy(job) ? whole : job.chunk_bytes, granularity);
}

/// What everybody will map is checked, as it will be mapped.
Status check_copy(const store::BundleReader& bundle, const store::Residency& residency, const ipc::TensorTable& table,
                  Backend& backend, int threads, const Advance& advance) {
  WEIGHTD_ASSIGN_OR_RETURN(const std::vector<uint64_t> hashes, backend.hash_blocks(table.arena_bytes, threads, advance));
  WEIGHTD_RETURN_IF_ERROR(compare_blocks(bundle, table, hashes));
  return check_f12(bundle, residency, backend, threads, advance);
}

}  // namespace

Status run_load(ipc::Channel& channel, const ipc::Job& job, UniqueFd bundle_fd, Backend& backend) {
  const auto begun = std::chrono::steady_clock::now();
  const int threads = static_cast<int>(std::min<uint32_t>(job.threads, 4096));
  WEIGHTD_RETURN_IF_ERROR(check_job(job, backend));
  (void)::posix_fadvise(bundle_fd.get(), 0, 0, POSIX_FADV_SEQUENTIAL);  // a file that is not in memory is read ahead further
  WEIGHTD_ASSIGN_OR_RETURN(const store::BundleReader bundle, store::BundleReader::open_fd(std::move(bundle_fd), job.bundle_name));
  const store::Residency* residency = bundle.residency(job.residency);
  if (residency == nullptr) {
    return Status::unsupported(bundle.name() + ": holds no residency '" + printable(job.residency) +
                               "': pack it again with this version");
  }
  const std::vector<uint64_t> chunk_bytes = cut(job, residency->arena_bytes, backend.granularity_bytes());
  if (chunk_bytes.size() > ipc::kMaxListItems) {
    return Status::invalid_argument(bundle.name() + ": needs " + std::to_string(chunk_bytes.size()) + " chunks, at most " +
                                    std::to_string(ipc::kMaxListItems) + " are allowed: raise chunk_bytes");
  }
  ipc::Planned plan = make_plan(bundle, *residency, chunk_bytes);
  WEIGHTD_ASSIGN_OR_RETURN(plan.available_bytes, backend.available_bytes());
  WEIGHTD_RETURN_IF_ERROR(send(channel, {std::move(plan)}));
  WEIGHTD_RETURN_IF_ERROR(wait_for_admission(channel));

  WEIGHTD_RETURN_IF_ERROR(backend.allocate(chunk_bytes).with_context(bundle.name()));
  WEIGHTD_RETURN_IF_ERROR(run_with_progress(
      channel, [&](const Advance& advance) { return read_sections(bundle, *residency, backend, threads, advance); }));
  WEIGHTD_RETURN_IF_ERROR(bundle.check_unchanged());
  WEIGHTD_ASSIGN_OR_RETURN(Shares shares, backend.seal());
  WEIGHTD_RETURN_IF_ERROR(send_chunks(channel, std::move(shares.chunks)));

  const ipc::TensorTable table = make_table(bundle, *residency);
  WEIGHTD_RETURN_IF_ERROR(run_with_progress(
      channel, [&](const Advance& advance) { return check_copy(bundle, *residency, table, backend, threads, advance); }));
  const std::vector<std::byte> encoded = ipc::encode(table);
  if (encoded.size() > ipc::kMaxTableBytes) {
    return Status::unsupported(bundle.name() + ": its tensor table has " + human_bytes(encoded.size()) + ", at most " +
                               human_bytes(ipc::kMaxTableBytes) + " are possible");
  }
  std::vector<UniqueFd> table_fd(1);
  WEIGHTD_ASSIGN_OR_RETURN(table_fd.front(), ipc::sealed_memfd(encoded, "weight-table"));
  const auto elapsed = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begun);
  ipc::LoadResult result{chunk_bytes, encoded.size(), table.block_hashes.size(), static_cast<uint64_t>(elapsed.count()),
                         std::move(shares.ipc_handle)};
  return send(channel, {std::move(result)}, std::move(table_fd));
}

}  // namespace weightd::loader
