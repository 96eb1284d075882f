// SPDX-License-Identifier: Apache-2.0
#include "daemon/server.h"

#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>
#include <map>
#include <set>
#include <utility>

#include "base/text.h"
#include "base/version.h"
#include "daemon/access.h"
#include "daemon/devices.h"
#include "daemon/doctor.h"
#include "daemon/keeper.h"
#include "daemon/machine.h"
#include "daemon/notify.h"
#include "daemon/replies.h"
#include "daemon/session.h"
#include "ipc/endpoint.h"
#include "ipc/frame.h"

namespace weightd::daemon {
namespace {

using boost::system::error_code;

constexpr int kComplaintsPerSecond = 5;  // log lines about peers

enum class Role { kData, kControl };
std::string_view role_name(Role role) { return role == Role::kData ? "data" : "control"; }

SessionLimits session_limits(const Config& config) {
  SessionLimits limits;
  limits.channel.receive.body_bytes = static_cast<uint32_t>(config.max_request_bytes);
  limits.channel.max_queued_bytes = config.max_queued_bytes;
  limits.requests_in_flight = config.max_requests_in_flight;
  limits.message_deadline = std::chrono::milliseconds(config.message_deadline_ms);
  limits.write_deadline = std::chrono::milliseconds(config.write_deadline_ms);
  return limits;
}

struct Access {
  AccessList data, control;
};
Result<Access> make_access(const Config& config) {
  Access access;
  WEIGHTD_ASSIGN_OR_RETURN(access.data,
                           make_access_list("data", config.data_users, config.data_groups, {"weightd", "weightd-admin"}));
  WEIGHTD_ASSIGN_OR_RETURN(access.control,
                           make_access_list("control", config.control_users, config.control_groups, {"weightd-admin"}));
  return access;
}

bool data_may_ask(const ipc::Request& request) {
  return std::holds_alternative<ipc::HelloRequest>(request.body) || std::holds_alternative<ipc::ListRequest>(request.body) ||
         std::holds_alternative<ipc::AcquireRequest>(request.body) || std::holds_alternative<ipc::ReleaseRequest>(request.body) ||
         std::holds_alternative<ipc::VersionRequest>(request.body);
}

/// What must work between any two versions, or nobody could replace an old daemon (CO-108).
bool served_for_every_version(const ipc::Request& request) {
  return std::holds_alternative<ipc::HelloRequest>(request.body) || std::holds_alternative<ipc::StatusRequest>(request.body) ||
         std::holds_alternative<ipc::VersionRequest>(request.body);
}

std::string join(const std::vector<std::string>& words) {
  std::string out;
  for (const std::string& word : words) out += (out.empty() ? "" : ", ") + word;
  return out;
}

}  // namespace

class Server::State {
 public:
  State(const EffectiveConfig& config, Log& log, Reload reload, DeviceSet devices)
      : log_(log),
        reload_(std::move(reload)),
        config_(config.values),
        signals_(io_, SIGTERM, SIGINT, SIGHUP),
        keeper_(io_, log, config.values, std::move(devices),
                {[this](Answer&& answer) { on_answer(std::move(answer)); },
                 [this](const Ticket& ticket, Result<ipc::VerifiedReply>&& reply) { on_scrubbed(ticket, std::move(reply)); },
                 [this](const Notice& notice) { on_notice(notice); }}) {}

  Status open();
  Status run();

 private:
  struct Client {
    Role role{};
    std::string who;  // for the log
    Process process;
    uint32_t uid = 0;
    UniqueFd pidfd;
    std::shared_ptr<Session> session;
  };

  void hold_gpus();
  Status listen(Role role, const std::string& path, uint64_t mode, const std::string& group, const std::string& automatic);
  void accept(Role role, UniqueFd socket);
  Status admit(Role role, const ipc::Peer& peer) const;
  void on_closed(SessionId id, const Status& why);
  void complain(const std::string& line);

  void on_request(SessionId id, ipc::Request&& request, const Status& foreign);
  void handle(SessionId id, Client& client, ipc::Request&& request);
  void reply(const Ticket& ticket, ipc::Response response, std::vector<UniqueFd> fds = {});
  void on_answer(Answer&& answer);
  void on_scrubbed(const Ticket& ticket, Result<ipc::VerifiedReply> scrubbed);
  void on_notice(const Notice& notice);
  void on_granted(const Ticket& ticket, const Granted& granted);
  void on_desired(const Ticket& ticket, const Status& outcome);
  void log_outcome(const Answer& answer);

  void on_memory(const Ticket& ticket);
  void on_doctor(const Ticket& ticket);
  DoctorFacts doctor_facts() const;

  ipc::HelloReply hello() const;
  ipc::StatusReply status() const;
  std::vector<ipc::ModelSummary> models(Role role) const;

  void load_desired(const std::vector<ModelEntry>& entries);
  void tell_ready();
  void wait_for_signal();
  void on_reload();
  void apply_config(const Config& wanted);
  void begin_stop(const std::string& reason);

  Log& log_;
  Reload reload_;
  Config config_;
  Access access_;
  Time started_ = Clock::now();
  uint64_t instance_ = random_id();
  boost::asio::io_context io_{1};
  boost::asio::signal_set signals_;
  Keeper keeper_;
  std::map<std::string, Result<UniqueFd>> held_gpus_;  // by UUID: device files, for as long as this process lives
  std::vector<std::unique_ptr<ipc::Endpoint>> endpoints_;
  std::map<SessionId, Client> clients_;
  std::map<Ticket, std::string> commands_;  // what administrators asked for and is not answered yet, for the log
  std::map<uint64_t, ModelEntry> desired_;  // by request: loads of the daemon itself that are under way
  uint64_t next_desired_ = 1;
  bool ready_ = false, stopping_ = false;
  Time complaints_since_{};
  int complaints_ = 0;
};

// --- start, stop, signals ------------------------------------------------------------------------------------------------

Status Server::State::open() {
  WEIGHTD_ASSIGN_OR_RETURN(access_, make_access(config_));
  hold_gpus();
  WEIGHTD_RETURN_IF_ERROR(listen(Role::kData, config_.data_socket, config_.data_socket_mode, config_.data_socket_group, "weightd"));
  WEIGHTD_RETURN_IF_ERROR(
      listen(Role::kControl, config_.control_socket, config_.control_socket_mode, config_.control_socket_group, "weightd-admin"));
  const DeviceSet& devices = keeper_.devices();
  std::string budgets;
  for (const Ledger::Device& device : devices.devices) {
    budgets += (budgets.empty() ? "" : ", ") + human_bytes(device.budget_bytes) + " on " + printable(device.uuid, 80);
  }
  log_.info("weightd " + std::string(build_id()) + " started: backend " + devices.backend +
            (devices.why.empty() ? "" : " (" + devices.why + ")") + ", budget " + budgets + ", workers at " +
            printable(config_.data_socket) + ", administrators at " + printable(config_.control_socket));
  return {};
}

/// Without persistence mode a GPU forgets its memory when the last process lets go of it; this one does not.
void Server::State::hold_gpus() {
  if (!keeper_.devices().cuda()) return;
  for (const Ledger::Device& device : keeper_.devices().devices) {
    const ipc::GpuSummary* gpu = keeper_.devices().gpu(device.uuid);
    Result<UniqueFd> held = hold_gpu(gpu == nullptr ? -1 : gpu->minor);
    if (!held.ok()) {
      log_.warning(printable(device.uuid, 80) + ": its device file is not held open: " + held.status().message() +
                   (gpu != nullptr && gpu->persistence == 1 ? "; persistence mode is on"
                                                            : "; weights may be lost while no process uses it"));
    }
    held_gpus_.emplace(device.uuid, std::move(held));
  }
}

Status Server::State::listen(Role role, const std::string& path, uint64_t mode, const std::string& group,
                             const std::string& automatic) {
  const std::string what(role_name(role));
  ipc::EndpointOptions options;
  options.path = path;
  options.mode = static_cast<uint32_t>(mode);
  WEIGHTD_ASSIGN_OR_RETURN(options.gid, socket_group(what, group, automatic));
  auto endpoint = ipc::Endpoint::listen(
      io_, options, [this, role](UniqueFd socket) { accept(role, std::move(socket)); },
      [this, what](const Status& trouble) { log_.warning(what + " socket: " + trouble.message()); });
  if (!endpoint.ok()) return endpoint.status().with_context(what + " socket");
  endpoints_.push_back(*std::move(endpoint));
  return {};
}

Status Server::State::run() {
  wait_for_signal();
  if (config_.ready_after == "socket" || config_.models.empty()) tell_ready();
  load_desired(config_.models);
  io_.run();
  for (auto& [id, client] : clients_) client.session->close(Status::unavailable("weightd is stopping"));
  log_.info("weightd stopped");
  return {};
}

void Server::State::tell_ready() {
  if (ready_) return;
  ready_ = true;
  const Status status = notify("READY=1\nSTATUS=serving");
  if (!status.ok()) log_.warning("service manager: " + status.message());
}

void Server::State::wait_for_signal() {
  signals_.async_wait([this](const error_code& error, int signal) {
    if (error) return;
    if (signal == SIGHUP) {
      on_reload();
      wait_for_signal();
    } else {
      begin_stop(signal == SIGTERM ? "SIGTERM" : "SIGINT");
    }
  });
}

void Server::State::begin_stop(const std::string& reason) {
  stopping_ = true;
  log_.info("stopping on " + reason + ": " + std::to_string(keeper_.registry().lease_count()) + " leases are held");
  (void)notify("STOPPING=1");
  endpoints_.clear();
  for (auto& [id, client] : clients_) {
    if (client.role == Role::kData) client.session->push({0, ipc::EventReply{ipc::ShuttingDownEvent{}}});
  }
  keeper_.stop([this] { io_.stop(); });
}

void Server::State::on_reload() {
  Status reopened = log_.reopen();
  if (!reopened.ok()) log_.error("log: " + reopened.message());
  auto wanted = reload_();
  if (wanted.ok())
    apply_config(wanted->values);
  else
    log_.error("reload refused, the old configuration stays: " + wanted.status().message());
}

void Server::State::apply_config(const Config& wanted) {
  auto access = make_access(wanted);
  if (!access.ok()) {
    log_.error("reload refused, the old configuration stays: " + access.status().message());
    return;
  }
  const ConfigChanges changes = compare_configs(config_, wanted);
  Config next = wanted;
  for (const Option& option : options()) {
    if (option.reloadable) continue;
    std::visit([&](auto member) { next.*member = config_.*member; }, option.member);
  }
  std::vector<ModelEntry> added;
  for (const ModelEntry& entry : next.models) {
    if (std::find(config_.models.begin(), config_.models.end(), entry) == config_.models.end()) added.push_back(entry);
  }
  access_ = *std::move(access);
  config_ = next;
  keeper_.set_config(next);
  log_.set_level(log_level_from_name(next.log_level));
  log_.info("configuration reloaded; changed: " + (changes.applied.empty() ? "nothing" : join(changes.applied)) +
            (changes.need_restart.empty() ? "" : "; needs a restart: " + join(changes.need_restart)));
  load_desired(added);
}

// --- connections ---------------------------------------------------------------------------------------------------------

void Server::State::accept(Role role, UniqueFd socket) {
  auto peer = ipc::peer_of(socket.get());
  if (!peer.ok()) return complain(std::string(role_name(role)) + " socket: " + peer.status().message());
  SessionInfo info;
  info.process = {peer->pidfd.valid() ? peer->pid : 0, peer->start_ticks};
  info.uid = peer->uid;
  info.command = peer->command;
  const Status admitted = admit(role, *peer);
  const SessionId id = keeper_.open_session(info);
  Client& client = clients_[id];
  client.role = role;
  client.who = std::string(role_name(role)) + " socket: '" + peer->command + "' (pid " + std::to_string(peer->pid) + ", uid " +
               std::to_string(peer->uid) + ")";
  client.process = info.process;
  client.uid = peer->uid;
  client.pidfd = std::move(peer->pidfd);
  client.session =
      Session::start(io_, std::move(socket), session_limits(config_),
                     {[this, id](ipc::Request&& request, const Status& foreign) { on_request(id, std::move(request), foreign); },
                      [this, id](const Status& why) { on_closed(id, why); }});
  if (!admitted.ok()) client.session->refuse(admitted);
}

Status Server::State::admit(Role role, const ipc::Peer& peer) const {
  const auto& list = role == Role::kData ? access_.data : access_.control;
  if (!list.allows(peer)) {
    const std::string key(role_name(role));
    return Status::permission_denied("user " + std::to_string(peer.uid) + " may not use the " + key + " socket (" + key +
                                     "_users, " + key + "_groups)");
  }
  const auto count = std::count_if(clients_.begin(), clients_.end(), [&](const auto& entry) { return entry.second.role == role; });
  if (static_cast<uint64_t>(count) >= config_.max_sessions) {
    return Status::resource_exhausted("there are " + std::to_string(count) + " connections, the most allowed (max_sessions)");
  }
  return {};
}

void Server::State::on_closed(SessionId id, const Status& why) {
  const auto entry = clients_.find(id);
  if (entry == clients_.end()) return;
  if (why.code() != StatusCode::kUnavailable) complain(entry->second.who + ": connection ended: " + why.message());
  const Process process = entry->second.process;
  UniqueFd pidfd = std::move(entry->second.pidfd);
  clients_.erase(entry);
  commands_.erase(commands_.lower_bound({id, 0}), commands_.lower_bound({id + 1, 0}));
  keeper_.close_session(id, process, std::move(pidfd));
}

/// Peers can cause these lines, so there is a limit to them.
void Server::State::complain(const std::string& line) {
  const Time now = Clock::now();
  if (now - complaints_since_ > std::chrono::seconds(1)) {
    if (complaints_ > kComplaintsPerSecond) {
      log_.warning(std::to_string(complaints_ - kComplaintsPerSecond) + " more lines about peers were left out");
    }
    complaints_since_ = now;
    complaints_ = 0;
  }
  if (++complaints_ <= kComplaintsPerSecond) log_.warning(line);
}

// --- requests ------------------------------------------------------------------------------------------------------------

void Server::State::on_request(SessionId id, ipc::Request&& request, const Status& foreign) {
  Client& client = clients_.at(id);
  const uint64_t request_id = request.id;
  if (!foreign.ok() && !served_for_every_version(request)) return client.session->refuse(foreign, request_id);
  if (client.role == Role::kData && !data_may_ask(request)) {
    return reply({id, request_id}, {request_id, Status::permission_denied("this request is for the control socket")});
  }
  if (stopping_) return reply({id, request_id}, {request_id, Status::unavailable("weightd is stopping")});
  handle(id, client, std::move(request));
}

void Server::State::handle(SessionId id, Client& client, ipc::Request&& request) {
  const Ticket ticket{id, request.id};
  if (const auto* hello_request = std::get_if<ipc::HelloRequest>(&request.body)) {
    log_.debug(client.who + ": hello from '" + printable(hello_request->name) + "', " + printable(hello_request->build));
    reply(ticket, {request.id, hello()});
  } else if (std::holds_alternative<ipc::ListRequest>(request.body)) {
    reply(ticket, {request.id, ipc::ModelsReply{models(client.role)}});
  } else if (const auto* acquire = std::get_if<ipc::AcquireRequest>(&request.body)) {
    keeper_.acquire(ticket, *acquire);
  } else if (const auto* release = std::get_if<ipc::ReleaseRequest>(&request.body)) {
    keeper_.release(ticket, release->lease);
  } else if (std::holds_alternative<ipc::StatusRequest>(request.body)) {
    reply(ticket, {request.id, status()});
  } else if (const auto* load = std::get_if<ipc::LoadRequest>(&request.body)) {
    const bool any_path = config_.allow_any_path && (client.uid == 0 || client.uid == ::geteuid());
    commands_[ticket] = client.who + ": load '" + printable(load->model) + "' from '" + printable(load->path) + "'";
    keeper_.load(ticket, *load, any_path);
  } else if (const auto* unload = std::get_if<ipc::UnloadRequest>(&request.body)) {
    commands_[ticket] = client.who + ": unload '" + printable(unload->model) + "'";
    keeper_.unload(ticket, *unload);
  } else if (std::holds_alternative<ipc::LeasesRequest>(request.body)) {
    reply(ticket, {request.id, ipc::LeasesReply{bounded(keeper_.registry().leases(Clock::now()))}});
  } else if (const auto* verify = std::get_if<ipc::VerifyRequest>(&request.body)) {
    keeper_.verify(ticket, verify->model);
  } else if (std::holds_alternative<ipc::MemoryRequest>(request.body)) {
    on_memory(ticket);
  } else if (std::holds_alternative<ipc::DoctorRequest>(request.body)) {
    on_doctor(ticket);
  } else {
    reply(ticket, {request.id, ipc::VersionReply{hello()}});
  }
}

void Server::State::reply(const Ticket& ticket, ipc::Response response, std::vector<UniqueFd> fds) {
  const auto client = clients_.find(ticket.session);
  if (client == clients_.end()) return;
  if (auto* error = std::get_if<Status>(&response.body)) *error = bounded(*error);
  client->second.session->answer(std::move(response), std::move(fds));
}

void Server::State::on_answer(Answer&& answer) {
  const Ticket ticket = answer.ticket;
  if (ticket.session == 0) {
    const auto* error = std::get_if<Status>(&answer.result);
    return on_desired(ticket, error != nullptr ? *error : Status());
  }
  log_outcome(answer);
  if (auto* error = std::get_if<Status>(&answer.result)) return reply(ticket, {ticket.request, *error});
  if (const auto* granted = std::get_if<Granted>(&answer.result)) return on_granted(ticket, *granted);
  if (std::holds_alternative<Released>(answer.result)) return reply(ticket, {ticket.request, ipc::ReleasedReply{}});
  if (auto* loaded = std::get_if<Loaded>(&answer.result)) {
    return reply(ticket, {ticket.request, ipc::LoadedReply{for_administrator(std::move(loaded->model))}});
  }
  auto& unloaded = std::get<ipc::UnloadedReply>(answer.result);
  unloaded.holders = bounded(std::move(unloaded.holders));
  reply(ticket, {ticket.request, std::move(unloaded)});
}

/// Changes that people ask for are worth a line each.
void Server::State::log_outcome(const Answer& answer) {
  const auto command = commands_.find(answer.ticket);
  if (command == commands_.end()) return;
  const auto* error = std::get_if<Status>(&answer.result);
  const auto* unloaded = std::get_if<ipc::UnloadedReply>(&answer.result);
  if (error != nullptr)
    log_.warning(command->second + ": " + error->to_string());
  else if (unloaded == nullptr)
    log_.info(command->second + ": done");
  else if (unloaded->freed)
    log_.info(command->second + ": freed " + human_bytes(unloaded->bytes));
  else
    log_.info(command->second + ": draining, " + std::to_string(unloaded->holders.size()) + " leases hold " +
              human_bytes(unloaded->bytes));
  commands_.erase(command);
}

void Server::State::on_granted(const Ticket& ticket, const Granted& granted) {
  const auto view = keeper_.registry().view(granted.generation);
  WEIGHTD_CHECK(view.has_value());
  ipc::AcquiredReply acquired;
  acquired.lease = granted.lease;
  acquired.model = for_worker(keeper_.registry().summary(granted.generation));
  acquired.arena_bytes = view->plan->arena_bytes;
  acquired.chunk_bytes = view->memory->chunk_bytes;
  acquired.table_bytes = view->memory->table_bytes;
  acquired.ipc_handle = view->memory->ipc_handle;
  auto fds = duplicates(*view->memory);
  if (!fds.ok()) {
    keeper_.take_back(granted.lease);
    return reply(ticket, {ticket.request, fds.status()});
  }
  acquired.fd_count = static_cast<uint32_t>(fds->size());
  reply(ticket, {ticket.request, std::move(acquired)}, *std::move(fds));
}

void Server::State::on_scrubbed(const Ticket& ticket, Result<ipc::VerifiedReply> scrubbed) {
  if (scrubbed.ok())
    reply(ticket, {ticket.request, *std::move(scrubbed)});
  else
    reply(ticket, {ticket.request, scrubbed.status()});
}

void Server::State::on_notice(const Notice& notice) {
  const bool published = notice.kind == Notice::Kind::kPublished;
  if (notice.kind == Notice::Kind::kLost) {
    const std::string line = "model '" + printable(notice.model.name) + "', generation " + std::to_string(notice.generation) +
                             ": " + printable(notice.model.failure, 400) + "; " + std::to_string(notice.sessions.size()) +
                             " connections hold it";
    if (stopping_)
      log_.info(line);
    else
      log_.error(line + "; unload it and load it again");
  }
  if (published) {
    log_.info("model '" + printable(notice.model.name) + "' published: generation " + std::to_string(notice.generation) + ", " +
              human_bytes(notice.model.resident_bytes) + " resident for " + human_bytes(notice.model.logical_bytes) + ", content " +
              notice.model.content_id.substr(0, 12));
  }
  ipc::EventReply event;
  if (published)
    event.event = ipc::PublishedEvent{for_worker(notice.model)};
  else if (notice.kind == Notice::Kind::kLost)
    event.event = ipc::LostEvent{for_worker(notice.model)};
  else
    event.event = ipc::DrainRequestedEvent{for_worker(notice.model)};
  for (auto& [id, client] : clients_) {
    if (client.role == Role::kData && (published || notice.sessions.count(id) > 0)) client.session->push({0, event});
  }
}

// --- what the driver and the machine say ----------------------------------------------------------------------------------

void Server::State::on_memory(const Ticket& ticket) {
  const auto answer = [this, ticket](std::vector<ipc::GpuSummary> gpus, std::string problem) {
    ipc::MemoryReply memory{status(), bounded(keeper_.registry().leases(Clock::now())), std::move(gpus), std::move(problem)};
    reply(ticket, {ticket.request, std::move(memory)});
  };
  if (!keeper_.devices().cuda()) return answer({}, "");
  keeper_.probe([this, answer](const Result<ipc::ProbeReply>& probe) {
    if (!probe.ok()) return answer({}, bounded_text(probe.status().message()));
    std::vector<ipc::GpuSummary> gpus;
    for (const ipc::GpuSummary& gpu : probe->gpus) {
      if (keeper_.registry().ledger().find(gpu.uuid) != nullptr) gpus.push_back(gpu);
    }
    const bool known = std::all_of(gpus.begin(), gpus.end(), [](const auto& gpu) { return gpu.nvml_known; });
    std::string problem = gpus.empty() ? probe->problem : known ? "" : probe->nvml_problem;
    if (problem.empty() && gpus.size() < keeper_.devices().devices.size()) problem = "the driver does not show every GPU any more";
    answer(std::move(gpus), std::move(problem));
  });
}

/// Collects what may take its time, and answers with what is there when time is up.
void Server::State::on_doctor(const Ticket& ticket) {
  struct Visit {
    DoctorFacts facts;
    boost::asio::steady_timer timer;
    bool answered = false;
    explicit Visit(boost::asio::io_context& io) : timer(io) {}
  };
  const auto visit = std::make_shared<Visit>(io_);
  const auto finish = [this, ticket, visit](bool late) {
    if (visit->answered || (!late && (!visit->facts.probe || !visit->facts.files))) return;
    visit->answered = true;
    visit->timer.cancel();
    DoctorFacts facts = doctor_facts();
    facts.probe = std::move(visit->facts.probe);
    facts.files = std::move(visit->facts.files);
    reply(ticket, {ticket.request, ipc::DoctorReply{diagnose(facts)}});
  };
  keeper_.probe([visit, finish](const Result<ipc::ProbeReply>& probe) {
    visit->facts.probe.emplace(probe);
    finish(false);
  });
  const auto files = std::make_shared<FileFacts>();
  keeper_.inspect([files, config = config_] { *files = look_at_files(config); },
                  [visit, files, finish] {
                    visit->facts.files = *files;
                    finish(false);
                  });
  // A little more than the probe is given, so that its own refusal is what is shown.
  visit->timer.expires_after(std::chrono::milliseconds(config_.nvml_timeout_ms + 500));
  visit->timer.async_wait([finish](const error_code& error) {
    if (!error) finish(true);
  });
}

DoctorFacts Server::State::doctor_facts() const {
  DoctorFacts facts;
  facts.config = config_;
  facts.devices = keeper_.devices();
  for (const auto& [uuid, held] : held_gpus_) facts.held_gpus.emplace(uuid, held.status());
  facts.ledger = keeper_.registry().devices();
  facts.models = keeper_.registry().models();
  facts.contexts = keeper_.processes();
  std::set<std::pair<std::string, int32_t>> holders;
  for (const ipc::LeaseSummary& lease : keeper_.registry().leases(Clock::now())) holders.emplace(lease.device, lease.pid);
  for (const auto& [device, pid] : holders) ++facts.contexts[device];
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0) facts.fd_limit = limit.rlim_cur;
  facts.fd_count = own_fd_count();
  for (const ipc::ModelSummary& model : facts.models) {
    facts.largest_model_chunks = std::max(facts.largest_model_chunks, model.resident_bytes / config_.chunk_bytes + 1);
  }
  return facts;
}

// --- views ---------------------------------------------------------------------------------------------------------------

ipc::HelloReply Server::State::hello() const {
  return {std::string(build_id()), ipc::kProtocolVersion, keeper_.devices().backend, instance_, ::getpid()};
}

std::vector<ipc::ModelSummary> Server::State::models(Role role) const {
  std::vector<ipc::ModelSummary> all = keeper_.registry().models();
  for (ipc::ModelSummary& model : all) {
    model = role == Role::kData ? for_worker(std::move(model)) : for_administrator(std::move(model));
  }
  return all;
}

ipc::StatusReply Server::State::status() const {
  ipc::StatusReply reply;
  reply.version = hello();
  reply.version.backend_reason = bounded_text(keeper_.devices().why);
  reply.uptime_ms = static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - started_).count());
  reply.devices = keeper_.registry().devices();
  reply.models = models(Role::kControl);
  reply.session_count = static_cast<uint32_t>(clients_.size());
  reply.lease_count = keeper_.registry().lease_count();
  reply.fd_count = own_fd_count();
  reply.rss_bytes = own_rss_bytes();
  return reply;
}

// --- desired state -------------------------------------------------------------------------------------------------------

void Server::State::load_desired(const std::vector<ModelEntry>& entries) {
  for (const ModelEntry& entry : entries) {
    const uint64_t request = next_desired_++;
    desired_.emplace(request, entry);
    keeper_.load({0, request}, {entry.name, entry.path, entry.device, 0, entry.transport}, true);
  }
}

void Server::State::on_desired(const Ticket& ticket, const Status& outcome) {
  const auto entry = desired_.find(ticket.request);
  if (entry == desired_.end()) return;
  if (!outcome.ok()) {
    log_.error("[[model]] '" + printable(entry->second.name) + "' was not loaded: " + outcome.message());
  }
  desired_.erase(entry);
  if (desired_.empty()) tell_ready();
}

// --- the public face -----------------------------------------------------------------------------------------------------

Server::Server(std::unique_ptr<State> state) : state_(std::move(state)) {}
Server::~Server() = default;

Result<std::unique_ptr<Server>> Server::create(const EffectiveConfig& config, Log& log, Reload reload) {
  WEIGHTD_ASSIGN_OR_RETURN(DeviceSet devices, find_devices(config.values));
  auto state = std::make_unique<State>(config, log, std::move(reload), std::move(devices));
  WEIGHTD_RETURN_IF_ERROR(state->open());
  return std::unique_ptr<Server>(new Server(std::move(state)));
}

Status Server::run() { return state_->run(); }

}  // namespace weightd::daemon
