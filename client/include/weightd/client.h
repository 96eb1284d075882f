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

struct CUstream_st;  // CUDA's: a cudaStream_t or CUstream is a pointer to it

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
  std::string content_id;  // SHA-256 of the bundle's manifest, hexadecimal
  uint64_t generation = 0;
  std::string device;          // GPU UUID or "host"
  std::string state;           // "published", "draining", ...; as the daemon last said. "detached": after a restart the daemon no
                               // longer had this content; the weights stay usable, and this process alone holds them. "lost": a
                               // legacy model whose memory is gone (kLost)
  std::string residency;       // "fast"
  std::string transport;       // "fd", or "legacy" (one allocation of the loader's; gone with it: kLost)
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
  int threads = 0;                // host: <= 0 one per core; joined before the return
  CUstream_st* stream = nullptr;  // GPU: where the work is launched, a stream of the GPU's primary context; null: the legacy default
  /// GPU: decompress and multiply with cuBLASLt: the bits of cuBLASLt on the original weights, at more bytes moved.
  bool exact = false;
  /// GPU: the weights may be read while the stream's previous kernel runs (programmatic dependent launch). Always safe for
  /// resident weights; x and y wait for that kernel in any case.
  bool overlap_previous = true;
  /// GPU: scratch of Tensor::workspace_bytes() for calls that need it, 256-byte aligned device memory, in use until the stream has
  /// passed the call, apart from x and y. Too small or empty: taken from a stream-ordered pool of this library's, one for each GPU,
  /// which keeps what it once had until a model on that GPU is unmapped.
  std::span<std::byte> workspace{};
};

namespace detail {
class Connection;
struct Lease;
}  // namespace detail
class Tensor;

/// A lease on one generation, mapped into this process. Cheap to copy: copies share the lease and its mapping, which end with
/// release() or with the last copy. One mapping per Client and generation, however often it is acquired; it ends with the last
/// lease on it. Thread-safe.
///
/// The end of a lease waits for decompress(), gather_rows() and gemm() calls in flight; bytes read through data() are the caller's to
/// mind.
///
/// On a GPU the bytes lie in the address space of that GPU, read-only, and every pointer that Tensor's calls take or give is a
/// device pointer. The same memory is mapped once in a process, whichever Clients lease it. Calls launch on the stream that they are
/// given and return; errors of the kernels show where CUDA shows them. The calls make the GPU's primary context current for
/// themselves and put back what was current; other GPUs get no context. The first model on a GPU makes that context if need be, and
/// the library keeps it until the process ends. Calls may be captured into graphs; the first gemm() of each kind on a GPU also loads
/// code (and cuBLASLt, where it is needed), so make one before.
///
/// Nothing in CUDA waits for kernels that still read memory which is unmapped. So the end of the last lease waits for all that the
/// process gave the GPU, and may block. That is impossible while a stream of the GPU is being captured: release() is then refused
/// (kFailedPrecondition, nothing changed), and where the last copy of a Model ends instead, unmapping is put off to the next
/// acquire() or end of a lease of its Client. CUDA shows this library only captures on streams that synchronize with the legacy
/// stream; a capture on a stream made as non-blocking is spoilt by the waiting: the lease has then ended, release() says
/// kFailedPrecondition, and unmapping is put off likewise.
///
/// The weights stay usable while the daemon is away, restarts or ends. In a forked child every call that can fail returns kForked,
/// data() is empty, and nothing is sent or unmapped on the parent's behalf. A moved-from Model may only be assigned or destroyed.
class Model {
 public:
  [[nodiscard]] ModelInfo info() const;  // also after release()
  /// All tensors of the checkpoint, in its order, then the merged matrices. Valid while a copy of the Model lives.
  [[nodiscard]] std::span<const TensorInfo> tensors() const;
  /// kNotFound: no such tensor; kRevoked after release(); kLost. Names are compared as bytes.
  [[nodiscard]] Result<Tensor> tensor(std::string_view name) const;

  struct Memory {
    uint64_t shared_bytes = 0;   // mapped from the daemon, the same pages in every process; 0 after release()
    uint64_t private_bytes = 0;  // allocated here for this model (names, table); kept while a Model or Tensor lives
  };
  [[nodiscard]] Memory memory() const;

  /// Unmaps and gives the lease back. Every Tensor of the model then answers kRevoked. Twice is fine. Works while the daemon is
  /// away: it is told after the next reconnect. Waits for the daemon's answer, unless another thread is in a call to the daemon
  /// (that thread passes the release on). kDeadlineExceeded: unmapped and sent, but not answered. kForked: nothing done.
  /// kFailedPrecondition: a stream is being captured (see above). kCuda: unmapped and given back, but work that it waited for failed.
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

  /// raw tensors: the bytes, in the mapping, 256-byte aligned, read-only, valid until the lease ends. Empty for coded ones and
  /// without a usable lease. On a GPU: device addresses, not for the CPU to read.
  [[nodiscard]] std::span<const std::byte> data() const;

  /// Writes the original bytes, all of them, to `out`, which holds at least info().logical_bytes; no byte more is written. On a GPU
  /// `out` is at a multiple of 2 for coded tensors; fast at a multiple of 16 with rows of a multiple of 8 elements.
  /// kInvalidArgument: too small, misaligned, or inside the mapping (nothing written). kRevoked, kForked, kLost, kCuda.
  Status decompress(std::span<std::byte> out, const GemmOptions& options = {}) const;
  /// The same for rows [begin, end): elements of the outermost dimension for rank 2, rows of all matrices in order for rank 3 and
  /// up; a scalar or a vector is one row. Rows of types under 8 bits must begin and end at whole bytes (kInvalidArgument).
  Status decompress_rows(uint64_t begin, uint64_t end, std::span<std::byte> out, const GemmOptions& options = {}) const;

  /// out[i, :] = w[rows[i], :], an embedding look-up, for a BF16 tensor of rank 2. Any row more than once; row stride of out as in
  /// gemm(). `rows` is aligned to its elements and, like the mapping, overlaps no output. On a GPU it is in device memory, and an
  /// index outside the tensor fills its row with NaN (0x7FFF); on the host such an index is kInvalidArgument, nothing written.
  Status gather_rows(std::span<const int32_t> rows, Bf16Matrix out, const GemmOptions& options = {}) const;
  Status gather_rows(std::span<const int64_t> rows, Bf16Matrix out, const GemmOptions& options = {}) const;

  /// y[M, N] = x[M, K] · w[N, K]ᵀ for a BF16 tensor of rank 2; BF16 in and out. Any M; with more than one row, row strides of at
  /// least the columns, never negative (with one row the stride says nothing); addresses at multiples of 2; y must not overlap x or
  /// the mapping. M = 0 writes nothing; K = 0 writes +0.
  ///
  /// On the host: accumulation order and rounding as documented in kernels/LAYOUT.md ("host GEMM"): bits depend on weights and x
  /// only. On a GPU: raw tensors by cuBLASLt; coded ones by the fused kernels (error bound in kernels/f12_cuda.h), or, where that is
  /// faster for the shape and cuBLASLt is on the machine, by decompression and cuBLASLt; always so with options.exact. Equal calls
  /// give equal bits; the bits of a row may differ between these ways, and so between token counts.
  ///
  /// kInvalidArgument: dtype, rank, shape, stride, address or overlap; y untouched. kRevoked, kForked, kLost, kCuda.
  /// kUnavailable: the call needs cuBLASLt (exact, raw), and it is not on this machine. kResourceExhausted: no scratch.
  Status gemm(ConstBf16Matrix x, Bf16Matrix y, const GemmOptions& options = {}) const;
  /// The same with matrix `index` of a rank-3 tensor [E, N, K] (an expert).
  Status gemm(uint64_t index, ConstBf16Matrix x, Bf16Matrix y, const GemmOptions& options = {}) const;

  /// The most scratch that a gemm() of this tensor needs, whatever M and options (GemmOptions::workspace): on a GPU the decompressed
  /// matrix and 32 MiB, or 32 MiB for raw ones. 0 on the host, for what has no gemm(), and without a usable lease.
  [[nodiscard]] uint64_t workspace_bytes() const;

 private:
  friend class Model;
  Tensor(std::shared_ptr<detail::Lease> lease, uint32_t index) : lease_(std::move(lease)), index_(index) {}
  std::shared_ptr<detail::Lease> lease_;
  uint32_t index_ = 0;
};

struct AcquireOptions {
  std::string device;                 // GPU UUID or "host"; empty: the only one that has the model
  std::chrono::milliseconds wait{0};  // wait this long for the model to be published
};

struct Event {
  /// kLost: the memory behind a legacy model is gone with its owner; from then on its calls return kLost.
  enum class Kind { kPublished, kDrainRequested, kShuttingDown, kLost };
  Kind kind{};
  ModelInfo model;  // not for kShuttingDown
};

/// A connection to weightd. Starts no thread, installs no signal handler, writes to no stream. Thread-safe: calls are serialised,
/// so a call waits for an acquire() with `wait` in another thread (ends of leases do not). A lost daemon is noticed at the next
/// call, which reconnects (with back-off between failing attempts: kUnavailable at once inside the pause) and leases every held
/// model again by content id; a model that the daemon does not have then is "detached" (ModelInfo::state). Models keep their
/// connection alive after the Client.
///
/// In a forked child every call returns kForked; the child's copies of the library's descriptors are closed at the fork. A child
/// may connect anew. A process may hold any number of Clients.
class Client {
 public:
  /// kUnavailable: nobody listens there. kUnsupported: daemon and library have no protocol version in common. kPermissionDenied,
  /// kInvalidArgument (the path), kDeadlineExceeded.
  [[nodiscard]] static Result<Client> connect(const ClientOptions& options = {});

  /// What this process may see.
  [[nodiscard]] Result<std::vector<ModelInfo>> list();
  /// Leases and maps a model. The same generation again: the same mapping, counted; each Model returned is released on its own.
  /// kNotFound, kPermissionDenied, kUnavailable, kDeadlineExceeded (waiting), kInvalidArgument (not a name a model can have),
  /// kResourceExhausted (descriptors, address space), kCorruption (chunks or table are not what the daemon said), kUnavailable (no
  /// driver, or a GPU that this process does not see: CUDA_VISIBLE_DEVICES), kUnsupported (this library was built without CUDA, or
  /// without code for the GPU), kForked (in a child of a process that had models on a GPU), kLost (legacy: the owner is gone), kCuda.
  /// On failure the lease is given back at once.
  [[nodiscard]] Result<Model> acquire(std::string_view name, const AcquireOptions& options = {});

  /// A descriptor that polls readable when events wait or the daemon is lost; -1 while disconnected. Owned by the Client; changes
  /// with a reconnect.
  [[nodiscard]] int event_fd() const;
  /// What has arrived since the last call, at most the last 1024 events. Does not wait for the daemon, unless it was lost: then it
  /// reconnects first, as every call does (kUnavailable, once the events that came before the loss have been returned).
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
