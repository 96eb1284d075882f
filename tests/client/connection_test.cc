// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <thread>

#include "ipc/frame.h"
#include "ipc/memfd.h"
#include "tests/client/child_process.h"
#include "tests/client/fake_daemon.h"
#include "weightd/client.h"

namespace weightd {
namespace {

using std::chrono::milliseconds;
using test::FakeDaemon;
using test::in_forked_child;
using test::ModelBuilder;
using test::SealedModel;
using test::TempFolder;
using testing::HasSubstr;

constexpr size_t kAcquire = 2, kRelease = 3;                                     // in ipc::Request::body
constexpr const char* kStrangeGpu = "GPU-00000000-1111-2222-3333-444444444444";  // of no machine
static_assert(std::is_same_v<std::variant_alternative_t<kAcquire, decltype(ipc::Request::body)>, ipc::AcquireRequest>);
static_assert(std::is_same_v<std::variant_alternative_t<kRelease, decltype(ipc::Request::body)>, ipc::ReleaseRequest>);

ClientOptions options_for(const std::string& path) {
  ClientOptions options;
  options.socket_path = path;
  options.name = "connection_test";
  options.call_timeout = milliseconds(20'000);
  options.reconnect_backoff = milliseconds(0);
  return options;
}

std::shared_ptr<SealedModel> small_model(const std::string& name, uint64_t generation, uint16_t first_word = 0x3f80) {
  ModelBuilder builder;
  builder.add_raw("w", {2, 2}, {first_word, 0, 0, 0x3f80});
  auto model = std::make_shared<SealedModel>(builder.seal(name, generation));
  model->summary.content_id = model->table.content_id = name + "-" + std::to_string(first_word);
  model->seal_table();
  return model;
}

uint16_t first_word(const Model& model) {
  const Result<Tensor> tensor = model.tensor("w");
  if (!tensor.ok() || tensor->data().size() < 2) return 0xffff;
  uint16_t word = 0;
  std::memcpy(&word, tensor->data().data(), sizeof(word));
  return word;
}

/// A listener that answers a connection with the given bytes and reads no further.
class RawPeer {
 public:
  RawPeer(const std::string& path, std::vector<std::byte> words) : listener_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.data(), path.size());
    EXPECT_EQ(::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(::listen(listener_.get(), 8), 0);
    thread_ = std::thread([this, words = std::move(words)] {
      while (true) {
        UniqueFd peer(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
        if (!peer.valid()) return;
        (void)!::write(peer.get(), words.data(), words.size());
        peers_.push_back(std::move(peer));
      }
    });
  }
  ~RawPeer() {
    ::shutdown(listener_.get(), SHUT_RDWR);
    thread_.join();
  }

 private:
  UniqueFd listener_;
  std::vector<UniqueFd> peers_;
  std::thread thread_;
};

size_t open_descriptors() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

TEST(Connection, SaysHelloAndLearnsWhoAnswers) {
  const TempFolder folder;
  FakeDaemon daemon(folder / "s", {}, "9.8.7 (abc)");
  const Result<Client> client = Client::connect(options_for(folder / "s"));
  ASSERT_TRUE(client.ok()) << client.status().to_string();
  EXPECT_EQ(client->daemon_version(), "9.8.7 (abc)");
  EXPECT_EQ(client->backend(), "host");
  EXPECT_EQ(daemon.client_names(), std::vector<std::string>{"connection_test"});
  EXPECT_GE(client->event_fd(), 0);
}

TEST(Connection, TakesTheSocketFromTheEnvironmentAndTheProgramsName) {
  const TempFolder folder;
  FakeDaemon daemon(folder / "s");
  ASSERT_EQ(::setenv("WEIGHTD_SOCKET", (folder / "s").c_str(), 1), 0);
  const Result<Client> client = Client::connect();
  ASSERT_EQ(::unsetenv("WEIGHTD_SOCKET"), 0);
  ASSERT_TRUE(client.ok()) << client.status().to_string();
  EXPECT_EQ(daemon.client_names(), std::vector<std::string>{program_invocation_short_name});
}

TEST(Connection, NobodyThereIsUnavailable) {
  const TempFolder folder;
  EXPECT_EQ(Client::connect(options_for(folder / "none")).status().code(), StatusCode::kUnavailable);
}

TEST(Connection, CO_129_SocketPathLengths) {
  const TempFolder folder;
  const auto padded = [&](size_t length) {
    std::string path = folder / "";
    return path + std::string(length - path.size(), 's');
  };
  const std::string longest = padded(107);
  FakeDaemon daemon(longest);
  EXPECT_TRUE(Client::connect(options_for(longest)).ok());
  for (const size_t length : {108U, 200U, 5000U}) {
    const Status status = Client::connect(options_for(padded(length))).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr("107"));
    EXPECT_THAT(status.message(), HasSubstr(std::to_string(length)));
  }
}

TEST(Connection, CO_111_AnotherProtocolVersionIsReadablyUnsupported) {
  const TempFolder folder;
  const auto preamble = ipc::encode_preamble({57, 41});
  const RawPeer peer(folder / "s", {preamble.begin(), preamble.end()});
  const Status status = Client::connect(options_for(folder / "s")).status();
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_THAT(status.message(), HasSubstr("57"));
  EXPECT_THAT(status.message(), HasSubstr(std::to_string(ipc::kProtocolVersion)));
}

TEST(Connection, APeerOfAnotherKindIsRefused) {
  const TempFolder folder;
  const std::string words = "SSH-2.0-OpenSSH_9.2p1 Debian\r\n";
  const auto* bytes = reinterpret_cast<const std::byte*>(words.data());
  const RawPeer peer(folder / "s", {bytes, bytes + words.size()});
  EXPECT_EQ(Client::connect(options_for(folder / "s")).status().code(), StatusCode::kInvalidArgument);
}

TEST(Connection, ASilentDaemonIsGivenUpAtTheDeadline) {
  const TempFolder folder;
  const auto preamble = ipc::encode_preamble();
  const RawPeer peer(folder / "s", {preamble.begin(), preamble.end()});
  ClientOptions options = options_for(folder / "s");
  options.call_timeout = milliseconds(30);
  EXPECT_EQ(Client::connect(options).status().code(), StatusCode::kDeadlineExceeded);
}

TEST(Connection, CO_070_HalfAFrameAndTheEndIsAnError) {
  const TempFolder folder;
  const auto preamble = ipc::encode_preamble();
  std::vector<std::byte> words(preamble.begin(), preamble.end());
  const auto header = ipc::encode_frame_header({64, 0});
  words.insert(words.end(), header.begin(), header.end());
  FakeDaemon daemon(folder / "s", [&](FakeDaemon&, FakeDaemon::Session& session, const ipc::Request&) {
    EXPECT_EQ(::send(session.channel.fd(), words.data() + preamble.size(), header.size(), MSG_NOSIGNAL), ssize_t{8});
    session.over = true;
    return true;
  });
  const Status status = Client::connect(options_for(folder / "s")).status();
  EXPECT_EQ(status.code(), StatusCode::kCorruption) << status.to_string();
}

TEST(Connection, RefusesNamesThatNoModelCanHaveWithoutAsking) {
  const TempFolder folder;
  FakeDaemon daemon(folder / "s");
  Client client = Client::connect(options_for(folder / "s")).value();
  for (const std::string& name : {std::string(), std::string("../x"), std::string(256, 'x'), std::string("a\0b", 3)}) {
    EXPECT_EQ(client.acquire(name).status().code(), StatusCode::kInvalidArgument) << name;
  }
  AcquireOptions options;
  options.device = std::string(300, 'g');
  EXPECT_EQ(client.acquire("m", options).status().code(), StatusCode::kInvalidArgument);
  options.device = "\xff";
  EXPECT_EQ(client.acquire("m", options).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(daemon.request_count(kAcquire), 0U);
  EXPECT_EQ(client.acquire("m").status().code(), StatusCode::kNotFound);
  EXPECT_TRUE(client.list().ok());
}

TEST(Connection, ListsWhatTheDaemonSays) {
  const TempFolder folder;
  FakeDaemon daemon(folder / "s");
  daemon.publish(small_model("a", 3));
  Client client = Client::connect(options_for(folder / "s")).value();
  const std::vector<ModelInfo> models = client.list().value();
  ASSERT_EQ(models.size(), 1U);
  EXPECT_EQ(models[0].name, "a");
  EXPECT_EQ(models[0].generation, 3U);
  EXPECT_EQ(models[0].state, "published");
  EXPECT_EQ(models[0].device, "host");
  EXPECT_EQ(models[0].transport, "fd");
  EXPECT_EQ(models[0].residency, "fast");
  EXPECT_EQ(models[0].logical_bytes, 8U);
  EXPECT_EQ(models[0].tensor_count, 1U);
}

TEST(Connection, EventsArriveInOrderAndPoll) {
  const TempFolder folder;
  FakeDaemon daemon(folder / "s");
  daemon.publish(small_model("a", 1));
  Client client = Client::connect(options_for(folder / "s")).value();
  Model model = client.acquire("a").value();
  EXPECT_TRUE(client.poll_events().value().empty());

  ipc::ModelSummary summary = small_model("a", 1)->summary;
  summary.state = ipc::GenerationState::kDraining;
  daemon.send_event({ipc::DrainRequestedEvent{summary}});
  daemon.send_event({ipc::ShuttingDownEvent{}});
  pollfd polled{client.event_fd(), POLLIN, 0};
  ASSERT_EQ(::poll(&polled, 1, 60'000), 1);
  // A call in between takes events in, and keeps them.
  ASSERT_TRUE(client.list().ok());
  const std::vector<Event> events = client.poll_events().value();
  ASSERT_EQ(events.size(), 2U);
  EXPECT_EQ(events[0].kind, Event::Kind::kDrainRequested);
  EXPECT_EQ(events[0].model.name, "a");
  EXPECT_EQ(events[1].kind, Event::Kind::kShuttingDown);
  EXPECT_EQ(model.info().state, "draining");
  EXPECT_TRUE(client.poll_events().value().empty());
}

TEST(Connection, ALostModelSaysSoAtEachCall) {
  const TempFolder folder;
  FakeDaemon daemon(folder / "s");
  daemon.publish(small_model("a", 1));
  daemon.publish(small_model("b", 1));
  Client client = Client::connect(options_for(folder / "s")).value();
  Model model = client.acquire("a").value();
  const Model other = client.acquire("b").value();
  const Tensor tensor = model.tensor("w").value();

  ipc::ModelSummary summary = small_model("a", 1)->summary;
  summary.state = ipc::GenerationState::kLost;
  daemon.send_event({ipc::LostEvent{summary}});
  ASSERT_TRUE(client.list().ok());
  const std::vector<Event> events = client.poll_events().value();
  ASSERT_EQ(events.size(), 1U);
  EXPECT_EQ(events[0].kind, Event::Kind::kLost);
  EXPECT_EQ(events[0].model.name, "a");
  EXPECT_EQ(model.info().state, "lost");

  const std::vector<uint16_t> x(2, 0x3f80);
  std::vector<uint16_t> y(2, 0xdead);
  const std::vector<int32_t> rows{0};
  const Status status = tensor.gemm({x.data(), 1, 2, 2}, {y.data(), 1, 2, 2});
  EXPECT_EQ(status.code(), StatusCode::kLost);
  EXPECT_THAT(status.message(), HasSubstr("model 'a'"));
  EXPECT_EQ(tensor.decompress(std::as_writable_bytes(std::span(y))).code(), StatusCode::kLost);
  EXPECT_EQ(tensor.gather_rows(rows, {y.data(), 1, 2, 2}).code(), StatusCode::kLost);
  EXPECT_EQ(model.tensor("w").status().code(), StatusCode::kLost);
  EXPECT_EQ(tensor.workspace_bytes(), 0U);
  EXPECT_TRUE(tensor.data().empty());
  EXPECT_THAT(y, testing::Each(0xdead));
  EXPECT_EQ(first_word(other), 0x3f80) << "other models are not";

  // Acquired anew it is another mapping, even of the same content.
  daemon.publish(small_model("a", 2));
  const Model again = client.acquire("a").value();
  EXPECT_EQ(first_word(again), 0x3f80);
  EXPECT_EQ(tensor.gemm({x.data(), 1, 2, 2}, {y.data(), 1, 2, 2}).code(), StatusCode::kLost);
  EXPECT_TRUE(model.release().ok());
  EXPECT_EQ(daemon.lease_count(), 2U) << "the lease on what is lost is given back like any other";
}

TEST(Connection, AWordOfAnotherGenerationsLossChangesNothing) {
  const TempFolder folder;
  FakeDaemon daemon(folder / "s");
  daemon.publish(small_model("a", 2));
  Client client = Client::connect(options_for(folder / "s")).value();
  const Model model = client.acquire("a").value();
  ipc::ModelSummary summary = small_model("a", 1)->summary;
  summary.state = ipc::GenerationState::kLost;
  daemon.send_event({ipc::LostEvent{summary}});
  ASSERT_TRUE(client.list().ok());
  EXPECT_EQ(model.info().state, "published");
  EXPECT_EQ(first_word(model), 0x3f80);
}

TEST(Connection, CO_144_AModelOnAGpuThatIsNotHereGivesTheLeaseBack) {
  const TempFolder folder;
  FakeDaemon daemon(folder / "s");
  for (const char* transport : {"fd", "legacy", "pigeon"}) {
    const std::shared_ptr<SealedModel> model = small_model(transport, 1);
    model->summary.device = kStrangeGpu;
    model->summary.transport = transport;
    daemon.publish(model);
  }
  const std::shared_ptr<SealedModel> on_host = small_model("legacy-on-host", 1);
  on_host->summary.transport = "legacy";
  daemon.publish(on_host);
  Client client = Client::connect(options_for(folder / "s")).value();
  const size_t descriptors = open_descriptors();
  const auto acquire = [&](const char* name) {
    const Status status = client.acquire(name).status();
    EXPECT_TRUE(daemon.wait_for_leases(0)) << name;
    EXPECT_EQ(open_descriptors(), descriptors) << name;
    return status;
  };
  const StatusCode no_gpu = WEIGHTD_WITH_CUDA ? StatusCode::kUnavailable : StatusCode::kUnsupported;
  const Status status = acquire("fd");
  EXPECT_EQ(status.code(), no_gpu) << status.to_string();
  EXPECT_THAT(status.message(), HasSubstr("model 'fd'"));
  EXPECT_THAT(status.message(), testing::AnyOf(HasSubstr(kStrangeGpu), HasSubstr("libcuda.so.1")));
  EXPECT_EQ(acquire("legacy").code(), no_gpu);
  EXPECT_EQ(acquire("pigeon").code(), StatusCode::kUnsupported);
  EXPECT_EQ(acquire("legacy-on-host").code(), StatusCode::kUnsupported);
  daemon.publish(small_model("a", 1));
  EXPECT_EQ(first_word(client.acquire("a").value()), 0x3f80) << "and the connection goes on";
  EXPECT_EQ(daemon.session_count(), 1U);
}

TEST(Connection, ReconnectsAtTheNextCallAndLeasesAgainByContent) {
  const TempFolder folder;
  auto daemon = std::make_unique<FakeDaemon>(folder / "s", FakeDaemon::Intercept{}, "first");
  daemon->publish(small_model("a", 7));
  Client client = Client::connect(options_for(folder / "s")).value();
  const Model model = client.acquire("a").value();
  const std::byte* address = model.tensor("w")->data().data();
  daemon.reset();
  EXPECT_EQ(first_word(model), 0x3f80) << "the mapping outlives the daemon";
  EXPECT_EQ(client.list().status().code(), StatusCode::kUnavailable);
  EXPECT_EQ(client.event_fd(), -1);

  daemon = std::make_unique<FakeDaemon>(folder / "s", FakeDaemon::Intercept{}, "second");
  daemon->publish(small_model("a", 1));
  daemon->publish(small_model("a", 2, 0x4000));  // newer content under the name: not what this client holds
  ASSERT_TRUE(client.list().ok());
  EXPECT_EQ(client.daemon_version(), "second");
  EXPECT_GE(client.event_fd(), 0);
  EXPECT_EQ(daemon->lease_count(), 1U);
  EXPECT_EQ(model.info().generation, 1U);
  EXPECT_EQ(model.info().state, "published");
  EXPECT_EQ(model.tensor("w")->data().data(), address) << "nothing is mapped anew";
  EXPECT_EQ(first_word(client.acquire("a").value()), 0x4000);
}

TEST(Connection, ContentThatTheDaemonLostStaysUsableDetached) {
  const TempFolder folder;
  auto daemon = std::make_unique<FakeDaemon>(folder / "s");
  daemon->publish(small_model("a", 7));
  Client client = Client::connect(options_for(folder / "s")).value();
  Model model = client.acquire("a").value();
  daemon = nullptr;
  daemon = std::make_unique<FakeDaemon>(folder / "s");
  ASSERT_TRUE(client.list().ok());
  EXPECT_EQ(model.info().state, "detached");
  EXPECT_EQ(first_word(model), 0x3f80);
  EXPECT_EQ(daemon->lease_count(), 0U);

  // Once the daemon has it again, the next call after its event attaches it.
  daemon->publish(small_model("a", 1));
  daemon->send_event({ipc::PublishedEvent{small_model("a", 1)->summary}});
  ASSERT_TRUE(client.list().ok());
  ASSERT_TRUE(client.list().ok());
  EXPECT_EQ(model.info().state, "published");
  EXPECT_EQ(daemon->lease_count(), 1U);
  EXPECT_TRUE(model.release().ok());
  EXPECT_EQ(daemon->lease_count(), 0U);
}

TEST(Connection, ADetachedModelIsReleasedWithoutAWord) {
  const TempFolder folder;
  auto daemon = std::make_unique<FakeDaemon>(folder / "s");
  daemon->publish(small_model("a", 7));
  Client client = Client::connect(options_for(folder / "s")).value();
  Model model = client.acquire("a").value();
  daemon = nullptr;
  daemon = std::make_unique<FakeDaemon>(folder / "s");
  ASSERT_TRUE(client.list().ok());
  EXPECT_TRUE(model.release().ok());
  EXPECT_EQ(model.tensor("w").status().code(), StatusCode::kRevoked);
  ASSERT_TRUE(client.list().ok());
  EXPECT_EQ(daemon->request_count(kRelease), 0U);
}

TEST(Connection, AReleaseWhileTheDaemonIsAwayIsMadeGoodLater) {
  const TempFolder folder;
  auto daemon = std::make_unique<FakeDaemon>(folder / "s");
  daemon->publish(small_model("a", 7));
  Client client = Client::connect(options_for(folder / "s")).value();
  Model model = client.acquire("a").value();
  daemon = nullptr;
  EXPECT_TRUE(model.release().ok());
  EXPECT_EQ(model.tensor("w").status().code(), StatusCode::kRevoked);
  // The new daemon may hold an orphan for this process: it is leased, and given back.
  daemon = std::make_unique<FakeDaemon>(folder / "s");
  daemon->publish(small_model("a", 1));
  ASSERT_TRUE(client.list().ok());
  EXPECT_EQ(daemon->request_count(kAcquire), 1U);
  EXPECT_TRUE(daemon->wait_for_leases(0));
}

TEST(Connection, AHangUpBetweenCallsCostsNoCall) {
  const TempFolder folder;
  FakeDaemon daemon(folder / "s");
  daemon.publish(small_model("a", 1));
  Client client = Client::connect(options_for(folder / "s")).value();
  const Model model = client.acquire("a").value();
  for (int i = 0; i < 5; ++i) {
    daemon.hang_up();
    EXPECT_TRUE(client.list().ok());
    EXPECT_EQ(daemon.lease_count(), 1U);
  }
}

TEST(Connection, AHangUpInsideACallIsTriedOnceMore) {
  const TempFolder folder;
  std::atomic<int> hang_ups{1};
  FakeDaemon daemon(folder / "s", [&](FakeDaemon&, FakeDaemon::Session& session, const ipc::Request& request) {
    if (!std::holds_alternative<ipc::ListRequest>(request.body) || hang_ups-- <= 0) return false;
    session.over = true;
    return true;
  });
  Client client = Client::connect(options_for(folder / "s")).value();
  EXPECT_TRUE(client.list().ok());
  hang_ups = 2;
  EXPECT_EQ(client.list().status().code(), StatusCode::kUnavailable);
}

TEST(Connection, BacksOffBetweenFailingAttempts) {
  const TempFolder folder;
  auto daemon = std::make_unique<FakeDaemon>(folder / "s");
  ClientOptions options = options_for(folder / "s");
  options.reconnect_backoff = std::chrono::hours(1);  // bounded to 5 s by the library
  Client client = Client::connect(options).value();
  daemon = nullptr;
  EXPECT_EQ(client.list().status().code(), StatusCode::kUnavailable);
  daemon = std::make_unique<FakeDaemon>(folder / "s");
  const Status status = client.list().status();
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  EXPECT_THAT(status.message(), HasSubstr("the next attempt is due in"));
  EXPECT_EQ(daemon->session_count(), 0U) << "inside the pause nothing is tried";
  EXPECT_EQ(client.poll_events().status().code(), StatusCode::kUnavailable);
}

TEST(Connection, EventsBeforeALossAreStillDelivered) {
  const TempFolder folder;
  auto daemon = std::make_unique<FakeDaemon>(folder / "s");
  Client client = Client::connect(options_for(folder / "s")).value();
  daemon->send_event({ipc::ShuttingDownEvent{}});
  daemon = nullptr;
  const Result<std::vector<Event>> events = client.poll_events();
  ASSERT_TRUE(events.ok()) << events.status().to_string();
  ASSERT_EQ(events->size(), 1U);
  EXPECT_EQ(client.poll_events().status().code(), StatusCode::kUnavailable);
}

TEST(Connection, ALateAnswerIsDroppedAndALateLeaseGivenBack) {
  const TempFolder folder;
  uint64_t late_id = 0;
  FakeDaemon daemon(folder / "s", [&](FakeDaemon& fake, FakeDaemon::Session& session, const ipc::Request& request) {
    if (std::holds_alternative<ipc::AcquireRequest>(request.body) && late_id == 0) {
      late_id = request.id;
      return true;
    }
    if (std::holds_alternative<ipc::ListRequest>(request.body) && late_id != 0) {
      const auto model = fake.model("a");
      fake.reply(session, late_id, FakeDaemon::acquired(*model, fake.grant(session)), model->copies_of_fds());
    }
    return false;
  });
  daemon.publish(small_model("a", 1));
  ClientOptions options = options_for(folder / "s");
  options.call_timeout = milliseconds(200);
  Client client = Client::connect(options).value();
  const size_t descriptors = open_descriptors();
  EXPECT_EQ(client.acquire("a").status().code(), StatusCode::kDeadlineExceeded);
  ASSERT_TRUE(client.list().ok());
  EXPECT_TRUE(daemon.wait_for_leases(0));
  EXPECT_EQ(daemon.session_count(), 1U) << "the connection went on";
  EXPECT_EQ(open_descriptors(), descriptors);
}

TEST(Connection, AnswersThatBreakTheRulesEndTheConnectionOnly) {
  using Break = std::function<void(FakeDaemon&, FakeDaemon::Session&, const ipc::Request&)>;
  const std::vector<std::pair<const char*, Break>> breaks = {
      {"a call that was never made",
       [](FakeDaemon& d, FakeDaemon::Session& s, const ipc::Request& r) { d.reply(s, r.id + 100, ipc::ModelsReply{}); }},
      {"descriptors with a list",
       [](FakeDaemon& d, FakeDaemon::Session& s, const ipc::Request& r) {
         std::vector<UniqueFd> fds;
         fds.emplace_back(::open("/dev/null", O_RDONLY | O_CLOEXEC));
         d.reply(s, r.id, ipc::ModelsReply{}, std::move(fds));
       }},
      {"no message at all",
       [](FakeDaemon&, FakeDaemon::Session& s, const ipc::Request&) {
         EXPECT_TRUE(s.channel.send({std::vector<std::byte>(16, std::byte{0xff}), {}}).ok());
       }},
      {"an error of no call",
       [](FakeDaemon& d, FakeDaemon::Session& s, const ipc::Request&) { d.reply(s, 0, Status::invalid_argument("you are rude")); }},
  };
  for (const auto& [what, act] : breaks) {
    const TempFolder folder;
    bool broken = false;
    const Break& breaking = act;
    FakeDaemon daemon(folder / "s", [&](FakeDaemon& fake, FakeDaemon::Session& session, const ipc::Request& request) {
      if (broken || !std::holds_alternative<ipc::ListRequest>(request.body)) return false;
      broken = true;
      breaking(fake, session, request);
      return true;
    });
    Client client = Client::connect(options_for(folder / "s")).value();
    EXPECT_EQ(client.list().status().code(), StatusCode::kInvalidArgument) << what;
    EXPECT_TRUE(client.list().ok()) << what << ": a new connection serves again";
  }
}

TEST(Connection, AnAnswerOfAnotherKindIsAnError) {
  const TempFolder folder;
  FakeDaemon daemon(folder / "s", [](FakeDaemon& fake, FakeDaemon::Session& session, const ipc::Request& request) {
    if (std::holds_alternative<ipc::HelloRequest>(request.body)) return false;
    fake.reply(session, request.id, ipc::ReleasedReply{});
    return true;
  });
  Client client = Client::connect(options_for(folder / "s")).value();
  EXPECT_EQ(client.list().status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(client.acquire("a").status().code(), StatusCode::kInvalidArgument);
}

// Everything that can be wrong with a lease that was granted: it is refused, and given back at once.
TEST(Connection, CO_151_AFailedImportGivesTheLeaseBackAtOnce) {
  struct Fault {
    const char* what;
    std::function<void(SealedModel&)> in_model;
    std::function<void(ipc::AcquiredReply&, std::vector<UniqueFd>&)> in_answer;
  };
  const std::vector<Fault> faults = {
      {"table of another content",
       [](SealedModel& m) {
         m.table.content_id = "other";
         m.seal_table();
       },
       {}},
      {"table of another arena",
       [](SealedModel& m) {
         m.table.arena_bytes *= 2;
         m.table.block_hashes.resize(m.table.block_hashes.size() * 2);
         m.seal_table();
       },
       {}},
      {"table is no table",
       [](SealedModel& m) {
         m.table_fd = ipc::sealed_memfd(std::vector<std::byte>(64, std::byte{0xee}), "junk").value();
         m.table_bytes = 64;
       },
       {}},
      {"plane outside the arena",
       [](SealedModel& m) {
         m.table.storages[0].data_offset = m.table.arena_bytes;
         m.seal_table();
       },
       {}},
      {"table size", {}, [](ipc::AcquiredReply& a, std::vector<UniqueFd>&) { a.table_bytes += 8; }},
      {"table size beyond all limits", {}, [](ipc::AcquiredReply& a, std::vector<UniqueFd>&) { a.table_bytes = ~uint64_t{7}; }},
      {"chunk larger than its memory", {}, [](ipc::AcquiredReply& a, std::vector<UniqueFd>&) { a.chunk_bytes[0] += 4096; }},
      {"chunk sizes overflow",
       {},
       [](ipc::AcquiredReply& a, std::vector<UniqueFd>& fds) {
         a.chunk_bytes = {~uint64_t{4095}, ~uint64_t{4095}};
         fds.emplace_back(::open("/dev/null", O_RDONLY | O_CLOEXEC));
         a.fd_count = 3;
       }},
      {"chunk that is no page", {}, [](ipc::AcquiredReply& a, std::vector<UniqueFd>&) { a.chunk_bytes[0] -= 1; }},
      {"chunks smaller than the arena", {}, [](ipc::AcquiredReply& a, std::vector<UniqueFd>&) { a.arena_bytes *= 4; }},
      {"unsealed chunk",
       {},
       [](ipc::AcquiredReply& a, std::vector<UniqueFd>& fds) {
         UniqueFd open(::memfd_create("open", MFD_CLOEXEC | MFD_ALLOW_SEALING));
         EXPECT_EQ(::ftruncate(open.get(), static_cast<off_t>(a.chunk_bytes[0])), 0);
         fds[1] = std::move(open);
       }},
      {"chunk that is a device",
       {},
       [](ipc::AcquiredReply&, std::vector<UniqueFd>& fds) { fds[1] = UniqueFd(::open("/dev/zero", O_RDONLY | O_CLOEXEC)); }},
      {"more descriptors than chunks",
       {},
       [](ipc::AcquiredReply& a, std::vector<UniqueFd>& fds) {
         fds.emplace_back(::open("/dev/null", O_RDONLY | O_CLOEXEC));
         a.fd_count = 3;
       }},
      {"fewer descriptors than chunks",
       {},
       [](ipc::AcquiredReply& a, std::vector<UniqueFd>& fds) {
         fds.pop_back();
         a.fd_count = 1;
       }},
      {"a memory handle beside descriptors",
       {},
       [](ipc::AcquiredReply& a, std::vector<UniqueFd>&) { a.ipc_handle.resize(ipc::kIpcHandleBytes); }},
      {"legacy without a memory handle",
       {},
       [](ipc::AcquiredReply& a, std::vector<UniqueFd>& fds) {
         a.model.transport = "legacy";
         a.model.device = kStrangeGpu;
         fds.pop_back();
         a.fd_count = 1;
       }},
      {"no descriptor",
       {},
       [](ipc::AcquiredReply& a, std::vector<UniqueFd>& fds) {
         fds.clear();
         a.fd_count = 0;
         a.chunk_bytes.clear();
         a.arena_bytes = 0;
       }},
  };
  const TempFolder folder;
  const Fault* fault = nullptr;
  FakeDaemon daemon(folder / "s", [&](FakeDaemon& fake, FakeDaemon::Session& session, const ipc::Request& request) {
    if (!std::holds_alternative<ipc::AcquireRequest>(request.body) || fault == nullptr) return false;
    SealedModel model = std::move(*small_model("a", 1));
    if (fault->in_model) fault->in_model(model);
    ipc::AcquiredReply answer = FakeDaemon::acquired(model, fake.grant(session));
    std::vector<UniqueFd> fds = model.copies_of_fds();
    if (fault->in_answer) fault->in_answer(answer, fds);
    fake.reply(session, request.id, answer, std::move(fds));
    return true;
  });
  daemon.publish(small_model("a", 1));
  Client client = Client::connect(options_for(folder / "s")).value();
  const size_t descriptors = open_descriptors();
  for (const Fault& each : faults) {
    fault = &each;
    const Status status = client.acquire("a").status();
    EXPECT_EQ(status.code(), StatusCode::kCorruption) << each.what << ": " << status.to_string();
    EXPECT_THAT(status.message(), HasSubstr("model 'a'")) << each.what;
    EXPECT_TRUE(daemon.wait_for_leases(0)) << each.what;
    EXPECT_EQ(open_descriptors(), descriptors) << each.what;
  }
  fault = nullptr;
  EXPECT_EQ(first_word(client.acquire("a").value()), 0x3f80) << "the connection has survived all of it";
  EXPECT_EQ(daemon.session_count(), 1U);
}

TEST(Connection, CO_151_DescriptorsThatDoNotComeEndTheConnectionAndSoTheLease) {
  const TempFolder folder;
  bool broken = true;
  FakeDaemon daemon(folder / "s", [&](FakeDaemon& fake, FakeDaemon::Session& session, const ipc::Request& request) {
    if (!broken || !std::holds_alternative<ipc::AcquireRequest>(request.body)) return false;
    const auto model = fake.model("a");
    ipc::AcquiredReply answer = FakeDaemon::acquired(*model, fake.grant(session));
    answer.fd_count = 5;
    fake.reply(session, request.id, answer, model->copies_of_fds());
    fake.reply(session, request.id, ipc::MoreFdsReply{3});  // announced, not sent
    return true;
  });
  daemon.publish(small_model("a", 1));
  Client client = Client::connect(options_for(folder / "s")).value();
  EXPECT_EQ(client.acquire("a").status().code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(daemon.wait_for_leases(0));
  broken = false;
  EXPECT_TRUE(client.acquire("a").ok());
}

TEST(Connection, CO_151_NoDescriptorsLeftInThisProcess) {
  const TempFolder folder;
  // Copies with high numbers, made before the limit falls: the daemon lives in this process, too.
  const auto model = small_model("a", 1);
  std::vector<UniqueFd> prepared;
  prepared.emplace_back(::fcntl(model->table_fd.get(), F_DUPFD_CLOEXEC, 500));
  prepared.emplace_back(::fcntl(model->chunks[0].get(), F_DUPFD_CLOEXEC, 500));
  FakeDaemon daemon(folder / "s", [&](FakeDaemon& fake, FakeDaemon::Session& session, const ipc::Request& request) {
    if (!std::holds_alternative<ipc::AcquireRequest>(request.body) || prepared.empty()) return false;
    fake.reply(session, request.id, FakeDaemon::acquired(*model, fake.grant(session)), std::move(prepared));
    prepared.clear();
    return true;
  });
  daemon.publish(model);
  Client client = Client::connect(options_for(folder / "s")).value();
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  const int first_free = UniqueFd(::fcntl(0, F_DUPFD_CLOEXEC, 0)).get();
  const rlimit low{static_cast<rlim_t>(first_free), limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
  const Status status = client.acquire("a").status();
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status.to_string();
  EXPECT_TRUE(daemon.wait_for_leases(0));
  EXPECT_TRUE(client.acquire("a").ok());
}

TEST(Connection, MoreChunksThanOneFrameCarries) {
  const TempFolder folder;
  FakeDaemon daemon(folder / "s");
  ModelBuilder builder;
  builder.add_raw("w", {2, 2}, {0x3f80, 0, 0, 0x3f80});
  builder.add_raw("tail", {1}, {0x4110});
  // 1 MiB of arena in pages: 256 chunks and the table.
  daemon.publish(std::make_shared<SealedModel>(builder.seal("many", 1, 4096)));
  Client client = Client::connect(options_for(folder / "s")).value();
  const Result<Model> model = client.acquire("many");
  ASSERT_TRUE(model.ok()) << model.status().to_string();
  EXPECT_EQ(model->memory().shared_bytes, uint64_t{1} << 20);
  EXPECT_EQ(first_word(*model), 0x3f80);
}

TEST(Connection, CO_065_AForkedChildRefusesAndTouchesNothing) {
  const TempFolder folder;
  FakeDaemon daemon(folder / "s");
  daemon.publish(small_model("a", 1));
  Client client = Client::connect(options_for(folder / "s")).value();
  Model model = client.acquire("a").value();
  const Tensor tensor = model.tensor("w").value();
  const int parents_fd = client.event_fd();

  const int status = in_forked_child([&] {
    // Everything that the parent holds, called and destroyed here.
    const Client clients = std::move(client);
    Model models = std::move(model);
    const std::vector<StatusCode> codes = {Client(clients).list().status().code(),
                                           Client(clients).acquire("a").status().code(),
                                           Client(clients).poll_events().status().code(),
                                           models.tensor("w").status().code(),
                                           models.release().code(),
                                           tensor.decompress({}).code(),
                                           tensor.decompress_rows(0, 0, {}).code(),
                                           tensor.gemm({}, {}).code(),
                                           tensor.gemm(0, {}, {}).code()};
    for (const StatusCode code : codes) {
      if (code != StatusCode::kForked) return 1;
    }
    if (!tensor.data().empty() || clients.event_fd() != -1 || models.info().name != "a") return 2;
    if (::fcntl(parents_fd, F_GETFD) != -1) return 3;  // closed at the fork
    // Its number may be somebody else's by now, and must stay so.
    if (::open("/dev/null", O_RDONLY | O_CLOEXEC) != parents_fd) return 4;
    return 0;
  });
  EXPECT_EQ(status, 0);
  EXPECT_EQ(first_word(model), 0x3f80);
  ASSERT_TRUE(client.list().ok());
  EXPECT_EQ(daemon.lease_count(), 1U);
  EXPECT_EQ(daemon.request_count(kRelease), 0U);
  EXPECT_EQ(daemon.session_count(), 1U);
}

TEST(Connection, CO_065_TheNumberOfAClosedDescriptorIsNotClosedAgain) {
  const TempFolder folder;
  FakeDaemon daemon(folder / "s");
  Client client = Client::connect(options_for(folder / "s")).value();
  const int parents_fd = client.event_fd();
  EXPECT_EQ(in_forked_child([&] {
              const UniqueFd reused(::open("/dev/null", O_RDONLY | O_CLOEXEC));
              if (reused.get() != parents_fd) return 1;
              { const Client ends_here = std::move(client); }
              return ::fcntl(reused.get(), F_GETFD) == -1 ? 2 : 0;
            }),
            0);
}

TEST(Connection, AForkedChildMayConnectAnew) {
  const TempFolder folder;
  FakeDaemon daemon(folder / "s");
  daemon.publish(small_model("a", 1));
  Client client = Client::connect(options_for(folder / "s")).value();
  const Model model = client.acquire("a").value();
  EXPECT_EQ(in_forked_child([&] {
              Client mine = Client::connect(options_for(folder / "s")).value();
              const Model again = mine.acquire("a").value();
              return first_word(again) == 0x3f80 ? 0 : 1;
            }),
            0);
  EXPECT_TRUE(daemon.wait_for([&] { return true; }));
  EXPECT_EQ(first_word(model), 0x3f80);
}

TEST(Connection, CO_153_TwoHundredForksEndWithoutAHang) {
  const TempFolder folder;
  FakeDaemon daemon(folder / "s");
  daemon.publish(small_model("a", 1));
  Client client = Client::connect(options_for(folder / "s")).value();
  const Model model = client.acquire("a").value();
  // Another thread is in the library all the time, so that forks meet its locks held.
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) {
      const Result<Model> again = client.acquire("a");
      EXPECT_TRUE(again.ok());
    }
  });
  for (int i = 0; i < 200; ++i) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      const bool refused = Client(client).list().status().code() == StatusCode::kForked &&
                           model.tensor("w").status().code() == StatusCode::kForked && model.info().name == "a" &&
                           client.daemon_version().empty();
      ::_exit(refused ? 0 : 1);
    }
    int status = -1;
    ASSERT_EQ(::waitpid(pid, &status, 0), pid);
    ASSERT_EQ(status, 0);
  }
  stop = true;
  busy.join();
  EXPECT_TRUE(daemon.wait_for_leases(1));
}

TEST(Connection, DescriptorsDoNotCrossExec) {
  const TempFolder folder;
  FakeDaemon daemon(folder / "s");
  Client client = Client::connect(options_for(folder / "s")).value();
  EXPECT_NE(::fcntl(client.event_fd(), F_GETFD) & FD_CLOEXEC, 0);
}

// The daemon's descriptors come back to the process that made them: on the host that is a mapping like any other.
TEST(Connection, CO_061_DaemonAndClientInOneProcess) {
  const TempFolder folder;
  FakeDaemon daemon(folder / "s");
  const auto model_there = small_model("a", 1);
  daemon.publish(model_there);
  Client client = Client::connect(options_for(folder / "s")).value();
  Model model = client.acquire("a").value();
  EXPECT_EQ(first_word(model), 0x3f80);
  EXPECT_TRUE(model.release().ok());
  EXPECT_EQ(ipc::read_sealed_memfd(model_there->table_fd.get(), model_there->table_bytes, 1 << 20)->size(),
            model_there->table_bytes)
      << "the daemon's own descriptors stay open";
  EXPECT_EQ(first_word(client.acquire("a").value()), 0x3f80);
}

TEST(Connection, TheLongestTimesDoNotOverflow) {
  const TempFolder folder;
  FakeDaemon daemon(folder / "s");
  daemon.publish(small_model("a", 1));
  ClientOptions options = options_for(folder / "s");
  options.call_timeout = milliseconds::max();
  options.reconnect_backoff = milliseconds::max();
  Client client = Client::connect(options).value();
  AcquireOptions acquire;
  acquire.wait = milliseconds::max();
  EXPECT_TRUE(client.acquire("a", acquire).ok());
  acquire.wait = milliseconds::min();
  EXPECT_TRUE(client.acquire("a", acquire).ok());
}

TEST(Connection, StartsNoThread) {
  const TempFolder folder;
  FakeDaemon daemon(folder / "s");
  daemon.publish(small_model("a", 1));
  const auto threads = [] {
    size_t count = 0;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) ++count;
    return count;
  };
  const size_t before = threads();
  Client client = Client::connect(options_for(folder / "s")).value();
  const Model model = client.acquire("a").value();
  EXPECT_EQ(threads(), before);
}

TEST(Connection, CO_062_LeasesAndDescriptorsReturnToTheBaseLine) {
  const TempFolder folder;
  FakeDaemon daemon(folder / "s");
  daemon.publish(small_model("a", 1));
  daemon.publish(small_model("b", 2, 0x4000));
  Client client = Client::connect(options_for(folder / "s")).value();
  { const Model warm = client.acquire("a").value(); }
  ASSERT_TRUE(daemon.wait_for_leases(0));
  const size_t descriptors = open_descriptors();
  const auto cycles = [&](const char* name, uint16_t word, int count) {
    for (int i = 0; i < count; ++i) {
      Model model = client.acquire(name).value();
      ASSERT_EQ(first_word(model), word);
      const Status released = i % 2 == 0 ? model.release() : Status();
      EXPECT_TRUE(released.ok());
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back([&] { cycles("a", 0x3f80, 100); });
  for (int i = 0; i < 4; ++i) threads.emplace_back([&] { cycles("b", 0x4000, 100); });
  for (std::thread& thread : threads) thread.join();
  ASSERT_TRUE(client.list().ok());
  EXPECT_TRUE(daemon.wait_for_leases(0));
  EXPECT_EQ(open_descriptors(), descriptors);
  EXPECT_EQ(daemon.session_count(), 1U);
}

TEST(Connection, HangUpsUnderLoadLoseNothing) {
  const TempFolder folder;
  FakeDaemon daemon(folder / "s");
  daemon.publish(small_model("a", 1));
  daemon.publish(small_model("b", 2, 0x4000));
  Client client = Client::connect(options_for(folder / "s")).value();
  const Model held = client.acquire("a").value();
  ASSERT_TRUE(daemon.wait_for_leases(1));  // and the daemon has closed what it sent
  const size_t descriptors = open_descriptors();
  std::atomic<int> running{4};
  const auto cycles = [&](const char* name, uint16_t word) {
    for (int i = 0; i < 150; ++i) {
      Result<Model> model = client.acquire(name);
      if (!model.ok()) {
        EXPECT_EQ(model.status().code(), StatusCode::kUnavailable) << model.status().to_string();
        continue;
      }
      EXPECT_EQ(first_word(*model), word);
      const Status released = i % 2 == 0 ? model->release() : Status();
      EXPECT_TRUE(released.ok()) << released.to_string();
    }
    --running;
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) threads.emplace_back([&] { cycles("a", 0x3f80); });
  for (int i = 0; i < 2; ++i) threads.emplace_back([&] { cycles("b", 0x4000); });
  while (running > 0) daemon.hang_up();
  for (std::thread& thread : threads) thread.join();
  ASSERT_TRUE(client.list().ok());
  EXPECT_TRUE(daemon.wait_for_leases(1)) << "the one that is held";
  EXPECT_EQ(held.info().state, "published");
  EXPECT_EQ(open_descriptors(), descriptors);
}

TEST(Connection, TheEndOfALeaseDoesNotWaitForAnotherThreadsCall) {
  const TempFolder folder;
  std::atomic<uint64_t> waiting_id{0};
  FakeDaemon daemon(folder / "s", [&](FakeDaemon& fake, FakeDaemon::Session& session, const ipc::Request& request) {
    const auto* acquire = std::get_if<ipc::AcquireRequest>(&request.body);
    if (acquire != nullptr && acquire->wait_ms > 0) {
      waiting_id = request.id;  // answered when the release has come
      return true;
    }
    if (!std::holds_alternative<ipc::ReleaseRequest>(request.body)) return false;
    fake.serve(session, request);
    fake.reply(session, waiting_id, Status::not_found("never published"));
    return true;
  });
  daemon.publish(small_model("a", 1));
  Client client = Client::connect(options_for(folder / "s")).value();
  Model model = client.acquire("a").value();
  std::thread waiter([&] {
    AcquireOptions wait;
    wait.wait = std::chrono::hours(1);
    EXPECT_EQ(client.acquire("later", wait).status().code(), StatusCode::kNotFound);
  });
  ASSERT_TRUE(daemon.wait_for([&] { return waiting_id != 0; }));
  EXPECT_TRUE(model.release().ok());
  waiter.join();  // would take an hour otherwise
  EXPECT_EQ(daemon.lease_count(), 0U);
}

}  // namespace
}  // namespace weightd
