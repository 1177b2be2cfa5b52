//! [`Link`]: the way to one server, whose connection is made when it is needed and made anew after it broke.

use std::pin::pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout_at};

use super::connector::{Live, Shared, State, no_answer};
use super::node::Endpoint;
#[cfg(feature = "fred")]
use super::node::{Client, Settings};
use super::request::Request;
use crate::deadline::Deadline;
use crate::error::RedisError;

/// The shortest time after which a connection is called silent.
const SHORTEST_LIMIT: Duration = Duration::from_millis(100);

/// The way to one server, shared by all who ask.
///
/// It is not the client's own manager, because a failure must tell whether the command had been sent:
/// only a connection that is made on our side of that line can.
pub(crate) struct Link {
    shared: Arc<Shared>,
    /// Ends with the link.
    connector: Mutex<Option<AbortHandle>>,
}

impl Drop for Link {
    fn drop(&mut self) {
        let connector = self.connector.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(connector) = connector.take() {
            connector.abort();
        }
    }
}

impl Link {
    /// Nothing is sent yet. A connection that owes answers and gives none for so long is left for another.
    pub(crate) fn new(endpoint: Endpoint, limit: Duration) -> Self {
        let shared = Shared::new(endpoint, limit.max(SHORTEST_LIMIT));
        Self { shared: Arc::new(shared), connector: Mutex::default() }
    }

    pub(crate) fn address(&self) -> &Arc<str> {
        self.endpoint().address()
    }

    pub(crate) fn endpoint(&self) -> &Endpoint {
        &self.shared.endpoint
    }

    /// Whether there is a connection.
    pub(crate) fn is_up(&self) -> bool {
        matches!(&*self.shared.state(), State::Up(_))
    }

    /// What a request comes to.
    pub(crate) async fn ask<R: Request>(
        &self,
        deadline: Deadline,
        asking: bool,
        request: &R,
    ) -> Result<R::Answer, RedisError> {
        let live = self.live(deadline).await?;
        match self.once(&live, deadline, asking, request).await {
            // The connection had ended before this was sent, such as when the server restarted.
            Err(RedisError::Unreachable { .. }) if !deadline.is_over() => {
                let live = self.live(deadline).await?;
                self.once(&live, deadline, asking, request).await
            }
            answer => answer,
        }
    }

    /// What it comes to on this connection, which is left if that shows that it is of no more use.
    async fn once<R: Request>(
        &self,
        live: &Arc<Live>,
        deadline: Deadline,
        asking: bool,
        request: &R,
    ) -> Result<R::Answer, RedisError> {
        #[cfg(feature = "fred")]
        if R::IS_FOR_KEYS {
            self.is_in_order(live, deadline).await?;
        }
        if deadline.is_over() {
            return Err(self.endpoint().peer.too_late(deadline));
        }
        let call = pin!(request.by(&live.node, asking));
        let answer = live.watchdog.within(deadline.at(), call).await;
        let Some(answer) = answer else {
            let address = Arc::clone(self.address());
            let error = RedisError::TimedOut { address, deadline: deadline.given() };
            if live.watchdog.is_silent() {
                self.shared.leave(live, &error);
            }
            return Err(error);
        };
        match &answer {
            // It will not be a master again on this one; a name may stand for another server by now.
            Err(error @ RedisError::Server { code, .. }) if code == "READONLY" => {
                live.has_served.store(false, Ordering::Release);
                self.shared.leave(live, error);
            }
            Ok(_) | Err(RedisError::Server { .. }) => {
                live.watchdog.answered();
                if !live.has_served.load(Ordering::Relaxed) {
                    live.has_served.store(true, Ordering::Release);
                }
            }
            Err(error) => self.shared.leave(live, error),
        }
        answer
    }

    /// The connection in use, or the next one.
    async fn live(&self, deadline: Deadline) -> Result<Arc<Live>, RedisError> {
        let current = match &*self.shared.state() {
            State::Up(live) => Some(Arc::clone(live)),
            _ => None,
        };
        match current {
            Some(live) if !live.watchdog.is_silent() => return Ok(live),
            Some(live) => {
                let error = self.endpoint().peer.unreachable("the connection has gone silent");
                self.shared.leave(&live, &error);
            }
            None => {}
        }
        // Seldom, and large: every request would carry the room for it.
        Box::pin(self.connected(deadline)).await
    }

    /// Waits until there is a connection, or it is known that there is none.
    async fn connected(&self, deadline: Deadline) -> Result<Arc<Live>, RedisError> {
        let mut states = self.shared.states();
        if let Some(connector) = self.shared.connect() {
            *self.connector.lock().unwrap_or_else(PoisonError::into_inner) = Some(connector);
        }
        loop {
            let now = Instant::now();
            let (error, until) = match &*states.borrow_and_update() {
                State::Up(live) => return Ok(Arc::clone(live)),
                State::Unknown => (None, deadline.at()),
                State::Down(down) => {
                    let (error, until) = down.told(now);
                    (Some(error.clone()), until.min(deadline.at()))
                }
            };
            if until <= now {
                // A caller that asks again and again must not keep the connector from its thread.
                tokio::task::yield_now().await;
            } else if timeout_at(until, states.changed()).await.is_ok() {
                continue;
            }
            return Err(error.unwrap_or_else(|| no_answer(self.endpoint(), deadline.given())));
        }
    }

    /// Asks what has to be known before requests are sent on a connection, once for each.
    #[cfg(feature = "fred")]
    async fn is_in_order(&self, live: &Arc<Live>, deadline: Deadline) -> Result<(), RedisError> {
        let Settings { client, in_cluster, .. } = &*self.endpoint().settings;
        if !in_cluster || *client != Client::Fred || live.is_in_order.load(Ordering::Acquire) {
            return Ok(());
        }
        let asked = Box::pin(timeout_at(deadline.at(), live.node.serves(&self.endpoint().peer)));
        let serves =
            asked.await.unwrap_or_else(|_| Err(no_answer(self.endpoint(), deadline.given())));
        match &serves {
            Ok(()) => live.is_in_order.store(true, Ordering::Release),
            Err(RedisError::Server { .. }) => {}
            Err(error) => self.shared.leave(live, error),
        }
        serves
    }
}

/// Those of several, for messages.
pub(crate) fn addresses(links: &[Arc<Link>]) -> Arc<str> {
    let addresses: Vec<&str> = links.iter().map(|link| &**link.address()).collect();
    addresses.join(",").into()
}
