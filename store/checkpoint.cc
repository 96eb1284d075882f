// SPDX-License-Identifier: Apache-2.0
#include "store/checkpoint.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <optional>
#include <system_error>
#include <unordered_map>
#include <utility>

#include "base/text.h"
#include "store/strict_json.h"

namespace weightd::store {
namespace {

constexpr std::string_view kIndexSuffix = ".safetensors.index.json";
constexpr std::string_view kFileSuffix = ".safetensors";
constexpr size_t kListedNames = 20;     // in a warning
constexpr size_t kListedShards = 1000;  // in a refusal: more than any real checkpoint has
constexpr size_t kPathBytesShown = 1024;

std::string shown(std::string_view path) { return printable(path, kPathBytesShown); }
std::string in_quotes(std::string_view name) { return "'" + printable(name) + "'"; }

std::string count_of(uint64_t count, std::string_view noun) {
  return std::to_string(count) + " " + std::string(noun) + (count == 1 ? "" : "s");
}

/// "a, b, and 3 more".
std::string list_of(const std::vector<std::string>& items, size_t limit) {
  std::string text;
  for (size_t i = 0; i < std::min(items.size(), limit); ++i) text += (i == 0 ? "" : ", ") + items[i];
  if (items.size() > limit) text += ", and " + std::to_string(items.size() - limit) + " more";
  return text;
}

std::string join(const std::string& folder, std::string_view name) { return folder + "/" + std::string(name); }

bool has_suffix(std::string_view text, std::string_view lower_suffix) {
  const auto same = [](char a, char b) { return (a >= 'A' && a <= 'Z' ? static_cast<char>(a + 32) : a) == b; };
  return text.size() > lower_suffix.size() &&
         std::equal(lower_suffix.begin(), lower_suffix.end(), text.end() - static_cast<ptrdiff_t>(lower_suffix.size()),
                    [&](char suffix, char c) { return same(c, suffix); });
}

struct OpenFile {
  UniqueFd fd;
  Checkpoint::Stamp stamp{};
};

Checkpoint::Stamp stamp_of(const struct stat& info) {
  return {info.st_ino, static_cast<uint64_t>(info.st_size), info.st_mtim.tv_sec, info.st_mtim.tv_nsec};
}

/// Opens a regular file for reading; a FIFO or a device is refused without waiting for its other side.
Result<OpenFile> open_regular(const std::string& path) {
  OpenFile file;
  file.fd = UniqueFd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!file.fd.valid()) return status_from_errno(errno, shown(path));
  struct stat info {};
  if (::fstat(file.fd.get(), &info) != 0) return status_from_errno(errno, shown(path) + ": fstat");
  if (!S_ISREG(info.st_mode)) return Status::invalid_argument(shown(path) + ": not a regular file");
  file.stamp = stamp_of(info);
  return file;
}

// --- The index -------------------------------------------------------------------------------------------------------------

struct Index {
  std::string folder;
  std::string name;
  std::string json;
  std::vector<IndexEntry> weight_map;
};

/// A path below the index's folder, less its "." parts; or the rule it breaks.
Result<std::string> normalise_shard_name(std::string_view raw) {
  const auto refuse = [&](std::string_view rule) {
    return Status::corruption("shard name " + in_quotes(raw) + " " + std::string(rule));
  };
  if (raw.empty()) return refuse("is empty");
  if (raw.front() == '/') return refuse("is an absolute path");
  if (raw.find('\\') != std::string_view::npos) return refuse("has a backslash");
  if (raw.find('\0') != std::string_view::npos) return refuse("has a NUL");
  std::string name;
  std::string_view rest = raw;
  while (true) {
    const size_t slash = rest.find('/');
    const std::string_view part = rest.substr(0, slash);
    if (part == "..") return refuse("leaves the folder by '..'");
    if (part.empty()) return refuse("has an empty path part");
    if (part != ".") name += (name.empty() ? "" : "/") + std::string(part);
    if (slash == std::string_view::npos) break;
    rest.remove_prefix(slash + 1);
  }
  if (name.empty()) return refuse("names no file");
  return name;
}

/// The tokens of an index: {"metadata": .., "weight_map": {"tensor": "shard", ..}}; other keys of the outer object are skipped.
class IndexHandler : public JsonHandler {
 public:
  IndexHandler(std::vector<IndexEntry>& weight_map, std::string_view name) : weight_map_(weight_map), name_(name) {}

  Status begin_object() override {
    if (depth_ == 1 && in_map_) return descend();
    if (in_map_) return bad_value("an object");
    return descend();
  }
  Status begin_array() override {
    if (depth_ == 0) return fail("the index must be one JSON object");
    if (in_map_) return depth_ == 1 ? fail("weight_map must be an object") : bad_value("an array");
    return descend();
  }
  Status end_object() override {
    --depth_;
    return {};
  }
  Status end_array() override {
    --depth_;
    return {};
  }

  Status key(std::string& text) override {
    if (depth_ == 1) {
      in_map_ = text == "weight_map";
      if (in_map_ && std::exchange(has_map_, true)) return fail("weight_map occurs twice");
    } else if (in_map_) {
      weight_map_.push_back({std::move(text), {}});
    }
    return {};
  }

  Status string(std::string& text) override {
    if (depth_ < 2 || !in_map_) return scalar(in_quotes(text));
    Result<std::string> shard = normalise_shard_name(text);
    if (!shard.ok()) return fail(tensor() + ": " + shard.status().message());
    weight_map_.back().shard = *std::move(shard);
    return {};
  }
  Status integer(uint64_t value) override { return scalar(std::to_string(value)); }
  Status other(std::string_view token) override { return scalar(printable(token)); }

  Status finish() const { return has_map_ ? Status() : fail("no weight_map"); }

 private:
  static constexpr uint64_t kMaxDepth = 64;

  Status descend() {
    if (depth_ == kMaxDepth) return fail("nested deeper than " + std::to_string(kMaxDepth) + " levels");
    ++depth_;
    return {};
  }
  Status scalar(const std::string& found) const {
    if (depth_ == 0) return fail("the index must be one JSON object, have " + found);
    if (!in_map_) return {};
    return depth_ == 1 ? fail("weight_map must be an object, have " + found) : bad_value(found);
  }
  Status bad_value(const std::string& found) const { return fail(tensor() + ": the shard name must be a string, have " + found); }
  Status fail(const std::string& rule) const { return Status::corruption(std::string(name_) + ": " + rule); }
  std::string tensor() const { return "tensor " + in_quotes(weight_map_.back().tensor); }

  std::vector<IndexEntry>& weight_map_;
  std::string_view name_;
  uint64_t depth_ = 0;
  bool in_map_ = false;  // inside the value of the outer key "weight_map"
  bool has_map_ = false;
};

Result<Index> read_index(std::string folder, std::string name) {
  const std::string path = join(folder, name);
  WEIGHTD_ASSIGN_OR_RETURN(const OpenFile file, open_regular(path));
  const uint64_t size = file.stamp.size_bytes;
  if (size > kMaxIndexBytes) {
    return Status::unsupported(shown(path) + ": an index of " + std::to_string(size) + " bytes, over the limit of " +
                               std::to_string(kMaxIndexBytes));
  }
  Index index;
  index.folder = std::move(folder);
  index.name = std::move(name);
  index.json.resize(size);
  WEIGHTD_RETURN_IF_ERROR(pread_full(file.fd.get(), std::as_writable_bytes(std::span(index.json)), 0, shown(path)));
  WEIGHTD_ASSIGN_OR_RETURN(index.weight_map, parse_checkpoint_index(index.json, shown(path)));
  return index;
}

// --- The folder ------------------------------------------------------------------------------------------------------------

struct Listing {
  std::vector<std::string> indexes;  // sorted, as files
  std::vector<std::string> files;
};

Result<Listing> list_folder(const std::string& folder) {
  Listing listing;
  std::error_code error;
  for (std::filesystem::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    std::string name = it->path().filename().string();
    if (name.front() == '.') continue;
    if (has_suffix(name, kIndexSuffix)) {
      listing.indexes.push_back(std::move(name));
    } else if (has_suffix(name, kFileSuffix)) {
      listing.files.push_back(std::move(name));
    }
  }
  if (error) return status_from_errno(error.value(), shown(folder) + ": list");
  std::sort(listing.indexes.begin(), listing.indexes.end());
  std::sort(listing.files.begin(), listing.files.end());
  return listing;
}

// --- Files and tensors -----------------------------------------------------------------------------------------------------

Result<CheckpointFile> read_file(const std::string& folder, const std::string& name, OpenFile file) {
  CheckpointFile out;
  out.relative_name = name;
  out.file_bytes = file.stamp.size_bytes;
  WEIGHTD_ASSIGN_OR_RETURN(out.header, read_safetensors_header(file.fd.get(), out.file_bytes, shown(join(folder, name))));
  out.fd = std::move(file.fd);
  return out;
}

/// Appends all entries of the last file, by offset.
template <typename IsIndexed>
void append_tensors(Checkpoint& checkpoint, IsIndexed&& is_indexed) {
  const auto file_index = static_cast<uint32_t>(checkpoint.files.size() - 1);
  const std::vector<SafetensorsEntry>& entries = checkpoint.files.back().header.entries;
  std::vector<uint32_t> order(entries.size());
  for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return entries[a].offset_bytes < entries[b].offset_bytes; });
  checkpoint.tensors.reserve(checkpoint.tensors.size() + order.size());
  for (const uint32_t i : order) checkpoint.tensors.push_back({file_index, i, is_indexed(entries[i].name)});
}

Result<Checkpoint> open_files(const std::string& folder, const std::vector<std::string>& names) {
  Checkpoint checkpoint;
  for (const std::string& name : names) {
    WEIGHTD_ASSIGN_OR_RETURN(OpenFile opened, open_regular(join(folder, name)));
    checkpoint.stamps.push_back(opened.stamp);
    WEIGHTD_ASSIGN_OR_RETURN(CheckpointFile file, read_file(folder, name, std::move(opened)));
    checkpoint.files.push_back(std::move(file));
    append_tensors(checkpoint, [](const std::string&) { return true; });
  }
  std::unordered_map<std::string_view, uint32_t> owner;
  for (const CheckpointTensor& tensor : checkpoint.tensors) {
    const auto [it, added] = owner.emplace(checkpoint.entry(tensor).name, tensor.file_index);
    if (added) continue;
    return Status::corruption(shown(folder) + ": tensor " + in_quotes(it->first) + " is in both " +
                              in_quotes(checkpoint.files[it->second].relative_name) + " and " +
                              in_quotes(checkpoint.files[tensor.file_index].relative_name) +
                              ", and no index says which one counts");
  }
  if (names.size() > 1) {
    checkpoint.warnings.push_back(shown(folder) + ": no index file: all " + std::to_string(names.size()) +
                                  " *.safetensors files are taken as one model; a missing file would not be noticed");
  }
  return checkpoint;
}

/// Where the index puts each tensor, and which of them have been found. Borrows the index.
struct Placement {
  uint32_t shard = 0;
  bool found = false;
};
using Placements = std::unordered_map<std::string_view, Placement>;

std::vector<std::string> shard_names(const Index& index) {
  std::vector<std::string> names;
  names.reserve(index.weight_map.size());
  for (const IndexEntry& item : index.weight_map) names.push_back(item.shard);
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

/// Opens every shard, or says what is wrong with each one that cannot be used.
Result<std::vector<OpenFile>> open_shards(const Index& index, const std::vector<std::string>& names) {
  std::vector<OpenFile> shards;
  std::vector<std::string> problems;
  StatusCode code = StatusCode::kOk;
  for (const std::string& name : names) {
    Result<OpenFile> opened = open_regular(join(index.folder, name));
    Status status = opened.status();
    if (status.code() == StatusCode::kResourceExhausted) return status;
    if (status.ok() && opened->stamp.size_bytes == 0) status = Status::corruption("empty");
    if (status.ok()) {
      shards.push_back(*std::move(opened));
      continue;
    }
    const bool missing = status.code() == StatusCode::kNotFound;
    const std::string_view full = status.message();
    const size_t colon = full.rfind(": ");
    problems.push_back(in_quotes(name) + " (" +
                       std::string(missing ? "missing" : full.substr(colon == std::string_view::npos ? 0 : colon + 2)) + ")");
    if (code == StatusCode::kOk || missing) code = status.code();
  }
  if (problems.empty()) return shards;
  return Status(code, shown(join(index.folder, index.name)) + ": " + std::to_string(problems.size()) + " of " +
                          count_of(names.size(), "shard") + " cannot be used: " + list_of(problems, kListedShards) +
                          " (an incomplete download?)");
}

Status check_all_found(const Index& index, const Placements& placements) {
  uint64_t absent = 0;
  const IndexEntry* first = nullptr;
  for (const IndexEntry& item : index.weight_map) {
    if (placements.at(item.tensor).found) continue;
    if (absent++ == 0) first = &item;
  }
  if (first == nullptr) return {};
  const std::string more = absent == 1 ? "" : " (and " + count_of(absent - 1, "more tensor") + " likewise)";
  return Status::corruption(shown(join(index.folder, index.name)) + ": tensor " + in_quotes(first->tensor) + " is given to shard " +
                            in_quotes(first->shard) + ", which does not hold it" + more);
}

/// Brings in what the index leaves out, or reports it. `others`: *.safetensors files of the folder that the index does not name.
class Unindexed {
 public:
  Unindexed(const Index& index, const CheckpointOptions& options, Placements& placements, Checkpoint& checkpoint)
      : index_(index), options_(options), placements_(placements), checkpoint_(checkpoint) {}

  /// Whether a stored tensor of the file being read is part of the model.
  bool take(const std::string& name, uint32_t shard) {
    const auto it = placements_.find(name);
    if (it != placements_.end() && it->second.shard == shard) {
      it->second.found = true;
      return true;
    }
    if (it == placements_.end() && options_.include_unindexed) {
      extra_.emplace_back(name, shard);
      return true;
    }
    skipped_.push_back(in_quotes(name) + " of " + in_quotes(checkpoint_.files[shard].relative_name));
    return false;
  }

  Status add_files(const std::vector<std::string>& others) {
    for (const std::string& name : others) WEIGHTD_RETURN_IF_ERROR(add_file(name));
    return check_extra();
  }

  Status report() {
    const std::string where = shown(join(index_.folder, index_.name)) + ": ";
    std::vector<std::string> lines;
    if (!left_out_.empty()) {
      lines.push_back(where + count_of(left_out_.size(), "file") +
                      " not named by the index, left out: " + list_of(left_out_, kListedNames));
    }
    if (!skipped_.empty()) {
      lines.push_back(where + count_of(skipped_.size(), "stored tensor") +
                      " not in the index, skipped: " + list_of(skipped_, kListedNames));
    }
    if (options_.strict && !lines.empty()) return Status::failed_precondition(list_of(lines, lines.size()) + " (refused: strict)");
    for (std::string& line : lines) checkpoint_.warnings.push_back(std::move(line));
    return {};
  }

 private:
  Status add_file(const std::string& name) {
    Result<OpenFile> opened = open_regular(join(index_.folder, name));
    const Checkpoint::Stamp stamp = opened.ok() ? opened->stamp : Checkpoint::Stamp{};
    Result<CheckpointFile> file =
        opened.ok() ? read_file(index_.folder, name, *std::move(opened)) : Result<CheckpointFile>(opened.status());
    if (!file.ok()) {
      if (options_.include_unindexed) return file.status();
      leave_out(name, "unreadable: " + file.status().message());
      return {};
    }
    const std::vector<SafetensorsEntry>& entries = file->header.entries;
    const bool wanted =
        options_.include_unindexed && std::any_of(entries.begin(), entries.end(), [&](const SafetensorsEntry& entry) {
          return placements_.find(entry.name) == placements_.end();
        });
    if (!wanted) {
      leave_out(name, count_of(entries.size(), "tensor"));
      return {};
    }
    const auto shard = static_cast<uint32_t>(checkpoint_.files.size());
    checkpoint_.files.push_back(*std::move(file));
    checkpoint_.stamps.push_back(stamp);
    append_tensors(checkpoint_, [&](const std::string& tensor) { return take(tensor, shard); });
    return {};
  }

  void leave_out(const std::string& name, const std::string& detail) {
    checkpoint_.left_out_files.push_back(name);
    left_out_.push_back(in_quotes(name) + " (" + detail + ")");
  }

  /// Names that the index lacks are unique among themselves, too.
  Status check_extra() {
    std::sort(extra_.begin(), extra_.end());
    const auto same =
        std::adjacent_find(extra_.begin(), extra_.end(), [](const auto& a, const auto& b) { return a.first == b.first; });
    if (same == extra_.end()) return {};
    return Status::corruption(shown(index_.folder) + ": tensor " + in_quotes(same->first) + ", which the index lacks, is in both " +
                              in_quotes(checkpoint_.files[same->second].relative_name) + " and " +
                              in_quotes(checkpoint_.files[std::next(same)->second].relative_name));
  }

  const Index& index_;
  const CheckpointOptions& options_;
  Placements& placements_;
  Checkpoint& checkpoint_;
  std::vector<std::pair<std::string, uint32_t>> extra_;  // tensor, file
  std::vector<std::string> skipped_, left_out_;          // for people
};

Result<Checkpoint> open_indexed(Index index, const std::vector<std::string>& folder_files, const CheckpointOptions& options) {
  const std::vector<std::string> shards = shard_names(index);
  WEIGHTD_ASSIGN_OR_RETURN(std::vector<OpenFile> opened, open_shards(index, shards));
  Placements placements;
  placements.reserve(index.weight_map.size());
  for (const IndexEntry& item : index.weight_map) {
    const auto at = std::lower_bound(shards.begin(), shards.end(), item.shard) - shards.begin();
    placements.emplace(item.tensor, Placement{static_cast<uint32_t>(at), false});
  }
  Checkpoint checkpoint;
  Unindexed unindexed(index, options, placements, checkpoint);
  for (uint32_t i = 0; i < shards.size(); ++i) {
    checkpoint.stamps.push_back(opened[i].stamp);
    WEIGHTD_ASSIGN_OR_RETURN(CheckpointFile file, read_file(index.folder, shards[i], std::move(opened[i])));
    checkpoint.files.push_back(std::move(file));
    append_tensors(checkpoint, [&](const std::string& name) { return unindexed.take(name, i); });
  }
  WEIGHTD_RETURN_IF_ERROR(check_all_found(index, placements));
  std::vector<std::string> others;
  std::set_difference(folder_files.begin(), folder_files.end(), shards.begin(), shards.end(), std::back_inserter(others));
  if (std::binary_search(others.begin(), others.end(), "model.safetensors")) {
    checkpoint.warnings.push_back(shown(index.folder) + ": both model.safetensors and " + in_quotes(index.name) +
                                  " are there: the index wins");
  }
  WEIGHTD_RETURN_IF_ERROR(unindexed.add_files(others));
  WEIGHTD_RETURN_IF_ERROR(unindexed.report());
  checkpoint.index_name = std::move(index.name);
  checkpoint.index_json = std::move(index.json);
  return checkpoint;
}

Result<Checkpoint> open_folder(const std::string& folder, const CheckpointOptions& options) {
  WEIGHTD_ASSIGN_OR_RETURN(const Listing listing, list_folder(folder));
  if (listing.indexes.size() > 1) {
    std::vector<std::string> names;
    for (const std::string& name : listing.indexes) names.push_back(in_quotes(name));
    return Status::invalid_argument(shown(folder) + ": " + std::to_string(names.size()) + " index files (" +
                                    list_of(names, kListedNames) + "): ambiguous; name the one that is meant");
  }
  if (listing.indexes.size() == 1) {
    WEIGHTD_ASSIGN_OR_RETURN(Index index, read_index(folder, listing.indexes.front()));
    return open_indexed(std::move(index), listing.files, options);
  }
  if (listing.files.empty()) {
    return Status::not_found(shown(folder) + ": no *.safetensors file and no *.safetensors.index.json in this folder");
  }
  return open_files(folder, listing.files);
}

}  // namespace

Result<std::vector<IndexEntry>> parse_checkpoint_index(std::string_view json, std::string_view name) {
  std::vector<IndexEntry> weight_map;
  IndexHandler handler(weight_map, name);
  WEIGHTD_RETURN_IF_ERROR(parse_strict_json(json, name, handler));
  WEIGHTD_RETURN_IF_ERROR(handler.finish());
  const auto by_tensor = [](const IndexEntry& a, const IndexEntry& b) { return a.tensor < b.tensor; };
  std::sort(weight_map.begin(), weight_map.end(), by_tensor);
  const auto same = std::adjacent_find(weight_map.begin(), weight_map.end(),
                                       [](const IndexEntry& a, const IndexEntry& b) { return a.tensor == b.tensor; });
  if (same == weight_map.end()) return weight_map;
  return Status::corruption(std::string(name) + ": tensor " + in_quotes(same->tensor) + " occurs twice in weight_map");
}

Status Checkpoint::read(const CheckpointTensor& tensor, uint64_t offset_bytes, std::span<std::byte> out) const {
  const CheckpointFile& file = files[tensor.file_index];
  const SafetensorsEntry& stored = entry(tensor);
  WEIGHTD_CHECK(offset_bytes <= stored.size_bytes && out.size() <= stored.size_bytes - offset_bytes);
  const uint64_t data_begin = sizeof(uint64_t) + file.header.header_bytes;
  return pread_full(file.fd.get(), out, data_begin + stored.offset_bytes + offset_bytes, shown(file.relative_name));
}

Status Checkpoint::check_unchanged() const {
  for (size_t i = 0; i < files.size(); ++i) {
    struct stat info {};
    const std::string name = shown(files[i].relative_name);
    if (::fstat(files[i].fd.get(), &info) != 0) return status_from_errno(errno, name + ": fstat");
    const Stamp now = stamp_of(info);
    const Stamp& then = stamps[i];
    if (now.size_bytes != then.size_bytes) {
      return Status::failed_precondition(name + ": changed while it was read: " + std::to_string(then.size_bytes) +
                                         " bytes before, " + std::to_string(now.size_bytes) + " now");
    }
    if (now.inode != then.inode || now.mtime_s != then.mtime_s || now.mtime_ns != then.mtime_ns) {
      return Status::failed_precondition(name + ": changed while it was read (modification time)");
    }
  }
  return {};
}

Result<Checkpoint> open_checkpoint(const std::string& path, const CheckpointOptions& options) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) return status_from_errno(errno, shown(path));
  if (S_ISDIR(info.st_mode)) return open_folder(path, options);
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
  const std::string name = slash == std::string::npos ? path : path.substr(slash + 1);
  if (!has_suffix(name, kIndexSuffix)) return open_files(folder, {name});
  WEIGHTD_ASSIGN_OR_RETURN(const Listing listing, list_folder(folder));
  WEIGHTD_ASSIGN_OR_RETURN(Index index, read_index(folder, name));
  return open_indexed(std::move(index), listing.files, options);
}

}  // namespace weightd::store
