//! [`RedisConnection`]: the managed connection, which the store opens itself.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::Connection;
use super::endpoint::{Endpoint, Settings};
use super::reply::Reply;
use super::request::{Argument, Commands, TryAgain};
use super::servers::Servers;
use crate::client::Client;
use crate::deadline::Deadline;
use crate::error::{RedisError, Result};
use crate::runtime::StoreRuntime;
use crate::url::{Kind, RedisUrl};

/// A connection to a server, to the master that Sentinels name, or to a cluster. All callers and
/// clones share it, and it reconnects after a failure.
///
/// It follows a cluster's slots and a service's master wherever they move. It repeats only requests
/// that a server has said it did not execute, or that were never sent.
#[derive(Clone)]
pub struct RedisConnection(Arc<Servers>);

impl RedisConnection {
    /// Connects to the servers at a URL: see [`RedisUrl`]. A connection that owes replies and gives
    /// none for as long as the deadline is replaced.
    ///
    /// # Errors
    /// The URL is invalid, no server can be reached within the deadline, or the servers require
    /// another login.
    pub async fn open(url: &str, deadline: Duration) -> Result<Self> {
        let connection = Self::lazy(url, deadline)?;
        connection.connect(deadline).await?;
        Ok(connection)
    }

    /// Builds the connection without connecting. The first request connects. As long as that fails,
    /// each request returns the reason.
    ///
    /// # Errors
    /// The URL is invalid, or files for encryption cannot be read.
    pub fn lazy(url: &str, deadline: Duration) -> Result<Self> {
        Self::at(&RedisUrl::parse(url)?, None, deadline, Arc::default())
    }

    /// The same with this client, or else with the one in the URL, on this runtime.
    #[cfg_attr(not(feature = "tls"), allow(clippy::unnecessary_wraps, reason = "reads no files"))]
    pub(crate) fn at(
        url: &RedisUrl,
        client: Option<Client>,
        limit: Duration,
        runtime: Arc<StoreRuntime>,
    ) -> Result<Self> {
        #[cfg(feature = "tls")]
        let tls = url.tls().map(super::tls::Tls::new).transpose()?;
        #[cfg(not(feature = "tls"))]
        let tls = url.tls().and(None);
        let settings = Settings {
            client: client.or(url.client()).unwrap_or_default(),
            user: url.user.clone(),
            password: url.password.clone(),
            database: url.database,
            resp3: url.options.resp3,
            is_cluster: url.kind == Kind::Cluster,
            tls,
            limit,
            runtime,
            ..Settings::default()
        };
        let shared = Arc::new(settings.clone());
        let login = match url.kind {
            Kind::One | Kind::Cluster => Arc::clone(&shared),
            Kind::Sentinels => Arc::new(Settings {
                user: url.options.sentinel_user.clone(),
                password: url.options.sentinel_password.clone(),
                database: 0,
                has_served: Arc::default(),
                ..settings
            }),
        };
        let named = url.places.iter().map(|(host, port)| Endpoint::new(host, *port, &login));
        let servers = Servers::new(named, (url.kind, &url.service), &shared);
        Ok(Self(Arc::new(servers)))
    }

    /// Connects within this time.
    pub(crate) async fn connect(&self, within: Duration) -> Result<()> {
        let deadline = Deadline::within(within);
        if self.0.is_cluster() {
            return self.0.open(deadline).await;
        }
        // A server that requires a password accepts the connection and refuses the first command.
        let ping = Commands::One(&[Argument::Text("PING")]);
        let answer = self.0.ask(deadline, "", ping, TryAgain::Wait).await;
        answer.map(drop).map_err(RedisError::of_a_lookup)
    }
}

impl Connection for RedisConnection {
    async fn send(&self, key: &str, words: &[Argument<'_>], deadline: Deadline) -> Result<Reply> {
        self.0.ask(deadline, key, Commands::One(words), TryAgain::Wait).await
    }

    async fn send_splittable(
        &self,
        key: &str,
        words: &[Argument<'_>],
        deadline: Deadline,
    ) -> Result<Reply> {
        self.0.ask(deadline, key, Commands::One(words), TryAgain::Return).await
    }

    async fn transaction(
        &self,
        key: &str,
        commands: &[Vec<Argument<'_>>],
        deadline: Deadline,
    ) -> Result<Vec<Reply>> {
        let commands = Commands::Transaction(commands);
        self.0.peer().array(self.0.ask(deadline, key, commands, TryAgain::Wait).await?)
    }

    async fn send_to_each(
        &self,
        words: &[Argument<'_>],
        deadline: Deadline,
    ) -> Vec<(Arc<str>, Result<Reply>)> {
        self.0.ask_each(deadline, words).await
    }

    fn is_cluster(&self) -> bool {
        self.0.is_cluster()
    }

    fn server_of(&self, key: &str) -> Option<u64> {
        self.0.server_of(key)
    }

    fn address(&self) -> &Arc<str> {
        self.0.peer().address()
    }
}

/// Without the login.
impl fmt::Debug for RedisConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisConnection").field("address", self.address()).finish_non_exhaustive()
    }
}
