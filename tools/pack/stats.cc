// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/text.h"
#include "store/bundle.h"
#include "store/checkpoint.h"
#include "tools/cli/table.h"
#include "tools/pack/storage_shares.h"
#include "tools/pack/tensor_class.h"
#include "tools/pack/verbs.h"
#include "tools/pack/weight_counts.h"

namespace weightd::tools {
namespace {

using cli::counted;
using cli::fixed;
using cli::Json;

constexpr uint64_t kSlabBytes = uint64_t{32} << 20;

struct StatsArguments {
  std::string path;
  uint64_t threads = 0;
};

/// One tensor, wherever it comes from.
struct Input {
  std::string name;
  DType dtype{};
  Shape shape;
  uint64_t logical_bytes = 0;
  std::optional<uint64_t> stored_bytes;  // bundles only
  std::function<Status(uint64_t offset_bytes, std::span<std::byte> out)> read;
  bool whole = false;  // read() gives all of it or nothing
};

struct TensorStats {
  std::string name;
  TensorClass tensor_class{};
  DType dtype{};
  uint64_t weights = 0;
  std::optional<uint64_t> stored_bytes;
  F12Estimate f12;
  SpecialCounts special;
};

/// Sums over tensors: a class, or everything.
struct Sum {
  uint64_t tensors = 0, weights = 0, stored_bytes = 0, stored_weights = 0;
  Bf16Counts counts;
  F12Estimate f12;
  SpecialCounts special;

  void add(const TensorStats& tensor, const Bf16Counts& tensor_counts) {
    ++tensors;
    weights += tensor.weights;
    counts += tensor_counts;
    f12 += tensor.f12;
    special += tensor.special;
    if (!tensor.stored_bytes) return;
    stored_bytes += *tensor.stored_bytes;
    stored_weights += tensor.weights;
  }
};

struct Report {
  bool bundle = false;
  std::array<Sum, kTensorClassCount> classes;
  Sum total;
  std::vector<TensorStats> tensors;
};

/// A BF16 tensor of rank 2 or more is a stack of matrices, which is what f12 codes.
f12::Geometry matrices_of(const Input& input) {
  if (input.dtype != DType::kBF16 || input.shape.size() < 2 || input.logical_bytes == 0) return {0, 0, 0};
  const size_t rank = input.shape.size();
  f12::Geometry geometry{input.shape[rank - 2], input.shape[rank - 1], 1};
  for (size_t i = 0; i + 2 < rank; ++i) geometry.batch *= input.shape[i];
  return geometry;
}

void measure_bf16(std::span<const uint16_t> words, int threads, const f12::Geometry& geometry, TensorStats& stats,
                  Bf16Counts& counts) {
  counts.add(words, threads);
  if (geometry.k == 0) return;
  const uint64_t rows = words.size() / geometry.k;
  // Either a part of one matrix, or whole matrices one after the other.
  for (uint64_t row = 0; row < rows; row += std::min(geometry.n, rows - row)) {
    const uint64_t count = std::min(geometry.n, rows - row);
    stats.f12 += estimate_f12(words.subspan(row * geometry.k, count * geometry.k), count, geometry.k, threads);
  }
}

/// How many bytes to read from `offset` on: a slab that ends between units of one matrix, or whole small matrices.
uint64_t slab_bytes(const Input& input, const f12::Geometry& geometry, uint64_t offset) {
  const uint64_t left = input.logical_bytes - offset;
  if (input.whole) return left;
  if (geometry.k == 0) return std::min(left, kSlabBytes);
  const uint64_t matrix = geometry.n * geometry.k * 2;
  if (matrix <= kSlabBytes) return std::min(left, kSlabBytes / matrix * matrix);
  const uint64_t unit = geometry.k * 2 * f12::kUnitRows;
  const uint64_t slab = std::max<uint64_t>(1, kSlabBytes / unit) * unit;
  return std::min(matrix - offset % matrix, slab);
}

/// `counts` receives the BF16 patterns; it is half a MiB, so no tensor keeps its own.
Result<TensorStats> measure(const Input& input, int threads, Bf16Counts& counts, const std::function<void(uint64_t)>& progress) {
  TensorStats stats;
  stats.name = input.name;
  stats.tensor_class = classify_tensor(input.name);
  stats.dtype = input.dtype;
  stats.weights = input.logical_bytes * 8 / dtype_bits(input.dtype);
  stats.stored_bytes = input.stored_bytes;
  if (!has_special_values(input.dtype)) {
    progress(input.logical_bytes);
    return stats;
  }
  const f12::Geometry geometry = matrices_of(input);
  std::vector<uint16_t> slab;  // every dtype that gets here has a multiple of two bytes
  for (uint64_t offset = 0; offset < input.logical_bytes; offset += slab.size() * 2) {
    slab.resize(slab_bytes(input, geometry, offset) / 2);
    WEIGHTD_RETURN_IF_ERROR(input.read(offset, std::as_writable_bytes(std::span(slab))));
    if (input.dtype == DType::kBF16) {
      measure_bf16(slab, threads, geometry, stats, counts);
    } else {
      stats.special += count_special(input.dtype, std::as_bytes(std::span(slab)));
    }
    progress(slab.size() * 2);
  }
  if (input.dtype == DType::kBF16) stats.special = counts.special();
  return stats;
}

Result<Report> measure_all(const std::vector<Input>& inputs, int threads, cli::ProgressBar& bar) {
  uint64_t total_bytes = 0, done_bytes = 0;
  for (const Input& input : inputs) total_bytes += input.logical_bytes;
  Report report;
  for (const Input& input : inputs) {
    const auto progress = [&](uint64_t bytes) {
      done_bytes += bytes;
      bar.update(done_bytes, total_bytes);
    };
    Bf16Counts counts;
    WEIGHTD_ASSIGN_OR_RETURN(TensorStats stats, measure(input, threads, counts, progress));
    report.classes[static_cast<size_t>(stats.tensor_class)].add(stats, counts);
    report.total.add(stats, counts);
    report.tensors.push_back(std::move(stats));
  }
  return report;
}

Result<Report> measure_checkpoint(const StatsArguments& arguments, cli::Output& output, cli::ProgressBar& bar) {
  WEIGHTD_ASSIGN_OR_RETURN(const store::Checkpoint checkpoint, store::open_checkpoint(arguments.path));
  for (const std::string& warning : checkpoint.warnings) output.warning(warning);
  std::vector<Input> inputs;
  for (const store::CheckpointTensor& tensor : checkpoint.tensors) {
    if (!tensor.indexed) continue;
    const store::SafetensorsEntry& entry = checkpoint.entry(tensor);
    Input& input = inputs.emplace_back();
    input.name = entry.name;
    input.dtype = entry.dtype;
    input.shape = entry.shape;
    input.logical_bytes = entry.size_bytes;
    input.read = [&checkpoint, &tensor](uint64_t offset_bytes, std::span<std::byte> out) {
      return checkpoint.read(tensor, offset_bytes, out);
    };
  }
  return measure_all(inputs, static_cast<int>(arguments.threads), bar);
}

Result<Report> measure_bundle(const StatsArguments& arguments, cli::ProgressBar& bar) {
  WEIGHTD_ASSIGN_OR_RETURN(const store::BundleReader bundle, store::BundleReader::open(arguments.path));
  const int threads = static_cast<int>(arguments.threads);
  const std::vector<StorageShare> shares = storage_shares(bundle.manifest());
  std::vector<Input> inputs;
  for (size_t i = 0; i < shares.size(); ++i) {
    const store::TensorRecord& tensor = bundle.manifest().tensors[i];
    if (!tensor.indexed) continue;
    Input& input = inputs.emplace_back();
    input.name = tensor.name;
    input.dtype = tensor.dtype;
    input.shape = tensor.shape;
    input.logical_bytes = tensor.logical_bytes;
    if (shares[i].owner == i) input.stored_bytes = shares[i].stored_bytes;
    input.whole = true;
    input.read = [&bundle, &tensor, threads](uint64_t, std::span<std::byte> out) {
      return bundle.decode_tensor(tensor, out, threads);
    };
  }
  WEIGHTD_ASSIGN_OR_RETURN(Report report, measure_all(inputs, threads, bar));
  report.bundle = true;
  return report;
}

std::string share_text(uint64_t count, uint64_t weights) {
  if (weights == 0) return "-";
  return fixed(100 * static_cast<double>(count) / static_cast<double>(weights), 4) + " %";
}

std::vector<std::string> sum_cells(const std::string& name, const Sum& sum, bool bundle) {
  std::vector<std::string> cells = {name,
                                    std::to_string(sum.tensors),
                                    std::to_string(sum.weights),
                                    fixed(sum.counts.exponent_entropy(), 3),
                                    fixed(sum.counts.sign_mantissa_entropy(), 3),
                                    fixed(sum.counts.joint_entropy(), 3),
                                    share_text(sum.f12.escapes, sum.f12.weights),
                                    fixed(bits_per_weight(sum.f12.bytes, sum.f12.weights), 3)};
  if (bundle) cells.push_back(fixed(bits_per_weight(sum.stored_bytes, sum.stored_weights), 3));
  for (const uint64_t count : {sum.special.zero, sum.special.subnormal}) cells.push_back(share_text(count, sum.weights));
  for (const uint64_t count : {sum.special.inf, sum.special.nan}) cells.push_back(std::to_string(count));
  return cells;
}

std::string class_table(const Report& report) {
  cli::Table table;
  table.column("class");
  for (const char* title : {"tensors", "weights", "exponent", "sign+mantissa", "joint", "escapes", "f12 bits"}) {
    table.column(title, cli::Align::kRight);
  }
  if (report.bundle) table.column("stored bits", cli::Align::kRight);
  for (const char* title : {"zero", "subnormal", "Inf", "NaN"}) table.column(title, cli::Align::kRight);
  for (size_t i = 0; i < kTensorClassCount; ++i) {
    if (report.classes[i].tensors == 0) continue;
    table.row(sum_cells(std::string(tensor_class_name(static_cast<TensorClass>(i))), report.classes[i], report.bundle));
  }
  table.row(sum_cells("total", report.total, report.bundle));
  return table.to_string();
}

std::string special_table(const Report& report) {
  cli::Table table;
  table.column("tensor").column("Inf", cli::Align::kRight).column("NaN", cli::Align::kRight);
  for (const TensorStats& tensor : report.tensors) {
    if (tensor.special.inf + tensor.special.nan == 0) continue;
    table.row({tensor.name, std::to_string(tensor.special.inf), std::to_string(tensor.special.nan)});
  }
  if (table.empty()) return "no Inf and no NaN in any tensor\n";
  return "tensors with Inf or NaN:\n" + table.to_string();
}

void set_special(Json& json, const SpecialCounts& special) {
  json.set("zero", special.zero).set("subnormal", special.subnormal).set("inf", special.inf).set("nan", special.nan);
}

void set_f12(Json& json, const F12Estimate& f12) {
  if (f12.weights == 0) return;
  json.set("f12_weights", f12.weights)
      .set("f12_escapes", f12.escapes)
      .set("f12_escape_rate", static_cast<double>(f12.escapes) / static_cast<double>(f12.weights))
      .set("f12_bits_per_weight", bits_per_weight(f12.bytes, f12.weights));
}

Json sum_json(const Sum& sum, bool bundle) {
  Json json = Json::object();
  json.set("tensors", sum.tensors)
      .set("weights", sum.weights)
      .set("bf16_weights", sum.counts.weights())
      .set("exponent_entropy", sum.counts.exponent_entropy())
      .set("sign_mantissa_entropy", sum.counts.sign_mantissa_entropy())
      .set("joint_entropy", sum.counts.joint_entropy());
  set_f12(json, sum.f12);
  if (bundle)
    json.set("stored_bytes", sum.stored_bytes).set("stored_bits_per_weight", bits_per_weight(sum.stored_bytes, sum.stored_weights));
  set_special(json, sum.special);
  return json;
}

Json to_json(const StatsArguments& arguments, const Report& report) {
  Json classes = Json::object();
  for (size_t i = 0; i < kTensorClassCount; ++i) {
    if (report.classes[i].tensors > 0)
      classes.set(tensor_class_name(static_cast<TensorClass>(i)), sum_json(report.classes[i], report.bundle));
  }
  Json tensors = Json::array();
  for (const TensorStats& tensor : report.tensors) {
    Json json = Json::object();
    json.set("name", tensor.name)
        .set("class", tensor_class_name(tensor.tensor_class))
        .set("dtype", dtype_name(tensor.dtype))
        .set("weights", tensor.weights);
    if (tensor.stored_bytes) json.set("stored_bytes", *tensor.stored_bytes);
    set_f12(json, tensor.f12);
    set_special(json, tensor.special);
    tensors.push(std::move(json));
  }
  Json document = Json::document();
  document.set("path", arguments.path)
      .set("kind", report.bundle ? "bundle" : "checkpoint")
      .set("total", sum_json(report.total, report.bundle))
      .set("classes", std::move(classes))
      .set("tensors", std::move(tensors));
  return document;
}

Status run(const StatsArguments& arguments, cli::Output& output) {
  cli::ProgressBar bar(output, "stats");
  Result<Report> report =
      looks_like_bundle(arguments.path) ? measure_bundle(arguments, bar) : measure_checkpoint(arguments, output, bar);
  bar.clear();
  if (!report.ok() && looks_like_bundle(arguments.path)) return advise_about_bundle(output, arguments.path, report.status());
  if (!report.ok()) return report.status();
  output.print(class_table(*report) + "\n" + special_table(*report));
  if (output.json) output.emit(to_json(arguments, *report));
  return {};
}

}  // namespace

void add_stats(cli::Program& program) {
  const auto arguments = std::make_shared<StatsArguments>();
  program.verb("stats", "Tell how compressible the weights are")
      .positional("PATH", &arguments->path, "Checkpoint (folder, .safetensors or its index) or bundle")
      .number("--threads", &arguments->threads, 1, kMaxThreads, std::string(kThreadsHelp))
      .details(
          "By class of tensor: entropies in bits per BF16 weight (order 0, over all weights of the class; joint is the floor for "
          "coders without context), the share of weights outside the best f12 window of their row (escapes), the bits per weight "
          "of f12, and where Inf and NaN are. For a bundle also the bits that are stored.")
      .example("weightpack stats Llama-3.1-8B/")
      .run([arguments](cli::Output& output) { return run(*arguments, output); });
}

}  // namespace weightd::tools
