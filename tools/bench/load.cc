// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "base/parallel.h"
#include "base/text.h"
#include "base/version.h"
#include "tools/bench/attach_rounds.h"
#include "tools/bench/load_watch.h"
#include "tools/bench/percentiles.h"
#include "tools/bench/report.h"
#include "tools/bench/verbs.h"
#include "tools/cli/build_check.h"
#include "tools/cli/table.h"
#include "weightd/client.h"
#include "weightd/control.h"

namespace weightd::tools {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kPoll{1};
constexpr std::chrono::milliseconds kCallTimeout{10'000};
constexpr uint64_t kMostHashBytes = uint64_t{4} << 30;  // of device memory beside the model
constexpr int kVerifies = 3;

struct LoadArguments {
  std::string bundle, model = "weightbench", device, socket, control_socket;
  bool keep = false;
  uint64_t rounds = 20;
  std::chrono::milliseconds timeout{std::chrono::minutes(30)};
  RecorderOptions recorder;
};

double ms_since(Clock::time_point begin) { return std::chrono::duration<double, std::milli>(Clock::now() - begin).count(); }

/// What a load and the life after it took.
struct LoadFigures {
  std::string device;
  uint64_t resident_bytes = 0, logical_bytes = 0;
  double context_ms = kAbsent, pinned_gbps = kAbsent;
  LoadTimes times;
  double attach_ms = kAbsent, first_attach_ms = kAbsent;
  double verify_call_ms = kAbsent, hash_gbps = kAbsent;
};

/// The daemon has another working directory.
Result<std::string> absolute_path(const std::string& path) {
  std::error_code error;
  const std::filesystem::path absolute = std::filesystem::absolute(path, error);
  if (error) return Status::invalid_argument("'" + printable(path) + "': " + error.message());
  return absolute.string();
}

/// Reads the file once, so that the load finds it in the page cache.
Status read_into_page_cache(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return status_from_errno(errno, printable(path));
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return status_from_errno(errno, printable(path));
  constexpr uint64_t kPieceBytes = uint64_t{4} << 20;
  std::atomic<int> failure = 0;
  parallel_ranges(static_cast<uint64_t>(info.st_size), kPieceBytes, 0, [&](uint64_t begin, uint64_t end) {
    std::vector<std::byte> piece(kPieceBytes);
    for (uint64_t at = begin; at < end && failure == 0;) {
      const ssize_t got = ::pread(fd.get(), piece.data(), std::min(kPieceBytes, end - at), static_cast<off_t>(at));
      if (got < 0 && errno != EINTR) failure = errno;
      if (got == 0) return;
      if (got > 0) at += static_cast<uint64_t>(got);
    }
  });
  return failure == 0 ? Status() : status_from_errno(failure, printable(path));
}

/// A path that leads nowhere means that no daemon listens there.
Result<control::Client> connect(const LoadArguments& arguments) {
  Result<control::Client> client = control::Client::connect({arguments.control_socket, kCallTimeout});
  if (client.ok() || client.status().code() != StatusCode::kNotFound) return client;
  return Status::unavailable(client.status().message());
}

Result<std::string> only_device(control::Client& client) {
  WEIGHTD_ASSIGN_OR_RETURN(const control::DaemonStatus status, client.status());
  if (status.devices.size() == 1) return status.devices.front().uuid;
  return Status::invalid_argument("the daemon has " + std::to_string(status.devices.size()) +
                                  " devices: say with --device which one is meant");
}

/// A model that is there already would not be loaded.
Status check_name_is_free(control::Client& client, const std::string& name) {
  WEIGHTD_ASSIGN_OR_RETURN(const control::DaemonStatus status, client.status());
  for (const control::Model& model : status.models) {
    if (model.name == name && model.state != "failed") {
      return Status::already_exists("the daemon has a model '" + printable(name) + "' (" + printable(model.state) + ")");
    }
  }
  return {};
}

/// Loads in a second thread and watches over a second connection how the load goes on.
Result<LoadTimes> timed_load(control::Client& client, control::Client& watcher, const LoadArguments& arguments,
                             const std::string& path, control::Model* loaded) {
  std::mutex mutex;
  std::condition_variable finished;
  std::optional<Result<control::Model>> result;
  LoadWatch watch;
  const auto begin = Clock::now();
  std::jthread loading([&] {
    Result<control::Model> model = client.load(arguments.model, path, arguments.device, arguments.timeout);
    const std::lock_guard lock(mutex);
    watch.finished(ms_since(begin));
    result.emplace(std::move(model));
    finished.notify_one();
  });
  std::unique_lock lock(mutex);
  while (!finished.wait_for(lock, kPoll, [&] { return result.has_value(); })) {
    lock.unlock();
    const Result<control::DaemonStatus> status = watcher.status();
    const double now_ms = ms_since(begin);
    lock.lock();
    if (status.ok() && !result.has_value()) watch.saw(status->models, arguments.model, now_ms);
  }
  if (!result->ok()) return result->status();
  *loaded = result->value();
  return watch.times();
}

Status measure_worker(const LoadArguments& arguments, GpuSide* side, LoadFigures& figures) {
  AttachPlan plan;
  plan.model = arguments.model;
  plan.device = figures.device;
  plan.socket = arguments.socket;
  plan.rounds = arguments.rounds;
  WEIGHTD_ASSIGN_OR_RETURN(const AttachReport report, measure_attach(plan, side));
  figures.attach_ms = percentiles(report.usable_ms).p50;
  figures.first_attach_ms = report.usable_ms.front();
  return {};
}

Status measure_verify(const LoadArguments& arguments, control::Client& client, GpuSide* side, LoadFigures& figures) {
  std::vector<double> calls_ms;
  for (int i = 0; i < kVerifies; ++i) {
    const auto begin = Clock::now();
    WEIGHTD_ASSIGN_OR_RETURN(const control::Verified verified, client.verify(arguments.model, arguments.timeout));
    calls_ms.push_back(ms_since(begin));
    if (!verified.bad_blocks.empty()) return Status::corruption("'" + printable(arguments.model) + "' changed since it was loaded");
  }
  figures.verify_call_ms = percentiles(calls_ms).p50;
  if (side == nullptr) return {};
  WEIGHTD_ASSIGN_OR_RETURN(figures.hash_gbps, side->hash_gbps(std::min(figures.resident_bytes, kMostHashBytes)));
  return {};
}

double gbps(uint64_t bytes, double ms) { return static_cast<double>(bytes) / ms / 1e6; }

std::vector<Row> rows_of(const LoadFigures& figures, const std::string& bundle, const GpuSide* side) {
  std::vector<Row> rows;
  const auto add = [&](const std::string& step, double ms, double rate, const std::string& note) {
    Row row;
    if (side != nullptr) {
      row = side->row("load." + step, bundle);
    } else {
      row.op = "load." + step;
      row.name = bundle;
      row.gpu = figures.device;
      row.commit = commit_of(build_id());
    }
    row.us = 1e3 * ms;
    row.coded_gbps = rate;
    row.plan = note;
    rows.push_back(std::move(row));
  };
  const uint64_t bytes = figures.resident_bytes;
  const LoadTimes& times = figures.times;
  if (side != nullptr) {
    add("context", figures.context_ms, kAbsent, "CUDA context of the benchmark's process");
    add("pinned", kAbsent, figures.pinned_gbps, "1 GiB from pinned memory to the device, the best of 6");
  }
  add("start", times.start_ms, kAbsent, "request to plan: loader's start, its context, the manifest");
  add("upload", times.upload_ms, gbps(bytes, times.upload_ms),
      "plan to all chunks held: allocation, reading, checksums, upload; " + human_bytes(bytes) + " resident" +
          (side == nullptr ? "" : ", " + cli::fixed(100 * gbps(bytes, times.upload_ms) / figures.pinned_gbps, 1) + " % of pinned"));
  add("check", times.check_ms, gbps(bytes, times.check_ms), "chunks held to published: block hashes and f12 checks");
  add("total", times.total_ms, gbps(bytes, times.total_ms), "request to published");
  add("first_attach", figures.first_attach_ms, kAbsent, "acquire to first usable pointer, the first time in this process");
  add("attach", figures.attach_ms, kAbsent, "the same, median of the rounds");
  add("verify_call", figures.verify_call_ms, gbps(bytes, figures.verify_call_ms), "verify by the daemon, request to answer");
  if (side != nullptr) add("verify_kernel", kAbsent, figures.hash_gbps, "kernel of the block hashes alone");
  return rows;
}

Status measure(const LoadArguments& arguments, const std::string& path, control::Client& client, GpuSide* side, Recorder& recorder,
               LoadFigures& figures) {
  if (side != nullptr) {
    figures.context_ms = side->context_ms();
    WEIGHTD_ASSIGN_OR_RETURN(figures.pinned_gbps, side->host_to_device_gbps());
  }
  WEIGHTD_RETURN_IF_ERROR(read_into_page_cache(path));
  WEIGHTD_ASSIGN_OR_RETURN(control::Client watcher, control::Client::connect({arguments.control_socket, kCallTimeout}));
  control::Model loaded;
  WEIGHTD_ASSIGN_OR_RETURN(figures.times, timed_load(client, watcher, arguments, path, &loaded));
  figures.device = loaded.device;
  figures.resident_bytes = loaded.resident_bytes;
  figures.logical_bytes = loaded.logical_bytes;
  Status status = measure_worker(arguments, side, figures);
  if (status.ok()) status = recorder.check_interrupt();
  if (status.ok()) status = measure_verify(arguments, client, side, figures);
  if (!arguments.keep) {
    const Result<control::Unloaded> unloaded = client.unload(arguments.model, loaded.device, kCallTimeout);
    if (status.ok()) status = unloaded.status();
  }
  return status;
}

Status run(LoadArguments arguments, cli::Output& output) {
  WEIGHTD_RETURN_IF_ERROR(cli::check_same_release(build_id(), version()));
  WEIGHTD_ASSIGN_OR_RETURN(const std::string path, absolute_path(arguments.bundle));
  WEIGHTD_ASSIGN_OR_RETURN(control::Client client, connect(arguments));
  if (Status taken = check_name_is_free(client, arguments.model); !taken.ok()) {
    if (taken.code() == StatusCode::kAlreadyExists) output.set_hint("give a name that is free with --model");
    return taken;
  }
  if (arguments.device.empty()) {
    WEIGHTD_ASSIGN_OR_RETURN(arguments.device, only_device(client));
  }
  std::unique_ptr<GpuSide> side;
  if (arguments.device != "host") {
    WEIGHTD_ASSIGN_OR_RETURN(side, GpuSide::open(arguments.device));
  }
  WEIGHTD_ASSIGN_OR_RETURN(Recorder recorder, Recorder::open(arguments.recorder, output));
  LoadFigures figures;
  WEIGHTD_RETURN_IF_ERROR(measure(arguments, path, client, side.get(), recorder, figures));
  const std::string bundle = std::filesystem::path(path).filename().string();
  WEIGHTD_RETURN_IF_ERROR(recorder.add(rows_of(figures, bundle, side.get())));
  output.print(markdown_report(recorder.new_rows()));
  cli::Json document = cli::Json::document();
  document.set("device", figures.device)
      .set("resident_bytes", figures.resident_bytes)
      .set("logical_bytes", figures.logical_bytes)
      .set("rows", to_json(recorder.new_rows()));
  output.emit(document);
  return {};
}

}  // namespace

void add_load(cli::Program& program) {
  const auto arguments = std::make_shared<LoadArguments>();
  cli::Verb verb = program.verb("load", "Time a load, and what comes after it");
  verb.positional("BUNDLE", &arguments->bundle, "Bundle; the daemon must be able to read it")
      .text("--device", "UUID", &arguments->device, "GPU by UUID, or host (default: the only one)")
      .text("--model", "NAME", &arguments->model, "Name to load under, a free one (default: weightbench)")
      .flag("--keep", &arguments->keep, "Do not unload it at the end")
      .number("--count", &arguments->rounds, 1, 1'000'000, "Rounds of attaching (default: 20)")
      .text("--socket", "PATH", &arguments->socket, "Data socket (default: $WEIGHTD_SOCKET or /run/weightd/weightd.sock)")
      .text("--control-socket", "PATH", &arguments->control_socket,
            "Control socket (default: $WEIGHTD_CONTROL_SOCKET or /run/weightd/control.sock)")
      .duration("--timeout", &arguments->timeout, "Longest wait for the load and for each verification (default: 30 min)");
  add_recorder_options(verb, &arguments->recorder);
  verb.details(
          "By a daemon that runs. The file is read once before, so that the load finds it in the page cache; on a GPU, this "
          "process's "
          "context is made and the rate from pinned memory is measured before. Then: load, attach, verify, unload.")
      .example("weightbench load /srv/models/llama-8b.wpk")
      .run([arguments](cli::Output& output) { return run(*arguments, output); });
}

}  // namespace weightd::tools
