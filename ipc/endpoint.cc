// SPDX-License-Identifier: Apache-2.0
#include "ipc/endpoint.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>

#include "base/text.h"

namespace weightd::ipc {
namespace {

namespace asio = boost::asio;
using std::chrono::steady_clock;

constexpr size_t kMaxPathBytes = sizeof(sockaddr_un{}.sun_path) - 1;
constexpr int kAcceptsPerWakeup = 64;  // then others on the loop have their turn
constexpr std::chrono::milliseconds kAcceptPause{100};
constexpr std::chrono::seconds kPathPause{1};
constexpr std::chrono::seconds kReportPause{1};
constexpr uint32_t kWatched = IN_CREATE | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO | IN_DELETE_SELF | IN_MOVE_SELF | IN_ONLYDIR;

/// Which file a name meant when we last looked.
struct FileId {
  dev_t device = 0;
  ino_t inode = 0;
  bool operator==(const FileId&) const = default;
};
FileId id_of(const struct stat& info) { return {info.st_dev, info.st_ino}; }

/// nullopt: nothing there.
Result<std::optional<struct stat>> look_at(const std::string& path) {
  struct stat info {};
  if (::lstat(path.c_str(), &info) == 0) return std::optional<struct stat>(info);
  if (errno == ENOENT) return std::optional<struct stat>();
  return status_from_errno(errno, printable(path));
}

std::string_view kind_of(mode_t mode) {
  switch (mode & S_IFMT) {
    case S_IFREG:
      return "a regular file";
    case S_IFDIR:
      return "a folder";
    case S_IFIFO:
      return "a FIFO";
    case S_IFLNK:
      return "a symbolic link";
    case S_IFCHR:
    case S_IFBLK:
      return "a device";
    default:
      return "no socket";
  }
}

sockaddr_un address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}
const sockaddr* generic(const sockaddr_un& address) { return reinterpret_cast<const sockaddr*>(&address); }

Status check_path(const std::string& path) {
  const std::string shown = "socket path '" + printable(path) + "'";
  if (path.size() > kMaxPathBytes) {
    return Status::invalid_argument(shown + " has " + std::to_string(path.size()) + " bytes, at most " +
                                    std::to_string(kMaxPathBytes) + " are possible");
  }
  if (path.size() < 2 || path[0] != '/' || path.back() == '/')
    return Status::invalid_argument(shown + " must be absolute and name a file");
  if (path.find('\0') != std::string::npos) return Status::invalid_argument(shown + " holds a NUL byte");
  return {};
}

/// The lock outlives no process: a crashed daemon's is free at once. The file stays behind; removing it would let two daemons each
/// hold a lock of that name.
Result<UniqueFd> take_lock(const std::string& path) {
  const std::string shown = "lock file '" + printable(path) + "'";
  for (;;) {
    UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600));
    if (!fd.valid() && errno == ELOOP) return Status::already_exists(shown + " is a symbolic link: it is left as it is; remove it");
    if (!fd.valid()) return status_from_errno(errno, shown);
    struct stat info {};
    if (::fstat(fd.get(), &info) != 0) return status_from_errno(errno, shown);
    if (!S_ISREG(info.st_mode)) return Status::already_exists(shown + " is " + std::string(kind_of(info.st_mode)) + ": remove it");
    if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno == EINTR) continue;
      if (errno == EWOULDBLOCK) return Status::already_exists(shown + ": another daemon runs on this socket path");
      return status_from_errno(errno, shown);
    }
    WEIGHTD_ASSIGN_OR_RETURN(const auto now, look_at(path));
    if (now.has_value() && id_of(*now) == id_of(info)) return fd;  // else somebody removed it meanwhile
  }
}

/// Removes a socket that a crash left behind. Whatever else is at the path stays, and is an error.
Status clear_path(const std::string& path) {
  const std::string shown = "socket path '" + printable(path) + "'";
  WEIGHTD_ASSIGN_OR_RETURN(const auto found, look_at(path));
  if (!found.has_value()) return {};
  if (!S_ISSOCK(found->st_mode)) {
    return Status::already_exists(shown + " is " + std::string(kind_of(found->st_mode)) +
                                  ", not a socket: it is left as it is; remove it or configure another path");
  }
  const UniqueFd probe(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!probe.valid()) return status_from_errno(errno, "socket");
  const sockaddr_un address = address_of(path);
  if (::connect(probe.get(), generic(address), sizeof(address)) == 0 || errno != ECONNREFUSED) {
    return Status::already_exists(shown + ": another process serves it; stop that one or configure another path");
  }
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) return status_from_errno(errno, shown + ": removing the left-over socket");
  return {};
}

struct Bound {
  UniqueFd socket;
  FileId id;
};

/// Binds, sets owner and mode, and only then listens: nobody can connect before. The file is made with no more than the owner's
/// part of `mode` (the kernel takes it from the socket's own mode, less the umask, which is left alone: it belongs to the whole
/// process).
Result<Bound> bind_and_listen(const EndpointOptions& options) {
  const std::string shown = "socket '" + printable(options.path) + "'";
  Bound bound;
  bound.socket = UniqueFd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!bound.socket.valid()) return status_from_errno(errno, "socket");
  if (::fchmod(bound.socket.get(), options.mode & 0700U) != 0) return status_from_errno(errno, shown + ": fchmod");
  const sockaddr_un address = address_of(options.path);
  if (::bind(bound.socket.get(), generic(address), sizeof(address)) != 0) return status_from_errno(errno, shown + ": bind");
  const auto give_up = [&](const std::string& what) {
    Status status = status_from_errno(errno, shown + ": " + what);
    ::unlink(options.path.c_str());
    return status;
  };
  // By descriptor, so that no link that somebody puts there is followed.
  const UniqueFd file(::open(options.path.c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC));
  struct stat info {};
  if (!file.valid() || ::fstat(file.get(), &info) != 0) return give_up("open");
  bound.id = id_of(info);
  if (options.gid >= 0 && ::fchownat(file.get(), "", static_cast<uid_t>(-1), static_cast<gid_t>(options.gid), AT_EMPTY_PATH) != 0) {
    return give_up("setting group " + std::to_string(options.gid));
  }
  const std::string link = "/proc/self/fd/" + std::to_string(file.get());
  if (::chmod(link.c_str(), options.mode & 0777U) != 0) return give_up("chmod");
  if (::listen(bound.socket.get(), options.backlog) != 0) return give_up("listen");
  return bound;
}

/// At most one report a second; what was held back is counted.
class Reporter {
 public:
  explicit Reporter(Endpoint::OnTrouble on_trouble) : on_trouble_(std::move(on_trouble)) {}
  void report(const Status& status) {
    const auto now = steady_clock::now();
    if (last_.has_value() && now - *last_ < kReportPause) {
      ++held_back_;
      return;
    }
    last_ = now;
    const uint64_t held_back = std::exchange(held_back_, 0);
    if (!on_trouble_) return;
    on_trouble_(held_back == 0 ? status
                               : Status(status.code(), status.message() + " (" + std::to_string(held_back) + " more before)"));
  }

 private:
  Endpoint::OnTrouble on_trouble_;
  std::optional<steady_clock::time_point> last_;
  uint64_t held_back_ = 0;
};

/// Accepts on one listening socket. Handlers on the loop share it, so that it may be stopped while some are pending.
class Acceptor : public std::enable_shared_from_this<Acceptor> {
 public:
  Acceptor(asio::io_context& io, Endpoint::OnConnection on_connection, Endpoint::OnTrouble on_trouble)
      : socket_(io), pause_(io), on_connection_(std::move(on_connection)), reporter_(std::move(on_trouble)) {}

  /// Takes a new listening socket; who waits in the backlog of the one before is accepted first.
  Status serve(UniqueFd listening) {
    if (socket_.is_open()) (void)accept_some();
    if (stopped_) return {};
    ++epoch_;
    boost::system::error_code error;
    socket_.close(error);
    pause_.cancel();
    socket_.assign(listening.get(), error);
    if (error) return Status::io("watching the listening socket: " + error.message());
    (void)listening.release();
    reserve_spare();
    wait();
    return {};
  }
  void stop() {
    stopped_ = true;
    boost::system::error_code error;
    socket_.close(error);
    pause_.cancel();
  }

 private:
  enum class Shed { kOne, kNobodyWaits, kFailed };

  /// Goes on with accepting when the handler runs, unless the socket was exchanged or stopped meanwhile.
  auto resume() {
    return [self = shared_from_this(), epoch = epoch_](const boost::system::error_code& error) {
      if (!error && !self->stopped_ && epoch == self->epoch_) self->on_readable();
    };
  }
  void wait() { socket_.async_wait(asio::posix::stream_descriptor::wait_read, resume()); }
  void on_readable() {
    const bool can_go_on = accept_some();
    if (stopped_) return;
    if (can_go_on) {
      reserve_spare();
      wait();
    } else {
      // The socket stays readable, and nothing that helps happens at once: without a pause the loop would spin.
      pause_.expires_after(kAcceptPause);
      pause_.async_wait(resume());
    }
  }
  /// False when the process cannot take more connections now.
  bool accept_some() {
    bool exhausted = false;
    for (int i = 0; i < kAcceptsPerWakeup && !stopped_; ++i) {
      UniqueFd connection(::accept4(socket_.native_handle(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (connection.valid()) {
        on_connection_(std::move(connection));
        continue;
      }
      const int error = errno;
      if (error == EAGAIN || error == EWOULDBLOCK) return true;
      if (error == EINTR || error == ECONNABORTED || error == EPROTO || error == EPERM) continue;
      reporter_.report(status_from_errno(error, "accepting a connection"));
      if (error != EMFILE && error != ENFILE) return false;
      exhausted = true;
      const Shed shed = shed_one();
      if (shed == Shed::kNobodyWaits) return true;
      if (shed == Shed::kFailed) return false;
    }
    return !exhausted;
  }
  /// Without a free descriptor: gives the place of the spare one to the next connection and closes it, so that the client is told
  /// at once instead of waiting in the backlog.
  Shed shed_one() {
    spare_.reset();
    UniqueFd refused(::accept4(socket_.native_handle(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    const int error = errno;
    const bool accepted = refused.valid();
    refused.reset();
    reserve_spare();
    if (accepted) return Shed::kOne;
    return error == EAGAIN || error == EWOULDBLOCK ? Shed::kNobodyWaits : Shed::kFailed;
  }
  void reserve_spare() {
    if (!spare_.valid()) spare_ = UniqueFd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  }

  asio::posix::stream_descriptor socket_;
  asio::steady_timer pause_;
  Endpoint::OnConnection on_connection_;
  Reporter reporter_;
  UniqueFd spare_;
  uint64_t epoch_ = 0;  // of socket_
  bool stopped_ = false;
};

/// Keeps a path: its lock, its socket file, and a watch on its folder that binds again when the file is gone (CO-131). Where the
/// folder cannot be watched, it is looked at once a second.
class PathKeeper : public std::enable_shared_from_this<PathKeeper> {
 public:
  PathKeeper(asio::io_context& io, const EndpointOptions& options, std::shared_ptr<Acceptor> acceptor,
             Endpoint::OnTrouble on_trouble)
      : options_(options),
        lock_path_(options.path + ".lock"),
        folder_(options.path.substr(0, std::max<size_t>(options.path.rfind('/'), 1))),
        acceptor_(std::move(acceptor)),
        reporter_(std::move(on_trouble)),
        events_(io),
        pause_(io) {}

  Status start() {
    WEIGHTD_ASSIGN_OR_RETURN(lock_, take_lock(lock_path_));
    WEIGHTD_RETURN_IF_ERROR(clear_path(options_.path));
    WEIGHTD_RETURN_IF_ERROR(bind());
    if (Status status = open_events(); !status.ok()) reporter_.report(status);
    if (events_.is_open()) wait();
    if (!watch()) look_later();
    return {};
  }
  /// Removes the socket file if it is ours, then gives up the lock.
  void stop() {
    stopped_ = true;
    boost::system::error_code error;
    events_.close(error);
    pause_.cancel();
    const auto found = look_at(options_.path);
    if (bound_.has_value() && found.ok() && found->has_value() && id_of(**found) == *bound_) ::unlink(options_.path.c_str());
    lock_.reset();
  }

 private:
  Status bind() {
    WEIGHTD_ASSIGN_OR_RETURN(Bound bound, bind_and_listen(options_));
    bound_ = bound.id;
    return acceptor_->serve(std::move(bound.socket));
  }
  Status open_events() {
    const std::string what = "watching '" + printable(folder_) + "' by a timer only: inotify";
    UniqueFd fd(::inotify_init1(IN_NONBLOCK | IN_CLOEXEC));
    if (!fd.valid()) return status_from_errno(errno, what);
    boost::system::error_code error;
    events_.assign(fd.get(), error);
    if (error) return Status::io(what + ": " + error.message());
    (void)fd.release();
    return {};
  }
  bool watch() {
    if (!events_.is_open()) return false;
    watch_ = ::inotify_add_watch(events_.native_handle(), folder_.c_str(), kWatched);
    return watch_ >= 0;
  }
  void wait() {
    events_.async_wait(asio::posix::stream_descriptor::wait_read,
                       [self = shared_from_this()](const boost::system::error_code& error) {
                         if (error || self->stopped_) return;
                         if (self->read_events()) self->look();
                         if (!self->stopped_) self->wait();
                       });
  }
  /// Whether something happened that concerns us.
  bool read_events() {
    alignas(inotify_event) std::array<char, 4096> buffer;
    const std::string_view name = std::string_view(options_.path).substr(options_.path.rfind('/') + 1);
    bool ours = false;
    for (;;) {
      const ssize_t got = ::read(events_.native_handle(), buffer.data(), buffer.size());
      if (got <= 0) return ours;
      for (size_t at = 0; at < static_cast<size_t>(got);) {
        inotify_event event{};
        std::memcpy(&event, buffer.data() + at, sizeof(event));
        const std::string_view about = event.len == 0 ? std::string_view() : std::string_view(buffer.data() + at + sizeof(event));
        at += sizeof(event) + event.len;
        if ((event.mask & (IN_IGNORED | IN_DELETE_SELF | IN_MOVE_SELF)) != 0 && event.wd == watch_) lose_watch();
        ours = ours || about.empty() || about == name || about == std::string_view(lock_path_).substr(lock_path_.rfind('/') + 1);
      }
    }
  }
  /// The folder moved or is gone: what we watch is not what the path means.
  void lose_watch() {
    (void)::inotify_rm_watch(events_.native_handle(), watch_);
    watch_ = -1;
  }
  void look() {
    const bool watched = watch_ >= 0 || watch();
    Status status = settle();
    if (!status.ok()) reporter_.report(status);
    if (!stopped_ && (!watched || !status.ok())) look_later();
  }
  void look_later() {
    if (std::exchange(will_look_, true)) return;
    pause_.expires_after(kPathPause);
    pause_.async_wait([self = shared_from_this()](const boost::system::error_code& error) {
      self->will_look_ = false;
      if (!error && !self->stopped_) self->look();
    });
  }
  /// Makes lock and path ours again, if they are not.
  Status settle() {
    struct stat held {};
    WEIGHTD_ASSIGN_OR_RETURN(const auto lock_now, look_at(lock_path_));
    if (::fstat(lock_.get(), &held) != 0 || !lock_now.has_value() || !(id_of(*lock_now) == id_of(held))) {
      WEIGHTD_ASSIGN_OR_RETURN(lock_, take_lock(lock_path_));
    }
    WEIGHTD_ASSIGN_OR_RETURN(const auto found, look_at(options_.path));
    if (bound_.has_value() && found.has_value() && id_of(*found) == *bound_) return {};
    bound_.reset();
    WEIGHTD_RETURN_IF_ERROR(clear_path(options_.path));
    WEIGHTD_RETURN_IF_ERROR(bind());
    reporter_.report(Status::unavailable("socket '" + printable(options_.path) + "' was removed by somebody: bound again"));
    return {};
  }

  const EndpointOptions options_;
  const std::string lock_path_, folder_;
  std::shared_ptr<Acceptor> acceptor_;
  Reporter reporter_;
  UniqueFd lock_;
  std::optional<FileId> bound_;  // the socket file that we made
  asio::posix::stream_descriptor events_;
  int watch_ = -1;
  asio::steady_timer pause_;
  bool will_look_ = false;
  bool stopped_ = false;
};

class RealEndpoint : public Endpoint {
 public:
  explicit RealEndpoint(std::shared_ptr<Acceptor> acceptor, std::shared_ptr<PathKeeper> keeper = nullptr)
      : acceptor_(std::move(acceptor)), keeper_(std::move(keeper)) {}
  ~RealEndpoint() override {
    acceptor_->stop();
    if (keeper_) keeper_->stop();
  }

 private:
  std::shared_ptr<Acceptor> acceptor_;
  std::shared_ptr<PathKeeper> keeper_;  // null: the path is somebody else's
};

}  // namespace

Result<std::unique_ptr<Endpoint>> Endpoint::listen(asio::io_context& io, const EndpointOptions& options, OnConnection on_connection,
                                                   OnTrouble on_trouble) {
  WEIGHTD_RETURN_IF_ERROR(check_path(options.path));
  auto acceptor = std::make_shared<Acceptor>(io, std::move(on_connection), on_trouble);
  auto keeper = std::make_shared<PathKeeper>(io, options, acceptor, std::move(on_trouble));
  auto endpoint = std::make_unique<RealEndpoint>(std::move(acceptor), keeper);
  WEIGHTD_RETURN_IF_ERROR(keeper->start());
  return std::unique_ptr<Endpoint>(std::move(endpoint));
}

Result<std::unique_ptr<Endpoint>> Endpoint::adopt(asio::io_context& io, UniqueFd listening, OnConnection on_connection,
                                                  OnTrouble on_trouble) {
  int domain = 0, type = 0, accepts = 0;
  const auto option = [&](int name, int& value) {
    socklen_t bytes = sizeof(value);
    return ::getsockopt(listening.get(), SOL_SOCKET, name, &value, &bytes) == 0;
  };
  if (!option(SO_DOMAIN, domain) || !option(SO_TYPE, type) || !option(SO_ACCEPTCONN, accepts)) {
    return status_from_errno(errno, "inherited socket");
  }
  if (domain != AF_UNIX || type != SOCK_STREAM || accepts == 0) {
    return Status::invalid_argument("inherited socket: must be a listening Unix stream socket (ListenStream= with a path)");
  }
  const int flags = ::fcntl(listening.get(), F_GETFL);
  if (flags < 0 || ::fcntl(listening.get(), F_SETFL, flags | O_NONBLOCK) != 0 ||
      ::fcntl(listening.get(), F_SETFD, FD_CLOEXEC) != 0) {
    return status_from_errno(errno, "inherited socket");
  }
  auto acceptor = std::make_shared<Acceptor>(io, std::move(on_connection), std::move(on_trouble));
  WEIGHTD_RETURN_IF_ERROR(acceptor->serve(std::move(listening)));
  return std::unique_ptr<Endpoint>(std::make_unique<RealEndpoint>(std::move(acceptor)));
}

}  // namespace weightd::ipc
