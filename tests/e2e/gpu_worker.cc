// SPDX-License-Identifier: Apache-2.0
// gpu_worker SOCKET: a worker process that does what it is told, one line of standard input at a time. The backend is the daemon's:
// the same commands work on a GPU and on the host. Each line is answered with one line, "ok [key=value ...]" or "error CODE
// MESSAGE". Standard input's end ends it with status 0, the lease given back. Commands: the table in main's run().
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "tests/e2e/buffer.h"
#include "tests/e2e/trace.h"
#include "weightd/client.h"

namespace weightd::e2e {
namespace {

using Words = std::vector<std::string>;

constexpr auto kLongCall = std::chrono::seconds(60);
constexpr int kEventLimitMs = 30'000;

/// A Status on its way to the answer.
struct Failure {
  Status status;
};
void require(const Status& status, const std::string& context = "") {
  if (!status.ok()) throw Failure{context.empty() ? status : status.with_context(context)};
}
template <typename T>
T require(Result<T> result) {
  if (!result.ok()) throw Failure{result.status()};
  return *std::move(result);
}

std::string hex(uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(value));
  return text;
}

Client connect(const std::string& socket) {
  ClientOptions options;
  options.socket_path = socket;
  options.name = "gpu_worker";
  options.call_timeout = kLongCall;
  options.reconnect_backoff = std::chrono::milliseconds(0);
  return require(Client::connect(options));
}

bool is_linear(const TensorInfo& info) { return info.dtype == DType::kBF16 && info.shape.size() == 2 && info.logical_bytes > 0; }

/// The same activations for the same seed, shape and run, whatever the worker.
std::vector<uint16_t> random_activations(uint64_t seed, uint64_t count) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> words(count);
  for (uint16_t& word : words) {
    const float value = normal(random);
    uint32_t bits = 0;
    std::memcpy(&bits, &value, 4);
    word = static_cast<uint16_t>(bits >> 16);
  }
  return words;
}

/// One model, and where to compute with it.
class Computation {
 public:
  explicit Computation(Model model) : model_(std::move(model)), host_(is_host(model_.info().device)) {
    use_device(model_.info().device);
    stream_ = make_stream(host_);
  }
  ~Computation() { end_stream(stream_); }
  Computation(const Computation&) = delete;
  Computation& operator=(const Computation&) = delete;

  [[nodiscard]] const Model& model() const { return model_; }
  Model& model() { return model_; }
  [[nodiscard]] bool host() const { return host_; }
  [[nodiscard]] CUstream_st* stream() const { return stream_; }

  [[nodiscard]] GemmOptions options(bool exact) const {
    GemmOptions options;
    options.threads = 1;
    options.stream = stream_;
    options.exact = exact;
    return options;
  }

  /// x [tokens, k] times the tensor's transpose, the outputs poisoned before.
  [[nodiscard]] std::vector<uint16_t> gemm(const Tensor& tensor, const std::vector<uint16_t>& x, uint64_t tokens,
                                           bool exact) const {
    const uint64_t n = tensor.info().shape[0], k = tensor.info().shape[1];
    Buffer input(host_, x.size() * 2), output(host_, tokens * n * 2);
    input.upload(x);
    require(tensor.gemm({input.words(), tokens, k, static_cast<int64_t>(k)}, {output.words(), tokens, n, static_cast<int64_t>(n)},
                        options(exact)),
            tensor.info().name);
    wait_for(stream_);
    return output.download();
  }

  [[nodiscard]] std::vector<uint16_t> decompress(const Tensor& tensor) const {
    Buffer output(host_, tensor.info().logical_bytes);
    require(tensor.decompress({output.data(), output.bytes()}, options(false)), tensor.info().name);
    wait_for(stream_);
    return output.download();
  }

  /// Calls `visit` with every matrix of the checkpoint (and every merged one, if asked) and random activations for it.
  void for_each_layer(uint64_t seed, uint64_t tokens, bool with_merged,
                      const std::function<void(const Tensor&, const std::vector<uint16_t>&)>& visit) const {
    // By name: a model has the same layers in another order of storage when it is packed in another way.
    std::map<std::string, const TensorInfo*> layers;
    for (const TensorInfo& info : model_.tensors()) {
      if (is_linear(info) && (with_merged || !info.merged)) layers[info.name] = &info;
    }
    uint64_t number = 0;
    for (const auto& [name, info] : layers) {
      visit(require(model_.tensor(name)), random_activations(seed * 1'000'003 + number++, tokens * info->shape[1]));
    }
    if (number == 0) throw std::runtime_error("the model has no matrix");
  }

  /// The digest of everything that the layers of the checkpoint compute.
  [[nodiscard]] uint64_t digest(uint64_t seed, uint64_t tokens, bool exact, uint64_t* layers = nullptr) const {
    Digest digest;
    for_each_layer(seed, tokens, false, [&](const Tensor& tensor, const std::vector<uint16_t>& x) {
      digest.add(gemm(tensor, x, tokens, exact));
      if (layers != nullptr) ++*layers;
    });
    return digest.value();
  }

 private:
  Model model_;
  bool host_;
  CUstream_st* stream_ = nullptr;
};

/// A computation over and over in a thread of its own; wrong as soon as one round differs from the first.
class Background {
 public:
  Background(const Computation& computation, uint64_t seed, uint64_t tokens)
      : thread_([this, &computation, seed, tokens] { loop(computation, seed, tokens); }) {}
  ~Background() { (void)join(); }

  std::string join() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
    if (!trouble_.empty()) return trouble_;
    return "ok rounds=" + std::to_string(rounds_) + " digest=" + hex(digest_);
  }

 private:
  void loop(const Computation& computation, uint64_t seed, uint64_t tokens) {
    try {
      use_device(computation.model().info().device);
      do {
        const uint64_t now = computation.digest(seed, tokens, false);
        if (rounds_ > 0 && now != digest_) throw std::runtime_error("round " + std::to_string(rounds_) + " has other bits");
        digest_ = now;
        ++rounds_;
      } while (!stop_);
    } catch (const Failure& failure) {
      trouble_ = "error " + failure.status.to_string();
    } catch (const std::exception& error) {
      trouble_ = std::string("error wrong ") + error.what();
    }
  }

  std::atomic<bool> stop_{false};
  uint64_t rounds_ = 0, digest_ = 0;
  std::string trouble_;
  std::thread thread_;
};

class Worker {
 public:
  explicit Worker(std::string socket) : socket_(std::move(socket)) {}

  std::string obey(const Words& words);

 private:
  using Command = std::string (Worker::*)(const Words&);
  static const std::map<std::string, std::pair<size_t, Command>>& commands();

  Client& client() {
    if (!client_) client_ = connect(socket_);
    return *client_;
  }
  [[nodiscard]] const Computation& computation() const {
    if (!computation_) throw Failure{Status::failed_precondition("no model")};
    return *computation_;
  }
  [[nodiscard]] const std::byte* address_in_model() const {
    for (const TensorInfo& info : computation().model().tensors()) {
      const auto data = require(computation().model().tensor(info.name)).data();
      if (!data.empty()) return data.data();
    }
    throw Failure{Status::failed_precondition("the model has no raw tensor")};
  }

  std::string acquire(const Words& words);
  std::string release(const Words&);
  std::string release_busy(const Words& words);
  std::string info(const Words&);
  std::string list(const Words&);
  std::string compute(const Words& words);
  std::string exact(const Words& words);
  std::string trace(const Words& words);
  std::string background(const Words& words);
  std::string join(const Words&);
  std::string event(const Words&);
  std::string context(const Words& words);
  std::string current(const Words&);
  std::string memory(const Words&);
  std::string maps(const Words&);
  std::string cycles(const Words& words);
  std::string fork_child(const Words&);
  std::string scan(const Words& words);
  std::string bad_calls(const Words&);
  std::string write_memset(const Words&);
  std::string write_kernel(const Words&);
  std::string store_nowhere(const Words&);
  std::string trap(const Words&);
  std::string hog(const Words& words);

  std::string socket_;
  std::optional<Client> client_;
  std::unique_ptr<Computation> computation_;
  std::unique_ptr<Background> background_;
};

std::string Worker::acquire(const Words& words) {
  AcquireOptions options;
  options.wait = std::chrono::milliseconds(std::stoul(words[2]));
  computation_.reset();
  computation_ = std::make_unique<Computation>(require(client().acquire(words[1], options)));
  return info(words);
}

std::string Worker::info(const Words&) {
  const ModelInfo now = computation().model().info();
  const Model::Memory memory = computation().model().memory();
  return "ok device=" + now.device + " generation=" + std::to_string(now.generation) + " state=" + now.state +
         " transport=" + now.transport + " shared=" + std::to_string(memory.shared_bytes) +
         " private=" + std::to_string(memory.private_bytes) + " resident=" + std::to_string(now.resident_bytes);
}

std::string Worker::list(const Words&) {
  std::string answer = "ok";
  for (const ModelInfo& model : require(client().list())) answer += " " + model.name + "=" + model.state;
  return answer;
}

std::string Worker::release(const Words&) {
  background_.reset();
  if (!computation_) return "ok";
  const Status released = computation_->model().release();
  computation_.reset();
  require(released);
  return "ok";
}

/// release_busy SEED ROUNDS: the same product ROUNDS times on the stream, not waited for, then release at once. The answer has the
/// digest of the last product, for comparison with one that was waited for.
std::string Worker::release_busy(const Words& words) {
  const uint64_t seed = std::stoull(words[1]), rounds = std::stoull(words[2]), tokens = 64;
  const TensorInfo* largest = nullptr;
  for (const TensorInfo& candidate : computation().model().tensors()) {
    if (!is_linear(candidate) || candidate.merged) continue;
    if (largest == nullptr || candidate.logical_bytes > largest->logical_bytes) largest = &candidate;
  }
  if (largest == nullptr) throw std::runtime_error("the model has no matrix");
  const uint64_t n = largest->shape[0], k = largest->shape[1];
  const Tensor tensor = require(computation().model().tensor(largest->name));
  const std::vector<uint16_t> x = random_activations(seed, tokens * k);
  const uint64_t waited_for = digest_of(computation().gemm(tensor, x, tokens, false));
  const bool host = computation().host();
  Buffer input(host, x.size() * 2), output(host, tokens * n * 2);
  input.upload(x);
  for (uint64_t i = 0; i < rounds; ++i) {
    require(tensor.gemm({input.words(), tokens, k, static_cast<int64_t>(k)}, {output.words(), tokens, n, static_cast<int64_t>(n)},
                        computation().options(false)));
  }
  CUstream_st* const stream = computation().stream();
  require(computation_->model().release());
  wait_for(stream);
  const uint64_t last = digest_of(output.download());
  const Status after =
      tensor.gemm({input.words(), 1, k, static_cast<int64_t>(k)}, {output.words(), 1, n, static_cast<int64_t>(n)}, {});
  computation_.reset();
  if (last != waited_for) throw std::runtime_error("a product in flight has other bits after the release");
  return "ok digest=" + hex(last) + " after=" + std::string(status_code_name(after.code()));
}

std::string Worker::compute(const Words& words) {
  uint64_t layers = 0;
  const uint64_t digest = computation().digest(std::stoull(words[1]), std::stoull(words[2]), false, &layers);
  return "ok digest=" + hex(digest) + " layers=" + std::to_string(layers);
}

std::string Worker::exact(const Words& words) {
  uint64_t layers = 0;
  const uint64_t digest = computation().digest(std::stoull(words[1]), std::stoull(words[2]), true, &layers);
  return "ok digest=" + hex(digest) + " layers=" + std::to_string(layers);
}

/// trace PATH SEED TOKENS: every matrix of the checkpoint decompressed, and its products in both modes, for trace_check.
std::string Worker::trace(const Words& words) {
  const uint64_t seed = std::stoull(words[2]), tokens = std::stoull(words[3]);
  std::vector<TraceRecord> records;
  const auto kind = computation().host() ? TraceRecord::Kind::kGemm : TraceRecord::Kind::kBoundedGemm;
  computation().for_each_layer(seed, tokens, false, [&](const Tensor& tensor, const std::vector<uint16_t>& x) {
    const uint64_t n = tensor.info().shape[0], k = tensor.info().shape[1];
    const auto& name = tensor.info().name;
    const uint64_t weights = digest_of(computation().decompress(tensor));
    records.push_back({TraceRecord::Kind::kWeights, name, 0, n, k, {}, {}, words_of(weights)});
    records.push_back({kind, name, tokens, n, k, x, {}, computation().gemm(tensor, x, tokens, false)});
    if (!computation().host()) records.push_back({kind, name, tokens, n, k, x, {}, computation().gemm(tensor, x, tokens, true)});
  });
  write_trace(words[1], records);
  return "ok records=" + std::to_string(records.size());
}

std::string Worker::background(const Words& words) {
  background_ = std::make_unique<Background>(computation(), std::stoull(words[1]), std::stoull(words[2]));
  return "ok";
}

std::string Worker::join(const Words&) {
  if (!background_) throw Failure{Status::failed_precondition("nothing runs")};
  const std::string answer = background_->join();
  background_.reset();
  return answer;
}

/// The next event; waits for one.
std::string Worker::event(const Words&) {
  for (;;) {
    const std::vector<Event> events = require(client().poll_events());
    std::string answer = "ok";
    for (const Event& one : events) {
      const char* kind = one.kind == Event::Kind::kPublished        ? "published"
                         : one.kind == Event::Kind::kDrainRequested ? "drain_requested"
                         : one.kind == Event::Kind::kLost           ? "lost"
                                                                    : "shutting_down";
      answer += std::string(" ") + kind + "=" + one.model.name;
    }
    if (!events.empty()) return answer;
    pollfd entry{client().event_fd(), POLLIN, 0};
    if (::poll(&entry, 1, kEventLimitMs) <= 0) throw std::runtime_error("no event");
  }
}

/// A context of the GPU (its memory counts against the GPU's), with or without a model.
std::string Worker::context(const Words& words) {
  use_device(words[1]);
  return "ok";
}

/// What is current for CUDA around a call of the library.
std::string Worker::current(const Words&) {
  const std::string before = current_device();
  (void)computation().digest(1, 1, true);
  const std::string between = current_device();
  Client other = connect(socket_);
  const Model again = require(other.acquire(computation().model().info().name));
  return "ok before=" + before + " between=" + between + " after=" + current_device();
}

std::string Worker::memory(const Words&) { return "ok used=" + std::to_string(gpu_bytes_in_use()); }

std::string Worker::maps(const Words&) {
  std::ifstream maps("/proc/self/maps"), status("/proc/self/status");
  size_t count = 0;
  for (std::string line; std::getline(maps, line);) ++count;
  std::string kib = "0";
  for (std::string line; std::getline(status, line);) {
    if (line.compare(0, 7, "VmSize:") == 0) kib = std::to_string(std::stoull(line.substr(7)));
  }
  return "ok count=" + std::to_string(count) + " kib=" + kib;
}

/// cycles MODEL COUNT THREADS: leases and releases; every hundredth computes.
std::string Worker::cycles(const Words& words) {
  const int count = std::stoi(words[2]), threads = std::stoi(words[3]);
  computation_.reset();
  std::atomic<bool> failed{false};
  std::vector<std::string> troubles(static_cast<size_t>(threads));
  std::vector<std::thread> workers;
  Client shared = connect(socket_);
  for (int t = 0; t < threads; ++t) {
    workers.emplace_back([&, t] {
      try {
        for (int i = 0; i < count / threads && !failed; ++i) {
          Model model = require(shared.acquire(words[1]));
          if (i % 100 == 0) (void)Computation(model).digest(1, 1, false);
          require(model.release());
        }
      } catch (const Failure& failure) {
        troubles[static_cast<size_t>(t)] = failure.status.to_string();
        failed = true;
      } catch (const std::exception& error) {
        troubles[static_cast<size_t>(t)] = error.what();
        failed = true;
      }
    });
  }
  for (std::thread& worker : workers) worker.join();
  for (const std::string& trouble : troubles) {
    if (!trouble.empty()) throw std::runtime_error(trouble);
  }
  return "ok";
}

/// A forked child tries everything, then exits as programs do. The answer has what it was told.
std::string Worker::fork_child(const Words&) {
  int ends[2];
  if (::pipe(ends) != 0) throw std::runtime_error("pipe");
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    const Computation& mine = computation();
    const TensorInfo& first = mine.model().tensors().front();
    std::string codes;
    const auto note = [&codes](const char* call, const Status& status) {
      codes += std::string(" ") + call + "=" + std::string(status_code_name(status.code()));
    };
    note("tensor", mine.model().tensor(first.name).status());
    note("list", client().list().status());
    note("acquire", client().acquire("m").status());
    note("release", Model(mine.model()).release());
    (void)!::write(ends[1], codes.data(), codes.size());
    std::exit(0);
  }
  ::close(ends[1]);
  std::string codes;
  char part[512];
  for (ssize_t got = 0; (got = ::read(ends[0], part, sizeof(part))) > 0;) codes.append(part, static_cast<size_t>(got));
  ::close(ends[0]);
  int status = 0;
  ::waitpid(pid, &status, 0);
  return "ok" + codes + " exit=" + (WIFEXITED(status) ? std::to_string(WEXITSTATUS(status)) : "signal");
}

/// scan WORD: how often the 8 bytes of WORD occur in all that this process can reach around the model's first raw tensor, and the
/// end of the last byte there that is not zero.
std::string Worker::scan(const Words& words) {
  const std::span<const std::byte> range = range_around(address_in_model());
  const std::vector<std::byte> content =
      computation().host() ? std::vector<std::byte>(range.begin(), range.end()) : read_device(range.data(), range.size());
  const auto* needle = reinterpret_cast<const std::byte*>(words[1].data());
  uint64_t count = 0, end = 0;
  for (auto at = content.begin();; ++at, ++count) {
    at = std::search(at, content.end(), needle, needle + words[1].size());
    if (at == content.end()) break;
  }
  for (size_t i = 0; i < content.size(); ++i) end = content[i] != std::byte{0} ? i + 1 : end;
  return "ok count=" + std::to_string(count) + " end=" + std::to_string(end) + " bytes=" + std::to_string(content.size());
}

/// Calls that must be refused before anything is launched or written; the answer names the first that was not.
std::string Worker::bad_calls(const Words&) {
  const Computation& c = computation();
  const bool host = c.host();
  std::string troubles;
  const auto expect = [&](const std::string& call, const Status& status, const Buffer& output) {
    if (status.code() != StatusCode::kInvalidArgument) troubles += " [" + call + ": " + status.to_string() + "]";
    wait_for(c.stream());
    if (!output.untouched()) troubles += " [" + call + ": something was written]";
  };
  c.for_each_layer(1, 3, true, [&](const Tensor& tensor, const std::vector<uint16_t>& x) {
    const std::string& name = tensor.info().name;
    const uint64_t n = tensor.info().shape[0], k = tensor.info().shape[1];
    const auto nk = static_cast<int64_t>(n), kk = static_cast<int64_t>(k);
    Buffer input(host, x.size() * 2), output(host, 3 * n * 2), whole(host, tensor.info().logical_bytes);
    input.upload(x);
    const ConstBf16Matrix good_x{input.words(), 3, k, kk};
    const Bf16Matrix good_y{output.words(), 3, n, nk};
    const GemmOptions options = c.options(false);
    expect(name + " CO-042", tensor.decompress({whole.data(), whole.bytes() - 2}, options), whole);
    expect(name + " CO-054 x stride k - 1", tensor.gemm({input.words(), 2, k, kk - 1}, {output.words(), 2, n, nk}, options),
           output);
    expect(name + " CO-054 x stride 0", tensor.gemm({input.words(), 2, k, 0}, {output.words(), 2, n, nk}, options), output);
    expect(name + " CO-054 x stride -k", tensor.gemm({input.words(), 2, k, -kk}, {output.words(), 2, n, nk}, options), output);
    expect(name + " CO-054 y stride n - 1", tensor.gemm({input.words(), 2, k, kk}, {output.words(), 2, n, nk - 1}, options),
           output);
    expect(name + " CO-055 odd x",
           tensor.gemm({reinterpret_cast<const uint16_t*>(input.data() + 1), 1, k, kk}, {output.words(), 1, n, nk}, options),
           output);
    expect(name + " columns of x", tensor.gemm({input.words(), 1, k + 1, kk + 1}, {output.words(), 1, n, nk}, options), output);
    expect(name + " columns of y", tensor.gemm(good_x, {output.words(), 3, n - 1, nk}, options), output);
    expect(name + " rows", tensor.gemm(good_x, {output.words(), 2, n, nk}, options), output);
    if (n == k) expect(name + " CO-058 y = x", tensor.gemm({output.words(), 3, k, kk}, good_y, options), output);
    if (3 * n * 2 >= k * 2 + 16) {
      expect(name + " CO-058 x in y",
             tensor.gemm({output.words() + 8, 1, k, kk}, good_y.rows == 3 ? Bf16Matrix{output.words(), 1, n, nk} : good_y, options),
             output);
    }
    if (tensor.data().empty()) return;
    auto* inside = const_cast<uint16_t*>(reinterpret_cast<const uint16_t*>(tensor.data().data()));
    expect(name + " CO-058 y in the weights", tensor.gemm({input.words(), 1, k, kk}, {inside, 1, n, nk}, options), output);
    expect(name + " CO-058 decompress into the weights",
           tensor.decompress({reinterpret_cast<std::byte*>(inside), tensor.info().logical_bytes}, options), output);
  });
  if (!troubles.empty()) throw std::runtime_error("not refused as they should be:" + troubles);
  return "ok";
}

std::string first_error(const std::string& words) { return words.empty() ? "ok nothing failed" : "error cuda " + words; }

std::string Worker::write_memset(const Words&) {
  const std::byte* address = address_in_model();
  if (!computation().host()) return first_error(memset_device(address, 64));
  std::memset(const_cast<std::byte*>(address), 0x5A, 64);
  return "ok nothing failed";
}
std::string Worker::write_kernel(const Words&) {
  const std::byte* address = address_in_model();
  if (!computation().host()) return first_error(store_to_device(address));
  *const_cast<volatile std::byte*>(address) = std::byte{0x5A};
  return "ok nothing failed";
}
std::string Worker::store_nowhere(const Words&) { return first_error(store_to_device(reinterpret_cast<const std::byte*>(8))); }
std::string Worker::trap(const Words&) { return first_error(trap_device()); }

/// hog DEVICE LEAVE_BYTES: takes the GPU's memory and keeps it.
std::string Worker::hog(const Words& words) {
  use_device(words[1]);
  return "ok taken=" + std::to_string(fill_gpu(std::stoull(words[2])));
}

const std::map<std::string, std::pair<size_t, Worker::Command>>& Worker::commands() {
  static const std::map<std::string, std::pair<size_t, Command>> table = {
      {"acquire", {3, &Worker::acquire}},            // MODEL WAIT_MS
      {"release", {1, &Worker::release}},            //
      {"release_busy", {3, &Worker::release_busy}},  // SEED ROUNDS
      {"info", {1, &Worker::info}},                  //
      {"list", {1, &Worker::list}},                  //
      {"compute", {3, &Worker::compute}},            // SEED TOKENS
      {"exact", {3, &Worker::exact}},                // SEED TOKENS
      {"trace", {4, &Worker::trace}},                // PATH SEED TOKENS
      {"background", {3, &Worker::background}},      // SEED TOKENS
      {"join", {1, &Worker::join}},                  //
      {"event", {1, &Worker::event}},                //
      {"context", {2, &Worker::context}},            // DEVICE
      {"current", {1, &Worker::current}},            //
      {"memory", {1, &Worker::memory}},              //
      {"maps", {1, &Worker::maps}},                  //
      {"cycles", {4, &Worker::cycles}},              // MODEL COUNT THREADS
      {"fork", {1, &Worker::fork_child}},            //
      {"scan", {2, &Worker::scan}},                  // WORD
      {"bad_calls", {1, &Worker::bad_calls}},        //
      {"write_memset", {1, &Worker::write_memset}},  //
      {"write_kernel", {1, &Worker::write_kernel}},  //
      {"store_nowhere", {1, &Worker::store_nowhere}},
      {"trap", {1, &Worker::trap}},
      {"hog", {3, &Worker::hog}},  // DEVICE LEAVE_BYTES
  };
  return table;
}

std::string Worker::obey(const Words& words) {
  const auto found = commands().find(words.front());
  if (found == commands().end() || found->second.first != words.size()) return "error usage " + words.front();
  try {
    return (this->*found->second.second)(words);
  } catch (const Failure& failure) {
    return "error " + std::string(status_code_name(failure.status.code())) + " " + failure.status.message();
  } catch (const std::exception& error) {
    return std::string("error wrong ") + error.what();
  }
}

int run(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: gpu_worker SOCKET\n");
    return 2;
  }
  Worker worker(argv[1]);
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream in(line);
    const Words words{std::istream_iterator<std::string>(in), std::istream_iterator<std::string>()};
    if (words.empty()) continue;
    std::string answer = worker.obey(words);
    std::replace(answer.begin(), answer.end(), '\n', ' ');
    std::cout << answer << std::endl;
  }
  return 0;
}

}  // namespace
}  // namespace weightd::e2e

int main(int argc, char** argv) { return weightd::e2e::run(argc, argv); }
