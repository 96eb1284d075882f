// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "tools/cli/json.h"
#include "weightd/status.h"

/// What was measured, one figure a row. The rows of a GPU are kept as a JSON list; tests/bench/RESULTS.md says what each field
/// means.
namespace weightd::tools {

inline constexpr double kAbsent = std::numeric_limits<double>::quiet_NaN();  // a figure that this op does not have

struct Row {
  std::string op, name, model;
  uint64_t n = 0, k = 0, m = 0;  // m tokens; 0 where there is no product
  double us = kAbsent;
  double best_cublas_us = kAbsent, ratio = kAbsent;  // ratio = best_cublas_us / us
  double coded_gbps = kAbsent;                       // GB/s (10^9) of the bytes that counted_bytes() names
  double copy_fraction = kAbsent;                    // coded_gbps over that of the 1 GiB device copy of the same run
  double tflops = kAbsent;
  double bits_per_weight = kAbsent;
  double escapes = kAbsent;  // share of the weights outside of their windows
  std::string plan, gpu, driver, commit;
  double sm_mhz = kAbsent, power_w = kAbsent, temperature_c = kAbsent;  // just after the measurement
  bool operator==(const Row&) const = default;
};

/// Bytes that one launch of `op` cannot do without: products read the weight once, as it is stored (cublas: BF16); decompress and
/// copy read and write. 0 for other ops.
[[nodiscard]] uint64_t counted_bytes(std::string_view op, uint64_t coded_bytes, uint64_t raw_bytes);

/// Fills ratio, coded_gbps, copy_fraction and tflops from us, best_cublas_us, n, k and m. What cannot be known stays absent:
/// `bytes` of 0, a `copy_gbps` or best_cublas_us that is absent, m of 0.
void fill_rates(Row& row, uint64_t bytes, double copy_gbps);

/// Absent figures become null.
[[nodiscard]] cli::Json to_json(const Row& row);
[[nodiscard]] cli::Json to_json(const std::vector<Row>& rows);

/// Reads such a list. Unknown fields are passed over, missing ones are absent; op must be there. kCorruption names `source` and the
/// row.
[[nodiscard]] Result<std::vector<Row>> parse_rows(std::string_view text, std::string_view source);

/// kNotFound, kCorruption.
[[nodiscard]] Result<std::vector<Row>> read_rows(const std::string& path);
/// Through a sibling file and a rename: a reader sees the rows from before or those from after.
[[nodiscard]] Status write_rows(const std::string& path, const std::vector<Row>& rows);
[[nodiscard]] Status write_text(const std::string& path, std::string_view text);

/// "abcdef0" of "1.2.3 (abcdef0)"; the whole text if it is not of that form.
[[nodiscard]] std::string commit_of(std::string_view build_id);

}  // namespace weightd::tools
