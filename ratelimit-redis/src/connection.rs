//! [`Connection`]: the interface between the store and a Redis client.

use std::future::Future;
use std::sync::Arc;

use ratelimit_core::Timestamp;

use crate::deadline::Deadline;
use crate::error::Result;

mod connector;
mod external;
mod follow;
mod link;
mod lookup;
mod managed;
mod node;
mod peer;
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

/// An argument of a command.
#[derive(Clone, Copy, Debug)]
pub enum Argument<'a> {
    /// Text, sent verbatim.
    Text(&'a str),
    /// Bytes, sent verbatim.
    Bytes(&'a [u8]),
    /// A number, sent in decimal.
    Number(u64),
}

impl Argument<'_> {
    /// No fewer bytes than it takes.
    pub(crate) const fn most_bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Bytes(bytes) => bytes.len(),
            Self::Number(_) => "18446744073709551615".len(),
        }
    }
}

/// A server's reply.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Reply {
    /// No value.
    Nil,
    /// An integer.
    Integer(i64),
    /// A string.
    Text(Vec<u8>),
    /// Several replies.
    Array(Vec<Reply>),
    /// A reply that no command of the store expects, by its kind.
    Other(String),
}

impl Reply {
    /// The kind of the reply without its content, which may quote the request.
    pub(crate) fn shape(&self) -> String {
        const SHOWN: usize = 8;
        match self {
            Self::Nil => "nothing".into(),
            Self::Integer(number) => number.to_string(),
            Self::Text(text) => format!("a text of {} bytes", text.len()),
            Self::Array(items) => {
                let shapes = items.iter().take(SHOWN).map(Self::shape);
                let more = (items.len() > SHOWN).then(|| format!("{} in all", items.len()));
                format!("[{}]", shapes.chain(more).collect::<Vec<_>>().join(", "))
            }
            Self::Other(kind) => kind.clone(),
        }
    }

    /// The replies in an array, from this server.
    pub(crate) fn into_array(self, peer: &Peer) -> Result<Vec<Self>> {
        match self {
            Self::Array(replies) => Ok(replies),
            other => Err(peer.unexpected(&other)),
        }
    }

    /// The strings in an array, and in arrays in it; `None` if there is anything else.
    pub(crate) fn strings(&self) -> Option<Vec<&[u8]>> {
        match self {
            Self::Text(bytes) => Some(vec![bytes]),
            Self::Array(items) => {
                let strings = items.iter().map(Self::strings).collect::<Option<Vec<_>>>()?;
                Some(strings.concat())
            }
            _ => None,
        }
    }

    /// A string that is text.
    pub(crate) fn as_text(&self) -> Option<&str> {
        let Self::Text(text) = self else { return None };
        std::str::from_utf8(text).ok()
    }

    /// Parses the reply of TIME: seconds and microseconds.
    pub(crate) fn as_time(&self) -> Option<Timestamp> {
        let number = |reply: &Self| match reply {
            Self::Integer(number) => u64::try_from(*number).ok(),
            digits => digits.as_text()?.parse::<u64>().ok(),
        };
        let Self::Array(parts) = self else { return None };
        let [seconds, us] = &parts[..] else { return None };
        let (seconds, us) = (number(seconds)?, number(us)?);
        Some(Timestamp::saturating_from_us(seconds.saturating_mul(1_000_000).saturating_add(us)))
    }
}
