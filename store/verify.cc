// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <memory>
#include <unordered_map>
#include <utility>

#include "base/text.h"
#include "store/difference.h"
#include "store/manifest.h"
#include "store/pack.h"
#include "store/storage_decoder.h"
#include "store/worker.h"

namespace weightd::store {
namespace {

std::string in_quotes(std::string_view name) { return "'" + printable(name) + "'"; }

// The model's tensors of a checkpoint, by name.
class Original {
 public:
  static Result<Original> open(const std::string& path) {
    WEIGHTD_ASSIGN_OR_RETURN(Checkpoint checkpoint, open_checkpoint(path));
    return Original(std::move(checkpoint));
  }

  [[nodiscard]] const Checkpoint& checkpoint() const { return checkpoint_; }
  [[nodiscard]] const CheckpointTensor* find(const std::string& name) const {
    const auto found = by_name_.find(name);
    return found == by_name_.end() ? nullptr : &checkpoint_.tensors[found->second];
  }

  // The same names, dtypes and shapes on both sides.
  Status check_tensors(const Manifest& manifest) const {
    size_t indexed = 0;
    for (const TensorRecord& tensor : manifest.tensors) {
      if (!tensor.indexed) continue;
      ++indexed;
      const CheckpointTensor* original = find(tensor.name);
      if (original == nullptr) return differ(tensor.name, "is not in the checkpoint");
      const SafetensorsEntry& entry = checkpoint_.entry(*original);
      if (entry.dtype != tensor.dtype || entry.shape != tensor.shape) {
        return differ(tensor.name, "is " + std::string(dtype_name(tensor.dtype)) + " " + shape_to_string(tensor.shape) +
                                       " in the bundle, " + std::string(dtype_name(entry.dtype)) + " " +
                                       shape_to_string(entry.shape) + " in the checkpoint");
      }
    }
    if (indexed == by_name_.size()) return {};
    return report_missing(manifest);
  }

 private:
  explicit Original(Checkpoint checkpoint) : checkpoint_(std::move(checkpoint)) {
    for (uint32_t i = 0; i < checkpoint_.tensors.size(); ++i) {
      if (checkpoint_.tensors[i].indexed) by_name_.emplace(checkpoint_.entry(checkpoint_.tensors[i]).name, i);
    }
  }

  static Status differ(const std::string& name, const std::string& how) {
    return Status::corruption("bundle and checkpoint differ: tensor " + in_quotes(name) + " " + how);
  }

  Status report_missing(const Manifest& manifest) const {
    std::unordered_map<std::string_view, bool> stored;
    for (const TensorRecord& tensor : manifest.tensors) {
      if (tensor.indexed) stored.emplace(tensor.name, true);
    }
    for (const CheckpointTensor& tensor : checkpoint_.tensors) {
      const std::string& name = checkpoint_.entry(tensor).name;
      if (tensor.indexed && stored.count(name) == 0) return differ(name, "is not in the bundle");
    }
    return {};
  }

  Checkpoint checkpoint_;
  std::unordered_map<std::string, uint32_t> by_name_;
};

// The hashes of one section that is read from the front.
struct SectionHashes {
  Xxh128Stream xxh;
  Sha256Stream sha;
};

// One tensor whose bytes pass by: [begin, end) of its storage's bytes.
struct Passing {
  const TensorRecord* tensor;
  uint64_t begin, end;
  const CheckpointTensor* original;  // null: not compared
  Xxh128Stream hash;
};

class Verifier {
 public:
  Verifier(const BundleReader& bundle, const Original* original, bool deep, int threads, const Progress& progress)
      : bundle_(bundle), manifest_(bundle.manifest()), original_(original), deep_(deep), threads_(threads), progress_(progress) {
    for (const Section& section : manifest_.sections) total_bytes_ += section.size_bytes;
    if (const Residency* fast = bundle.residency(kFastForm)) {
      for (const Placement& placement : fast->placements) {
        offset_of_.emplace(section_of(placement), placement.arena_offset_bytes);
      }
    }
  }

  Result<VerifyReport> run() {
    for (const SourceFile& source : manifest_.sources) WEIGHTD_RETURN_IF_ERROR(check_header(source));
    std::vector<std::vector<uint32_t>> tensors_of(manifest_.storages.size());
    for (uint32_t t = 0; t < manifest_.tensors.size(); ++t) tensors_of[manifest_.tensors[t].storage].push_back(t);
    for (uint32_t s = 0; s < manifest_.storages.size(); ++s) {
      if (Status sound = check_storage(s, tensors_of[s]); !sound.ok()) return blame_section(s, std::move(sound));
    }
    WEIGHTD_RETURN_IF_ERROR(check_blocks());
    report_.sections = manifest_.sections.size();
    report_.tensors = manifest_.tensors.size();
    return report_;
  }

 private:
  uint32_t section_of(const Placement& placement) const {
    for (const Plane& plane : manifest_.storages[placement.storage].planes) {
      if (plane.kind == placement.kind) return plane.section;
    }
    WEIGHTD_CHECK(false);  // validated when the bundle was opened
  }

  Status add_progress(uint64_t bytes) {
    report_.bytes += bytes;
    if (progress_ && !progress_(report_.bytes, total_bytes_)) return Status::cancelled("verifying was cancelled");
    return {};
  }

  Status check_header(const SourceFile& source) {
    WEIGHTD_RETURN_IF_ERROR(bundle_.check_section(source.header_section, deep_));
    const uint64_t size = manifest_.sections[source.header_section].size_bytes;
    if (!source.is_index) {
      uint64_t json_bytes = 0;
      WEIGHTD_RETURN_IF_ERROR(bundle_.read(source.header_section, 0, std::as_writable_bytes(std::span(&json_bytes, 1))));
      if (json_bytes != size - 8) {
        return Status::corruption(bundle_.name() + ": header of " + in_quotes(source.relative_name) + " says " +
                                  std::to_string(json_bytes) + " bytes, its section holds " + std::to_string(size - 8));
      }
    }
    return add_progress(size);
  }

  // A damaged section is the better explanation of whatever went wrong with its contents.
  Status blame_section(uint32_t storage, Status status) const {
    if (status.code() != StatusCode::kCorruption) return status;
    for (const Plane& plane : manifest_.storages[storage].planes)
      WEIGHTD_RETURN_IF_ERROR(bundle_.check_section(plane.section, deep_));
    return status.message().starts_with(bundle_.name()) ? status : status.with_context(bundle_.name());
  }

  std::vector<Passing> passing_tensors(const Storage& storage, const std::vector<uint32_t>& tensors) const {
    std::vector<Passing> passing;
    for (const uint32_t t : tensors) {
      const TensorRecord& tensor = manifest_.tensors[t];
      const uint64_t begin = storage.merged ? tensor.row_begin * storage.geometry.k * 2 : 0;
      const CheckpointTensor* original = original_ != nullptr && tensor.indexed ? original_->find(tensor.name) : nullptr;
      passing.push_back({&tensor, begin, begin + tensor.logical_bytes, original, Xxh128Stream()});
    }
    return passing;
  }

  Status check_storage(uint32_t index, const std::vector<uint32_t>& tensors) {
    const Storage& storage = manifest_.storages[index];
    const bool coded = storage.encoding == Encoding::kF12;
    std::vector<Passing> passing = passing_tensors(storage, tensors);
    SectionHashes streamed;  // of the raw or codes section
    StorageDecoder decoder(
        storage, bundle_.pool_base(index), coded ? manifest_.sections[storage.planes[3].section].size_bytes : 0,
        [&](uint32_t section, uint64_t offset, std::span<std::byte> out) { return read(storage, section, offset, out, streamed); },
        threads_);
    WEIGHTD_RETURN_IF_ERROR(decoder.load());
    uint64_t done = 0;
    const ByteSink pass_all = [&](std::span<const std::byte> piece) -> Status {
      for (Passing& tensor : passing) WEIGHTD_RETURN_IF_ERROR(pass(tensor, done, piece));
      done += piece.size();
      return {};
    };
    Status decoded = decoder.stream_all(pass_all);
    // Waited for in any case: the task uses what ends with this function.
    if (const Status hashed = hash_worker_.wait(); decoded.ok()) decoded = hashed;
    WEIGHTD_RETURN_IF_ERROR(decoded);
    WEIGHTD_RETURN_IF_ERROR(finish_section(storage.planes[0].section, streamed));
    if (coded) {
      WEIGHTD_RETURN_IF_ERROR(check_loaded(storage.planes[1].section, decoder.windows(), true));
      WEIGHTD_RETURN_IF_ERROR(check_loaded(storage.planes[2].section, decoder.records(), true));
      WEIGHTD_RETURN_IF_ERROR(check_loaded(storage.planes[3].section, decoder.pool(), false));
    }
    for (const Passing& tensor : passing) WEIGHTD_RETURN_IF_ERROR(finish_tensor(tensor));
    return {};
  }

  // Reads for the decoder. The streamed section is hashed beside the decoding of the same bytes, which only reads them too.
  Status read(const Storage& storage, uint32_t section, uint64_t offset, std::span<std::byte> out, SectionHashes& streamed) {
    WEIGHTD_RETURN_IF_ERROR(hash_worker_.wait());
    WEIGHTD_RETURN_IF_ERROR(bundle_.read(section, offset, out));
    WEIGHTD_RETURN_IF_ERROR(add_progress(out.size()));
    if (section != storage.planes[0].section) return {};
    const auto hash = [this, &streamed, section, offset, out] {
      streamed.xxh.update(out);
      if (deep_) streamed.sha.update(out);
      add_to_arena(section, offset, out);
      return Status();
    };
    if (out.size() < kSmallBytes) return hash();
    hash_worker_.start(hash);
    return {};
  }

  void add_to_arena(uint32_t section, uint64_t offset, std::span<const std::byte> data) {
    if (const auto place = offset_of_.find(section); place != offset_of_.end()) arena_.add(place->second + offset, data);
  }

  Status finish_section(uint32_t section, SectionHashes& hashes) const {
    return bundle_.check_hashes(section, hashes.xxh.digest(), deep_ ? hashes.sha.finish() : manifest_.sections[section].sha);
  }

  // Pools come last in the arena; they are added by check_blocks().
  Status check_loaded(uint32_t section, std::span<const std::byte> data, bool fixed_size) {
    WEIGHTD_RETURN_IF_ERROR(bundle_.check_hashes(section, xxh128(data), deep_ ? sha256(data) : manifest_.sections[section].sha));
    if (fixed_size) add_to_arena(section, 0, data);
    return {};
  }

  // The part of `piece`, which begins at byte `offset` of the storage, that belongs to the tensor.
  Status pass(Passing& tensor, uint64_t offset, std::span<const std::byte> piece) {
    const uint64_t begin = std::max(tensor.begin, offset);
    const uint64_t end = std::min(tensor.end, offset + piece.size());
    if (begin >= end) return {};
    const auto own = piece.subspan(begin - offset, end - begin);
    tensor.hash.update(own);
    if (tensor.original == nullptr) return {};
    compared_.resize(own.size());
    WEIGHTD_RETURN_IF_ERROR(original_->checkpoint().read(*tensor.original, begin - tensor.begin, compared_));
    return compare_bits({tensor.tensor->name, tensor.tensor->dtype, tensor.tensor->shape}, begin - tensor.begin, own, compared_);
  }

  Status finish_tensor(const Passing& passing) const {
    const Xxh128 hash = passing.hash.digest();
    if (hash == passing.tensor->logical_xxh) return {};
    return Status::corruption(bundle_.name() + ": tensor " + in_quotes(passing.tensor->name) +
                              ": XXH3-128 of the decoded bytes is " + to_hex(hash) + ", the manifest says " +
                              to_hex(passing.tensor->logical_xxh));
  }

  Status check_blocks() {
    const Residency* fast = bundle_.residency(kFastForm);
    if (fast == nullptr) return {};
    std::vector<std::byte> buffer;
    for (const Placement& placement : fast->placements) {
      if (placement.kind != PlaneKind::kPool) continue;
      buffer.resize(placement.size_bytes);
      WEIGHTD_RETURN_IF_ERROR(bundle_.read(section_of(placement), 0, buffer));
      arena_.add(placement.arena_offset_bytes, buffer);
    }
    const std::vector<uint64_t> hashes = arena_.finish(fast->arena_bytes);
    const auto bad = std::mismatch(hashes.begin(), hashes.end(), fast->block_hashes.begin()).first;
    if (bad == hashes.end()) return {};
    const auto block = static_cast<uint64_t>(bad - hashes.begin());
    return Status::corruption(bundle_.name() + ": block " + std::to_string(block) + " of the resident form" +
                              in_block(*fast, block) + " does not match its hash");
  }

  // " (with 'x')": the first storage in the block.
  std::string in_block(const Residency& residency, uint64_t block) const {
    for (const Placement& placement : residency.placements) {
      if (placement.arena_offset_bytes + placement.size_bytes > block * kBlockBytes) {
        return " (with " + in_quotes(manifest_.storages[placement.storage].name) + ")";
      }
    }
    return "";
  }

  static constexpr size_t kSmallBytes = size_t{1} << 18;

  const BundleReader& bundle_;
  const Manifest& manifest_;
  const Original* original_;
  const bool deep_;
  const int threads_;
  const Progress& progress_;
  uint64_t total_bytes_ = 0;
  VerifyReport report_;
  std::unordered_map<uint32_t, uint64_t> offset_of_;  // arena offset of a resident section
  BlockHasher arena_;
  std::vector<std::byte> compared_;
  Worker hash_worker_;  // last: its tasks use the rest
};

}  // namespace

Result<VerifyReport> verify(const std::string& bundle_path, const std::string& checkpoint_path_or_empty, bool deep, int threads,
                            const Progress& progress) {
  WEIGHTD_ASSIGN_OR_RETURN(const BundleReader bundle, BundleReader::open(bundle_path));
  std::unique_ptr<Original> original;
  if (!checkpoint_path_or_empty.empty()) {
    WEIGHTD_ASSIGN_OR_RETURN(Original opened, Original::open(checkpoint_path_or_empty));
    original = std::make_unique<Original>(std::move(opened));
    WEIGHTD_RETURN_IF_ERROR(original->check_tensors(bundle.manifest()));
  }
  WEIGHTD_ASSIGN_OR_RETURN(const VerifyReport report, Verifier(bundle, original.get(), deep, threads, progress).run());
  WEIGHTD_RETURN_IF_ERROR(bundle.check_unchanged());
  return report;
}

}  // namespace weightd::store
