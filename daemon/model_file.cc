// SPDX-License-Identifier: Apache-2.0
#include "daemon/model_file.h"

#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "base/text.h"

namespace weightd::daemon {
namespace {

constexpr int kResolveAttempts = 64;

std::string bundle(const std::string& path) { return "bundle '" + printable(path) + "'"; }

/// `found` was opened with O_PATH, which touches neither FIFOs nor devices.
Result<UniqueFd> reopen_regular(const UniqueFd& found, const std::string& path) {
  struct stat info {};
  if (::fstat(found.get(), &info) != 0) return status_from_errno(errno, bundle(path));
  if (!S_ISREG(info.st_mode)) return Status::invalid_argument(bundle(path) + ": not a regular file");
  const std::string link = "/proc/self/fd/" + std::to_string(found.get());
  UniqueFd file(::open(link.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY));
  if (!file.valid()) return status_from_errno(errno, bundle(path));
  return file;
}

/// What is left of `path` below `folder`, or empty when the text of the path does not lie there.
std::string below(const std::string& folder, const std::string& path) {
  std::string prefix = folder;
  while (prefix.size() > 1 && prefix.back() == '/') prefix.pop_back();
  if (prefix != "/") prefix += '/';
  if (path.compare(0, prefix.size(), prefix) != 0) return "";
  const size_t begin = path.find_first_not_of('/', prefix.size());
  return begin == std::string::npos ? "" : path.substr(begin);
}

UniqueFd open_beneath(const std::string& folder, const std::string& rest) {
  const UniqueFd base(::open(folder.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (!base.valid()) return {};
  open_how how{};
  how.flags = O_PATH | O_CLOEXEC;
  how.resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS;
  // EAGAIN: something was renamed meanwhile and the kernel could not prove that the path stays below.
  for (int attempt = 0; attempt < kResolveAttempts; ++attempt) {
    const long fd = ::syscall(SYS_openat2, base.get(), rest.c_str(), &how, sizeof(how));
    if (fd >= 0) return UniqueFd(static_cast<int>(fd));
    if (errno != EAGAIN) break;
  }
  return {};
}

}  // namespace

Result<UniqueFd> open_model_below(const std::vector<std::string>& folders, const std::string& path) {
  if (path.empty() || path.front() != '/' || path.find('\0') != std::string::npos) {
    return Status::invalid_argument(bundle(path) + ": give an absolute path");
  }
  for (const std::string& folder : folders) {
    const std::string rest = below(folder, path);
    if (rest.empty()) continue;
    const UniqueFd found = open_beneath(folder, rest);
    if (found.valid()) return reopen_regular(found, path);
  }
  return Status::not_found(bundle(path) + ": no such file in the folders that loads are allowed from (model_folders)");
}

Result<UniqueFd> open_model_anywhere(const std::string& path) {
  if (path.empty() || path.front() != '/' || path.find('\0') != std::string::npos) {
    return Status::invalid_argument(bundle(path) + ": give an absolute path");
  }
  const UniqueFd found(::open(path.c_str(), O_PATH | O_CLOEXEC));
  if (!found.valid()) return status_from_errno(errno, bundle(path));
  return reopen_regular(found, path);
}

}  // namespace weightd::daemon
