// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/text.h"
#include "store/bundle.h"
#include "store/hash.h"
#include "tools/cli/table.h"
#include "tools/pack/storage_shares.h"
#include "tools/pack/verbs.h"

namespace weightd::tools {
namespace {

using cli::counted;
using cli::Json;

/// "1.0": from the header, whose first fields are the same in every version.
Result<std::string> format_version(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return status_from_errno(errno, printable(path) + ": open");
  std::array<unsigned char, 4> version{};
  WEIGHTD_RETURN_IF_ERROR(pread_full(fd.get(), std::as_writable_bytes(std::span(version)), 8, printable(path)));
  return std::to_string(version[0] | version[1] << 8) + "." + std::to_string(version[2] | version[3] << 8);
}

/// One read of the bundle, for both kinds of output.
struct View {
  store::BundleReader bundle;
  std::string version;
  std::vector<StorageShare> shares;

  [[nodiscard]] const store::Manifest& manifest() const { return bundle.manifest(); }
  [[nodiscard]] const store::Storage& storage_of(const store::TensorRecord& tensor) const {
    return manifest().storages[tensor.storage];
  }
};

struct Totals {
  uint64_t logical_bytes = 0, stored_bytes = 0, resident_bytes = 0, escapes = 0;
};

Totals totals_of(const View& view) {
  Totals totals;
  for (size_t i = 0; i < view.shares.size(); ++i) {
    totals.logical_bytes += view.manifest().tensors[i].logical_bytes;
    totals.stored_bytes += view.shares[i].stored_bytes;
    totals.resident_bytes += view.shares[i].resident_bytes;
  }
  for (const store::Storage& storage : view.manifest().storages) totals.escapes += storage.escapes;
  return totals;
}

std::string note_of(const View& view, size_t i) {
  const store::TensorRecord& tensor = view.manifest().tensors[i];
  const store::Storage& storage = view.storage_of(tensor);
  const StorageShare& share = view.shares[i];
  std::string note;
  const auto add = [&note](const std::string& text) { note += (note.empty() ? "" : "; ") + text; };
  if (share.owner != i) add("same as " + view.manifest().tensors[share.owner].name);
  if (share.rows > 0) {
    add("rows " + std::to_string(tensor.row_begin) + ".." + std::to_string(tensor.row_begin + share.rows) + " of " + storage.name);
  }
  if (!tensor.indexed) add("not part of the model");
  if (!storage.resident) add("not resident");
  return note;
}

std::string tensor_table(const View& view) {
  cli::Table table;
  table.column("tensor").column("dtype").column("shape").column("encoding");
  table.column("stored", cli::Align::kRight)
      .column("resident", cli::Align::kRight)
      .column("bits", cli::Align::kRight)
      .column("note");
  for (size_t i = 0; i < view.shares.size(); ++i) {
    const store::TensorRecord& tensor = view.manifest().tensors[i];
    const StorageShare& share = view.shares[i];
    const uint64_t elements = tensor.logical_bytes * 8 / dtype_bits(tensor.dtype);
    table.row({tensor.name, std::string(dtype_name(tensor.dtype)), shape_to_string(tensor.shape),
               std::string(encoding_name(view.storage_of(tensor).encoding)), human_bytes(share.stored_bytes),
               human_bytes(share.resident_bytes),
               share.owner == i ? cli::fixed(bits_per_weight(share.stored_bytes, elements), 3) : "-", note_of(view, i)});
  }
  return table.to_string();
}

std::string totals_text(const View& view) {
  const store::Manifest& manifest = view.manifest();
  const Totals totals = totals_of(view);
  std::string text = counted(manifest.tensors.size(), "tensor") + ": " + human_bytes(totals.logical_bytes) + " as they were, " +
                     human_bytes(totals.stored_bytes) + " stored, " + human_bytes(totals.resident_bytes) + " resident; " +
                     counted(totals.escapes, "escape") + "\n";
  for (const store::Residency& residency : manifest.residencies) {
    text += "residency    " + printable(residency.form) + ": arena of " + human_bytes(residency.arena_bytes) + ", " +
            counted(residency.block_hashes.size(), "hashed block") + "\n";
  }
  text += "file         " + human_bytes(view.bundle.file_bytes()) + ", format " + view.version + ", packed by weightpack " +
          printable(manifest.tool_version) + "\n";
  text += "content id   " + store::to_hex(view.bundle.content_id()) + "\n";
  text += "tensors id   " + store::to_hex(manifest.tensors_id) + "\n";
  for (const store::SourceFile& source : manifest.sources) {
    text += "source       " + printable(source.relative_name) + ", " + human_bytes(source.file_bytes) + "\n";
  }
  for (const std::string& name : manifest.left_out_files) text += "left out     " + printable(name) + "\n";
  return text;
}

Json tensor_json(const View& view, size_t i) {
  const store::TensorRecord& tensor = view.manifest().tensors[i];
  const store::Storage& storage = view.storage_of(tensor);
  const StorageShare& share = view.shares[i];
  Json shape = Json::array();
  for (const uint64_t dimension : tensor.shape) shape.push(dimension);
  Json json = Json::object();
  json.set("name", tensor.name)
      .set("dtype", dtype_name(tensor.dtype))
      .set("shape", std::move(shape))
      .set("encoding", encoding_name(storage.encoding))
      .set("logical_bytes", tensor.logical_bytes)
      .set("stored_bytes", share.stored_bytes)
      .set("resident_bytes", share.resident_bytes)
      .set("source", view.manifest().sources[tensor.source].relative_name)
      .set("logical_xxh128", store::to_hex(tensor.logical_xxh))
      .set("indexed", tensor.indexed)
      .set("resident", storage.resident);
  if (share.owner != i) json.set("same_as", view.manifest().tensors[share.owner].name);
  if (share.rows > 0) json.set("matrix", storage.name).set("row_begin", tensor.row_begin).set("rows", share.rows);
  if (storage.encoding == Encoding::kF12 && !storage.merged) json.set("escapes", storage.escapes);
  return json;
}

Json matrices_json(const store::Manifest& manifest) {
  Json matrices = Json::array();
  for (const store::Storage& storage : manifest.storages) {
    if (!storage.merged) continue;
    Json json = Json::object();
    json.set("name", storage.name)
        .set("rows", storage.geometry.n)
        .set("cols", storage.geometry.k)
        .set("encoding", encoding_name(storage.encoding))
        .set("logical_bytes", storage.logical_bytes)
        .set("stored_bytes", stored_bytes(manifest, storage))
        .set("escapes", storage.escapes)
        .set("listed_groups", storage.listed_groups)
        .set("dense_groups", storage.dense_groups);
    matrices.push(std::move(json));
  }
  return matrices;
}

Json sources_json(const store::Manifest& manifest) {
  Json sources = Json::array();
  for (const store::SourceFile& source : manifest.sources) {
    Json json = Json::object();
    json.set("name", source.relative_name)
        .set("bytes", source.file_bytes)
        .set("sha256", store::to_hex(source.sha))
        .set("is_index", source.is_index);
    sources.push(std::move(json));
  }
  return sources;
}

Json residencies_json(const store::Manifest& manifest) {
  Json residencies = Json::array();
  for (const store::Residency& residency : manifest.residencies) {
    Json json = Json::object();
    json.set("form", residency.form)
        .set("arena_bytes", residency.arena_bytes)
        .set("pool_bytes", residency.pool_bytes)
        .set("blocks", residency.block_hashes.size());
    residencies.push(std::move(json));
  }
  return residencies;
}

Json to_json(const View& view) {
  const store::Manifest& manifest = view.manifest();
  const Totals totals = totals_of(view);
  Json tensors = Json::array();
  for (size_t i = 0; i < view.shares.size(); ++i) tensors.push(tensor_json(view, i));
  Json left_out = Json::array();
  for (const std::string& name : manifest.left_out_files) left_out.push(name);
  Json total = Json::object();
  total.set("tensors", manifest.tensors.size())
      .set("logical_bytes", totals.logical_bytes)
      .set("stored_bytes", totals.stored_bytes)
      .set("resident_bytes", totals.resident_bytes)
      .set("escapes", totals.escapes);
  Json document = Json::document();
  document.set("bundle", view.bundle.name())
      .set("format_version", view.version)
      .set("tool_version", manifest.tool_version)
      .set("file_bytes", view.bundle.file_bytes())
      .set("content_id", store::to_hex(view.bundle.content_id()))
      .set("tensors_id", store::to_hex(manifest.tensors_id))
      .set("total", std::move(total))
      .set("residencies", residencies_json(manifest))
      .set("sources", sources_json(manifest))
      .set("left_out_files", std::move(left_out))
      .set("merged_matrices", matrices_json(manifest))
      .set("tensors", std::move(tensors));
  return document;
}

Status run(const std::string& path, cli::Output& output) {
  Result<store::BundleReader> bundle = store::BundleReader::open(path);
  if (!bundle.ok()) return advise_about_bundle(output, path, bundle.status());
  WEIGHTD_ASSIGN_OR_RETURN(std::string version, format_version(path));
  std::vector<StorageShare> shares = storage_shares(bundle->manifest());
  const View view{*std::move(bundle), std::move(version), std::move(shares)};
  if (output.json) {
    output.emit(to_json(view));
  } else {
    output.print(tensor_table(view) + "\n" + totals_text(view));
  }
  return {};
}

}  // namespace

void add_inspect(cli::Program& program) {
  const auto path = std::make_shared<std::string>();
  program.verb("inspect", "Show what a bundle holds")
      .positional("BUNDLE", path.get(), "Bundle to read")
      .details(
          "Prints each tensor with its encoding and sizes, then totals, residency, ids and source files. Reads and checks header "
          "and manifest only. Parts of a merged matrix take bytes in proportion to their rows, the last part the rest, so that the "
          "sums are exact; equal tensors are counted once.")
      .example("weightpack inspect llama-8b.wpk --json")
      .run([path](cli::Output& output) { return run(*path, output); });
}

}  // namespace weightd::tools
