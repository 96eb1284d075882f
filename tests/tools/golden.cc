// SPDX-License-Identifier: Apache-2.0
#include "tests/tools/golden.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <regex>

namespace weightd::testing {
namespace {

void replace_all(std::string& text, const std::string& from, const std::string& to) {
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size()))
    text.replace(at, from.size(), to);
}

std::string normalised(std::string text, const std::string& folder) {
  if (!folder.empty()) replace_all(text, folder, "$DIR");
  text = std::regex_replace(text, std::regex("[0-9]+\\.[0-9]+\\.[0-9]+ \\([0-9a-z]+\\)"), "$$BUILD");
  text = std::regex_replace(text, std::regex("(weightpack |\"tool_version\": \")[0-9]+\\.[0-9]+\\.[0-9]+"), "$1$$VERSION");
  return std::regex_replace(text, std::regex("[0-9a-f]{64}"), "$$SHA256");
}

}  // namespace

std::string transcript(const Outcome& outcome, const std::string& folder) {
  const std::string end =
      outcome.signal != 0 ? "signal " + std::to_string(outcome.signal) : "exit code " + std::to_string(outcome.exit_code);
  return end + "\n--- stdout\n" + normalised(outcome.out, folder) + "--- stderr\n" + normalised(outcome.err, folder);
}

void expect_golden(const std::string& name, const std::string& transcript) {
  const std::string path = std::string(WEIGHTD_GOLDEN_FOLDER) + "/" + name + ".txt";
  if (std::getenv("WEIGHTD_UPDATE_GOLDEN") != nullptr) {
    std::ofstream(path, std::ios::binary) << transcript;
    return;
  }
  std::ifstream file(path, std::ios::binary);
  ASSERT_TRUE(file.good()) << path << " is missing; WEIGHTD_UPDATE_GOLDEN=1 writes it";
  const std::string expected{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  EXPECT_EQ(transcript, expected) << path;
}

}  // namespace weightd::testing
