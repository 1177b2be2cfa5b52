//! [`RedisConnection`]: the connection of those who bring none of their own.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::link::Link;
use super::node::{Client, Endpoint, Settings};
use super::{Connection, Reply, Word};
use crate::error::RedisError;

/// A connection to a server, shared by all who ask and made anew after it broke.
pub struct RedisConnection {
    topology: Topology,
    deadline: Duration,
}

/// Who keeps what.
enum Topology {
    Single(Link),
}

impl RedisConnection {
    /// Connects to the server at a URL, `redis://[user:password@]host[:port][/database]`.
    ///
    /// # Errors
    /// A URL that is not one, a server that cannot be reached within the deadline, or one that lets
    /// nobody in without a password.
    pub async fn open(url: &str, deadline: Duration) -> Result<Self, RedisError> {
        let endpoint = endpoint(url)?;
        let topology = Topology::Single(Link::new(endpoint, deadline));
        let connection = Self { topology, deadline };
        // Without a password a server lets connect, and refuses the first command.
        connection.send("", &[Word::Text("PING")]).await?;
        Ok(connection)
    }

    fn until(&self) -> Instant {
        Instant::now() + self.deadline
    }
}

fn endpoint(url: &str) -> Result<Endpoint, RedisError> {
    let refuse = || {
        RedisError::Config(
            "the store's URL cannot be used; write redis://[user:password@]host[:port][/database]"
                .into(),
        )
    };
    let url = url::Url::parse(url).map_err(|_| refuse())?;
    let text = |text: &str| (!text.is_empty()).then(|| decoded(text));
    let database = url.path().trim_matches('/');
    let database = if database.is_empty() { 0 } else { database.parse().map_err(|_| refuse())? };
    let resp3 = url
        .query_pairs()
        .any(|(name, value)| name == "protocol" && matches!(&*value, "3" | "resp3"));
    let settings = Settings {
        client: client(&url)?,
        user: text(url.username()),
        password: url.password().and_then(text),
        database,
        resp3,
        tls: None,
    };
    let host = url.host_str().filter(|host| !host.is_empty()).ok_or_else(refuse)?;
    let host = host.trim_start_matches('[').trim_end_matches(']');
    Ok(Endpoint::new(host, url.port().unwrap_or(6379), &Arc::new(settings)))
}

/// The client that the URL asks for.
fn client(url: &url::Url) -> Result<Client, RedisError> {
    let asked = url.query_pairs().find(|(name, _)| name == "client");
    match asked.as_ref().map(|(_, client)| &**client) {
        None => Ok(Client::default()),
        #[cfg(feature = "redis")]
        Some("redis") => Ok(Client::Redis),
        #[cfg(feature = "fred")]
        Some("fred") => Ok(Client::Fred),
        Some(other) => Err(RedisError::Config(format!(
            "client={other} in the store's URL is none that this was built with"
        ))),
    }
}

fn decoded(text: &str) -> String {
    percent_encoding::percent_decode_str(text).decode_utf8_lossy().into_owned()
}

impl Connection for RedisConnection {
    async fn send(&self, _key: &str, words: &[Word<'_>]) -> Result<Reply, RedisError> {
        match &self.topology {
            Topology::Single(link) => link.send(self.until(), false, words).await,
        }
    }

    async fn transaction(
        &self,
        _key: &str,
        commands: &[Vec<Word<'_>>],
    ) -> Result<Vec<Reply>, RedisError> {
        match &self.topology {
            Topology::Single(link) => link.transaction(self.until(), false, commands).await,
        }
    }

    async fn send_to_each(&self, words: &[Word<'_>]) -> Vec<(Arc<str>, Result<Reply, RedisError>)> {
        match &self.topology {
            Topology::Single(link) => {
                vec![(Arc::clone(link.address()), link.send(self.until(), false, words).await)]
            }
        }
    }

    fn is_cluster(&self) -> bool {
        match &self.topology {
            Topology::Single(_) => false,
        }
    }

    fn address(&self) -> &Arc<str> {
        match &self.topology {
            Topology::Single(link) => link.address(),
        }
    }
}

/// Without the login.
impl fmt::Debug for RedisConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisConnection")
            .field("address", self.address())
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}
