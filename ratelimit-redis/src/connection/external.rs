//! External connections: clients that a program already has and shares with a store.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use super::Connection;
use super::peer::Peer;
use super::watchdog::Watchdog;
use crate::deadline::Deadline;
use crate::error::RedisError;

#[cfg(all(feature = "redis", feature = "cluster-async"))]
mod cluster_async;
#[cfg(feature = "fred")]
mod fred;
#[cfg(feature = "redis")]
mod redis_rs;

#[cfg(all(feature = "redis", feature = "cluster-async"))]
pub use cluster_async::WithoutRetries;
#[cfg(feature = "fred")]
pub use fred::ExternalFred;

/// What a store can be built [over](crate::Builder::over): a [`Connection`], or a client that the
/// program keeps using for other things.
///
/// | type | feature | where | a request is executed |
/// |---|---|---|---|
/// | `redis::aio::MultiplexedConnection` | `redis` | one server | at most once |
/// | `redis::aio::ConnectionManager` | `connection-manager` | one server | at most once |
/// | `redis::cluster_async::ClusterConnection` | `cluster-async` | a cluster | [perhaps again](Connection::may_repeat) |
/// | `WithoutRetries<ClusterConnection>` | `cluster-async` | a cluster | at most once |
/// | `fred::clients::Client` | `fred` | one server, by Sentinels, a cluster | at most once |
/// | `fred::clients::Pool` | `fred` | one server, by Sentinels, a cluster | at most once |
///
/// The clients need not be connected yet: the store sends nothing before the first request. They keep
/// their own settings for passwords and encryption.
///
/// # Clients of `redis`
///
#[cfg_attr(feature = "connection-manager", doc = "```no_run")]
#[cfg_attr(not(feature = "connection-manager"), doc = "```ignore")]
/// use ratelimit_redis::RedisStore;
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let client = redis::Client::open("redis://127.0.0.1:6379")?;
/// let manager = client.get_connection_manager().await?;
/// let store = RedisStore::builder().over(manager.clone())?;
///
/// let connection = client.get_multiplexed_async_connection().await?;
/// let store = RedisStore::builder().over(connection.clone())?;
/// # Ok(())
/// # }
/// ```
///
/// - A `MultiplexedConnection` does not reconnect.
/// - A `ConnectionManager` reconnects, but keeps a connection to a master that became a replica; that
///   server answers `READONLY`. If masters change, use a connection that follows them.
/// - Both have timeouts of their own, by default half a second. A request ends at the shorter of theirs
///   and the store's deadline.
/// - They do not say whether a failed request had been sent. Unless no server listened, it may have been
///   charged: [`Indeterminate`](ratelimit_core::ErrorKind::Indeterminate).
/// - While a `ConnectionManager` reconnects, it reports nothing. By default it tries six times over more
///   than six seconds; every request then takes the whole deadline and is
///   [`Indeterminate`](ratelimit_core::ErrorKind::Indeterminate). With
///   `ConnectionManagerConfig::set_number_of_retries(0)` it reports at once that no server listens: the
///   request is [`Unavailable`](ratelimit_core::ErrorKind::Unavailable), and the next one reconnects.
///
/// A `ClusterConnection` repeats a request whose reply was lost. The store guards against that, or you
/// build the client without retries and wrap it in `WithoutRetries`.
///
#[cfg_attr(feature = "cluster-async", doc = "```no_run")]
#[cfg_attr(not(feature = "cluster-async"), doc = "```ignore")]
/// use ratelimit_redis::{RedisStore, WithoutRetries};
/// use redis::cluster::ClusterClientBuilder;
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let builder = ClusterClientBuilder::new(["redis://127.0.0.1:7000"]);
/// let connection = builder.build()?.get_async_connection().await?;
/// let store = RedisStore::builder().over(connection.clone())?;
///
/// let builder = ClusterClientBuilder::new(["redis://127.0.0.1:7000"]).retries(0);
/// let connection = builder.build()?.get_async_connection().await?;
/// let store = RedisStore::builder().over(WithoutRetries(connection))?;
/// # Ok(())
/// # }
/// ```
///
/// # Clients of `fred`
///
#[cfg_attr(feature = "fred", doc = "```no_run")]
#[cfg_attr(not(feature = "fred"), doc = "```ignore")]
/// use fred::prelude::*;
/// use ratelimit_redis::RedisStore;
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let config = Config::from_url("redis://127.0.0.1:6379")?;
/// let mut builder = fred::types::Builder::from_config(config);
/// builder.set_policy(ReconnectPolicy::new_constant(0, 100));
///
/// let client = builder.build()?;
/// client.init().await?;
/// let store = RedisStore::builder().over(client.clone())?;
///
/// let pool = builder.build_pool(4)?;
/// pool.init().await?;
/// let store = RedisStore::builder().over(pool.clone())?;
/// # Ok(())
/// # }
/// ```
///
/// - The store tells the client to try each request once, whatever its settings. A client without a
///   connection reports that at once. While it is losing its connection, a request may wait for the
///   deadline.
/// - Without a reconnect policy, it does not reconnect.
/// - A client by Sentinels whose master became a replica, which then answers `READONLY`, looks for the
///   new master only with fred's feature `custom-reconnect-errors`.
/// - Of a client on a cluster, the store takes only the configuration (servers, login, encryption) and
///   opens connections of its own. The client's own connections could not be kept from repeating a
///   request, and they end for good at the first `ASK` (fred 10.1). The store does not know the client's
///   mapping of addresses to names for certificates.
pub trait IntoConnection {
    /// The resulting connection.
    type Connection: Connection;

    /// Turns it into a connection. If the store opens connections of its own, as for a `fred` client on
    /// a cluster, it replaces one that owes a reply and gives none for as long as the deadline.
    fn into_connection(self, deadline: Duration) -> Self::Connection;
}

/// A connection needs no conversion.
impl<C: Connection> IntoConnection for C {
    type Connection = C;

    fn into_connection(self, _deadline: Duration) -> C {
        self
    }
}

/// A client of the crate `redis` that a program shares with a store: see [`IntoConnection`].
#[cfg(feature = "redis")]
#[derive(Clone)]
pub struct External<C> {
    client: C,
    watchdog: Arc<Watchdog>,
    peer: Peer,
}

#[cfg(feature = "redis")]
impl<C> External<C> {
    fn new(client: C, limit: Duration, address: &str) -> Self {
        let watchdog = Arc::new(Watchdog::new(limit));
        Self { client, watchdog, peer: Peer::of_given_client(address) }
    }

    /// The result of a request within the deadline.
    async fn within<T>(
        &self,
        deadline: Deadline,
        request: impl Future<Output = Result<T, RedisError>>,
    ) -> Result<T, RedisError> {
        within(&self.watchdog, &self.peer, deadline, request).await
    }
}

#[cfg(feature = "redis")]
impl<C> std::fmt::Debug for External<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = std::any::type_name::<C>();
        f.debug_struct("External").field("client", &kind).finish_non_exhaustive()
    }
}

/// The result of a request within the deadline.
async fn within<T>(
    watchdog: &Watchdog,
    peer: &Peer,
    deadline: Deadline,
    request: impl Future<Output = Result<T, RedisError>>,
) -> Result<T, RedisError> {
    if deadline.is_over() {
        return Err(peer.too_late(deadline));
    }
    let answer = watchdog.within(deadline.at(), pin!(request)).await;
    answer.unwrap_or_else(|| {
        let address = Arc::clone(peer.address());
        Err(RedisError::TimedOut { address, deadline: deadline.given() })
    })
}
