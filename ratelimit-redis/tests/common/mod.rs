//! Looking at a server, and meddling with it, beside the store under test.

#![allow(dead_code, reason = "not everybody needs all of it")]

use std::sync::Arc;
use std::time::Duration;

use ratelimit_redis::{Argument, Client, Connection, Deadline, RedisConnection, RedisError, Reply};
use ratelimit_testkit::RedisServer;

/// A connection beside the store's, to look and to meddle.
pub(crate) fn aside(server: &RedisServer) -> redis::Connection {
    let client = redis::Client::open(server.url()).expect("a URL");
    client.get_connection().expect("the server is up")
}

/// Sends a command and takes its answer.
pub(crate) fn query<T: redis::FromRedisValue>(
    connection: &mut redis::Connection,
    words: &[&str],
) -> T {
    let mut command = redis::Cmd::new();
    for word in words {
        command.arg(*word);
    }
    command.query(connection).expect("the server answers")
}

/// A connection that does what no server can be made to do at a given moment.
pub(crate) struct Meddled {
    connection: RedisConnection,
    is_cluster: bool,
    may_repeat: bool,
    /// What is called before a command is sent, and may say that the connection is lost instead.
    before: Before,
}

/// Meddling takes none of a request's time: what is sent has as much as it needs.
fn patient() -> Deadline {
    Deadline::within(Duration::from_secs(20))
}

type Before = Box<dyn Fn(&[Argument<'_>]) -> Meddling + Send + Sync>;

/// What becomes of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Meddling {
    /// It is sent.
    None,
    /// It is sent twice, one after the other, as a client does that lost the answer of the first.
    Twice,
    /// It is sent, and its answer is lost.
    AnswerLost,
    /// It is never sent.
    NeverSent,
}

impl Meddled {
    pub(crate) fn new(connection: RedisConnection) -> Self {
        let before = Box::new(|_: &[Argument<'_>]| Meddling::None);
        Self { connection, is_cluster: false, may_repeat: false, before }
    }

    /// It says that it is a cluster.
    pub(crate) fn clustered(mut self) -> Self {
        self.is_cluster = true;
        self
    }

    /// It says that it may send again, and sends everything twice.
    pub(crate) fn repeating(mut self, may_repeat: bool) -> Self {
        self.may_repeat = may_repeat;
        if may_repeat { self.before(|_| Meddling::Twice) } else { self }
    }

    pub(crate) fn before(
        mut self,
        before: impl Fn(&[Argument<'_>]) -> Meddling + Send + Sync + 'static,
    ) -> Self {
        self.before = Box::new(before);
        self
    }
}

impl Connection for Meddled {
    async fn send(
        &self,
        key: &str,
        words: &[Argument<'_>],
        _: Deadline,
    ) -> Result<Reply, RedisError> {
        let deadline = patient();
        let address = || Arc::clone(self.connection.address());
        let reason = || "meddled with".to_owned();
        match (self.before)(words) {
            Meddling::None => self.connection.send(key, words, deadline).await,
            Meddling::Twice => {
                // Whatever it was.
                drop(self.connection.send(key, words, deadline).await);
                self.connection.send(key, words, deadline).await
            }
            Meddling::AnswerLost => {
                self.connection.send(key, words, deadline).await?;
                Err(RedisError::Lost { address: address(), reason: reason() })
            }
            Meddling::NeverSent => {
                Err(RedisError::Unreachable { address: address(), reason: reason() })
            }
        }
    }

    async fn transaction(
        &self,
        key: &str,
        commands: &[Vec<Argument<'_>>],
        _: Deadline,
    ) -> Result<Vec<Reply>, RedisError> {
        let deadline = patient();
        let address = || Arc::clone(self.connection.address());
        let reason = || "meddled with".to_owned();
        let words: Vec<_> = commands.iter().flatten().copied().collect();
        match (self.before)(&words) {
            Meddling::None => self.connection.transaction(key, commands, deadline).await,
            Meddling::Twice => {
                self.connection.transaction(key, commands, deadline).await?;
                self.connection.transaction(key, commands, deadline).await
            }
            Meddling::AnswerLost => {
                self.connection.transaction(key, commands, deadline).await?;
                Err(RedisError::Lost { address: address(), reason: reason() })
            }
            Meddling::NeverSent => {
                Err(RedisError::Unreachable { address: address(), reason: reason() })
            }
        }
    }

    async fn send_to_each(
        &self,
        words: &[Argument<'_>],
        deadline: Deadline,
    ) -> Vec<(Arc<str>, Result<Reply, RedisError>)> {
        self.connection.send_to_each(words, deadline).await
    }

    fn is_cluster(&self) -> bool {
        self.is_cluster
    }

    fn may_repeat(&self) -> bool {
        self.may_repeat
    }

    fn address(&self) -> &Arc<str> {
        self.connection.address()
    }
}

/// The server's URL, for a store by this client.
pub(crate) fn url(server: &RedisServer, client: Client) -> String {
    with_client(&server.url(), client)
}

/// A URL, for a store by this client.
pub(crate) fn with_client(url: &str, client: Client) -> String {
    let name = match client {
        #[cfg(feature = "redis")]
        Client::Redis => "redis",
        #[cfg(feature = "fred")]
        Client::Fred => "fred",
        other => panic!("a client that has no name: {other:?}"),
    };
    let mark = if url.contains('?') { '&' } else { '?' };
    format!("{url}{mark}client={name}")
}

/// Runs each of these cases by each client that there is.
#[allow(unused_macros, reason = "not by everybody who looks")]
macro_rules! with_each_client {
    ($($case:ident),* $(,)?) => {
        #[cfg(feature = "redis")]
        mod by_redis {
            $(
                #[tokio::test]
                async fn $case() {
                    super::$case(ratelimit_redis::Client::Redis).await;
                }
            )*
        }

        #[cfg(feature = "fred")]
        mod by_fred {
            $(
                #[tokio::test]
                async fn $case() {
                    super::$case(ratelimit_redis::Client::Fred).await;
                }
            )*
        }
    };
}
