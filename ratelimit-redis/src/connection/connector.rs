//! The connector of a [`Link`](super::link::Link): the one task that connects to its server.
//!
//! Callers never connect themselves. They read the [`ConnectionState`] that the connector publishes
//! and wait for a change as long as they like; giving up does not affect the connector. A caller
//! that finds no connection starts the connector. It ends when it has connected, or when its link
//! is dropped. One that runs on a [`Home`] which the store has left is replaced.
//!
//! ```text
//!            connected                    the connection has ended
//! Unknown ──────────────▶ Up ──────────────────────────────────────▶ Unknown
//!    │                    ▲ │ it has ended before it answered anything, and not for the first time
//!    │ an attempt failed  │ ▼
//!    └──────────────────▶ Down: pauses of 10 ms to 1 s, an attempt after each
//! ```

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::select;
use tokio::net::lookup_host;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};

use super::link::Link;
use super::lookup::first;
use super::node::{Endpoint, Node};
use super::watchdog::Watchdog;
use crate::error::{RedisError, Result};
use crate::runtime::Home;

/// How long an attempt may take, including the name's look-up and the login.
const ATTEMPT: Duration = Duration::from_secs(3);
/// The shortest time limit after which a connection counts as silent.
const SHORTEST_LIMIT: Duration = Duration::from_millis(100);
/// How long one address is tried before the next starts, as RFC 8305 recommends.
const HEAD_START: Duration = Duration::from_millis(250);
/// The pause after the first failed attempt. Each next pause is twice as long, up to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LAST_PAUSE: Duration = Duration::from_secs(1);
/// A server that refuses faster than this will do so again, so callers wait for the attempt that
/// may succeed.
const QUICK: Duration = Duration::from_millis(250);

/// The state of the connection to a server.
#[derive(Default)]
pub(super) enum ConnectionState {
    /// Unknown: an attempt is needed or running.
    #[default]
    Unknown,
    /// Connected.
    Up(Arc<Live>),
    /// The last attempt failed.
    Down(ConnectBackoff),
}

/// Why there is no connection, and when the next attempt is due.
pub(super) struct ConnectBackoff {
    error: RedisError,
    /// Whether the attempt failed within [`QUICK`].
    quick: bool,
    /// When the next attempt is due.
    due: Instant,
    /// When the next attempt began; `None` until then.
    begun: Option<Instant>,
}

impl ConnectBackoff {
    /// The error for a caller, and how long the caller waits before it is returned: not at all,
    /// unless the server refuses quickly and the next attempt is due or running.
    pub(super) fn last_error(&self, now: Instant) -> (&RedisError, Instant) {
        let waits = self.quick && now >= self.due;
        (&self.error, if waits { self.begun.unwrap_or(now) + QUICK } else { now })
    }
}

/// An established connection: the client's ([`Node`]), the runtime that drives it, and the
/// [`Watchdog`] that enforces deadlines and detects silence.
pub(super) struct Live {
    pub(super) node: Node,
    pub(super) home: Arc<Home>,
    pub(super) watchdog: Watchdog,
    /// Whether the server has answered a request on it.
    pub(super) has_served: AtomicBool,
    /// Whether the server is known to serve its part of a cluster.
    pub(super) is_in_order: AtomicBool,
}

impl Live {
    /// Whether a request may be sent on it by a store that lives there.
    pub(super) fn is_usable(&self, home: &Arc<Home>) -> bool {
        !self.watchdog.is_silent() && Arc::ptr_eq(&self.home, home)
    }
}

/// The state, and the home of the connector that runs, if one does. Both change together: in
/// between, either a caller would start a second connector, or one that drops a new connection at
/// once would start none.
#[derive(Default)]
pub(super) struct Work {
    pub(super) state: ConnectionState,
    connector: Option<Arc<Home>>,
}

impl Work {
    fn is_done_on(&self, home: &Arc<Home>) -> bool {
        self.connector.as_ref().is_some_and(|at| Arc::ptr_eq(at, home))
    }
}

impl Link {
    /// Starts a connector on this home, unless one runs there or there is a connection.
    pub(super) fn connect(self: &Arc<Self>, home: &Arc<Home>) {
        let mut starts = false;
        self.work.send_if_modified(|work| {
            let is_up = matches!(work.state, ConnectionState::Up(_));
            starts = !is_up && !work.is_done_on(home);
            if starts {
                work.connector = Some(Arc::clone(home));
            }
            false
        });
        if starts {
            let connector = Connector { link: Arc::downgrade(self), home: Arc::clone(home) };
            let (endpoint, work) = (self.endpoint.clone(), self.work.subscribe());
            let mut changes = self.work.subscribe();
            home.spawn(async move {
                let dropped = async { while changes.changed().await.is_ok() {} };
                let run = run(connector, endpoint, work);
                select(pin!(run), pin!(dropped)).await;
            });
        }
    }

    /// Drops a connection that this error makes useless, unless another one has replaced it.
    pub(super) fn leave(&self, live: &Arc<Live>, error: &RedisError) {
        self.work.send_if_modified(|Work { state, .. }| {
            let is_this =
                matches!(state, ConnectionState::Up(current) if Arc::ptr_eq(current, live));
            if is_this {
                let has_served = live.has_served.load(Ordering::Acquire);
                *state = if has_served || self.failures.load(Ordering::Acquire) == 0 {
                    self.failures.store(u32::from(!has_served), Ordering::Release);
                    ConnectionState::Unknown
                } else {
                    // Accepted again without any reply: a balancer without servers behind it.
                    ConnectionState::Down(self.failed(error.clone(), Instant::now()))
                };
            }
            is_this
        });
    }

    /// Records a failure of an attempt that began at this time.
    fn failed(&self, error: RedisError, begun: Instant) -> ConnectBackoff {
        let failures = self.failures.fetch_add(1, Ordering::AcqRel);
        let now = Instant::now();
        let (quick, due) = (now - begun < QUICK, now + jittered(pause_after(failures)));
        // Settings that were right once are so still, as far as this program knows.
        let is_in_use = self.endpoint.settings.has_served.load(Ordering::Acquire);
        let error = if is_in_use { error.in_use(self.address()) } else { error };
        ConnectBackoff { error: error.of_a_lookup(), quick, due, begun: None }
    }
}

fn pause_after(failures: u32) -> Duration {
    let doubled = 1_u32.checked_shl(failures).unwrap_or(u32::MAX);
    FIRST_PAUSE.saturating_mul(doubled).min(LAST_PAUSE)
}

/// A random part between half and all of the pause, so the clients of a recovering server do not
/// all come at once.
fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(0.5 + fastrand::f64() / 2.0)
}

/// A running connector. When it is dropped, even by a panic or with its runtime, callers may start
/// another.
struct Connector {
    link: Weak<Link>,
    home: Arc<Home>,
}

impl Drop for Connector {
    fn drop(&mut self) {
        self.publish(|_, work| work.connector = None);
    }
}

impl Connector {
    /// Changes the state, unless another connector has taken over. Returns whether it did.
    fn publish(&self, change: impl FnOnce(&Link, &mut Work)) -> bool {
        let Some(link) = self.link.upgrade() else { return false };
        link.work.send_if_modified(|work| {
            let is_at_work = work.is_done_on(&self.home);
            if is_at_work {
                change(&link, work);
            }
            is_at_work
        })
    }
}

/// Connects, in as many attempts as it takes.
async fn run(connector: Connector, endpoint: Endpoint, work: watch::Receiver<Work>) {
    loop {
        let due = match &work.borrow().state {
            ConnectionState::Up(_) => return,
            ConnectionState::Unknown => None,
            ConnectionState::Down(down) => Some(down.due),
        };
        if let Some(due) = due {
            sleep_until(due).await;
        }
        let begun = Instant::now();
        let is_at_work = connector.publish(|_, work| {
            if let ConnectionState::Down(down) = &mut work.state {
                down.begun = Some(begun);
            }
        });
        if !is_at_work {
            return;
        }
        let attempt = timeout(ATTEMPT, attempt(&endpoint)).await;
        let attempt = attempt.unwrap_or_else(|_| Err(no_answer(&endpoint, ATTEMPT, "")));
        let is_up = attempt.is_ok();
        let goes_on = connector.publish(|link, work| match attempt {
            Ok(node) => {
                endpoint.settings.has_served.store(true, Ordering::Release);
                let limit = endpoint.settings.limit.max(SHORTEST_LIMIT);
                let live = Live {
                    node,
                    home: Arc::clone(&connector.home),
                    watchdog: Watchdog::new(limit),
                    has_served: AtomicBool::new(false),
                    is_in_order: AtomicBool::new(false),
                };
                *work = Work { state: ConnectionState::Up(Arc::new(live)), connector: None };
            }
            Err(error) => work.state = ConnectionState::Down(link.failed(error, begun)),
        });
        if is_up || !goes_on {
            return;
        }
    }
}

/// The error when a server did not complete the connection within this time.
pub(super) fn no_answer(endpoint: &Endpoint, within: Duration, remedy: &str) -> RedisError {
    let hint =
        if endpoint.settings.tls.is_some() { "; does it speak TLS on this port?" } else { "" };
    endpoint.peer.unreachable(format!("no connection within {within:?}{hint}{remedy}"))
}

/// Connects to one of the server's addresses, or to its Unix socket.
pub(super) async fn attempt(endpoint: &Endpoint) -> Result<Node> {
    if endpoint.socket().is_some() {
        return Node::connect(endpoint, None).await;
    }
    let found = lookup_host((&*endpoint.host, endpoint.port)).await;
    let found = found.map_err(|error| endpoint.peer.unreachable(error.to_string()))?;
    attempt_at(endpoint, found).await
}

/// Connects to the address that answers first (*happy eyeballs*, RFC 8305): the next address is
/// tried when the one before has failed or has not answered for a while.
async fn attempt_at(
    endpoint: &Endpoint,
    addresses: impl Iterator<Item = SocketAddr>,
) -> Result<Node> {
    first(addresses.map(|address| Node::connect(endpoint, Some(address))), HEAD_START).await
}

#[cfg(test)]
mod tests {
    use ratelimit_servers::RedisServer;
    use tokio::net::TcpListener;

    use super::*;
    use crate::client::Client;
    use crate::connection::node::Settings;
    use crate::runtime::StoreRuntime;

    #[tokio::test]
    async fn a_connector_that_panics_leaves_its_work_to_another() {
        let runtime = StoreRuntime::default();
        let home = runtime.home().expect("here");
        let link = Link::new(Endpoint::new("127.0.0.1", 1, &Arc::new(Settings::default())));
        link.connect(home);
        let at_work = |link: &Link| link.work.borrow().is_done_on(home);
        assert!(at_work(&link));
        let connector = Connector { link: Arc::downgrade(&link), home: Arc::clone(home) };
        let panics = tokio::spawn(async move {
            let _connector = connector;
            panic!("as a client might");
        });
        assert!(panics.await.is_err_and(|error| error.is_panic()));
        assert!(!at_work(&link));
        link.connect(home);
        assert!(at_work(&link));
    }

    #[test]
    fn pauses_grow_from_ten_milliseconds_to_a_second() {
        let pauses: Vec<_> = (0..10).map(|n| pause_after(n).as_millis()).collect();
        assert_eq!(pauses, [10, 20, 40, 80, 160, 320, 640, 1_000, 1_000, 1_000]);
        assert_eq!(pause_after(u32::MAX), LAST_PAUSE);
        for _ in 0..100 {
            assert!((LAST_PAUSE / 2..=LAST_PAUSE).contains(&jittered(LAST_PAUSE)));
        }
    }

    #[tokio::test]
    async fn a_dead_first_address_does_not_make_a_host_unreachable() {
        let server = RedisServer::start().expect("redis-server");
        // It accepts connections and sends nothing.
        let dead = TcpListener::bind(("127.0.0.2", 0)).await.expect("a port");
        let dead = dead.local_addr().expect("bound");
        let alive = SocketAddr::from(([127, 0, 0, 1], server.port()));
        let refuses = SocketAddr::from(([127, 0, 0, 2], server.port()));
        for client in Client::ALL {
            let settings = Settings { client: *client, ..Settings::default() };
            let endpoint = Endpoint::new("redis.example", 6_379, &Arc::new(settings));
            for first in [vec![dead], vec![refuses], vec![dead, refuses], vec![]] {
                let addresses = [first, vec![alive]].concat().into_iter();
                let connected = timeout(ATTEMPT, attempt_at(&endpoint, addresses)).await;
                assert!(connected.expect("in time").is_ok(), "{client}");
            }
            let away = [refuses, refuses].into_iter();
            let Err(error) = attempt_at(&endpoint, away).await else {
                panic!("no server is there")
            };
            assert!(error.to_string().contains("redis.example:6379"), "{error}");
        }
    }
}
