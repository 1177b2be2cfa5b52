//! [`Link`]: one server, whose connection is made on demand and again after a failure.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use super::connector::{ConnectionState, Live, Work, no_answer};
use super::node::Endpoint;
use super::request::{Commands, Request};
use super::{Argument, Reply};
use crate::deadline::Deadline;
use crate::error::{RedisError, Result};
use crate::runtime::Home;

/// One server, shared by all callers.
///
/// The clients' own connection managers are not used, because an error must say whether the command
/// had been sent, and only a connection that this crate opens can tell.
pub(crate) struct Link {
    pub(super) endpoint: Endpoint,
    pub(super) work: watch::Sender<Work>,
    /// The number of consecutive failures: failed attempts, and connections that ended before any
    /// reply. It determines the next pause.
    pub(super) failures: AtomicU32,
}

impl Link {
    /// Sends nothing yet.
    pub(crate) fn new(endpoint: Endpoint) -> Arc<Self> {
        let (work, failures) = (watch::Sender::default(), AtomicU32::new(0));
        Arc::new(Self { endpoint, work, failures })
    }

    pub(crate) fn is_at(&self, host: &str, port: u16) -> bool {
        self.endpoint.port == port && self.endpoint.host == host
    }

    pub(crate) fn address(&self) -> &Arc<str> {
        self.endpoint.peer.address()
    }

    /// Whether there is a connection.
    pub(crate) fn is_up(&self) -> bool {
        self.up().is_some()
    }

    /// The connection, if there is one.
    fn up(&self) -> Option<Arc<Live>> {
        match &self.work.borrow().state {
            ConnectionState::Up(live) => Some(Arc::clone(live)),
            ConnectionState::Unknown | ConnectionState::Down(_) => None,
        }
    }

    /// The result of a request.
    pub(crate) async fn ask(
        self: &Arc<Self>,
        deadline: Deadline,
        asking: bool,
        request: Request<'_>,
    ) -> Result<Reply> {
        let live = self.live(deadline).await?;
        match self.once(&live, deadline, asking, request).await {
            // The connection had ended before this was sent, for example because the server
            // restarted.
            Err(RedisError::Unreachable { .. }) if !deadline.is_over() => {
                let live = self.live(deadline).await?;
                self.once(&live, deadline, asking, request).await
            }
            answer => answer,
        }
    }

    /// The result on this connection, which is dropped if the result shows that it is useless.
    async fn once(
        &self,
        live: &Arc<Live>,
        deadline: Deadline,
        asking: bool,
        request: Request<'_>,
    ) -> Result<Reply> {
        if !request.asks_owners {
            self.serves(live, deadline).await?;
        }
        if deadline.is_over() {
            return Err(self.endpoint.peer.too_late(deadline));
        }
        let call = pin!(live.node.send(asking, request.commands));
        let is_reply =
            |answer: &Result<_, _>| matches!(answer, Ok(_) | Err(RedisError::Server { .. }));
        let Some(answer) = live.watchdog.within(deadline.at(), call, is_reply).await else {
            let error = self.endpoint.peer.timed_out(deadline);
            if live.watchdog.is_silent() {
                self.leave(live, &error);
            }
            return Err(error);
        };
        match &answer {
            // On this connection the server will not become a master again; the name may point to
            // another server by now.
            Err(error @ RedisError::Server { code, .. }) if code == "READONLY" => {
                live.has_served.store(false, Ordering::Release);
                self.leave(live, error);
            }
            Ok(_) | Err(RedisError::Server { .. }) => {
                if !live.has_served.load(Ordering::Relaxed) {
                    live.has_served.store(true, Ordering::Release);
                }
            }
            Err(error) => self.leave(live, error),
        }
        answer
    }

    /// The runtime on which the store lives.
    fn home(&self) -> Result<&Arc<Home>> {
        let home = self.endpoint.settings.runtime.home();
        home.map_err(|reason| self.endpoint.peer.unreachable(reason))
    }

    /// The current connection, or the next one.
    async fn live(self: &Arc<Self>, deadline: Deadline) -> Result<Arc<Live>> {
        let home = self.home()?;
        match self.up() {
            Some(live) if live.is_usable(home) => Ok(live),
            // Rare and large: unboxed, it would enlarge every request's future.
            _ => Box::pin(self.connected(deadline)).await,
        }
    }

    /// Waits until there is a connection, or until it is known that there is none.
    async fn connected(self: &Arc<Self>, deadline: Deadline) -> Result<Arc<Live>> {
        let mut states = self.work.subscribe();
        loop {
            let home = self.home()?;
            if let Some(live) = self.up().filter(|live| !live.is_usable(home)) {
                let reason = "the connection has gone silent, or the store has left its runtime";
                self.leave(&live, &self.endpoint.peer.unreachable(reason));
            }
            self.connect(home);
            let now = Instant::now();
            let (error, until) = match &states.borrow_and_update().state {
                ConnectionState::Up(live) if live.is_usable(home) => return Ok(Arc::clone(live)),
                ConnectionState::Up(_) | ConnectionState::Unknown => (None, deadline.at()),
                ConnectionState::Down(down) => {
                    let (error, until) = down.last_error(now);
                    (Some(error.clone()), until.min(deadline.at()))
                }
            };
            if until <= now {
                // A caller that repeats its request in a loop must not starve the connector.
                tokio::task::yield_now().await;
            } else if timeout_at(until, states.changed()).await.is_ok() {
                continue;
            }
            let silence = || no_answer(&self.endpoint, deadline.given(), home.remedy());
            return Err(error.unwrap_or_else(silence));
        }
    }

    /// Checks once per connection whether the node accepts requests, if
    /// [`Settings`](super::node::Settings) say so.
    async fn serves(&self, live: &Arc<Live>, deadline: Deadline) -> Result<()> {
        if !self.endpoint.settings.asks_first || live.is_in_order.load(Ordering::Acquire) {
            return Ok(());
        }
        let words = ["CLUSTER", "INFO"].map(Argument::Text);
        let asked = live.node.send(false, Commands::One(&words));
        let error = match Box::pin(timeout_at(deadline.at(), asked)).await {
            Ok(Ok(Reply::Text(info)))
                if info.windows(18).any(|part| part == b"cluster_state:fail") =>
            {
                return Err(self.endpoint.peer.error("CLUSTERDOWN", "The cluster is down"));
            }
            // A user without permission for it goes without.
            Ok(Ok(_) | Err(RedisError::Server { .. })) => {
                live.is_in_order.store(true, Ordering::Release);
                return Ok(());
            }
            Ok(Err(error)) => error.of_a_lookup(),
            Err(_) => no_answer(&self.endpoint, deadline.given(), ""),
        };
        self.leave(live, &error);
        Err(error)
    }
}
