//! [`Link`]: the connection to one server, made when it is needed and made anew after it broke.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::{Instant, timeout_at};

use super::node::{Endpoint, Node};
use super::{Reply, Word};
use crate::error::RedisError;

/// The connection to one server, shared by all who ask.
///
/// It is not the client's own manager, because a failure must tell whether the command had been sent:
/// only a connection that is made on our side of that line can.
pub(crate) struct Link {
    endpoint: Endpoint,
    deadline: Duration,
    current: Mutex<Current>,
}

/// The connection in use, and how many there were before it.
#[derive(Default)]
struct Current {
    node: Option<Node>,
    generation: u64,
}

impl Link {
    /// Nothing is sent yet. `deadline` is for messages: each call is told when it has to end.
    pub(crate) fn new(endpoint: Endpoint, deadline: Duration) -> Self {
        Self { endpoint, deadline, current: Mutex::default() }
    }

    pub(crate) fn address(&self) -> &Arc<str> {
        &self.endpoint.address
    }

    pub(crate) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    pub(crate) async fn send(
        &self,
        until: Instant,
        asking: bool,
        words: &[Word<'_>],
    ) -> Result<Reply, RedisError> {
        self.sent(until, async |node| node.send(asking, words).await).await
    }

    pub(crate) async fn transaction(
        &self,
        until: Instant,
        asking: bool,
        commands: &[Vec<Word<'_>>],
    ) -> Result<Vec<Reply>, RedisError> {
        self.sent(until, async |node| node.transaction(asking, commands).await).await
    }

    /// What a request on the connection comes to, until then.
    async fn sent<T>(
        &self,
        until: Instant,
        request: impl AsyncFnOnce(Node) -> Result<T, RedisError>,
    ) -> Result<T, RedisError> {
        let (node, generation) = self.current(until).await?;
        let error = match timeout_at(until, request(node)).await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) => error,
            Err(_) => RedisError::TimedOut {
                address: Arc::clone(&self.endpoint.address),
                deadline: self.deadline,
            },
        };
        // A connection that was lost or does not answer is of no more use, and a server that has
        // become a replica will not be a master again on this one.
        let usable = matches!(&error, RedisError::Server { code, .. } if code != "READONLY");
        if !usable {
            self.forget(generation).await;
        }
        Err(error)
    }

    /// The connection in use, or a new one.
    async fn current(&self, until: Instant) -> Result<(Node, u64), RedisError> {
        let connect = async {
            let mut current = self.current.lock().await;
            if let Some(node) = &current.node {
                return Ok((node.clone(), current.generation));
            }
            let node = Node::connect(&self.endpoint).await?;
            current.node = Some(node.clone());
            current.generation += 1;
            Ok((node, current.generation))
        };
        timeout_at(until, connect).await.unwrap_or_else(|_| {
            Err(RedisError::Unreachable {
                address: Arc::clone(&self.endpoint.address),
                reason: format!("no connection within {:?}", self.deadline),
            })
        })
    }

    /// Forgets a connection that broke, unless somebody has made another one since.
    async fn forget(&self, generation: u64) {
        let mut current = self.current.lock().await;
        if current.generation == generation {
            current.node = None;
        }
    }
}
