//! Inspects a server and interferes with it, beside the store under test.

#![allow(dead_code, reason = "not every test needs all of it")]

use std::sync::Arc;
use std::time::Duration;

use ratelimit_redis::{Argument, Client, Connection, Deadline, RedisConnection, RedisError, Reply};
use ratelimit_testkit::RedisServer;

/// A connection beside the store's, for inspection and interference.
pub(crate) fn aside(server: &RedisServer) -> redis::Connection {
    let client = redis::Client::open(server.url()).expect("a URL");
    client.get_connection().expect("the server is up")
}

/// Sends a command and returns the reply.
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

/// A connection that causes what no server can be made to do at a given moment.
pub(crate) struct Meddled {
    connection: RedisConnection,
    is_cluster: bool,
    may_repeat: bool,
    /// By how many seconds the clock that it reports is ahead.
    clock_ahead_s: i64,
    /// Runs before each command is sent, and may report the connection as lost instead.
    before: Before,
}

/// Interference does not shorten a request's time: each command has as much as it needs.
fn patient() -> Deadline {
    Deadline::within(Duration::from_secs(20))
}

type Before = Box<dyn Fn(&[Argument<'_>]) -> Meddling + Send + Sync>;

/// What happens to a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Meddling {
    /// It is sent.
    None,
    /// It is sent twice in a row, as by a client that lost the first reply.
    Twice,
    /// It is sent, and its reply is lost.
    AnswerLost,
    /// It is never sent.
    NeverSent,
}

impl Meddled {
    pub(crate) fn new(connection: RedisConnection) -> Self {
        let before = Box::new(|_: &[Argument<'_>]| Meddling::None);
        Self { connection, is_cluster: false, may_repeat: false, clock_ahead_s: 0, before }
    }

    /// Reports that it is a cluster.
    pub(crate) fn clustered(mut self) -> Self {
        self.is_cluster = true;
        self
    }

    /// Reports that it may repeat requests, and sends everything twice.
    pub(crate) fn repeating(mut self, may_repeat: bool) -> Self {
        self.may_repeat = may_repeat;
        if may_repeat { self.before(|_| Meddling::Twice) } else { self }
    }

    /// Reports a clock that is so far ahead of the server's.
    pub(crate) fn clock_ahead(mut self, seconds: i64) -> Self {
        self.clock_ahead_s = seconds;
        self
    }

    fn seen(&self, words: &[Argument<'_>], reply: Reply) -> Reply {
        let is_time =
            matches!(words.first(), Some(Argument::Text("TIME") | Argument::Bytes(b"TIME")));
        let Reply::Array(parts) = &reply else { return reply };
        if !is_time {
            return reply;
        }
        let text = |part: &Reply| match part {
            Reply::Text(text) => String::from_utf8_lossy(text).parse::<i64>().expect("a number"),
            other => panic!("{other:?}"),
        };
        let seconds = text(&parts[0]) + self.clock_ahead_s;
        Reply::Array(vec![Reply::Text(seconds.to_string().into()), parts[1].clone()])
    }

    /// The text of a script, which reads the clock that is ahead.
    fn script_ahead(&self, words: &[Argument<'_>]) -> Option<String> {
        let [Argument::Text("EVAL"), Argument::Text(script), ..] = words else { return None };
        let ahead_s = self.clock_ahead_s;
        let time = format!(
            "(function(t) t[1] = string.format('%d', t[1] + {ahead_s}) return t end)(TIME)"
        );
        let plain = script.replace("redis.call('TIME')", "call('TIME')");
        let plain = plain.replace("call('TIME')", &time.replace("TIME", "redis.call('TIME')"));
        (ahead_s != 0).then_some(plain)
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
            Meddling::None => {
                let mut words = words.to_vec();
                let script = self.script_ahead(&words);
                if let Some(script) = &script {
                    words[1] = Argument::Text(script);
                }
                let reply = self.connection.send(key, &words, deadline).await?;
                Ok(self.seen(&words, reply))
            }
            Meddling::Twice => {
                // Whatever the reply was.
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
            Meddling::None => {
                let replies = self.connection.transaction(key, commands, deadline).await?;
                Ok(commands
                    .iter()
                    .zip(replies)
                    .map(|(words, reply)| self.seen(words, reply))
                    .collect())
            }
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

/// The server's URL, for a store with this client.
pub(crate) fn url(server: &RedisServer, client: Client) -> String {
    with_client(&server.url(), client)
}

/// This URL, for a store with this client.
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

/// Runs each of these cases with each available client.
#[allow(unused_macros, reason = "not every test uses it")]
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
