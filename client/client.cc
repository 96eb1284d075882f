// SPDX-License-Identifier: Apache-2.0
#include "weightd/client.h"

#include "base/version.h"
#include "client/connection.h"
#include "client/mapping.h"

namespace weightd {

Result<Client> Client::connect(const ClientOptions& options) {
  WEIGHTD_ASSIGN_OR_RETURN(std::shared_ptr<detail::Connection> connection, detail::Connection::open(options));
  return Client(std::move(connection));
}

Result<std::vector<ModelInfo>> Client::list() { return connection_->list(); }

Result<Model> Client::acquire(std::string_view name, const AcquireOptions& options) {
  WEIGHTD_ASSIGN_OR_RETURN(const std::shared_ptr<detail::Lease> lease, connection_->acquire(name, options));
  // Models own the hold, tensors only the lease inside it: so the last Model ends the lease, however many tensors are about.
  const auto hold = std::make_shared<detail::LeaseHold>(lease);
  return Model(std::shared_ptr<detail::Lease>(hold, lease.get()));
}

int Client::event_fd() const { return connection_->event_fd(); }
Result<std::vector<Event>> Client::poll_events() { return connection_->poll_events(); }
std::string Client::daemon_version() const { return connection_->daemon_version(); }
std::string Client::backend() const { return connection_->backend(); }

std::string_view version() { return build_id(); }

}  // namespace weightd
