// SPDX-License-Identifier: Apache-2.0
#include "daemon/registry.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

namespace weightd::daemon {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
using State = ipc::GenerationState;
using std::chrono::milliseconds;

/// A registry and everything that it asked for, with a clock that only the test moves.
class World {
 public:
  explicit World(uint64_t budget = 100 * kMiB, Registry::Limits limits = {})
      : registry(Ledger({{"host", "a CPU", 1000 * kMiB, budget}}), limits) {}

  SessionId worker(int32_t pid, uint64_t start = 7) { return registry.open_session({{pid, start}, 1000, "worker"}); }

  uint64_t load(const std::string& model, const std::string& source, SessionId session = 0) {
    const uint64_t request = ++last_request;
    registry.load({session, request}, {model, source, "", 0}, std::nullopt, now, effects);
    if (!effects.start.empty()) latest = effects.start.back();
    collect();
    return request;
  }
  uint64_t acquire(SessionId session, const std::string& model, uint32_t wait_ms = 0, const std::string& content = "") {
    const uint64_t request = ++last_request;
    registry.acquire({session, request}, {model, "", wait_ms, content}, now, effects);
    collect();
    return request;
  }
  uint64_t unload(const std::string& model, milliseconds wait = milliseconds(1000), SessionId session = 0) {
    const uint64_t request = ++last_request;
    registry.unload({session, request}, model, "", now + wait, now, effects);
    collect();
    return request;
  }
  uint64_t release(SessionId session, LeaseId lease) {
    const uint64_t request = ++last_request;
    registry.release({session, request}, lease, effects);
    collect();
    return request;
  }
  void plan(GenerationId generation, const std::string& content, uint64_t bytes) {
    ipc::Planned planned;
    planned.content_id = content;
    planned.arena_bytes = planned.resident_bytes = bytes;
    planned.chunk_count = 1;
    registry.planned(generation, planned, effects);
    collect();
  }
  void verify(GenerationId generation) {
    registry.uploaded(generation);
    registry.verified(generation, ChunkSet{}, now, effects);
    collect();
  }
  void end_job(GenerationId generation, const Status& status = {}) {
    registry.job_ended(generation, status, effects);
    collect();
  }
  void reclaim(GenerationId generation) {
    registry.reclaimed(generation, effects);
    collect();
  }
  /// A whole load that goes well.
  GenerationId publish(const std::string& model, const std::string& content, uint64_t bytes = 10 * kMiB) {
    load(model, "/" + content);
    const GenerationId generation = latest;
    plan(generation, content, bytes);
    verify(generation);
    end_job(generation);
    return generation;
  }
  void close(SessionId session, bool lives) {
    registry.close_session(session, lives, effects);
    collect();
  }
  void pass(milliseconds time) {
    now += time;
    registry.expire(now, effects);
    collect();
  }

  bool answered(uint64_t request) const { return answers.count(request) > 0; }
  StatusCode error(uint64_t request) const {
    const auto* status = std::get_if<Status>(&answers.at(request).result);
    return status == nullptr ? StatusCode::kOk : status->code();
  }
  template <typename T>
  const T& result(uint64_t request) const {
    return std::get<T>(answers.at(request).result);
  }
  LeaseId lease(uint64_t request) const { return result<Granted>(request).lease; }
  State state(GenerationId generation) const { return registry.summary(generation).state; }
  uint64_t free_bytes() const { return registry.devices().front().free_bytes; }

  void collect() {
    for (Answer& answer : effects.answers) {
      EXPECT_TRUE(answered_ever.insert(answer.ticket.request).second)
          << "request " << answer.ticket.request << " was answered twice";
      answers.emplace(answer.ticket.request, std::move(answer));
    }
    for (const GenerationId id : effects.admit) admitted.push_back(id);
    for (const GenerationId id : effects.cancel) cancelled.push_back(id);
    for (const GenerationId id : effects.start) started.push_back(id);
    for (const Effects::Drop& drop : effects.drop) dropped.push_back(drop.generation);
    for (const Notice& notice : effects.notices) notices.push_back(notice);
    for (const Process& process : effects.watch) watched.push_back(process);
    effects = {};
  }

  Registry registry;
  Effects effects;
  Time now{std::chrono::hours(1)};
  uint64_t last_request = 0;
  GenerationId latest = 0;
  std::map<uint64_t, Answer> answers;
  std::set<uint64_t> answered_ever;
  std::vector<GenerationId> started, admitted, cancelled, dropped;
  std::vector<Notice> notices;
  std::vector<Process> watched;
};

// --- loads ---------------------------------------------------------------------------------------------------------------

TEST(Registry, ALoadGoesThroughItsStatesToPublished) {
  World w;
  const uint64_t load = w.load("m", "/a");
  ASSERT_EQ(w.started, std::vector<GenerationId>{w.latest});
  EXPECT_EQ(w.state(w.latest), State::kLoading);
  EXPECT_EQ(w.free_bytes(), 100 * kMiB);
  w.plan(w.latest, "c1", 10 * kMiB);
  EXPECT_EQ(w.admitted, std::vector<GenerationId>{w.latest});
  EXPECT_EQ(w.registry.devices().front().loading_bytes, 10 * kMiB);
  EXPECT_EQ(w.free_bytes(), 90 * kMiB);
  w.registry.progress(w.latest, 3 * kMiB);
  EXPECT_EQ(w.registry.summary(w.latest).progress_bytes, 3 * kMiB);
  w.registry.uploaded(w.latest);
  EXPECT_EQ(w.state(w.latest), State::kVerifying);
  EXPECT_FALSE(w.answered(load));
  w.registry.verified(w.latest, ChunkSet{}, w.now, w.effects);
  w.collect();
  EXPECT_EQ(w.state(w.latest), State::kPublished);
  EXPECT_EQ(w.result<Loaded>(load).model.content_id, "c1");
  EXPECT_EQ(w.registry.devices().front().owned_bytes, 10 * kMiB);
  EXPECT_EQ(w.registry.devices().front().loading_bytes, 0U);
  ASSERT_EQ(w.notices.size(), 1U);
  EXPECT_EQ(w.notices.front().kind, Notice::Kind::kPublished);
  w.end_job(w.latest);
  EXPECT_EQ(w.state(w.latest), State::kPublished);
}

TEST(Registry, CO_079_SixteenLoadsOfOneModelAreOneLoad) {
  World w;
  std::vector<uint64_t> requests;
  for (int i = 0; i < 16; ++i) requests.push_back(w.load("m", "/a", w.worker(100 + i)));
  EXPECT_EQ(w.started.size(), 1U);
  w.plan(w.latest, "c1", 10 * kMiB);
  w.verify(w.latest);
  for (const uint64_t request : requests) EXPECT_EQ(w.result<Loaded>(request).model.generation, w.latest);
  EXPECT_EQ(w.registry.devices().front().owned_bytes, 10 * kMiB);
}

TEST(Registry, SameContentUnderAPublishedNameSucceedsAtOnce) {
  World w;
  const GenerationId first = w.publish("m", "c1");
  const uint64_t again = w.load("m", "/copy-of-c1");
  w.plan(w.latest, "c1", 10 * kMiB);
  EXPECT_EQ(w.result<Loaded>(again).model.generation, first);
  EXPECT_EQ(w.cancelled, std::vector<GenerationId>{w.latest});
  w.end_job(w.latest, Status::cancelled("cancelled"));
  EXPECT_EQ(w.registry.models().size(), 1U);
  EXPECT_EQ(w.free_bytes(), 90 * kMiB);
}

TEST(Registry, OtherContentUnderAPublishedNameIsRefused) {
  World w;
  w.publish("m", "c1");
  const uint64_t other = w.load("m", "/b");
  w.plan(w.latest, "c2", 10 * kMiB);
  EXPECT_EQ(w.error(other), StatusCode::kAlreadyExists);
  w.end_job(w.latest, Status::cancelled("cancelled"));
  ASSERT_EQ(w.registry.models().size(), 1U);
  EXPECT_EQ(w.registry.models().front().content_id, "c1");
}

TEST(Registry, AnotherSourceWhileLoadingIsRefused) {
  World w;
  w.load("m", "/a");
  EXPECT_EQ(w.error(w.load("m", "/b")), StatusCode::kAlreadyExists);
  EXPECT_EQ(w.started.size(), 1U);
}

TEST(Registry, CO_091_AFailedLoadGivesEverythingBackAndIsRemembered) {
  World w;
  for (int round = 0; round < 20; ++round) {
    const uint64_t load = w.load("m", "/a");
    w.plan(w.latest, "c1", 10 * kMiB);
    w.end_job(w.latest, Status::corruption("section 3"));
    EXPECT_EQ(w.error(load), StatusCode::kCorruption);
    EXPECT_EQ(w.free_bytes(), 100 * kMiB);
    ASSERT_EQ(w.registry.models().size(), 1U);  // only the latest failure of a name
    EXPECT_EQ(w.registry.models().front().state, State::kFailed);
    EXPECT_EQ(w.registry.models().front().failure, "corruption: section 3");
  }
  w.publish("m", "c1");
  ASSERT_EQ(w.registry.models().size(), 1U);
  EXPECT_EQ(w.registry.models().front().state, State::kPublished);
}

TEST(Registry, CO_085_AFailedLoadLeavesThePublishedGenerationAlone) {
  World w;
  const GenerationId first = w.publish("m", "c1");
  const SessionId worker = w.worker(10);
  const uint64_t held = w.acquire(worker, "m");
  const uint64_t load = w.load("m", "/bad");
  w.end_job(w.latest, Status::corruption("truncated"));
  EXPECT_EQ(w.error(load), StatusCode::kCorruption);
  EXPECT_EQ(w.state(first), State::kPublished);
  EXPECT_EQ(w.result<Granted>(held).generation, first);
  EXPECT_EQ(w.result<Granted>(w.acquire(worker, "m")).generation, first);
}

TEST(Registry, OnlySoManyFailuresAreRemembered) {
  Registry::Limits limits;
  limits.failed_shown = 3;
  World w(100 * kMiB, limits);
  for (int i = 0; i < 10; ++i) {
    w.load("m" + std::to_string(i), "/a");
    w.end_job(w.latest, Status::io("no"));
  }
  const auto models = w.registry.models();
  ASSERT_EQ(models.size(), 3U);
  EXPECT_EQ(models.front().name, "m7");
  EXPECT_EQ(models.back().name, "m9");
}

TEST(Registry, CO_090_TooBigIsRefusedBeforeAnyByteIsRead) {
  World w;
  w.publish("small", "c1", 60 * kMiB);
  const uint64_t load = w.load("big", "/b");
  w.plan(w.latest, "c2", 50 * kMiB);
  EXPECT_EQ(w.error(load), StatusCode::kResourceExhausted);
  EXPECT_EQ(w.result<Status>(load).message(),
            "model 'big': needs 50.0 MiB, 40.0 MiB free of 100.0 MiB on host; unloading 'small' would free 60.0 MiB");
  EXPECT_TRUE(w.admitted.size() == 1 && w.cancelled.size() == 1);
  w.end_job(w.latest, Status::cancelled("cancelled"));
  EXPECT_EQ(w.state(w.latest), State::kFailed);
  EXPECT_EQ(w.free_bytes(), 40 * kMiB);
}

TEST(Registry, ALoadWaitsForMemoryThatIsJustBeingFreed) {
  World w;
  const GenerationId old = w.publish("old", "c1", 80 * kMiB);
  w.unload("old");
  ASSERT_EQ(w.dropped, std::vector<GenerationId>{old});
  const uint64_t load = w.load("new", "/b");
  w.plan(w.latest, "c2", 90 * kMiB);
  EXPECT_FALSE(w.answered(load));
  EXPECT_EQ(w.admitted.size(), 1U);  // of "old"
  w.reclaim(old);
  EXPECT_EQ(w.admitted.back(), w.latest);
  w.verify(w.latest);
  EXPECT_EQ(w.result<Loaded>(load).model.name, "new");
}

TEST(Registry, CO_080_UnloadWhileLoadingCancels) {
  World w;
  const uint64_t load = w.load("m", "/a");
  const GenerationId generation = w.latest;
  w.plan(generation, "c1", 10 * kMiB);
  const uint64_t unload = w.unload("m");
  EXPECT_EQ(w.error(load), StatusCode::kCancelled);
  EXPECT_EQ(w.cancelled, std::vector<GenerationId>{generation});
  EXPECT_FALSE(w.answered(unload)) << "the memory is not back yet";
  w.end_job(generation, Status::cancelled("cancelled"));
  EXPECT_TRUE(w.result<ipc::UnloadedReply>(unload).freed);
  EXPECT_TRUE(w.registry.models().empty());
  EXPECT_EQ(w.free_bytes(), 100 * kMiB);
}

TEST(Registry, CO_080_TheLastAcceptedCommandDecides) {
  World w;
  const uint64_t first = w.load("m", "/a");
  const GenerationId old = w.latest;
  w.plan(old, "c1", 60 * kMiB);
  const uint64_t unload = w.unload("m");
  const uint64_t second = w.load("m", "/a");
  ASSERT_NE(w.latest, old) << "a cancelled load is not joined";
  w.plan(w.latest, "c1", 60 * kMiB);  // fits only when the first has ended
  EXPECT_FALSE(w.answered(second));
  w.end_job(old, Status::cancelled("cancelled"));
  EXPECT_EQ(w.error(first), StatusCode::kCancelled);
  EXPECT_TRUE(w.result<ipc::UnloadedReply>(unload).freed);
  w.verify(w.latest);
  EXPECT_EQ(w.result<Loaded>(second).model.state, State::kPublished);
  EXPECT_EQ(w.free_bytes(), 40 * kMiB);
}

TEST(Registry, MemoryOfACancelledLoadThatVerifiedAtTheLastMomentIsDropped) {
  World w;
  w.load("m", "/a");
  w.plan(w.latest, "c1", 10 * kMiB);
  w.unload("m");
  w.registry.verified(w.latest, ChunkSet{}, w.now, w.effects);
  ASSERT_EQ(w.effects.drop.size(), 1U);
  w.collect();
  w.reclaim(w.dropped.back());
  w.end_job(w.latest, Status::cancelled("cancelled"));
  EXPECT_TRUE(w.registry.models().empty());
  EXPECT_EQ(w.free_bytes(), 100 * kMiB);
}

TEST(Registry, ALoadThatNobodyWaitsForIsCancelled) {
  World w;
  const SessionId admin = w.worker(5), other = w.worker(6);
  w.load("m", "/a", admin);
  w.load("m", "/a", other);
  w.close(admin, true);
  EXPECT_TRUE(w.cancelled.empty());
  w.close(other, false);
  EXPECT_EQ(w.cancelled, std::vector<GenerationId>{w.latest});
  w.end_job(w.latest, Status::cancelled("cancelled"));
  EXPECT_TRUE(w.registry.models().empty());
}

TEST(Registry, ALoadHasTheTimeLimitOfItsRequest) {
  World w;
  w.registry.load({0, 900}, {"m", "/a", "", 0}, w.now + milliseconds(50), w.now, w.effects);
  w.latest = w.effects.start.at(0);
  w.collect();
  EXPECT_EQ(w.registry.next_deadline(), w.now + milliseconds(50));
  w.pass(milliseconds(49));
  EXPECT_FALSE(w.answered(900));
  w.pass(milliseconds(1));
  EXPECT_EQ(w.error(900), StatusCode::kDeadlineExceeded);
  EXPECT_EQ(w.cancelled, std::vector<GenerationId>{w.latest});
}

TEST(Registry, CO_118_ImpossibleNamesAndDevicesAreRefused) {
  World w;
  EXPECT_EQ(w.error(w.load("", "/a")), StatusCode::kInvalidArgument);
  EXPECT_EQ(w.error(w.load(std::string(256, 'x'), "/a")), StatusCode::kInvalidArgument);
  EXPECT_EQ(w.error(w.load("a\nb", "/a")), StatusCode::kInvalidArgument);
  EXPECT_EQ(w.error(w.load(std::string("a\0b", 3), "/a")), StatusCode::kInvalidArgument);
  EXPECT_EQ(w.error(w.load("\xff", "/a")), StatusCode::kInvalidArgument);
  w.registry.load({0, 900}, {"m", "/a", "GPU-none", 0}, std::nullopt, w.now, w.effects);
  w.registry.unload({0, 901}, "m", "GPU-none", w.now, w.now, w.effects);
  w.registry.acquire({w.worker(1), 902}, {"m", "GPU-none", 0, ""}, w.now, w.effects);
  w.collect();
  for (const uint64_t request : {900U, 901U, 902U}) {
    EXPECT_EQ(w.error(request), StatusCode::kNotFound);
    EXPECT_EQ(w.result<Status>(request).message(), "no device 'GPU-none'; this daemon has: host");
  }
  EXPECT_TRUE(w.registry.models().empty());
  w.load(std::string(255, 'x'), "/a");
  EXPECT_EQ(w.registry.models().size(), 1U);
}

TEST(Registry, CO_118_EveryVerbOnAModelInEveryState) {
  World w;
  const SessionId worker = w.worker(1);
  EXPECT_EQ(w.error(w.acquire(worker, "m")), StatusCode::kNotFound);
  EXPECT_EQ(w.error(w.unload("m")), StatusCode::kNotFound);
  EXPECT_EQ(w.registry.published("m", "").status().code(), StatusCode::kNotFound);
  w.load("m", "/a");
  EXPECT_EQ(w.error(w.acquire(worker, "m")), StatusCode::kFailedPrecondition);
  EXPECT_EQ(w.registry.published("m", "").status().code(), StatusCode::kFailedPrecondition);
  w.end_job(w.latest, Status::io("no"));
  EXPECT_EQ(w.error(w.acquire(worker, "m")), StatusCode::kNotFound);
  EXPECT_TRUE(w.result<ipc::UnloadedReply>(w.unload("m")).freed);  // forgets the failure
  EXPECT_TRUE(w.registry.models().empty());
  const GenerationId generation = w.publish("m", "c1");
  const uint64_t held = w.acquire(worker, "m");
  w.unload("m");
  EXPECT_EQ(w.state(generation), State::kDraining);
  EXPECT_EQ(w.error(w.acquire(worker, "m")), StatusCode::kFailedPrecondition);
  w.release(worker, w.lease(held));
  EXPECT_EQ(w.error(w.acquire(worker, "m")), StatusCode::kNotFound);
}

// --- leases --------------------------------------------------------------------------------------------------------------

TEST(Registry, LeasesAreCountedAndReleasedOnce) {
  World w;
  const GenerationId generation = w.publish("m", "c1");
  const SessionId a = w.worker(1), b = w.worker(2);
  const uint64_t first = w.acquire(a, "m"), second = w.acquire(b, "m");
  EXPECT_EQ(w.registry.summary(generation).lease_count, 2U);
  EXPECT_EQ(w.registry.devices().front().leased_bytes, 10 * kMiB);
  w.release(a, w.lease(first));
  w.result<Released>(w.release(a, w.lease(first)));  // twice is fine
  EXPECT_EQ(w.registry.summary(generation).lease_count, 1U);
  w.release(b, w.lease(second));
  EXPECT_EQ(w.registry.lease_count(), 0U);
  EXPECT_EQ(w.state(generation), State::kPublished);
  EXPECT_EQ(w.registry.devices().front().leased_bytes, 0U);
}

TEST(Registry, CO_125_ALeaseOfAnotherConnectionIsNone) {
  World w;
  w.publish("m", "c1");
  const SessionId a = w.worker(1), b = w.worker(2);
  const uint64_t held = w.acquire(a, "m");
  EXPECT_EQ(w.error(w.release(b, w.lease(held))), StatusCode::kNotFound);
  EXPECT_EQ(w.error(w.release(b, 0)), StatusCode::kNotFound);
  EXPECT_EQ(w.error(w.release(b, w.lease(held) + 1)), StatusCode::kNotFound);
  EXPECT_EQ(w.registry.lease_count(), 1U);
}

TEST(Registry, LeasesPerConnectionAreLimited) {
  Registry::Limits limits;
  limits.leases_per_session = 2;
  World w(100 * kMiB, limits);
  w.publish("m", "c1");
  const SessionId a = w.worker(1);
  const uint64_t first = w.acquire(a, "m");
  w.lease(w.acquire(a, "m"));
  EXPECT_EQ(w.error(w.acquire(a, "m")), StatusCode::kResourceExhausted);
  w.release(a, w.lease(first));
  w.lease(w.acquire(a, "m"));
}

TEST(Registry, CO_069_AnEndedProcessGivesItsLeasesBackAtOnce) {
  World w;
  const GenerationId generation = w.publish("m", "c1");
  const SessionId a = w.worker(1);
  w.acquire(a, "m");
  w.acquire(a, "m");
  w.close(a, false);
  EXPECT_EQ(w.registry.lease_count(), 0U);
  EXPECT_TRUE(w.watched.empty());
  EXPECT_EQ(w.state(generation), State::kPublished);
}

TEST(Registry, ALiveProcessWithoutConnectionKeepsAnOrphan) {
  World w;
  const GenerationId generation = w.publish("m", "c1");
  const SessionId a = w.worker(1);
  w.acquire(a, "m");
  w.close(a, true);
  EXPECT_EQ(w.watched, (std::vector<Process>{{1, 7}}));
  EXPECT_TRUE(w.registry.has_orphans({1, 7}));
  EXPECT_EQ(w.registry.summary(generation).orphan_count, 1U);
  EXPECT_EQ(w.registry.devices().front().orphan_bytes, 10 * kMiB);
  const uint64_t unload = w.unload("m");
  EXPECT_EQ(w.state(generation), State::kDraining);
  w.registry.process_ended({1, 8}, w.effects);  // another process with the same number
  w.collect();
  EXPECT_EQ(w.state(generation), State::kDraining);
  w.registry.process_ended({1, 7}, w.effects);
  w.collect();
  EXPECT_EQ(w.dropped, std::vector<GenerationId>{generation});
  w.reclaim(generation);
  EXPECT_TRUE(w.result<ipc::UnloadedReply>(unload).freed);
  EXPECT_EQ(w.result<ipc::UnloadedReply>(unload).bytes, 10 * kMiB);
}

TEST(Registry, AnUnknownProcessFallsBackToTheEndOfItsConnection) {
  World w;
  w.publish("m", "c1");
  const SessionId a = w.worker(0, 0);
  w.acquire(a, "m");
  w.close(a, true);
  EXPECT_EQ(w.registry.lease_count(), 0U);
}

TEST(Registry, ReconnectingForEverTakesNoMemory) {
  World w;
  const GenerationId generation = w.publish("m", "c1");
  for (int i = 0; i < 1000; ++i) {
    const SessionId a = w.worker(1);
    w.acquire(a, "m");
    w.close(a, true);
  }
  EXPECT_EQ(w.registry.lease_count(), 1U);
  // Every lost lease may be taken up again; only the last of them ends the orphan.
  const SessionId again = w.worker(1);
  for (int i = 0; i < 999; ++i) w.lease(w.acquire(again, "m", 0, "c1"));
  EXPECT_EQ(w.registry.summary(generation).orphan_count, 1U);
  w.lease(w.acquire(again, "m", 0, "c1"));
  EXPECT_EQ(w.registry.summary(generation).orphan_count, 0U);
}

TEST(Registry, AnOrphanBecomesALeaseAgainByContentEvenWhileDraining) {
  World w;
  const GenerationId generation = w.publish("m", "c1");
  const SessionId a = w.worker(1);
  w.acquire(a, "m");
  w.close(a, true);
  w.unload("m");
  ASSERT_EQ(w.state(generation), State::kDraining);
  const SessionId stranger = w.worker(2), again = w.worker(1);
  EXPECT_EQ(w.error(w.acquire(stranger, "m", 0, "c1")), StatusCode::kFailedPrecondition);
  const uint64_t lease = w.acquire(again, "m", 0, "c1");
  EXPECT_EQ(w.result<Granted>(lease).generation, generation);
  EXPECT_FALSE(w.registry.has_orphans({1, 7}));
  EXPECT_EQ(w.error(w.acquire(again, "m", 0, "c1")), StatusCode::kFailedPrecondition) << "it had one only";
  w.release(again, w.lease(lease));
  EXPECT_EQ(w.dropped, std::vector<GenerationId>{generation});
}

TEST(Registry, LeasingByContentNeverGivesOtherContent) {
  World w;
  w.publish("m", "c1");
  const SessionId a = w.worker(1);
  EXPECT_EQ(w.error(w.acquire(a, "m", 1000, "c2")), StatusCode::kNotFound);
  w.lease(w.acquire(a, "m", 0, "c1"));
}

TEST(Registry, WaitingForAModelThatComesLater) {
  World w;
  const SessionId a = w.worker(1), b = w.worker(2), c = w.worker(3);
  const uint64_t early = w.acquire(a, "m", 1000), other = w.acquire(b, "x", 1000), wrong = w.acquire(c, "m", 1000, "c2");
  EXPECT_FALSE(w.answered(early));
  const GenerationId generation = w.publish("m", "c1");
  EXPECT_EQ(w.result<Granted>(early).generation, generation);
  EXPECT_EQ(w.error(wrong), StatusCode::kNotFound);
  EXPECT_FALSE(w.answered(other));
  w.pass(milliseconds(1000));
  EXPECT_EQ(w.error(other), StatusCode::kDeadlineExceeded);
  EXPECT_EQ(w.registry.next_deadline(), std::nullopt);
}

TEST(Registry, WaitingForAModelWhoseLoadFails) {
  World w;
  const SessionId a = w.worker(1);
  const uint64_t waiting = w.acquire(a, "m", 1000);
  w.load("m", "/secret/path");
  w.end_job(w.latest, Status::corruption("/secret/path: broken"));
  EXPECT_EQ(w.error(waiting), StatusCode::kFailedPrecondition);
  EXPECT_EQ(w.result<Status>(waiting).message().find("secret"), std::string::npos);
}

TEST(Registry, AClosedConnectionIsNotAnswered) {
  World w;
  const SessionId a = w.worker(1);
  const uint64_t waiting = w.acquire(a, "m", 1000);
  w.close(a, true);
  w.publish("m", "c1");
  w.pass(milliseconds(2000));
  EXPECT_FALSE(w.answered(waiting));
  EXPECT_EQ(w.registry.lease_count(), 0U);
}

// --- unload --------------------------------------------------------------------------------------------------------------

TEST(Registry, CO_071_UnloadWaitsForTheHolderAndSaysWhoItIs) {
  World w;
  const GenerationId generation = w.publish("m", "c1");
  const SessionId a = w.worker(4711);
  const uint64_t held = w.acquire(a, "m");
  w.pass(milliseconds(120'000));
  const uint64_t unload = w.unload("m", milliseconds(500));
  ASSERT_EQ(w.notices.back().kind, Notice::Kind::kDrainRequested);
  EXPECT_EQ(w.notices.back().sessions, std::set<SessionId>{a});
  w.pass(milliseconds(499));
  EXPECT_FALSE(w.answered(unload));
  w.pass(milliseconds(1));
  const auto& busy = w.result<ipc::UnloadedReply>(unload);
  EXPECT_FALSE(busy.freed);
  EXPECT_EQ(busy.bytes, 10 * kMiB);
  ASSERT_EQ(busy.holders.size(), 1U);
  EXPECT_EQ(busy.holders.front().pid, 4711);
  EXPECT_EQ(busy.holders.front().age_ms, 120'500U);
  // No time-based steal: it drains until the holder lets go.
  w.pass(milliseconds(1'000'000));
  EXPECT_EQ(w.state(generation), State::kDraining);
  const uint64_t again = w.unload("m", milliseconds(500));
  w.release(a, w.lease(held));
  w.reclaim(generation);
  EXPECT_TRUE(w.result<ipc::UnloadedReply>(again).freed);
  EXPECT_EQ(w.free_bytes(), 100 * kMiB);
}

TEST(Registry, AnIdleModelIsFreedAtOnceAndTheAnswerWaitsForTheMemory) {
  World w;
  const GenerationId generation = w.publish("m", "c1");
  const uint64_t unload = w.unload("m");
  EXPECT_EQ(w.dropped, std::vector<GenerationId>{generation});
  EXPECT_FALSE(w.answered(unload));
  EXPECT_EQ(w.free_bytes(), 90 * kMiB);
  w.reclaim(generation);
  EXPECT_EQ(w.result<ipc::UnloadedReply>(unload).bytes, 10 * kMiB);
  EXPECT_EQ(w.free_bytes(), 100 * kMiB);
}

TEST(Registry, ANameCanBeLoadedAgainWhileItsOldGenerationDrains) {
  World w;
  const GenerationId old = w.publish("m", "c1");
  const SessionId a = w.worker(1);
  const uint64_t held = w.acquire(a, "m");
  w.unload("m");
  const GenerationId fresh = w.publish("m", "c2");
  EXPECT_EQ(w.state(old), State::kDraining);
  EXPECT_EQ(w.result<Granted>(w.acquire(a, "m")).generation, fresh);
  w.release(a, w.lease(held));
  w.reclaim(old);
  EXPECT_EQ(w.state(fresh), State::kPublished);
}

TEST(Registry, CO_081_ModelsShareNothing) {
  World w;
  w.publish("a", "c1");
  const GenerationId twin = w.publish("b", "c1");
  EXPECT_EQ(w.free_bytes(), 80 * kMiB);
  w.unload("a");
  w.reclaim(w.dropped.back());
  EXPECT_EQ(w.state(twin), State::kPublished);
  EXPECT_EQ(w.free_bytes(), 90 * kMiB);
}

TEST(Registry, TwoDevicesMustBeNamed) {
  Registry registry(Ledger({{"gpu-a", "", 8, 8}, {"gpu-b", "", 8, 8}}), {});
  Effects effects;
  registry.load({0, 1}, {"m", "/a", "", 0}, std::nullopt, Time{}, effects);
  registry.load({0, 2}, {"m", "/a", "gpu-a", 0}, std::nullopt, Time{}, effects);
  registry.load({0, 3}, {"m", "/a", "gpu-b", 0}, std::nullopt, Time{}, effects);
  ASSERT_EQ(effects.answers.size(), 1U);
  EXPECT_EQ(std::get<Status>(effects.answers.front().result).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(effects.start.size(), 2U);
}

// --- any order of events -------------------------------------------------------------------------------------------------

/// Random calls in random order, with a model of what must hold after each. Requests are answered exactly once, states only move
/// forward, the ledger's sums are those of the generations, and in the end everything is given back.
class RandomWalk {
 public:
  explicit RandomWalk(uint64_t seed) : random_(seed), world_(40 * kMiB) {}

  void run() {
    for (int step = 0; step < 600; ++step) {
      this->step();
      react();
      check();
      if (::testing::Test::HasFailure()) return;
    }
    wind_up();
  }

 private:
  uint64_t below(uint64_t bound) { return random_() % bound; }
  std::string model() { return std::string(1, static_cast<char>('a' + below(3))); }
  std::string content() { return "c" + std::to_string(below(3)); }
  template <typename Container>
  auto any(Container& container) {
    return container[below(container.size())];
  }

  void step() {
    switch (below(11)) {
      case 0:
        open();
        break;
      case 1:
        close();
        break;
      case 2:
      case 3:
        if (!sessions_.empty()) world_.acquire(any(sessions_), model(), below(2) == 0 ? 0 : 50, below(3) == 0 ? content() : "");
        break;
      case 4:
        if (!leases_.empty()) {
          const auto [session, lease] = any(leases_);
          if (open_.count(session) > 0) world_.release(session, lease);
        }
        break;
      case 5:
      case 6:
        load();
        break;
      case 7:
        own_requests_.push_back(world_.unload(model(), milliseconds(below(60))));
        break;
      case 8:
        world_.pass(milliseconds(below(20)));
        break;
      case 10:
        lose_one();
        break;
      case 9:
        if (!world_.watched.empty()) {
          world_.registry.process_ended(any(world_.watched), world_.effects);
          world_.collect();
        }
        break;
      default:
        break;
    }
  }
  void lose_one() {
    std::vector<GenerationId> in_service;
    for (const ipc::ModelSummary& m : world_.registry.models()) {
      if (m.state == State::kPublished || m.state == State::kDraining) in_service.push_back(m.generation);
    }
    if (in_service.empty() || below(3) != 0) return;
    world_.registry.owner_lost(any(in_service), "its owner ended", world_.effects);
    world_.collect();
  }
  void open() {
    sessions_.push_back(world_.worker(static_cast<int32_t>(below(4)), below(2)));
    open_.insert(sessions_.back());
  }
  void load() {
    const SessionId session = sessions_.empty() || below(2) == 0 ? 0 : any(sessions_);
    const uint64_t request = world_.load(model(), "/" + content(), session);
    if (session == 0) own_requests_.push_back(request);
  }
  void close() {
    if (sessions_.empty()) return;
    const size_t index = below(sessions_.size());
    world_.close(sessions_[index], below(2) == 0);
    open_.erase(sessions_[index]);
    sessions_.erase(sessions_.begin() + static_cast<ptrdiff_t>(index));
  }

  /// Loaders and the reclaimer do something, or not yet.
  void react() {
    for (const GenerationId id : world_.started) jobs_[id] = 0;
    world_.started.clear();
    for (const GenerationId id : world_.admitted) jobs_[id] = 2;
    world_.admitted.clear();
    for (const GenerationId id : world_.cancelled) jobs_[id] = 9;
    world_.cancelled.clear();
    for (const GenerationId id : world_.dropped) drops_.push_back(id);
    world_.dropped.clear();
    for (const auto& [request, answer] : world_.answers) {
      if (const auto* granted = std::get_if<Granted>(&answer.result)) leases_.emplace_back(answer.ticket.session, granted->lease);
    }
    world_.answers.clear();
    if (below(2) == 0) advance_job();
    if (!drops_.empty() && below(3) == 0) {
      world_.reclaim(drops_.back());
      drops_.pop_back();
    }
  }
  void advance_job() {
    if (jobs_.empty()) return;
    auto job = jobs_.begin();
    std::advance(job, below(jobs_.size()));
    const GenerationId id = job->first;
    if (job->second == 9 || (job->second != 1 && below(8) == 0)) {
      jobs_.erase(job);
      world_.end_job(id, Status::io("the loader ended"));
    } else if (job->second == 0) {
      job->second = 1;
      world_.plan(id, content(), (1 + below(30)) * kMiB);
    } else if (job->second == 2) {
      job->second = 3;
      world_.registry.uploaded(id);
    } else if (job->second == 3) {
      jobs_.erase(job);
      world_.verify(id);
      if (below(2) == 0) world_.end_job(id);
    }
  }

  void check() {
    std::map<GenerationId, State> now;
    uint64_t resident = 0, leases = 0;
    std::set<std::pair<std::string, State>> published;
    for (const ipc::ModelSummary& m : world_.registry.models()) {
      now[m.generation] = m.state;
      leases += m.lease_count + m.orphan_count;
      if (m.state == State::kPublished || m.state == State::kDraining) resident += m.resident_bytes;
      if (m.state == State::kPublished) {
        EXPECT_TRUE(published.emplace(m.name, m.state).second) << "two published under " << m.name;
      }
      if (m.state != State::kPublished && m.state != State::kDraining && m.state != State::kLost) {
        EXPECT_EQ(m.lease_count + m.orphan_count, 0U);
      }
      if (m.state == State::kDraining) {
        EXPECT_GT(m.lease_count + m.orphan_count, 0U) << "drains without a lease";
      }
      const auto before = states_.find(m.generation);
      if (before != states_.end()) {
        EXPECT_GE(static_cast<int>(m.state), static_cast<int>(before->second)) << "went back";
      }
    }
    states_ = now;
    EXPECT_EQ(leases, world_.registry.lease_count());
    const ipc::DeviceSummary device = world_.registry.devices().front();
    EXPECT_GE(device.owned_bytes, resident);
    EXPECT_EQ(device.budget_bytes, device.owned_bytes + device.loading_bytes + device.free_bytes);
    EXPECT_LE(device.leased_bytes + device.orphan_bytes, device.owned_bytes);
  }

  void wind_up() {
    while (!sessions_.empty()) close();
    for (const Process& process : world_.watched) world_.registry.process_ended(process, world_.effects);
    world_.collect();
    for (int round = 0; round < 5000 && (!jobs_.empty() || !drops_.empty()); ++round) react();
    for (const char* name : {"a", "b", "c"}) world_.unload(name, milliseconds(0));
    react();
    for (int round = 0; round < 5000 && (!jobs_.empty() || !drops_.empty()); ++round) react();
    world_.pass(milliseconds(1'000'000));
    react();
    for (int round = 0; round < 5000 && (!jobs_.empty() || !drops_.empty()); ++round) react();
    EXPECT_TRUE(world_.registry.models().empty());
    EXPECT_EQ(world_.registry.lease_count(), 0U);
    EXPECT_EQ(world_.free_bytes(), 40 * kMiB);
    for (const uint64_t request : own_requests_) EXPECT_EQ(world_.answered_ever.count(request), 1U) << "request " << request;
    EXPECT_EQ(world_.registry.next_deadline(), std::nullopt);
  }

  std::mt19937_64 random_;
  World world_;
  std::vector<SessionId> sessions_;
  std::vector<uint64_t> own_requests_;  // of the daemon itself: nothing takes their answers away
  std::set<SessionId> open_;
  std::vector<std::pair<SessionId, LeaseId>> leases_;
  std::map<GenerationId, int> jobs_;  // 0 started, 1 planned, 2 admitted, 3 uploaded, 9 cancelled
  std::vector<GenerationId> drops_;
  std::map<GenerationId, State> states_;
};

TEST(Registry, AnyOrderOfEventsKeepsTheInvariants) {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RandomWalk(seed).run();
    if (HasFailure()) return;
  }
}

// --- legacy transport: the owner of the memory dies ------------------------------------------------------------------------

uint64_t load_legacy(World& world, const std::string& model, const std::string& source) {
  const uint64_t request = ++world.last_request;
  world.registry.load({0, request}, {model, source, "", 0, "legacy"}, std::nullopt, world.now, world.effects);
  if (!world.effects.start.empty()) world.latest = world.effects.start.back();
  world.collect();
  return request;
}
GenerationId publish_legacy(World& world, const std::string& model, const std::string& content) {
  load_legacy(world, model, "/" + content);
  const GenerationId generation = world.latest;
  world.plan(generation, content, 10 * kMiB);
  world.verify(generation);
  return generation;
}
void lose(World& world, GenerationId generation) {
  world.registry.owner_lost(generation, "the loader was killed (signal 9)", world.effects);
  world.collect();
}

TEST(Lost, LeasesStandAndTheMemoryIsGone) {
  World world;
  const SessionId session = world.worker(1), bystander = world.worker(2);
  const GenerationId generation = publish_legacy(world, "m", "a");
  EXPECT_EQ(world.registry.summary(generation).transport, "legacy");
  const LeaseId lease = world.lease(world.acquire(session, "m"));
  world.notices.clear();
  lose(world, generation);
  EXPECT_EQ(world.state(generation), State::kLost);
  EXPECT_EQ(world.free_bytes(), 100 * kMiB);
  ASSERT_EQ(world.notices.size(), 1U);
  EXPECT_EQ(world.notices[0].kind, Notice::Kind::kLost);
  EXPECT_EQ(world.notices[0].sessions, std::set<SessionId>{session});
  EXPECT_EQ(world.registry.lease_count(), 1U);
  EXPECT_EQ(world.registry.leases(world.now)[0].bytes, 0U);
  EXPECT_FALSE(world.registry.view(generation).has_value());
  EXPECT_EQ(world.error(world.acquire(bystander, "m")), StatusCode::kLost);
  EXPECT_EQ(world.error(world.acquire(bystander, "m", 1000)), StatusCode::kLost) << "waiting would be in vain";
  EXPECT_EQ(world.error(world.acquire(session, "m", 0, "a")), StatusCode::kLost) << "by content, too";
  EXPECT_EQ(world.registry.published("m", "").status().code(), StatusCode::kLost);
  world.release(session, lease);
  EXPECT_EQ(world.registry.models().size(), 1U) << "stays until somebody has seen to it";
  lose(world, generation);  // says nothing new
  EXPECT_EQ(world.notices.size(), 1U);
}

TEST(Lost, AnUnloadForgetsItAfterItsLastLease) {
  World world;
  const SessionId session = world.worker(1);
  const GenerationId generation = publish_legacy(world, "m", "a");
  const LeaseId lease = world.lease(world.acquire(session, "m"));
  lose(world, generation);
  const uint64_t late = world.unload("m", milliseconds(10));
  EXPECT_FALSE(world.answered(late));
  world.pass(milliseconds(20));
  EXPECT_FALSE(world.result<ipc::UnloadedReply>(late).freed);
  EXPECT_EQ(world.result<ipc::UnloadedReply>(late).holders.size(), 1U);
  const uint64_t unload = world.unload("m");
  world.release(session, lease);
  EXPECT_TRUE(world.result<ipc::UnloadedReply>(unload).freed);
  EXPECT_EQ(world.result<ipc::UnloadedReply>(unload).bytes, 0U);
  EXPECT_TRUE(world.registry.models().empty());
  EXPECT_TRUE(world.dropped.empty()) << "there was nothing to close";
  const GenerationId unleased = publish_legacy(world, "m", "a");
  lose(world, unleased);
  EXPECT_TRUE(world.result<ipc::UnloadedReply>(world.unload("m")).freed) << "at once";
}

TEST(Lost, WhileItDrains) {
  World world;
  const SessionId session = world.worker(1);
  const GenerationId generation = publish_legacy(world, "m", "a");
  const LeaseId lease = world.lease(world.acquire(session, "m"));
  const uint64_t unload = world.unload("m");
  lose(world, generation);
  EXPECT_EQ(world.state(generation), State::kLost);
  EXPECT_FALSE(world.answered(unload));
  world.release(session, lease);
  EXPECT_TRUE(world.result<ipc::UnloadedReply>(unload).freed);
  EXPECT_TRUE(world.registry.models().empty());
}

TEST(Lost, ANewLoadTakesItsPlace) {
  World world;
  const SessionId session = world.worker(1);
  const GenerationId lost = publish_legacy(world, "m", "a");
  const LeaseId lease = world.lease(world.acquire(session, "m"));
  lose(world, lost);
  load_legacy(world, "m", "/a");
  const GenerationId next = world.latest;
  const uint64_t waiting = world.acquire(session, "m", 1000);
  EXPECT_FALSE(world.answered(waiting)) << "somebody loads it again";
  world.plan(next, "a", 10 * kMiB);
  world.verify(next);
  EXPECT_EQ(world.result<Granted>(waiting).generation, next);
  EXPECT_EQ(world.state(lost), State::kLost) << "its lease stands";
  world.release(session, lease);
  EXPECT_EQ(world.registry.models().size(), 1U);
}

TEST(Lost, ItsMemoryMakesRoomForWhoWaits) {
  World world(15 * kMiB);
  const GenerationId freed = world.publish("x", "x", 5 * kMiB);
  const GenerationId lost = publish_legacy(world, "m", "a");
  world.unload("x");
  world.load("y", "/y");
  const GenerationId waiting = world.latest;
  world.plan(waiting, "y", 5 * kMiB);
  EXPECT_TRUE(world.registry.awaits_room());
  world.admitted.clear();
  lose(world, lost);
  EXPECT_EQ(world.admitted, std::vector<GenerationId>{waiting});
  EXPECT_FALSE(world.registry.awaits_room());
  world.reclaim(freed);
}

TEST(Lost, OnlyWhatIsInService) {
  World world;
  load_legacy(world, "m", "/a");
  lose(world, world.latest);
  EXPECT_EQ(world.state(world.latest), State::kLoading);
  lose(world, 4711);
  EXPECT_TRUE(world.notices.empty());
}

TEST(Transports, OneAtATime) {
  World world;
  load_legacy(world, "m", "/a");
  EXPECT_EQ(world.error(world.load("m", "/a")), StatusCode::kAlreadyExists) << "being loaded for the other";
  world.plan(world.latest, "a", 10 * kMiB);
  world.verify(world.latest);
  const uint64_t other = world.load("m", "/a");
  world.plan(world.latest, "a", 10 * kMiB);
  EXPECT_EQ(world.error(other), StatusCode::kAlreadyExists);
}

TEST(Views, BytesThatNobodyLeasesAndEncodings) {
  World world;
  const SessionId session = world.worker(1);
  world.load("m", "/a");
  ipc::Planned planned;
  planned.content_id = "a";
  planned.arena_bytes = planned.resident_bytes = 10 * kMiB;
  planned.chunk_count = 1;
  planned.encodings = {{"f12", 3, 16, 12}};
  world.registry.planned(world.latest, planned, world.effects);
  world.collect();
  world.verify(world.latest);
  ASSERT_EQ(world.registry.summary(world.latest).encodings.size(), 1U);
  EXPECT_EQ(world.registry.summary(world.latest).encodings[0].encoding, "f12");
  EXPECT_EQ(world.registry.devices()[0].fd_only_bytes, 10 * kMiB);
  const LeaseId lease = world.lease(world.acquire(session, "m"));
  EXPECT_EQ(world.registry.devices()[0].fd_only_bytes, 0U);
  world.release(session, lease);
  EXPECT_EQ(world.registry.devices()[0].fd_only_bytes, 10 * kMiB);
}

}  // namespace
}  // namespace weightd::daemon
