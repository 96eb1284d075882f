// SPDX-License-Identifier: Apache-2.0
#include "daemon/registry.h"

#include <algorithm>
#include <utility>

#include "base/text.h"

namespace weightd::daemon {
namespace {

using State = ipc::GenerationState;

bool may_follow(State from, State to) {
  switch (to) {
    case State::kLoading:
      return false;
    case State::kVerifying:
      return from == State::kLoading;
    case State::kReady:
      return from == State::kVerifying;
    case State::kPublished:
      return from == State::kReady;
    case State::kDraining:
      return from == State::kPublished;
    case State::kFreed:
      return from == State::kDraining || from == State::kLost;
    case State::kFailed:
      return from == State::kLoading || from == State::kVerifying || from == State::kReady;
    case State::kLost:
      return from == State::kPublished || from == State::kDraining;
  }
  return false;
}

bool in_progress(State state) { return state == State::kLoading || state == State::kVerifying || state == State::kReady; }
bool resident(State state) { return state == State::kPublished || state == State::kDraining; }

std::string in_quotes(const std::string& name) { return "'" + printable(name) + "'"; }

Status check_model_name(const std::string& name) {
  if (name.empty()) return Status::invalid_argument("the model name is empty");
  if (name.size() > ipc::kMaxModelNameBytes) {
    return Status::invalid_argument("the model name has " + std::to_string(name.size()) + " bytes, at most " +
                                    std::to_string(ipc::kMaxModelNameBytes) + " are allowed");
  }
  if (!is_utf8(name) || printable(name, name.size() + 1) != name) {
    return Status::invalid_argument("model name " + in_quotes(name) + ": control characters and backslashes are not allowed");
  }
  return {};
}

std::string short_id(const std::string& content_id) { return content_id.substr(0, 12); }

}  // namespace

Registry::Registry(Ledger ledger, const Limits& limits) : ledger_(std::move(ledger)), limits_(limits) {}

void Registry::move(Generation& generation, State to) {
  WEIGHTD_CHECK(may_follow(generation.state, to));
  generation.state = to;
}

// --- looking things up ---------------------------------------------------------------------------------------------------

Result<Place> Registry::resolve(const std::string& model, const std::string& device) const {
  const auto& devices = ledger_.devices();
  if (!device.empty()) {
    if (ledger_.find(device) != nullptr) return Place{device, 0};
    std::string known;
    for (const auto& each : devices) known += (known.empty() ? "" : ", ") + each.uuid;
    return Status::not_found("no device " + in_quotes(device) + "; this daemon has: " + known);
  }
  if (devices.size() == 1) return Place{devices.front().uuid, 0};
  std::set<std::string> having;
  for (const auto& [id, generation] : generations_) {
    if (generation.command.model == model && generation.state != State::kFailed) having.insert(generation.command.device);
  }
  if (having.size() == 1) return Place{*having.begin(), 0};
  return Status::invalid_argument("model " + in_quotes(model) + " is on " + std::to_string(having.size()) +
                                  " devices: name the one that is meant");
}

std::optional<GenerationId> Registry::find(const std::string& model, const Place& place, State state) const {
  for (const auto& [id, generation] : generations_) {
    if (generation.state == state && generation.command.model == model && generation.command.place() == place) return id;
  }
  return std::nullopt;
}

std::optional<GenerationId> Registry::find_loading(const std::string& model, const Place& place) const {
  for (const auto& [id, generation] : generations_) {
    if (in_progress(generation.state) && !generation.cancelled && generation.command.model == model &&
        generation.command.place() == place) {
      return id;
    }
  }
  return std::nullopt;
}

std::pair<uint32_t, uint32_t> Registry::lease_counts(GenerationId generation) const {
  uint32_t held = 0, orphaned = 0;
  for (const auto& [id, lease] : leases_) {
    if (lease.generation == generation) ++(lease.session == 0 ? orphaned : held);
  }
  return {held, orphaned};
}

std::optional<LeaseId> Registry::orphan_of(const Process& process, GenerationId generation) const {
  if (!process.known()) return std::nullopt;
  for (const auto& [id, lease] : leases_) {
    if (lease.session == 0 && lease.generation == generation && lease.holder.process == process) return id;
  }
  return std::nullopt;
}

// --- sessions and leases -------------------------------------------------------------------------------------------------

SessionId Registry::open_session(const SessionInfo& info) {
  sessions_.emplace(next_session_, info);
  return next_session_++;
}

void Registry::close_session(SessionId session, bool process_lives, Effects& effects) {
  const auto info = sessions_.find(session);
  if (info == sessions_.end()) return;
  const Process process = info->second.process;
  std::set<GenerationId> touched;
  bool orphaned = false;
  for (auto it = leases_.begin(); it != leases_.end();) {
    Lease& lease = it->second;
    if (lease.session != session) {
      ++it;
      continue;
    }
    const auto earlier = orphan_of(process, lease.generation);
    if (process_lives && process.known() && !earlier) {
      lease.session = 0;
      orphaned = true;
      ++it;
      continue;
    }
    // One orphan stands for all lost leases of a process on a generation, so that reconnecting for ever takes no memory.
    if (process_lives && earlier) leases_.at(*earlier).claims += lease.claims;
    touched.insert(lease.generation);
    it = leases_.erase(it);
  }
  if (orphaned) effects.watch.push_back(process);
  sessions_.erase(info);
  const auto of_session = [&](const auto& waiter) { return waiter.ticket.session == session; };
  std::erase_if(load_waiters_, of_session);
  std::erase_if(acquire_waiters_, of_session);
  std::erase_if(unload_waiters_, of_session);
  for (const GenerationId id : touched) free_if_unused(id, effects);
  cancel_unwanted_loads(effects);
}

void Registry::process_ended(const Process& process, Effects& effects) {
  std::set<GenerationId> touched;
  for (auto it = leases_.begin(); it != leases_.end();) {
    if (it->second.session == 0 && it->second.holder.process == process) {
      touched.insert(it->second.generation);
      it = leases_.erase(it);
    } else {
      ++it;
    }
  }
  for (const GenerationId id : touched) free_if_unused(id, effects);
}

bool Registry::has_orphans(const Process& process) const {
  return std::any_of(leases_.begin(), leases_.end(),
                     [&](const auto& entry) { return entry.second.session == 0 && entry.second.holder.process == process; });
}

Answer Registry::grant(const Ticket& ticket, GenerationId generation, Time now) {
  const SessionInfo& holder = sessions_.at(ticket.session);
  const LeaseId id = next_lease_++;
  leases_.emplace(id, Lease{generation, ticket.session, holder, now, 1});
  return {ticket, Granted{id, generation}};
}

void Registry::adopt_orphan(const Process& process, GenerationId generation) {
  const auto orphan = orphan_of(process, generation);
  if (orphan && --leases_.at(*orphan).claims == 0) leases_.erase(*orphan);
}

Status Registry::why_not_published(const std::string& model, const Place& place) const {
  if (find_loading(model, place)) {
    return Status::failed_precondition("model " + in_quotes(model) + " is still loading: ask again, or wait for it");
  }
  if (find(model, place, State::kDraining)) {
    return Status::failed_precondition("model " + in_quotes(model) + " is draining: it gets no new leases");
  }
  if (find(model, place, State::kLost)) {
    return Status::lost("the memory of model " + in_quotes(model) +
                        " is gone: the process that owned it ended (legacy transport); unload the model and load it again");
  }
  if (find(model, place, State::kFailed)) return Status::not_found("no model " + in_quotes(model) + ": its load failed");
  return Status::not_found("no model " + in_quotes(model));
}

std::optional<Answer> Registry::try_acquire(const Ticket& ticket, const ipc::AcquireRequest& request, bool waiting, Time now) {
  const auto place = resolve(request.model, request.device);
  if (!place.ok()) return Answer{ticket, place.status()};
  const auto held =
      std::count_if(leases_.begin(), leases_.end(), [&](const auto& e) { return e.second.session == ticket.session; });
  if (held >= static_cast<int64_t>(limits_.leases_per_session)) {
    return Answer{ticket, Status::resource_exhausted("this connection holds " + std::to_string(held) +
                                                     " leases, the most allowed "
                                                     "(max_leases_per_session)")};
  }
  const auto published = find(request.model, *place, State::kPublished);
  if (request.content_id.empty()) {
    if (published) return grant(ticket, *published, now);
  } else {
    const Process& process = sessions_.at(ticket.session).process;
    for (const auto& [id, generation] : generations_) {
      if (!resident(generation.state) || generation.command.model != request.model || generation.command.place() != *place ||
          generation.plan->content_id != request.content_id) {
        continue;
      }
      if (generation.state == State::kPublished || orphan_of(process, id)) {
        adopt_orphan(process, id);
        return grant(ticket, id, now);
      }
    }
    if (published) return Answer{ticket, Status::not_found("model " + in_quotes(request.model) + " has other content now")};
  }
  // Nobody brings back what is lost unless somebody loads it again.
  const bool hopeless = find(request.model, *place, State::kLost) && !find_loading(request.model, *place);
  if (waiting && !hopeless) return std::nullopt;
  return Answer{ticket, why_not_published(request.model, *place)};
}

void Registry::acquire(const Ticket& ticket, const ipc::AcquireRequest& request, Time now, Effects& effects) {
  WEIGHTD_CHECK(sessions_.count(ticket.session) == 1);
  if (auto answer = try_acquire(ticket, request, request.wait_ms > 0, now)) {
    effects.answers.push_back(std::move(*answer));
    return;
  }
  acquire_waiters_.push_back({ticket, request, now + std::chrono::milliseconds(request.wait_ms)});
}

void Registry::serve_acquire_waiters(Time now, Effects& effects) {
  std::erase_if(acquire_waiters_, [&](const AcquireWaiter& waiter) {
    auto answer = try_acquire(waiter.ticket, waiter.request, true, now);
    if (answer) effects.answers.push_back(std::move(*answer));
    return answer.has_value();
  });
}

void Registry::fail_acquire_waiters(const LoadCommand& command, Effects& effects) {
  std::erase_if(acquire_waiters_, [&](const AcquireWaiter& waiter) {
    if (waiter.request.model != command.model) return false;
    if (!waiter.request.device.empty() && waiter.request.device != command.device) return false;
    effects.answers.push_back(
        {waiter.ticket, Status::failed_precondition("the load of model " + in_quotes(command.model) + " did not succeed")});
    return true;
  });
}

void Registry::release(const Ticket& ticket, LeaseId id, Effects& effects) {
  const auto lease = leases_.find(id);
  if (lease == leases_.end() ? id == 0 || id >= next_lease_ : lease->second.session != ticket.session) {
    effects.answers.push_back({ticket, Status::not_found("no such lease of this connection")});
    return;
  }
  effects.answers.push_back({ticket, Released{}});
  take_back(id, effects);
}

void Registry::take_back(LeaseId id, Effects& effects) {
  const auto lease = leases_.find(id);
  if (lease == leases_.end()) return;
  const GenerationId generation = lease->second.generation;
  leases_.erase(lease);
  free_if_unused(generation, effects);
}

// --- loads ---------------------------------------------------------------------------------------------------------------

void Registry::load(const Ticket& ticket, const LoadCommand& command, std::optional<Time> deadline, Time now, Effects& effects) {
  if (Status status = check_model_name(command.model); !status.ok()) {
    effects.answers.push_back({ticket, std::move(status)});
    return;
  }
  const auto place = resolve(command.model, command.device);
  if (!place.ok()) {
    effects.answers.push_back({ticket, place.status()});
    return;
  }
  auto loading = find_loading(command.model, *place);
  if (loading && generations_.at(*loading).command.source != command.source) {
    effects.answers.push_back(
        {ticket, Status::already_exists("model " + in_quotes(command.model) + " is being loaded from another file")});
    return;
  }
  if (loading && generations_.at(*loading).command.transport != command.transport) {
    effects.answers.push_back(
        {ticket, Status::already_exists("model " + in_quotes(command.model) + " is being loaded for the other transport (" +
                                        generations_.at(*loading).command.transport + ")")});
    return;
  }
  if (!loading) {
    forget_failures(command.model, *place);
    loading = next_generation_++;
    Generation generation;
    generation.command = command;
    generation.command.device = place->device;
    generation.command.shard = place->shard;
    generations_.emplace(*loading, std::move(generation));
    effects.start.push_back(*loading);
  }
  load_waiters_.push_back({ticket, *loading, deadline});
  if (deadline && *deadline <= now) expire(now, effects);
}

void Registry::answer_loads(GenerationId generation, const std::variant<Status, Loaded>& result, Effects& effects) {
  std::erase_if(load_waiters_, [&](const LoadWaiter& waiter) {
    if (waiter.generation != generation) return false;
    if (const auto* loaded = std::get_if<Loaded>(&result))
      effects.answers.push_back({waiter.ticket, *loaded});
    else
      effects.answers.push_back({waiter.ticket, std::get<Status>(result)});
    return true;
  });
}

void Registry::planned(GenerationId id, const ipc::Planned& plan, Effects& effects) {
  Generation& generation = generations_.at(id);
  if (generation.cancelled || generation.plan) return;
  generation.plan = plan;
  const auto published = find(generation.command.model, generation.command.place(), State::kPublished);
  if (!published) return try_admit(id, effects);
  const std::string& resident_id = generations_.at(*published).plan->content_id;
  const std::string& transport = generations_.at(*published).command.transport;
  if (resident_id == plan.content_id && transport != generation.command.transport) {
    return refuse_load(id,
                       Status::already_exists("model " + in_quotes(generation.command.model) + " is published for the transport " +
                                              transport + ": unload it first, or load under another name"),
                       false, effects);
  }
  if (resident_id == plan.content_id) {
    answer_loads(id, Loaded{summary(*published)}, effects);
    return cancel_load(id, {}, effects);
  }
  refuse_load(id,
              Status::already_exists("model " + in_quotes(generation.command.model) + " is published with other content (" +
                                     short_id(resident_id) + ", this bundle has " + short_id(plan.content_id) +
                                     "): unload it first, or load under another name"),
              false, effects);
}

void Registry::try_admit(GenerationId id, Effects& effects) {
  Generation& generation = generations_.at(id);
  const uint64_t bytes = generation.plan->resident_bytes;
  const Ledger::Verdict verdict = ledger_.reserve(id, generation.command.device, bytes);
  generation.awaits_room = verdict == Ledger::Verdict::kLater;
  if (verdict == Ledger::Verdict::kAdmitted) effects.admit.push_back(id);
  if (verdict != Ledger::Verdict::kRefused) return;
  std::vector<Ledger::Candidate> candidates;
  for (const auto& [other, resident_generation] : generations_) {
    if (!resident(resident_generation.state) || resident_generation.command.device != generation.command.device) continue;
    const auto [held, orphaned] = lease_counts(other);
    candidates.push_back({resident_generation.command.model, ledger_.reserved_bytes(other), held + orphaned > 0});
  }
  refuse_load(id,
              Status::resource_exhausted("model " + in_quotes(generation.command.model) + ": " +
                                         ledger_.refusal(generation.command.device, bytes, std::move(candidates))),
              true, effects);
}

void Registry::retry_admissions(Effects& effects) {
  std::vector<GenerationId> waiting;
  for (const auto& [id, generation] : generations_) {
    if (generation.awaits_room && !generation.cancelled) waiting.push_back(id);
  }
  for (const GenerationId id : waiting) try_admit(id, effects);
}

void Registry::refuse_load(GenerationId id, const Status& why, bool remember, Effects& effects) {
  if (remember) generations_.at(id).failure = why;
  cancel_load(id, why, effects);
}

void Registry::cancel_load(GenerationId id, const Status& why, Effects& effects) {
  Generation& generation = generations_.at(id);
  if (generation.cancelled) return;
  generation.cancelled = true;
  generation.awaits_room = false;
  ledger_.set_phase(id, Ledger::Phase::kEnding);
  effects.cancel.push_back(id);
  if (why.ok()) return;
  answer_loads(id, why, effects);
  fail_acquire_waiters(generation.command, effects);
}

void Registry::cancel_unwanted_loads(Effects& effects) {
  std::vector<GenerationId> unwanted;
  for (const auto& [id, generation] : generations_) {
    const GenerationId wanted = id;
    if (in_progress(generation.state) && !generation.cancelled &&
        std::none_of(load_waiters_.begin(), load_waiters_.end(), [&](const LoadWaiter& w) { return w.generation == wanted; })) {
      unwanted.push_back(id);
    }
  }
  for (const GenerationId id : unwanted) cancel_load(id, Status::cancelled("nobody waits for this load any more"), effects);
}

void Registry::progress(GenerationId id, uint64_t bytes) {
  const auto generation = generations_.find(id);
  if (generation != generations_.end()) generation->second.progress_bytes = bytes;
}

void Registry::uploaded(GenerationId id) {
  Generation& generation = generations_.at(id);
  if (!generation.cancelled && generation.state == State::kLoading) move(generation, State::kVerifying);
}

void Registry::verified(GenerationId id, ChunkSet memory, Time now, Effects& effects) {
  Generation& generation = generations_.at(id);
  if (generation.cancelled) {
    effects.drop.push_back({0, std::move(memory)});  // counted under the job until it ends
    return;
  }
  uploaded(id);
  move(generation, State::kReady);
  generation.memory = std::move(memory);
  // Publishing is this one step; nothing else could have been published here meanwhile, since loads of a name are single.
  WEIGHTD_CHECK(!find(generation.command.model, generation.command.place(), State::kPublished));
  move(generation, State::kPublished);
  generation.progress_bytes = generation.plan->resident_bytes;
  ledger_.set_phase(id, Ledger::Phase::kOwned);
  const LoadCommand command = generation.command;
  const ipc::ModelSummary model = summary(id);
  effects.notices.push_back({Notice::Kind::kPublished, id, model, {}});
  answer_loads(id, Loaded{model}, effects);
  serve_acquire_waiters(now, effects);
  forget_lost(command.model, command.place(), effects);
}

void Registry::job_ended(GenerationId id, const Status& status, Effects& effects) {
  const auto entry = generations_.find(id);
  if (entry == generations_.end()) return;
  Generation& generation = entry->second;
  if (!in_progress(generation.state)) return;
  ledger_.release(id);
  if (generation.cancelled && generation.failure.ok()) {
    gone(id, 0, effects);
    return;
  }
  if (!generation.cancelled) {
    generation.failure = status.ok() ? Status::internal("the loader ended without a result") : status;
    generation.cancelled = true;
    answer_loads(id, generation.failure, effects);
    fail_acquire_waiters(generation.command, effects);
  }
  move(generation, State::kFailed);
  for (UnloadWaiter& waiter : unload_waiters_) waiter.generations.erase(id);
  forget_oldest_failures();
  gone(0, 0, effects);
}

bool Registry::forget_failures(const std::string& model, const Place& place) {
  return std::erase_if(generations_, [&](const auto& entry) {
           const Generation& generation = entry.second;
           return generation.state == State::kFailed && generation.command.model == model && generation.command.place() == place;
         }) > 0;
}

void Registry::forget_oldest_failures() {
  auto failed = static_cast<uint64_t>(std::count_if(generations_.begin(), generations_.end(),
                                                    [](const auto& entry) { return entry.second.state == State::kFailed; }));
  std::erase_if(generations_, [&](const auto& entry) {
    return failed > limits_.failed_shown && entry.second.state == State::kFailed && failed-- > 0;
  });
}

void Registry::owner_lost(GenerationId id, const std::string& why, Effects& effects) {
  const auto entry = generations_.find(id);
  if (entry == generations_.end() || !resident(entry->second.state)) return;
  Generation& generation = entry->second;
  generation.unwanted = generation.state == State::kDraining;
  move(generation, State::kLost);
  generation.failure = Status::lost(why);
  generation.memory = {};
  ledger_.release(id);
  Notice notice{Notice::Kind::kLost, id, summary(id), {}};
  for (const auto& [lease_id, lease] : leases_) {
    if (lease.generation == id && lease.session != 0) notice.sessions.insert(lease.session);
  }
  effects.notices.push_back(std::move(notice));
  free_if_unused(id, effects);
  retry_admissions(effects);
}

void Registry::forget_lost(const std::string& model, const Place& place, Effects& effects) {
  std::vector<GenerationId> lost;
  for (auto& [id, generation] : generations_) {
    if (generation.state != State::kLost || generation.command.model != model || generation.command.place() != place) continue;
    generation.unwanted = true;
    lost.push_back(id);
  }
  for (const GenerationId id : lost) free_if_unused(id, effects);
}

// --- unload --------------------------------------------------------------------------------------------------------------

void Registry::unload(const Ticket& ticket, const std::string& model, const std::string& device, Time deadline, Time now,
                      Effects& effects) {
  const auto place = resolve(model, device);
  if (!place.ok()) {
    effects.answers.push_back({ticket, place.status()});
    return;
  }
  const bool forgot = forget_failures(model, *place);
  UnloadWaiter waiter{ticket, {}, 0, deadline};
  for (const auto& [id, generation] : generations_) {
    if (generation.command.model == model && generation.command.place() == *place) waiter.generations.insert(id);
  }
  if (waiter.generations.empty()) {
    if (forgot)
      effects.answers.push_back({ticket, ipc::UnloadedReply{true, 0, {}}});
    else
      effects.answers.push_back({ticket, Status::not_found("no model " + in_quotes(model))});
    return;
  }
  const std::set<GenerationId> targets = waiter.generations;
  unload_waiters_.push_back(std::move(waiter));
  for (const GenerationId id : targets) {
    const State state = generations_.at(id).state;
    if (state == State::kPublished) {
      drain(id, effects);
    } else if (state == State::kLost) {
      generations_.at(id).unwanted = true;
      free_if_unused(id, effects);
    } else if (in_progress(state)) {
      generations_.at(id).failure = {};  // refused already, but not to be remembered any more
      cancel_load(id, Status::cancelled("the load of model " + in_quotes(model) + " was cancelled by an unload"), effects);
    }
  }
  if (deadline <= now) expire(now, effects);
}

void Registry::drain(GenerationId id, Effects& effects) {
  move(generations_.at(id), State::kDraining);
  Notice notice{Notice::Kind::kDrainRequested, id, summary(id), {}};
  for (const auto& [lease_id, lease] : leases_) {
    if (lease.generation == id && lease.session != 0) notice.sessions.insert(lease.session);
  }
  if (!notice.sessions.empty()) effects.notices.push_back(std::move(notice));
  free_if_unused(id, effects);
}

void Registry::free_if_unused(GenerationId id, Effects& effects) {
  const auto entry = generations_.find(id);
  if (entry == generations_.end()) return;
  const bool lost = entry->second.state == State::kLost && entry->second.unwanted;
  if (!lost && entry->second.state != State::kDraining) return;
  const auto [held, orphaned] = lease_counts(id);
  if (held + orphaned > 0) return;
  if (lost) return gone(id, 0, effects);
  move(entry->second, State::kFreed);
  ledger_.set_phase(id, Ledger::Phase::kEnding);
  effects.drop.push_back({id, std::move(entry->second.memory)});
  entry->second.memory = {};
}

void Registry::reclaimed(GenerationId id, Effects& effects) {
  const auto entry = generations_.find(id);
  if (entry == generations_.end() || entry->second.state != State::kFreed) return;
  const uint64_t bytes = ledger_.reserved_bytes(id);
  ledger_.release(id);
  gone(id, bytes, effects);
}

/// Generation `id` is no more (0: one has failed, and stays as a record): answers the unloads that waited for it, and admits who
/// waits for room.
void Registry::gone(GenerationId id, uint64_t freed_bytes, Effects& effects) {
  generations_.erase(id);
  for (UnloadWaiter& waiter : unload_waiters_) {
    if (waiter.generations.erase(id) > 0) waiter.freed_bytes += freed_bytes;
  }
  std::erase_if(unload_waiters_, [&](const UnloadWaiter& waiter) {
    if (!waiter.generations.empty()) return false;
    effects.answers.push_back({waiter.ticket, ipc::UnloadedReply{true, waiter.freed_bytes, {}}});
    return true;
  });
  retry_admissions(effects);
}

// --- time ----------------------------------------------------------------------------------------------------------------

std::optional<Time> Registry::next_deadline() const {
  std::optional<Time> next;
  const auto consider = [&](const std::optional<Time>& time) {
    if (time && (!next || *time < *next)) next = time;
  };
  for (const auto& waiter : load_waiters_) consider(waiter.deadline);
  for (const auto& waiter : acquire_waiters_) consider(waiter.deadline);
  for (const auto& waiter : unload_waiters_) consider(waiter.deadline);
  return next;
}

void Registry::expire(Time now, Effects& effects) {
  std::erase_if(load_waiters_, [&](const LoadWaiter& waiter) {
    if (!waiter.deadline || *waiter.deadline > now) return false;
    effects.answers.push_back(
        {waiter.ticket,
         Status::deadline_exceeded("the load of model " + in_quotes(generations_.at(waiter.generation).command.model) +
                                   " was not done within the time limit of the request")});
    return true;
  });
  std::erase_if(acquire_waiters_, [&](const AcquireWaiter& waiter) {
    if (waiter.deadline > now) return false;
    effects.answers.push_back(
        {waiter.ticket, Status::deadline_exceeded("model " + in_quotes(waiter.request.model) + " was not published within " +
                                                  std::to_string(waiter.request.wait_ms) + " ms")});
    return true;
  });
  std::erase_if(unload_waiters_, [&](const UnloadWaiter& waiter) {
    if (waiter.deadline > now) return false;
    uint64_t held_bytes = 0;
    for (const GenerationId id : waiter.generations) held_bytes += ledger_.reserved_bytes(id);
    effects.answers.push_back({waiter.ticket, ipc::UnloadedReply{false, held_bytes, holders(waiter.generations, now)}});
    return true;
  });
  cancel_unwanted_loads(effects);
}

// --- views ---------------------------------------------------------------------------------------------------------------

std::optional<Registry::View> Registry::view(GenerationId id) const {
  const auto entry = generations_.find(id);
  if (entry == generations_.end() || !resident(entry->second.state)) return std::nullopt;
  return View{&entry->second.memory, &*entry->second.plan};
}

Result<GenerationId> Registry::published(const std::string& model, const std::string& device) const {
  WEIGHTD_ASSIGN_OR_RETURN(const Place place, resolve(model, device));
  if (const auto id = find(model, place, State::kPublished)) return *id;
  return why_not_published(model, place);
}

const LoadCommand* Registry::command(GenerationId id) const {
  const auto entry = generations_.find(id);
  return entry == generations_.end() ? nullptr : &entry->second.command;
}

ipc::ModelSummary Registry::summary(GenerationId id) const {
  const Generation& generation = generations_.at(id);
  ipc::ModelSummary summary;
  summary.name = generation.command.model;
  summary.generation = id;
  summary.state = generation.state;
  summary.device = generation.command.device;
  summary.shard = generation.command.shard;
  summary.transport = generation.command.transport;
  summary.residency = "fast";
  summary.source = generation.command.source;
  summary.progress_bytes = generation.progress_bytes;
  summary.failure = generation.failure.ok() ? "" : generation.failure.to_string();
  if (generation.plan) {
    summary.content_id = generation.plan->content_id;
    summary.tensors_id = generation.plan->tensors_id;
    summary.logical_bytes = generation.plan->logical_bytes;
    summary.resident_bytes = generation.plan->resident_bytes;
    summary.tensor_count = generation.plan->tensor_count;
    summary.encodings = generation.plan->encodings;
  }
  const auto [held, orphaned] = lease_counts(id);
  summary.lease_count = held;
  summary.orphan_count = orphaned;
  return summary;
}

std::vector<ipc::ModelSummary> Registry::models() const {
  std::vector<ipc::ModelSummary> models;
  for (const auto& [id, generation] : generations_) {
    const bool ending = generation.state == State::kFreed || (generation.cancelled && generation.state != State::kFailed);
    if (!ending) models.push_back(summary(id));
  }
  return models;
}

ipc::LeaseSummary Registry::lease_summary(LeaseId id, const Lease& lease, Time now) const {
  const Generation& generation = generations_.at(lease.generation);
  ipc::LeaseSummary summary;
  summary.id = id;
  summary.model = generation.command.model;
  summary.generation = lease.generation;
  summary.content_id = generation.plan->content_id;
  summary.pid = lease.holder.process.pid;
  summary.uid = lease.holder.uid;
  summary.command = lease.holder.command;
  summary.age_ms =
      static_cast<uint64_t>(std::max<int64_t>(0, std::chrono::duration_cast<std::chrono::milliseconds>(now - lease.since).count()));
  summary.bytes = generation.state == State::kLost ? 0 : generation.plan->resident_bytes;
  summary.orphan = lease.session == 0;
  summary.device = generation.command.device;
  return summary;
}

std::vector<ipc::LeaseSummary> Registry::leases(Time now) const {
  std::vector<ipc::LeaseSummary> summaries;
  for (const auto& [id, lease] : leases_) summaries.push_back(lease_summary(id, lease, now));
  return summaries;
}

std::vector<ipc::LeaseSummary> Registry::holders(const std::set<GenerationId>& generations, Time now) const {
  std::vector<ipc::LeaseSummary> summaries;
  for (const auto& [id, lease] : leases_) {
    if (generations.count(lease.generation) > 0) summaries.push_back(lease_summary(id, lease, now));
  }
  return summaries;
}

bool Registry::awaits_room() const {
  return std::any_of(generations_.begin(), generations_.end(),
                     [](const auto& entry) { return entry.second.awaits_room && !entry.second.cancelled; });
}

std::vector<ipc::DeviceSummary> Registry::devices() const {
  std::vector<ipc::DeviceSummary> summaries;
  for (const Ledger::Device& device : ledger_.devices()) {
    const Ledger::Sums sums = ledger_.sums(device.uuid);
    ipc::DeviceSummary summary;
    summary.uuid = device.uuid;
    summary.name = device.name;
    summary.total_bytes = device.total_bytes;
    summary.budget_bytes = device.budget_bytes;
    summary.owned_bytes = sums.owned_bytes + sums.ending_bytes;
    summary.loading_bytes = sums.loading_bytes;
    summary.free_bytes = ledger_.free_bytes(device.uuid);
    for (const auto& [id, generation] : generations_) {
      if (!resident(generation.state) || generation.command.device != device.uuid) continue;
      const auto [held, orphaned] = lease_counts(id);
      const uint64_t bytes = ledger_.reserved_bytes(id);
      if (held > 0)
        summary.leased_bytes += bytes;
      else if (orphaned > 0)
        summary.orphan_bytes += bytes;
      else
        summary.fd_only_bytes += bytes;
      if (generation.state == State::kDraining) summary.draining_bytes += bytes;
    }
    summaries.push_back(std::move(summary));
  }
  return summaries;
}

}  // namespace weightd::daemon
