//! [`Link`]: the connection to one server, made when it is needed and made anew after it broke.

#[cfg(feature = "fred")]
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::{Instant, timeout_at};

#[cfg(feature = "fred")]
use super::node::{Client, Settings};
use super::node::{Endpoint, Node};
use super::request::Request;
use crate::error::RedisError;

/// The connection to one server, shared by all who ask.
///
/// It is not the client's own manager, because a failure must tell whether the command had been sent:
/// only a connection that is made on our side of that line can.
pub(crate) struct Link {
    endpoint: Endpoint,
    deadline: Duration,
    current: RwLock<Current>,
    /// Held by whoever makes a connection, so that there are not two.
    connecting: Mutex<()>,
    /// The last connection of which it is known that requests can be sent on it.
    #[cfg(feature = "fred")]
    serving: AtomicU64,
}

/// The connection in use, and how many there were.
#[derive(Default)]
struct Current {
    node: Option<Node>,
    generation: u64,
}

impl Link {
    /// Nothing is sent yet. `deadline` is for messages: each call is told when it has to end.
    pub(crate) fn new(endpoint: Endpoint, deadline: Duration) -> Self {
        Self {
            endpoint,
            deadline,
            current: RwLock::default(),
            connecting: Mutex::default(),
            #[cfg(feature = "fred")]
            serving: AtomicU64::default(),
        }
    }

    pub(crate) fn address(&self) -> &Arc<str> {
        self.endpoint.address()
    }

    pub(crate) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// What a request comes to, until then.
    pub(crate) async fn ask<R: Request>(
        &self,
        until: Instant,
        asking: bool,
        request: &R,
    ) -> Result<R::Answer, RedisError> {
        let (error, generation) = match self.once(until, asking, request).await? {
            Ok(answer) => return Ok(answer),
            Err(failed) => failed,
        };
        self.forget(generation, &error);
        if !matches!(error, RedisError::Unreachable { .. }) {
            return Err(error);
        }
        // The connection had ended before this was sent, such as when the server restarted.
        let (error, generation) = match self.once(until, asking, request).await? {
            Ok(answer) => return Ok(answer),
            Err(failed) => failed,
        };
        self.forget(generation, &error);
        Err(error)
    }

    /// What it comes to on the connection in use, and which one that was if it failed.
    async fn once<R: Request>(
        &self,
        until: Instant,
        asking: bool,
        request: &R,
    ) -> Result<Result<R::Answer, (RedisError, u64)>, RedisError> {
        let (node, generation) = self.current(until).await?;
        #[cfg(feature = "fred")]
        if R::IS_FOR_KEYS {
            self.serves(until, &node, generation).await?;
        }
        let answer = timeout_at(until, request.by(&node, asking)).await.unwrap_or_else(|_| {
            Err(RedisError::TimedOut {
                address: Arc::clone(self.address()),
                deadline: self.deadline,
            })
        });
        Ok(answer.map_err(|error| (error, generation)))
    }

    /// The connection in use, or a new one.
    async fn current(&self, until: Instant) -> Result<(Node, u64), RedisError> {
        if let Some(current) = self.in_use() {
            return Ok(current);
        }
        let connect = async {
            let _alone = self.connecting.lock().await;
            if let Some(current) = self.in_use() {
                return Ok(current);
            }
            // Seldom, and large: every request would carry the room for it.
            let node = Box::pin(Node::connect(&self.endpoint)).await?;
            let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
            current.node = Some(node.clone());
            current.generation += 1;
            Ok((node, current.generation))
        };
        timeout_at(until, connect).await.unwrap_or_else(|_| Err(self.not_connected()))
    }

    fn not_connected(&self) -> RedisError {
        let tls = self.endpoint.settings.tls.is_some();
        let hint = if tls { "; does it speak TLS on this port?" } else { "" };
        self.endpoint.peer.unreachable(format!("no connection within {:?}{hint}", self.deadline))
    }

    /// Asks what has to be known before requests are sent on a connection, once for each.
    #[cfg(feature = "fred")]
    async fn serves(&self, until: Instant, node: &Node, generation: u64) -> Result<(), RedisError> {
        let Settings { client, in_cluster, .. } = &*self.endpoint.settings;
        if !in_cluster
            || *client != Client::Fred
            || self.serving.load(Ordering::Acquire) == generation
        {
            return Ok(());
        }
        let serves = Box::pin(timeout_at(until, node.serves(&self.endpoint.peer))).await;
        let serves = serves.unwrap_or_else(|_| Err(self.not_connected()));
        match &serves {
            Ok(()) => self.serving.store(generation, Ordering::Release),
            Err(error) => self.forget(generation, error),
        }
        serves
    }

    fn in_use(&self) -> Option<(Node, u64)> {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        current.node.clone().map(|node| (node, current.generation))
    }

    /// Forgets a connection that is of no more use after this error, unless somebody has made another
    /// one since. One that was lost or does not answer is not, and a server that has become a replica
    /// will not be a master again on this one.
    fn forget(&self, generation: u64, error: &RedisError) {
        if matches!(error, RedisError::Server { code, .. } if code != "READONLY") {
            return;
        }
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        if current.generation == generation {
            current.node = None;
        }
    }
}

/// Those of several, for messages.
pub(crate) fn addresses(links: &[Arc<Link>]) -> Arc<str> {
    let addresses: Vec<&str> = links.iter().map(|link| &**link.address()).collect();
    addresses.join(",").into()
}
