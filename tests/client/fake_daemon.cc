// SPDX-License-Identifier: Apache-2.0
#include "tests/client/fake_daemon.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <utility>

namespace weightd::test {
namespace {

constexpr std::chrono::seconds kLongTime{60};

}  // namespace

TempFolder::TempFolder() {
  std::string pattern = (std::filesystem::temp_directory_path() / "weightd-client-XXXXXX").string();
  WEIGHTD_CHECK(::mkdtemp(pattern.data()) != nullptr);
  path_ = pattern;
}

TempFolder::~TempFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

FakeDaemon::FakeDaemon(std::string path, Intercept intercept, std::string instance_name)
    : path_(std::move(path)), build_(std::move(instance_name)), intercept_(std::move(intercept)) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  WEIGHTD_CHECK(path_.size() < sizeof(address.sun_path));
  std::memcpy(address.sun_path, path_.data(), path_.size());
  ::unlink(path_.c_str());
  listener_ = UniqueFd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  WEIGHTD_CHECK(::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
  WEIGHTD_CHECK(::listen(listener_.get(), 64) == 0);
  int ends[2];
  WEIGHTD_CHECK(::pipe2(ends, O_CLOEXEC | O_NONBLOCK) == 0);
  wake_read_ = UniqueFd(ends[0]);
  wake_write_ = UniqueFd(ends[1]);
  thread_ = std::thread([this] { run(); });
}

FakeDaemon::~FakeDaemon() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake();
  thread_.join();
  ::unlink(path_.c_str());
}

void FakeDaemon::wake() { (void)!::write(wake_write_.get(), "x", 1); }

void FakeDaemon::publish(std::shared_ptr<const SealedModel> model) {
  const std::lock_guard lock(mutex_);
  models_.push_back(std::move(model));
}

void FakeDaemon::forget(const std::string& name) {
  const std::lock_guard lock(mutex_);
  std::erase_if(models_, [&](const auto& model) { return model->summary.name == name; });
}

void FakeDaemon::send_event(const ipc::EventReply& event) {
  const std::lock_guard lock(mutex_);
  for (Session& session : sessions_) reply(session, 0, event);
}

void FakeDaemon::hang_up() {
  uint64_t round = 0;
  {
    const std::lock_guard lock(mutex_);
    for (Session& session : sessions_) session.over = true;
    round = rounds_;
  }
  wake();
  WEIGHTD_CHECK(wait_for([&] { return rounds_ > round; }));
}

bool FakeDaemon::wait_for(const std::function<bool()>& condition) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, kLongTime, condition);
}

bool FakeDaemon::wait_for_leases(size_t count) {
  return wait_for([&] {
    size_t leases = 0;
    for (const Session& session : sessions_) leases += session.leases.size();
    return leases == count;
  });
}

size_t FakeDaemon::lease_count() const {
  const std::lock_guard lock(mutex_);
  size_t leases = 0;
  for (const Session& session : sessions_) leases += session.leases.size();
  return leases;
}

size_t FakeDaemon::request_count(size_t body_index) const {
  const std::lock_guard lock(mutex_);
  const auto found = requests_.find(body_index);
  return found == requests_.end() ? 0 : found->second;
}

size_t FakeDaemon::session_count() const {
  const std::lock_guard lock(mutex_);
  return sessions_.size();
}

std::vector<std::string> FakeDaemon::client_names() const {
  const std::lock_guard lock(mutex_);
  return client_names_;
}

void FakeDaemon::run() {
  while (true) {
    std::vector<pollfd> polled{{listener_.get(), POLLIN, 0}, {wake_read_.get(), POLLIN, 0}};
    {
      const std::lock_guard lock(mutex_);
      sessions_.remove_if([](const Session& session) { return session.over; });
      ++rounds_;
      changed_.notify_all();
      if (stop_) {
        sessions_.clear();
        return;
      }
      for (const Session& session : sessions_) polled.push_back({session.channel.fd(), POLLIN, 0});
    }
    ::poll(polled.data(), polled.size(), -1);
    char drained[64];
    while (::read(wake_read_.get(), drained, sizeof(drained)) > 0) {
    }
    const std::lock_guard lock(mutex_);
    for (Session& session : sessions_) read(session);
    if ((polled[0].revents & POLLIN) != 0) accept();
    changed_.notify_all();
  }
}

void FakeDaemon::accept() {
  UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket.valid()) return;
  sessions_.emplace_back(std::move(socket));
  if (!sessions_.back().channel.try_flush().ok()) sessions_.back().over = true;
}

void FakeDaemon::read(Session& session) {
  while (!session.over) {
    Result<std::optional<ipc::Frame>> frame = session.channel.try_receive();
    if (!frame.ok()) session.over = true;
    if (!frame.ok() || !frame->has_value()) return;
    const Result<ipc::Request> request = ipc::decode_request((*frame)->body);
    if (!request.ok()) {
      session.over = true;
      return;
    }
    ++requests_[request->body.index()];
    if (!intercept_ || !intercept_(*this, session, *request)) serve(session, *request);
  }
}

void FakeDaemon::serve(Session& session, const ipc::Request& request) {
  if (const auto* hello = std::get_if<ipc::HelloRequest>(&request.body)) {
    client_names_.push_back(hello->name);
    reply(session, request.id, ipc::HelloReply{build_, ipc::kProtocolVersion, "host", 1, 1});
  } else if (std::holds_alternative<ipc::ListRequest>(request.body)) {
    ipc::ModelsReply models;
    for (const auto& model : models_) models.models.push_back(model->summary);
    reply(session, request.id, models);
  } else if (const auto* acquire_request = std::get_if<ipc::AcquireRequest>(&request.body)) {
    acquire(session, request.id, *acquire_request);
  } else if (const auto* release = std::get_if<ipc::ReleaseRequest>(&request.body)) {
    if (session.leases.erase(release->lease) != 0) {
      reply(session, request.id, ipc::ReleasedReply{});
    } else {
      reply(session, request.id, Status::not_found("no such lease"));
    }
  } else {
    reply(session, request.id, Status::unsupported("the fake daemon does not do that"));
  }
}

void FakeDaemon::acquire(Session& session, uint64_t id, const ipc::AcquireRequest& request) {
  std::shared_ptr<const SealedModel> found;
  for (const auto& model : models_) {
    const bool wanted = request.content_id.empty() || model->summary.content_id == request.content_id;
    if (model->summary.name == request.model && wanted) found = model;
  }
  if (found == nullptr) return reply(session, id, Status::not_found("no model '" + request.model + "'"));
  std::vector<UniqueFd> fds = found->copies_of_fds();
  if (found->summary.transport == "legacy") fds.resize(1);
  reply(session, id, acquired(*found, grant(session)), std::move(fds));
}

ipc::AcquiredReply FakeDaemon::acquired(const SealedModel& model, uint64_t lease) {
  ipc::AcquiredReply reply;
  reply.lease = lease;
  reply.model = model.summary;
  reply.arena_bytes = model.table.arena_bytes;
  reply.chunk_bytes = model.chunk_bytes;
  reply.fd_count = static_cast<uint32_t>(model.chunks.size() + 1);
  reply.table_bytes = model.table_bytes;
  if (model.summary.transport == "legacy") {  // of memory that nobody has
    reply.fd_count = 1;
    reply.ipc_handle.resize(ipc::kIpcHandleBytes);
  }
  return reply;
}

std::shared_ptr<const SealedModel> FakeDaemon::model(const std::string& name) const {
  std::shared_ptr<const SealedModel> found;
  for (const auto& known : models_) {
    if (known->summary.name == name) found = known;
  }
  return found;
}

uint64_t FakeDaemon::grant(Session& session) {
  session.leases.insert(next_lease_);
  return next_lease_++;
}

void FakeDaemon::reply(Session& session, uint64_t id, decltype(ipc::Response::body) body, std::vector<UniqueFd> fds) {
  std::vector<UniqueFd> first, rest;
  for (UniqueFd& fd : fds) (first.size() < ipc::kMaxFdsPerFrame ? first : rest).push_back(std::move(fd));
  if (!session.channel.send({ipc::encode(ipc::Response{id, std::move(body)}), std::move(first)}).ok()) session.over = true;
  if (rest.empty()) return;
  const auto count = static_cast<uint32_t>(std::min<size_t>(rest.size(), ipc::kMaxFdsPerFrame));
  reply(session, id, ipc::MoreFdsReply{count}, std::move(rest));
}

}  // namespace weightd::test
