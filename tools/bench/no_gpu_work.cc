// SPDX-License-Identifier: Apache-2.0
#include "tools/bench/gpu_work.h"

namespace weightd::tools {
namespace {

Status without_cuda() { return Status::unsupported("this weightbench was built without CUDA and measures no GPU"); }

}  // namespace

Status run_gpu_bench(const GpuBench&, Recorder&) { return without_cuda(); }
Status run_chain_bench(const ChainBench&, Recorder&) { return without_cuda(); }
Result<std::unique_ptr<GpuSide>> GpuSide::open(const std::string&) { return without_cuda(); }

}  // namespace weightd::tools
