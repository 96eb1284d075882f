// SPDX-License-Identifier: Apache-2.0
#include "ipc/messages.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "base/text.h"
#include "ipc_test_support.h"

namespace weightd::ipc {
namespace {

using test::list_pointer;
using test::message_of;
using test::struct_pointer;

// --- one value of each kind, no two fields alike ---------------------------------------------------------------------------

ModelSummary a_model(const std::string& name) {
  ModelSummary model;
  model.name = name;
  model.generation = 11;
  model.state = GenerationState::kDraining;
  model.content_id = "c0ffee";
  model.device = "GPU-1";
  model.shard = 12;
  model.transport = "fd";
  model.logical_bytes = 13;
  model.resident_bytes = 14;
  model.tensor_count = 15;
  model.lease_count = 16;
  model.orphan_count = 17;
  model.progress_bytes = 18;
  model.failure = "because";
  model.residency = "fast";
  model.source = "/models/a.wpk";
  model.tensors_id = "beef";
  model.encodings = {{"f12", 19, 20, 21}, {"raw", 22, 23, 24}};
  return model;
}
void expect_equal(const std::vector<EncodingSum>& a, const std::vector<EncodingSum>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].encoding, b[i].encoding);
    EXPECT_EQ(a[i].tensors, b[i].tensors);
    EXPECT_EQ(a[i].logical_bytes, b[i].logical_bytes);
    EXPECT_EQ(a[i].resident_bytes, b[i].resident_bytes);
  }
}
void expect_equal(const ModelSummary& a, const ModelSummary& b) {
  EXPECT_EQ(a.name, b.name);
  EXPECT_EQ(a.generation, b.generation);
  EXPECT_EQ(a.state, b.state);
  EXPECT_EQ(a.content_id, b.content_id);
  EXPECT_EQ(a.device, b.device);
  EXPECT_EQ(a.shard, b.shard);
  EXPECT_EQ(a.transport, b.transport);
  EXPECT_EQ(a.logical_bytes, b.logical_bytes);
  EXPECT_EQ(a.resident_bytes, b.resident_bytes);
  EXPECT_EQ(a.tensor_count, b.tensor_count);
  EXPECT_EQ(a.lease_count, b.lease_count);
  EXPECT_EQ(a.orphan_count, b.orphan_count);
  EXPECT_EQ(a.progress_bytes, b.progress_bytes);
  EXPECT_EQ(a.failure, b.failure);
  EXPECT_EQ(a.residency, b.residency);
  EXPECT_EQ(a.source, b.source);
  EXPECT_EQ(a.tensors_id, b.tensors_id);
  expect_equal(a.encodings, b.encodings);
}

LeaseSummary a_lease() {
  LeaseSummary lease;
  lease.id = 21;
  lease.model = "m";
  lease.generation = 22;
  lease.content_id = "cafe";
  lease.pid = -23;
  lease.uid = 24;
  lease.command = "python3";
  lease.age_ms = 25;
  lease.bytes = 26;
  lease.orphan = true;
  lease.device = "host";
  return lease;
}
void expect_equal(const LeaseSummary& a, const LeaseSummary& b) {
  EXPECT_EQ(a.id, b.id);
  EXPECT_EQ(a.model, b.model);
  EXPECT_EQ(a.generation, b.generation);
  EXPECT_EQ(a.content_id, b.content_id);
  EXPECT_EQ(a.pid, b.pid);
  EXPECT_EQ(a.uid, b.uid);
  EXPECT_EQ(a.command, b.command);
  EXPECT_EQ(a.age_ms, b.age_ms);
  EXPECT_EQ(a.bytes, b.bytes);
  EXPECT_EQ(a.orphan, b.orphan);
  EXPECT_EQ(a.device, b.device);
}

const HelloReply kHello{"1.2.3 (abcdef0)", 31, "host", 0xFEDCBA9876543210U, 33, "auto: because"};
void expect_equal(const HelloReply& a, const HelloReply& b) {
  EXPECT_EQ(a.build, b.build);
  EXPECT_EQ(a.protocol_version, b.protocol_version);
  EXPECT_EQ(a.backend, b.backend);
  EXPECT_EQ(a.instance, b.instance);
  EXPECT_EQ(a.pid, b.pid);
  EXPECT_EQ(a.backend_reason, b.backend_reason);
}

StatusReply a_status() {
  StatusReply status;
  status.version = kHello;
  status.uptime_ms = 41;
  status.devices = {DeviceSummary{"GPU-1", "H200", 42, 43, 44, 45, 46, 47, 48, 49, 54}};
  status.models = {a_model("a"), a_model("b")};
  status.session_count = 50;
  status.lease_count = 51;
  status.fd_count = 52;
  status.rss_bytes = 53;
  return status;
}

GpuSummary a_gpu() {
  GpuSummary gpu;
  gpu.uuid = "GPU-1";
  gpu.name = "H200";
  gpu.total_bytes = 201;
  gpu.used_bytes = 202;
  gpu.free_bytes = 203;
  gpu.nvml_known = true;
  gpu.minor = -204;
  gpu.persistence = -5;
  gpu.compute_major = 206;
  gpu.compute_minor = 207;
  gpu.vmm = true;
  gpu.fd_handles = true;
  gpu.read_only_map = -8;
  gpu.granularity_bytes = 209;
  gpu.problem = "none";
  return gpu;
}
void expect_equal(const GpuSummary& a, const GpuSummary& b) {
  EXPECT_EQ(a.uuid, b.uuid);
  EXPECT_EQ(a.name, b.name);
  EXPECT_EQ(a.total_bytes, b.total_bytes);
  EXPECT_EQ(a.used_bytes, b.used_bytes);
  EXPECT_EQ(a.free_bytes, b.free_bytes);
  EXPECT_EQ(a.nvml_known, b.nvml_known);
  EXPECT_EQ(a.minor, b.minor);
  EXPECT_EQ(a.persistence, b.persistence);
  EXPECT_EQ(a.compute_major, b.compute_major);
  EXPECT_EQ(a.compute_minor, b.compute_minor);
  EXPECT_EQ(a.vmm, b.vmm);
  EXPECT_EQ(a.fd_handles, b.fd_handles);
  EXPECT_EQ(a.read_only_map, b.read_only_map);
  EXPECT_EQ(a.granularity_bytes, b.granularity_bytes);
  EXPECT_EQ(a.problem, b.problem);
}

/// 64 bytes, no two alike.
std::vector<std::byte> a_handle(size_t bytes = kIpcHandleBytes) {
  std::vector<std::byte> handle(bytes);
  for (size_t i = 0; i < bytes; ++i) handle[i] = static_cast<std::byte>(i + 1);
  return handle;
}

Result<Request> sent(const Request& request) { return decode_request(encode(request)); }
template <typename Body>
Body received(const Body& body) {
  const Result<Response> response = decode_response(encode(Response{77, body}));
  EXPECT_TRUE(response.ok()) << response.status().to_string();
  if (!response.ok() || !std::holds_alternative<Body>(response->body)) {
    ADD_FAILURE() << "another kind of response";
    return Body{};
  }
  EXPECT_EQ(response->id, 77U);
  return std::get<Body>(response->body);
}
template <typename Body>
Body from_loader(const Body& body) {
  const Result<LoaderMessage> message = decode_loader_message(encode(LoaderMessage{body}));
  EXPECT_TRUE(message.ok()) << message.status().to_string();
  if (!message.ok() || !std::holds_alternative<Body>(message->body)) {
    ADD_FAILURE() << "another kind of message";
    return Body{};
  }
  return std::get<Body>(message->body);
}

// --- round trips -----------------------------------------------------------------------------------------------------------

TEST(Requests, EveryFieldSurvives) {
  Result<Request> request = sent({1, HelloRequest{"1.0 (x)", "worker"}});
  ASSERT_TRUE(request.ok());
  EXPECT_EQ(request->id, 1U);
  EXPECT_EQ(std::get<HelloRequest>(request->body).build, "1.0 (x)");
  EXPECT_EQ(std::get<HelloRequest>(request->body).name, "worker");

  request = sent({UINT64_MAX, AcquireRequest{"org/m:1", "GPU-1", 5, "abc"}});
  ASSERT_TRUE(request.ok());
  EXPECT_EQ(request->id, UINT64_MAX);
  const auto acquire = std::get<AcquireRequest>(request->body);
  EXPECT_EQ(acquire.model, "org/m:1");
  EXPECT_EQ(acquire.device, "GPU-1");
  EXPECT_EQ(acquire.wait_ms, 5U);
  EXPECT_EQ(acquire.content_id, "abc");

  request = sent({3, ReleaseRequest{UINT64_MAX}});
  ASSERT_TRUE(request.ok());
  EXPECT_EQ(std::get<ReleaseRequest>(request->body).lease, UINT64_MAX);

  request = sent({4, LoadRequest{"m", "/a/é.wpk", "host", UINT32_MAX, "legacy"}});
  ASSERT_TRUE(request.ok());
  const auto load = std::get<LoadRequest>(request->body);
  EXPECT_EQ(load.model, "m");
  EXPECT_EQ(load.path, "/a/é.wpk");
  EXPECT_EQ(load.device, "host");
  EXPECT_EQ(load.timeout_ms, UINT32_MAX);
  EXPECT_EQ(load.transport, "legacy");

  request = sent({5, UnloadRequest{"m", "host", 9}});
  ASSERT_TRUE(request.ok());
  const auto unload = std::get<UnloadRequest>(request->body);
  EXPECT_EQ(unload.model, "m");
  EXPECT_EQ(unload.device, "host");
  EXPECT_EQ(unload.timeout_ms, 9U);

  request = sent({6, VerifyRequest{"m"}});
  ASSERT_TRUE(request.ok());
  EXPECT_EQ(std::get<VerifyRequest>(request->body).model, "m");

  EXPECT_TRUE(std::holds_alternative<ListRequest>(sent({7, ListRequest{}})->body));
  EXPECT_TRUE(std::holds_alternative<StatusRequest>(sent({7, StatusRequest{}})->body));
  EXPECT_TRUE(std::holds_alternative<LeasesRequest>(sent({7, LeasesRequest{}})->body));
  EXPECT_TRUE(std::holds_alternative<VersionRequest>(sent({7, VersionRequest{}})->body));
  EXPECT_TRUE(std::holds_alternative<MemoryRequest>(sent({7, MemoryRequest{}})->body));
  EXPECT_TRUE(std::holds_alternative<DoctorRequest>(sent({7, DoctorRequest{}})->body));
}

TEST(Responses, EveryFieldSurvives) {
  const Status error = received(Status::resource_exhausted("needs 9.8 GiB"));
  EXPECT_EQ(error.code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(error.message(), "needs 9.8 GiB");
  expect_equal(received(kHello), kHello);
  expect_equal(received(VersionReply{kHello}).version, kHello);
  const auto models = received(ModelsReply{{a_model("a"), a_model("b")}}).models;
  ASSERT_EQ(models.size(), 2U);
  expect_equal(models[0], a_model("a"));
  expect_equal(models[1], a_model("b"));
  const auto acquired = received(AcquiredReply{61, a_model("a"), 62, {63, 64}, 65, 66, a_handle()});
  EXPECT_EQ(acquired.lease, 61U);
  expect_equal(acquired.model, a_model("a"));
  EXPECT_EQ(acquired.arena_bytes, 62U);
  EXPECT_EQ(acquired.chunk_bytes, (std::vector<uint64_t>{63, 64}));
  EXPECT_EQ(acquired.fd_count, 65U);
  EXPECT_EQ(acquired.table_bytes, 66U);
  EXPECT_EQ(acquired.ipc_handle, a_handle());
  received(ReleasedReply{});
  expect_equal(received(LoadedReply{a_model("x")}).model, a_model("x"));
  const auto unloaded = received(UnloadedReply{true, 71, {a_lease()}});
  EXPECT_TRUE(unloaded.freed);
  EXPECT_EQ(unloaded.bytes, 71U);
  ASSERT_EQ(unloaded.holders.size(), 1U);
  expect_equal(unloaded.holders[0], a_lease());
  const auto leases = received(LeasesReply{{a_lease()}}).leases;
  ASSERT_EQ(leases.size(), 1U);
  expect_equal(leases[0], a_lease());
  const auto verified = received(VerifiedReply{81, {82, 83}, {"a.weight", std::string("nul\0name", 8)}, 84, 85});
  EXPECT_EQ(verified.blocks, 81U);
  EXPECT_EQ(verified.bad_blocks, (std::vector<uint64_t>{82, 83}));
  EXPECT_EQ(verified.bad_tensors, (std::vector<std::string>{"a.weight", std::string("nul\0name", 8)}));
  EXPECT_EQ(verified.elapsed_ms, 84U);
  EXPECT_EQ(verified.bytes, 85U);
  EXPECT_EQ(received(MoreFdsReply{91}).count, 91U);
}

TEST(Responses, StatusSurvives) {
  const StatusReply status = received(a_status());
  expect_equal(status.version, kHello);
  EXPECT_EQ(status.uptime_ms, 41U);
  ASSERT_EQ(status.devices.size(), 1U);
  const DeviceSummary& device = status.devices[0];
  EXPECT_EQ(device.uuid, "GPU-1");
  EXPECT_EQ(device.name, "H200");
  EXPECT_EQ(device.total_bytes, 42U);
  EXPECT_EQ(device.budget_bytes, 43U);
  EXPECT_EQ(device.owned_bytes, 44U);
  EXPECT_EQ(device.leased_bytes, 45U);
  EXPECT_EQ(device.draining_bytes, 46U);
  EXPECT_EQ(device.orphan_bytes, 47U);
  EXPECT_EQ(device.loading_bytes, 48U);
  EXPECT_EQ(device.free_bytes, 49U);
  EXPECT_EQ(device.fd_only_bytes, 54U);
  ASSERT_EQ(status.models.size(), 2U);
  expect_equal(status.models[1], a_model("b"));
  EXPECT_EQ(status.session_count, 50U);
  EXPECT_EQ(status.lease_count, 51U);
  EXPECT_EQ(status.fd_count, 52U);
  EXPECT_EQ(status.rss_bytes, 53U);
}

TEST(Responses, MemoryAndDoctorSurvive) {
  const MemoryReply memory = received(MemoryReply{a_status(), {a_lease()}, {a_gpu(), a_gpu()}, "no answer"});
  expect_equal(memory.status.version, kHello);
  ASSERT_EQ(memory.status.models.size(), 2U);
  expect_equal(memory.status.models[0], a_model("a"));
  ASSERT_EQ(memory.leases.size(), 1U);
  expect_equal(memory.leases[0], a_lease());
  ASSERT_EQ(memory.gpus.size(), 2U);
  expect_equal(memory.gpus[1], a_gpu());
  EXPECT_EQ(memory.problem, "no answer");
  using Level = CheckSummary::Level;
  const auto checks =
      received(DoctorReply{{{"a", Level::kGood, "b", ""}, {"c", Level::kWarning, "d", "e"}, {"f", Level::kFailure, "", ""}}})
          .checks;
  ASSERT_EQ(checks.size(), 3U);
  EXPECT_EQ(checks[0].level, Level::kGood);
  EXPECT_EQ(checks[1].name, "c");
  EXPECT_EQ(checks[1].level, Level::kWarning);
  EXPECT_EQ(checks[1].detail, "d");
  EXPECT_EQ(checks[1].advice, "e");
  EXPECT_EQ(checks[2].level, Level::kFailure);
}

TEST(Responses, EventsSurvive) {
  const EventReply published = received(EventReply{PublishedEvent{a_model("p")}});
  ASSERT_TRUE(std::holds_alternative<PublishedEvent>(published.event));
  expect_equal(std::get<PublishedEvent>(published.event).model, a_model("p"));
  const EventReply drain = received(EventReply{DrainRequestedEvent{a_model("d")}});
  ASSERT_TRUE(std::holds_alternative<DrainRequestedEvent>(drain.event));
  expect_equal(std::get<DrainRequestedEvent>(drain.event).model, a_model("d"));
  EXPECT_TRUE(std::holds_alternative<ShuttingDownEvent>(received(EventReply{ShuttingDownEvent{}}).event));
  const EventReply lost = received(EventReply{LostEvent{a_model("l")}});
  ASSERT_TRUE(std::holds_alternative<LostEvent>(lost.event));
  expect_equal(std::get<LostEvent>(lost.event).model, a_model("l"));
}

TEST(LoaderMessages, EveryFieldSurvives) {
  Job job;
  job.kind = VerifyJob{{101, 102}, 103};
  job.backend = "host";
  job.device = "d";
  job.residency = "fast";
  job.chunk_bytes = 104;
  job.threads = 105;
  job.bundle_name = "b.wpk";
  job.fd_count = 106;
  job.transport = "legacy";
  const Job verify = from_loader(job);
  ASSERT_TRUE(std::holds_alternative<VerifyJob>(verify.kind));
  EXPECT_EQ(std::get<VerifyJob>(verify.kind).chunk_bytes, (std::vector<uint64_t>{101, 102}));
  EXPECT_EQ(std::get<VerifyJob>(verify.kind).arena_bytes, 103U);
  EXPECT_EQ(verify.backend, "host");
  EXPECT_EQ(verify.device, "d");
  EXPECT_EQ(verify.residency, "fast");
  EXPECT_EQ(verify.chunk_bytes, 104U);
  EXPECT_EQ(verify.threads, 105U);
  EXPECT_EQ(verify.bundle_name, "b.wpk");
  EXPECT_EQ(verify.fd_count, 106U);
  EXPECT_EQ(verify.transport, "legacy");
  for (const bool deep : {false, true}) {
    Job probe;
    probe.kind = ProbeJob{deep};
    const Job got = from_loader(probe);
    ASSERT_TRUE(std::holds_alternative<ProbeJob>(got.kind));
    EXPECT_EQ(std::get<ProbeJob>(got.kind).deep, deep);
  }
  EXPECT_TRUE(std::holds_alternative<LoadJob>(from_loader(Job{}).kind));
  const Planned planned = from_loader(Planned{"c", "t", 111, 112, 113, 114, 115, {{"f12", 116, 117, 118}}, 119});
  EXPECT_EQ(planned.content_id, "c");
  EXPECT_EQ(planned.tensors_id, "t");
  EXPECT_EQ(planned.arena_bytes, 111U);
  EXPECT_EQ(planned.resident_bytes, 112U);
  EXPECT_EQ(planned.logical_bytes, 113U);
  EXPECT_EQ(planned.tensor_count, 114U);
  EXPECT_EQ(planned.chunk_count, 115U);
  EXPECT_EQ(planned.available_bytes, 119U);
  expect_equal(planned.encodings, {{"f12", 116, 117, 118}});
  from_loader(Admitted{});
  EXPECT_EQ(from_loader(Chunks{121}).count, 121U);
  EXPECT_EQ(from_loader(Received{122}).count, 122U);
  EXPECT_EQ(from_loader(LoadProgress{123}).bytes, 123U);
  const LoadResult result = from_loader(LoadResult{{131}, 132, 133, 134, a_handle()});
  EXPECT_EQ(result.chunk_bytes, (std::vector<uint64_t>{131}));
  EXPECT_EQ(result.table_bytes, 132U);
  EXPECT_EQ(result.blocks, 133U);
  EXPECT_EQ(result.elapsed_ms, 134U);
  EXPECT_EQ(result.ipc_handle, a_handle());
  const ProbeReply probed = from_loader(ProbeReply{"580.1", 13000, {a_gpu()}, "p", "n"});
  EXPECT_EQ(probed.driver_version, "580.1");
  EXPECT_EQ(probed.cuda_version, 13000U);
  ASSERT_EQ(probed.gpus.size(), 1U);
  expect_equal(probed.gpus[0], a_gpu());
  EXPECT_EQ(probed.problem, "p");
  EXPECT_EQ(probed.nvml_problem, "n");
  EXPECT_EQ(from_loader(Status::corruption("bad")).code(), StatusCode::kCorruption);
  EXPECT_EQ(from_loader(VerifiedReply{141, {}, {}, 142, 143}).blocks, 141U);
  EXPECT_EQ(from_loader(MoreFdsReply{151}).count, 151U);
}

TEST(Messages, BodiesAreWholeWordsAndDecodeFromAnyAlignment) {
  const std::vector<std::byte> body = encode(Request{9, LoadRequest{"m", "/p", "", 0}});
  EXPECT_EQ(body.size() % 8, 0U);
  std::vector<std::byte> shifted(body.size() + 1);
  std::copy(body.begin(), body.end(), shifted.begin() + 1);
  const Result<Request> request = decode_request(std::span(shifted).subspan(1));
  ASSERT_TRUE(request.ok()) << request.status().to_string();
  EXPECT_EQ(std::get<LoadRequest>(request->body).path, "/p");
}

TEST(Messages, CO_123_NothingIsReadFromTheBytesLater) {
  std::vector<std::byte> body = encode(Response{1, a_status()});
  const Result<Response> response = decode_response(body);
  ASSERT_TRUE(response.ok());
  std::fill(body.begin(), body.end(), std::byte{0xA5});
  body = {};
  const auto& status = std::get<StatusReply>(response->body);
  for (int i = 0; i < 100'000; ++i) ASSERT_EQ(status.models[1].source, "/models/a.wpk");
}

// --- refusals --------------------------------------------------------------------------------------------------------------

void expect_refused(const Request& request, const std::string& field) {
  const Result<Request> decoded = sent(request);
  ASSERT_FALSE(decoded.ok()) << field;
  EXPECT_EQ(decoded.status().code(), StatusCode::kInvalidArgument) << decoded.status().to_string();
  EXPECT_NE(decoded.status().message().find(field), std::string::npos) << decoded.status().message();
  EXPECT_EQ(decoded.status().message().find('\n'), std::string::npos) << "one line";
  EXPECT_LT(decoded.status().message().size(), 400U) << "does not echo what was sent";
}

TEST(Messages, CO_118_EveryTextFieldOfARequestWithImpossibleValues) {
  const std::string nul("a\0b", 3), not_utf8("a\xC3", 2), huge(1U << 20, 'a'), over(kMaxTextBytes + 1, 'a');
  const auto with_model = [](const std::string& value, const std::function<Request(std::string)>& make, const std::string& field) {
    expect_refused(make(value), field);
  };
  const std::vector<std::pair<std::string, std::function<Request(std::string)>>> model_fields = {
      {"acquire.model",
       [](std::string v) {
         return Request{1, AcquireRequest{std::move(v), "", 0, ""}};
       }},
      {"load.model",
       [](std::string v) {
         return Request{1, LoadRequest{std::move(v), "/p", "", 0}};
       }},
      {"unload.model",
       [](std::string v) {
         return Request{1, UnloadRequest{std::move(v), "", 0}};
       }},
      {"verify.model",
       [](std::string v) {
         return Request{1, VerifyRequest{std::move(v)}};
       }},
  };
  for (const auto& [field, make] : model_fields) {
    for (const std::string& value : {std::string(), nul, not_utf8, huge, over, std::string(256, 'a'), std::string("../x"),
                                     std::string("a\nb"), std::string("a b"), std::string("\x1b[2J"), std::string("é")}) {
      with_model(value, make, field);
    }
  }
  const std::vector<std::pair<std::string, std::function<Request(std::string)>>> text_fields = {
      {"hello.build",
       [](std::string v) {
         return Request{1, HelloRequest{std::move(v), ""}};
       }},
      {"hello.name",
       [](std::string v) {
         return Request{1, HelloRequest{"", std::move(v)}};
       }},
      {"acquire.device",
       [](std::string v) {
         return Request{1, AcquireRequest{"m", std::move(v), 0, ""}};
       }},
      {"acquire.contentId",
       [](std::string v) {
         return Request{1, AcquireRequest{"m", "", 0, std::move(v)}};
       }},
      {"load.path",
       [](std::string v) {
         return Request{1, LoadRequest{"m", std::move(v), "", 0}};
       }},
      {"load.device",
       [](std::string v) {
         return Request{1, LoadRequest{"m", "", std::move(v), 0}};
       }},
      {"unload.device",
       [](std::string v) {
         return Request{1, UnloadRequest{"m", std::move(v), 0}};
       }},
  };
  for (const auto& [field, make] : text_fields) {
    for (const std::string& value : {nul, not_utf8, huge, over}) with_model(value, make, field);
    EXPECT_TRUE(sent(make(std::string(kMaxTextBytes, 'a'))).ok()) << field << ": the limit itself is allowed";
    EXPECT_TRUE(sent(make("")).ok()) << field;
  }
}

TEST(Messages, TransportsAreTheTwoOrNone) {
  for (const char* good : {"", "fd", "legacy"}) {
    EXPECT_TRUE(sent({1, LoadRequest{"m", "/p", "", 0, good}}).ok()) << good;
    Job job;
    job.transport = good;
    EXPECT_TRUE(decode_loader_message(encode(LoaderMessage{job})).ok()) << good;
  }
  for (const std::string& bad :
       {std::string("FD"), std::string("fd "), std::string("shm"), std::string("fd\0", 3), std::string("\x1b[2J")}) {
    expect_refused({1, LoadRequest{"m", "/p", "", 0, bad}}, "load.transport");
    Job job;
    job.transport = bad;
    const Status refused = decode_loader_message(encode(LoaderMessage{job})).status();
    EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(refused.message().find("job.transport"), std::string::npos) << refused.message();
  }
}

TEST(Messages, AnIpcHandleIsWholeOrAbsent) {
  for (const size_t bytes : {size_t{0}, kIpcHandleBytes}) {
    EXPECT_EQ(received(AcquiredReply{1, a_model("m"), 1, {1}, 1, 1, a_handle(bytes)}).ipc_handle, a_handle(bytes));
    EXPECT_EQ(from_loader(LoadResult{{1}, 1, 1, 1, a_handle(bytes)}).ipc_handle, a_handle(bytes));
  }
  for (const size_t bytes : {size_t{1}, size_t{63}, size_t{65}, size_t{1} << 20}) {
    const Status acquired =
        decode_response(encode(Response{1, AcquiredReply{1, a_model("m"), 1, {1}, 1, 1, a_handle(bytes)}})).status();
    EXPECT_EQ(acquired.code(), StatusCode::kInvalidArgument) << bytes;
    EXPECT_NE(acquired.message().find("acquired.ipcHandle"), std::string::npos) << acquired.message();
    const Status verified = decode_loader_message(encode(LoaderMessage{LoadResult{{1}, 1, 1, 1, a_handle(bytes)}})).status();
    EXPECT_EQ(verified.code(), StatusCode::kInvalidArgument) << bytes;
    EXPECT_NE(verified.message().find("verified.ipcHandle"), std::string::npos) << verified.message();
  }
}

TEST(Messages, ModelNamesFollowTheRule) {
  for (const char* good : {"a", "qwen3-8b", "org/model:v2", "0", "A.b_c-d", "a/b/c", "7b..q4"})
    EXPECT_TRUE(valid_model_name(good)) << good;
  for (const char* bad :
       {"", ".", "..", "../x", "a/../b", "a//b", "/a", "a/", "-x", "a/-x", "_a", "a b", "a\\b", "a\tb", "modèle", "a%", "a\"b"}) {
    EXPECT_FALSE(valid_model_name(bad)) << bad;
  }
  EXPECT_TRUE(valid_model_name(std::string(255, 'x')));
  EXPECT_FALSE(valid_model_name(std::string(256, 'x')));
  EXPECT_FALSE(valid_model_name(std::string_view("a\0b", 3)));
}

TEST(Messages, UnknownUnionMembersAreUnsupported) {
  const auto kind = [](uint64_t root, uint64_t which_word, uint64_t member) {
    std::vector<uint64_t> words{root, 1, 0, 0, 0};
    words[which_word] = member;
    return message_of(words);
  };
  // Request and Response: id, then the member's number. LoaderMessage: value, then the number.
  EXPECT_EQ(decode_request(kind(struct_pointer(0, 3, 1), 2, 12)).status().code(), StatusCode::kUnsupported);
  EXPECT_EQ(decode_request(kind(struct_pointer(0, 3, 1), 2, 0xFFFF)).status().code(), StatusCode::kUnsupported);
  EXPECT_EQ(decode_response(kind(struct_pointer(0, 2, 2), 2, 15)).status().code(), StatusCode::kUnsupported);
  EXPECT_EQ(decode_response(kind(struct_pointer(0, 2, 2), 2, 0xFFFF)).status().code(), StatusCode::kUnsupported);
  const auto newer = decode_request(kind(struct_pointer(0, 3, 1), 2, 12)).status();
  EXPECT_NE(newer.message().find("newer"), std::string::npos) << newer.message();
}

/// Every 16-bit place of a message set to `value`, decoded; the number of outcomes with `code`.
template <typename Decode>
size_t count_outcomes(const std::vector<std::byte>& body, uint16_t value, StatusCode code, Decode decode, std::string_view named) {
  size_t count = 0;
  for (size_t at = 8; at + 2 <= body.size(); at += 2) {
    std::vector<std::byte> changed = body;
    std::memcpy(changed.data() + at, &value, 2);
    const auto result = decode(changed);
    if (result.ok()) continue;
    count += static_cast<size_t>(result.status().code() == code && result.status().message().find(named) != std::string::npos);
  }
  return count;
}

TEST(Messages, EnumsAndUnionsOutOfRangeAreNamed) {
  const auto loaded = encode(Response{1, LoadedReply{a_model("m")}});
  EXPECT_GE(count_outcomes(loaded, 8, StatusCode::kInvalidArgument, decode_response, "model.state"), 1U);
  EXPECT_EQ(count_outcomes(loaded, 7, StatusCode::kInvalidArgument, decode_response, "model.state"), 0U) << "lost is the last";
  const auto doctor = encode(Response{1, DoctorReply{{{"n", CheckSummary::Level::kFailure, "d", "a"}}}});
  EXPECT_EQ(count_outcomes(doctor, 3, StatusCode::kInvalidArgument, decode_response, "check.level"), 1U);
  const auto event = encode(Response{1, EventReply{ShuttingDownEvent{}}});
  EXPECT_GE(count_outcomes(event, 4, StatusCode::kUnsupported, decode_response, "event"), 1U);
  const auto job = encode(LoaderMessage{Job{}});
  EXPECT_GE(count_outcomes(job, 3, StatusCode::kUnsupported, decode_loader_message, "job"), 1U);
  const auto error = encode(Response{1, Status::not_found("x")});
  EXPECT_GE(count_outcomes(error, 0, StatusCode::kInvalidArgument, decode_response, "error.code"), 1U) << "0 is no error";
}

TEST(Messages, ListsOverTheLimitAreRefusedAndTheLimitIsAllowed) {
  VerifiedReply verified;
  verified.bad_blocks.assign(kMaxListItems, 1);
  EXPECT_TRUE(decode_response(encode(Response{1, verified})).ok());
  verified.bad_blocks.push_back(1);
  const Status status = decode_response(encode(Response{1, verified})).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("verified.badBlocks"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("65537"), std::string::npos) << status.message();
}

TEST(Messages, GarbageTruncationAndTrailingBytesAreRefused) {
  EXPECT_EQ(decode_request({}).status().code(), StatusCode::kInvalidArgument);
  const std::vector<std::byte> body = encode(Response{1, a_status()});
  for (size_t size = 0; size < body.size(); ++size) {
    EXPECT_FALSE(decode_response(std::span(body).first(size)).ok()) << size << " of " << body.size();
  }
  EXPECT_FALSE(decode_response(test::joined(body, std::vector<std::byte>(8))).ok()) << "trailing word";
  EXPECT_FALSE(decode_request(std::vector<std::byte>(4096, std::byte{0xFF})).ok());
  EXPECT_TRUE(decode_request(message_of({0})).ok()) << "a null root is all defaults: hello without texts";
}

TEST(Messages, EverySingleBitFlipIsAnAnswerNotACrash) {
  const std::vector<std::byte> body = encode(Response{1, AcquiredReply{61, a_model("a"), 62, {63, 64}, 65, 66}});
  for (size_t bit = 0; bit < 8 * body.size(); ++bit) {
    std::vector<std::byte> changed = body;
    changed[bit / 8] ^= std::byte{1} << (bit % 8);
    (void)decode_response(changed);
    (void)decode_request(changed);
    (void)decode_loader_message(changed);
  }
}

/// Replaces each list pointer of the message by claims of 2^29 - 1 items of no size.
template <typename Decode>
size_t expect_huge_claims_refused(const std::vector<std::byte>& body, Decode decode) {
  constexpr uint64_t kMost = (uint64_t{1} << 29) - 1;
  size_t lists = 0;
  for (size_t at = 8; at + 8 <= body.size(); at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, body.data() + at, 8);
    const uint64_t offset = word >> 2 & 0x3FFFFFFF;
    const uint64_t target = at + 8 + 8 * offset;
    const uint64_t kind = word >> 32 & 7;
    // Numbers that look like one have no upper half.
    if ((word & 3) != 1 || word >> 32 == 0 || target > body.size()) continue;
    ++lists;
    std::vector<std::vector<std::byte>> claims;
    std::vector<std::byte> changed = body;
    const uint64_t of_void = list_pointer(offset, 0, kMost);
    std::memcpy(changed.data() + at, &of_void, 8);
    claims.push_back(changed);
    if (kind == 7) {
      // An inline list of structs: no words, and a tag that says as many structs of no size.
      const uint64_t of_structs = list_pointer(offset, 7, 0), tag = struct_pointer(kMost, 0, 0);
      changed = body;
      std::memcpy(changed.data() + at, &of_structs, 8);
      std::memcpy(changed.data() + target, &tag, 8);
      claims.push_back(changed);
    }
    for (const auto& claim : claims) {
      const double before = test::cpu_seconds();
      const auto result = decode(claim);
      EXPECT_LT(test::cpu_seconds() - before, 0.05) << "word " << at / 8;
      EXPECT_FALSE(result.ok()) << "word " << at / 8;
    }
  }
  return lists;
}

TEST(Messages, CO_119_TinyMessageThatClaimsAHugeListCostsNothing) {
  // The smallest: root with one pointer to the list.
  constexpr uint64_t kMost = (uint64_t{1} << 29) - 1;
  const auto tiny = message_of({struct_pointer(0, 0, 1), list_pointer(0, 0, kMost)});
  ASSERT_EQ(tiny.size(), 24U);
  EXPECT_FALSE(decode_request(tiny).ok());
  EXPECT_FALSE(decode_response(tiny).ok());
  // Every list and text field of every message: lists and texts are the same thing on the wire.
  EXPECT_GE(expect_huge_claims_refused(encode(Response{1, ModelsReply{{a_model("m")}}}), decode_response), 1U + 8U);
  EXPECT_GE(expect_huge_claims_refused(encode(Response{1, AcquiredReply{1, a_model("m"), 2, {3}, 4, 5}}), decode_response),
            1U + 8U);
  EXPECT_GE(expect_huge_claims_refused(encode(Response{1, a_status()}), decode_response), 2U + 1U + 2U + 1U + 16U);
  EXPECT_GE(expect_huge_claims_refused(encode(Response{1, UnloadedReply{true, 1, {a_lease()}}}), decode_response), 1U + 4U);
  EXPECT_GE(expect_huge_claims_refused(encode(Response{1, LeasesReply{{a_lease()}}}), decode_response), 1U + 4U);
  EXPECT_GE(expect_huge_claims_refused(encode(Response{1, VerifiedReply{1, {2}, {"t"}, 3, 4}}), decode_response), 2U + 1U);
  Job job;
  job.kind = VerifyJob{{1}, 2};
  EXPECT_GE(expect_huge_claims_refused(encode(LoaderMessage{job}), decode_loader_message), 1U);
  EXPECT_GE(expect_huge_claims_refused(encode(LoaderMessage{LoadResult{{1}, 2, 3, 4}}), decode_loader_message), 1U);
  EXPECT_GE(expect_huge_claims_refused(encode(Request{1, LoadRequest{"m", "/p", "d", 0}}), decode_request), 3U);
}

TEST(Messages, CO_120_DeepPointerChainsAreRefused) {
  for (const size_t depth : {size_t{65}, size_t{1'000'000}}) {
    const std::vector<uint64_t> structs(depth, struct_pointer(0, 0, 1));
    EXPECT_FALSE(decode_request(message_of(structs)).ok()) << depth;
    EXPECT_FALSE(decode_response(message_of(structs)).ok()) << depth;
    EXPECT_FALSE(decode_loader_message(message_of(structs)).ok()) << depth;
    std::vector<uint64_t> lists(depth, list_pointer(0, 6, 1));  // list of list of list ...
    lists[0] = struct_pointer(0, 0, 1);
    EXPECT_FALSE(decode_request(message_of(lists)).ok()) << depth;
    EXPECT_FALSE(decode_response(message_of(lists)).ok()) << depth;
  }
}

TEST(Messages, AmplificationByManyPointersToOneTextIsBounded) {
  // A thousand texts that all point to the same 4000 bytes: 4 MB to copy for a message of 100 KB.
  LeasesReply leases;
  leases.leases.assign(1000, a_lease());
  for (LeaseSummary& lease : leases.leases) lease.command = "cc";
  leases.leases.back().command = std::string(4000, 'x');
  std::vector<std::byte> body = encode(Response{1, leases});
  // Find the long text's target and let all the one-letter commands point there.
  std::vector<std::byte> needle(4000, std::byte{'x'});
  const auto found = std::search(body.begin(), body.end(), needle.begin(), needle.end());
  ASSERT_NE(found, body.end());
  const auto target = static_cast<size_t>(found - body.begin());
  size_t changed = 0;
  for (size_t at = 8; at + 8 <= target; at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, body.data() + at, 8);
    if ((word & 3) != 1 || word >> 32 != (2 | 3 << 3)) continue;  // a text of two letters
    const uint64_t text = list_pointer((target - at - 8) / 8, 2, 4001);
    std::memcpy(body.data() + at, &text, 8);
    ++changed;
  }
  ASSERT_GT(changed, 900U);
  const Status status = decode_response(body).status();
  EXPECT_NE(status.message().find("traversal"), std::string::npos)
      << changed << " texts of 4000 bytes out of " << body.size() << " bytes: " << status.to_string();
}

// --- texts -----------------------------------------------------------------------------------------------------------------

TEST(BoundedText, CutsAtCharactersAndEscapesWhatIsNoUtf8) {
  EXPECT_EQ(bounded_text("short"), "short");
  EXPECT_EQ(bounded_text("abcdefgh", 8), "abcdefgh");
  EXPECT_EQ(bounded_text("abcdefghi", 8), "abcde...");
  EXPECT_EQ(bounded_text("ab\xC3\xA9\xC3\xA9\xC3\xA9", 7), "ab\xC3\xA9...");
  EXPECT_EQ(bounded_text("abc\xC3\xA9\xC3\xA9\xC3\xA9", 8), "abc\xC3\xA9...");
  EXPECT_EQ(bounded_text("a\xFFz"), "a\\xffz");
  EXPECT_TRUE(is_utf8(bounded_text(std::string(5000, '\xF0'))));
  EXPECT_LE(bounded_text(std::string(5000, '\xF0')).size(), kMaxTextBytes);
}

TEST(BoundedText, ErrorsOfAnyLengthArriveReadable) {
  const Status error = received(Status::io(std::string(1U << 20, 'x') + "\xFF"));
  EXPECT_EQ(error.code(), StatusCode::kIo);
  EXPECT_EQ(error.message().size(), kMaxTextBytes);
}

TEST(GenerationState, HasAFixedName) {
  EXPECT_EQ(generation_state_name(GenerationState::kLoading), "loading");
  EXPECT_EQ(generation_state_name(GenerationState::kPublished), "published");
  EXPECT_EQ(generation_state_name(GenerationState::kFailed), "failed");
  EXPECT_EQ(generation_state_name(static_cast<GenerationState>(99)), "unknown");
}

}  // namespace
}  // namespace weightd::ipc
