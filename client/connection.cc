// SPDX-License-Identifier: Apache-2.0
#include "client/connection.h"

#include <errno.h>

#include <algorithm>
#include <utility>

#include "base/text.h"

namespace weightd::detail {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLongestPause{5'000};
constexpr milliseconds kLongestCall{std::chrono::hours(24 * 365)};  // so that sums of times do not overflow
constexpr size_t kMaxQueuedEvents = 1024;
constexpr size_t kMaxOwed = 1024;

// The peer is gone, as opposed to: it said something wrong. Only then is the same call worth a second attempt.
bool hung_up(const Status& failure) {
  return failure.code() == StatusCode::kUnavailable || failure.code() == StatusCode::kIo ||
         failure.code() == StatusCode::kCorruption;
}

Event event_of(const ipc::EventReply& reply) {
  Event event;
  if (const auto* published = std::get_if<ipc::PublishedEvent>(&reply.event)) {
    event.kind = Event::Kind::kPublished;
    event.model = model_info(published->model);
  } else if (const auto* drain = std::get_if<ipc::DrainRequestedEvent>(&reply.event)) {
    event.kind = Event::Kind::kDrainRequested;
    event.model = model_info(drain->model);
  } else if (const auto* lost = std::get_if<ipc::LostEvent>(&reply.event)) {
    event.kind = Event::Kind::kLost;
    event.model = model_info(lost->model);
  } else {
    event.kind = Event::Kind::kShuttingDown;
  }
  return event;
}

Status wrong_kind() { return Status::invalid_argument("the daemon's answer is of another kind than the call"); }

}  // namespace

class Connection::Turn {
 public:
  explicit Turn(Connection& connection) : connection_(connection), lock_(connection.mutex_) {}
  Turn(Connection& connection, std::try_to_lock_t) : connection_(connection), lock_(connection.mutex_, std::try_to_lock) {}
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  // Whoever queues after the last look finds the mutex free, or is seen by the look that follows the unlock.
  ~Turn() {
    while (lock_.owns_lock()) {
      (void)connection_.give_back_ended(false);
      lock_.unlock();
      const std::lock_guard ended_lock(connection_.ended_mutex_);
      if (!connection_.ended_.empty()) (void)lock_.try_lock();
    }
  }
  [[nodiscard]] bool mine() const { return lock_.owns_lock(); }

 private:
  Connection& connection_;
  std::unique_lock<std::mutex> lock_;
};

Connection::Connection(const ClientOptions& options, std::string socket_path, std::string name)
    : call_timeout_(std::clamp(options.call_timeout, milliseconds{0}, kLongestCall)),
      shortest_pause_(std::clamp(options.reconnect_backoff, milliseconds{0}, kLongestPause)),
      socket_path_(std::move(socket_path)),
      name_(std::move(name)),
      pause_(shortest_pause_) {}

Result<std::shared_ptr<Connection>> Connection::open(const ClientOptions& options) {
  std::string name =
      ipc::bounded_text(options.name.empty() ? program_invocation_short_name : options.name, ipc::kMaxModelNameBytes);
  std::shared_ptr<Connection> connection(
      new Connection(options, socket_path_or(options.socket_path, "WEIGHTD_SOCKET", "/run/weightd/weightd.sock"), std::move(name)));
  const Turn turn(*connection);
  WEIGHTD_RETURN_IF_ERROR(connection->reconnect(deadline_in(connection->call_timeout_)));
  return connection;
}

Status Connection::refuse_fork() const {
  return home_.surely_left() ? Status::forked("this client belongs to the parent of this process; connect again here") : Status();
}

Result<std::vector<ModelInfo>> Connection::list() {
  WEIGHTD_RETURN_IF_ERROR(refuse_fork());
  const Turn turn(*this);
  WEIGHTD_ASSIGN_OR_RETURN(const Rpc::Reply reply, ask(ipc::ListRequest{}, call_timeout_));
  const auto* models = std::get_if<ipc::ModelsReply>(&reply.body);
  if (models == nullptr) return wrong_kind();
  std::vector<ModelInfo> infos;
  infos.reserve(models->models.size());
  for (const ipc::ModelSummary& model : models->models) infos.push_back(model_info(model));
  return infos;
}

Result<std::shared_ptr<Lease>> Connection::acquire(std::string_view name, const AcquireOptions& options) {
  WEIGHTD_RETURN_IF_ERROR(refuse_fork());
  WEIGHTD_RETURN_IF_ERROR(check_model_name(name));
  WEIGHTD_RETURN_IF_ERROR(check_text("the device", options.device));
  unmap_put_off();
  const Turn turn(*this);
  const ipc::AcquireRequest request{std::string(name), options.device, wire_milliseconds(options.wait), ""};
  const milliseconds wait{request.wait_ms};
  WEIGHTD_ASSIGN_OR_RETURN(Rpc::Reply reply, ask(request, call_timeout_ + wait));
  const auto* acquired = std::get_if<ipc::AcquiredReply>(&reply.body);
  if (acquired == nullptr) return wrong_kind();
  Result<std::shared_ptr<Mapping>> mapping = share_or_map(*acquired, std::move(reply.fds));
  if (!mapping.ok()) return mapping.status().with_context("model '" + printable(name) + "'");
  return std::make_shared<Lease>(*std::move(mapping));
}

Result<std::vector<Event>> Connection::poll_events() {
  WEIGHTD_RETURN_IF_ERROR(refuse_fork());
  const Turn turn(*this);
  const Status connected = ensure_connected(deadline_in(call_timeout_));
  if (!connected.ok() && events_.empty()) return connected;
  std::vector<Event> events(std::make_move_iterator(events_.begin()), std::make_move_iterator(events_.end()));
  events_.clear();
  return events;
}

std::string Connection::daemon_version() const {
  if (home_.left()) return {};
  const std::lock_guard lock(hello_mutex_);
  return daemon_version_;
}

std::string Connection::backend() const {
  if (home_.left()) return {};
  const std::lock_guard lock(hello_mutex_);
  return backend_;
}

Status Connection::end(const std::shared_ptr<Mapping>& mapping, bool wait_for_daemon) {
  {
    const std::lock_guard lock(ended_mutex_);
    if (--mapping->holders != 0) return {};
  }
  const Status unmapped = mapping->unmap();
  const bool put_off = unmapped.code() == StatusCode::kFailedPrecondition;
  {
    const std::lock_guard lock(ended_mutex_);
    (put_off ? put_off_ : ended_).push_back(mapping);
  }
  if (put_off) return unmapped;
  unmap_put_off();
  const Turn turn(*this, std::try_to_lock);
  if (!turn.mine() || !wait_for_daemon) return unmapped;
  const Status told = give_back_ended(true);
  if (rpc_ != nullptr && rpc_->lost()) note_loss();
  // A daemon that came back learns of the end now, not at some later call.
  if (rpc_ == nullptr && !owed_.empty()) (void)ensure_connected(deadline_in(call_timeout_));
  return unmapped.ok() ? told : unmapped;
}

void Connection::unmap_put_off() {
  std::vector<std::shared_ptr<Mapping>> put_off;
  {
    const std::lock_guard lock(ended_mutex_);
    put_off.swap(put_off_);
  }
  for (std::shared_ptr<Mapping>& mapping : put_off) {
    const bool again = mapping->unmap().code() == StatusCode::kFailedPrecondition;
    const std::lock_guard lock(ended_mutex_);
    (again ? put_off_ : ended_).push_back(std::move(mapping));
  }
}

Status Connection::give_back_ended(bool wait_for_daemon) {
  std::vector<std::shared_ptr<Mapping>> ended;
  {
    const std::lock_guard lock(ended_mutex_);
    ended.swap(ended_);
  }
  Status result;
  for (const std::shared_ptr<Mapping>& mapping : ended) {
    std::erase_if(mappings_, [&](const std::weak_ptr<Mapping>& known) { return known.lock() == mapping; });
    if (mapping->link == Mapping::Link::kAttached && wait_for_daemon) {
      const Status told = rpc_->call(ipc::ReleaseRequest{mapping->lease}, deadline_in(call_timeout_)).status();
      if (told.code() == StatusCode::kDeadlineExceeded) result = told;
    } else if (mapping->link == Mapping::Link::kAttached) {
      rpc_->post(ipc::ReleaseRequest{mapping->lease});
    }
    const bool untold = mapping->link == Mapping::Link::kStale || (mapping->link == Mapping::Link::kAttached && rpc_->lost());
    if (!untold) continue;
    const ModelInfo info = mapping->info();
    if (owed_.size() == kMaxOwed) owed_.pop_front();
    owed_.push_back({info.name, info.device, info.content_id});
  }
  return result;
}

Result<Rpc::Reply> Connection::ask(const RequestBody& body, milliseconds timeout) {
  const ipc::Deadline deadline = deadline_in(timeout);
  std::function<void()> meanwhile;
  if (timeout > call_timeout_) {
    meanwhile = [this] { (void)give_back_ended(false); };
  }
  for (bool again = false;; again = true) {
    WEIGHTD_RETURN_IF_ERROR(ensure_connected(deadline));
    Result<Rpc::Reply> reply = rpc_->call(body, deadline, meanwhile);
    if (!rpc_->lost()) {
      take_events();
      return reply;
    }
    note_loss();
    if (again || !hung_up(last_failure_)) return last_failure_;
  }
}

Status Connection::ensure_connected(ipc::Deadline deadline) {
  if (rpc_ != nullptr) {
    rpc_->read_arrived();
    if (rpc_->lost()) note_loss();
  }
  if (rpc_ != nullptr) {
    take_events();
    if (lease_again_wanted_) lease_again(deadline);
    if (!rpc_->lost()) return {};
    note_loss();
  }
  const ipc::Clock::duration until = next_attempt_ - ipc::Clock::now();
  if (until > ipc::Clock::duration::zero()) {
    return Status::unavailable("weightd is away (" + last_failure_.message() + "); the next attempt is due in " +
                               std::to_string(std::chrono::ceil<milliseconds>(until).count()) + " ms");
  }
  Status status = reconnect(deadline);
  if (status.ok()) {
    pause_ = shortest_pause_;
    return status;
  }
  last_failure_ = status;
  next_attempt_ = ipc::Clock::now() + pause_;
  pause_ = std::min(2 * pause_, kLongestPause);
  return status;
}

Status Connection::reconnect(ipc::Deadline deadline) {
  WEIGHTD_ASSIGN_OR_RETURN(rpc_, Rpc::open(socket_path_, name_, deadline));
  {
    const std::lock_guard lock(hello_mutex_);
    daemon_version_ = rpc_->hello().build;
    backend_ = rpc_->hello().backend;
  }
  event_fd_.store(rpc_->fd(), std::memory_order_relaxed);
  lease_again(deadline);
  if (!rpc_->lost()) settle_owed(deadline);
  if (!rpc_->lost()) return {};
  note_loss();
  return last_failure_;
}

void Connection::lease_again(ipc::Deadline deadline) {
  lease_again_wanted_ = false;
  for (const std::weak_ptr<Mapping>& known : mappings_) {
    const std::shared_ptr<Mapping> mapping = known.lock();
    if (mapping == nullptr || mapping->link == Mapping::Link::kAttached) continue;
    {
      const std::lock_guard lock(ended_mutex_);
      if (mapping->holders == 0) continue;
    }
    lease_again(*mapping, deadline);
    if (rpc_->lost()) return;
  }
}

void Connection::lease_again(Mapping& mapping, ipc::Deadline deadline) {
  const ModelInfo before = mapping.info();
  // Legacy memory has one owner: with another daemon, or as another generation, equal content lies in other memory.
  const bool legacy = before.transport == "legacy";
  if (mapping.lost() || (legacy && rpc_->hello().instance != mapping.instance())) return lose(mapping);
  // The descriptors that come with the answer are closed: what is mapped here is the same content.
  Result<Rpc::Reply> reply = rpc_->call(ipc::AcquireRequest{before.name, before.device, 0, before.content_id}, deadline);
  if (rpc_->lost()) return;
  const auto* acquired = reply.ok() ? std::get_if<ipc::AcquiredReply>(&reply->body) : nullptr;
  const bool same_memory = !legacy || (acquired != nullptr && acquired->model.generation == before.generation);
  if (acquired != nullptr && same_memory && acquired->model.content_id == before.content_id &&
      acquired->arena_bytes == mapping.arena_bytes()) {
    mapping.link = Mapping::Link::kAttached;
    mapping.lease = acquired->lease;
    mapping.set_info(model_info(acquired->model));
    return;
  }
  if (acquired != nullptr) rpc_->post(ipc::ReleaseRequest{acquired->lease});
  if (reply.status().code() == StatusCode::kDeadlineExceeded) return;  // still stale: the next connection tries again
  if (legacy) return lose(mapping);
  mapping.link = Mapping::Link::kDetached;
  mapping.set_state("detached");
}

void Connection::lose(Mapping& mapping) {
  mapping.link = Mapping::Link::kDetached;
  if (mapping.lost()) return;
  mapping.set_lost();
  Event event;
  event.kind = Event::Kind::kLost;
  event.model = mapping.info();
  queue_event(std::move(event));
}

void Connection::settle_owed(ipc::Deadline deadline) {
  while (!owed_.empty()) {
    const Owed& owed = owed_.front();
    const Result<Rpc::Reply> reply = rpc_->call(ipc::AcquireRequest{owed.name, owed.device, 0, owed.content_id}, deadline);
    if (rpc_->lost() || reply.status().code() == StatusCode::kDeadlineExceeded) return;
    const auto* acquired = reply.ok() ? std::get_if<ipc::AcquiredReply>(&reply->body) : nullptr;
    const bool held =
        acquired != nullptr && std::any_of(mappings_.begin(), mappings_.end(), [&](const std::weak_ptr<Mapping>& known) {
          const std::shared_ptr<Mapping> mapping = known.lock();
          return mapping != nullptr && mapping->link == Mapping::Link::kAttached && mapping->lease == acquired->lease;
        });
    if (acquired != nullptr && !held) rpc_->post(ipc::ReleaseRequest{acquired->lease});
    owed_.pop_front();
  }
}

void Connection::note_loss() {
  take_events();
  last_failure_ = rpc_->failure();
  for (const std::weak_ptr<Mapping>& known : mappings_) {
    const std::shared_ptr<Mapping> mapping = known.lock();
    if (mapping != nullptr && mapping->link == Mapping::Link::kAttached) mapping->link = Mapping::Link::kStale;
  }
  event_fd_.store(-1, std::memory_order_relaxed);
  rpc_.reset();
}

void Connection::take_events() {
  for (const ipc::EventReply& reply : rpc_->events()) {
    Event event = event_of(reply);
    for (const std::weak_ptr<Mapping>& known : mappings_) {
      const std::shared_ptr<Mapping> mapping = known.lock();
      if (mapping != nullptr && event.kind != Event::Kind::kShuttingDown) apply(event, *mapping);
    }
    queue_event(std::move(event));
  }
  rpc_->events().clear();
}

void Connection::apply(const Event& event, Mapping& mapping) {
  const ModelInfo held = mapping.info();
  if (held.name != event.model.name || held.device != event.model.device || mapping.lost()) return;
  if (mapping.link == Mapping::Link::kDetached) {
    const bool back = event.kind == Event::Kind::kPublished && held.content_id == event.model.content_id;
    lease_again_wanted_ = lease_again_wanted_ || back;
  } else if (held.generation == event.model.generation) {
    event.kind == Event::Kind::kLost ? mapping.set_lost() : mapping.set_state(event.model.state);
  }
}

void Connection::queue_event(Event event) {
  if (events_.size() == kMaxQueuedEvents) events_.pop_front();
  events_.push_back(std::move(event));
}

Result<std::shared_ptr<Mapping>> Connection::share_or_map(const ipc::AcquiredReply& acquired, std::vector<UniqueFd> fds) {
  const ModelInfo info = model_info(acquired.model);
  if (std::shared_ptr<Mapping> shared = find_shared(info)) {
    if (shared->link != Mapping::Link::kAttached) {
      shared->link = Mapping::Link::kAttached;
      shared->lease = acquired.lease;
      shared->set_info(info);
    } else if (shared->lease != acquired.lease) {
      rpc_->post(ipc::ReleaseRequest{acquired.lease});
    }
    return shared;
  }
  Result<std::shared_ptr<Mapping>> mapping = Mapping::make(shared_from_this(), rpc_->hello().instance, acquired, std::move(fds));
  if (!mapping.ok()) {
    rpc_->post(ipc::ReleaseRequest{acquired.lease});
    return mapping;
  }
  const std::lock_guard lock(ended_mutex_);
  (*mapping)->holders = 1;
  mappings_.push_back(*mapping);
  return mapping;
}

std::shared_ptr<Mapping> Connection::find_shared(const ModelInfo& info) {
  for (const std::weak_ptr<Mapping>& known : mappings_) {
    std::shared_ptr<Mapping> mapping = known.lock();
    if (mapping == nullptr) continue;
    const ModelInfo held = mapping->info();
    if (held.name != info.name || held.device != info.device || held.content_id != info.content_id || mapping->lost()) continue;
    if (mapping->link == Mapping::Link::kAttached && held.generation != info.generation) continue;
    const std::lock_guard lock(ended_mutex_);
    if (mapping->holders == 0) continue;
    ++mapping->holders;
    return mapping;
  }
  return nullptr;
}

}  // namespace weightd::detail
