//! [`Connection`]: the interface between the store and a Redis client.

use std::future::Future;
use std::sync::Arc;

use crate::deadline::Deadline;
use crate::error::Result;

mod attempts;
mod endpoint;
mod external;
mod follow;
mod link;
mod managed;
mod node;
mod peer;
mod reply;
mod request;
mod route;
mod sentinel;
mod servers;
pub(crate) mod slot;
#[cfg(feature = "tls")]
pub(crate) mod tls;
/// A URL that asks for encryption is refused when it is parsed.
#[cfg(not(feature = "tls"))]
mod tls {
    pub(super) type Tls = std::convert::Infallible;
}
mod watchdog;

pub use external::{External, IntoConnection};
pub use managed::RedisConnection;
pub(crate) use peer::{Peer, refused_in_part};
pub use reply::Reply;
pub use request::Argument;
pub(crate) use request::TryAgain;

/// Sends commands to the server, or to the server of several that stores a key.
///
/// # Contract
///
/// - A command is executed at most once. A connection sends it again only after a server has said
///   that it did not execute it.
/// - A call ends by its [`Deadline`], with an error if necessary. After it nothing more is sent.
/// - The error says whether the command may have been executed: after [`RedisError::Unreachable`]
///   and [`RedisError::Server`] it was not, after [`RedisError::Lost`] and [`RedisError::TimedOut`]
///   it may have been.
///
/// [`RedisError::Unreachable`]: crate::RedisError::Unreachable
/// [`RedisError::Server`]: crate::RedisError::Server
/// [`RedisError::Lost`]: crate::RedisError::Lost
/// [`RedisError::TimedOut`]: crate::RedisError::TimedOut
pub trait Connection: Send + Sync + 'static {
    /// Sends a command to the server that stores this key. The first argument is the command's
    /// name. All keys among the arguments lie on that server: on a cluster, in one slot.
    fn send(
        &self,
        key: &str,
        words: &[Argument<'_>],
        deadline: Deadline,
    ) -> impl Future<Output = Result<Reply>> + Send;

    /// Sends a command whose keys the caller can send apart. While some of them lie on another
    /// server of a cluster, because their slot moves, it returns `TRYAGAIN` where
    /// [`send`](Self::send) waits.
    fn send_splittable(
        &self,
        key: &str,
        words: &[Argument<'_>],
        deadline: Deadline,
    ) -> impl Future<Output = Result<Reply>> + Send {
        self.send(key, words, deadline)
    }

    /// Sends commands as one transaction to the server that stores this key. The server executes no
    /// other client's command in between.
    ///
    /// If the server rejects one of them, it executes none. An error during the execution of one
    /// does not stop the others, and is [`RedisError::InPart`](crate::RedisError::InPart).
    fn transaction(
        &self,
        key: &str,
        commands: &[Vec<Argument<'_>>],
        deadline: Deadline,
    ) -> impl Future<Output = Result<Vec<Reply>>> + Send;

    /// Sends a command to every server that stores keys: one, or all masters of a cluster. Each
    /// reply comes with the server's address.
    fn send_to_each(
        &self,
        words: &[Argument<'_>],
        deadline: Deadline,
    ) -> impl Future<Output = Vec<(Arc<str>, Result<Reply>)>> + Send;

    /// Whether keys of different slots may lie on different servers.
    fn is_cluster(&self) -> bool;

    /// A number of the server that is known to store this key: on a cluster, of the owner of its
    /// slot. `None`, the default, where one server stores all keys, or where none is known.
    fn server_of(&self, key: &str) -> Option<u64> {
        let _ = key;
        None
    }

    /// Host and port for messages: of the server, or of all servers that were named.
    fn address(&self) -> &Arc<str>;
}
