// SPDX-License-Identifier: Apache-2.0
#include "tools/bench/row.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/fd.h"
#include "base/text.h"

namespace weightd::tools {
namespace {

constexpr uint64_t kMaxFileBytes = uint64_t{64} << 20;

/// The fields of a row in the order of the file, for both directions.
template <typename RowType, typename Visitor>
void visit_fields(RowType& row, Visitor&& visit) {
  visit("op", row.op);
  visit("name", row.name);
  visit("model", row.model);
  visit("n", row.n);
  visit("k", row.k);
  visit("m", row.m);
  visit("us", row.us);
  visit("best_cublas_us", row.best_cublas_us);
  visit("ratio", row.ratio);
  visit("coded_gbps", row.coded_gbps);
  visit("copy_fraction", row.copy_fraction);
  visit("tflops", row.tflops);
  visit("bits_per_weight", row.bits_per_weight);
  visit("escapes", row.escapes);
  visit("plan", row.plan);
  visit("gpu", row.gpu);
  visit("driver", row.driver);
  visit("commit", row.commit);
  visit("sm_mhz", row.sm_mhz);
  visit("power_w", row.power_w);
  visit("temperature_c", row.temperature_c);
}

/// Takes fields out of one JSON object; remembers the first that has the wrong type.
class FieldReader {
 public:
  explicit FieldReader(const nlohmann::json& object) : object_(object) {}
  void operator()(const char* name, std::string& value) {
    take(name, [&](const nlohmann::json& field) {
      if (!field.is_string()) return false;
      value = field.get<std::string>();
      return true;
    });
  }
  void operator()(const char* name, uint64_t& value) {
    take(name, [&](const nlohmann::json& field) {
      if (!field.is_number_unsigned()) return false;
      value = field.get<uint64_t>();
      return true;
    });
  }
  void operator()(const char* name, double& value) {
    take(name, [&](const nlohmann::json& field) {
      if (!field.is_number()) return false;
      value = field.get<double>();
      return true;
    });
  }
  [[nodiscard]] const std::string& wrong_field() const { return wrong_field_; }

 private:
  template <typename Take>
  void take(const char* name, Take&& take_value) {
    const auto found = object_.find(name);
    if (found == object_.end() || found->is_null()) return;
    if (!take_value(*found) && wrong_field_.empty()) wrong_field_ = name;
  }
  const nlohmann::json& object_;
  std::string wrong_field_;
};

Result<std::string> read_text(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return status_from_errno(errno, printable(path));
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return status_from_errno(errno, printable(path));
  if (!S_ISREG(info.st_mode)) return Status::invalid_argument(printable(path) + ": is not a file");
  if (static_cast<uint64_t>(info.st_size) > kMaxFileBytes) {
    return Status::corruption(printable(path) + ": has " + human_bytes(static_cast<uint64_t>(info.st_size)) + ", at most " +
                              human_bytes(kMaxFileBytes) + " of rows are read");
  }
  std::string text(static_cast<size_t>(info.st_size), '\0');
  WEIGHTD_RETURN_IF_ERROR(pread_full(fd.get(), std::as_writable_bytes(std::span(text)), 0, printable(path)));
  return text;
}

}  // namespace

uint64_t counted_bytes(std::string_view op, uint64_t coded_bytes, uint64_t raw_bytes) {
  if (op == "cublas") return raw_bytes;
  if (op == "gemm_f12" || op == "gemm_exact" || op == "gemm_best") return coded_bytes;
  if (op == "decompress" || op == "copy") return coded_bytes + raw_bytes;
  return 0;
}

void fill_rates(Row& row, uint64_t bytes, double copy_gbps) {
  if (!(row.us > 0)) return;
  row.ratio = row.best_cublas_us / row.us;
  if (bytes > 0) {
    row.coded_gbps = static_cast<double>(bytes) / row.us / 1e3;
    row.copy_fraction = row.coded_gbps / copy_gbps;
  }
  if (row.m > 0) {
    row.tflops = 2 * static_cast<double>(row.n) * static_cast<double>(row.k) * static_cast<double>(row.m) / row.us / 1e6;
  }
}

cli::Json to_json(const Row& row) {
  cli::Json object = cli::Json::object();
  visit_fields(row, [&](const char* name, const auto& value) { object.set(name, cli::Json(value)); });
  return object;
}

cli::Json to_json(const std::vector<Row>& rows) {
  cli::Json list = cli::Json::array();
  for (const Row& row : rows) list.push(to_json(row));
  return list;
}

Result<std::vector<Row>> parse_rows(std::string_view text, std::string_view source) {
  const nlohmann::json document = nlohmann::json::parse(text, nullptr, false);
  if (document.is_discarded()) return Status::corruption(printable(source) + ": is not JSON");
  if (!document.is_array()) return Status::corruption(printable(source) + ": is not a list of rows");
  std::vector<Row> rows;
  for (const nlohmann::json& object : document) {
    const std::string place = printable(source) + ": row " + std::to_string(rows.size());
    if (!object.is_object()) return Status::corruption(place + " is not an object");
    FieldReader reader(object);
    Row row;
    visit_fields(row, reader);
    if (!reader.wrong_field().empty())
      return Status::corruption(place + ": field '" + reader.wrong_field() + "' has the wrong type");
    if (row.op.empty()) return Status::corruption(place + ": field 'op' is missing");
    rows.push_back(std::move(row));
  }
  return rows;
}

Result<std::vector<Row>> read_rows(const std::string& path) {
  WEIGHTD_ASSIGN_OR_RETURN(const std::string text, read_text(path));
  return parse_rows(text, path);
}

Status write_rows(const std::string& path, const std::vector<Row>& rows) { return write_text(path, to_json(rows).dump()); }

Status write_text(const std::string& path, std::string_view text) {
  const std::string temporary = path + "." + std::to_string(::getpid()) + ".tmp";
  UniqueFd fd(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!fd.valid()) return status_from_errno(errno, printable(temporary));
  Status status = pwrite_full(fd.get(), std::as_bytes(std::span(text)), 0, printable(temporary));
  if (status.ok()) status = close_checked(std::move(fd), printable(temporary));
  if (status.ok() && ::rename(temporary.c_str(), path.c_str()) != 0) status = status_from_errno(errno, printable(path));
  if (!status.ok()) ::unlink(temporary.c_str());
  return status;
}

std::string commit_of(std::string_view build_id) {
  const size_t open = build_id.find(" (");
  if (open == std::string_view::npos || !build_id.ends_with(')')) return std::string(build_id);
  return std::string(build_id.substr(open + 2, build_id.size() - open - 3));
}

}  // namespace weightd::tools
