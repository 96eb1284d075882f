// SPDX-License-Identifier: Apache-2.0
#include "tools/bench/selection.h"

#include <algorithm>
#include <charconv>
#include <system_error>

#include "base/text.h"

namespace weightd::tools {
namespace {

constexpr uint64_t kMaxTokens = 1'048'576;

std::vector<std::string> words_of(std::string_view list) {
  std::vector<std::string> words;
  for (size_t at = 0; at <= list.size();) {
    const size_t end = std::min(list.find(',', at), list.size());
    words.emplace_back(list.substr(at, end - at));
    at = end + 1;
  }
  return words;
}

bool has(const std::vector<std::string>& words, std::string_view word) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

/// The words of `list`, each of which is in `known`.
Result<std::vector<std::string>> known_words(std::string_view list, std::string_view known, std::string_view option) {
  std::vector<std::string> words = words_of(list);
  const std::vector<std::string> allowed = words_of(known);
  for (const std::string& word : words) {
    if (!has(allowed, word)) {
      return Status::invalid_argument(std::string(option) + ": '" + printable(word) + "' is not one of " + std::string(known));
    }
  }
  return words;
}

template <typename Number>
bool parse_number(const std::string& word, Number least, Number most, Number* value) {
  const char* end = word.data() + word.size();
  const auto [stop, error] = std::from_chars(word.data(), end, *value);
  return error == std::errc() && stop == end && *value >= least && *value <= most;
}

}  // namespace

const std::vector<BenchShape>& bench_shapes() {
  static const std::vector<BenchShape> shapes = {
      {"llama-3.1-8b", "qkv", 6144, 4096},    {"llama-3.1-8b", "o", 4096, 4096},         {"llama-3.1-8b", "gate_up", 28672, 4096},
      {"llama-3.1-8b", "down", 4096, 14336},  {"llama-3.1-8b", "head", 128256, 4096},    {"llama-3.1-70b", "qkv", 10240, 8192},
      {"llama-3.1-70b", "o", 8192, 8192},     {"llama-3.1-70b", "gate_up", 57344, 8192}, {"llama-3.1-70b", "down", 8192, 28672},
      {"llama-3.1-70b", "head", 128256, 8192}};
  return shapes;
}

Result<std::vector<BenchShape>> select_shapes(std::string_view model, std::string_view names) {
  WEIGHTD_ASSIGN_OR_RETURN(const std::vector<std::string> wanted, known_words(names, kDefaultShapes, "--shapes"));
  std::vector<BenchShape> selected;
  for (const BenchShape& shape : bench_shapes()) {
    if ((model == "all" || model == shape.model) && has(wanted, shape.name)) selected.push_back(shape);
  }
  if (selected.empty()) return Status::invalid_argument("--model: there is no '" + printable(model) + "'");
  return selected;
}

Result<std::vector<uint64_t>> parse_tokens(std::string_view list) {
  std::vector<uint64_t> tokens;
  for (const std::string& word : words_of(list)) {
    uint64_t value = 0;
    if (!parse_number<uint64_t>(word, 1, kMaxTokens, &value)) {
      return Status::invalid_argument("--tokens: '" + printable(word) + "' is not a whole number from 1 to " +
                                      std::to_string(kMaxTokens));
    }
    tokens.push_back(value);
  }
  std::sort(tokens.begin(), tokens.end());
  tokens.erase(std::unique(tokens.begin(), tokens.end()), tokens.end());
  return tokens;
}

Result<std::vector<std::string>> parse_ops(std::string_view list) { return known_words(list, kDefaultOps, "--op"); }

Result<std::vector<double>> parse_escapes(std::string_view list) {
  std::vector<double> rates;
  if (list.empty()) return rates;
  for (const std::string& word : words_of(list)) {
    double value = 0;
    if (!parse_number(word, 0.0, 1.0, &value)) {
      return Status::invalid_argument("--escapes: '" + printable(word) + "' is not a share from 0 to 1");
    }
    rates.push_back(value);
  }
  return rates;
}

}  // namespace weightd::tools
