// SPDX-License-Identifier: Apache-2.0
#include "daemon/config.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <set>

#include "tests/support/safetensors_builder.h"

namespace weightd::daemon {
namespace {

using ::weightd::testing::TempDir;
using ::weightd::testing::write_file;

Result<EffectiveConfig> parse(const std::string& text, const std::string& file = "/etc/weightd/weightd.toml") {
  EffectiveConfig config;
  if (Status status = parse_config(text, file, config); !status.ok()) return status;
  return config;
}
std::string refusal(const std::string& text) {
  const auto config = parse(text);
  return config.ok() ? "accepted" : config.status().message();
}
std::string origin(const EffectiveConfig& config, std::string_view key) {
  return config.origins[static_cast<size_t>(find_option(key) - options().data())];
}

/// load_config with a file of `text`, environment and command line.
struct Sources {
  TempDir folder;
  std::map<std::string, std::string> environment;
  std::vector<std::pair<std::string, std::string>> command_line;

  Result<EffectiveConfig> load(const std::string& text) {
    write_file(folder / "w.toml", text);
    return load_file(folder / "w.toml");
  }
  Result<EffectiveConfig> load_file(std::optional<std::string> file) {
    ConfigSources sources;
    sources.file = std::move(file);
    sources.environment = [this](const std::string& name) -> const char* {
      const auto it = environment.find(name);
      return it == environment.end() ? nullptr : it->second.c_str();
    };
    sources.command_line = command_line;
    return load_config(sources);
  }
};

TEST(Config, EveryKindOfValue) {
  const auto config = parse(R"(
data_socket = "/run/x/data.sock"
data_socket_mode = "0600"
data_users = ["alice", "1001"]
model_folders = ["/models", "more//./sub/../deep/"]
allow_any_path = true
backend = "host"
budget_bytes = "6GiB"
chunk_bytes = 4194304
max_sessions = 7
log_target = "stderr"

[[model]]
name = "llama"
path = "bundles/llama.wpk"

[[model]]
name = "llama"
path = "/abs/other.wpk"
device = "GPU-1"
)");
  ASSERT_TRUE(config.ok()) << config.status().message();
  const Config& c = config->values;
  EXPECT_EQ(c.data_socket, "/run/x/data.sock");
  EXPECT_EQ(c.data_socket_mode, 0600U);
  EXPECT_EQ(c.data_users, (std::vector<std::string>{"alice", "1001"}));
  EXPECT_EQ(c.model_folders, (std::vector<std::string>{"/models", "/etc/weightd/more/deep"}));
  EXPECT_TRUE(c.allow_any_path);
  EXPECT_EQ(c.backend, "host");
  EXPECT_EQ(c.budget_bytes, uint64_t{6} << 30);
  EXPECT_EQ(c.chunk_bytes, uint64_t{4} << 20);
  EXPECT_EQ(c.max_sessions, 7U);
  EXPECT_EQ(c.log_target, "stderr");
  EXPECT_EQ(c.models,
            (std::vector<ModelEntry>{{"llama", "/etc/weightd/bundles/llama.wpk", ""}, {"llama", "/abs/other.wpk", "GPU-1"}}));
  EXPECT_EQ(origin(*config, "max_sessions"), "/etc/weightd/weightd.toml:10");
  EXPECT_EQ(origin(*config, "max_jobs"), "built-in");
}

TEST(Config, CO_132_AMisspeltKeyIsRefusedWithLineAndNearest) {
  EXPECT_EQ(refusal("backend = \"host\"\nmax_sesions = 5\n"),
            "/etc/weightd/weightd.toml:2: unknown key 'max_sesions'; did you mean 'max_sessions'?");
  EXPECT_EQ(refusal("\n\nlog_levl = \"info\"\n"), "/etc/weightd/weightd.toml:3: unknown key 'log_levl'; did you mean 'log_level'?");
  EXPECT_EQ(refusal("Log_Level = \"info\"\n"), "/etc/weightd/weightd.toml:1: unknown key 'Log_Level'; did you mean 'log_level'?");
  EXPECT_EQ(refusal("models = []\n"), "/etc/weightd/weightd.toml:1: unknown key 'models'; did you mean 'model'?");
  EXPECT_EQ(refusal("something_else_entirely = 1\n"), "/etc/weightd/weightd.toml:1: unknown key 'something_else_entirely'");
}

TEST(Config, CO_132_AKeyInTheWrongSectionIsRefused) {
  EXPECT_EQ(refusal("[log]\nlog_level = \"info\"\n").substr(0, 42), "/etc/weightd/weightd.toml:1: unknown key '");
  EXPECT_EQ(refusal("[[model]]\nname = \"m\"\npath = \"p\"\nlog_level = \"info\"\n"),
            "/etc/weightd/weightd.toml:4: unknown key 'log_level' in [[model]]");
  EXPECT_EQ(refusal("[[model]]\nname = \"m\"\npth = \"p\"\n"),
            "/etc/weightd/weightd.toml:3: unknown key 'pth' in [[model]]; did you mean 'path'?");
}

TEST(Config, CO_132_AKeyTwiceIsRefused) {
  const std::string text = refusal("max_jobs = 1\nmax_jobs = 2\n");
  EXPECT_EQ(text.substr(0, 29), "/etc/weightd/weightd.toml:2: ") << text;
  EXPECT_NE(text.find("max_jobs"), std::string::npos) << text;
}

TEST(Config, WrongTypesAndRanges) {
  const std::string at = "/etc/weightd/weightd.toml:1: ";
  EXPECT_EQ(refusal("max_jobs = \"3\"\n"), at + "key 'max_jobs' needs a whole number");
  EXPECT_EQ(refusal("max_jobs = 1.5\n"), at + "key 'max_jobs' needs a whole number");
  EXPECT_EQ(refusal("max_jobs = 0\n"), at + "key 'max_jobs' is 0, allowed are 1 to 64");
  EXPECT_EQ(refusal("max_jobs = 65\n"), at + "key 'max_jobs' is 65, allowed are 1 to 64");
  EXPECT_EQ(refusal("max_jobs = -1\n"), at + "key 'max_jobs' is negative");
  EXPECT_EQ(refusal("data_socket = 5\n"), at + "key 'data_socket' needs a string");
  EXPECT_EQ(refusal("allow_any_path = \"yes\"\n"), at + "key 'allow_any_path' needs true or false");
  EXPECT_EQ(refusal("backend = \"gpu\"\n"), at + "key 'backend' is 'gpu', allowed are auto|host|cuda");
  EXPECT_EQ(refusal("backend = \"auto|host\"\n"), at + "key 'backend' is 'auto|host', allowed are auto|host|cuda");
  EXPECT_EQ(refusal("backend = \"\"\n"), at + "key 'backend' is '', allowed are auto|host|cuda");
  EXPECT_EQ(refusal("data_users = \"alice\"\n"), at + "key 'data_users' needs a list of strings");
  EXPECT_EQ(refusal("data_users = [\"a\", 5]\n"), at + "key 'data_users' needs a list of strings");
  EXPECT_EQ(refusal("data_users = [\"\"]\n"), at + "key 'data_users' has an empty entry");
  EXPECT_EQ(refusal("data_socket_mode = 660\n"), at + "key 'data_socket_mode' needs an octal mode such as \"0660\"");
  EXPECT_EQ(refusal("data_socket_mode = \"0888\"\n"), at + "key 'data_socket_mode' needs an octal mode such as \"0660\"");
  EXPECT_EQ(refusal("data_socket_mode = \"7777\"\n"), at + "key 'data_socket_mode' is 4095, allowed are 0 to 511");
  EXPECT_EQ(refusal("budget_bytes = \"6GB\"\n"),
            at + "key 'budget_bytes': size '6GB': write a whole number and B, KiB, MiB, GiB or TiB");
  EXPECT_EQ(refusal("data_socket = \"/a\\u0000b\"\n"), at + "key 'data_socket': NUL or invalid UTF-8 in '/a\\x00b'");
  EXPECT_EQ(refusal("max_jobs = {a = 1}\n"), at + "key 'max_jobs' needs a whole number");
  EXPECT_EQ(refusal("model = 5\n"), at + "'model' is a list: write [[model]]");
  EXPECT_EQ(refusal("[model]\nname = \"m\"\n"), at + "'model' is a list: write [[model]]");
  EXPECT_EQ(refusal("model = [1]\n"), at + "[[model]]: needs keys 'name' and 'path'");
  EXPECT_EQ(refusal("[[model]]\nname = \"m\"\n"), at + "[[model]]: needs keys 'name' and 'path'");
  EXPECT_EQ(refusal("[[model]]\nname = \"a\\nb\"\npath = \"p\"\n"), at + "[[model]]: bad model name 'a\\nb'");
  EXPECT_EQ(refusal("[[model]]\nname = 5\npath = \"p\"\n"), "/etc/weightd/weightd.toml:2: key 'name' needs a string");
  EXPECT_EQ(refusal("[[model]]\nname = \"m\"\npath = \"p\"\n[[model]]\nname = \"m\"\npath = \"q\"\n"),
            "/etc/weightd/weightd.toml:4: [[model]]: model 'm' is listed twice");
}

TEST(Config, Sizes) {
  EXPECT_EQ(*parse_bytes("0"), 0U);
  EXPECT_EQ(*parse_bytes("4096"), 4096U);
  EXPECT_EQ(*parse_bytes("5B"), 5U);
  EXPECT_EQ(*parse_bytes("2KiB"), 2048U);
  EXPECT_EQ(*parse_bytes("512 MiB"), uint64_t{512} << 20);
  EXPECT_EQ(*parse_bytes("6GiB"), uint64_t{6} << 30);
  EXPECT_EQ(*parse_bytes("3TiB"), uint64_t{3} << 40);
  EXPECT_EQ(*parse_bytes("16777215TiB"), uint64_t{16777215} << 40);
  for (const char* bad : {"", "GiB", "6G", "6gib", "6 GB", "-1", "+1", "1.5GiB", "0x10", "6GiB ", " 6GiB", "6GiBx", "16777216TiB",
                          "99999999999999999999"}) {
    EXPECT_EQ(parse_bytes(bad).status().code(), StatusCode::kInvalidArgument) << bad;
  }
}

TEST(Config, CO_133_CommentsAndWhiteSpace) {
  const auto same = [](const std::string& text) {
    const auto config = parse(text);
    return config.ok() ? std::to_string(config->values.budget_bytes) : config.status().message();
  };
  const std::string value = std::to_string(uint64_t{6} << 30);
  EXPECT_EQ(same("budget_bytes = \"6GiB\" # foo\n"), value);
  EXPECT_EQ(same("budget_bytes\t=\t\"6GiB\"\t# foo\n"), value);
  EXPECT_EQ(same("budget_bytes = \"6GiB\"\r\nmax_jobs = 3\r\n"), value);
  EXPECT_EQ(same("\xef\xbb\xbf"
                 "budget_bytes = \"6GiB\"\n"),
            value);
  EXPECT_EQ(same("budget_bytes = \"6GiB\""), value);  // no line feed at the end
  EXPECT_EQ(same("budget_bytes = 6G # foo\n").substr(0, 29), "/etc/weightd/weightd.toml:1: ");
  const auto paths = parse(
      "model_folders = [\"/m\xc3\xb6"
      "dels/with blank and 100%\"]\n");
  ASSERT_TRUE(paths.ok());
  EXPECT_EQ(paths->values.model_folders.front(),
            "/m\xc3\xb6"
            "dels/with blank and 100%");
}

TEST(Config, BrokenFilesAreRefusedWithTheirLine) {
  EXPECT_EQ(refusal("max_jobs = 1\n= 5\n").substr(0, 29), "/etc/weightd/weightd.toml:2: ");
  EXPECT_EQ(refusal("a = \"\xff\"\n").substr(0, 27), "/etc/weightd/weightd.toml:1");
  EXPECT_NE(refusal(std::string("a = 1\0b = 2\n", 12)), "accepted");
  EXPECT_TRUE(parse("").ok());
  EXPECT_TRUE(parse("\n# nothing\n").ok());
}

TEST(Config, CharactersBeyondAsciiStandInStringsAndCommentsOnly) {
  for (const char* line : {"max\xc9\xa0_jobs = 1", "max_jobs = 1 \xc9\xa0", "log_target = \"\"\"/a\"\"\"\"\" \xc9\xa0"}) {
    EXPECT_EQ(refusal("# \xc9\xa0\n" + std::string(line) + "\n").substr(0, 27), "/etc/weightd/weightd.toml:2") << line;
  }
  for (const char* line : {"log_target = '/\xc9\xa0'", "log_target = \"/\\\"\xc9\xa0\"", "log_target = '''\n/\xc9\xa0'''",
                           "log_target = \"\"\"/\xc9\xa0\"\"\"  # \xc9\xa0"}) {
    EXPECT_TRUE(parse(line).ok()) << line;
  }
}

TEST(Config, WhatTheParserAssertsIsAnErrorInTheFile) {
  EXPECT_NE(refusal("[[[max_jobs = 1\n").find("not valid TOML"), std::string::npos);
  EXPECT_NE(refusal(std::string(64, '[') + "max_jobs = 1\n").find("not valid TOML"), std::string::npos);
}

TEST(Config, CO_120_DeepNestingIsRefused) {
  EXPECT_NE(refusal("model = " + std::string(100'000, '[')), "accepted");
  EXPECT_NE(refusal("model = " + std::string(100'000, '[') + std::string(100'000, ']') + "\n"), "accepted");
}

TEST(Config, AModelMayNameItsTransport) {
  EffectiveConfig config;
  const Status status =
      parse_config("[[model]]\nname = \"a\"\npath = \"a.wpk\"\n[[model]]\nname = \"b\"\npath = \"b.wpk\"\ntransport = \"legacy\"\n",
                   "/etc/weightd/weightd.toml", config);
  ASSERT_TRUE(status.ok()) << status.message();
  ASSERT_EQ(config.values.models.size(), 2U);
  EXPECT_EQ(config.values.models[0].transport, "fd");
  EXPECT_EQ(config.values.models[1].transport, "legacy");
  EXPECT_NE(print_config(config).find("path = \"/etc/weightd/b.wpk\"\ntransport = \"legacy\"\n"), std::string::npos);
  EffectiveConfig wrong;
  EXPECT_EQ(parse_config("[[model]]\nname = \"a\"\npath = \"a.wpk\"\ntransport = \"shm\"\n", "/w.toml", wrong).message(),
            "/w.toml:1: [[model]]: key 'transport' is 'shm', allowed are fd|legacy");
}

TEST(Config, CO_134_EachSourceWinsOverTheOneBefore) {
  Sources s;
  s.environment["WEIGHTD_MAX_JOBS"] = "4";
  s.environment["WEIGHTD_MAX_SESSIONS"] = "44";
  s.command_line = {{"max_sessions", "55"}};
  const auto config = s.load("max_jobs = 3\nmax_sessions = 33\ndrain_timeout_ms = 333\n");
  ASSERT_TRUE(config.ok()) << config.status().message();
  EXPECT_EQ(config->values.max_jobs, 4U);
  EXPECT_EQ(origin(*config, "max_jobs"), "environment");
  EXPECT_EQ(config->values.max_sessions, 55U);
  EXPECT_EQ(origin(*config, "max_sessions"), "command line");
  EXPECT_EQ(config->values.drain_timeout_ms, 333U);
  EXPECT_EQ(origin(*config, "drain_timeout_ms"), s.folder / "w.toml" + ":3");
  // The keys that the file does not name keep their built-in values.
  EXPECT_EQ(config->values.chunk_bytes, Config{}.chunk_bytes);
  EXPECT_EQ(origin(*config, "chunk_bytes"), "built-in");
}

TEST(Config, CO_134_NoFileAndEmptyFile) {
  Sources s;
  ASSERT_TRUE(s.load("").ok());
  const auto missing = s.load_file(s.folder / "missing.toml");
  EXPECT_EQ(missing.status().code(), StatusCode::kNotFound);
  EXPECT_NE(missing.status().message().find("missing.toml"), std::string::npos);
  if (::access(std::string(kDefaultConfigFile).c_str(), F_OK) != 0) {
    const auto none = s.load_file(std::nullopt);
    ASSERT_TRUE(none.ok());
    EXPECT_EQ(none->file, "");
  }
}

TEST(Config, ValuesAsText) {
  Sources s;
  s.environment = {{"WEIGHTD_DATA_USERS", "alice,bob"},
                   {"WEIGHTD_MODEL_FOLDERS", "/a:/b c"},
                   {"WEIGHTD_ALLOW_ANY_PATH", "true"},
                   {"WEIGHTD_BUDGET_BYTES", "2GiB"},
                   {"WEIGHTD_CONTROL_SOCKET_MODE", "0600"}};
  const auto config = s.load("");
  ASSERT_TRUE(config.ok()) << config.status().message();
  EXPECT_EQ(config->values.data_users, (std::vector<std::string>{"alice", "bob"}));
  EXPECT_EQ(config->values.model_folders, (std::vector<std::string>{"/a", "/b c"}));
  EXPECT_TRUE(config->values.allow_any_path);
  EXPECT_EQ(config->values.budget_bytes, uint64_t{2} << 30);
  EXPECT_EQ(config->values.control_socket_mode, 0600U);
  for (const auto& [name, value] : std::map<std::string, std::string>{{"WEIGHTD_ALLOW_ANY_PATH", "yes"},
                                                                      {"WEIGHTD_MAX_JOBS", "4x"},
                                                                      {"WEIGHTD_MAX_JOBS", ""},
                                                                      {"WEIGHTD_MAX_JOBS", "99999999999999999999"}}) {
    Sources wrong;
    wrong.environment[name] = value;
    const auto refused = wrong.load("");
    EXPECT_EQ(refused.status().message().substr(0, 21 + name.size()), "environment variable " + name) << value;
  }
  Sources unknown;
  unknown.command_line = {{"max_job", "4"}};
  EXPECT_EQ(unknown.load("").status().message(), "command line: unknown key 'max_job'; did you mean 'max_jobs'?");
}

TEST(Config, CO_129_SocketPathsHaveALimit) {
  Sources s;
  const std::string longest = "/" + std::string(106, 'x');
  EXPECT_TRUE(s.load("data_socket = \"" + longest + "\"\n").ok());
  for (const size_t bytes : {size_t{108}, size_t{200}, size_t{5000}}) {
    const auto config = s.load("data_socket = \"/" + std::string(bytes - 1, 'x') + "\"\n");
    EXPECT_EQ(config.status().message(),
              "key 'data_socket': the path has " + std::to_string(bytes) + " bytes, a Unix socket's path has at most 107");
  }
  EXPECT_EQ(s.load("data_socket = \"\"\n").status().message(), "key 'data_socket' is empty");
  EXPECT_EQ(s.load("data_socket = \"/x\"\ncontrol_socket = \"/y/../x\"\n").status().message(),
            "keys 'data_socket' and 'control_socket' are the same path '/x'");
}

TEST(Config, RulesAcrossKeys) {
  Sources s;
  EXPECT_EQ(s.load("chunk_bytes = \"3MiB\"\n").status().message(), "key 'chunk_bytes' is 3145728, not a multiple of 2 MiB");
  EXPECT_EQ(s.load("log_target = \"\"\n").status().message(), "key 'log_target' is empty");
}

TEST(Config, CO_136_RelativePathsAreTakenFromTheFilesFolder) {
  Sources s;
  const std::string text =
      "data_socket = \"run/d.sock\"\nmodel_folders = [\"models\"]\n[[model]]\nname = \"m\"\npath = \"m.wpk\"\n";
  write_file(s.folder / "etc/w.toml", text);
  std::string results[3];
  const std::string before = std::filesystem::current_path();
  const std::string places[3] = {"/", s.folder.path(), s.folder / "etc"};
  const std::string names[3] = {s.folder / "etc/w.toml", "etc/w.toml", "w.toml"};
  for (int i = 0; i < 3; ++i) {
    std::filesystem::current_path(places[i]);
    const auto config = s.load_file(names[i]);
    std::filesystem::current_path(before);
    ASSERT_TRUE(config.ok()) << config.status().message();
    results[i] = print_config(*config);
    EXPECT_EQ(config->values.data_socket, s.folder / "etc/run/d.sock");
    EXPECT_EQ(config->values.model_folders, std::vector<std::string>{s.folder / "etc/models"});
    EXPECT_EQ(config->values.models.front().path, s.folder / "etc/m.wpk");
  }
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

TEST(Config, OnlyRegularFilesOfSensibleSizeAreRead) {
  Sources s;
  EXPECT_EQ(s.load_file(s.folder.path()).status().code(), StatusCode::kInvalidArgument);
  ASSERT_EQ(::mkfifo((s.folder / "fifo").c_str(), 0600), 0);
  EXPECT_EQ(s.load_file(s.folder / "fifo").status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(s.load_file("/dev/zero").status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(s.load(std::string(kMaxConfigBytes + 1, '\n')).status().code(), StatusCode::kInvalidArgument);
}

TEST(Config, WhatIsPrintedIsAcceptedAndTheSame) {
  Sources s;
  const auto config = s.load(
      "data_users = [\"a\", \"q\\\"uote\\\\\"]\nallow_any_path = true\nbudget_bytes = \"1GiB\"\ndata_socket_mode = \"0640\"\n"
      "log_target = \"log\\u0001file\"\n[[model]]\nname = \"m\"\npath = \"with \\\"quotes\\\"\"\ndevice = \"d\"\n");
  ASSERT_TRUE(config.ok()) << config.status().message();
  const std::string printed = print_config(*config);
  Sources again;
  const auto reread = again.load(printed);
  ASSERT_TRUE(reread.ok()) << reread.status().message() << "\n" << printed;
  const ConfigChanges changes = compare_configs(config->values, reread->values);
  EXPECT_TRUE(changes.applied.empty() && changes.need_restart.empty());
  EXPECT_NE(printed.find("allow_any_path = true  # " + s.folder / "w.toml" + ":2\n"), std::string::npos) << printed;
  EXPECT_NE(printed.find("max_jobs = 2  # built-in\n"), std::string::npos);
}

TEST(Config, ChangesAreSortedByWhetherTheyNeedARestart) {
  Config running, wanted;
  wanted.data_socket = "/other";
  wanted.max_jobs = 7;
  wanted.models.push_back({"m", "/m", ""});
  const ConfigChanges changes = compare_configs(running, wanted);
  EXPECT_EQ(changes.applied, (std::vector<std::string>{"max_jobs", "model"}));
  EXPECT_EQ(changes.need_restart, std::vector<std::string>{"data_socket"});
}

TEST(Config, TheTableIsSound) {
  std::set<std::string_view> keys;
  for (const Option& option : options()) {
    EXPECT_TRUE(keys.insert(option.key).second) << option.key;
    EXPECT_FALSE(option.help.empty()) << option.key;
    EXPECT_EQ(find_option(option.key), &option);
    if (const auto* number = std::get_if<uint64_t Config::*>(&option.member)) {
      const uint64_t value = Config{}.**number;
      EXPECT_TRUE(value >= option.min && value <= option.max) << option.key;
    }
    if (option.kind == Option::Kind::kCount && option.max == uint64_t{24} * 3600 * 1000) {
      EXPECT_EQ(option.key.substr(option.key.size() - 3), "_ms") << "a duration names its unit";
    }
    if (option.kind == Option::Kind::kBytes) {
      EXPECT_EQ(option.key.substr(option.key.size() - 6), "_bytes");
    }
  }
  EXPECT_EQ(find_option("model"), nullptr);
}

}  // namespace
}  // namespace weightd::daemon
