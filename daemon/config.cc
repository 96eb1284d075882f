// SPDX-License-Identifier: Apache-2.0
#include "daemon/config.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <stdexcept>

// toml++ 3.3 asserts, and with NDEBUG assumes, that a key begins with a character of a key; "[[[" breaks that. An assertion of the
// parser is therefore an error in the file like others.
namespace weightd::daemon {
namespace {
[[noreturn]] void refuse_toml() {
  throw std::invalid_argument("not valid TOML: a key or table header begins with a wrong character");
}
}  // namespace
}  // namespace weightd::daemon
#undef NDEBUG
#define TOML_ASSERT(expr) ((expr) ? static_cast<void>(0) : weightd::daemon::refuse_toml())
#define TOML_HEADER_ONLY 1
#include <toml++/toml.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <numeric>
#include <set>

#include "base/fd.h"
#include "base/text.h"
#include "ipc/messages.h"

namespace weightd::daemon {
namespace {

using Kind = Option::Kind;
constexpr size_t kMaxSocketPathBytes = 107;  // sun_path holds 108 with its end
constexpr uint64_t kChunkGranularity = uint64_t{2} << 20;

std::string in_quotes(std::string_view text) { return "'" + printable(text) + "'"; }

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return out;
}

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t above = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0 : 1)});
      diagonal = above;
    }
  }
  return row.back();
}

/// "; did you mean 'x'?" for the nearest of `known`, or nothing when none is near.
std::string suggestion(std::string_view key, const std::vector<std::string_view>& known) {
  if (key.size() > 64) return "";
  std::string_view best;
  size_t best_distance = std::max<size_t>(2, key.size() / 3) + 1;
  for (const std::string_view candidate : known) {
    const size_t distance = edit_distance(lower(key), lower(candidate));
    if (distance < best_distance) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best.empty() ? "" : "; did you mean '" + std::string(best) + "'?";
}

std::vector<std::string_view> option_keys() {
  std::vector<std::string_view> keys;
  for (const Option& option : options()) keys.push_back(option.key);
  keys.push_back("model");
  return keys;
}

std::string folder_of(const std::string& file) {
  const size_t slash = file.rfind('/');
  return slash == std::string::npos ? "." : slash == 0 ? "/" : file.substr(0, slash);
}

/// Without ".", ".." and doubled slashes, by the text alone.
std::string absolute(const std::string& path, const std::string& folder) {
  if (path.empty()) return path;
  std::string whole = std::filesystem::path(path.front() == '/' ? path : folder + "/" + path).lexically_normal().string();
  while (whole.size() > 1 && whole.back() == '/') whole.pop_back();
  return whole;
}

Result<std::string> working_folder() {
  std::array<char, 4096> buffer{};
  if (::getcwd(buffer.data(), buffer.size()) == nullptr) return status_from_errno(errno, "the working directory");
  return std::string(buffer.data());
}

// --- one value -----------------------------------------------------------------------------------------------------------

/// A value as it was written, before its option is known to like it.
using Written = std::variant<std::string, bool, int64_t, std::vector<std::string>>;

std::string_view expected_form(Kind kind) {
  switch (kind) {
    case Kind::kText:
    case Kind::kChoice:
    case Kind::kPath:
      return "a string";
    case Kind::kFlag:
      return "true or false";
    case Kind::kCount:
      return "a whole number";
    case Kind::kBytes:
      return "a size such as \"6GiB\" or a whole number of bytes";
    case Kind::kMode:
      return "an octal mode such as \"0660\"";
    case Kind::kNames:
    case Kind::kPaths:
      return "a list of strings";
  }
  return "";
}

Status wrong_form(const Option& option) {
  return Status::invalid_argument("key '" + std::string(option.key) + "' needs " + std::string(expected_form(option.kind)));
}

Status check_range(const Option& option, uint64_t value) {
  if (value >= option.min && value <= option.max) return {};
  return Status::invalid_argument("key '" + std::string(option.key) + "' is " + std::to_string(value) + ", allowed are " +
                                  std::to_string(option.min) + " to " + std::to_string(option.max));
}

Result<uint64_t> number_of(const Option& option, const Written& written) {
  if (const auto* number = std::get_if<int64_t>(&written)) {
    // 660 without quotes would be another mode than everybody means.
    if (option.kind == Kind::kMode) return wrong_form(option);
    if (*number < 0) return Status::invalid_argument("key '" + std::string(option.key) + "' is negative");
    return static_cast<uint64_t>(*number);
  }
  const auto* text = std::get_if<std::string>(&written);
  if (text == nullptr || option.kind == Kind::kCount) return wrong_form(option);
  if (option.kind == Kind::kBytes) {
    auto bytes = parse_bytes(*text);
    if (!bytes.ok()) return bytes.status().with_context("key '" + std::string(option.key) + "'");
    return bytes;
  }
  uint64_t mode = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), mode, 8);
  if (error != std::errc() || end != text->data() + text->size()) return wrong_form(option);
  return mode;
}

Status check_text(const Option& option, const std::string& text) {
  if (text.find('\0') != std::string::npos || !is_utf8(text)) {
    return Status::invalid_argument("key '" + std::string(option.key) + "': NUL or invalid UTF-8 in " + in_quotes(text));
  }
  if (option.kind != Kind::kChoice) return {};
  const std::string choices = "|" + std::string(option.choices) + "|";
  if (!text.empty() && text.find('|') == std::string::npos && choices.find("|" + text + "|") != std::string::npos) return {};
  return Status::invalid_argument("key '" + std::string(option.key) + "' is " + in_quotes(text) + ", allowed are " +
                                  std::string(option.choices));
}

bool keeps_relative(const Option& option, const std::string& text) { return option.key == "log_target" && text == "stderr"; }

Status assign(Config& config, const Option& option, const Written& written, const std::string& folder) {
  if (const auto* member = std::get_if<bool Config::*>(&option.member)) {
    if (!std::holds_alternative<bool>(written)) return wrong_form(option);
    config.** member = std::get<bool>(written);
    return {};
  }
  if (const auto* member = std::get_if<uint64_t Config::*>(&option.member)) {
    WEIGHTD_ASSIGN_OR_RETURN(const uint64_t value, number_of(option, written));
    WEIGHTD_RETURN_IF_ERROR(check_range(option, value));
    config.** member = value;
    return {};
  }
  if (const auto* member = std::get_if<std::string Config::*>(&option.member)) {
    const auto* text = std::get_if<std::string>(&written);
    if (text == nullptr) return wrong_form(option);
    WEIGHTD_RETURN_IF_ERROR(check_text(option, *text));
    config.** member = option.kind == Kind::kPath && !keeps_relative(option, *text) ? absolute(*text, folder) : *text;
    return {};
  }
  const auto* list = std::get_if<std::vector<std::string>>(&written);
  if (list == nullptr) return wrong_form(option);
  std::vector<std::string> values;
  for (const std::string& text : *list) {
    if (text.empty()) return Status::invalid_argument("key '" + std::string(option.key) + "' has an empty entry");
    WEIGHTD_RETURN_IF_ERROR(check_text(option, text));
    values.push_back(option.kind == Kind::kPaths ? absolute(text, folder) : text);
  }
  config.*std::get<std::vector<std::string> Config::*>(option.member) = std::move(values);
  return {};
}

/// The value of an environment variable or a command line argument, in the form that the option's kind asks for.
Result<Written> written_from_text(const Option& option, const std::string& text) {
  switch (option.kind) {
    case Kind::kFlag:
      if (text == "true") return Written(true);
      if (text == "false") return Written(false);
      return wrong_form(option);
    case Kind::kCount: {
      uint64_t value = 0;
      const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
      if (text.empty() || error != std::errc() || end != text.data() + text.size() || value > INT64_MAX) return wrong_form(option);
      return Written(static_cast<int64_t>(value));
    }
    case Kind::kNames:
    case Kind::kPaths: {
      std::vector<std::string> parts;
      const char separator = option.kind == Kind::kPaths ? ':' : ',';
      for (size_t begin = 0; begin < text.size();) {
        const size_t end = std::min(text.find(separator, begin), text.size());
        parts.push_back(text.substr(begin, end - begin));
        begin = end + 1;
      }
      return Written(std::move(parts));
    }
    default:
      return Written(text);
  }
}

// --- the file ------------------------------------------------------------------------------------------------------------

std::string place(const std::string& file, const toml::source_region& region) {
  return printable(file) + ":" + std::to_string(region.begin.line);
}

std::optional<Written> written_from_node(const toml::node& node) {
  if (const auto* text = node.as_string()) return Written(text->get());
  if (const auto* flag = node.as_boolean()) return Written(flag->get());
  if (const auto* number = node.as_integer()) return Written(number->get());
  const auto* array = node.as_array();
  if (array == nullptr) return std::nullopt;
  std::vector<std::string> list;
  for (const toml::node& item : *array) {
    const auto* text = item.as_string();
    if (text == nullptr) return std::nullopt;
    list.push_back(text->get());
  }
  return Written(std::move(list));
}

Status parse_model(const toml::node& node, const std::string& file, EffectiveConfig& config) {
  const auto* table = node.as_table();
  const std::string where = place(file, node.source()) + ": [[model]]";
  if (table == nullptr) return Status::invalid_argument(where + ": needs keys 'name' and 'path'");
  ModelEntry entry;
  for (const auto& [key, value] : *table) {
    const std::string key_where = place(file, key.source()) + ": ";
    std::string* target = key == "name" ? &entry.name : key == "path" ? &entry.path : key == "device" ? &entry.device : nullptr;
    if (target == nullptr) {
      return Status::invalid_argument(key_where + "unknown key " + in_quotes(key.str()) + " in [[model]]" +
                                      suggestion(key.str(), {"name", "path", "device"}));
    }
    const auto* text = value.as_string();
    if (text == nullptr) return Status::invalid_argument(key_where + "key '" + std::string(key.str()) + "' needs a string");
    *target = text->get();
    if (target->find('\0') != std::string::npos) return Status::invalid_argument(key_where + "NUL in " + in_quotes(*target));
  }
  if (entry.name.empty() || entry.path.empty()) return Status::invalid_argument(where + ": needs keys 'name' and 'path'");
  if (entry.name.size() > ipc::kMaxModelNameBytes || printable(entry.name, entry.name.size() + 1) != entry.name) {
    return Status::invalid_argument(where + ": bad model name " + in_quotes(entry.name));
  }
  entry.path = absolute(entry.path, folder_of(file));
  for (const ModelEntry& other : config.values.models) {
    if (other.name == entry.name && other.device == entry.device) {
      return Status::invalid_argument(where + ": model " + in_quotes(entry.name) + " is listed twice");
    }
  }
  config.values.models.push_back(std::move(entry));
  return {};
}

Status parse_models(const toml::node& node, const toml::key& key, const std::string& file, EffectiveConfig& config) {
  const auto* array = node.as_array();
  if (array == nullptr) return Status::invalid_argument(place(file, key.source()) + ": 'model' is a list: write [[model]]");
  for (const toml::node& item : *array) WEIGHTD_RETURN_IF_ERROR(parse_model(item, file, config));
  return {};
}

Status apply_table(const toml::table& table, const std::string& file, EffectiveConfig& config) {
  const std::string folder = folder_of(file);
  for (const auto& [key, value] : table) {
    if (key == "model") {
      WEIGHTD_RETURN_IF_ERROR(parse_models(value, key, file, config));
      continue;
    }
    const std::string where = place(file, key.source());
    const Option* option = find_option(key.str());
    if (option == nullptr) {
      return Status::invalid_argument(where + ": unknown key " + in_quotes(key.str()) + suggestion(key.str(), option_keys()));
    }
    const auto written = written_from_node(value);
    const Status status = written ? assign(config.values, *option, *written, folder) : wrong_form(*option);
    if (!status.ok()) return status.with_context(where);
    config.origins[static_cast<size_t>(option - options().data())] = where;
  }
  return {};
}

Result<std::string> read_file(const std::string& path) {
  const std::string name = "configuration file " + in_quotes(path);
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!fd.valid()) return status_from_errno(errno, name);
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return status_from_errno(errno, name);
  if (!S_ISREG(info.st_mode)) return Status::invalid_argument(name + ": not a regular file");
  if (static_cast<uint64_t>(info.st_size) > kMaxConfigBytes) {
    return Status::invalid_argument(name + ": " + std::to_string(info.st_size) + " bytes, at most " +
                                    std::to_string(kMaxConfigBytes) + " are allowed");
  }
  std::string text(static_cast<size_t>(info.st_size), '\0');
  WEIGHTD_RETURN_IF_ERROR(pread_full(fd.get(), std::as_writable_bytes(std::span(text)), 0, name));
  return text;
}

// --- the whole -----------------------------------------------------------------------------------------------------------

Status check_socket_path(std::string_view key, const std::string& path) {
  if (path.empty()) return Status::invalid_argument("key '" + std::string(key) + "' is empty");
  if (path.size() <= kMaxSocketPathBytes) return {};
  return Status::invalid_argument("key '" + std::string(key) + "': the path has " + std::to_string(path.size()) +
                                  " bytes, a Unix socket's path has at most " + std::to_string(kMaxSocketPathBytes));
}

Status check_whole(const EffectiveConfig& config) {
  const Config& values = config.values;
  WEIGHTD_RETURN_IF_ERROR(check_socket_path("data_socket", values.data_socket));
  WEIGHTD_RETURN_IF_ERROR(check_socket_path("control_socket", values.control_socket));
  if (values.data_socket == values.control_socket) {
    return Status::invalid_argument("keys 'data_socket' and 'control_socket' are the same path " + in_quotes(values.data_socket));
  }
  if (values.chunk_bytes % kChunkGranularity != 0) {
    return Status::invalid_argument("key 'chunk_bytes' is " + std::to_string(values.chunk_bytes) + ", not a multiple of 2 MiB");
  }
  if (values.log_target.empty()) return Status::invalid_argument("key 'log_target' is empty");
  return {};
}

Status apply_text(EffectiveConfig& config, const Option& option, const std::string& text, const std::string& folder,
                  const std::string& origin) {
  WEIGHTD_ASSIGN_OR_RETURN(const Written written, written_from_text(option, text));
  WEIGHTD_RETURN_IF_ERROR(assign(config.values, option, written, folder));
  config.origins[static_cast<size_t>(&option - options().data())] = origin;
  return {};
}

Status apply_file(const std::optional<std::string>& explicit_file, const std::string& folder, EffectiveConfig& config) {
  const std::string file = absolute(explicit_file.value_or(std::string(kDefaultConfigFile)), folder);
  auto text = read_file(file);
  if (!text.ok() && text.status().code() == StatusCode::kNotFound && !explicit_file) return {};
  if (!text.ok()) return text.status();
  config.file = file;
  return parse_config(*text, file, config);
}

std::string variable_of(const Option& option) {
  std::string name = "WEIGHTD_" + std::string(option.key);
  for (char& c : name) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return name;
}

std::string toml_string(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') out += '\\';
    if (byte < 0x20 || byte == 0x7F) {
      std::array<char, 8> escape{};
      std::snprintf(escape.data(), escape.size(), "\\u%04X", byte);
      out += escape.data();
    } else {
      out += c;
    }
  }
  return out + "\"";
}

/// TOML 1.0 allows characters beyond ASCII in strings and comments only. toml++ 3.3 is undefined on some of them elsewhere, so they
/// are refused before it sees the text. Where this scan and the parser could differ, the parser has met its first error already.
class AsciiOutsideStrings {
 public:
  explicit AsciiOutsideStrings(std::string_view text) : text_(text) {
    constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";
    if (text_.substr(0, kByteOrderMark.size()) == kByteOrderMark) at_ = kByteOrderMark.size();
  }

  /// The number of the first line that breaks the rule; 0: none.
  size_t first_bad_line() {
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (static_cast<unsigned char>(c) >= 0x80) {
        return 1 + static_cast<size_t>(std::count(text_.begin(), text_.begin() + static_cast<std::ptrdiff_t>(at_), '\n'));
      }
      if (c == '#') {
        at_ = std::min(text_.find('\n', at_), text_.size());
      } else if (c == '"' || c == '\'') {
        skip_string(c);
      } else {
        ++at_;
      }
    }
    return 0;
  }

 private:
  void skip_string(char quote) {
    const std::string three(3, quote);
    const bool many_lines = text_.compare(at_, 3, three) == 0;
    at_ += many_lines ? 3 : 1;
    while (at_ < text_.size()) {
      if (many_lines ? text_.compare(at_, 3, three) == 0 : text_[at_] == quote || text_[at_] == '\n') break;
      at_ += quote == '"' && text_[at_] == '\\' ? 2 : 1;
    }
    // Up to two quotes of the text itself may stand before the closing three.
    for (int quotes = many_lines ? 5 : 1; quotes > 0 && at_ < text_.size() && text_[at_] == quote; --quotes) ++at_;
  }

  std::string_view text_;
  size_t at_ = 0;
};

}  // namespace

Result<uint64_t> parse_bytes(std::string_view text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  std::string_view unit = text.substr(static_cast<size_t>(end - text.data()));
  while (!unit.empty() && unit.front() == ' ') unit.remove_prefix(1);
  constexpr std::array<std::string_view, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  const auto found = unit.empty() ? kUnits.begin() : std::find(kUnits.begin(), kUnits.end(), unit);
  if (error != std::errc() || found == kUnits.end()) {
    return Status::invalid_argument("size " + in_quotes(text) + ": write a whole number and B, KiB, MiB, GiB or TiB");
  }
  const auto shift = static_cast<unsigned>(10 * (found - kUnits.begin()));
  if (value > (UINT64_MAX >> shift)) return Status::invalid_argument("size " + in_quotes(text) + " is too large");
  return value << shift;
}

Status parse_config(std::string_view text, const std::string& file_name, EffectiveConfig& config) {
  if (config.origins.empty()) config.origins.assign(options().size(), "built-in");
  if (const size_t line = AsciiOutsideStrings(text).first_bad_line(); line != 0) {
    return Status::invalid_argument(printable(file_name) + ":" + std::to_string(line) +
                                    ": a character beyond ASCII stands outside of strings and comments");
  }
  try {
    const toml::table table = toml::parse(text, file_name);
    return apply_table(table, file_name, config);
  } catch (const toml::parse_error& error) {
    return Status::invalid_argument(place(file_name, error.source()) + ": " + printable(error.description()));
  } catch (const std::exception& error) {
    return Status::invalid_argument(printable(file_name) + ": " + printable(error.what()));
  }
}

Result<EffectiveConfig> load_config(const ConfigSources& sources) {
  WEIGHTD_ASSIGN_OR_RETURN(const std::string folder, working_folder());
  EffectiveConfig config;
  config.origins.assign(options().size(), "built-in");
  WEIGHTD_RETURN_IF_ERROR(apply_file(sources.file, folder, config));
  for (const Option& option : options()) {
    const std::string variable = variable_of(option);
    const char* text = sources.environment ? sources.environment(variable) : nullptr;
    if (text == nullptr) continue;
    const Status status = apply_text(config, option, text, folder, "environment");
    if (!status.ok()) return status.with_context("environment variable " + variable);
  }
  for (const auto& [key, text] : sources.command_line) {
    const Option* option = find_option(key);
    if (option == nullptr) {
      return Status::invalid_argument("command line: unknown key " + in_quotes(key) + suggestion(key, option_keys()));
    }
    const Status status = apply_text(config, *option, text, folder, "command line");
    if (!status.ok()) return status.with_context("command line");
  }
  WEIGHTD_RETURN_IF_ERROR(check_whole(config));
  return config;
}

std::string print_value(const Config& config, const Option& option) {
  if (const auto* flag = std::get_if<bool Config::*>(&option.member)) return config.**flag ? "true" : "false";
  if (const auto* text = std::get_if<std::string Config::*>(&option.member)) return toml_string(config.**text);
  if (const auto* number = std::get_if<uint64_t Config::*>(&option.member)) {
    if (option.kind != Kind::kMode) return std::to_string(config.**number);
    std::array<char, 16> octal{};
    std::snprintf(octal.data(), octal.size(), "\"%04o\"", static_cast<unsigned>(config.**number));
    return octal.data();
  }
  std::string out;
  for (const std::string& item : config.*std::get<std::vector<std::string> Config::*>(option.member)) {
    out += (out.empty() ? "" : ", ") + toml_string(item);
  }
  return "[" + out + "]";
}

std::string print_config(const EffectiveConfig& config) {
  std::string out;
  for (size_t i = 0; i < options().size(); ++i) {
    const Option& option = options()[i];
    out += std::string(option.key) + " = " + print_value(config.values, option) + "  # " + config.origins[i] + "\n";
  }
  for (const ModelEntry& model : config.values.models) {
    out += "\n[[model]]\nname = " + toml_string(model.name) + "\npath = " + toml_string(model.path) + "\n";
    if (!model.device.empty()) out += "device = " + toml_string(model.device) + "\n";
  }
  return out;
}

ConfigChanges compare_configs(const Config& running, const Config& wanted) {
  ConfigChanges changes;
  for (const Option& option : options()) {
    if (print_value(running, option) == print_value(wanted, option)) continue;
    (option.reloadable ? changes.applied : changes.need_restart).emplace_back(option.key);
  }
  if (running.models != wanted.models) changes.applied.emplace_back("model");
  return changes;
}

}  // namespace weightd::daemon
