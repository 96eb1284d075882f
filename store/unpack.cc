// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "base/text.h"
#include "store/manifest.h"
#include "store/pack.h"
#include "store/worker.h"

namespace weightd::store {
namespace {

namespace fs = std::filesystem;

std::string in_quotes(std::string_view name) { return "'" + printable(name) + "'"; }

// What this run made, so that a failure leaves nothing behind. Files first, then folders, inner before outer.
class Undo {
 public:
  Undo() = default;
  Undo(const Undo&) = delete;
  Undo& operator=(const Undo&) = delete;
  ~Undo() {
    for (const std::string& file : files_) ::unlink(file.c_str());
    for (auto folder = folders_.rbegin(); folder != folders_.rend(); ++folder) ::rmdir(folder->c_str());
  }
  void file(std::string path) { files_.push_back(std::move(path)); }
  void folder(std::string path) { folders_.push_back(std::move(path)); }
  void keep() {
    files_.clear();
    folders_.clear();
  }

 private:
  std::vector<std::string> files_, folders_;
};

Status make_folder(const std::string& path, Undo& undo) {
  if (::mkdir(path.c_str(), 0777) == 0) {
    undo.folder(path);
    return {};
  }
  return errno == EEXIST ? Status() : status_from_errno(errno, in_quotes(path) + ": cannot create the folder");
}

Status prepare_folder(const std::string& folder, Undo& undo) {
  WEIGHTD_RETURN_IF_ERROR(make_folder(folder, undo));
  std::error_code error;
  const bool empty = fs::is_empty(folder, error);
  if (error || !fs::is_directory(folder, error))
    return Status::invalid_argument(in_quotes(folder) + ": not a folder that can be read");
  if (!empty) return Status::failed_precondition(in_quotes(folder) + ": the folder is not empty");
  return {};
}

Status sync_folder(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.valid()) return status_from_errno(errno, in_quotes(path));
  if (::fsync(fd.get()) != 0 && errno != EINVAL) return status_from_errno(errno, in_quotes(path) + ": fsync");
  return {};
}

class Unpacker {
 public:
  Unpacker(const BundleReader& bundle, std::string folder, int threads, const Progress& progress)
      : bundle_(bundle), folder_(std::move(folder)), threads_(threads), progress_(progress) {
    for (const SourceFile& source : bundle.manifest().sources) total_bytes_ += source.file_bytes;
  }

  Result<UnpackReport> run() {
    WEIGHTD_RETURN_IF_ERROR(prepare_folder(folder_, undo_));
    const std::vector<TensorRecord>& tensors = bundle_.manifest().tensors;
    size_t next = 0;
    for (uint32_t s = 0; s < bundle_.manifest().sources.size(); ++s) {
      const size_t first = next;
      while (next < tensors.size() && tensors[next].source == s) ++next;
      WEIGHTD_RETURN_IF_ERROR(restore(bundle_.manifest().sources[s], std::span(tensors).subspan(first, next - first)));
    }
    WEIGHTD_RETURN_IF_ERROR(sync_folder(folder_));
    undo_.keep();
    return report_;
  }

 private:
  Status make_parents(const std::string& relative_name) {
    for (size_t slash = relative_name.find('/'); slash != std::string::npos; slash = relative_name.find('/', slash + 1)) {
      WEIGHTD_RETURN_IF_ERROR(make_folder(folder_ + "/" + relative_name.substr(0, slash), undo_));
    }
    return {};
  }

  // Opens a new file. A source may have any name, this one too: then the next number is tried.
  Result<std::string> create_temp(const std::string& parent) {
    for (uint64_t number = 0;; ++number) {
      std::string temp = parent + "/.unpack-" + std::to_string(number) + ".tmp";
      file_ = UniqueFd(::open(temp.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0644));
      if (file_.valid()) {
        undo_.file(temp);
        return temp;
      }
      if (errno != EEXIST) return status_from_errno(errno, in_quotes(temp) + ": cannot create");
    }
  }

  Status restore(const SourceFile& source, std::span<const TensorRecord> tensors) {
    WEIGHTD_RETURN_IF_ERROR(make_parents(source.relative_name));
    const std::string path = folder_ + "/" + source.relative_name;
    WEIGHTD_ASSIGN_OR_RETURN(const std::string temp, create_temp(fs::path(path).parent_path().string()));
    position_ = 0;
    sha_ = Sha256Stream();
    Status written = write_all(source, tensors, path);
    // The worker's data live in the decoder's buffers no longer than this.
    if (const Status drained = hash_worker_.wait(); written.ok()) written = drained;
    WEIGHTD_RETURN_IF_ERROR(written);
    if (const Sha256 sha = sha_.finish(); position_ != source.file_bytes || sha != source.sha) {
      return Status::corruption(bundle_.name() + ": file " + in_quotes(source.relative_name) + " restores to " +
                                std::to_string(position_) + " bytes with SHA-256 " + to_hex(sha) + ", the manifest says " +
                                std::to_string(source.file_bytes) + " and " + to_hex(source.sha));
    }
    if (::fsync(file_.get()) != 0) return status_from_errno(errno, in_quotes(path) + ": fsync");
    WEIGHTD_RETURN_IF_ERROR(close_checked(std::move(file_), printable(path)));
    if (::rename(temp.c_str(), path.c_str()) != 0) return status_from_errno(errno, in_quotes(path) + ": rename");
    undo_.file(path);
    ++report_.files;
    report_.bytes += position_;
    return {};
  }

  Status write_all(const SourceFile& source, std::span<const TensorRecord> tensors, const std::string& path) {
    const std::vector<Section>& sections = bundle_.manifest().sections;
    std::vector<std::byte> header(sections[source.header_section].size_bytes);
    WEIGHTD_RETURN_IF_ERROR(bundle_.read(source.header_section, 0, header));
    WEIGHTD_RETURN_IF_ERROR(write(header, path));
    for (const TensorRecord& tensor : tensors) {
      WEIGHTD_RETURN_IF_ERROR(
          bundle_.stream_tensor(tensor, threads_, [&](std::span<const std::byte> piece) { return write(piece, path); }));
    }
    return {};
  }

  // Hashing runs beside writing and decoding; the data are copied, for the decoder goes on to use its buffer.
  Status write(std::span<const std::byte> data, const std::string& path) {
    WEIGHTD_RETURN_IF_ERROR(hash_worker_.wait());
    hashed_.assign(data.begin(), data.end());
    hash_worker_.start([this] {
      sha_.update(hashed_);
      return Status();
    });
    WEIGHTD_RETURN_IF_ERROR(no_space(pwrite_full(file_.get(), data, position_, printable(path)), path));
    position_ += data.size();
    if (progress_ && !progress_(report_.bytes + position_, total_bytes_)) return Status::cancelled("unpacking was cancelled");
    return {};
  }

  Status no_space(Status status, const std::string& path) const {
    if (status.code() != StatusCode::kResourceExhausted) return status;
    std::error_code error;
    const fs::space_info space = fs::space(folder_, error);
    return Status::resource_exhausted(
        in_quotes(path) + ": no space: " + human_bytes(total_bytes_) + " are needed, " + human_bytes(report_.bytes + position_) +
        " written, " + (error ? std::string("unknown") : human_bytes(space.available)) + " free (" + status.message() + ")");
  }

  const BundleReader& bundle_;
  const std::string folder_;
  const int threads_;
  const Progress& progress_;
  uint64_t total_bytes_ = 0;
  UnpackReport report_;
  Undo undo_;
  UniqueFd file_;
  uint64_t position_ = 0;
  Sha256Stream sha_;
  std::vector<std::byte> hashed_;
  Worker hash_worker_;  // last: its tasks use the rest
};

}  // namespace

Result<UnpackReport> unpack(const std::string& bundle_path, const std::string& folder, int threads, const Progress& progress) {
  WEIGHTD_ASSIGN_OR_RETURN(const BundleReader bundle, BundleReader::open(bundle_path));
  WEIGHTD_ASSIGN_OR_RETURN(const UnpackReport report, Unpacker(bundle, folder, threads, progress).run());
  WEIGHTD_RETURN_IF_ERROR(bundle.check_unchanged());
  return report;
}

}  // namespace weightd::store
