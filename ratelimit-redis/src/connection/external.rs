//! Connections that a program has already, for a store to share.

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

/// What a store can be put [over](crate::Builder::over): a [`Connection`], or a client that a program
/// has already and goes on using for other things.
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
/// None of them has to be connected yet: nothing is sent before the first request. What they have to
/// know of passwords and encryption they know already.
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
/// - A `MultiplexedConnection` does not come back after it broke.
/// - A `ConnectionManager` connects again, but keeps a connection to a master that has been made a
///   replica; that one answers `READONLY`. Where masters change, take a connection that notices.
/// - Both have deadlines of their own, half a second unless told otherwise. A request is given up at the
///   first of theirs and the store's.
/// - They do not say whether a request that failed had been sent. Unless nobody listened at all, it may
///   have been charged: [`Indeterminate`](ratelimit_core::ErrorKind::Indeterminate).
/// - While a `ConnectionManager` connects again, it tells nothing: by default it tries six times, for more
///   than six seconds in all, and every request takes the whole deadline and is
///   [`Indeterminate`](ratelimit_core::ErrorKind::Indeterminate). Built with
///   `ConnectionManagerConfig::set_number_of_retries(0)` it tells at once that nobody listens: such a request
///   is [`Unavailable`](ratelimit_core::ErrorKind::Unavailable), and the next one connects anew.
///
/// A `ClusterConnection` sends a request again whose answer was lost. A store over it guards itself, or
/// it is built without retries: `WithoutRetries`.
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
/// - With every request the client is told to try it once, whatever it was built with. One that is not
///   connected says so at once. While it is just losing its connection, a request may have to wait for
///   the deadline.
/// - Without a policy by which to connect again it does not come back after its connection broke.
/// - One that uses Sentinels and is connected to a master that has been made a replica, which then
///   answers `READONLY`, looks for the new one only with fred's feature `custom-reconnect-errors`.
/// - Of one on a cluster only what it was built with is taken, its servers, login and encryption: the
///   store makes connections of its own by it. Those of the client could not be kept from sending a
///   request again, and end for good at the first `ASK` (fred 10.1). Names that it maps addresses to,
///   for certificates, are not known to the store.
pub trait IntoConnection {
    /// What it is turned into.
    type Connection: Connection;

    /// Turns it into a connection. One that is made for the store, as for a client of `fred` on a cluster, is
    /// left for a new one if it answers nothing for as long as the deadline.
    fn into_connection(self, deadline: Duration) -> Self::Connection;
}

/// A connection is one.
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

    /// What a request comes to within the deadline.
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

/// What a request comes to within the deadline.
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
