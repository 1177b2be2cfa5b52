//! [`Connection`]: the seam between the store and a client of Redis.

use std::future::Future;
use std::sync::Arc;

use ratelimit_core::Timestamp;

use crate::deadline::Deadline;
use crate::error::RedisError;

mod cluster;
mod connector;
mod external;
mod follow;
mod link;
mod lookup;
mod managed;
mod node;
mod peer;
mod request;
mod resolver;
mod route;
mod sentinel;
pub(crate) mod slot;
pub(crate) mod tls;
mod watchdog;

#[cfg(feature = "redis")]
pub use external::External;
#[cfg(feature = "fred")]
pub use external::ExternalFred;
pub use external::IntoConnection;
#[cfg(all(feature = "redis", feature = "cluster-async"))]
pub use external::WithoutRetries;
pub use managed::RedisConnection;
pub use node::Client;
pub(crate) use peer::server_error;

/// A way to send commands to the server, or to the one of several that keeps a key.
///
/// # Contract
///
/// - A command is executed at most once. It may be sent again only after a server has said that it did
///   not execute it. A connection that cannot promise this says so:
///   [`may_repeat`](Self::may_repeat).
/// - It ends by its [`Deadline`], with an error if need be. What cannot be sent before is not sent.
/// - The error says whether the command can have been executed: [`RedisError::Unreachable`] and
///   [`RedisError::Server`] say that it was not, [`RedisError::Lost`] and [`RedisError::TimedOut`] that
///   it may have been.
pub trait Connection: Send + Sync {
    /// Sends a command, its name the first of its words, to the server that keeps this key. All keys
    /// among the words are kept there: on a cluster they are of one slot.
    fn send(
        &self,
        key: &str,
        words: &[Argument<'_>],
        deadline: Deadline,
    ) -> impl Future<Output = Result<Reply, RedisError>> + Send;

    /// Sends commands as one transaction to the server that keeps this key: none of others is executed
    /// in between.
    ///
    /// If the server does not take one of them, none is executed; an error that one meets when it is
    /// executed does not stop the others.
    fn transaction(
        &self,
        key: &str,
        commands: &[Vec<Argument<'_>>],
        deadline: Deadline,
    ) -> impl Future<Output = Result<Vec<Reply>, RedisError>> + Send;

    /// Sends a command to every server that keeps keys: one, or all masters of a cluster. Answers come
    /// with the address of who gave them.
    fn send_to_each(
        &self,
        words: &[Argument<'_>],
        deadline: Deadline,
    ) -> impl Future<Output = Vec<(Arc<str>, Result<Reply, RedisError>)>> + Send;

    /// Whether the keys of different slots may be kept by different servers.
    fn is_cluster(&self) -> bool;

    /// Whether the client may send a request again that has been executed, when its answer is lost. The
    /// store then guards against that; in the mode of transactions it cannot, and refuses.
    fn may_repeat(&self) -> bool {
        false
    }

    /// The server, for messages: host and port, of several those that were named.
    fn address(&self) -> &Arc<str>;
}

#[deny(clippy::missing_trait_methods)]
impl<C: Connection> Connection for Arc<C> {
    fn send(
        &self,
        key: &str,
        words: &[Argument<'_>],
        deadline: Deadline,
    ) -> impl Future<Output = Result<Reply, RedisError>> + Send {
        (**self).send(key, words, deadline)
    }

    fn transaction(
        &self,
        key: &str,
        commands: &[Vec<Argument<'_>>],
        deadline: Deadline,
    ) -> impl Future<Output = Result<Vec<Reply>, RedisError>> + Send {
        (**self).transaction(key, commands, deadline)
    }

    fn send_to_each(
        &self,
        words: &[Argument<'_>],
        deadline: Deadline,
    ) -> impl Future<Output = Vec<(Arc<str>, Result<Reply, RedisError>)>> + Send {
        (**self).send_to_each(words, deadline)
    }

    fn is_cluster(&self) -> bool {
        (**self).is_cluster()
    }

    fn may_repeat(&self) -> bool {
        (**self).may_repeat()
    }

    fn address(&self) -> &Arc<str> {
        (**self).address()
    }
}

/// A word of a command.
#[derive(Clone, Copy, Debug)]
pub enum Argument<'a> {
    /// Text as it is.
    Text(&'a str),
    /// Bytes as they are.
    Bytes(&'a [u8]),
    /// A number, in decimal.
    Number(u64),
    /// One that may be negative.
    Integer(i64),
}

impl Argument<'_> {
    /// As it is sent.
    pub(crate) fn to_bytes(self) -> Vec<u8> {
        match self {
            Self::Text(text) => text.as_bytes().to_vec(),
            Self::Bytes(bytes) => bytes.to_vec(),
            Self::Number(number) => number.to_string().into_bytes(),
            Self::Integer(number) => number.to_string().into_bytes(),
        }
    }
}

/// What a server answers.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Reply {
    /// Nothing there.
    Nil,
    /// An integer.
    Integer(i64),
    /// A string.
    Text(Vec<u8>),
    /// Several answers.
    Array(Vec<Reply>),
    /// Anything that no command of the store answers: its kind.
    Other(String),
}

impl Reply {
    /// What kind of answer it is, and not what it says: it may quote what was asked.
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

    /// What TIME answers: seconds and microseconds.
    pub(crate) fn as_time(&self) -> Option<Timestamp> {
        let number = |reply: &Self| match reply {
            Self::Text(digits) => std::str::from_utf8(digits).ok()?.parse::<u64>().ok(),
            Self::Integer(number) => u64::try_from(*number).ok(),
            _ => None,
        };
        let Self::Array(parts) = self else { return None };
        let [seconds, us] = &parts[..] else { return None };
        let (seconds, us) = (number(seconds)?, number(us)?);
        Some(Timestamp::saturating_from_us(seconds.saturating_mul(1_000_000).saturating_add(us)))
    }
}
