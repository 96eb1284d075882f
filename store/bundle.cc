// SPDX-License-Identifier: Apache-2.0
#include "store/bundle.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/text.h"
#include "store/manifest.h"
#include "store/storage_decoder.h"

namespace weightd::store {
namespace {

constexpr size_t kReadStepBytes = size_t{4} << 20;
constexpr size_t kMaxFileName = 255;
constexpr size_t kTempStemBytes = 200;  // of the final name in the temporary one, so that this one is never too long
constexpr int kTempAttempts = 100;

uint64_t free_bytes(int dir_fd) {
  struct statvfs info {};
  if (::fstatvfs(dir_fd, &info) != 0) return UINT64_MAX;  // not every file system says
  return static_cast<uint64_t>(info.f_bavail) * info.f_frsize;
}

std::string random_suffix() {
  std::array<unsigned char, 8> bytes{};
  // The pool is ready long before any program of ours runs; a short answer only makes a clash likelier, and O_EXCL sees that.
  [[maybe_unused]] const ssize_t got = ::getrandom(bytes.data(), bytes.size(), 0);
  return hex(bytes.data(), bytes.size());
}

struct PathParts {
  std::string folder, name;
};

Result<PathParts> split_path(const std::string& path) {
  const size_t slash = path.rfind('/');
  PathParts parts;
  parts.name = slash == std::string::npos ? path : path.substr(slash + 1);
  parts.folder = slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
  if (parts.name.empty() || parts.name == "." || parts.name == ".." || path.find('\0') != std::string::npos) {
    return Status::invalid_argument("'" + printable(path) + "' names no file to write");
  }
  if (parts.name.size() > kMaxFileName) {
    return Status::invalid_argument("'" + printable(path) + "': the name has " + std::to_string(parts.name.size()) +
                                    " bytes, at most " + std::to_string(kMaxFileName) + " are allowed");
  }
  return parts;
}

// Replacing a device, a socket or a folder by a rename is never what somebody meant.
Status check_target(int dir_fd, const std::string& name, const std::string& path) {
  struct stat info {};
  if (::fstatat(dir_fd, name.c_str(), &info, 0) != 0) {
    return errno == ENOENT ? Status() : status_from_errno(errno, printable(path));
  }
  if (S_ISREG(info.st_mode)) return {};
  return Status::invalid_argument(printable(path) + ": exists and is " +
                                  (S_ISDIR(info.st_mode) ? "a folder" : "not a regular file"));
}

}  // namespace

// --- writer --------------------------------------------------------------------------------------------------------------

struct BundleWriter::State {
  std::string path;  // for messages
  std::string name, temp_name;
  UniqueFd dir, file;
  uint64_t expected_bytes = 0;
  uint64_t position = kHeaderBytes;
  std::vector<Section> sections;
  bool in_section = false;
  Section open_section;
  Xxh128Stream xxh;
  Sha256Stream sha;
  bool temp_exists = false;

  ~State() {
    if (temp_exists) ::unlinkat(dir.get(), temp_name.c_str(), 0);
  }

  Status create_temp() {
    for (int attempt = 0; attempt < kTempAttempts; ++attempt) {
      temp_name = "." + name.substr(0, kTempStemBytes) + "." + random_suffix() + ".tmp";
      file = UniqueFd(::openat(dir.get(), temp_name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0644));
      if (file.valid()) {
        temp_exists = true;
        return {};
      }
      if (errno != EEXIST) break;
    }
    return status_from_errno(errno, printable(path) + ": cannot create a temporary file beside it");
  }

  // What is missing, when the disk, a quota or a file-size limit stops us.
  Status explain(Status status, uint64_t needed_bytes) const {
    if (status.code() != StatusCode::kResourceExhausted) return status;
    return Status::resource_exhausted(printable(path) + ": no space: needs about " +
                                      human_bytes(std::max(expected_bytes, needed_bytes)) + " (" +
                                      std::to_string(std::max(expected_bytes, needed_bytes)) + " bytes), " + human_bytes(position) +
                                      " written, " + human_bytes(free_bytes(dir.get())) + " free (" + status.message() + ")");
  }

  Status write(std::span<const std::byte> data, uint64_t offset) const {
    return explain(pwrite_full(file.get(), data, offset, printable(path)), offset + data.size());
  }

  Status sync_and_rename() {
    if (::fsync(file.get()) != 0) return explain(status_from_errno(errno, printable(path) + ": fsync"), position);
    WEIGHTD_RETURN_IF_ERROR(explain(close_checked(std::move(file), printable(path)), position));
    if (::renameat(dir.get(), temp_name.c_str(), dir.get(), name.c_str()) != 0) {
      return explain(status_from_errno(errno, printable(path) + ": rename"), position);
    }
    temp_exists = false;
    // EINVAL: a file system that cannot flush folders.
    if (::fsync(dir.get()) != 0 && errno != EINVAL) return status_from_errno(errno, printable(path) + ": fsync of its folder");
    return {};
  }
};

BundleWriter::BundleWriter(std::unique_ptr<State> state) : state_(std::move(state)) {}
BundleWriter::BundleWriter(BundleWriter&&) noexcept = default;
BundleWriter& BundleWriter::operator=(BundleWriter&&) noexcept = default;
BundleWriter::~BundleWriter() = default;

Result<BundleWriter> BundleWriter::create(const std::string& path, uint64_t expected_bytes) {
  WEIGHTD_ASSIGN_OR_RETURN(PathParts parts, split_path(path));
  auto state = std::make_unique<State>();
  state->path = path;
  state->name = parts.name;
  state->expected_bytes = expected_bytes;
  state->dir = UniqueFd(::open(parts.folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!state->dir.valid()) return status_from_errno(errno, printable(path) + ": folder '" + printable(parts.folder) + "'");
  WEIGHTD_RETURN_IF_ERROR(check_target(state->dir.get(), state->name, path));
  if (const uint64_t free = free_bytes(state->dir.get()); free < expected_bytes) {
    return state->explain(Status::resource_exhausted("checked before any work"), expected_bytes);
  }
  WEIGHTD_RETURN_IF_ERROR(state->create_temp());
  return BundleWriter(std::move(state));
}

void BundleWriter::begin_section() {
  WEIGHTD_CHECK(!state_->in_section);
  state_->in_section = true;
  // The gap stays a hole, and so zeros: rewind() cuts off whatever an earlier attempt left there.
  state_->position = f12::align_up(state_->position, kSectionAlign);
  state_->open_section = {};
  state_->open_section.offset_bytes = state_->position;
  state_->xxh = Xxh128Stream();
  state_->sha = Sha256Stream();
}

Status BundleWriter::append(std::span<const std::byte> data) {
  WEIGHTD_CHECK(state_->in_section);
  WEIGHTD_RETURN_IF_ERROR(state_->write(data, state_->position));
  state_->xxh.update(data);
  state_->sha.update(data);
  state_->position += data.size();
  return {};
}

Result<uint32_t> BundleWriter::end_section() {
  WEIGHTD_CHECK(state_->in_section);
  state_->in_section = false;
  state_->open_section.size_bytes = state_->position - state_->open_section.offset_bytes;
  state_->open_section.xxh = state_->xxh.digest();
  state_->open_section.sha = state_->sha.finish();
  state_->sections.push_back(state_->open_section);
  return static_cast<uint32_t>(state_->sections.size() - 1);
}

Status BundleWriter::rewind(uint32_t first) {
  WEIGHTD_CHECK(first <= state_->sections.size());
  state_->in_section = false;
  state_->sections.resize(first);
  state_->position = first == 0 ? kHeaderBytes : state_->sections.back().offset_bytes + state_->sections.back().size_bytes;
  int result;
  do {
    result = ::ftruncate(state_->file.get(), static_cast<off_t>(state_->position));
  } while (result != 0 && errno == EINTR);
  return result == 0 ? Status()
                     : state_->explain(status_from_errno(errno, printable(state_->path) + ": truncate"), state_->position);
}

const std::vector<Section>& BundleWriter::sections() const { return state_->sections; }
uint64_t BundleWriter::file_bytes() const { return state_->position; }

Status BundleWriter::read(uint32_t section, uint64_t offset_bytes, std::span<std::byte> out) const {
  const Section& from = state_->sections[section];
  WEIGHTD_CHECK(offset_bytes <= from.size_bytes && out.size() <= from.size_bytes - offset_bytes);
  return pread_full(state_->file.get(), out, from.offset_bytes + offset_bytes, printable(state_->path));
}

Result<Sha256> BundleWriter::commit(Manifest manifest) {
  WEIGHTD_CHECK(!state_->in_section);
  manifest.sections = state_->sections;
  BundleHeader header;
  header.manifest_offset_bytes = f12::align_up(state_->position, kSectionAlign);
  if (const Status sound = validate_manifest(manifest, header.manifest_offset_bytes, printable(state_->path)); !sound.ok()) {
    // A limit of the format is the input's fault, everything else ours.
    return sound.code() == StatusCode::kUnsupported ? sound : Status::internal("wrote what we would not read: " + sound.message());
  }
  WEIGHTD_ASSIGN_OR_RETURN(const std::vector<std::byte> bytes, encode_manifest(manifest));
  header.manifest_bytes = bytes.size();
  header.manifest_sha = sha256(bytes);
  header.file_bytes = header.manifest_offset_bytes + header.manifest_bytes;
  WEIGHTD_RETURN_IF_ERROR(state_->write(bytes, header.manifest_offset_bytes));
  state_->position = header.file_bytes;
  WEIGHTD_RETURN_IF_ERROR(state_->write(encode_header(header), 0));
  WEIGHTD_RETURN_IF_ERROR(state_->sync_and_rename());
  return header.manifest_sha;
}

// --- reader --------------------------------------------------------------------------------------------------------------

struct BundleReader::State {
  std::string name;  // printable
  UniqueFd fd;
  struct stat opened {};
  Manifest manifest;
  Sha256 content_id{};
  uint64_t file_bytes = 0;
  uint64_t manifest_offset = 0;
  std::vector<uint64_t> pool_bases;

  Status read_manifest() {
    std::vector<std::byte> head(std::min<uint64_t>(file_bytes, kHeaderBytes));
    WEIGHTD_RETURN_IF_ERROR(pread_full(fd.get(), head, 0, name));
    WEIGHTD_ASSIGN_OR_RETURN(const BundleHeader header, decode_header(head, file_bytes, name));
    std::vector<std::byte> bytes(header.manifest_bytes);
    WEIGHTD_RETURN_IF_ERROR(pread_full(fd.get(), bytes, header.manifest_offset_bytes, name));
    if (const Sha256 sha = sha256(bytes); sha != header.manifest_sha) {
      return Status::corruption(name + ": manifest: SHA-256 is " + to_hex(sha) + ", the header says " +
                                to_hex(header.manifest_sha));
    }
    WEIGHTD_ASSIGN_OR_RETURN(manifest, decode_manifest(bytes, name));
    WEIGHTD_RETURN_IF_ERROR(validate_manifest(manifest, header.manifest_offset_bytes, name));
    content_id = header.manifest_sha;
    manifest_offset = header.manifest_offset_bytes;
    pool_bases = store::pool_bases(manifest);
    return {};
  }

  // Looks at the zeros between a section and the next one (or the manifest): offset of the first byte that is none, or kAllZero.
  static constexpr uint64_t kAllZero = UINT64_MAX;
  Result<uint64_t> first_bad_padding(uint32_t section) const {
    const uint64_t begin = manifest.sections[section].offset_bytes + manifest.sections[section].size_bytes;
    std::array<std::byte, kSectionAlign> padding;
    const auto bytes = std::span(padding).first(f12::align_up(begin, kSectionAlign) - begin);
    WEIGHTD_RETURN_IF_ERROR(pread_full(fd.get(), bytes, begin, name));
    const auto bad = std::find_if(bytes.begin(), bytes.end(), [](std::byte b) { return b != std::byte{0}; });
    return bad == bytes.end() ? kAllZero : begin + static_cast<uint64_t>(bad - bytes.begin());
  }
};

BundleReader::BundleReader(std::unique_ptr<State> state) : state_(std::move(state)) {}
BundleReader::BundleReader(BundleReader&&) noexcept = default;
BundleReader& BundleReader::operator=(BundleReader&&) noexcept = default;
BundleReader::~BundleReader() = default;

Result<BundleReader> BundleReader::open(const std::string& path) {
  // O_NONBLOCK: a FIFO must not hang us; open_fd() refuses what is no regular file.
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd.valid()) return status_from_errno(errno, printable(path));
  return open_fd(std::move(fd), path);
}

Result<BundleReader> BundleReader::open_fd(UniqueFd fd, std::string name) {
  auto state = std::make_unique<State>();
  state->name = printable(name);
  state->fd = std::move(fd);
  if (::fstat(state->fd.get(), &state->opened) != 0) return status_from_errno(errno, state->name);
  if (!S_ISREG(state->opened.st_mode)) return Status::invalid_argument(state->name + ": not a regular file");
  state->file_bytes = static_cast<uint64_t>(state->opened.st_size);
  WEIGHTD_RETURN_IF_ERROR(state->read_manifest());
  return BundleReader(std::move(state));
}

const Manifest& BundleReader::manifest() const { return state_->manifest; }
const Sha256& BundleReader::content_id() const { return state_->content_id; }
uint64_t BundleReader::file_bytes() const { return state_->file_bytes; }
const std::string& BundleReader::name() const { return state_->name; }
uint64_t BundleReader::pool_base(uint32_t storage) const { return state_->pool_bases[storage]; }

const Residency* BundleReader::residency(std::string_view form) const {
  for (const Residency& residency : state_->manifest.residencies) {
    if (residency.form == form) return &residency;
  }
  return nullptr;
}

Status BundleReader::read(uint32_t section, uint64_t offset_bytes, std::span<std::byte> out) const {
  if (section >= state_->manifest.sections.size()) {
    return Status::invalid_argument(state_->name + ": no section " + std::to_string(section));
  }
  const Section& from = state_->manifest.sections[section];
  if (offset_bytes > from.size_bytes || out.size() > from.size_bytes - offset_bytes) {
    return Status::invalid_argument(state_->name + ": " + describe_section(section) + ": " + std::to_string(out.size()) +
                                    " bytes at " + std::to_string(offset_bytes) + " are outside its " +
                                    std::to_string(from.size_bytes));
  }
  return pread_full(state_->fd.get(), out, from.offset_bytes + offset_bytes, state_->name);
}

std::string BundleReader::describe_section(uint32_t section) const {
  const std::string number = "section " + std::to_string(section);
  for (const Storage& storage : state_->manifest.storages) {
    for (const Plane& plane : storage.planes) {
      if (plane.section == section)
        return number + " (" + std::string(plane_name(plane.kind)) + " of '" + printable(storage.name) + "')";
    }
  }
  for (const SourceFile& source : state_->manifest.sources) {
    if (source.header_section == section) return number + " (header of '" + printable(source.relative_name) + "')";
  }
  return number;
}

Status BundleReader::check_section(uint32_t section, bool deep) const {
  if (section >= state_->manifest.sections.size()) {
    return Status::invalid_argument(state_->name + ": no section " + std::to_string(section));
  }
  const Section& expected = state_->manifest.sections[section];
  Xxh128Stream xxh;
  Sha256Stream sha;
  std::vector<std::byte> buffer(std::min<uint64_t>(kReadStepBytes, expected.size_bytes));
  for (uint64_t done = 0; done < expected.size_bytes;) {
    const auto piece = std::span(buffer).first(std::min<uint64_t>(buffer.size(), expected.size_bytes - done));
    WEIGHTD_RETURN_IF_ERROR(read(section, done, piece));
    xxh.update(piece);
    if (deep) sha.update(piece);
    done += piece.size();
  }
  return check_hashes(section, xxh.digest(), deep ? sha.finish() : expected.sha);
}

Status BundleReader::check_hashes(uint32_t section, const Xxh128& xxh, const Sha256& sha) const {
  const Section& expected = state_->manifest.sections[section];
  const auto refuse = [&](const std::string& why) {
    return Status::corruption(state_->name + ": " + describe_section(section) + ": " + why);
  };
  if (xxh != expected.xxh) return refuse("XXH3-128 is " + to_hex(xxh) + ", the manifest says " + to_hex(expected.xxh));
  if (sha != expected.sha) return refuse("SHA-256 is " + to_hex(sha) + ", the manifest says " + to_hex(expected.sha));
  WEIGHTD_ASSIGN_OR_RETURN(const uint64_t bad, state_->first_bad_padding(section));
  if (bad != State::kAllZero) return refuse("the padding behind it is not zero at offset " + std::to_string(bad));
  return {};
}

Status BundleReader::stream_tensor(const TensorRecord& tensor, int threads,
                                   const std::function<Status(std::span<const std::byte>)>& sink) const {
  const Storage& storage = state_->manifest.storages[tensor.storage];
  const uint64_t pool_bytes =
      storage.encoding == Encoding::kF12 ? state_->manifest.sections[storage.planes[3].section].size_bytes : 0;
  StorageDecoder decoder(
      storage, state_->pool_bases[tensor.storage], pool_bytes,
      [this](uint32_t section, uint64_t offset, std::span<std::byte> out) { return read(section, offset, out); }, threads);
  WEIGHTD_RETURN_IF_ERROR(decoder.load());
  if (!storage.merged) return decoder.stream_all(sink);
  return decoder.stream_rows(tensor.row_begin, tensor.row_begin + tensor.shape[0], sink);
}

Status BundleReader::decode_tensor(const TensorRecord& tensor, std::span<std::byte> out, int threads) const {
  if (out.size() != tensor.logical_bytes) {
    return Status::invalid_argument(state_->name + ": tensor '" + printable(tensor.name) + "' has " +
                                    std::to_string(tensor.logical_bytes) + " bytes, the buffer " + std::to_string(out.size()));
  }
  size_t done = 0;
  return stream_tensor(tensor, threads, [&](std::span<const std::byte> piece) {
    WEIGHTD_CHECK(piece.size() <= out.size() - done);
    std::memcpy(out.data() + done, piece.data(), piece.size());
    done += piece.size();
    return Status();
  });
}

Status BundleReader::check_unchanged() const {
  struct stat now {};
  if (::fstat(state_->fd.get(), &now) != 0) return status_from_errno(errno, state_->name);
  const struct stat& then = state_->opened;
  if (now.st_size == then.st_size && now.st_mtim.tv_sec == then.st_mtim.tv_sec && now.st_mtim.tv_nsec == then.st_mtim.tv_nsec &&
      now.st_ino == then.st_ino) {
    return {};
  }
  return Status::failed_precondition(state_->name + ": the file changed while it was read");
}

}  // namespace weightd::store
