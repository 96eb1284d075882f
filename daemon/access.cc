// SPDX-License-Identifier: Apache-2.0
#include "daemon/access.h"

#include <grp.h>
#include <pwd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <optional>

#include "base/text.h"

namespace weightd::daemon {
namespace {

constexpr uint32_t kOverflowId = 65534;
constexpr size_t kMaxEntryBytes = size_t{1} << 20;

std::optional<uint32_t> decimal_id(const std::string& text) {
  uint32_t id = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), id);
  if (text.empty() || error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return id;
}

/// Calls a getXXnam_r function with a buffer that grows until it suffices.
template <typename Entry, typename Lookup, typename Id>
std::optional<uint32_t> look_up(const std::string& name, Lookup lookup, Id id_of) {
  std::vector<char> buffer(1024);
  for (;;) {
    Entry entry{};
    Entry* found = nullptr;
    const int error = lookup(name.c_str(), &entry, buffer.data(), buffer.size(), &found);
    if (error == ERANGE && buffer.size() < kMaxEntryBytes) {
      buffer.resize(buffer.size() * 2);
      continue;
    }
    if (found == nullptr) return std::nullopt;
    return id_of(entry);
  }
}

std::optional<uint32_t> user_id(const std::string& name) {
  if (const auto id = decimal_id(name)) return id;
  return look_up<passwd>(name, ::getpwnam_r, [](const passwd& entry) { return entry.pw_uid; });
}

std::optional<uint32_t> group_id(const std::string& name) {
  if (const auto id = decimal_id(name)) return id;
  return look_up<group>(name, ::getgrnam_r, [](const group& entry) { return entry.gr_gid; });
}

bool may_give_to(uint32_t gid) {
  if (::geteuid() == 0 || ::getegid() == gid) return true;
  const int count = ::getgroups(0, nullptr);
  if (count <= 0) return false;
  std::vector<gid_t> groups(static_cast<size_t>(count));
  const int got = ::getgroups(count, groups.data());
  return got > 0 && std::find(groups.begin(), groups.begin() + got, gid) != groups.begin() + got;
}

}  // namespace

bool AccessList::allows(const ipc::Peer& peer) const {
  if (peer.uid == kOverflowId) return false;
  if (everybody || peer.uid == 0 || peer.uid == ::geteuid() || users.count(peer.uid) > 0) return true;
  if (groups.count(peer.gid) > 0) return true;
  return std::any_of(peer.groups.begin(), peer.groups.end(), [&](uint32_t gid) { return groups.count(gid) > 0; });
}

Result<AccessList> make_access_list(const std::string& what, const std::vector<std::string>& users,
                                    const std::vector<std::string>& groups, const std::vector<std::string>& fallback_groups) {
  AccessList list;
  for (const std::string& name : users) {
    if (name == "*") {
      list.everybody = true;
      continue;
    }
    const auto id = user_id(name);
    if (!id) return Status::not_found("key '" + what + "_users': no user '" + printable(name) + "' on this machine");
    list.users.insert(*id);
  }
  for (const std::string& name : groups.empty() ? fallback_groups : groups) {
    const auto id = group_id(name);
    if (id && *id != kOverflowId) list.groups.insert(*id);
    if (!id && !groups.empty())
      return Status::not_found("key '" + what + "_groups': no group '" + printable(name) + "' on this machine");
  }
  return list;
}

Result<int64_t> socket_group(const std::string& what, const std::string& group, const std::string& automatic) {
  if (group.empty()) return int64_t{-1};
  const auto id = group_id(group == "auto" ? automatic : group);
  if (group == "auto") return id && may_give_to(*id) ? int64_t{*id} : int64_t{-1};
  if (!id) return Status::not_found("key '" + what + "_socket_group': no group '" + printable(group) + "' on this machine");
  return int64_t{*id};
}

}  // namespace weightd::daemon
