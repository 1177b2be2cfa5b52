//! One connection to one server, by either client. Nothing here reconnects or repeats: the layer
//! above decides what a failure means, in one place for both clients.

use std::net::SocketAddr;
use std::pin::Pin;
use std::time::Duration;

use tokio::net::lookup_host;

use super::endpoint::Endpoint;
use super::reply::Reply;
use super::request::Commands;
use crate::client::Client;
use crate::concurrent::first;
use crate::error::Result;

#[cfg(feature = "fred")]
pub(super) mod fred;
#[cfg(feature = "redis")]
pub(super) mod redis_rs;
mod stream;
#[cfg(test)]
mod tests;

/// How long one address is tried before the next starts, as RFC 8305 recommends.
const HEAD_START: Duration = Duration::from_millis(250);

/// One connection to one server.
pub(crate) enum Node {
    #[cfg(feature = "redis")]
    Redis(redis_rs::Node),
    #[cfg(feature = "fred")]
    Fred(fred::Node),
}

impl Node {
    /// Connects to one of the server's addresses, or to its Unix socket, logs in and selects the
    /// database. The caller enforces a deadline by dropping this.
    ///
    /// # Errors
    /// [`RedisError::Unreachable`], [`RedisError::Server`] for a refused login,
    /// [`RedisError::Config`].
    pub(crate) async fn connect(endpoint: &Endpoint) -> Result<Self> {
        if endpoint.is_socket() {
            return Self::connect_at(endpoint, None).await;
        }
        let found = lookup_host((&*endpoint.host, endpoint.port)).await;
        let found = found.map_err(|error| endpoint.peer.unreachable(error.to_string()))?;
        Self::connect_to_any(endpoint, found).await
    }

    /// Connects to the address that answers first (*happy eyeballs*, RFC 8305): the next address is
    /// tried when the one before has failed or has not answered for a while.
    async fn connect_to_any(
        endpoint: &Endpoint,
        addresses: impl Iterator<Item = SocketAddr>,
    ) -> Result<Self> {
        let attempts = addresses.map(|address| Self::connect_at(endpoint, Some(address)));
        first(attempts, HEAD_START).await
    }

    async fn connect_at(endpoint: &Endpoint, address: Option<SocketAddr>) -> Result<Self> {
        match endpoint.settings.client {
            #[cfg(feature = "redis")]
            Client::Redis => redis_rs::Node::connect(endpoint, address).await.map(Self::Redis),
            #[cfg(feature = "fred")]
            Client::Fred => fred::Node::connect(endpoint, address).await.map(Self::Fred),
        }
    }

    /// Sends commands once. `asking` sends ASKING directly before them. For a rejected transaction
    /// (`EXECABORT`), the error is that of the first command at fault, such as `MOVED`.
    ///
    /// # Errors
    /// [`RedisError::Server`] for an error reply, [`RedisError::Lost`] when the connection ended,
    /// [`RedisError::Unreachable`] if the commands were certainly not sent.
    pub(crate) fn send<'n>(
        &'n self,
        asking: bool,
        commands: Commands<'n>,
    ) -> Pin<Box<dyn Future<Output = Result<Reply>> + Send + 'n>> {
        // Without its type, the client's deeply nested future leaves the layers around a store room
        // below the compiler's limit.
        match self {
            #[cfg(feature = "redis")]
            Self::Redis(node) => Box::pin(node.send(asking, commands)),
            #[cfg(feature = "fred")]
            Self::Fred(node) => Box::pin(node.send(asking, commands)),
        }
    }
}
