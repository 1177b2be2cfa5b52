//! One connection to one server, by either client. Nothing here reconnects or repeats: the layer
//! above decides what a failure means, in one place for both clients.

use std::net::SocketAddr;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use socket2::TcpKeepalive;

use super::Reply;
use super::peer::Peer;
use super::request::Commands;
use super::tls::Tls;
use crate::client::Client;
use crate::error::{RedisError, Result};
use crate::runtime::StoreRuntime;

#[cfg(feature = "fred")]
pub(super) mod fred;
#[cfg(feature = "redis")]
pub(super) mod redis_rs;
#[cfg(test)]
mod tests;

/// How to log in to a server; the same for all servers of a cluster.
#[derive(Clone, Default)]
pub(crate) struct Settings {
    pub(crate) client: Client,
    pub(crate) user: Option<String>,
    pub(crate) password: Option<String>,
    pub(crate) database: u32,
    pub(crate) resp3: bool,
    /// Whether a node of a cluster is asked if it serves before anything else is sent.
    ///
    /// The client fred closes a connection after `CLUSTERDOWN`, with all pending requests, and none
    /// of them can tell whether it was executed. So nothing is sent before the cluster is up, as
    /// far as this node knows.
    pub(crate) asks_first: bool,
    /// The TLS configuration, for an encrypted connection.
    pub(crate) tls: Option<Tls>,
    /// A connection that owes replies and gives none for so long is replaced.
    pub(crate) limit: Duration,
    /// Where the connections live.
    pub(crate) runtime: Arc<StoreRuntime>,
    /// Whether one of the servers has accepted all of this once.
    pub(crate) has_served: Arc<AtomicBool>,
}

impl Settings {
    /// The form of the login, for messages.
    pub(crate) fn tried(&self) -> String {
        let (how, with) = match (&self.user, &self.password) {
            (_, None) => ("a connection", "without a login"),
            (None, Some(_)) => ("AUTH", "with the password that was given"),
            (Some(_), Some(_)) => ("AUTH", "with the user and the password that were given"),
        };
        format!("{} {with}", if self.resp3 { "HELLO 3" } else { how })
    }
}

/// A server, and how to log in to it.
#[derive(Clone)]
pub(crate) struct Endpoint {
    /// A name or an address, IPv6 without brackets; or the path of a Unix socket.
    pub(crate) host: String,
    pub(crate) port: u16,
    /// Host and port for messages.
    pub(crate) peer: Peer,
    pub(crate) settings: Arc<Settings>,
}

impl Endpoint {
    pub(crate) fn new(host: &str, port: u16, settings: &Arc<Settings>) -> Self {
        let address = match host {
            _ if host.starts_with('/') => host.to_owned(),
            _ if host.contains(':') => format!("[{host}]:{port}"),
            _ => format!("{host}:{port}"),
        };
        let (host, settings) = (host.to_owned(), Arc::clone(settings));
        Self { host, port, peer: Peer::new(address), settings }
    }

    /// The path of its Unix socket, if it has one.
    pub(crate) fn socket(&self) -> Option<&Path> {
        self.host.starts_with('/').then(|| Path::new(&self.host))
    }

    #[cfg(not(unix))]
    fn no_sockets(&self) -> RedisError {
        self.peer.unreachable("this system has no Unix sockets")
    }

    /// The error when what answers there broke off the first login, as a port for TLS does that
    /// meets none.
    fn broken_off(&self, reason: &str) -> RedisError {
        let settings = &self.settings;
        let is_first = !settings.has_served.load(Ordering::Acquire);
        let may_be_tls = is_first && settings.tls.is_none() && self.socket().is_none();
        let hint = if may_be_tls { "; if this port is for TLS, use rediss://" } else { "" };
        self.peer.unreachable(format!("{reason}{hint}"))
    }
}

/// A connection ends when the other side does not acknowledge bytes for this time.
#[cfg(any(target_os = "android", target_os = "fuchsia", target_os = "linux"))]
const USER_TIMEOUT: Duration = Duration::from_secs(20);

/// Ends an idle connection after about the same time if the other side has disappeared.
fn keepalive() -> TcpKeepalive {
    let keepalive = TcpKeepalive::new().with_time(Duration::from_secs(10));
    #[cfg(any(target_os = "android", target_os = "linux", target_vendor = "apple"))]
    let keepalive = keepalive.with_interval(Duration::from_secs(3)).with_retries(3);
    keepalive
}

/// One connection to one server.
pub(crate) enum Node {
    #[cfg(feature = "redis")]
    Redis(redis_rs::Node),
    #[cfg(feature = "fred")]
    Fred(fred::Node),
}

impl Node {
    /// Connects to one of the server's addresses, or without one to its Unix socket, logs in and
    /// selects the database. The caller enforces a deadline by dropping this.
    ///
    /// # Errors
    /// [`RedisError::Unreachable`], [`RedisError::Server`] for a refused login,
    /// [`RedisError::Config`].
    pub(crate) async fn connect(endpoint: &Endpoint, address: Option<SocketAddr>) -> Result<Self> {
        match endpoint.settings.client {
            #[cfg(feature = "redis")]
            Client::Redis => redis_rs::Node::connect(endpoint, address).await.map(Self::Redis),
            #[cfg(feature = "fred")]
            Client::Fred => fred::Node::connect(endpoint, address).await.map(Self::Fred),
        }
    }

    /// Sends commands once. `asking` sends ASKING directly before them. For a rejected transaction
    /// (`EXECABORT`), the error is that of the first command at fault, such as `MOVED`.
    ///
    /// # Errors
    /// [`RedisError::Server`] for an error reply, [`RedisError::Lost`] when the connection ended,
    /// [`RedisError::Unreachable`] if the commands were certainly not sent.
    pub(crate) fn send<'n>(
        &'n self,
        asking: bool,
        commands: Commands<'n>,
    ) -> Pin<Box<dyn Future<Output = Result<Reply>> + Send + 'n>> {
        // Without its type, the client's deeply nested future leaves the layers around a store room
        // below the compiler's limit.
        match self {
            #[cfg(feature = "redis")]
            Self::Redis(node) => Box::pin(node.send(asking, commands)),
            #[cfg(feature = "fred")]
            Self::Fred(node) => Box::pin(node.send(asking, commands)),
        }
    }
}
