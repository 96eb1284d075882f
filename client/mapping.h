// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "client/compute.h"
#include "client/fork_guard.h"
#include "ipc/messages.h"
#include "store/tile_layout.h"
#include "weightd/client.h"
#include "weightd/status.h"

namespace weightd::detail {

class Connection;

/// Where the bytes of one tensor lie: offsets into the arena. Filled from a checked table only.
struct TensorPlace {
  uint64_t data_offset = 0;     // raw: the tensor's first byte; f12: the codes plane of the storage
  uint64_t windows_offset = 0;  // f12
  uint64_t records_offset = 0;
  f12::Geometry geometry;  // f12: of the storage
  uint64_t row_begin = 0;  // f12: first row inside the storage
};

/// The tensors of one generation, found by name. Immutable after build(); owns everything, keeps no reader.
class TensorIndex {
 public:
  /// kCorruption: planes are not as large as the f12 layout (store/tile_layout.h) needs them. The rest has been checked by
  /// decode_table.
  [[nodiscard]] static Result<TensorIndex> build(ipc::TensorTable table);

  [[nodiscard]] const uint32_t* find(std::string_view name) const;
  [[nodiscard]] const std::vector<TensorInfo>& infos() const { return infos_; }
  [[nodiscard]] const TensorPlace& place(uint32_t index) const { return places_[index]; }
  [[nodiscard]] uint64_t pool_offset_bytes() const { return pool_offset_bytes_; }
  [[nodiscard]] uint64_t pool_bytes() const { return pool_bytes_; }
  [[nodiscard]] uint64_t allocated_bytes() const;

 private:
  void add(TensorInfo info, const TensorPlace& place);

  std::vector<TensorInfo> infos_;
  std::vector<TensorPlace> places_;
  std::unordered_map<std::string_view, uint32_t> by_name_;  // views of infos_
  uint64_t pool_offset_bytes_ = 0;
  uint64_t pool_bytes_ = 0;
};

/// One generation in this process: its arena, mapped once, and what the daemon knows of it. Shared by all leases that acquire()
/// gave out for it.
class Mapping {
 public:
  /// What the connection says about the daemon's side. All but kDetached change with the connection.
  enum class Link {
    kAttached,  // leased under `lease`
    kStale,     // the connection that held the lease is gone: lease again
    kDetached,  // the daemon does not have this content any more; the mapping is all that is left of it
  };

  /// Checks what came with `acquired` from the daemon process `instance`, and maps it. `fds`: the table, then the chunks.
  /// kCorruption, or what map_arena() says.
  [[nodiscard]] static Result<std::shared_ptr<Mapping>> make(std::shared_ptr<Connection> connection, uint64_t instance,
                                                             const ipc::AcquiredReply& acquired, std::vector<UniqueFd> fds);

  /// Holds off unmapping while it lives. Invalid when the mapping has ended.
  class Use {
   public:
    explicit Use(const Mapping& mapping) : lock_(mapping.use_mutex_), valid_(mapping.mapped_) {}
    [[nodiscard]] bool valid() const { return valid_; }

   private:
    std::shared_lock<std::shared_mutex> lock_;
    bool valid_;
  };

  /// Waits for every Use and, on a GPU, for the device; then unmaps. kFailedPrecondition: still mapped, to be tried again later.
  Status unmap();
  /// kFailedPrecondition: unmap() would be refused now.
  [[nodiscard]] Status may_unmap() const;

  /// Who computes. While a valid Use lives.
  [[nodiscard]] Compute& compute() const { return *compute_; }
  [[nodiscard]] const std::byte* base() const { return base_; }
  [[nodiscard]] uint64_t arena_bytes() const { return arena_bytes_; }
  [[nodiscard]] uint64_t mapped_bytes() const { return mapped_bytes_; }  // whole chunks
  [[nodiscard]] const TensorIndex& tensors() const { return tensors_; }
  [[nodiscard]] const ModelInfo& first_info() const { return first_info_; }  // as acquired; never changes
  [[nodiscard]] ModelInfo info() const;
  void set_info(ModelInfo info);
  void set_state(std::string state);
  /// The memory is gone (legacy transport: its owner ended); for ever.
  void set_lost();
  [[nodiscard]] bool lost() const { return lost_.load(std::memory_order_acquire); }
  [[nodiscard]] uint64_t instance() const { return instance_; }
  [[nodiscard]] const HomeProcess& home() const { return home_; }
  /// Null once unmapped: only leases that have not ended ask.
  [[nodiscard]] std::shared_ptr<Connection> connection() const { return connection_; }

  // Owned by the connection, under its mutexes:
  uint32_t holders = 0;
  Link link = Link::kAttached;
  uint64_t lease = 0;

 private:
  Mapping(std::shared_ptr<Connection> connection, uint64_t instance, TensorIndex tensors, std::unique_ptr<Compute> compute,
          ModelInfo info, uint64_t arena_bytes);

  HomeProcess home_;
  std::shared_ptr<Connection> connection_;
  const uint64_t instance_;
  TensorIndex tensors_;
  ModelInfo first_info_;
  uint64_t arena_bytes_, mapped_bytes_;
  mutable std::shared_mutex use_mutex_;
  bool mapped_ = true;
  std::unique_ptr<Compute> compute_;
  const std::byte* base_;  // stays when it is unmapped: who still reads there reads on his own account
  std::atomic<bool> lost_{false};
  mutable std::mutex info_mutex_;
  ModelInfo info_;
};

/// What one acquire() gave: a right to use the mapping, until end(). Models and tensors point here.
struct Lease : std::enable_shared_from_this<Lease> {
  explicit Lease(std::shared_ptr<Mapping> shared) : mapping(std::move(shared)) {}

  /// kForked, kRevoked, kLost, or success.
  [[nodiscard]] Status usable() const;
  /// The first call counts; `wait_for_daemon`: also waits for its answer. kFailedPrecondition: a stream is being captured. Where
  /// that is seen before anything is done, `wait_for_daemon` leaves the lease as it is; else it has ended, and unmapping is put
  /// off.
  Status end(bool wait_for_daemon);

  const std::shared_ptr<Mapping> mapping;
  std::atomic<bool> ended{false};
};

/// Ends the lease with the last Model that shares it, whatever tensors still point at it.
struct LeaseHold {
  explicit LeaseHold(std::shared_ptr<Lease> held) : lease(std::move(held)) {}
  ~LeaseHold() { (void)lease->end(false); }
  LeaseHold(const LeaseHold&) = delete;
  LeaseHold& operator=(const LeaseHold&) = delete;

  std::shared_ptr<Lease> lease;
};

[[nodiscard]] ModelInfo model_info(const ipc::ModelSummary& model);

}  // namespace weightd::detail
