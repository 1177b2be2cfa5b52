//! Connections that a program has already, for a store to share.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use super::Connection;
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
pub use fred::SharedFred;

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
/// - A `MultiplexedConnection` does not come back after it broke.
/// - A `ConnectionManager` connects again, but keeps a connection to a master that has been made a
///   replica; that one answers `READONLY`. Where masters change, take a connection that notices.
/// - A client of `fred` is told with every request to try it once, whatever it was built with. One that
///   uses Sentinels notices a master that was made a replica only with fred's feature
///   `custom-reconnect-errors`.
/// - Of a client of `fred` on a cluster only what it was built with is taken, its servers, login and
///   encryption: the store makes connections of its own by it. Its own ones could not be kept from
///   sending a request again, and end for good at the first `ASK` (fred 10.1).
pub trait IntoConnection {
    /// What it is turned into.
    type Connection: Connection;

    /// Turns it into a connection by which no request takes longer than this.
    fn into_connection(self, deadline: Duration) -> Self::Connection;
}

/// A connection is one, and has a deadline of its own.
impl<C: Connection> IntoConnection for C {
    type Connection = C;

    fn into_connection(self, _deadline: Duration) -> C {
        self
    }
}

/// A client that a program shares with a store.
#[derive(Clone)]
pub struct Shared<C> {
    client: C,
    deadline: Duration,
    address: Arc<str>,
}

impl<C> std::fmt::Debug for Shared<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = std::any::type_name::<C>();
        f.debug_struct("Shared")
            .field("client", &kind)
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}

/// What a request comes to within the deadline.
async fn within<T>(
    deadline: Duration,
    address: &Arc<str>,
    request: impl Future<Output = Result<T, RedisError>>,
) -> Result<T, RedisError> {
    let answer = timeout_at(Instant::now() + deadline, request).await;
    answer.unwrap_or_else(|_| Err(RedisError::TimedOut { address: Arc::clone(address), deadline }))
}
