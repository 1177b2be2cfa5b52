//! One connection to one server, by either client. Nothing here connects again or sends again: what a
//! failure means is decided above, in one place for both.

use std::fmt;
use std::sync::Arc;

use super::tls::Tls;
use super::{Reply, Word};
use crate::error::{RedisError, is_denied};

#[cfg(feature = "fred")]
pub(super) mod fred;
#[cfg(feature = "redis")]
pub(super) mod redis_rs;
#[cfg(test)]
mod tests;

/// The crate by which a store speaks to its servers. They decide alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Client {
    /// The crate `redis`.
    #[cfg(feature = "redis")]
    Redis,
    /// The crate `fred`.
    #[cfg(feature = "fred")]
    Fred,
}

impl Default for Client {
    /// `redis`, if the crate was built with it.
    fn default() -> Self {
        #[cfg(feature = "redis")]
        return Self::Redis;
        #[cfg(all(feature = "fred", not(feature = "redis")))]
        return Self::Fred;
    }
}

impl Client {
    /// Those that the crate was built with.
    pub const ALL: &'static [Self] = &[
        #[cfg(feature = "redis")]
        Self::Redis,
        #[cfg(feature = "fred")]
        Self::Fred,
    ];

    /// As a URL has it, `client=redis`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            #[cfg(feature = "redis")]
            Self::Redis => "redis",
            #[cfg(feature = "fred")]
            Self::Fred => "fred",
        }
    }
}

/// As a URL has it.
impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How to get into a server, the same for all of a cluster.
#[derive(Clone, Default)]
pub(crate) struct Settings {
    pub(crate) client: Client,
    pub(crate) user: Option<String>,
    pub(crate) password: Option<String>,
    pub(crate) database: u32,
    pub(crate) resp3: bool,
    /// Whether the server is to be one of a cluster.
    #[cfg(feature = "fred")]
    pub(crate) in_cluster: bool,
    /// How to encrypt, for a server that is to be spoken to in secret.
    pub(crate) tls: Option<Tls>,
    /// All of this, and more, as a client has it that was given to us.
    #[cfg(feature = "fred")]
    pub(crate) given: Option<Arc<fred::Given>>,
}

// By hand: a password is never shown.
impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("client", &self.client)
            .field("database", &self.database)
            .field("resp3", &self.resp3)
            .field("tls", &self.tls)
            .finish_non_exhaustive()
    }
}

/// A server, and how to get into it.
#[derive(Clone, Debug)]
pub(crate) struct Endpoint {
    /// A name or an address, IPv6 without brackets.
    pub(crate) host: String,
    pub(crate) port: u16,
    /// Both, for messages.
    pub(crate) address: Arc<str>,
    pub(crate) settings: Arc<Settings>,
}

impl Endpoint {
    pub(crate) fn new(host: &str, port: u16, settings: &Arc<Settings>) -> Self {
        let address =
            if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
        let settings = Arc::clone(settings);
        Self { host: host.to_owned(), port, address: address.into(), settings }
    }
}

/// One connection to one server. Cheap to clone; clones share it.
#[derive(Clone)]
pub(crate) enum Node {
    #[cfg(feature = "redis")]
    Redis(redis_rs::Node),
    #[cfg(feature = "fred")]
    Fred(fred::Node),
}

impl Node {
    /// Connects, logs in and selects the database. Whoever calls has a deadline, and drops this.
    ///
    /// # Errors
    /// [`RedisError::Unreachable`], [`RedisError::Server`] for a refused login, [`RedisError::Config`].
    pub(crate) async fn connect(endpoint: &Endpoint) -> Result<Self, RedisError> {
        match endpoint.settings.client {
            #[cfg(feature = "redis")]
            Client::Redis => redis_rs::Node::connect(endpoint).await.map(Self::Redis),
            #[cfg(feature = "fred")]
            // fred's futures are large, those of all who wait for them are not to be.
            Client::Fred => Box::pin(fred::Node::connect(endpoint)).await.map(Self::Fred),
        }
    }

    /// Whether requests can be sent to this node of a cluster.
    ///
    /// To the client fred `CLUSTERDOWN` is the end of a connection, with everything that is on its way:
    /// of none of that it can be told whether it was executed. So nothing is sent before the cluster is
    /// up, as far as this node knows.
    #[cfg(feature = "fred")]
    pub(crate) async fn serves(&self, address: &Arc<str>) -> Result<(), RedisError> {
        match self.send(false, &["CLUSTER", "INFO"].map(Word::Text)).await {
            Ok(Reply::Text(info)) if info.windows(18).any(|part| part == b"cluster_state:fail") => {
                Err(server_error(address, "CLUSTERDOWN", "The cluster is down"))
            }
            // Whoever may not ask for it goes without.
            Ok(_) | Err(RedisError::Server { .. }) => Ok(()),
            Err(error) => Err(error.of_a_lookup()),
        }
    }

    /// Sends a command, once; `asking` sends ASKING before it, with nothing of others in between.
    ///
    /// # Errors
    /// [`RedisError::Server`] for what the server answered, [`RedisError::Lost`] when the connection
    /// ended, [`RedisError::Unreachable`] if it is certain that the command was not sent.
    pub(crate) async fn send(&self, asking: bool, words: &[Word<'_>]) -> Result<Reply, RedisError> {
        match self {
            #[cfg(feature = "redis")]
            Self::Redis(node) => node.send(asking, words).await,
            #[cfg(feature = "fred")]
            Self::Fred(node) => Box::pin(node.send(asking, words)).await,
        }
    }

    /// Sends a transaction, once. The answers are those of its commands. Of one that was not taken
    /// (`EXECABORT`), the error is the one that the first command at fault met, such as `MOVED`.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub(crate) async fn transaction(
        &self,
        asking: bool,
        commands: &[Vec<Word<'_>>],
    ) -> Result<Vec<Reply>, RedisError> {
        match self {
            #[cfg(feature = "redis")]
            Self::Redis(node) => node.transaction(asking, commands).await,
            #[cfg(feature = "fred")]
            Self::Fred(node) => Box::pin(node.transaction(asking, commands)).await,
        }
    }
}

/// The answer that is none: the error of a server, by its code, with the remedy where there is one.
pub(crate) fn server_error(address: &Arc<str>, code: &str, detail: &str) -> RedisError {
    let message = match remedy(code, detail) {
        Some(remedy) => format!("{detail} ({remedy})"),
        None => detail.to_owned(),
    };
    RedisError::Server { address: Arc::clone(address), code: code.to_owned(), message }
}

/// What an operator can do about an error, or has to know.
fn remedy(code: &str, detail: &str) -> Option<&'static str> {
    Some(match code {
        "NOAUTH" | "WRONGPASS" => "log in: give user and password in the URL, user:password@host",
        code if is_denied(code, detail) => ALLOW,
        "MOVED" | "ASK" => "the server is one of a cluster; use redis-cluster://",
        "CROSSSLOT" => "the keys of one request have to be of one slot",
        "READONLY" => "the server is a replica; name its master, or sentinels by redis-sentinel://",
        "MASTERDOWN" => {
            "the server is a replica that has lost its master; name the master, or \
                         sentinels by redis-sentinel://"
        }
        "CLUSTERDOWN" => "some slots have no master that answers; CLUSTER NODES tells which",
        "TRYAGAIN" => "the slot is on its way to another server",
        "LOADING" => "it has just started, and answers when it is done",
        "OOM" => "raise maxmemory, or give the limits a server of their own",
        "BUSY" => "somebody's script does not end; SCRIPT KILL ends one that has not written",
        "NOREPLICAS" => "fewer replicas are in touch than min-replicas-to-write asks for",
        "MISCONF" => "the server cannot save and therefore refuses to write; see to its disk",
        _ => return None,
    })
}

const ALLOW: &str = "allow it by ACL SETUSER, or log in as somebody who may";
