// SPDX-License-Identifier: Apache-2.0
#include "tools/cli/json.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

namespace weightd::cli {

struct Json::State {
  nlohmann::ordered_json value;
};

Json::Json() : state_(std::make_unique<State>()) {}
Json::Json(std::string_view text) : Json() { state_->value = std::string(text); }
Json::Json(const std::string& text) : Json(std::string_view(text)) {}
Json::Json(const char* text) : Json(std::string_view(text)) {}
Json::Json(double number) : Json() {
  if (std::isfinite(number)) state_->value = number;
}
Json::Json(Json&&) noexcept = default;
Json& Json::operator=(Json&&) noexcept = default;
Json::~Json() = default;

void Json::assign_bool(bool value) { state_->value = value; }
void Json::assign_unsigned(uint64_t value) { state_->value = value; }
void Json::assign_signed(int64_t value) { state_->value = value; }

Json Json::object() {
  Json json;
  json.state_->value = nlohmann::ordered_json::object();
  return json;
}

Json Json::array() {
  Json json;
  json.state_->value = nlohmann::ordered_json::array();
  return json;
}

Json Json::document() {
  Json json = object();
  json.set("schema_version", kJsonSchemaVersion);
  return json;
}

Json& Json::set(std::string_view key, Json value) {
  state_->value[std::string(key)] = std::move(value.state_->value);
  return *this;
}

Json& Json::push(Json value) {
  state_->value.push_back(std::move(value.state_->value));
  return *this;
}

std::string Json::dump() const {
  return state_->value.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace weightd::cli
