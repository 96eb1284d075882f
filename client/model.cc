// SPDX-License-Identifier: Apache-2.0
#include "base/text.h"
#include "client/mapping.h"
#include "weightd/client.h"

namespace weightd {

ModelInfo Model::info() const { return lease_->mapping->info(); }

std::span<const TensorInfo> Model::tensors() const { return lease_->mapping->tensors().infos(); }

Result<Tensor> Model::tensor(std::string_view name) const {
  WEIGHTD_RETURN_IF_ERROR(lease_->usable());
  const detail::Mapping& mapping = *lease_->mapping;
  const uint32_t* index = mapping.tensors().find(name);
  if (index == nullptr) {
    return Status::not_found("model '" + printable(mapping.first_info().name) + "' has no tensor '" + printable(name) + "'");
  }
  return Tensor(lease_->shared_from_this(), *index);
}

Model::Memory Model::memory() const {
  const detail::Mapping& mapping = *lease_->mapping;
  Memory memory;
  memory.private_bytes = mapping.tensors().allocated_bytes() + sizeof(detail::Mapping);
  if (lease_->usable().ok()) memory.shared_bytes = mapping.mapped_bytes();
  return memory;
}

Status Model::release() { return lease_->end(true); }

}  // namespace weightd
