// SPDX-License-Identifier: Apache-2.0
// Plays the barriers of kWgmma without a GPU: every legal cut must end, and no slot may be written while it is read. What each side
// waits for comes from gemm_shared.h, as in the kernel; the order of its steps is repeated here.
#include <gtest/gtest.h>

#include <array>
#include <random>
#include <string>
#include <vector>

#include "kernels/gemm_shared.h"

namespace weightd::kernels {
namespace {

constexpr uint32_t kNone = ~0U;
constexpr uint32_t kFull = 0;
constexpr uint32_t kEmpty = kMaxWgmmaStages;
constexpr uint32_t kRecordsFull = 2 * kMaxWgmmaStages;
constexpr uint32_t kRecordsEmpty = kRecordsFull + 2;
constexpr uint32_t kSums = kRecordsFull + 4;
constexpr uint32_t kBarriers = kSums + 1;
constexpr uint32_t kMostWriters = kWeightLoaders + 4;  // of a slot: loaders of weights, blocks that share x

/// An mbarrier.
struct Barrier {
  int64_t arrivals = 1, pending = 1, bytes = 0;
  uint32_t phase = 0;

  void init(uint32_t count) { arrivals = pending = count; }
  void change(int64_t arrived, int64_t byte_change) {
    pending -= arrived;
    bytes += byte_change;
    ASSERT_GE(pending, 0) << "more arrivals than the barrier counts";
    if (pending == 0 && bytes == 0) {
      pending = arrivals;
      phase ^= 1;
    }
  }
  [[nodiscard]] bool is_over(uint32_t parity) const { return phase != parity; }
};

struct Block {
  std::array<Barrier, kBarriers> barriers{};
  std::array<std::array<uint32_t, kMostWriters>, kMaxWgmmaStages> content{};  // the stage that each writer put into a slot
};

/// What a warp, or the four alike of a warpgroup, does next.
struct Step {
  enum class Kind { kWait, kArrive, kCopy, kAdvance, kLeave, kGiveBack, kMeet } kind = Kind::kWait;
  uint32_t barrier = 0, parity = 0;
  uint32_t blocks = 0;    // kArrive, kCopy: a bit a rank
  uint32_t arrivals = 0;  // kArrive
  int64_t bytes = 0;      // kArrive: announced (sent, where negative); kCopy
  uint32_t slot = 0, stage = 0, writer = 0;
};

struct Agent {
  uint32_t rank = 0;
  std::vector<Step> steps;
  size_t next = 0;
  uint32_t held = kNone, held_stage = 0;
  uint32_t sharing_ranks = 0;
  bool has_met = false;
};

struct Copy {
  uint32_t rank, barrier;
  int64_t bytes;
};

/// As in the kernel, for the loaders.
struct LoaderPosition {
  uint32_t slot = 0, parity = 0;
  void advance(uint32_t slots) {
    if (++slot == slots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

class Cluster {
 public:
  Cluster(const GemmPlan& plan, uint32_t tile_bytes, uint32_t index) : plan_(plan), tile_bytes_(tile_bytes) {
    const f12::Geometry geometry{plan.n, plan.k, 1};
    const WgmmaShared shared(plan, tile_bytes);
    const auto all_units = static_cast<uint32_t>(geometry.units());
    for (uint32_t rank = 0; rank < plan.splits * plan.sharing; ++rank) {
      split_ = rank % plan.splits;
      const uint32_t share = rank / plan.splits;
      part_ = WgmmaPart(split_, shared.split_tiles, static_cast<uint32_t>(geometry.tiles()));
      unit_begin_ = std::min((index * plan.sharing + share) * plan.units_per_block, all_units);
      unit_end_ = std::min(unit_begin_ + plan.units_per_block, all_units);
      ranks_ = 0;
      for (uint32_t each = 0; each < plan.sharing; ++each) ranks_ |= 1U << (split_ + plan.splits * each);
      add_block();
      for (uint32_t turn = 0; turn < full_arrivals(plan); ++turn) add_weight_loader(rank, turn);
      add_x_loader(rank, share);
      for (uint32_t warpgroup = 0; warpgroup < plan.warpgroups; ++warpgroup) add_warpgroup(rank, share, warpgroup);
    }
  }

  /// Runs to the end; agents and copies take turns as `seed` says.
  void run(uint64_t seed) {
    std::mt19937_64 random(seed);
    while (!::testing::Test::HasFatalFailure()) {
      bool moved = false;
      bool done = true;
      const size_t first = random() % agents_.size();
      for (size_t i = 0; i < agents_.size(); ++i) {
        Agent& agent = agents_[(first + i) % agents_.size()];
        const uint64_t most = seed == 0 ? ~uint64_t{0} : random() % 8;
        for (uint64_t step = 0; step < most && agent.next < agent.steps.size() && run_step(agent); ++step) moved = true;
        moved = moved || (most == 0 && agent.next < agent.steps.size());
        done = done && agent.next == agent.steps.size();
      }
      while (!copies_.empty() && (seed == 0 || !moved || random() % 4 != 0)) {
        std::swap(copies_[random() % copies_.size()], copies_.back());
        const Copy copy = copies_.back();
        copies_.pop_back();
        blocks_[copy.rank].barriers[copy.barrier].change(0, -copy.bytes);
        moved = true;
      }
      if (done && copies_.empty()) return expect_idle();
      ASSERT_TRUE(moved) << "all wait: " << waiting();
    }
  }

 private:
  void add_block() {
    Block& block = blocks_.emplace_back();
    for (auto& slot : block.content) slot.fill(kNone);
    for (uint32_t slot = 0; slot < plan_.stages; ++slot) {
      block.barriers[kFull + slot].init(full_arrivals(plan_));
      block.barriers[kEmpty + slot].init(empty_arrivals(plan_));
    }
    for (uint32_t buffer = 0; buffer < 2; ++buffer) block.barriers[kRecordsEmpty + buffer].init(plan_.warpgroups * kWarpgroupWarps);
    if (plan_.splits > 1) block.barriers[kSums].change(1, sums_bytes(plan_, pass_units(unit_begin_)));
  }

  [[nodiscard]] uint32_t pass_units(uint32_t pass_unit) const {
    return std::min(plan_.units_per_pass, unit_end_ - std::min(pass_unit, unit_end_));
  }

  static Step wait(uint32_t barrier, uint32_t parity) { return {Step::Kind::kWait, barrier, parity}; }
  static Step arrive(uint32_t rank, uint32_t barrier, uint32_t arrivals, int64_t bytes) {
    return {Step::Kind::kArrive, barrier, 0, 1U << rank, arrivals, bytes};
  }
  static Step copy(uint32_t blocks, uint32_t barrier, int64_t bytes, uint32_t slot, uint32_t stage, uint32_t writer) {
    return {Step::Kind::kCopy, barrier, 0, blocks, 0, bytes, slot, stage, writer};
  }

  void finish(Agent agent, bool meets) {
    if (meets) agent.steps.push_back({Step::Kind::kMeet});
    agents_.push_back(std::move(agent));
  }

  void add_weight_loader(uint32_t rank, uint32_t turn) {
    Agent agent;
    agent.rank = rank;
    LoaderPosition position;
    LoaderPosition records;
    uint32_t stage_id = 0;
    for (uint32_t pass = 0; pass < plan_.passes(); ++pass, records.advance(2)) {
      const uint32_t units = pass_units(unit_begin_ + pass * plan_.units_per_pass);
      if (turn == 0) {
        agent.steps.push_back(wait(kRecordsEmpty + records.slot, records.parity ^ 1));
        agent.steps.push_back(arrive(rank, kRecordsFull + records.slot, 1, units * 48));
        agent.steps.push_back(copy(1U << rank, kRecordsFull + records.slot, units * 48, kNone, 0, 0));
      }
      for (uint32_t stage = 0; stage < part_.stages(plan_); ++stage, ++stage_id, position.advance(plan_.stages)) {
        const uint32_t tiles = part_.stage_tiles(plan_, stage);
        int64_t bytes = plan_.units_per_pass * plan_.tiles_per_stage * tile_bytes_;
        if (!plan_.tensor_weights) {
          bytes = 0;
          for (uint32_t unit = turn; unit < units; unit += kWeightLoaders) bytes += tiles * tile_bytes_;
        }
        const uint32_t full = kFull + position.slot;
        agent.steps.push_back(wait(kEmpty + position.slot, position.parity ^ 1));
        // Nobody waits for a copy of nothing: here it comes first, so that readers can expect it.
        const Step load = copy(1U << rank, full, bytes, position.slot, stage_id, turn);
        if (bytes == 0) agent.steps.push_back(load);
        agent.steps.push_back(arrive(rank, full, 1, stage_bytes(plan_, tile_bytes_, units, tiles, turn)));
        if (bytes != 0) agent.steps.push_back(load);
      }
    }
    finish(std::move(agent), plan_.splits * plan_.sharing > 1);
  }

  void add_x_loader(uint32_t rank, uint32_t share) {
    Agent agent;
    agent.rank = rank;
    LoaderPosition position;
    uint32_t stage_id = 0;
    for (uint32_t pass = 0; pass < plan_.passes(); ++pass) {
      for (uint32_t stage = 0; stage < part_.stages(plan_); ++stage, ++stage_id, position.advance(plan_.stages)) {
        const int64_t bytes = part_.stage_tiles(plan_, stage) * (plan_.token_block / plan_.sharing) * kXRowBytes;
        agent.steps.push_back(wait(kEmpty + position.slot, position.parity ^ 1));
        agent.steps.push_back(copy(ranks_, kFull + position.slot, bytes, position.slot, stage_id, kWeightLoaders + share));
      }
    }
    finish(std::move(agent), plan_.splits * plan_.sharing > 1);
  }

  void add_warpgroup(uint32_t rank, uint32_t share, uint32_t warpgroup) {
    Agent agent;
    agent.rank = rank;
    agent.sharing_ranks = ranks_;
    const uint32_t slice = warpgroup % plan_.warp_slices();
    const uint32_t group = warpgroup / plan_.warp_slices();
    SlicePosition position{slice, 0};
    LoaderPosition records;
    for (uint32_t pass = 0; pass < plan_.passes(); ++pass, records.advance(2)) {
      agent.steps.push_back(wait(kRecordsFull + records.slot, records.parity));
      add_tiles(pass, slice, reads_ring(plan_, group) ? part_.slice_tiles(plan_, slice) : 0, position, agent);
      agent.steps.push_back({Step::Kind::kGiveBack});
      agent.steps.push_back(arrive(rank, kRecordsEmpty + records.slot, kWarpgroupWarps, 0));
    }
    if (plan_.splits > 1) add_exchange(share, group, agent);
    finish(std::move(agent), plan_.splits == 1 && plan_.sharing > 1);
  }

  void add_tiles(uint32_t pass, uint32_t slice, uint32_t tiles, SlicePosition& position, Agent& agent) const {
    uint32_t stage = slice;
    uint32_t left = 0;
    for (uint32_t tile = 0; tile < tiles; ++tile) {
      const uint32_t stage_id = pass * part_.stages(plan_) + stage;
      if (left > 1) {
        --left;
      } else {
        agent.steps.push_back({Step::Kind::kAdvance, kFull + position.slot, position.parity, 0, 0, 0, position.slot, stage_id});
        left = part_.stage_tiles(plan_, stage);
      }
      agent.steps.push_back({Step::Kind::kGiveBack});
      if (left > 1) continue;
      agent.steps.push_back({Step::Kind::kLeave, 0, 0, 0, 0, 0, position.slot, stage_id});
      position.advance(plan_);
      stage += plan_.warp_slices();
    }
    EXPECT_LE(left, 1U) << "the last stage is not finished";
  }

  void add_exchange(uint32_t share, uint32_t group, Agent& agent) const {
    agent.steps.push_back({Step::Kind::kMeet});
    const uint32_t stride = plan_.warpgroups / plan_.warp_slices() * kWarpgroupWarps;
    int64_t units = 0;
    for (uint32_t warp = 0; warp < kWarpgroupWarps; ++warp) {
      for (uint32_t p = 0; p < plan_.units_per_warp; ++p) {
        units += group * kWarpgroupWarps + warp + p * stride < pass_units(unit_begin_) ? 1 : 0;
      }
    }
    for (uint32_t split = 0; split < plan_.splits; ++split) {
      const uint32_t to = split + plan_.splits * share;
      agent.steps.push_back(arrive(to, kSums, 0, -units * (plan_.token_block / 8 / plan_.splits) * kSumBytes));
    }
    agent.steps.push_back(wait(kSums, 0));
  }

  /// False: it waits.
  bool run_step(Agent& agent) {
    const Step& step = agent.steps[agent.next];
    Block& block = blocks_[agent.rank];
    switch (step.kind) {
      case Step::Kind::kWait:
        if (!block.barriers[step.barrier].is_over(step.parity)) return false;
        break;
      case Step::Kind::kArrive:
        for_each_rank(step.blocks, [&](uint32_t rank) { blocks_[rank].barriers[step.barrier].change(step.arrivals, step.bytes); });
        break;
      case Step::Kind::kCopy:
        for_each_rank(step.blocks, [&](uint32_t rank) {
          if (step.slot != kNone) blocks_[rank].content[step.slot][step.writer] = step.stage;
          copies_.push_back({rank, step.barrier, step.bytes});
        });
        break;
      case Step::Kind::kAdvance:
        if (!block.barriers[step.barrier].is_over(step.parity)) {
          if (agent.held == kNone) return false;
          give_back(agent);
          return true;
        }
        expect_content(block, step.slot, step.stage);
        break;
      case Step::Kind::kLeave:
        EXPECT_EQ(agent.held, kNone);
        agent.held = step.slot;
        agent.held_stage = step.stage;
        break;
      case Step::Kind::kGiveBack:
        give_back(agent);
        break;
      case Step::Kind::kMeet:
        if (!agent.has_met) ++met_;
        agent.has_met = true;
        if (met_ < agents_.size()) return false;
        break;
    }
    ++agent.next;
    return true;
  }

  void give_back(Agent& agent) {
    if (agent.held == kNone) return;
    expect_content(blocks_[agent.rank], agent.held, agent.held_stage);
    for_each_rank(agent.sharing_ranks,
                  [&](uint32_t rank) { blocks_[rank].barriers[kEmpty + agent.held].change(kWarpgroupWarps, 0); });
    agent.held = kNone;
  }

  void expect_content(const Block& block, uint32_t slot, uint32_t stage) const {
    for (uint32_t turn = 0; turn < full_arrivals(plan_); ++turn) ASSERT_EQ(block.content[slot][turn], stage) << "weights";
    for (uint32_t i = 0; i < plan_.sharing; ++i) ASSERT_EQ(block.content[slot][kWeightLoaders + i], stage) << "x";
  }

  void expect_idle() const {
    for (const Block& block : blocks_) {
      for (const Barrier& barrier : block.barriers) ASSERT_EQ(barrier.bytes, 0) << "bytes that nobody announced";
    }
  }

  template <typename Call>
  static void for_each_rank(uint32_t ranks, const Call& call) {
    for (uint32_t rank = 0; ranks >> rank != 0; ++rank) {
      if ((ranks >> rank & 1) != 0) call(rank);
    }
  }

  [[nodiscard]] std::string waiting() const {
    std::string text;
    for (size_t i = 0; i < agents_.size(); ++i) {
      const Agent& agent = agents_[i];
      if (agent.next == agent.steps.size()) continue;
      text += "agent " + std::to_string(i) + " of block " + std::to_string(agent.rank) + " at barrier " +
              std::to_string(agent.steps[agent.next].barrier) + "; ";
    }
    return text;
  }

  GemmPlan plan_;
  uint32_t tile_bytes_;
  uint32_t split_ = 0, unit_begin_ = 0, unit_end_ = 0, ranks_ = 0;  // of the block that is being added
  WgmmaPart part_;
  std::vector<Block> blocks_;
  std::vector<Agent> agents_;
  std::vector<Copy> copies_;
  size_t met_ = 0;
};

/// The first cluster and the last, whose blocks may have fewer units or none.
void play(const GemmPlan& plan, uint32_t tile_bytes) {
  SCOPED_TRACE(plan.to_string());
  for (const uint32_t index : {0U, plan.blocks / plan.sharing - 1}) {
    for (const uint64_t seed : {0, 1}) {
      Cluster(plan, tile_bytes, index).run(seed);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}

struct Case {
  uint32_t sm_count;
  uint64_t n, k, m;
};

TEST(GemmProtocol, EveryLegalCutEndsAndWritesNoSlotThatIsRead) {
  int played = 0;
  for (const Case& c : {Case{132, 1, 1, 1},
                        {132, 2048, 1032, 128},
                        {132, 4096, 2048, 64},
                        {16, 2040, 1000, 256},
                        {16, 4100, 1472, 100},
                        {16, 900, 2056, 33},
                        {8, 6000, 330, 128},
                        {4, 6000, 128, 40}}) {
    DeviceTraits device{c.sm_count, 232448, true, true, c.sm_count / 4};
    for (const auto& [warpgroups, units_per_warp] : {std::pair<uint32_t, uint32_t>{4, 1}, {2, 2}, {2, 1}}) {
      for (const uint32_t splits : {1, 2, 4}) {
        for (const uint32_t sharing : {1, 2, 4}) {
          for (const uint32_t tiles : {0, 1, 2, 3}) {
            for (const uint32_t stages : {0, 2, 4, 5}) {
              for (const bool tensor_weights : {true, false}) {
                const WgmmaCut cut{warpgroups, units_per_warp, splits, sharing, tiles, stages, 0, tensor_weights};
                const Result<GemmPlan> plan = plan_wgmma(device, {c.n, c.k, c.m, true}, cut);
                if (!plan.ok()) continue;
                play(*plan, 1536);
                ASSERT_FALSE(HasFatalFailure() || HasNonfatalFailure());
                ++played;
              }
            }
          }
        }
      }
    }
  }
  EXPECT_GT(played, 1000);
}

TEST(GemmProtocol, TheChosenCutsOfLargeModelsEnd) {
  const DeviceTraits h200{132, 232448, true, true, 30};
  for (const auto& [n, k] : {std::pair<uint64_t, uint64_t>{4096, 4096},
                             {6144, 4096},
                             {14336, 4096},
                             {28672, 4096},
                             {4096, 14336},
                             {8192, 8192},
                             {10240, 8192},
                             {28672, 8192},
                             {8192, 28672},
                             {128256, 4096}}) {
    for (const uint64_t m : {33, 64, 128, 256}) {
      for (const uint32_t tile_bytes : {1536, 2048}) {
        GemmRequest request{n, k, m, true, true, tile_bytes};
        request.kernel = GemmKernel::kWgmma;
        const Result<GemmPlan> plan = plan_gemm(h200, request);
        ASSERT_TRUE(plan.ok()) << plan.status().to_string();
        play(*plan, tile_bytes);
        ASSERT_FALSE(HasFatalFailure() || HasNonfatalFailure());
      }
    }
  }
}

}  // namespace
}  // namespace weightd::kernels
