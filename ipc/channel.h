// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/fd.h"
#include "ipc/frame.h"
#include "weightd/status.h"

namespace weightd::ipc {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

struct Frame {
  std::vector<std::byte> body;
  std::vector<UniqueFd> fds;
};

struct ChannelOptions {
  FrameLimits receive;                      // what this side accepts
  size_t max_queued_bytes = 4U << 20;       // output queue; over it the peer does not read: kResourceExhausted
};

/// Preamble and frames over one connected stream Unix socket, non-blocking. All reads are recvmsg: unexpected or truncated descriptors
/// are closed and end the connection (CO-113). No thread, no event loop: whoever owns it waits for readability or writability of fd().
/// After an error every later call of the same direction returns it again; the other direction goes on, so that a peer's last words can
/// be read after it hung up, and a refusal can be sent to one that broke the rules (CO-109). Not thread-safe. Buffers grow as bytes
/// arrive, never by the claimed size (CO-121).
class Channel {
 public:
  Channel(UniqueFd socket, const ChannelOptions& options);  // sets O_NONBLOCK; queues our preamble

  [[nodiscard]] int fd() const { return socket_.get(); }

  /// The next complete frame; nullopt when more bytes must arrive first. kUnavailable "closed by peer" at an orderly end between frames,
  /// kCorruption at an end inside one, kInvalidArgument for protocol violations, kResourceExhausted when this process may not open the
  /// descriptors that came. A peer of another protocol version is reported by peer_preamble(), not refused here.
  [[nodiscard]] Result<std::optional<Frame>> try_receive();
  /// What the peer sent first, once it arrived.
  [[nodiscard]] const std::optional<Preamble>& peer_preamble() const { return peer_; }
  /// When the first byte of an unfinished preamble or frame arrived: the owner enforces its message deadline from it (CO-115).
  [[nodiscard]] std::optional<Deadline> partial_since() const { return partial_since_; }

  /// Queues a frame (taking its descriptors) and writes what the socket takes. At most kMaxFdsPerFrame descriptors, a body of a multiple of
  /// 8 bytes (WEIGHTD_CHECK). kUnavailable: the peer hung up. kResourceExhausted: it does not read, and what waits for it exceeds
  /// max_queued_bytes (a frame that waits alone may be larger); the queue is dropped.
  Status send(Frame frame);
  /// Writes more of the queue. True when it is empty.
  [[nodiscard]] Result<bool> try_flush();
  [[nodiscard]] bool wants_write() const { return !queue_.empty(); }
  [[nodiscard]] size_t queued_bytes() const { return queued_bytes_; }

  /// Blocking forms for clients and the loader: wait with poll() until the deadline. kDeadlineExceeded otherwise.
  Status flush(Deadline deadline);
  [[nodiscard]] Result<Frame> receive(Deadline deadline);

 private:
  struct Queued {
    std::vector<std::byte> bytes;
    size_t written = 0;
    std::vector<UniqueFd> fds;
  };
  Status fail_receive(Status status);
  Status fail_send(Status status);
  /// Appends at most `want` bytes to in_ and descriptors to in_fds_. nullopt: nothing there yet; 0: the end.
  [[nodiscard]] Result<std::optional<size_t>> read_some(size_t want, uint32_t fds_allowed);
  /// Reads until in_ holds `size` bytes; false: more must arrive first.
  [[nodiscard]] Result<bool> fill(size_t size);

  UniqueFd socket_;
  ChannelOptions options_;
  std::optional<Preamble> peer_;
  std::optional<Deadline> partial_since_;
  std::vector<std::byte> in_;        // bytes of the part being read
  std::optional<FrameHeader> header_;
  std::vector<UniqueFd> in_fds_;
  std::deque<Queued> queue_;
  size_t queued_bytes_ = 0;
  Status receive_failure_, send_failure_;
};

/// Connects to a stream Unix socket. Paths over 107 bytes are refused with the limit and the length (CO-129). `path` may be
/// absolute or begin with '@' (abstract). kUnavailable: nobody listens there; the message says how to start the daemon.
/// kPermissionDenied: who may connect. A daemon that accepts nobody is waited for at most two seconds (kUnavailable).
[[nodiscard]] Result<UniqueFd> connect_unix(const std::string& path);
/// A connected pair, close-on-exec.
[[nodiscard]] Result<std::pair<UniqueFd, UniqueFd>> socket_pair();

/// Who is at the other end, by the kernel's word at connect time.
struct Peer {
  int32_t pid = 0;             // 0: of a PID namespace that we cannot see
  uint32_t uid = 65534, gid = 65534;
  std::vector<uint32_t> groups;
  UniqueFd pidfd;              // invalid when pid is unknown or the process is gone already
  uint64_t start_ticks = 0;    // of /proc/<pid>/stat, to tell a re-used pid; 0 unknown
  std::string command;         // /proc/<pid>/comm, printable
};
[[nodiscard]] Result<Peer> peer_of(int socket);

}  // namespace weightd::ipc
