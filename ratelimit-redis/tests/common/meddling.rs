//! Connections that cause what no server can be made to do at a given moment.

use std::future::Future;

use futures_util::future::BoxFuture;
use tokio::time::{sleep, timeout_at};

use super::prelude::*;

/// What happens to a command or a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Sent,
    /// It is sent, and its reply is lost.
    AnswerLost,
    NeverSent,
    /// The server refuses it.
    Refused,
}

/// The words of a command, or of a transaction's commands.
#[derive(Clone, Debug)]
pub(crate) struct Words(pub(crate) Vec<String>);

impl Words {
    fn of(words: &[Argument<'_>]) -> Self {
        let text = |word: &Argument<'_>| match word {
            Argument::Text(text) => (*text).to_owned(),
            Argument::Bytes(bytes) => String::from_utf8_lossy(bytes).into_owned(),
            Argument::Number(number) => number.to_string(),
        };
        Self(words.iter().map(text).collect())
    }

    pub(crate) fn name(&self) -> &str {
        &self.0[0]
    }

    pub(crate) fn has(&self, word: &str) -> bool {
        self.0.iter().any(|has| has == word)
    }

    pub(crate) fn has_any(&self, words: &[&str]) -> bool {
        words.iter().any(|word| self.has(word))
    }

    /// Whether a key of this identifier is among them.
    pub(crate) fn about(&self, identifier: &str) -> bool {
        let tag = format!("{{{identifier}}}");
        self.0.iter().any(|word| word.ends_with(&tag))
    }

    /// Whether this asks the Lua mode's script for an operation on an identifier.
    pub(crate) fn asks(&self, operation: &str, identifier: &str) -> bool {
        self.has(operation) && self.about(identifier)
    }
}

type Before = Arc<dyn Fn(Words) -> BoxFuture<'static, Fate> + Send + Sync>;

/// A connection that interferes. It shortens no request's time: each command has as much as it
/// needs.
#[derive(Clone)]
pub(crate) struct MeddlingConnection {
    connection: RedisConnection,
    before: Before,
    is_cluster: bool,
    holds: bool,
    rewrite: Option<fn(&str) -> String>,
}

impl MeddlingConnection {
    pub(crate) fn new(connection: RedisConnection) -> Self {
        let before: Before = Arc::new(|_| Box::pin(async { Fate::Sent }));
        let (is_cluster, holds) = (false, false);
        Self { connection, before, is_cluster, holds, rewrite: None }
    }

    /// Runs this before each command, and does with the command what it says.
    pub(crate) fn before<F: Future<Output = Fate> + Send + 'static>(
        mut self,
        before: impl Fn(Words) -> F + Send + Sync + 'static,
    ) -> Self {
        self.before = Arc::new(move |words| Box::pin(before(words)));
        self
    }

    /// The same, with a clone of what it needs.
    pub(crate) fn before_with<C, F: Future<Output = Fate> + Send + 'static>(
        self,
        needed: C,
        before: impl Fn(C, Words) -> F + Send + Sync + 'static,
    ) -> Self
    where
        C: Clone + Send + Sync + 'static,
    {
        self.before(move |words| before(needed.clone(), words))
    }

    /// The same, without waiting for anything.
    pub(crate) fn decided(self, fate: impl Fn(&Words) -> Fate + Send + Sync + 'static) -> Self {
        self.before(move |words| std::future::ready(fate(&words)))
    }

    /// What runs before a command ends by the command's deadline.
    pub(crate) fn holding(mut self) -> Self {
        self.holds = true;
        self
    }

    /// Reports that it is a cluster, so that a batch of several identifiers is split.
    pub(crate) fn clustered(mut self) -> Self {
        self.is_cluster = true;
        self
    }

    /// Changes the text of every script.
    pub(crate) fn rewriting(mut self, rewrite: fn(&str) -> String) -> Self {
        self.rewrite = Some(rewrite);
        self
    }

    async fn meddle<T, F: Future<Output = Result<T, RedisError>>>(
        &self,
        words: Words,
        deadline: Deadline,
        send: impl Fn(Deadline) -> F,
    ) -> Result<T, RedisError> {
        let (address, reason) = (Arc::clone(self.connection.address()), "by the test".to_owned());
        let (patient, before) = (Deadline::within(PATIENCE), (self.before)(words));
        let fate = if self.holds {
            let late =
                RedisError::TimedOut { address: address.clone(), deadline: deadline.given() };
            timeout_at(deadline.at(), before).await.map_err(|_| late)?
        } else {
            before.await
        };
        match fate {
            Fate::Sent => send(patient).await,
            Fate::AnswerLost => {
                send(patient).await?;
                Err(RedisError::Lost { address, reason })
            }
            Fate::NeverSent => Err(RedisError::Unreachable { address, reason }),
            Fate::Refused => {
                Err(RedisError::Server { address, code: "OOM".into(), message: reason })
            }
        }
    }
}

impl Connection for MeddlingConnection {
    async fn send(
        &self,
        key: &str,
        words: &[Argument<'_>],
        deadline: Deadline,
    ) -> Result<Reply, RedisError> {
        let mut changed = words.to_vec();
        let script = match (self.rewrite, words) {
            (Some(rewrite), [Argument::Text("EVAL"), Argument::Text(script), ..]) => {
                rewrite(script)
            }
            _ => String::new(),
        };
        if !script.is_empty() {
            changed[1] = Argument::Text(&script);
        }
        let send = |patient| self.connection.send(key, &changed, patient);
        self.meddle(Words::of(words), deadline, send).await
    }

    async fn transaction(
        &self,
        key: &str,
        commands: &[Vec<Argument<'_>>],
        deadline: Deadline,
    ) -> Result<Vec<Reply>, RedisError> {
        let send = |patient| self.connection.transaction(key, commands, patient);
        self.meddle(Words::of(&commands.concat()), deadline, send).await
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

    fn address(&self) -> &Arc<str> {
        self.connection.address()
    }
}

/// A server that takes a fixed time per command, and knows no script.
#[derive(Clone)]
pub(crate) struct Slow {
    address: Arc<str>,
    takes: Duration,
    pub(crate) sent: Arc<AtomicUsize>,
}

impl Slow {
    pub(crate) fn new(takes: Duration) -> Self {
        Self { address: "slow:1".into(), takes, sent: Arc::default() }
    }

    async fn answer(&self, name: &str, deadline: Deadline) -> Result<Reply, RedisError> {
        let address = Arc::clone(&self.address);
        if deadline.is_over() {
            return Err(RedisError::Unreachable { address, reason: "too late".into() });
        }
        self.sent.fetch_add(1, Ordering::SeqCst);
        if timeout_at(deadline.at(), sleep(self.takes)).await.is_err() {
            return Err(RedisError::TimedOut { address, deadline: deadline.given() });
        }
        match name {
            "TIME" => Ok(Reply::Array(vec![Reply::Integer(1), Reply::Integer(0)])),
            "EVALSHA" => {
                let message = "No matching script.".into();
                Err(RedisError::Server { address, code: "NOSCRIPT".into(), message })
            }
            _ => Ok(Reply::Nil),
        }
    }
}

impl Connection for Slow {
    async fn send(
        &self,
        _: &str,
        words: &[Argument<'_>],
        deadline: Deadline,
    ) -> Result<Reply, RedisError> {
        self.answer(Words::of(words).name(), deadline).await
    }

    async fn transaction(
        &self,
        _: &str,
        commands: &[Vec<Argument<'_>>],
        deadline: Deadline,
    ) -> Result<Vec<Reply>, RedisError> {
        let time = self.answer("TIME", deadline).await?;
        let is_time = |words: &Vec<_>| Words::of(words).name() == "TIME";
        let reply = |words| if is_time(words) { time.clone() } else { Reply::Nil };
        Ok(commands.iter().map(reply).collect())
    }

    async fn send_to_each(
        &self,
        words: &[Argument<'_>],
        deadline: Deadline,
    ) -> Vec<(Arc<str>, Result<Reply, RedisError>)> {
        vec![(Arc::clone(&self.address), self.answer(Words::of(words).name(), deadline).await)]
    }

    fn is_cluster(&self) -> bool {
        false
    }

    fn address(&self) -> &Arc<str> {
        &self.address
    }
}
