// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "base/fd.h"
#include "daemon/ledger.h"
#include "ipc/messages.h"
#include "weightd/status.h"

/// Names, generations, leases, orphans and everything that waits for them: the policy of the daemon as a pure state machine. It
/// opens nothing, closes nothing, waits for nothing and reads no clock. Every call appends what is to be done to an Effects.
namespace weightd::daemon {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;
using SessionId = uint64_t;  // 0: the daemon itself
using LeaseId = uint64_t;

/// The memory of one generation: a handle per chunk, and the table. Legacy transport: no descriptors of chunks but an IPC handle to
/// the one allocation, which a process owns. The registry moves it about and never looks at the handles.
struct ChunkSet {
  std::vector<UniqueFd> chunks;
  std::vector<uint64_t> chunk_bytes;
  UniqueFd table;
  uint64_t table_bytes = 0;
  std::vector<std::byte> ipc_handle;
};

struct Process {
  int32_t pid = 0;           // 0: unknown, of a PID namespace that we cannot see
  uint64_t start_ticks = 0;  // tells a re-used pid
  [[nodiscard]] bool known() const { return pid > 0; }
  auto operator<=>(const Process&) const = default;
};

struct SessionInfo {
  Process process;
  uint32_t uid = 0;
  std::string command;
};

/// Names a request, for its one answer.
struct Ticket {
  SessionId session = 0;
  uint64_t request = 0;
  auto operator<=>(const Ticket&) const = default;
};

struct Granted {
  LeaseId lease = 0;
  GenerationId generation = 0;
};
struct Released {};
struct Loaded {
  ipc::ModelSummary model;
};
struct Answer {
  Ticket ticket;
  std::variant<Status, Granted, Released, Loaded, ipc::UnloadedReply> result;  // Status: the error
};

struct Notice {
  enum class Kind { kPublished, kDrainRequested, kLost };
  Kind kind{};
  GenerationId generation = 0;
  ipc::ModelSummary model;
  std::set<SessionId> sessions;  // whom it concerns; empty for kPublished: everybody
};

/// What a call left to be done, in the order of the members.
struct Effects {
  struct Drop {
    GenerationId generation = 0;
    ChunkSet memory;
  };
  std::vector<GenerationId> start;   // begin a load job, report with planned() ... job_ended()
  std::vector<GenerationId> admit;   // tell the job that it may allocate
  std::vector<GenerationId> cancel;  // end the job, then report job_ended()
  std::vector<Drop> drop;            // close the memory, then report reclaimed()
  std::vector<Process> watch;        // tell process_ended() when it is gone: it has orphans
  std::vector<Notice> notices;
  std::vector<Answer> answers;
};

/// Where a generation lives. A name may have one published generation at each place.
struct Place {
  std::string device;
  uint32_t shard = 0;
  bool operator==(const Place&) const = default;
};

struct LoadCommand {
  std::string model, source, device;
  uint32_t shard = 0;
  std::string transport = "fd";  // or "legacy"
  [[nodiscard]] Place place() const { return {device, shard}; }
};

class Registry {
 public:
  struct Limits {
    uint32_t leases_per_session = 1024;
    uint32_t failed_shown = 64;  // failed loads that status remembers
  };
  Registry(Ledger ledger, const Limits& limits);

  // --- sessions and leases
  SessionId open_session(const SessionInfo& info);
  /// The connection ended. Leases that were not given back end with it, or become orphans when the process is known and lives.
  /// Its waiting requests are forgotten; a load that nobody waits for any more is cancelled.
  void close_session(SessionId session, bool process_lives, Effects& effects);
  void process_ended(const Process& process, Effects& effects);
  [[nodiscard]] bool has_session(SessionId session) const { return session == 0 || sessions_.count(session) > 0; }
  [[nodiscard]] bool has_orphans(const Process& process) const;

  /// Answers Granted, or: kNotFound (no such model, or not with that content), kFailedPrecondition (not published, and not
  /// waiting), kLost (its memory is gone and nothing loads it again), kDeadlineExceeded, kResourceExhausted (too many leases),
  /// kInvalidArgument (which device?). With a content id it
  /// grants that content only: a draining generation only to a process that has an orphan on it, and that orphan becomes the lease.
  void acquire(const Ticket& ticket, const ipc::AcquireRequest& request, Time now, Effects& effects);
  /// Answers Released, also for a lease that has ended. kNotFound: not a lease of this session.
  void release(const Ticket& ticket, LeaseId lease, Effects& effects);
  /// Ends a lease that was granted and could not be handed over.
  void take_back(LeaseId lease, Effects& effects);

  // --- loads
  /// Answers Loaded once the model is published, at once or later. The same model from the same source joins a load in progress.
  /// kAlreadyExists: the name has, or is being loaded from, something else. kCancelled: an unload came in between. Else why it
  /// failed.
  void load(const Ticket& ticket, const LoadCommand& command, std::optional<Time> deadline, Time now, Effects& effects);
  void planned(GenerationId generation, const ipc::Planned& plan, Effects& effects);
  void progress(GenerationId generation, uint64_t bytes);
  void uploaded(GenerationId generation);  // all chunks are held: verifying
  void verified(GenerationId generation, ChunkSet memory, Time now, Effects& effects);
  /// The job is over and its process gone; `status` says why unless it verified.
  void job_ended(GenerationId generation, const Status& status, Effects& effects);

  /// Legacy transport: the process that owns the memory of a published or draining generation is gone, and the memory with it.
  /// Leases stand until they are released; the generation stays as lost until an unload, or until the same name is published again
  /// there.
  void owner_lost(GenerationId generation, const std::string& why, Effects& effects);

  /// Takes the model out of service: published drains, loading is cancelled, lost is forgotten after its last lease. Answers
  /// UnloadedReply when all of it is gone, or at the deadline with who holds it. kNotFound: nothing of that name.
  void unload(const Ticket& ticket, const std::string& model, const std::string& device, Time deadline, Time now, Effects& effects);
  void reclaimed(GenerationId generation, Effects& effects);

  // --- time
  [[nodiscard]] std::optional<Time> next_deadline() const;
  void expire(Time now, Effects& effects);

  // --- views
  struct View {
    const ChunkSet* memory = nullptr;
    const ipc::Planned* plan = nullptr;
  };
  [[nodiscard]] std::optional<View> view(GenerationId generation) const;  // published or draining only
  /// Where a request for `model` on `device` (may be empty) goes. kNotFound: no such device; kInvalidArgument: which one?
  [[nodiscard]] Result<Place> resolve(const std::string& model, const std::string& device) const;
  [[nodiscard]] Result<GenerationId> published(const std::string& model, const std::string& device) const;
  [[nodiscard]] const LoadCommand* command(GenerationId generation) const;
  [[nodiscard]] ipc::ModelSummary summary(GenerationId generation) const;
  [[nodiscard]] std::vector<ipc::ModelSummary> models() const;
  [[nodiscard]] std::vector<ipc::LeaseSummary> leases(Time now) const;
  [[nodiscard]] std::vector<ipc::DeviceSummary> devices() const;
  /// Whether a load waits until something that is ending has given its memory back.
  [[nodiscard]] bool awaits_room() const;
  [[nodiscard]] uint32_t session_count() const { return static_cast<uint32_t>(sessions_.size()); }
  [[nodiscard]] uint32_t lease_count() const { return static_cast<uint32_t>(leases_.size()); }
  [[nodiscard]] Ledger& ledger() { return ledger_; }
  [[nodiscard]] const Ledger& ledger() const { return ledger_; }

 private:
  using State = ipc::GenerationState;
  struct Generation {
    LoadCommand command;
    State state = State::kLoading;
    bool cancelled = false;  // no longer wanted; waits for the end of its job
    bool awaits_room = false;
    bool unwanted = false;  // lost, and forgotten once its last lease ends
    std::optional<ipc::Planned> plan;
    uint64_t progress_bytes = 0;
    Status failure;
    ChunkSet memory;
  };
  struct Lease {
    GenerationId generation = 0;
    SessionId session = 0;  // 0: an orphan
    SessionInfo holder;
    Time since;
    uint32_t claims = 1;  // of an orphan: how many lost leases of its process it stands for
  };
  struct LoadWaiter {
    Ticket ticket;
    GenerationId generation = 0;
    std::optional<Time> deadline;
  };
  struct AcquireWaiter {
    Ticket ticket;
    ipc::AcquireRequest request;
    Time deadline;
  };
  struct UnloadWaiter {
    Ticket ticket;
    std::set<GenerationId> generations;
    uint64_t freed_bytes = 0;
    Time deadline;
  };

  std::optional<GenerationId> find(const std::string& model, const Place& place, State state) const;
  std::optional<GenerationId> find_loading(const std::string& model, const Place& place) const;
  std::pair<uint32_t, uint32_t> lease_counts(GenerationId generation) const;  // held by sessions, by orphans
  std::vector<ipc::LeaseSummary> holders(const std::set<GenerationId>& generations, Time now) const;
  ipc::LeaseSummary lease_summary(LeaseId id, const Lease& lease, Time now) const;
  std::optional<LeaseId> orphan_of(const Process& process, GenerationId generation) const;

  void move(Generation& generation, State to);
  std::optional<Answer> try_acquire(const Ticket& ticket, const ipc::AcquireRequest& request, bool waiting, Time now);
  Status why_not_published(const std::string& model, const Place& place) const;
  Answer grant(const Ticket& ticket, GenerationId generation, Time now);
  void adopt_orphan(const Process& process, GenerationId generation);
  void serve_acquire_waiters(Time now, Effects& effects);
  void fail_acquire_waiters(const LoadCommand& command, Effects& effects);
  void try_admit(GenerationId id, Effects& effects);
  void retry_admissions(Effects& effects);
  void answer_loads(GenerationId generation, const std::variant<Status, Loaded>& result, Effects& effects);
  void cancel_load(GenerationId id, const Status& why, Effects& effects);
  void cancel_unwanted_loads(Effects& effects);
  void refuse_load(GenerationId id, const Status& why, bool remember, Effects& effects);
  void drain(GenerationId id, Effects& effects);
  void free_if_unused(GenerationId id, Effects& effects);
  void forget_lost(const std::string& model, const Place& place, Effects& effects);
  void gone(GenerationId id, uint64_t freed_bytes, Effects& effects);
  bool forget_failures(const std::string& model, const Place& place);
  void forget_oldest_failures();

  Ledger ledger_;
  Limits limits_;
  uint64_t next_generation_ = 1;
  uint64_t next_lease_ = 1;
  uint64_t next_session_ = 1;
  std::map<SessionId, SessionInfo> sessions_;
  std::map<GenerationId, Generation> generations_;
  std::map<LeaseId, Lease> leases_;
  std::vector<LoadWaiter> load_waiters_;
  std::vector<AcquireWaiter> acquire_waiters_;
  std::vector<UnloadWaiter> unload_waiters_;
};

}  // namespace weightd::daemon
