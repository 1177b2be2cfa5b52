//! External connections by the crate `fred`.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use fred::clients::{Client, Pool};
use fred::error::{Error, ErrorKind};
use fred::interfaces::ClientLike;
use fred::types::config::Options;

use super::{IntoConnection, within};
use crate::connection::node::fred::{Given, custom, executed, in_one, reason, reply, transaction};
use crate::connection::peer::Peer;
use crate::connection::watchdog::Watchdog;
use crate::connection::{Argument, Connection, RedisConnection, Reply};
use crate::deadline::Deadline;
use crate::error::RedisError;

/// A client of `fred` that a program shares with a store: see [`IntoConnection`].
#[derive(Clone)]
pub struct ExternalFred(Kind);

#[derive(Clone)]
enum Kind {
    /// The program's own clients, to one server.
    Theirs(Box<Theirs>),
    /// A managed connection, to a cluster.
    Ours(Arc<RedisConnection>),
}

/// Clients to one server.
#[derive(Clone)]
struct Theirs {
    clients: Clients,
    watchdog: Arc<Watchdog>,
    peer: Peer,
}

#[derive(Clone)]
enum Clients {
    One(Client),
    Several(Pool),
}

impl IntoConnection for Client {
    type Connection = ExternalFred;

    fn into_connection(self, deadline: Duration) -> ExternalFred {
        ExternalFred::new(Clients::One(self), deadline)
    }
}

impl IntoConnection for Pool {
    type Connection = ExternalFred;

    fn into_connection(self, deadline: Duration) -> ExternalFred {
        ExternalFred::new(Clients::Several(self), deadline)
    }
}

impl ExternalFred {
    fn new(clients: Clients, limit: Duration) -> Self {
        let client = clients.next();
        let given = Given::of(client);
        if client.is_clustered() {
            // The client cannot be kept from repeating requests, and does not survive an `ASK`.
            return Self(Kind::Ours(Arc::new(RedisConnection::given(given, limit))));
        }
        let hosts = given.hosts().into_iter().map(|(host, port)| format!("{host}:{port}"));
        let address = hosts.collect::<Vec<_>>().join(",");
        let (user, password) = given.login();
        let peer = Peer::new(address.into(), user, password);
        let watchdog = Arc::new(Watchdog::new(limit));
        Self(Kind::Theirs(Box::new(Theirs { clients, watchdog, peer })))
    }
}

fn options(deadline: Deadline) -> Options {
    Options {
        // Whatever the client's own settings.
        max_attempts: Some(1),
        // An unconnected client fails at once instead of sending the request after it reconnects.
        fail_fast: true,
        // Slightly before our deadline, so the client does not send a request that waited until then.
        timeout: Some(deadline.remaining().saturating_sub(Duration::from_millis(1))),
        ..Options::default()
    }
}

impl Clients {
    /// The client whose turn it is.
    fn next(&self) -> &Client {
        match self {
            Self::One(client) => client,
            Self::Several(pool) => pool.next_connected(),
        }
    }
}

impl Theirs {
    fn failed(&self, error: &Error, deadline: Deadline) -> RedisError {
        match error.kind() {
            ErrorKind::Timeout => RedisError::TimedOut {
                address: Arc::clone(self.peer.address()),
                deadline: deadline.given(),
            },
            // Not sent: the client is not connected, or its queue is full.
            ErrorKind::Canceled | ErrorKind::Backpressure => {
                self.peer.unreachable("the client is not connected")
            }
            _ => self.peer.lost(reason(error)),
        }
    }

    async fn send(&self, words: &[Argument<'_>], deadline: Deadline) -> Result<Reply, RedisError> {
        let (name, arguments) = custom(words);
        let client = self.clients.next().with_options(&options(deadline));
        let asked = async {
            let frame = client.custom_raw(name, arguments).await;
            reply(&self.peer, frame.map_err(|error| self.failed(&error, deadline))?)
        };
        // Boxed: fred's futures are large, and would enlarge every caller's.
        within(&self.watchdog, &self.peer, deadline, Box::pin(asked)).await
    }

    async fn transaction(
        &self,
        commands: &[Vec<Argument<'_>>],
        deadline: Deadline,
    ) -> Result<Vec<Reply>, RedisError> {
        let commands = transaction(false, commands);
        let pipeline = self.clients.next().pipeline().with_options(&options(deadline));
        let asked = async {
            let answers = in_one(pipeline, commands).await;
            executed(&self.peer, answers.map_err(|error| self.failed(&error, deadline))?)
        };
        // Boxed: fred's futures are large, and would enlarge every caller's.
        within(&self.watchdog, &self.peer, deadline, Box::pin(asked)).await
    }
}

#[deny(clippy::missing_trait_methods)]
impl Connection for ExternalFred {
    async fn send(
        &self,
        key: &str,
        words: &[Argument<'_>],
        deadline: Deadline,
    ) -> Result<Reply, RedisError> {
        match &self.0 {
            Kind::Theirs(client) => client.send(words, deadline).await,
            Kind::Ours(connection) => connection.send(key, words, deadline).await,
        }
    }

    async fn send_splittable(
        &self,
        key: &str,
        words: &[Argument<'_>],
        deadline: Deadline,
    ) -> Result<Reply, RedisError> {
        match &self.0 {
            Kind::Theirs(client) => client.send(words, deadline).await,
            Kind::Ours(connection) => connection.send_splittable(key, words, deadline).await,
        }
    }

    async fn transaction(
        &self,
        key: &str,
        commands: &[Vec<Argument<'_>>],
        deadline: Deadline,
    ) -> Result<Vec<Reply>, RedisError> {
        match &self.0 {
            Kind::Theirs(client) => client.transaction(commands, deadline).await,
            Kind::Ours(connection) => connection.transaction(key, commands, deadline).await,
        }
    }

    async fn send_to_each(
        &self,
        words: &[Argument<'_>],
        deadline: Deadline,
    ) -> Vec<(Arc<str>, Result<Reply, RedisError>)> {
        match &self.0 {
            Kind::Theirs(client) => {
                let answer = client.send(words, deadline).await;
                vec![(Arc::clone(client.peer.address()), answer)]
            }
            Kind::Ours(connection) => connection.send_to_each(words, deadline).await,
        }
    }

    fn is_cluster(&self) -> bool {
        matches!(self.0, Kind::Ours(_))
    }

    fn may_repeat(&self) -> bool {
        match &self.0 {
            Kind::Theirs(_) => false,
            Kind::Ours(connection) => connection.may_repeat(),
        }
    }

    fn address(&self) -> &Arc<str> {
        match &self.0 {
            Kind::Theirs(client) => client.peer.address(),
            Kind::Ours(connection) => connection.address(),
        }
    }
}

impl fmt::Debug for ExternalFred {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExternalFred").field("address", self.address()).finish_non_exhaustive()
    }
}
