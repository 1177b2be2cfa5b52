//! [`RedisError`]: what the store could not do, and whether it may have been charged.

use std::sync::Arc;
use std::time::Duration;

use ratelimit_core::{Algorithm, ErrorKind, Limit, Op, Refusal, StoreError};

/// What the store could not do.
///
/// Messages name the server by its address, never by its URL: no password is ever in them.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RedisError {
    /// The URL or another setting is wrong.
    #[error("{0}")]
    Config(String),
    /// No connection could be made, so that nothing was sent.
    #[error("cannot connect to Redis at {address}: {reason}")]
    Unreachable {
        /// Host and port.
        address: Arc<str>,
        /// What the attempt met.
        reason: String,
    },
    /// Of the servers that were named, or that they named, none is in charge of the key now. Nothing was
    /// charged.
    #[error("no server of Redis at {address} is in charge now: {reason}")]
    NoServer {
        /// Hosts and ports of those that were named.
        address: Arc<str>,
        /// What they say.
        reason: String,
    },
    /// The request was sent and the connection ended before an answer came.
    #[error("Redis at {address} did not answer, and may have charged the request: {reason}")]
    Lost {
        /// Host and port.
        address: Arc<str>,
        /// What the connection met.
        reason: String,
    },
    /// The request was sent and no answer came within the deadline.
    #[error(
        "Redis at {address} did not answer within {deadline:?}, and may have charged the request"
    )]
    TimedOut {
        /// Host and port.
        address: Arc<str>,
        /// What the call was given.
        deadline: Duration,
    },
    /// The server answered with an error. Nothing was charged.
    #[error("Redis at {address} answered {code}: {message}")]
    Server {
        /// Host and port.
        address: Arc<str>,
        /// The error's code, such as `NOPERM`.
        code: String,
        /// What the server said after it.
        message: String,
    },
    /// What is stored under a key was not written by its limit. A wrong value has been removed, unless the
    /// request was a peek, and the limit begins anew with the next request; a key of a wrong type has to be
    /// removed by hand. Nothing was charged.
    #[error("the key {key:?} holds what limit {limit:?} did not write ({detail})")]
    Corrupt {
        /// The limit's name.
        limit: String,
        /// The key on the server.
        key: String,
        /// What was found, and what became of it.
        detail: String,
    },
    /// Others changed the same key between every read and write. Nothing was charged.
    #[error("others changed the same key {attempts} times in a row; ask again")]
    Contended {
        /// How often it was tried.
        attempts: usize,
    },
    /// The keys of the batch lie in different slots of the cluster, and the store was told to refuse
    /// that. Nothing was charged.
    #[error(
        "the keys {first:?} and {other:?} lie in different slots of the cluster; keep them together by a \
         tag (Builder::tag), or allow batches in two waves (CrossSlot::Reserve)"
    )]
    CrossSlot {
        /// A key of the batch.
        first: String,
        /// One of another slot.
        other: String,
    },
    /// A request was done in part: one server of several did its part and another did not, or what was
    /// charged could not be given back. Limits that were charged admit less for it until it flows back
    /// by itself, never more. To ask again may do the first part twice, unless it was asked under an id.
    #[error("a request was done in part, because {0}")]
    InPart(Box<RedisError>),
    /// No transaction can decide a limit. Nothing was charged.
    #[error(
        "limit {limit:?}: a transaction charges first and looks afterwards, and cannot decide this; use \
         the Lua mode, or count = \"attempts\" with one of fixed-window, first-request-window, \
         window-log, bucketed-window and sliding-log"
    )]
    NotNative {
        /// The limit's name.
        limit: String,
    },
    /// The client may send a transaction again that has been executed, and nothing guards against that.
    /// Nothing was charged.
    #[error(
        "this client sends a transaction again when its answer is lost, and would charge it twice; build \
         the cluster client with retries(0) and say so (WithoutRetries), or use the Lua mode"
    )]
    MayRepeat,
    /// A transaction cannot do this: what it charges it cannot take back. Nothing was charged.
    #[error("limit {limit:?}: there is no {op} in the mode of transactions; use the Lua mode")]
    NoOperation {
        /// The limit's name.
        limit: String,
        /// What was to be done.
        op: Op,
    },
    /// A request that cannot be. Nothing was charged.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// A script decided otherwise than the step of the limit does over what the script read: one of the two is
    /// wrong, and the request may have been charged.
    #[error(
        "limit {limit:?}: the script on Redis at {address} decided otherwise than the algorithm does; its twin in \
         Lua is wrong, or another program stores states under the same keys"
    )]
    Disagrees {
        /// The limit's name.
        limit: String,
        /// Host and port.
        address: Arc<str>,
    },
    /// The server's answer is not what the script answers.
    #[error("Redis at {address} answered what no script of ours answers: {answer}")]
    Protocol {
        /// Host and port.
        address: Arc<str>,
        /// What came.
        answer: String,
    },
}

/// What is said of a wrong value that was only looked at.
pub(crate) const LEFT: &str = "it has not been removed, as a request that charges would";

/// What is said of a key that holds a list where a limit keeps a hash, and the like.
pub(crate) const WRONG_TYPE: &str =
    "a value of another type; remove the key, or give the store another prefix";

impl RedisError {
    pub(crate) fn corrupt<A: Algorithm>(limit: &Limit<A>, key: &str, detail: &str) -> Self {
        Self::Corrupt { limit: limit.name().into(), key: key.into(), detail: detail.into() }
    }

    /// The same of a request of which something has been done already.
    pub(crate) fn in_part(self) -> Self {
        match self {
            Self::InPart(_) => self,
            other => Self::InPart(Box::new(other)),
        }
    }

    /// The same, of a request of which `some` may have been done already.
    pub(crate) fn after(self, some: bool) -> Self {
        if some { self.in_part() } else { self }
    }

    /// The same of a question that was not the request itself: whatever became of it, nothing was
    /// charged.
    pub(crate) fn of_a_lookup(self) -> Self {
        match self {
            Self::Lost { address, reason } => Self::Unreachable { address, reason },
            Self::TimedOut { address, deadline } => {
                Self::Unreachable { address, reason: format!("no answer within {deadline:?}") }
            }
            other => other,
        }
    }
}

/// Whether a server says that the user may not do this. Of what a script does, each version says it in
/// its own words.
pub(crate) fn is_denied(code: &str, message: &str) -> bool {
    let in_script =
        ["ACL failure in script", "executing the script can't", "No permissions to access a key"];
    match code {
        "NOPERM" => true,
        "ERR" => in_script.iter().any(|said| message.contains(said)),
        // Of EXEC itself; what a transaction is made of is refused by its own name.
        "EXECABORT" => message.contains("NOPERM"),
        _ => false,
    }
}

impl StoreError for RedisError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Config(_) | Self::MayRepeat => ErrorKind::Config,
            Self::Unreachable { .. } | Self::NoServer { .. } => ErrorKind::Unavailable,
            Self::Lost { .. } | Self::TimedOut { .. } | Self::Protocol { .. } => {
                ErrorKind::Indeterminate
            }
            Self::InPart(_) | Self::Disagrees { .. } => ErrorKind::Indeterminate,
            Self::CrossSlot { .. } => ErrorKind::CrossSlot,
            Self::Corrupt { .. } => ErrorKind::Corrupt,
            Self::Contended { .. } => ErrorKind::Contended,
            Self::Refused(refusal) => refusal.kind(),
            Self::NotNative { .. } | Self::NoOperation { .. } => ErrorKind::Unsupported,
            Self::Server { code, message, .. } => match code.as_str() {
                "NOAUTH" | "WRONGPASS" | "NOPERM" | "DENIED" | "MOVED" | "ASK" => ErrorKind::Config,
                code if is_denied(code, message) => ErrorKind::Config,
                "CROSSSLOT" => ErrorKind::CrossSlot,
                "WRONGTYPE" => ErrorKind::Corrupt,
                // A server that wants a password does not even read a long command.
                "ERR" if message.contains("unauthenticated") => ErrorKind::Config,
                // The database of the URL, which this server does not have.
                "ERR" if message.contains("DB index") => ErrorKind::Config,
                // "ERR unknown command", from servers and proxies without scripts.
                "ERR" if message.contains("unknown command") => ErrorKind::Unsupported,
                // A server that is busy, loading, out of memory, read-only or without a master.
                _ => ErrorKind::Unavailable,
            },
        }
    }
}
