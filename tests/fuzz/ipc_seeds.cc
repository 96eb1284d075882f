// SPDX-License-Identifier: Apache-2.0
// Writes the seeds of the frame, request and table fuzzers: a valid one of each kind, and some that are nearly so.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "ipc/frame.h"
#include "ipc/messages.h"

namespace {

using namespace weightd;       // NOLINT: a generator of one page
using namespace weightd::ipc;  // NOLINT

using Bytes = std::vector<std::byte>;

struct Seeds {
  std::filesystem::path corpus;
  void write(const std::string& target, const std::string& name, const Bytes& bytes) const {
    std::filesystem::create_directories(corpus / target);
    std::ofstream out(corpus / target / name, std::ios::binary);
    out.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  }
};

template <typename... Parts>
Bytes joined(const Parts&... parts) {
  Bytes all;
  (all.insert(all.end(), parts.begin(), parts.end()), ...);
  return all;
}
Bytes prefix(std::initializer_list<int> values) {
  Bytes bytes;
  for (const int value : values) bytes.push_back(static_cast<std::byte>(value));
  return bytes;
}
Bytes frame(const Bytes& body, uint16_t fds) {
  return joined(encode_frame_header({static_cast<uint32_t>(body.size()), fds}), body);
}

ModelSummary a_model() {
  ModelSummary model;
  model.name = "org/model:1";
  model.generation = 3;
  model.state = GenerationState::kPublished;
  model.content_id = "c0ffee";
  model.device = "host";
  model.transport = "fd";
  model.logical_bytes = 1000;
  model.resident_bytes = 750;
  model.residency = "fast";
  model.source = "/m.wpk";
  model.encodings = {{"f12", 3, 900, 650}};
  return model;
}
LeaseSummary a_lease() {
  LeaseSummary lease;
  lease.id = 7;
  lease.model = "m";
  lease.pid = 42;
  lease.command = "python3";
  lease.orphan = true;
  return lease;
}

GpuSummary a_gpu() {
  GpuSummary gpu;
  gpu.uuid = "GPU-1";
  gpu.name = "H200";
  gpu.total_bytes = 1000;
  gpu.nvml_known = gpu.vmm = gpu.fd_handles = true;
  return gpu;
}

void write_requests(const Seeds& seeds) {
  const auto request = [&](const char* name, const decltype(Request::body)& body) {
    seeds.write("request", std::string("request-") + name, joined(prefix({0}), encode(Request{9, body})));
  };
  request("hello", HelloRequest{"1.2.3 (abcdef0)", "worker"});
  request("list", ListRequest{});
  request("acquire", AcquireRequest{"m", "host", 100, "c0ffee"});
  request("release", ReleaseRequest{7});
  request("status", StatusRequest{});
  request("load", LoadRequest{"m", "/m.wpk", "host", 1000});
  request("load-legacy", LoadRequest{"m", "/m.wpk", "GPU-1", 0, "legacy"});
  request("memory", MemoryRequest{});
  request("doctor", DoctorRequest{});
  request("unload", UnloadRequest{"m", "host", 1000});
  request("leases", LeasesRequest{});
  request("verify", VerifyRequest{"m"});
  request("version", VersionRequest{});
  request("bad-name", VerifyRequest{"../m"});
  request("bad-utf8", HelloRequest{"\xC3", ""});

  const HelloReply hello{"1.2.3 (abcdef0)", 1, "host", 12345, 42};
  const auto response = [&](const char* name, const decltype(Response::body)& body) {
    seeds.write("request", std::string("response-") + name, joined(prefix({1}), encode(Response{9, body})));
  };
  response("error", Status::not_found("no model 'x'"));
  response("hello", hello);
  response("models", ModelsReply{{a_model(), a_model()}});
  response("acquired", AcquiredReply{7, a_model(), 1U << 20, {1U << 20}, 2, 512});
  response("released", ReleasedReply{});
  response("status", StatusReply{hello, 5, {DeviceSummary{"host", "host", 1, 2, 3, 4, 5, 6, 7, 8}}, {a_model()}, 1, 2, 3, 4});
  response("loaded", LoadedReply{a_model()});
  response("unloaded", UnloadedReply{false, 750, {a_lease()}});
  response("leases", LeasesReply{{a_lease()}});
  response("verified", VerifiedReply{10, {3, 4}, {"a.weight"}, 5, 10U << 20});
  response("version", VersionReply{hello});
  const std::vector<std::byte> handle(kIpcHandleBytes, std::byte{7});
  response("acquired-legacy", AcquiredReply{7, a_model(), 1U << 20, {1U << 20}, 1, 512, handle});
  response("memory", MemoryReply{{hello, 5, {}, {a_model()}, 1, 2, 3, 4}, {a_lease()}, {a_gpu()}, "no answer"});
  response("doctor", DoctorReply{{{"driver", CheckSummary::Level::kWarning, "none", "install it"}}});
  response("event-lost", EventReply{LostEvent{a_model()}});
  response("event-published", EventReply{PublishedEvent{a_model()}});
  response("event-shutdown", EventReply{ShuttingDownEvent{}});
  response("more-fds", MoreFdsReply{3});

  const auto loader = [&](const char* name, const decltype(LoaderMessage::body)& body) {
    seeds.write("request", std::string("loader-") + name, joined(prefix({2}), encode(LoaderMessage{body})));
  };
  Job job;
  job.backend = "host";
  job.residency = "fast";
  job.chunk_bytes = 1U << 30;
  job.bundle_name = "m.wpk";
  job.fd_count = 1;
  loader("job-load", job);
  job.kind = VerifyJob{{1U << 20, 1U << 20}, 2U << 20};
  loader("job-verify", job);
  job.kind = ProbeJob{true};
  loader("job-probe", job);
  loader("probed", ProbeReply{"580.1", 13000, {a_gpu()}, "", "no NVML"});
  loader("result-legacy", LoadResult{{1U << 20}, 512, 1, 5, handle});
  loader("planned", Planned{"c0ffee", "beef", 1U << 20, 1U << 20, 1U << 20, 3, 1});
  loader("chunks", Chunks{3});
  loader("result", LoadResult{{1U << 20}, 512, 1, 5});
  loader("failed", Status::corruption("m.wpk: section 3"));
}

void write_frames(const Seeds& seeds) {
  const Bytes hello = encode(Request{1, HelloRequest{"1", "w"}}), status = encode(Request{2, StatusRequest{}});
  const auto preamble = encode_preamble();
  seeds.write("frame", "two-frames", joined(prefix({0, 0}), preamble, frame(hello, 0), frame(status, 0)));
  seeds.write("frame", "byte-by-byte", joined(prefix({61, 0}), preamble, frame(status, 0)));
  // Pieces of 16 bytes: the preamble, then a frame whose header brings a descriptor.
  seeds.write("frame", "with-fd", joined(prefix({15, 2}), preamble, frame(status, 1)));
  seeds.write("frame", "unannounced-fd", joined(prefix({15, 2}), preamble, frame(status, 0)));
  seeds.write("frame", "fd-in-body", joined(prefix({15, 4}), preamble, frame(hello, 0)));
  seeds.write("frame", "cut", joined(prefix({0, 0}), preamble, frame(hello, 0), prefix({8, 0, 0})));
  seeds.write("frame", "too-large", joined(prefix({0, 0}), preamble, encode_frame_header({1U << 20, 0})));
  seeds.write("frame", "other-version", joined(prefix({0, 0}), encode_preamble({255, 250}), frame(status, 0)));
  seeds.write("frame", "garbage", prefix({0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18}));
}

void write_tables(const Seeds& seeds) {
  TensorTable table;
  table.content_id = "c0ffee";
  table.residency = "fast";
  table.arena_bytes = kHashBlockBytes;
  table.pool_offset_bytes = 65536;
  table.pool_bytes = 16;
  table.block_hashes = {1};
  StorageEntry raw;
  raw.name = "norm";
  raw.dtype = DType::kBF16;
  raw.logical_bytes = raw.data_bytes = raw.resident_bytes = 128;
  StorageEntry merged;
  merged.name = "qkv";
  merged.encoding = Encoding::kF12;
  merged.dtype = DType::kBF16;
  merged.merged = true;
  merged.n = 32;
  merged.k = 64;
  merged.batch = 1;
  merged.logical_bytes = 4096;
  merged.data_offset = 256;
  merged.data_bytes = 3072;
  merged.windows_offset = 4096;
  merged.windows_bytes = 32;
  merged.records_offset = 4352;
  merged.records_bytes = 64;
  merged.resident_bytes = 3168;
  table.storages = {raw, merged};
  table.tensors = {{"norm", DType::kBF16, {64}, 0, 0}, {"q", DType::kBF16, {16, 64}, 1, 0}, {"k", DType::kBF16, {16, 64}, 1, 16}};
  seeds.write("table", "valid", encode(table));
  seeds.write("table", "empty", encode(TensorTable{}));
  table.tensors[2].row_begin = 17;
  seeds.write("table", "rows-outside", encode(table));
  table.storages[1].data_offset = UINT64_MAX - 255;
  seeds.write("table", "offset-wraps", encode(table));
  TensorTable stack;
  stack.arena_bytes = kHashBlockBytes;
  stack.block_hashes = {1};
  merged.merged = false;
  merged.n = 16;
  merged.batch = 2;
  stack.storages = {merged};
  stack.tensors = {{"experts", DType::kBF16, {2, 16, 64}, 0, 0}};
  seeds.write("table", "experts", encode(stack));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s CORPUS_FOLDER\n", argv[0]);
    return 2;
  }
  const Seeds seeds{argv[1]};
  write_requests(seeds);
  write_frames(seeds);
  write_tables(seeds);
  return 0;
}
