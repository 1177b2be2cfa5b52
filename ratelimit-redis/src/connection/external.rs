//! External connections: clients that a program already has and shares with a store.

use std::fmt;
use std::sync::Arc;

use tokio::time::timeout_at;

use super::Connection;
use super::peer::Peer;
use super::reply::Reply;
use super::request::{Argument, Commands};
use crate::deadline::Deadline;
use crate::error::Result;

#[cfg(feature = "fred")]
mod fred;
#[cfg(feature = "redis")]
mod redis_rs;

/// What a store can be built [over](crate::Builder::over): a [`Connection`], or a client that the
/// program keeps using for other things.
///
/// | type | feature | where |
/// |---|---|---|
/// | `redis::aio::MultiplexedConnection` | `redis` | one server |
/// | `redis::aio::ConnectionManager` | `connection-manager` | one server |
/// | `fred::clients::Client`, `fred::clients::Pool` | `fred` | one server, by Sentinels |
///
/// A client of a cluster sends a request again whose reply was lost, which would charge it twice:
/// give a URL, `redis-cluster://…`, and the store connects itself.
///
/// The clients need not be connected yet: the store sends nothing before the first request. They
/// keep their own settings for passwords and encryption.
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
/// - A `ConnectionManager` reconnects, but keeps a connection to a master that became a replica;
///   that server answers `READONLY`. If masters change, use a connection that follows them.
/// - Both have timeouts of their own, by default half a second. A request ends at the shorter of
///   theirs and the store's deadline.
/// - They do not say whether a failed request had been sent. Unless no server listened, it may have
///   been charged: [`Indeterminate`](ratelimit_core::ErrorKind::Indeterminate).
/// - While a `ConnectionManager` reconnects, it reports nothing. By default it tries six times over
///   more than six seconds; every request then takes the whole deadline and is
///   [`Indeterminate`](ratelimit_core::ErrorKind::Indeterminate). With
///   `ConnectionManagerConfig::set_number_of_retries(0)` it reports at once that no server listens:
///   the request is [`Unavailable`](ratelimit_core::ErrorKind::Unavailable), and the next one
///   reconnects.
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
/// - A client by Sentinels whose master became a replica, which then answers `READONLY`, looks for
///   the new master only with fred's feature `custom-reconnect-errors`.
pub trait IntoConnection {
    /// The resulting connection.
    type Connection: Connection;

    /// Turns it into a connection.
    ///
    /// # Errors
    /// [`RedisError::Config`](crate::RedisError::Config) for a client of a cluster.
    fn into_connection(self) -> Result<Self::Connection>;
}

/// A connection needs no conversion.
impl<C: Connection> IntoConnection for C {
    type Connection = C;

    fn into_connection(self) -> Result<C> {
        Ok(self)
    }
}

/// A client that a program shares with a store: see [`IntoConnection`].
#[derive(Clone)]
pub struct External {
    client: Given,
    peer: Peer,
}

/// The program's client, to one server.
#[derive(Clone)]
enum Given {
    #[cfg(feature = "redis")]
    Multiplexed(::redis::aio::MultiplexedConnection),
    #[cfg(feature = "connection-manager")]
    Manager(::redis::aio::ConnectionManager),
    #[cfg(feature = "fred")]
    Fred(::fred::clients::Client),
    #[cfg(feature = "fred")]
    Pool(::fred::clients::Pool),
}

impl External {
    fn new(client: Given, address: &str) -> Self {
        Self { client, peer: Peer::new(address) }
    }

    /// The reply to commands within the deadline.
    async fn ask(&self, commands: Commands<'_>, deadline: Deadline) -> Result<Reply> {
        let peer = &self.peer;
        if deadline.is_over() {
            return Err(peer.too_late(deadline));
        }
        let asked = async {
            match &self.client {
                #[cfg(feature = "redis")]
                Given::Multiplexed(client) => redis_rs::ask(client.clone(), peer, commands).await,
                #[cfg(feature = "connection-manager")]
                Given::Manager(client) => redis_rs::ask(client.clone(), peer, commands).await,
                #[cfg(feature = "fred")]
                // Boxed: fred's futures are large, and would enlarge every caller's.
                Given::Fred(client) => Box::pin(fred::ask(client, peer, commands, deadline)).await,
                #[cfg(feature = "fred")]
                Given::Pool(pool) => {
                    Box::pin(fred::ask(pool.next_connected(), peer, commands, deadline)).await
                }
            }
        };
        let answer = timeout_at(deadline.at(), asked).await;
        answer.unwrap_or_else(|_| Err(peer.timed_out(deadline)))
    }
}

impl Connection for External {
    async fn send(&self, _key: &str, words: &[Argument<'_>], deadline: Deadline) -> Result<Reply> {
        self.ask(Commands::One(words), deadline).await
    }

    async fn transaction(
        &self,
        _key: &str,
        commands: &[Vec<Argument<'_>>],
        deadline: Deadline,
    ) -> Result<Vec<Reply>> {
        let reply = self.ask(Commands::Transaction(commands), deadline).await?;
        self.peer.array(reply)
    }

    async fn send_to_each(
        &self,
        words: &[Argument<'_>],
        deadline: Deadline,
    ) -> Vec<(Arc<str>, Result<Reply>)> {
        vec![(Arc::clone(self.address()), self.send("", words, deadline).await)]
    }

    fn is_cluster(&self) -> bool {
        false
    }

    fn address(&self) -> &Arc<str> {
        self.peer.address()
    }
}

impl fmt::Debug for External {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("External").field("address", self.address()).finish_non_exhaustive()
    }
}
