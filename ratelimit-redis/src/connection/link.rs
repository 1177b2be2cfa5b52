//! [`Link`]: one server, whose connection is made on demand and again after a failure.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use tokio::time::timeout;

use super::attempts::{Attempts, Pace};
use super::endpoint::Endpoint;
use super::node::Node;
use super::reply::Reply;
use super::request::Commands;
use super::watchdog::Watchdog;
use crate::deadline::Deadline;
use crate::error::{RedisError, Result};
use crate::runtime::Home;

/// How long an attempt to connect may take, including the name's look-up and the login.
const ATTEMPT: Duration = Duration::from_secs(3);
const PACE: Pace = Pace {
    rest: Duration::ZERO,
    longest_pause: Duration::from_secs(1),
    quick: Duration::from_millis(250),
};
/// The shortest time limit after which a connection counts as silent.
const SHORTEST_LIMIT: Duration = Duration::from_millis(100);

/// One server, shared by all callers.
///
/// The clients' own connection managers are not used, because an error must say whether the command
/// had been sent, and only a connection that this crate opens can tell.
pub(crate) struct Link {
    pub(super) endpoint: Arc<Endpoint>,
    /// The connection, if there is one.
    up: Arc<ArcSwapOption<Live>>,
    attempts: Attempts,
}

/// An established connection: the client's ([`Node`]), the runtime that drives it, and the
/// [`Watchdog`] that enforces deadlines and detects silence.
struct Live {
    node: Node,
    home: Arc<Home>,
    watchdog: Watchdog,
    /// Whether the server has answered a request on it.
    has_served: AtomicBool,
}

impl Live {
    /// Whether a request may be sent on it by a store that lives there.
    fn is_usable(&self, home: &Arc<Home>) -> bool {
        !self.watchdog.is_silent() && Arc::ptr_eq(&self.home, home)
    }
}

impl Link {
    /// Sends nothing yet.
    pub(crate) fn new(endpoint: Endpoint) -> Self {
        let awaited = awaited(&endpoint);
        let (endpoint, up) = (Arc::new(endpoint), Arc::new(ArcSwapOption::empty()));
        let (to, connected) = (Arc::clone(&endpoint), Arc::clone(&up));
        let connect = move |home| {
            let (endpoint, up) = (Arc::clone(&to), Arc::clone(&connected));
            async move {
                up.store(Some(Arc::new(connect(&endpoint, home).await?)));
                Ok(())
            }
        };
        let (peer, runtime) = (endpoint.peer.clone(), &endpoint.settings.runtime);
        let attempts = Attempts::new((peer, awaited), runtime, PACE, connect);
        Self { endpoint, up, attempts }
    }

    pub(crate) fn is_at(&self, host: &str, port: u16) -> bool {
        self.endpoint.port == port && self.endpoint.host == host
    }

    pub(crate) fn address(&self) -> &Arc<str> {
        self.endpoint.peer.address()
    }

    /// Whether there is a connection.
    pub(crate) fn is_up(&self) -> bool {
        self.up.load().is_some()
    }

    /// The reply to commands, sent once.
    pub(crate) async fn ask(
        &self,
        deadline: Deadline,
        asking: bool,
        commands: Commands<'_>,
    ) -> Result<Reply> {
        let live = self.live(deadline).await?;
        match self.once(&live, deadline, asking, commands).await {
            // The connection had ended before this was sent, for example because the server
            // restarted.
            Err(RedisError::Unreachable { .. }) if !deadline.is_over() => {
                let live = self.live(deadline).await?;
                self.once(&live, deadline, asking, commands).await
            }
            answer => answer,
        }
    }

    /// The reply on this connection, which is left if the result shows that it is useless.
    async fn once(
        &self,
        live: &Arc<Live>,
        deadline: Deadline,
        asking: bool,
        commands: Commands<'_>,
    ) -> Result<Reply> {
        let peer = &self.endpoint.peer;
        if deadline.is_over() {
            return Err(peer.too_late(deadline));
        }
        let call = pin!(live.node.send(asking, commands));
        let is_reply =
            |answer: &Result<_, _>| matches!(answer, Ok(_) | Err(RedisError::Server { .. }));
        let answer = live.watchdog.within(deadline.at(), call, is_reply).await;
        let is_timeout = answer.is_none();
        let answer = answer.unwrap_or_else(|| Err(peer.timed_out(deadline)));
        match &answer {
            // On this connection the server will not become a master again; the name may point to
            // another server by now.
            Err(error @ RedisError::Server { code, .. }) if code == "READONLY" => {
                live.has_served.store(false, Ordering::Release);
                self.fails(live, error);
            }
            Ok(_) | Err(RedisError::Server { .. }) => {
                if !live.has_served.load(Ordering::Relaxed) {
                    live.has_served.store(true, Ordering::Release);
                }
            }
            Err(_) if is_timeout && !live.watchdog.is_silent() => {}
            Err(error) => self.fails(live, error),
        }
        answer
    }

    /// Leaves a connection that this error makes useless. One that has ended before it answered
    /// anything counts as a failed attempt, as at a balancer without servers behind it.
    fn fails(&self, live: &Arc<Live>, error: &RedisError) {
        if self.leave(live) && !live.has_served.load(Ordering::Acquire) {
            self.attempts.failed(error);
        }
    }

    /// Drops a connection, unless another one has replaced it. Returns whether it did.
    fn leave(&self, live: &Arc<Live>) -> bool {
        let before = self.up.compare_and_swap(live, None);
        before.as_ref().is_some_and(|before| Arc::ptr_eq(before, live))
    }

    /// The current connection, or the next one.
    async fn live(&self, deadline: Deadline) -> Result<Arc<Live>> {
        let home = self.attempts.home()?;
        match self.up.load_full() {
            Some(live) if live.is_usable(home) => Ok(live),
            // Rare and large: unboxed, it would enlarge every request's future.
            _ => Box::pin(self.connected(deadline)).await,
        }
    }

    /// Waits until there is a connection, or until it is known that there is none.
    async fn connected(&self, deadline: Deadline) -> Result<Arc<Live>> {
        loop {
            let home = self.attempts.home()?;
            match self.up.load_full() {
                Some(live) if live.is_usable(home) => return Ok(live),
                // It has gone silent, or the store has left its runtime.
                Some(live) => drop(self.leave(&live)),
                None => {}
            }
            self.attempts.next(deadline).await?;
        }
    }
}

/// What has not come when a caller's time is over.
fn awaited(endpoint: &Endpoint) -> &'static str {
    if endpoint.settings.tls.is_some() {
        "no connection by TLS (does it speak TLS on this port?)"
    } else {
        "no connection"
    }
}

async fn connect(endpoint: &Endpoint, home: Arc<Home>) -> Result<Live> {
    let settings = &endpoint.settings;
    let node = timeout(ATTEMPT, Node::connect(endpoint)).await.unwrap_or_else(|_| {
        let awaited = awaited(endpoint);
        Err(endpoint.peer.unreachable(format!("{awaited} within {ATTEMPT:?}")))
    });
    let node = node.map_err(|error| {
        // Settings that were right once are so still, as far as this program knows.
        let is_in_use = settings.has_served.load(Ordering::Acquire);
        if is_in_use { error.in_use(endpoint.peer.address()) } else { error }
    })?;
    settings.has_served.store(true, Ordering::Release);
    let watchdog = Watchdog::new(settings.limit.max(SHORTEST_LIMIT));
    Ok(Live { node, home, watchdog, has_served: AtomicBool::new(false) })
}
