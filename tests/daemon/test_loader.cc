// SPDX-License-Identifier: Apache-2.0
// A weightd-loader for tests: the real jobs, with behaviours that $WEIGHTD_TEST_LOADER names (words with commas between).
//   small-chunks   chunks of one page
//   slow           every step of a load takes 40 ms
//   dies           is killed when the daemon has all chunks, before they are verified
//   sticky         a CUDA error when the daemon has all chunks: the context is gone
//   out-of-memory  the allocation fails
//   owner-fails    legacy: a CUDA error right after the load
// On the backend cuda it fills host memory: what the daemon does with it is the same. What a probe answers is in the file that
// $WEIGHTD_TEST_GPUS names, a word and its value a line; "gpu UUID" begins a GPU.
//   hang / hang-shallow / die   no answer at all / only to shallow probes / a death in place of an answer
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <thread>

#include "daemon/loader/jobs.h"
#include "daemon/loader/reporter.h"
#include "tests/daemon/faulty_backend.h"

namespace {

using namespace weightd;

std::set<std::string> behaviours() {
  const char* names = std::getenv("WEIGHTD_TEST_LOADER");
  std::set<std::string> words;
  std::istringstream in(names == nullptr ? "" : names);
  for (std::string word; std::getline(in, word, ',');) words.insert(word);
  return words;
}

void wait_for_hang_up() {
  pollfd state{3, POLLRDHUP, 0};
  while (::poll(&state, 1, -1) < 0) {
  }
}

// --- probes --------------------------------------------------------------------------------------------------------------

void set_field(ipc::ProbeReply& reply, const std::string& word, const std::string& value) {
  ipc::GpuSummary none;
  ipc::GpuSummary& gpu = reply.gpus.empty() ? none : reply.gpus.back();
  const std::map<std::string, std::string*> texts = {{"driver", &reply.driver_version},
                                                     {"problem", reply.gpus.empty() ? &reply.problem : &gpu.problem},
                                                     {"nvml-problem", &reply.nvml_problem},
                                                     {"name", &gpu.name}};
  const std::map<std::string, uint64_t*> sizes = {
      {"total", &gpu.total_bytes}, {"used", &gpu.used_bytes}, {"free", &gpu.free_bytes}};
  if (const auto text = texts.find(word); text != texts.end()) {
    *text->second = value;
  } else if (const auto size = sizes.find(word); size != sizes.end()) {
    *size->second = std::stoull(value) << 20;  // MiB
  } else if (word == "cuda") {
    reply.cuda_version = static_cast<uint32_t>(std::stoul(value));
  } else if (word == "minor") {
    gpu.minor = std::stoi(value);
  } else if (word == "persistence") {
    gpu.persistence = static_cast<int8_t>(std::stoi(value));
  } else if (word == "nvml") {
    gpu.nvml_known = value == "1";
  } else if (word == "fd-handles") {
    gpu.fd_handles = value == "1";
  }
}

ipc::GpuSummary a_gpu(const std::string& uuid) {
  ipc::GpuSummary gpu;
  gpu.uuid = uuid;
  gpu.name = "Scripted GPU";
  gpu.compute_major = 9;
  gpu.vmm = gpu.fd_handles = gpu.nvml_known = true;
  gpu.read_only_map = 1;
  gpu.granularity_bytes = uint64_t{2} << 20;
  return gpu;
}

int answer_probe(ipc::Channel& channel, bool deep) {
  const char* file = std::getenv("WEIGHTD_TEST_GPUS");
  std::ifstream in(file == nullptr ? "/dev/null" : file);
  ipc::ProbeReply reply;
  for (std::string line; std::getline(in, line);) {
    const size_t space = line.find(' ');
    const std::string word = line.substr(0, space), value = space == std::string::npos ? "" : line.substr(space + 1);
    if (word == "hang" || (word == "hang-shallow" && !deep)) {
      for (;;) ::pause();
    }
    if (word == "die") ::raise(SIGKILL);
    if (word == "gpu")
      reply.gpus.push_back(a_gpu(value));
    else
      set_field(reply, word, value);
  }
  if (reply.gpus.empty() && reply.problem.empty()) reply.problem = "the script has no GPU";
  return loader::send(channel, {reply}).ok() ? 0 : 1;
}

// --- loads ---------------------------------------------------------------------------------------------------------------

/// Stands between a load that hands over chunks and a daemon that wants the legacy transport: keeps the chunks, as an owner does.
class LegacyOwner {
 public:
  LegacyOwner(ipc::Channel& daemon, ipc::Channel& load) : daemon_(daemon), load_(load) {}

  Status run() {
    for (;;) {
      WEIGHTD_ASSIGN_OR_RETURN(ipc::Frame frame, load_.receive(loader::kNever));
      WEIGHTD_ASSIGN_OR_RETURN(ipc::LoaderMessage message, ipc::decode_loader_message(frame.body));
      if (const auto* chunks = std::get_if<ipc::Chunks>(&message.body)) {
        for (UniqueFd& fd : frame.fds) kept_.push_back(std::move(fd));
        WEIGHTD_RETURN_IF_ERROR(loader::send(load_, {ipc::Received{static_cast<uint32_t>(kept_.size())}}));
        (void)chunks;
        continue;
      }
      if (auto* result = std::get_if<ipc::LoadResult>(&message.body)) {
        result->ipc_handle.assign(ipc::kIpcHandleBytes, std::byte{0x5A});
        return loader::send(daemon_, message, std::move(frame.fds));
      }
      const bool failed = std::holds_alternative<Status>(message.body);
      const bool planned = std::holds_alternative<ipc::Planned>(message.body);
      WEIGHTD_RETURN_IF_ERROR(loader::send(daemon_, message));
      if (failed) return std::get<Status>(message.body);
      if (planned) {
        WEIGHTD_ASSIGN_OR_RETURN(const ipc::Frame admitted, daemon_.receive(loader::kNever));
        WEIGHTD_RETURN_IF_ERROR(load_.send({admitted.body, {}}));
        WEIGHTD_RETURN_IF_ERROR(load_.flush(loader::kNever));
      }
    }
  }

 private:
  ipc::Channel& daemon_;
  ipc::Channel& load_;
  std::vector<UniqueFd> kept_;
};

ipc::ChannelOptions channel_options() {
  ipc::ChannelOptions options;
  options.receive = {1U << 20, ipc::kMaxFdsPerFrame};
  return options;
}

void script(weightd::testing::FaultyBackend& backend, const std::set<std::string>& words) {
  if (words.count("slow") > 0) {
    backend.on_upload = [](uint64_t, std::span<std::byte>) {
      std::this_thread::sleep_for(std::chrono::milliseconds(40));
      return Status();
    };
  }
  if (words.count("out-of-memory") > 0) {
    backend.before_allocate = [] { return Status::resource_exhausted("the scripted GPU has no memory left"); };
  }
  if (words.count("dies") > 0) {
    backend.before_hash = [] {
      ::raise(SIGKILL);
      return Status();
    };
  }
  if (words.count("sticky") > 0) {
    backend.before_hash = [] { return Status::cuda("an illegal memory access was encountered (700)"); };
  }
}

int serve_legacy(ipc::Channel& channel, loader::ReceivedJob received, weightd::testing::FaultyBackend& backend,
                 const std::set<std::string>& words) {
  auto pair = ipc::socket_pair();
  if (!pair.ok()) return 1;
  ipc::Channel here(std::move(pair->first), channel_options()), there(std::move(pair->second), channel_options());
  // A load for descriptors, whatever the loader makes of other transports.
  received.job.transport = "fd";
  std::thread load([&] { (void)loader::run_job(there, std::move(received), backend); });
  LegacyOwner owner(channel, here);
  if (!owner.run().ok()) ::_exit(1);  // the other thread may wait for ever
  load.join();
  if (words.count("owner-fails") > 0) {
    (void)loader::send(channel, {Status::cuda("an illegal memory access was encountered (700)")});
    return 1;
  }
  wait_for_hang_up();
  return 0;
}

}  // namespace

int main() {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // scripted hangs end with the daemon at the latest
  const std::set<std::string> words = behaviours();
  ipc::Channel channel(UniqueFd(3), channel_options());
  auto received = loader::receive_job(channel);
  if (!received.ok()) return 1;
  if (const auto* probe = std::get_if<ipc::ProbeJob>(&received->job.kind)) {
    const int status = answer_probe(channel, probe->deep);
    wait_for_hang_up();  // as the real one: it is the daemon that ends the talk
    return status;
  }
  constexpr uint64_t kPageBytes = 4096;
  const bool small = words.count("small-chunks") > 0;
  weightd::testing::FaultyBackend backend(small ? kPageBytes : uint64_t{1} << 20);
  if (small) received->job.chunk_bytes = kPageBytes;
  if (words.count("slow") > 0) received->job.threads = 1;
  script(backend, words);
  received->job.backend = "host";
  if (received->job.transport == "legacy") return serve_legacy(channel, *std::move(received), backend, words);
  return loader::run_job(channel, *std::move(received), backend).ok() ? 0 : 1;
}
