// SPDX-License-Identifier: Apache-2.0
#include "ipc/messages.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "ipc/protocol.capnp.h"
#include "ipc/wire.h"

namespace weightd::ipc {
namespace {

template <typename... Fs>
struct Overloaded : Fs... {
  using Fs::operator()...;
};
template <typename... Fs>
Overloaded(Fs...) -> Overloaded<Fs...>;

constexpr uint16_t kGenerationStates = 8;
constexpr uint16_t kCheckLevels = 3;
constexpr uint16_t kLastStatusCode = static_cast<uint16_t>(StatusCode::kLost);

// --- encoding ---------------------------------------------------------------------------------------------------------------

/// Fills a list builder from a vector; `fn(builder, item)` fills one struct.
template <typename List, typename Items, typename Fn>
void put_each(List list, const Items& items, Fn&& fn) {
  for (uint32_t i = 0; i < items.size(); ++i) fn(list[i], items[i]);
}
void put_numbers(capnp::List<uint64_t>::Builder list, const std::vector<uint64_t>& numbers) {
  for (uint32_t i = 0; i < numbers.size(); ++i) list.set(i, numbers[i]);
}
template <typename Items>
uint32_t size32(const Items& items) {
  return static_cast<uint32_t>(items.size());
}

void put(wire::Error::Builder to, const Status& from) {
  to.setCode(static_cast<uint16_t>(from.code()));
  to.setMessage(text_reader(bounded_text(from.message())));
}

void put(wire::HelloReply::Builder to, const HelloReply& from) {
  to.setBuild(text_reader(from.build));
  to.setProtocolVersion(from.protocol_version);
  to.setBackend(text_reader(from.backend));
  to.setInstance(from.instance);
  to.setPid(from.pid);
  to.setBackendReason(text_reader(from.backend_reason));
}

void put(wire::EncodingSum::Builder to, const EncodingSum& from) {
  to.setEncoding(text_reader(from.encoding));
  to.setTensors(from.tensors);
  to.setLogicalBytes(from.logical_bytes);
  to.setResidentBytes(from.resident_bytes);
}

// Items of lists.
void put(wire::Model::Builder to, const ModelSummary& from);
void put(wire::Lease::Builder to, const LeaseSummary& from);
void put(wire::Device::Builder to, const DeviceSummary& from);
void put(wire::Gpu::Builder to, const GpuSummary& from);
void put(wire::Check::Builder to, const CheckSummary& from);
constexpr auto kPutOne = [](auto builder, const auto& item) { put(builder, item); };

capnp::Data::Reader data_reader(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const kj::byte*>(bytes.data()), bytes.size()};
}

void put(wire::Model::Builder to, const ModelSummary& from) {
  to.setName(text_reader(from.name));
  to.setGeneration(from.generation);
  to.setState(static_cast<wire::GenerationState>(from.state));
  to.setContentId(text_reader(from.content_id));
  to.setDevice(text_reader(from.device));
  to.setShard(from.shard);
  to.setTransport(text_reader(from.transport));
  to.setLogicalBytes(from.logical_bytes);
  to.setResidentBytes(from.resident_bytes);
  to.setTensorCount(from.tensor_count);
  to.setLeaseCount(from.lease_count);
  to.setOrphanCount(from.orphan_count);
  to.setProgressBytes(from.progress_bytes);
  to.setFailure(text_reader(from.failure));
  to.setResidency(text_reader(from.residency));
  to.setSource(text_reader(from.source));
  to.setTensorsId(text_reader(from.tensors_id));
  put_each(to.initEncodings(size32(from.encodings)), from.encodings, kPutOne);
}

void put(wire::Lease::Builder to, const LeaseSummary& from) {
  to.setId(from.id);
  to.setModel(text_reader(from.model));
  to.setGeneration(from.generation);
  to.setContentId(text_reader(from.content_id));
  to.setPid(from.pid);
  to.setUid(from.uid);
  to.setCommand(text_reader(from.command));
  to.setAgeMs(from.age_ms);
  to.setBytes(from.bytes);
  to.setOrphan(from.orphan);
  to.setDevice(text_reader(from.device));
}

void put(wire::Device::Builder to, const DeviceSummary& from) {
  to.setUuid(text_reader(from.uuid));
  to.setName(text_reader(from.name));
  to.setTotalBytes(from.total_bytes);
  to.setBudgetBytes(from.budget_bytes);
  to.setOwnedBytes(from.owned_bytes);
  to.setLeasedBytes(from.leased_bytes);
  to.setDrainingBytes(from.draining_bytes);
  to.setOrphanBytes(from.orphan_bytes);
  to.setLoadingBytes(from.loading_bytes);
  to.setFreeBytes(from.free_bytes);
  to.setFdOnlyBytes(from.fd_only_bytes);
}

void put(wire::Gpu::Builder to, const GpuSummary& from) {
  to.setUuid(text_reader(from.uuid));
  to.setName(text_reader(from.name));
  to.setTotalBytes(from.total_bytes);
  to.setUsedBytes(from.used_bytes);
  to.setFreeBytes(from.free_bytes);
  to.setNvmlKnown(from.nvml_known);
  to.setMinor(from.minor);
  to.setPersistence(from.persistence);
  to.setComputeMajor(from.compute_major);
  to.setComputeMinor(from.compute_minor);
  to.setVmm(from.vmm);
  to.setFdHandles(from.fd_handles);
  to.setReadOnlyMap(from.read_only_map);
  to.setGranularityBytes(from.granularity_bytes);
  to.setProblem(text_reader(from.problem));
}

void put(wire::Probe::Builder to, const ProbeReply& from) {
  to.setDriverVersion(text_reader(from.driver_version));
  to.setCudaVersion(from.cuda_version);
  put_each(to.initGpus(size32(from.gpus)), from.gpus, kPutOne);
  to.setProblem(text_reader(from.problem));
  to.setNvmlProblem(text_reader(from.nvml_problem));
}

void put(wire::Check::Builder to, const CheckSummary& from) {
  to.setName(text_reader(from.name));
  to.setLevel(static_cast<uint16_t>(from.level));
  to.setDetail(text_reader(from.detail));
  to.setAdvice(text_reader(from.advice));
}

void put(wire::Acquired::Builder to, const AcquiredReply& from) {
  to.setLease(from.lease);
  put(to.initModel(), from.model);
  to.setArenaBytes(from.arena_bytes);
  put_numbers(to.initChunkBytes(size32(from.chunk_bytes)), from.chunk_bytes);
  to.setFdCount(from.fd_count);
  to.setTableBytes(from.table_bytes);
  to.setIpcHandle(data_reader(from.ipc_handle));
}

void put(wire::Status::Builder to, const StatusReply& from) {
  put(to.initVersion(), from.version);
  to.setUptimeMs(from.uptime_ms);
  put_each(to.initDevices(size32(from.devices)), from.devices, kPutOne);
  put_each(to.initModels(size32(from.models)), from.models, kPutOne);
  to.setSessionCount(from.session_count);
  to.setLeaseCount(from.lease_count);
  to.setFdCount(from.fd_count);
  to.setRssBytes(from.rss_bytes);
}

void put(wire::Memory::Builder to, const MemoryReply& from) {
  put(to.initStatus(), from.status);
  put_each(to.initLeases(size32(from.leases)), from.leases, kPutOne);
  put_each(to.initGpus(size32(from.gpus)), from.gpus, kPutOne);
  to.setProblem(text_reader(from.problem));
}

void put(wire::Verified::Builder to, const VerifiedReply& from) {
  to.setBlocks(from.blocks);
  put_numbers(to.initBadBlocks(size32(from.bad_blocks)), from.bad_blocks);
  auto tensors = to.initBadTensors(size32(from.bad_tensors));
  for (uint32_t i = 0; i < from.bad_tensors.size(); ++i) tensors.set(i, text_reader(from.bad_tensors[i]));
  to.setElapsedMs(from.elapsed_ms);
  to.setBytes(from.bytes);
}

void put(wire::Event::Builder to, const EventReply& from) {
  std::visit(
      Overloaded{[&](const PublishedEvent& e) { put(to.initPublished(), e.model); },
                 [&](const DrainRequestedEvent& e) { put(to.initDrainRequested(), e.model); },
                 [&](const ShuttingDownEvent&) { to.setShuttingDown(); }, [&](const LostEvent& e) { put(to.initLost(), e.model); }},
      from.event);
}

void put(wire::Job::Builder to, const Job& from) {
  if (const auto* verify = std::get_if<VerifyJob>(&from.kind)) {
    to.setVerify();
    put_numbers(to.initChunkSizes(size32(verify->chunk_bytes)), verify->chunk_bytes);
    to.setArenaBytes(verify->arena_bytes);
  } else if (const auto* probe = std::get_if<ProbeJob>(&from.kind)) {
    to.initProbe().setDeep(probe->deep);
  } else {
    to.setLoad();
  }
  to.setBackend(text_reader(from.backend));
  to.setDevice(text_reader(from.device));
  to.setResidency(text_reader(from.residency));
  to.setChunkBytes(from.chunk_bytes);
  to.setThreads(from.threads);
  to.setBundleName(text_reader(from.bundle_name));
  to.setFdCount(from.fd_count);
  to.setTransport(text_reader(from.transport));
}

void put(wire::Planned::Builder to, const Planned& from) {
  to.setContentId(text_reader(from.content_id));
  to.setTensorsId(text_reader(from.tensors_id));
  to.setArenaBytes(from.arena_bytes);
  to.setResidentBytes(from.resident_bytes);
  to.setLogicalBytes(from.logical_bytes);
  to.setTensorCount(from.tensor_count);
  to.setChunkCount(from.chunk_count);
  put_each(to.initEncodings(size32(from.encodings)), from.encodings, kPutOne);
  to.setAvailableBytes(from.available_bytes);
}

void put(wire::LoadResult::Builder to, const LoadResult& from) {
  put_numbers(to.initChunkSizes(size32(from.chunk_bytes)), from.chunk_bytes);
  to.setTableBytes(from.table_bytes);
  to.setBlocks(from.blocks);
  to.setElapsedMs(from.elapsed_ms);
  to.setIpcHandle(data_reader(from.ipc_handle));
}

// --- decoding ---------------------------------------------------------------------------------------------------------------

/// Texts of requests become paths, names and arguments: a NUL byte would cut them short for the system, unseen.
std::string get_request_text(FieldDecoder& fields, capnp::Text::Reader reader, std::string_view field) {
  std::string text = fields.text(reader, field, kMaxTextBytes);
  if (text.find('\0') != std::string::npos) {
    fields.fail(Status::invalid_argument(std::string(field) + ": holds a NUL byte"));
    text.clear();
  }
  return text;
}

std::string get_model_name(FieldDecoder& fields, capnp::Text::Reader reader, std::string_view field) {
  std::string text = fields.text(reader, field, kMaxModelNameBytes);
  if (fields.ok() && !valid_model_name(text)) {
    fields.fail(
        Status::invalid_argument(std::string(field) + ": '" + printable(text, 80) +
                                 "' is no model name: letters, digits and . _ - : in parts separated by /, each part beginning "
                                 "with a letter or a digit"));
  }
  return text;
}

std::string get_text(FieldDecoder& fields, capnp::Text::Reader reader, std::string_view field) {
  return fields.text(reader, field, kMaxTextBytes);
}

std::string get_transport(FieldDecoder& fields, capnp::Text::Reader reader, std::string_view field) {
  std::string text = get_request_text(fields, reader, field);
  if (fields.ok() && !text.empty() && text != "fd" && text != "legacy") {
    fields.fail(Status::invalid_argument(std::string(field) + ": '" + printable(text, 80) + "' is no transport: fd or legacy"));
  }
  return text;
}

/// None, or a whole cudaIpcMemHandle_t.
std::vector<std::byte> get_ipc_handle(FieldDecoder& fields, capnp::Data::Reader reader, std::string_view field) {
  if (reader.size() != 0 && reader.size() != kIpcHandleBytes) {
    fields.fail(Status::invalid_argument(std::string(field) + ": " + std::to_string(reader.size()) + " bytes, none or " +
                                         std::to_string(kIpcHandleBytes) + " are allowed"));
    return {};
  }
  const auto* begin = reinterpret_cast<const std::byte*>(reader.begin());
  return {begin, begin + reader.size()};
}

std::vector<uint64_t> get_numbers(FieldDecoder& fields, capnp::List<uint64_t>::Reader list, std::string_view field) {
  std::vector<uint64_t> numbers;
  const uint32_t count = fields.count(list.size(), field, kMaxListItems);
  numbers.reserve(count);
  for (uint32_t i = 0; i < count; ++i) numbers.push_back(list[i]);
  return numbers;
}

/// A list of structs, each by fn(fields, reader); ends at the first fault.
template <typename List, typename Fn>
auto get_each(FieldDecoder& fields, List list, std::string_view field, Fn&& fn) {
  std::vector<std::decay_t<decltype(fn(fields, list[0]))>> items;
  const uint32_t count = fields.count(list.size(), field, kMaxListItems);
  for (uint32_t i = 0; i < count && fields.ok(); ++i) items.push_back(fn(fields, list[i]));
  return items;
}

Status get_error(FieldDecoder& fields, wire::Error::Reader from) {
  const uint16_t code = from.getCode();
  if (code == 0) fields.fail(Status::invalid_argument("error.code: 0 is no error"));
  const std::string message = get_text(fields, from.getMessage(), "error.message");
  return {code <= kLastStatusCode ? static_cast<StatusCode>(code) : StatusCode::kInternal, message};
}

HelloReply get_hello(FieldDecoder& fields, wire::HelloReply::Reader from) {
  HelloReply to;
  to.build = get_text(fields, from.getBuild(), "hello.build");
  to.protocol_version = from.getProtocolVersion();
  to.backend = get_text(fields, from.getBackend(), "hello.backend");
  to.instance = from.getInstance();
  to.pid = from.getPid();
  to.backend_reason = get_text(fields, from.getBackendReason(), "hello.backendReason");
  return to;
}

GenerationState get_state(FieldDecoder& fields, wire::GenerationState from) {
  const auto number = static_cast<uint16_t>(from);
  if (number >= kGenerationStates) {
    fields.fail(Status::invalid_argument("model.state: " + std::to_string(number) + " is no state that this build knows"));
  }
  return fields.ok() ? static_cast<GenerationState>(number) : GenerationState{};
}

EncodingSum get_encoding_sum(FieldDecoder& fields, wire::EncodingSum::Reader from) {
  EncodingSum to;
  to.encoding = get_text(fields, from.getEncoding(), "encodings.encoding");
  to.tensors = from.getTensors();
  to.logical_bytes = from.getLogicalBytes();
  to.resident_bytes = from.getResidentBytes();
  return to;
}

ModelSummary get_model(FieldDecoder& fields, wire::Model::Reader from) {
  ModelSummary to;
  to.name = fields.text(from.getName(), "model.name", kMaxModelNameBytes);
  to.generation = from.getGeneration();
  to.state = get_state(fields, from.getState());
  to.content_id = get_text(fields, from.getContentId(), "model.contentId");
  to.device = get_text(fields, from.getDevice(), "model.device");
  to.shard = from.getShard();
  to.transport = get_text(fields, from.getTransport(), "model.transport");
  to.logical_bytes = from.getLogicalBytes();
  to.resident_bytes = from.getResidentBytes();
  to.tensor_count = from.getTensorCount();
  to.lease_count = from.getLeaseCount();
  to.orphan_count = from.getOrphanCount();
  to.progress_bytes = from.getProgressBytes();
  to.failure = get_text(fields, from.getFailure(), "model.failure");
  to.residency = get_text(fields, from.getResidency(), "model.residency");
  to.source = get_text(fields, from.getSource(), "model.source");
  to.tensors_id = get_text(fields, from.getTensorsId(), "model.tensorsId");
  to.encodings = get_each(fields, from.getEncodings(), "model.encodings", get_encoding_sum);
  return to;
}

LeaseSummary get_lease(FieldDecoder& fields, wire::Lease::Reader from) {
  LeaseSummary to;
  to.id = from.getId();
  to.model = fields.text(from.getModel(), "lease.model", kMaxModelNameBytes);
  to.generation = from.getGeneration();
  to.content_id = get_text(fields, from.getContentId(), "lease.contentId");
  to.pid = from.getPid();
  to.uid = from.getUid();
  to.command = get_text(fields, from.getCommand(), "lease.command");
  to.age_ms = from.getAgeMs();
  to.bytes = from.getBytes();
  to.orphan = from.getOrphan();
  to.device = get_text(fields, from.getDevice(), "lease.device");
  return to;
}

DeviceSummary get_device(FieldDecoder& fields, wire::Device::Reader from) {
  DeviceSummary to;
  to.uuid = get_text(fields, from.getUuid(), "device.uuid");
  to.name = get_text(fields, from.getName(), "device.name");
  to.total_bytes = from.getTotalBytes();
  to.budget_bytes = from.getBudgetBytes();
  to.owned_bytes = from.getOwnedBytes();
  to.leased_bytes = from.getLeasedBytes();
  to.draining_bytes = from.getDrainingBytes();
  to.orphan_bytes = from.getOrphanBytes();
  to.loading_bytes = from.getLoadingBytes();
  to.free_bytes = from.getFreeBytes();
  to.fd_only_bytes = from.getFdOnlyBytes();
  return to;
}

GpuSummary get_gpu(FieldDecoder& fields, wire::Gpu::Reader from) {
  GpuSummary to;
  to.uuid = get_text(fields, from.getUuid(), "gpu.uuid");
  to.name = get_text(fields, from.getName(), "gpu.name");
  to.total_bytes = from.getTotalBytes();
  to.used_bytes = from.getUsedBytes();
  to.free_bytes = from.getFreeBytes();
  to.nvml_known = from.getNvmlKnown();
  to.minor = from.getMinor();
  to.persistence = from.getPersistence();
  to.compute_major = from.getComputeMajor();
  to.compute_minor = from.getComputeMinor();
  to.vmm = from.getVmm();
  to.fd_handles = from.getFdHandles();
  to.read_only_map = from.getReadOnlyMap();
  to.granularity_bytes = from.getGranularityBytes();
  to.problem = get_text(fields, from.getProblem(), "gpu.problem");
  return to;
}

ProbeReply get_probe(FieldDecoder& fields, wire::Probe::Reader from) {
  ProbeReply to;
  to.driver_version = get_text(fields, from.getDriverVersion(), "probe.driverVersion");
  to.cuda_version = from.getCudaVersion();
  to.gpus = get_each(fields, from.getGpus(), "probe.gpus", get_gpu);
  to.problem = get_text(fields, from.getProblem(), "probe.problem");
  to.nvml_problem = get_text(fields, from.getNvmlProblem(), "probe.nvmlProblem");
  return to;
}

CheckSummary get_check(FieldDecoder& fields, wire::Check::Reader from) {
  CheckSummary to;
  to.name = get_text(fields, from.getName(), "check.name");
  if (from.getLevel() >= kCheckLevels) {
    fields.fail(Status::invalid_argument("check.level: " + std::to_string(from.getLevel()) + " is no level that this build knows"));
  } else {
    to.level = static_cast<CheckSummary::Level>(from.getLevel());
  }
  to.detail = get_text(fields, from.getDetail(), "check.detail");
  to.advice = get_text(fields, from.getAdvice(), "check.advice");
  return to;
}

AcquiredReply get_acquired(FieldDecoder& fields, wire::Acquired::Reader from) {
  AcquiredReply to;
  to.lease = from.getLease();
  to.model = get_model(fields, from.getModel());
  to.arena_bytes = from.getArenaBytes();
  to.chunk_bytes = get_numbers(fields, from.getChunkBytes(), "acquired.chunkBytes");
  to.fd_count = from.getFdCount();
  to.table_bytes = from.getTableBytes();
  to.ipc_handle = get_ipc_handle(fields, from.getIpcHandle(), "acquired.ipcHandle");
  return to;
}

StatusReply get_status(FieldDecoder& fields, wire::Status::Reader from) {
  StatusReply to;
  to.version = get_hello(fields, from.getVersion());
  to.uptime_ms = from.getUptimeMs();
  to.devices = get_each(fields, from.getDevices(), "status.devices", get_device);
  to.models = get_each(fields, from.getModels(), "status.models", get_model);
  to.session_count = from.getSessionCount();
  to.lease_count = from.getLeaseCount();
  to.fd_count = from.getFdCount();
  to.rss_bytes = from.getRssBytes();
  return to;
}

MemoryReply get_memory(FieldDecoder& fields, wire::Memory::Reader from) {
  MemoryReply to;
  to.status = get_status(fields, from.getStatus());
  to.leases = get_each(fields, from.getLeases(), "memory.leases", get_lease);
  to.gpus = get_each(fields, from.getGpus(), "memory.gpus", get_gpu);
  to.problem = get_text(fields, from.getProblem(), "memory.problem");
  return to;
}

VerifiedReply get_verified(FieldDecoder& fields, wire::Verified::Reader from) {
  VerifiedReply to;
  to.blocks = from.getBlocks();
  to.bad_blocks = get_numbers(fields, from.getBadBlocks(), "verified.badBlocks");
  to.bad_tensors = get_each(fields, from.getBadTensors(), "verified.badTensors",
                            [](FieldDecoder& f, capnp::Text::Reader text) { return get_text(f, text, "verified.badTensors"); });
  to.elapsed_ms = from.getElapsedMs();
  to.bytes = from.getBytes();
  return to;
}

/// A union member that a newer peer may send.
void fail_unknown(FieldDecoder& fields, std::string_view what, uint32_t which) {
  fields.fail(Status::unsupported("unknown kind of " + std::string(what) + " (" + std::to_string(which) +
                                  "): the peer is newer than this build"));
}

EventReply get_event(FieldDecoder& fields, wire::Event::Reader from) {
  switch (from.which()) {
    case wire::Event::PUBLISHED:
      return {PublishedEvent{get_model(fields, from.getPublished())}};
    case wire::Event::DRAIN_REQUESTED:
      return {DrainRequestedEvent{get_model(fields, from.getDrainRequested())}};
    case wire::Event::SHUTTING_DOWN:
      return {ShuttingDownEvent{}};
    case wire::Event::LOST:
      return {LostEvent{get_model(fields, from.getLost())}};
  }
  fail_unknown(fields, "event", from.which());
  return {};
}

Job get_job(FieldDecoder& fields, wire::Job::Reader from) {
  Job to;
  switch (from.which()) {
    case wire::Job::LOAD:
      break;
    case wire::Job::VERIFY:
      to.kind = VerifyJob{get_numbers(fields, from.getChunkSizes(), "job.chunkSizes"), from.getArenaBytes()};
      break;
    case wire::Job::PROBE:
      to.kind = ProbeJob{from.getProbe().getDeep()};
      break;
    default:
      fail_unknown(fields, "job", from.which());
  }
  to.backend = get_request_text(fields, from.getBackend(), "job.backend");
  to.device = get_request_text(fields, from.getDevice(), "job.device");
  to.residency = get_request_text(fields, from.getResidency(), "job.residency");
  to.chunk_bytes = from.getChunkBytes();
  to.threads = from.getThreads();
  to.bundle_name = get_request_text(fields, from.getBundleName(), "job.bundleName");
  to.fd_count = from.getFdCount();
  to.transport = get_transport(fields, from.getTransport(), "job.transport");
  return to;
}

Planned get_planned(FieldDecoder& fields, wire::Planned::Reader from) {
  Planned to;
  to.content_id = get_text(fields, from.getContentId(), "planned.contentId");
  to.tensors_id = get_text(fields, from.getTensorsId(), "planned.tensorsId");
  to.arena_bytes = from.getArenaBytes();
  to.resident_bytes = from.getResidentBytes();
  to.logical_bytes = from.getLogicalBytes();
  to.tensor_count = from.getTensorCount();
  to.chunk_count = from.getChunkCount();
  to.encodings = get_each(fields, from.getEncodings(), "planned.encodings", get_encoding_sum);
  to.available_bytes = from.getAvailableBytes();
  return to;
}

LoadResult get_load_result(FieldDecoder& fields, wire::LoadResult::Reader from) {
  LoadResult to;
  to.chunk_bytes = get_numbers(fields, from.getChunkSizes(), "verified.chunkSizes");
  to.table_bytes = from.getTableBytes();
  to.blocks = from.getBlocks();
  to.elapsed_ms = from.getElapsedMs();
  to.ipc_handle = get_ipc_handle(fields, from.getIpcHandle(), "verified.ipcHandle");
  return to;
}

AcquireRequest get_acquire(FieldDecoder& fields, wire::Acquire::Reader from) {
  return {get_model_name(fields, from.getModel(), "acquire.model"), get_request_text(fields, from.getDevice(), "acquire.device"),
          from.getWaitMs(), get_request_text(fields, from.getContentId(), "acquire.contentId")};
}
LoadRequest get_load(FieldDecoder& fields, wire::Load::Reader from) {
  return {get_model_name(fields, from.getModel(), "load.model"), get_request_text(fields, from.getPath(), "load.path"),
          get_request_text(fields, from.getDevice(), "load.device"), from.getTimeoutMs(),
          get_transport(fields, from.getTransport(), "load.transport")};
}
UnloadRequest get_unload(FieldDecoder& fields, wire::Unload::Reader from) {
  return {get_model_name(fields, from.getModel(), "unload.model"), get_request_text(fields, from.getDevice(), "unload.device"),
          from.getTimeoutMs()};
}

void get_request(FieldDecoder& fields, wire::Request::Reader from, Request& to) {
  to.id = from.getId();
  switch (from.which()) {
    case wire::Request::HELLO: {
      const wire::Hello::Reader hello = from.getHello();
      to.body = HelloRequest{get_request_text(fields, hello.getBuild(), "hello.build"),
                             get_request_text(fields, hello.getName(), "hello.name")};
      return;
    }
    case wire::Request::LIST:
      to.body = ListRequest{};
      return;
    case wire::Request::ACQUIRE:
      to.body = get_acquire(fields, from.getAcquire());
      return;
    case wire::Request::RELEASE:
      to.body = ReleaseRequest{from.getRelease()};
      return;
    case wire::Request::STATUS:
      to.body = StatusRequest{};
      return;
    case wire::Request::LOAD:
      to.body = get_load(fields, from.getLoad());
      return;
    case wire::Request::UNLOAD:
      to.body = get_unload(fields, from.getUnload());
      return;
    case wire::Request::LEASES:
      to.body = LeasesRequest{};
      return;
    case wire::Request::VERIFY:
      to.body = VerifyRequest{get_model_name(fields, from.getVerify(), "verify.model")};
      return;
    case wire::Request::VERSION:
      to.body = VersionRequest{};
      return;
    case wire::Request::MEMORY:
      to.body = MemoryRequest{};
      return;
    case wire::Request::DOCTOR:
      to.body = DoctorRequest{};
      return;
  }
  fail_unknown(fields, "request", from.which());
}

void get_response(FieldDecoder& fields, wire::Response::Reader from, Response& to) {
  to.id = from.getId();
  switch (from.which()) {
    case wire::Response::ERROR:
      to.body = get_error(fields, from.getError());
      return;
    case wire::Response::HELLO:
      to.body = get_hello(fields, from.getHello());
      return;
    case wire::Response::MODELS:
      to.body = ModelsReply{get_each(fields, from.getModels(), "models", get_model)};
      return;
    case wire::Response::ACQUIRED:
      to.body = get_acquired(fields, from.getAcquired());
      return;
    case wire::Response::RELEASED:
      to.body = ReleasedReply{};
      return;
    case wire::Response::STATUS:
      to.body = get_status(fields, from.getStatus());
      return;
    case wire::Response::LOADED:
      to.body = LoadedReply{get_model(fields, from.getLoaded())};
      return;
    case wire::Response::UNLOADED: {
      const wire::Unloaded::Reader unloaded = from.getUnloaded();
      to.body = UnloadedReply{unloaded.getFreed(), unloaded.getBytes(),
                              get_each(fields, unloaded.getHolders(), "unloaded.holders", get_lease)};
      return;
    }
    case wire::Response::LEASES:
      to.body = LeasesReply{get_each(fields, from.getLeases(), "leases", get_lease)};
      return;
    case wire::Response::VERIFIED:
      to.body = get_verified(fields, from.getVerified());
      return;
    case wire::Response::VERSION:
      to.body = VersionReply{get_hello(fields, from.getVersion())};
      return;
    case wire::Response::EVENT:
      to.body = get_event(fields, from.getEvent());
      return;
    case wire::Response::MORE_FDS:
      to.body = MoreFdsReply{from.getMoreFds()};
      return;
    case wire::Response::MEMORY:
      to.body = get_memory(fields, from.getMemory());
      return;
    case wire::Response::DOCTOR:
      to.body = DoctorReply{get_each(fields, from.getDoctor(), "doctor", get_check)};
      return;
  }
  fail_unknown(fields, "response", from.which());
}

void get_loader_message(FieldDecoder& fields, wire::LoaderMessage::Reader from, LoaderMessage& to) {
  switch (from.which()) {
    case wire::LoaderMessage::JOB:
      to.body = get_job(fields, from.getJob());
      return;
    case wire::LoaderMessage::PLANNED:
      to.body = get_planned(fields, from.getPlanned());
      return;
    case wire::LoaderMessage::ADMITTED:
      to.body = Admitted{};
      return;
    case wire::LoaderMessage::CHUNKS:
      to.body = Chunks{from.getChunks()};
      return;
    case wire::LoaderMessage::RECEIVED:
      to.body = Received{from.getReceived()};
      return;
    case wire::LoaderMessage::PROGRESS:
      to.body = LoadProgress{from.getProgress()};
      return;
    case wire::LoaderMessage::VERIFIED:
      to.body = get_load_result(fields, from.getVerified());
      return;
    case wire::LoaderMessage::FAILED:
      to.body = get_error(fields, from.getFailed());
      return;
    case wire::LoaderMessage::SCRUBBED:
      to.body = get_verified(fields, from.getScrubbed());
      return;
    case wire::LoaderMessage::MORE_FDS:
      to.body = MoreFdsReply{from.getMoreFds()};
      return;
    case wire::LoaderMessage::PROBED:
      to.body = get_probe(fields, from.getProbed());
      return;
  }
  fail_unknown(fields, "loader message", from.which());
}

bool is_letter_or_digit(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9'); }

}  // namespace

std::string_view generation_state_name(GenerationState state) {
  switch (state) {
    case GenerationState::kLoading:
      return "loading";
    case GenerationState::kVerifying:
      return "verifying";
    case GenerationState::kReady:
      return "ready";
    case GenerationState::kPublished:
      return "published";
    case GenerationState::kDraining:
      return "draining";
    case GenerationState::kFreed:
      return "freed";
    case GenerationState::kFailed:
      return "failed";
    case GenerationState::kLost:
      return "lost";
  }
  return "unknown";
}

bool valid_model_name(std::string_view name) {
  if (name.empty() || name.size() > kMaxModelNameBytes || name.back() == '/') return false;
  bool part_begins = true;
  for (const char c : name) {
    const bool other = c == '.' || c == '_' || c == '-' || c == ':' || c == '/';
    if (!is_letter_or_digit(c) && (part_begins || !other)) return false;
    part_begins = c == '/';
  }
  return true;
}

std::string bounded_text(std::string_view text, size_t max_bytes) {
  const std::string escaped = is_utf8(text) ? std::string() : printable(text, 4 * text.size());
  const std::string_view valid = escaped.empty() ? text : std::string_view(escaped);
  if (valid.size() <= max_bytes) return std::string(valid);
  size_t cut = max_bytes - 3;
  while (cut > 0 && (static_cast<unsigned char>(valid[cut]) & 0xC0U) == 0x80U) --cut;
  return std::string(valid.substr(0, cut)) + "...";
}

std::vector<std::byte> encode(const Request& request) {
  const QuietKj quiet;
  capnp::MallocMessageBuilder message;
  auto to = message.initRoot<wire::Request>();
  to.setId(request.id);
  std::visit(
      Overloaded{[&](const HelloRequest& from) {
                   auto hello = to.initHello();
                   hello.setBuild(text_reader(from.build));
                   hello.setName(text_reader(from.name));
                 },
                 [&](const ListRequest&) { to.setList(); },
                 [&](const AcquireRequest& from) {
                   auto acquire = to.initAcquire();
                   acquire.setModel(text_reader(from.model));
                   acquire.setDevice(text_reader(from.device));
                   acquire.setWaitMs(from.wait_ms);
                   acquire.setContentId(text_reader(from.content_id));
                 },
                 [&](const ReleaseRequest& from) { to.setRelease(from.lease); }, [&](const StatusRequest&) { to.setStatus(); },
                 [&](const LoadRequest& from) {
                   auto load = to.initLoad();
                   load.setModel(text_reader(from.model));
                   load.setPath(text_reader(from.path));
                   load.setDevice(text_reader(from.device));
                   load.setTimeoutMs(from.timeout_ms);
                   load.setTransport(text_reader(from.transport));
                 },
                 [&](const UnloadRequest& from) {
                   auto unload = to.initUnload();
                   unload.setModel(text_reader(from.model));
                   unload.setDevice(text_reader(from.device));
                   unload.setTimeoutMs(from.timeout_ms);
                 },
                 [&](const LeasesRequest&) { to.setLeases(); },
                 [&](const VerifyRequest& from) { to.setVerify(text_reader(from.model)); },
                 [&](const VersionRequest&) { to.setVersion(); }, [&](const MemoryRequest&) { to.setMemory(); },
                 [&](const DoctorRequest&) { to.setDoctor(); }},
      request.body);
  return flatten(message);
}

std::vector<std::byte> encode(const Response& response) {
  const QuietKj quiet;
  capnp::MallocMessageBuilder message;
  auto to = message.initRoot<wire::Response>();
  to.setId(response.id);
  std::visit(
      Overloaded{[&](const Status& from) { put(to.initError(), from); }, [&](const HelloReply& from) { put(to.initHello(), from); },
                 [&](const ModelsReply& from) { put_each(to.initModels(size32(from.models)), from.models, kPutOne); },
                 [&](const AcquiredReply& from) { put(to.initAcquired(), from); }, [&](const ReleasedReply&) { to.setReleased(); },
                 [&](const StatusReply& from) { put(to.initStatus(), from); },
                 [&](const LoadedReply& from) { put(to.initLoaded(), from.model); },
                 [&](const UnloadedReply& from) {
                   auto unloaded = to.initUnloaded();
                   unloaded.setFreed(from.freed);
                   unloaded.setBytes(from.bytes);
                   put_each(unloaded.initHolders(size32(from.holders)), from.holders, kPutOne);
                 },
                 [&](const LeasesReply& from) { put_each(to.initLeases(size32(from.leases)), from.leases, kPutOne); },
                 [&](const VerifiedReply& from) { put(to.initVerified(), from); },
                 [&](const VersionReply& from) { put(to.initVersion(), from.version); },
                 [&](const EventReply& from) { put(to.initEvent(), from); },
                 [&](const MoreFdsReply& from) { to.setMoreFds(from.count); },
                 [&](const MemoryReply& from) { put(to.initMemory(), from); },
                 [&](const DoctorReply& from) { put_each(to.initDoctor(size32(from.checks)), from.checks, kPutOne); }},
      response.body);
  return flatten(message);
}

std::vector<std::byte> encode(const LoaderMessage& loader_message) {
  const QuietKj quiet;
  capnp::MallocMessageBuilder message;
  auto to = message.initRoot<wire::LoaderMessage>();
  std::visit(
      Overloaded{
          [&](const Job& from) { put(to.initJob(), from); }, [&](const Planned& from) { put(to.initPlanned(), from); },
          [&](const Admitted&) { to.setAdmitted(); }, [&](const Chunks& from) { to.setChunks(from.count); },
          [&](const Received& from) { to.setReceived(from.count); }, [&](const LoadProgress& from) { to.setProgress(from.bytes); },
          [&](const LoadResult& from) { put(to.initVerified(), from); }, [&](const Status& from) { put(to.initFailed(), from); },
          [&](const VerifiedReply& from) { put(to.initScrubbed(), from); },
          [&](const MoreFdsReply& from) { to.setMoreFds(from.count); },
          [&](const ProbeReply& from) { put(to.initProbed(), from); }},
      loader_message.body);
  return flatten(message);
}

// Filled in place and returned by name: g++ 12 takes a move of these variants for a read of uninitialised members.
Result<Request> decode_request(std::span<const std::byte> body) {
  Result<Request> result = Request{};
  Status status = read_message(
      body, "request", StatusCode::kInvalidArgument,
      [&](capnp::MessageReader& reader, FieldDecoder& fields) { get_request(fields, reader.getRoot<wire::Request>(), *result); });
  if (!status.ok()) result = std::move(status);
  return result;
}

Result<Response> decode_response(std::span<const std::byte> body) {
  Result<Response> result = Response{};
  Status status = read_message(
      body, "response", StatusCode::kInvalidArgument,
      [&](capnp::MessageReader& reader, FieldDecoder& fields) { get_response(fields, reader.getRoot<wire::Response>(), *result); });
  if (!status.ok()) result = std::move(status);
  return result;
}

Result<LoaderMessage> decode_loader_message(std::span<const std::byte> body) {
  Result<LoaderMessage> result = LoaderMessage{};
  Status status =
      read_message(body, "loader message", StatusCode::kInvalidArgument, [&](capnp::MessageReader& reader, FieldDecoder& fields) {
        get_loader_message(fields, reader.getRoot<wire::LoaderMessage>(), *result);
      });
  if (!status.ok()) result = std::move(status);
  return result;
}

}  // namespace weightd::ipc
