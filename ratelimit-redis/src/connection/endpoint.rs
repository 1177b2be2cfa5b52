//! [`Endpoint`]: a server, how to log in to it, and why that fails.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::peer::{Peer, WITHHELD, remedy, server_error};
use super::tls::Tls;
use crate::client::Client;
use crate::error::RedisError;
use crate::runtime::StoreRuntime;

/// How to log in to a server; the same for all servers of a cluster.
#[derive(Clone, Default)]
pub(crate) struct Settings {
    pub(crate) client: Client,
    pub(crate) user: Option<String>,
    pub(crate) password: Option<String>,
    pub(crate) database: u32,
    pub(crate) resp3: bool,
    /// Whether it is of a cluster.
    #[cfg_attr(not(feature = "fred"), allow(dead_code, reason = "the client redis copes"))]
    pub(crate) is_cluster: bool,
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
    fn tried(&self) -> String {
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

    /// Whether its host is the path of a Unix socket.
    pub(super) fn is_socket(&self) -> bool {
        self.host.starts_with('/')
    }

    /// The error when no connection was made.
    pub(super) fn not_connected(&self, error: &io::Error) -> RedisError {
        #[cfg(feature = "tls")]
        if let Some(refused) = super::tls::refused_by(self.peer.address(), error) {
            return refused;
        }
        match error.kind() {
            io::ErrorKind::UnexpectedEof => self.broken_off("it ended the connection at once"),
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                self.broken_off(&error.to_string())
            }
            _ => self.peer.unreachable(error.to_string()),
        }
    }

    /// The error when what answers there broke off the first login, as a port for TLS does that
    /// meets none.
    pub(super) fn broken_off(&self, reason: &str) -> RedisError {
        let settings = &self.settings;
        let is_first = !settings.has_served.load(Ordering::Acquire);
        let may_be_tls = is_first && settings.tls.is_none() && !self.is_socket();
        let hint = if may_be_tls { "; if this port is for TLS, use rediss://" } else { "" };
        self.peer.unreachable(format!("{reason}{hint}"))
    }

    /// The error for a refused login: what was tried, and what to check. Of the server's message,
    /// it uses only the kind.
    pub(super) fn refused_login(&self, code: &str, detail: &str) -> RedisError {
        let (address, settings) = (self.peer.address(), &self.settings);
        let tried = settings.tried();
        let said = |part: &str| detail.to_ascii_lowercase().contains(part);
        let is_unknown = said("unknown command");
        let config = |what: &str| RedisError::Config(format!("Redis at {address} {what}"));
        let refused = |message: &str| server_error(address, code, message);
        match code {
            "ERR" if is_unknown && said("select") && !said("auth") => {
                config("does not know SELECT; leave the database out of the URL")
            }
            _ if code == "NOPROTO" || (code == "ERR" && is_unknown && settings.resp3) => config(
                "does not know HELLO 3, which protocol=resp3 in the URL asks for; use protocol=resp2",
            ),
            "ERR" if is_unknown && settings.password.is_some() => config(
                "does not know AUTH; allow the command there, or leave user:password@host out of the URL",
            ),
            "ERR" if said("wrong number of arguments") && settings.password.is_some() => {
                config(&format!(
                    "refused {tried}: it is older than Redis 6 and knows no users; write :password@host in the URL"
                ))
            }
            "ERR" if said("not allowed in cluster mode") => config(&format!(
                "is one of a cluster, which has only database 0; use redis-cluster://{address}"
            )),
            "ERR" if said("max number of clients") || said("max + cluster") => {
                refused("max number of clients reached; raise maxclients")
            }
            "ERR" if said("db index") => refused(
                "DB index is out of range; choose a database that it has (CONFIG GET databases)",
            ),
            "WRONGPASS" => refused(&format!("the user or the password is wrong, tried by {tried}")),
            "NOAUTH" => refused(&format!("it wants a login, and refused {tried}")),
            "NOPERM" => refused(&format!(
                "the user may not do what it takes to connect, tried by {tried}, SELECT and PING"
            )),
            "DENIED" => refused(
                "it is in protected mode and refuses connections from other machines; set a password there, and give it in \
                 the URL",
            ),
            _ => {
                let code = if remedy(code, "").is_some() { code } else { "ERR" };
                server_error(address, code, &format!("it refused {tried} {WITHHELD}"))
            }
        }
    }
}
