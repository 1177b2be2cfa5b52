//! [`RedisError`]: why the store failed, and whether it may have charged.

use std::sync::Arc;
use std::time::Duration;

use ratelimit_core::store::Op;
use ratelimit_core::{Algorithm, ConfigError, ErrorKind, Limit, Refusal, StoreError, Timestamp};

/// What a function returns that fails with a [`RedisError`].
pub(crate) type Result<T, E = RedisError> = std::result::Result<T, E>;

/// Why a request failed.
///
/// Messages name the server by its address, never by its URL, so they never contain a password.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RedisError {
    /// The URL or another setting is wrong.
    #[error("{0}")]
    Config(String),
    /// No connection could be made, or a look-up before the request had no answer. The request was
    /// not sent.
    #[error("cannot reach Redis at {address}: {reason}")]
    Unreachable {
        /// Host and port.
        address: Arc<str>,
        /// Why the attempt failed.
        reason: String,
    },
    /// None of the named or discovered servers is in charge of the key now. Nothing was charged.
    #[error("no server of Redis at {address} is in charge now: {reason}")]
    NoServer {
        /// Hosts and ports of the named servers.
        address: Arc<str>,
        /// What they answered.
        reason: String,
    },
    /// The connection ended after the request was sent and before a reply came. It may have been
    /// charged.
    #[error("Redis at {address} did not answer, and may have charged the request: {reason}")]
    Lost {
        /// Host and port.
        address: Arc<str>,
        /// Why the connection ended.
        reason: String,
    },
    /// No reply came within the deadline after the request was sent. It may have been charged.
    #[error(
        "Redis at {address} did not answer within {deadline:?}, and may have charged the request"
    )]
    TimedOut {
        /// Host and port.
        address: Arc<str>,
        /// The time that the call was given.
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
    /// A key contains a value that its limit did not write. A wrong value has been removed, unless
    /// the request was a peek, and the next request starts the limit fresh. A key of a wrong type
    /// must be removed by hand. Nothing was charged.
    #[error("the key {key:?} contains a value that limit {limit:?} did not write ({detail})")]
    #[non_exhaustive]
    Corrupt {
        /// The limit's name.
        limit: String,
        /// The key on the server.
        key: String,
        /// What was found, and whether it was removed.
        detail: String,
    },
    /// Other requests for the same keys came first in every attempt, or until too little time was
    /// left, also those of this process. Nothing was charged.
    #[error(
        "in {attempts} attempts, other requests for the same key came first; send the request again"
    )]
    #[non_exhaustive]
    Contended {
        /// How many attempts were made.
        attempts: usize,
    },
    /// The keys of the batch lie in several slots of the cluster, and the store refuses that
    /// ([`CrossSlot::Refuse`](crate::CrossSlot::Refuse)). Nothing was charged.
    #[error(
        "the keys {first:?} and {other:?} lie in different slots of the cluster; keep them together by a \
         tag (Builder::tag), or allow batches in two waves (CrossSlot::Reserve)"
    )]
    #[non_exhaustive]
    CrossSlot {
        /// A key of the batch.
        first: String,
        /// A key of another slot.
        other: String,
    },
    /// The request was done in part: one server did its part and another did not, or a charge could
    /// not be returned. Limits that were charged admit less until the charge refills, never more.
    /// Repeating the request may do the first part twice, unless it has an id.
    #[error("a request was done in part, because {0}")]
    InPart(Box<RedisError>),
    /// A transaction cannot decide this limit. Nothing was charged.
    #[error(
        "limit {limit:?}: a transaction charges whatever it reads, and cannot decide this; use \
         the Lua mode, or count = \"attempts\" (in code: count_attempts()) with one of fixed-window (whose windows are a \
         length, and none of a calendar), first-request-window, window-log and sliding-log"
    )]
    NotNative {
        /// The limit's name.
        limit: String,
    },
    /// A transaction cannot do this operation, because it cannot take back a charge. Nothing was
    /// charged.
    #[error("limit {limit:?}: there is no {op} in the mode of transactions; use the Lua mode")]
    NoOperation {
        /// The limit's name.
        limit: String,
        /// The requested operation.
        op: Op,
    },
    /// The request is invalid. Nothing was charged.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// By the server's clock, the limit is in none of the windows that the program named: its clock
    /// is behind, or a window of the calendar ahead. Nothing was charged.
    #[error(
        "limit {limit:?}: the clock of Redis at {address} says {server} since 1970, and this program's {client}, which \
         are more than a window of its calendar apart; set whichever is wrong, and keep both by NTP"
    )]
    #[non_exhaustive]
    OtherWindow {
        /// The limit's name.
        limit: String,
        /// Host and port.
        address: Arc<str>,
        /// What the server's clock says.
        server: Timestamp,
        /// What this program's clock says.
        client: Timestamp,
    },
    /// A script decided differently from the limit's step on the same state, so one of the two is
    /// wrong. The request may have been charged.
    #[error(
        "limit {limit:?}: the script on Redis at {address} decided otherwise than the algorithm does; its twin in \
         Lua is wrong, or another program stores states under the same keys"
    )]
    #[non_exhaustive]
    Disagrees {
        /// The limit's name.
        limit: String,
        /// Host and port.
        address: Arc<str>,
    },
    /// The reply is none that the script returns. The request may have been charged.
    #[error(
        "Redis at {address} answered with an unexpected {answer}; check that no proxy or other kind of server is at this \
         address"
    )]
    Protocol {
        /// Host and port.
        address: Arc<str>,
        /// The kind of the reply.
        answer: String,
    },
}

/// Appended for a wrong value that was only read.
pub(crate) const LEFT: &str = "it has not been removed; the next request that charges removes it";

/// Appended for a wrong value that a charging request found.
pub(crate) const REMOVED: &str = "it has been removed; the next request starts the limit afresh";

/// Reported for a key of another type, such as a list in place of a hash.
pub(crate) const WRONG_TYPE: &str =
    "a value of another type; remove the key, or give the store another prefix";

impl RedisError {
    pub(crate) fn corrupt<A: Algorithm>(limit: &Limit<A>, key: &str, detail: &str) -> Self {
        Self::Corrupt { limit: limit.name().into(), key: key.into(), detail: detail.into() }
    }

    /// Whether the server says that a key has another type than the command is for.
    pub(crate) fn is_wrong_type(&self) -> bool {
        // Within a script, older servers give another code and name this one in the message.
        match self {
            Self::Server { code, message, .. } => {
                code == "WRONGTYPE" || message.contains("WRONGTYPE")
            }
            Self::InPart(error) => error.is_wrong_type(),
            _ => false,
        }
    }

    /// Marks the error as one of a request that was already done in part.
    pub(crate) fn in_part(self) -> Self {
        match self {
            Self::InPart(_) => self,
            other => Self::InPart(Box::new(other)),
        }
    }

    /// Nothing was charged, because a record is another one than the request assumed. The store
    /// sends it again.
    pub(crate) const STALE: Self = Self::Contended { attempts: 0 };

    pub(crate) const fn is_stale(&self) -> bool {
        matches!(self, Self::Contended { attempts: 0 })
    }

    /// The same if `some` of the request may already be done.
    pub(crate) fn after(self, some: bool) -> Self {
        if some { self.in_part() } else { self }
    }

    /// The error of a connection whose settings were accepted before. A certificate that has
    /// expired or a password that was changed is an outage then, not a fault of the program's
    /// configuration.
    pub(crate) fn in_use(self, address: &Arc<str>) -> Self {
        if self.kind() != ErrorKind::Config {
            return self;
        }
        Self::Unreachable { address: Arc::clone(address), reason: self.to_string() }
    }

    /// The error of a look-up that preceded the request: whatever happened to it, nothing was
    /// charged.
    pub(crate) fn of_a_lookup(self) -> Self {
        match self {
            Self::InPart(error) => error.of_a_lookup(),
            Self::Lost { address, reason } => Self::Unreachable { address, reason },
            Self::TimedOut { address, deadline } => {
                Self::Unreachable { address, reason: format!("no answer within {deadline:?}") }
            }
            other => other,
        }
    }
}

/// Whether the server denies the user this command. For commands in a script, each version words it
/// differently.
pub(crate) fn is_denied(code: &str, message: &str) -> bool {
    let in_script =
        ["ACL failure in script", "executing the script can't", "No permissions to access a key"];
    match code {
        "NOPERM" => true,
        "ERR" => in_script.iter().any(|said| message.contains(said)),
        // `EXEC` itself; a command inside the transaction is refused by its own name.
        "EXECABORT" => message.contains("NOPERM"),
        _ => false,
    }
}

impl From<ConfigError> for RedisError {
    fn from(error: ConfigError) -> Self {
        Self::Config(error.to_string())
    }
}

impl StoreError for RedisError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Config(_) | Self::OtherWindow { .. } => ErrorKind::Config,
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
                // A server that requires a password rejects a long command before reading it.
                "ERR" if message.contains("unauthenticated") => ErrorKind::Config,
                // The server does not have the URL's database.
                "ERR" if message.contains("DB index") => ErrorKind::Config,
                // "ERR unknown command", from servers and proxies without scripts.
                "ERR" if message.contains("unknown command") => ErrorKind::Unsupported,
                // A server that is busy, loading, out of memory, read-only or without a master.
                _ => ErrorKind::Unavailable,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address() -> Arc<str> {
        "127.0.0.1:6379".into()
    }

    fn server(code: &str, message: &str) -> RedisError {
        RedisError::Server { address: address(), code: code.into(), message: message.into() }
    }

    /// Each variant by its number: a new one does not compile before it has a row.
    const fn number(error: &RedisError) -> usize {
        match error {
            RedisError::Config(_) => 0,
            RedisError::Unreachable { .. } => 1,
            RedisError::NoServer { .. } => 2,
            RedisError::Lost { .. } => 3,
            RedisError::TimedOut { .. } => 4,
            RedisError::Server { .. } => 5,
            RedisError::Corrupt { .. } => 6,
            RedisError::Contended { .. } => 7,
            RedisError::CrossSlot { .. } => 8,
            RedisError::InPart(_) => 9,
            RedisError::NotNative { .. } => 10,
            RedisError::NoOperation { .. } => 11,
            RedisError::Refused(_) => 12,
            RedisError::Disagrees { .. } => 13,
            RedisError::Protocol { .. } => 14,
            RedisError::OtherWindow { .. } => 15,
        }
    }

    /// Each error, its kind, and whether the request may be charged.
    fn rows() -> Vec<(RedisError, ErrorKind, bool)> {
        let (reason, deadline) = (String::from("gone"), Duration::from_millis(7));
        let (limit, key) = (String::from("l7"), String::from("p:1:{a}"));
        let cannot_reserve = Refusal::CannotReserve { limit: limit.clone() };
        let mut rows = vec![
            (RedisError::Config(reason.clone()), ErrorKind::Config, false),
            (
                RedisError::Unreachable { address: address(), reason: reason.clone() },
                ErrorKind::Unavailable,
                false,
            ),
            (
                RedisError::NoServer { address: address(), reason: reason.clone() },
                ErrorKind::Unavailable,
                false,
            ),
            (
                RedisError::Lost { address: address(), reason: reason.clone() },
                ErrorKind::Indeterminate,
                true,
            ),
            (RedisError::TimedOut { address: address(), deadline }, ErrorKind::Indeterminate, true),
            (
                RedisError::Corrupt { limit: limit.clone(), key: key.clone(), detail: reason },
                ErrorKind::Corrupt,
                false,
            ),
            (RedisError::Contended { attempts: 3 }, ErrorKind::Contended, false),
            (RedisError::CrossSlot { first: key.clone(), other: key }, ErrorKind::CrossSlot, false),
            (
                RedisError::InPart(Box::new(RedisError::Contended { attempts: 3 })),
                ErrorKind::Indeterminate,
                true,
            ),
            (RedisError::NotNative { limit: limit.clone() }, ErrorKind::Unsupported, false),
            (
                RedisError::NoOperation { limit: limit.clone(), op: Op::Force },
                ErrorKind::Unsupported,
                false,
            ),
            (cannot_reserve.into(), ErrorKind::Unsupported, false),
            (
                RedisError::OtherWindow {
                    limit: limit.clone(),
                    address: address(),
                    server: Timestamp::ZERO,
                    client: Timestamp::MAX,
                },
                ErrorKind::Config,
                false,
            ),
            (RedisError::Disagrees { limit, address: address() }, ErrorKind::Indeterminate, true),
            (
                RedisError::Protocol { address: address(), answer: "integer".into() },
                ErrorKind::Indeterminate,
                true,
            ),
        ];
        let codes = [
            ("NOAUTH", "", ErrorKind::Config),
            ("WRONGPASS", "", ErrorKind::Config),
            ("NOPERM", "", ErrorKind::Config),
            ("DENIED", "", ErrorKind::Config),
            ("MOVED", "1 127.0.0.1:1", ErrorKind::Config),
            ("ASK", "1 127.0.0.1:1", ErrorKind::Config),
            ("EXECABORT", "NOPERM", ErrorKind::Config),
            ("EXECABORT", "OOM", ErrorKind::Unavailable),
            ("ERR", "ACL failure in script: no", ErrorKind::Config),
            ("ERR", "unauthenticated bulk length", ErrorKind::Config),
            ("ERR", "DB index is out of range", ErrorKind::Config),
            ("ERR", "unknown command 'EVALSHA'", ErrorKind::Unsupported),
            ("ERR", "max number of clients reached", ErrorKind::Unavailable),
            ("CROSSSLOT", "", ErrorKind::CrossSlot),
            ("WRONGTYPE", "", ErrorKind::Corrupt),
            ("OOM", "", ErrorKind::Unavailable),
            ("READONLY", "", ErrorKind::Unavailable),
            ("LOADING", "", ErrorKind::Unavailable),
            ("BUSY", "", ErrorKind::Unavailable),
            ("CLUSTERDOWN", "", ErrorKind::Unavailable),
        ];
        rows.extend(codes.map(|(code, message, kind)| (server(code, message), kind, false)));
        rows
    }

    #[test]
    fn each_error_says_whether_the_request_may_be_charged() {
        let rows = rows();
        for (error, kind, may_be_charged) in &rows {
            assert_eq!(error.kind(), *kind, "{error}");
            assert_eq!(error.kind() == ErrorKind::Indeterminate, *may_be_charged, "{error}");
            // After a part of the request was done, whatever happens leaves that open; a look-up
            // has done nothing.
            for after in [error.clone().in_part(), error.clone().after(true)] {
                assert_eq!(after.kind(), ErrorKind::Indeterminate, "{after}");
            }
            assert_eq!(error.clone().after(false).kind(), *kind, "{error}");
            let looked_up = error.clone().of_a_lookup().kind();
            let is_answer =
                matches!(error, RedisError::Protocol { .. } | RedisError::Disagrees { .. });
            assert!(is_answer || looked_up != ErrorKind::Indeterminate, "{error}");
            let in_use = error.clone().in_use(&address()).kind();
            assert_eq!(
                in_use,
                if *kind == ErrorKind::Config { ErrorKind::Unavailable } else { *kind },
                "{error}"
            );
        }
        let mut numbers: Vec<_> = rows.iter().map(|(error, ..)| number(error)).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers, (0..16).collect::<Vec<_>>(), "a row per variant");
    }
}
