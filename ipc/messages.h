// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "weightd/status.h"
#include "weightd/types.h"

/// The messages of protocol.capnp as plain structs. Decoding copies everything out once, checks every list length, text length and
/// UTF-8, and keeps no reader (CO-119 to CO-123). Field meanings: protocol.capnp.
namespace weightd::ipc {

/// Limits of decoding; over them: kInvalidArgument that names the field. Nesting is at most 16 pointers deep.
inline constexpr uint32_t kMaxTextBytes = 4096;      // paths, messages
inline constexpr uint32_t kMaxModelNameBytes = 255;
inline constexpr uint32_t kMaxListItems = 65'536;

/// The rule for names that clients ask for: 1 to kMaxModelNameBytes bytes of ASCII letters, digits, '.', '_', '-', ':' in parts separated
/// by '/', each of which begins with a letter or a digit ("qwen3-8b", "org/model:v2"; not "../x", "-x", "a//b"). So a name is safe in
/// a log line, a metrics label and a file name's part. Decoding applies it to acquire, load, unload and verify.
[[nodiscard]] bool valid_model_name(std::string_view name);
/// `text` as it may be sent: valid UTF-8 (else escaped as printable() does), cut at a character with "..." to at most max_bytes (>= 4).
[[nodiscard]] std::string bounded_text(std::string_view text, size_t max_bytes = kMaxTextBytes);

enum class GenerationState : uint16_t { kLoading, kVerifying, kReady, kPublished, kDraining, kFreed, kFailed, kLost };
[[nodiscard]] std::string_view generation_state_name(GenerationState state);

struct EncodingSum {
  std::string encoding;
  uint64_t tensors = 0, logical_bytes = 0, resident_bytes = 0;
};
struct ModelSummary {
  std::string name;
  uint64_t generation = 0;
  GenerationState state{};
  std::string content_id, device;
  uint32_t shard = 0;
  std::string transport;
  uint64_t logical_bytes = 0, resident_bytes = 0, tensor_count = 0;
  uint32_t lease_count = 0, orphan_count = 0;
  uint64_t progress_bytes = 0;
  std::string failure, residency, source, tensors_id;
  std::vector<EncodingSum> encodings;
};
struct LeaseSummary {
  uint64_t id = 0;
  std::string model;
  uint64_t generation = 0;
  std::string content_id;
  int32_t pid = 0;
  uint32_t uid = 0;
  std::string command;
  uint64_t age_ms = 0, bytes = 0;
  bool orphan = false;
  std::string device;
};
struct DeviceSummary {
  std::string uuid, name;
  uint64_t total_bytes = 0, budget_bytes = 0, owned_bytes = 0, leased_bytes = 0, draining_bytes = 0, orphan_bytes = 0,
           loading_bytes = 0, free_bytes = 0, fd_only_bytes = 0;
};
struct GpuSummary {
  std::string uuid, name;
  uint64_t total_bytes = 0, used_bytes = 0, free_bytes = 0;
  bool nvml_known = false;
  int32_t minor = -1;
  int8_t persistence = -1;
  uint32_t compute_major = 0, compute_minor = 0;
  bool vmm = false, fd_handles = false;
  int8_t read_only_map = -1;
  uint64_t granularity_bytes = 0;
  std::string problem;
};
struct CheckSummary {
  enum class Level : uint16_t { kGood, kWarning, kFailure };
  std::string name;
  Level level{};
  std::string detail, advice;
};

inline constexpr size_t kIpcHandleBytes = 64;  // of a cudaIpcMemHandle_t

// Requests
struct HelloRequest { std::string build, name; };
struct ListRequest {};
struct AcquireRequest { std::string model, device; uint32_t wait_ms = 0; std::string content_id; };
struct ReleaseRequest { uint64_t lease = 0; };
struct StatusRequest {};
struct LoadRequest { std::string model, path, device; uint32_t timeout_ms = 0; std::string transport{}; };
struct UnloadRequest { std::string model, device; uint32_t timeout_ms = 0; };
struct LeasesRequest {};
struct VerifyRequest { std::string model; };
struct VersionRequest {};
struct MemoryRequest {};
struct DoctorRequest {};
struct Request {
  uint64_t id = 0;
  std::variant<HelloRequest, ListRequest, AcquireRequest, ReleaseRequest, StatusRequest, LoadRequest, UnloadRequest, LeasesRequest,
               VerifyRequest, VersionRequest, MemoryRequest, DoctorRequest> body;
};

// Responses
struct HelloReply { std::string build; uint16_t protocol_version = 0; std::string backend; uint64_t instance = 0; int32_t pid = 0; std::string backend_reason{}; };
struct ModelsReply { std::vector<ModelSummary> models; };
struct AcquiredReply {
  uint64_t lease = 0;
  ModelSummary model;
  uint64_t arena_bytes = 0;
  std::vector<uint64_t> chunk_bytes;
  uint32_t fd_count = 0;
  uint64_t table_bytes = 0;
  std::vector<std::byte> ipc_handle{};  // legacy: kIpcHandleBytes; else empty
};
struct ReleasedReply {};
struct StatusReply {
  HelloReply version;
  uint64_t uptime_ms = 0;
  std::vector<DeviceSummary> devices;
  std::vector<ModelSummary> models;
  uint32_t session_count = 0, lease_count = 0, fd_count = 0;
  uint64_t rss_bytes = 0;
};
struct LoadedReply { ModelSummary model; };
struct UnloadedReply { bool freed = false; uint64_t bytes = 0; std::vector<LeaseSummary> holders; };
struct LeasesReply { std::vector<LeaseSummary> leases; };
struct VerifiedReply {
  uint64_t blocks = 0;
  std::vector<uint64_t> bad_blocks;      // at most kMaxListItems are listed
  std::vector<std::string> bad_tensors;
  uint64_t elapsed_ms = 0, bytes = 0;
};
struct VersionReply { HelloReply version; };
struct MoreFdsReply { uint32_t count = 0; };
struct MemoryReply {
  StatusReply status;
  std::vector<LeaseSummary> leases;
  std::vector<GpuSummary> gpus;
  std::string problem;
};
struct DoctorReply { std::vector<CheckSummary> checks; };
struct PublishedEvent { ModelSummary model; };
struct DrainRequestedEvent { ModelSummary model; };
struct ShuttingDownEvent {};
struct LostEvent { ModelSummary model; };
struct EventReply { std::variant<PublishedEvent, DrainRequestedEvent, ShuttingDownEvent, LostEvent> event; };
struct Response {
  uint64_t id = 0;
  std::variant<Status, HelloReply, ModelsReply, AcquiredReply, ReleasedReply, StatusReply, LoadedReply, UnloadedReply, LeasesReply,
               VerifiedReply, VersionReply, EventReply, MoreFdsReply, MemoryReply, DoctorReply> body;  // Status: the error
};

// Loader channel
struct LoadJob {};
struct VerifyJob { std::vector<uint64_t> chunk_bytes; uint64_t arena_bytes = 0; };
struct ProbeJob { bool deep = false; };
struct Job {
  std::variant<LoadJob, VerifyJob, ProbeJob> kind;
  std::string backend, device, residency, transport;
  uint64_t chunk_bytes = 0;
  uint32_t threads = 0;
  std::string bundle_name;
  uint32_t fd_count = 0;
};
struct Planned {
  std::string content_id, tensors_id;
  uint64_t arena_bytes = 0, resident_bytes = 0, logical_bytes = 0, tensor_count = 0;
  uint32_t chunk_count = 0;
  std::vector<EncodingSum> encodings{};
  uint64_t available_bytes = 0;
};
struct Admitted {};
struct Chunks { uint32_t count = 0; };
struct Received { uint32_t count = 0; };
struct LoadProgress { uint64_t bytes = 0; };
struct LoadResult {
  std::vector<uint64_t> chunk_bytes;
  uint64_t table_bytes = 0, blocks = 0, elapsed_ms = 0;
  std::vector<std::byte> ipc_handle{};  // legacy: kIpcHandleBytes; else empty
};
struct ProbeReply {
  std::string driver_version;
  uint32_t cuda_version = 0;
  std::vector<GpuSummary> gpus;
  std::string problem, nvml_problem;
};
struct LoaderMessage {
  std::variant<Job, Planned, Admitted, Chunks, Received, LoadProgress, LoadResult, Status, VerifiedReply, MoreFdsReply, ProbeReply> body;
};

/// Bodies of frames (Cap'n Proto stream framing, a multiple of 8 bytes). encode never fails; what is over a limit, the peer's decoder refuses,
/// so callers bound what they echo (bounded_text). The message of a Status is bounded here.
[[nodiscard]] std::vector<std::byte> encode(const Request& request);
[[nodiscard]] std::vector<std::byte> encode(const Response& response);
[[nodiscard]] std::vector<std::byte> encode(const LoaderMessage& message);
/// kInvalidArgument: malformed, over a limit, invalid UTF-8, or (requests) a text that holds a NUL byte. kUnsupported: a union member that
/// this build does not know. An error code that this build does not know becomes kInternal, its message stays: every refusal is readable.
[[nodiscard]] Result<Request> decode_request(std::span<const std::byte> body);
[[nodiscard]] Result<Response> decode_response(std::span<const std::byte> body);
[[nodiscard]] Result<LoaderMessage> decode_loader_message(std::span<const std::byte> body);

/// The tensor table of a resident generation. Names are opaque bytes in UTF-8; there may be a million of them (CO-122). Planes are ranges of
/// the arena; offsets of planes that are not empty are multiples of 256.
///   raw  data = the bytes (data_bytes = logical_bytes); no windows, no records; n, k, batch 0; not merged
///   f12  BF16; batch matrices [n, k], all at least 1; logical_bytes = 2 * batch * n * k; data = the codes plane; list entries in the pool
struct StorageEntry {
  std::string name;
  Encoding encoding{};
  DType dtype{};
  bool merged = false;
  uint64_t n = 0, k = 0, batch = 0, logical_bytes = 0;
  uint64_t data_offset = 0, windows_offset = 0, records_offset = 0, resident_bytes = 0;  // arena offsets
  uint64_t data_bytes = 0, windows_bytes = 0, records_bytes = 0;                         // sizes of those planes
};
/// A tensor of the checkpoint. f12, not merged: shape is [..., n, k] with the leading dimensions multiplying to batch. Merged: shape is
/// [rows, k], and they are the storage's rows from row_begin. raw: as many bytes as the storage has. Several tensors may share a storage.
struct TensorEntry {
  std::string name;
  DType dtype{};
  Shape shape;
  uint32_t storage = 0;
  uint64_t row_begin = 0;
};
struct TensorTable {
  std::string content_id, residency;
  uint64_t arena_bytes = 0, pool_offset_bytes = 0, pool_bytes = 0;
  std::vector<StorageEntry> storages;
  std::vector<TensorEntry> tensors;
  std::vector<uint64_t> block_hashes;
};
inline constexpr uint64_t kMaxTableBytes = uint64_t{1} << 30;
inline constexpr uint32_t kMaxTableEntries = 1U << 24;         // storages; tensors
inline constexpr uint32_t kMaxTensorRank = 64;
inline constexpr uint64_t kMaxArenaBytes = uint64_t{1} << 48;  // also of a storage's logical bytes, so that sums and products are safe
inline constexpr uint64_t kHashBlockBytes = uint64_t{1} << 20;
[[nodiscard]] std::vector<std::byte> encode(const TensorTable& table);
/// Also checks what the structs above say, that every plane and the pool lie inside the arena, and that the arena is whole blocks with a
/// hash each: a client may form pointers to the planes, of the sizes told, without further checks. Whether an f12 storage's plane sizes
/// are those of its n, k and batch is for whoever decodes it (store/tile_layout.h). kCorruption names the entry; kResourceExhausted:
/// memory. Names need not be unique.
[[nodiscard]] Result<TensorTable> decode_table(std::span<const std::byte> bytes);

}  // namespace weightd::ipc
