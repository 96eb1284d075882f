// SPDX-License-Identifier: Apache-2.0
#include "tools/pack/synth_checkpoint.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "base/text.h"
#include "tools/cli/json.h"

namespace weightd::tools {
namespace {

constexpr uint64_t kSlabWords = uint64_t{16} << 20;
constexpr uint64_t kHeaderSlack = uint64_t{64} << 20;  // headers, index, config and the file system's own needs

uint64_t bytes_of(const TensorPlan& tensor) {
  uint64_t bytes = 2;
  for (const uint64_t dimension : tensor.shape) bytes *= dimension;
  return bytes;
}

/// FNV-1a, so that a tensor's values do not depend on which other tensors there are.
uint64_t seed_of(uint64_t seed, const std::string& name) {
  uint64_t hash = 0xCBF29CE484222325ULL;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3ULL;
  return hash ^ seed * 0x9E3779B97F4A7C15ULL;
}

uint16_t bf16_from(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

/// Norm weights of trained models lie around 1 and spread a little.
void fill_norm(std::span<uint16_t> words, uint64_t seed) {
  synth_bf16(words, words.size(), 0, seed, {0.05, 0.0, 0.0}, 1);
  for (uint16_t& word : words) word = bf16_from(1.0F + std::bit_cast<float>(uint32_t{word} << 16));
}

/// A file of the checkpoint: its tensors in the order in which they lie in it.
struct Shard {
  std::string name;
  std::vector<TensorPlan> tensors;
};

/// Fills files in the order of the model, and sorts by name inside each, as published checkpoints do.
std::vector<Shard> cut_into_shards(const std::vector<TensorPlan>& tensors, uint64_t shard_bytes) {
  std::vector<Shard> shards;
  uint64_t used = 0;
  for (const TensorPlan& tensor : tensors) {
    const uint64_t bytes = bytes_of(tensor);
    if (shards.empty() || (used > 0 && used + bytes > shard_bytes)) {
      shards.emplace_back();
      used = 0;
    }
    shards.back().tensors.push_back(tensor);
    used += bytes;
  }
  for (size_t i = 0; i < shards.size(); ++i) {
    std::array<char, 64> name{"model.safetensors"};
    if (shards.size() > 1) std::snprintf(name.data(), name.size(), "model-%05zu-of-%05zu.safetensors", i + 1, shards.size());
    shards[i].name = name.data();
    std::sort(shards[i].tensors.begin(), shards[i].tensors.end(),
              [](const TensorPlan& a, const TensorPlan& b) { return a.name < b.name; });
  }
  return shards;
}

/// Length and JSON, padded with spaces so that the data are 8-byte aligned. Our names need no escapes.
std::string header_of(const Shard& shard) {
  std::string json = R"({"__metadata__":{"format":"pt"})";
  uint64_t offset = 0;
  for (const TensorPlan& tensor : shard.tensors) {
    std::string shape;
    for (const uint64_t dimension : tensor.shape) shape += (shape.empty() ? "" : ",") + std::to_string(dimension);
    const uint64_t end = offset + bytes_of(tensor);
    json += ",\"" + tensor.name + R"(":{"dtype":"BF16","shape":[)" + shape + R"(],"data_offsets":[)" + std::to_string(offset) +
            "," + std::to_string(end) + "]}";
    offset = end;
  }
  json += "}";
  json.append((8 - json.size() % 8) % 8, ' ');
  std::string header(8, '\0');
  for (size_t i = 0; i < 8; ++i) header[i] = static_cast<char>(json.size() >> (8 * i) & 0xFF);
  return header + json;
}

std::string index_of(const std::vector<Shard>& shards, uint64_t total_bytes) {
  std::vector<std::pair<std::string, std::string>> entries;
  for (const Shard& shard : shards) {
    for (const TensorPlan& tensor : shard.tensors) entries.emplace_back(tensor.name, shard.name);
  }
  std::sort(entries.begin(), entries.end());
  cli::Json map = cli::Json::object();
  for (const auto& [tensor, file] : entries) map.set(tensor, file);
  cli::Json index = cli::Json::object();
  index.set("metadata", std::move(cli::Json::object().set("total_size", total_bytes))).set("weight_map", std::move(map));
  return index.dump();
}

/// The folder that is being filled. Without keep(), everything that was made disappears with it.
class OutputFolder {
 public:
  static Result<std::unique_ptr<OutputFolder>> open(const std::string& path) {
    auto folder = std::make_unique<OutputFolder>(path);
    folder->made_ = ::mkdir(path.c_str(), 0777) == 0;
    if (!folder->made_ && errno != EEXIST) return status_from_errno(errno, printable(path) + ": mkdir");
    DIR* listing = ::opendir(path.c_str());
    if (listing == nullptr) return status_from_errno(errno, printable(path) + ": opendir");
    std::string found;
    while (const dirent* entry = ::readdir(listing)) {
      const std::string_view name = entry->d_name;
      if (name != "." && name != "..") found = name;
    }
    ::closedir(listing);
    if (!found.empty())
      return Status::already_exists(printable(path) + ": the folder is not empty: it holds '" + printable(found) + "'");
    return folder;
  }

  explicit OutputFolder(std::string path) : path_(std::move(path)) {}
  OutputFolder(const OutputFolder&) = delete;
  OutputFolder& operator=(const OutputFolder&) = delete;
  ~OutputFolder() {
    for (const std::string& file : files_) ::unlink(file.c_str());
    if (made_) ::rmdir(path_.c_str());
  }

  Status check_room(uint64_t needed_bytes) const {
    struct statvfs room {};
    if (::statvfs(path_.c_str(), &room) != 0) return status_from_errno(errno, printable(path_) + ": statvfs");
    const uint64_t free_bytes = static_cast<uint64_t>(room.f_bavail) * room.f_frsize;
    if (needed_bytes <= free_bytes) return {};
    return Status::resource_exhausted(printable(path_) + ": needs " + human_bytes(needed_bytes) + ", " + human_bytes(free_bytes) +
                                      " are free: " + std::to_string(needed_bytes - free_bytes) + " bytes too few");
  }

  [[nodiscard]] std::string file_path(const std::string& name) const { return path_ + "/" + name; }

  Result<UniqueFd> create(const std::string& name) {
    const std::string path = file_path(name);
    UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    if (!fd.valid()) return status_from_errno(errno, printable(path) + ": create");
    files_.push_back(path);
    return fd;
  }

  Status write_file(const std::string& name, const std::string& text) {
    WEIGHTD_ASSIGN_OR_RETURN(UniqueFd fd, create(name));
    WEIGHTD_RETURN_IF_ERROR(pwrite_full(fd.get(), std::as_bytes(std::span(text)), 0, printable(file_path(name))));
    return close_checked(std::move(fd), printable(file_path(name)));
  }

  void keep() {
    files_.clear();
    made_ = false;
  }

 private:
  std::string path_;
  std::vector<std::string> files_;
  bool made_ = false;
};

/// Writes one shard after the other.
class Writer {
 public:
  Writer(OutputFolder& folder, const SynthOptions& options, uint64_t total_bytes)
      : folder_(folder), options_(options), total_bytes_(total_bytes) {}

  Status write(const Shard& shard) {
    WEIGHTD_ASSIGN_OR_RETURN(UniqueFd fd, folder_.create(shard.name));
    const std::string path = printable(folder_.file_path(shard.name));
    const std::string header = header_of(shard);
    WEIGHTD_RETURN_IF_ERROR(pwrite_full(fd.get(), std::as_bytes(std::span(header)), 0, path));
    uint64_t offset = header.size();
    for (const TensorPlan& tensor : shard.tensors) {
      WEIGHTD_RETURN_IF_ERROR(write_tensor(fd.get(), path, offset, tensor));
      offset += bytes_of(tensor);
    }
    return close_checked(std::move(fd), path);
  }

 private:
  Status write_tensor(int fd, const std::string& path, uint64_t offset, const TensorPlan& tensor) {
    const uint64_t seed = seed_of(options_.seed, tensor.same_as.empty() ? tensor.name : tensor.same_as);
    const uint64_t k = tensor.shape.back();
    const uint64_t rows = tensor.norm ? 1 : tensor.shape.front();
    const uint64_t slab_rows = std::max<uint64_t>(1, kSlabWords / k);
    for (uint64_t row = 0; row < rows; row += slab_rows) {
      slab_.resize(std::min(slab_rows, rows - row) * k);
      if (tensor.norm) {
        fill_norm(slab_, seed);
      } else {
        synth_bf16(slab_, k, row, seed, options_.weights, options_.threads);
      }
      WEIGHTD_RETURN_IF_ERROR(pwrite_full(fd, std::as_bytes(std::span(slab_)), offset + row * k * 2, path));
      done_bytes_ += slab_.size() * 2;
      if (options_.progress && !options_.progress(done_bytes_, total_bytes_)) return Status::cancelled("cancelled");
    }
    return {};
  }

  OutputFolder& folder_;
  const SynthOptions& options_;
  uint64_t total_bytes_, done_bytes_ = 0;
  std::vector<uint16_t> slab_;
};

}  // namespace

Result<SynthReport> synth_checkpoint(const std::string& folder_path, const SynthOptions& options) {
  const std::vector<TensorPlan> tensors = plan_tensors(options.architecture);
  SynthReport report;
  report.tensors = tensors.size();
  for (const TensorPlan& tensor : tensors) report.bytes += bytes_of(tensor);
  WEIGHTD_ASSIGN_OR_RETURN(const std::unique_ptr<OutputFolder> folder, OutputFolder::open(folder_path));
  WEIGHTD_RETURN_IF_ERROR(folder->check_room(report.bytes + kHeaderSlack));

  const std::vector<Shard> shards = cut_into_shards(tensors, options.shard_bytes);
  report.files = shards.size();
  Writer writer(*folder, options, report.bytes);
  for (const Shard& shard : shards) WEIGHTD_RETURN_IF_ERROR(writer.write(shard));
  WEIGHTD_RETURN_IF_ERROR(folder->write_file("config.json", config_json(options.architecture)));
  // The index comes last: while it is missing, the folder is no checkpoint of several files.
  if (shards.size() > 1) {
    WEIGHTD_RETURN_IF_ERROR(folder->write_file("model.safetensors.index.json", index_of(shards, report.bytes)));
  }
  folder->keep();
  return report;
}

}  // namespace weightd::tools
