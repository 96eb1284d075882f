// SPDX-License-Identifier: Apache-2.0
#include "tools/bench/gpu/measure.h"

#include <algorithm>
#include <utility>

#include "base/text.h"
#include "store/tile_layout.h"
#include "tools/bench/percentiles.h"
#include "tools/pack/synth_weights.h"

namespace weightd::tools {
namespace {

constexpr uint64_t kLeastColdBytes = uint64_t{420} << 20;
constexpr double kGraphUs = 1500;   // the start of a graph costs some 8 us: under 1 % then
constexpr int kMostLaunches = 400;  // in a graph
constexpr int kWarmups = 2;
constexpr double kContenderUs = 1e6;  // with more than this in all, a contender gets fewer rounds
constexpr int kLeastRepeats = 5;

struct StreamDeleter {
  void operator()(CUstream_st* stream) const { (void)cudaStreamDestroy(stream); }
};
struct EventDeleter {
  void operator()(CUevent_st* event) const { (void)cudaEventDestroy(event); }
};
struct GraphDeleter {
  void operator()(CUgraph_st* graph) const { (void)cudaGraphDestroy(graph); }
};
struct GraphExecDeleter {
  void operator()(CUgraphExec_st* graph) const { (void)cudaGraphExecDestroy(graph); }
};
using Stream = std::unique_ptr<CUstream_st, StreamDeleter>;
using Event = std::unique_ptr<CUevent_st, EventDeleter>;
using Graph = std::unique_ptr<CUgraph_st, GraphDeleter>;
using GraphExec = std::unique_ptr<CUgraphExec_st, GraphExecDeleter>;

Result<Event> make_event() {
  cudaEvent_t event = nullptr;
  WEIGHTD_RETURN_IF_ERROR(check_cuda(cudaEventCreate(&event), "cudaEventCreate"));
  return Event(event);
}

/// The stream and events that all contenders share.
struct Track {
  Stream stream;
  Event begin, end;

  [[nodiscard]] static Result<Track> make() {
    Track track;
    cudaStream_t stream = nullptr;
    WEIGHTD_RETURN_IF_ERROR(check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate"));
    track.stream.reset(stream);
    WEIGHTD_ASSIGN_OR_RETURN(track.begin, make_event());
    WEIGHTD_ASSIGN_OR_RETURN(track.end, make_event());
    return track;
  }
};

Status launch_all(const Contender& contender, int launches, cudaStream_t stream) {
  for (int i = 0; i < launches; ++i) WEIGHTD_RETURN_IF_ERROR(contender.launch(i, stream));
  return {};
}

Result<GraphExec> capture(const Contender& contender, int launches, cudaStream_t stream) {
  WEIGHTD_RETURN_IF_ERROR(check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture"));
  const Status launched = launch_all(contender, launches, stream);
  cudaGraph_t raw = nullptr;
  const Status ended = check_cuda(cudaStreamEndCapture(stream, &raw), "cudaStreamEndCapture");
  const Graph graph(raw);
  WEIGHTD_RETURN_IF_ERROR(launched);
  WEIGHTD_RETURN_IF_ERROR(ended);
  cudaGraphExec_t executable = nullptr;
  WEIGHTD_RETURN_IF_ERROR(check_cuda(cudaGraphInstantiate(&executable, graph.get(), 0), "cudaGraphInstantiate"));
  return GraphExec(executable);
}

/// A contender at the start: its launches, captured or not.
struct Runner {
  const Contender* contender = nullptr;
  int launches = 0;
  int repeats = 0;
  GraphExec graph;
  std::vector<double> us;  // of one launch

  Status prepare(int count, const Track& track) {
    launches = count;
    if (!contender->in_graph) return {};
    WEIGHTD_ASSIGN_OR_RETURN(graph, capture(*contender, launches, track.stream.get()));
    return {};
  }
  Result<double> time(const Track& track) const {
    cudaStream_t stream = track.stream.get();
    WEIGHTD_RETURN_IF_ERROR(check_cuda(cudaEventRecord(track.begin.get(), stream), "cudaEventRecord"));
    if (graph != nullptr) {
      WEIGHTD_RETURN_IF_ERROR(check_cuda(cudaGraphLaunch(graph.get(), stream), "cudaGraphLaunch"));
    } else {
      WEIGHTD_RETURN_IF_ERROR(launch_all(*contender, launches, stream));
    }
    WEIGHTD_RETURN_IF_ERROR(check_cuda(cudaEventRecord(track.end.get(), stream), "cudaEventRecord"));
    WEIGHTD_RETURN_IF_ERROR(check_cuda(cudaEventSynchronize(track.end.get()), "cudaEventSynchronize"));
    float ms = 0;
    WEIGHTD_RETURN_IF_ERROR(check_cuda(cudaEventElapsedTime(&ms, track.begin.get(), track.end.get()), "cudaEventElapsedTime"));
    return static_cast<double>(ms) * 1000 / launches;
  }
};

/// Launches in a graph: a multiple of the copies that lasts long enough.
int launches_for(const Contender& contender, double us) {
  const int wanted = std::clamp(static_cast<int>(kGraphUs / std::max(us, 0.1)), 1, kMostLaunches);
  return (wanted + contender.copies - 1) / contender.copies * contender.copies;
}

/// Finds out how long a launch takes, and makes the graph that is going to be timed. What loads code or chooses an algorithm at its
/// first call does so before anything is captured.
Status start(Runner& runner, int repeats, const Track& track) {
  WEIGHTD_RETURN_IF_ERROR(launch_all(*runner.contender, 1, track.stream.get()));
  WEIGHTD_RETURN_IF_ERROR(check_cuda(cudaStreamSynchronize(track.stream.get()), "cudaStreamSynchronize"));
  WEIGHTD_RETURN_IF_ERROR(runner.prepare(runner.contender->copies, track));
  WEIGHTD_RETURN_IF_ERROR(runner.time(track).status());
  WEIGHTD_ASSIGN_OR_RETURN(const double us, runner.time(track));
  const int launches = launches_for(*runner.contender, us);
  if (launches != runner.launches) WEIGHTD_RETURN_IF_ERROR(runner.prepare(launches, track));
  const double affordable = kContenderUs / (us * launches);
  runner.repeats = std::min(repeats, std::max(kLeastRepeats, static_cast<int>(std::min(affordable, 1e6))));
  return {};
}

/// Random words, the same every 16 MiB.
Status fill_random(const DeviceBytes& memory) {
  constexpr uint64_t kPieceBytes = uint64_t{16} << 20;
  std::vector<uint16_t> words(std::min(kPieceBytes, f12::align_up(memory.bytes(), 2)) / 2);
  random_words(words, 1);
  for (uint64_t at = 0; at < memory.bytes(); at += kPieceBytes) {
    const uint64_t bytes = std::min(kPieceBytes, memory.bytes() - at);
    WEIGHTD_RETURN_IF_ERROR(check_cuda(cudaMemcpy(memory.data() + at, words.data(), bytes, cudaMemcpyHostToDevice), "cudaMemcpy"));
  }
  return {};
}

}  // namespace

Status check_cuda(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return {};
  const std::string message = std::string(call) + ": " + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) + ")";
  return error == cudaErrorMemoryAllocation ? Status::resource_exhausted(message) : Status::cuda(message);
}

Result<DeviceBytes> DeviceBytes::allocate(uint64_t bytes) {
  DeviceBytes memory;
  void* data = nullptr;
  const Status status = check_cuda(cudaMalloc(&data, std::max<uint64_t>(bytes, 1)), "cudaMalloc");
  if (!status.ok()) {
    (void)cudaGetLastError();
    return status.with_context(human_bytes(bytes) + " of GPU memory");
  }
  memory.data_ = static_cast<std::byte*>(data);
  memory.bytes_ = bytes;
  return memory;
}

DeviceBytes::DeviceBytes(DeviceBytes&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

DeviceBytes& DeviceBytes::operator=(DeviceBytes&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

DeviceBytes::~DeviceBytes() {
  if (data_ != nullptr) (void)cudaFree(data_);
}

Status DeviceBytes::upload(std::span<const std::byte> content) const {
  WEIGHTD_CHECK(content.size() <= bytes_);
  return check_cuda(cudaMemcpy(data_, content.data(), content.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
}

Result<Copies> Copies::make(std::span<const std::byte> content, uint64_t bytes, int count) {
  Copies result;
  for (int i = 0; i < count; ++i) {
    WEIGHTD_ASSIGN_OR_RETURN(DeviceBytes copy, DeviceBytes::allocate(bytes));
    if (i > 0) {
      WEIGHTD_RETURN_IF_ERROR(check_cuda(cudaMemcpy(copy.data(), result.at(0), bytes, cudaMemcpyDeviceToDevice), "cudaMemcpy"));
    } else if (!content.empty()) {
      WEIGHTD_RETURN_IF_ERROR(copy.upload(content));
    } else {
      WEIGHTD_RETURN_IF_ERROR(fill_random(copy));
    }
    result.copies_.push_back(std::move(copy));
  }
  // A copy within the device may still be under way, and other streams do not wait for it.
  WEIGHTD_RETURN_IF_ERROR(check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize"));
  return result;
}

Result<uint64_t> cold_bytes() {
  int device = 0, l2_bytes = 0;
  WEIGHTD_RETURN_IF_ERROR(check_cuda(cudaGetDevice(&device), "cudaGetDevice"));
  WEIGHTD_RETURN_IF_ERROR(check_cuda(cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize, device), "cudaDeviceGetAttribute"));
  return std::max(kLeastColdBytes, 4 * static_cast<uint64_t>(l2_bytes));
}

int copies_for(uint64_t bytes, uint64_t cold_bytes) {
  return static_cast<int>(std::max<uint64_t>(1, (cold_bytes + bytes - 1) / std::max<uint64_t>(bytes, 1)));
}

Status race(std::vector<Contender>& contenders, int repeats) {
  WEIGHTD_ASSIGN_OR_RETURN(const Track track, Track::make());
  std::vector<Runner> runners;
  int rounds = 0;
  for (const Contender& contender : contenders) {
    Runner runner;
    runner.contender = &contender;
    WEIGHTD_RETURN_IF_ERROR(start(runner, repeats, track).with_context(contender.name));
    rounds = std::max(rounds, runner.repeats);
    runners.push_back(std::move(runner));
  }
  for (int round = -kWarmups; round < rounds; ++round) {
    for (Runner& runner : runners) {
      if (round >= runner.repeats) continue;
      const Result<double> us = runner.time(track);
      if (!us.ok()) return us.status().with_context(runner.contender->name);
      if (round >= 0) runner.us.push_back(*us);
    }
  }
  for (size_t i = 0; i < runners.size(); ++i) contenders[i].us = percentiles(runners[i].us).p50;
  return {};
}

}  // namespace weightd::tools
