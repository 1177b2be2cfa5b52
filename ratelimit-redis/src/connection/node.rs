//! One connection to one server, by either client. Nothing here connects again or sends again: what a
//! failure means is decided above, in one place for both.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use socket2::TcpKeepalive;

use super::peer::Peer;
use super::resolver::Resolver;
use super::tls::Tls;
use super::{Argument, Reply};
use crate::error::RedisError;

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
    /// The crate `fred`. It logs by the crate `log`: at the level `debug` which user a server refuses
    /// something to, and at `trace` what a server says of a login, which may quote the password.
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
#[derive(Clone)]
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
    pub(crate) resolver: Arc<Resolver>,
    /// All of this, and more, as a client has it that was given to us.
    #[cfg(feature = "fred")]
    pub(crate) given: Option<Arc<fred::Given>>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            client: Client::default(),
            user: None,
            password: None,
            database: 0,
            resp3: false,
            #[cfg(feature = "fred")]
            in_cluster: false,
            tls: None,
            resolver: Resolver::system(),
            #[cfg(feature = "fred")]
            given: None,
        }
    }
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

impl Settings {
    /// User and password.
    fn login(&self) -> (Option<&str>, Option<&str>) {
        #[cfg(feature = "fred")]
        if let Some(given) = &self.given {
            return given.login();
        }
        (self.user.as_deref(), self.password.as_deref())
    }

    /// Whether there is something to log in with.
    pub(crate) fn logs_in(&self) -> bool {
        self.login().1.is_some()
    }

    /// What is sent to get in, for messages.
    pub(crate) fn tried(&self) -> &'static str {
        match (self.resp3, self.login()) {
            (true, (_, None)) => "HELLO 3 without a login",
            (true, (None, Some(_))) => "HELLO 3 with the password that was given",
            (true, (Some(_), Some(_))) => "HELLO 3 with the user and the password that were given",
            (false, (_, None)) => "a connection without a login",
            (false, (None, Some(_))) => "AUTH with the password that was given",
            (false, (Some(_), Some(_))) => "AUTH with the user and the password that were given",
        }
    }
}

/// A server, and how to get into it.
#[derive(Clone)]
pub(crate) struct Endpoint {
    /// A name or an address, IPv6 without brackets.
    pub(crate) host: String,
    pub(crate) port: u16,
    /// Both, for messages, and what of its words may stand in them.
    pub(crate) peer: Peer,
    pub(crate) settings: Arc<Settings>,
}

impl Endpoint {
    pub(crate) fn new(host: &str, port: u16, settings: &Arc<Settings>) -> Self {
        let address =
            if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
        Self::named(&address, host, port, settings)
    }

    /// One that messages name by this address.
    pub(crate) fn named(address: &str, host: &str, port: u16, settings: &Arc<Settings>) -> Self {
        let (user, password) = settings.login();
        let peer = Peer::new(address.into(), user, password);
        Self { host: host.to_owned(), port, peer, settings: Arc::clone(settings) }
    }

    pub(crate) fn address(&self) -> &Arc<str> {
        self.peer.address()
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint")
            .field("address", self.address())
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

/// Bytes that the other side does not acknowledge end a connection after this time.
#[cfg(any(target_os = "android", target_os = "fuchsia", target_os = "linux"))]
const USER_TIMEOUT: Duration = Duration::from_secs(20);

/// An idle connection is ended about as soon, if the other side has gone without a word.
fn keepalive() -> TcpKeepalive {
    let keepalive = TcpKeepalive::new().with_time(Duration::from_secs(10));
    #[cfg(any(target_os = "android", target_os = "linux", target_vendor = "apple"))]
    let keepalive = keepalive.with_interval(Duration::from_secs(3)).with_retries(3);
    keepalive
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
    /// Connects to one of the server's addresses, logs in and selects the database. Whoever calls has a
    /// deadline, and drops this.
    ///
    /// # Errors
    /// [`RedisError::Unreachable`], [`RedisError::Server`] for a refused login, [`RedisError::Config`].
    pub(crate) async fn connect(
        endpoint: &Endpoint,
        address: SocketAddr,
    ) -> Result<Self, RedisError> {
        match endpoint.settings.client {
            #[cfg(feature = "redis")]
            Client::Redis => redis_rs::Node::connect(endpoint, address).await.map(Self::Redis),
            #[cfg(feature = "fred")]
            Client::Fred => fred::Node::connect(endpoint, address).await.map(Self::Fred),
        }
    }

    /// Whether requests can be sent to this node of a cluster.
    ///
    /// To the client fred `CLUSTERDOWN` is the end of a connection, with everything that is on its way:
    /// of none of that it can be told whether it was executed. So nothing is sent before the cluster is
    /// up, as far as this node knows.
    #[cfg(feature = "fred")]
    pub(crate) async fn serves(&self, peer: &Peer) -> Result<(), RedisError> {
        match self.send(false, &["CLUSTER", "INFO"].map(Argument::Text)).await {
            Ok(Reply::Text(info)) if info.windows(18).any(|part| part == b"cluster_state:fail") => {
                Err(peer.error("CLUSTERDOWN", "The cluster is down"))
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
    pub(crate) async fn send(
        &self,
        asking: bool,
        words: &[Argument<'_>],
    ) -> Result<Reply, RedisError> {
        match self {
            #[cfg(feature = "redis")]
            Self::Redis(node) => node.send(asking, words).await,
            #[cfg(feature = "fred")]
            // Large, and deeply nested: boxed, it is neither to what awaits this.
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
        commands: &[Vec<Argument<'_>>],
    ) -> Result<Vec<Reply>, RedisError> {
        match self {
            #[cfg(feature = "redis")]
            Self::Redis(node) => node.transaction(asking, commands).await,
            #[cfg(feature = "fred")]
            Self::Fred(node) => Box::pin(node.transaction(asking, commands)).await,
        }
    }
}
