// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "weightd/status.h"
#include "weightd/types.h"

namespace weightd {

struct ClientOptions {
  /// Data socket of the daemon; empty: $WEIGHTD_SOCKET, or /run/weightd/weightd.sock.
  std::string socket_path;
  std::string name;                                  // shown in the daemon's log; empty: the program's name
  std::chrono::milliseconds call_timeout{5'000};     // each call to the daemon, its reply included
  std::chrono::milliseconds reconnect_backoff{100};  // first pause between attempts after the daemon was lost; doubles to 5 s
};

struct ModelInfo {
  std::string name;
  std::string content_id;      // SHA-256 of the bundle's manifest, hexadecimal
  uint64_t generation = 0;
  std::string device;          // GPU UUID or "host"
  std::string state;           // "published", "draining", ...
  std::string residency;       // "fast"
  std::string transport;       // "fd"
  uint64_t logical_bytes = 0;  // of the BF16 checkpoint
  uint64_t resident_bytes = 0;
  uint64_t tensor_count = 0;
};

struct TensorInfo {
  std::string name;
  DType dtype{};
  Shape shape;
  Encoding encoding{};
  uint64_t logical_bytes = 0;   // of the decoded tensor
  uint64_t resident_bytes = 0;  // of its storage; tensors that share a storage report the same bytes
  bool merged = false;          // a merged matrix, not a tensor of the checkpoint
};

struct GemmOptions {
  int threads = 0;  // host backend: <= 0 one per core; joined before the return
};

namespace detail { class Connection; struct Lease; }
class Tensor;

/// A lease on one generation, mapped into this process. Cheap to copy: copies share the lease and its mapping, which end with
/// release() or with the last copy. One mapping per Client and generation, however often it is acquired. Thread-safe but for
/// release(), which must not run beside a call on the same model.
///
/// The weights stay usable while the daemon is away, restarts or ends. In a forked child every call returns kForked and touches nothing.
class Model {
 public:
  [[nodiscard]] const ModelInfo& info() const;
  /// All tensors of the checkpoint, in its order, then the merged matrices. Valid while a copy of the Model lives.
  [[nodiscard]] std::span<const TensorInfo> tensors() const;
  /// kNotFound: no such tensor; kRevoked after release(). Names are compared as bytes.
  [[nodiscard]] Result<Tensor> tensor(std::string_view name) const;

  struct Memory {
    uint64_t shared_bytes = 0;   // mapped from the daemon, the same pages in every process
    uint64_t private_bytes = 0;  // allocated here for this model (names, table)
  };
  [[nodiscard]] Memory memory() const;

  /// Unmaps and gives the lease back. Every Tensor of the model then answers kRevoked. Twice is fine. Works while the daemon is away.
  Status release();

 private:
  friend class Client;
  explicit Model(std::shared_ptr<detail::Lease> lease) : lease_(std::move(lease)) {}
  std::shared_ptr<detail::Lease> lease_;
};

/// One tensor of an acquired model. A view: cheap to copy; keeps the mapping's bookkeeping, not the lease, alive.
class Tensor {
 public:
  [[nodiscard]] const TensorInfo& info() const;

  /// raw tensors: the bytes, in the mapping, 256-byte aligned (16-byte for parts of others), valid until release(). Empty for coded ones.
  [[nodiscard]] std::span<const std::byte> data() const;

  /// Writes the original bytes, all of them, to `out`, which holds at least info().logical_bytes; no byte more is written.
  /// kInvalidArgument: too small (nothing written). kRevoked, kForked.
  Status decompress(std::span<std::byte> out, const GemmOptions& options = {}) const;
  /// The same for rows [begin, end): elements of the outermost dimension for rank 2, rows of all matrices in order for rank 3 and up.
  Status decompress_rows(uint64_t begin, uint64_t end, std::span<std::byte> out, const GemmOptions& options = {}) const;

  /// y[M, N] = x[M, K] · w[N, K]ᵀ for a BF16 tensor of rank 2; BF16 in and out; accumulation order and rounding as documented in
  /// kernels/LAYOUT.md ("host GEMM"): bits depend on weights and x only. Any M; row strides as types.h allows, also negative for
  /// x; y must not overlap x or the mapping. M = 0 writes nothing; K = 0 writes +0.
  /// kInvalidArgument: dtype, rank, shape, stride or overlap; y untouched. kRevoked, kForked.
  Status gemm(ConstBf16Matrix x, Bf16Matrix y, const GemmOptions& options = {}) const;
  /// The same with matrix `index` of a rank-3 tensor [E, N, K] (an expert).
  Status gemm(uint64_t index, ConstBf16Matrix x, Bf16Matrix y, const GemmOptions& options = {}) const;

 private:
  friend class Model;
  Tensor(std::shared_ptr<detail::Lease> lease, uint32_t index) : lease_(std::move(lease)), index_(index) {}
  std::shared_ptr<detail::Lease> lease_;
  uint32_t index_ = 0;
};

struct AcquireOptions {
  std::string device;                  // GPU UUID or "host"; empty: the only one that has the model
  std::chrono::milliseconds wait{0};   // wait this long for the model to be published
};

struct Event {
  enum class Kind { kPublished, kDrainRequested, kShuttingDown };
  Kind kind{};
  ModelInfo model;  // not for kShuttingDown
};

/// A connection to weightd. Starts no thread, installs no signal handler, writes to no stream. Thread-safe: calls are serialised.
/// A lost daemon is noticed at the next call, which reconnects (with back-off between failing attempts: kUnavailable at once inside
/// the pause) and leases every held model again by content id.
class Client {
 public:
  [[nodiscard]] static Result<Client> connect(const ClientOptions& options = {});

  [[nodiscard]] Result<std::vector<ModelInfo>> list();
  /// Leases and maps a model. The same generation again: the same mapping, counted. kNotFound, kPermissionDenied, kUnavailable,
  /// kDeadlineExceeded (waiting), kCorruption (chunks or table are not what the daemon said: the lease is given back at once).
  [[nodiscard]] Result<Model> acquire(std::string_view name, const AcquireOptions& options = {});

  /// A descriptor that polls readable when events wait or the daemon is lost; -1 while disconnected. Owned by the Client; changes
  /// with a reconnect.
  [[nodiscard]] int event_fd() const;
  /// What has arrived since the last call; reads the socket, never waits for it.
  [[nodiscard]] Result<std::vector<Event>> poll_events();

  [[nodiscard]] std::string daemon_version() const;  // of the last hello
  [[nodiscard]] std::string backend() const;         // "host" or "cuda"

 private:
  explicit Client(std::shared_ptr<detail::Connection> connection) : connection_(std::move(connection)) {}
  std::shared_ptr<detail::Connection> connection_;
};

/// "1.2.3 (abcdef0)": version and commit of this library.
[[nodiscard]] std::string_view version();

}  // namespace weightd
