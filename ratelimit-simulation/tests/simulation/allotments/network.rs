//! The server, and the way to it.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ratelimit_core::store::{Batch, Check, Op};
use ratelimit_core::{
    AnyAlgorithm, Clock, ErrorKind, Limit, Refusal, Store, StoreError, SyncStore, Timestamp,
    Verdict,
};
use ratelimit_memory::{MemoryError, MemoryStore};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout_at};

use ratelimit_simulation::SimulatedClock;

/// How long a call lasts at most.
const DEADLINE: Duration = Duration::from_millis(300);

/// Why a node has no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum NetworkError {
    #[error(transparent)]
    Refused(#[from] MemoryError),
    #[error("{0:?}")]
    Failed(ErrorKind),
}

impl From<Refusal> for NetworkError {
    fn from(refusal: Refusal) -> Self {
        MemoryError::from(refusal).into()
    }
}

impl StoreError for NetworkError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Refused(error) => error.kind(),
            Self::Failed(kind) => *kind,
        }
    }
}

tokio::task_local! {
    /// When the server decided the last request of this task.
    pub(super) static DECIDED: Cell<Timestamp>;
}

/// How the network fails, in chances per thousand.
#[derive(Clone, Copy, Debug)]
pub(super) struct Faults {
    pub(super) lost_request: u64,
    pub(super) lost_reply: u64,
    /// A request that fails before it is sent.
    pub(super) unsent: u64,
    /// The longest way of a message, in milliseconds.
    pub(super) way_ms: u64,
}

pub(super) struct Server {
    pub(super) store: MemoryStore<AnyAlgorithm, SimulatedClock>,
    pub(super) clock: SimulatedClock,
    pub(super) random: Mutex<fastrand::Rng>,
    pub(super) faults: Faults,
}

impl Server {
    /// Whether something of so many chances in a thousand happens.
    pub(super) fn happens(&self, per_mille: u64) -> bool {
        self.random.lock().expect("no panic").u64(..1_000) < per_mille
    }

    pub(super) fn up_to_ms(&self, ms: u64) -> Duration {
        Duration::from_millis(self.random.lock().expect("no panic").u64(..=ms))
    }
}

/// A node's way to the server, until the node crashes.
#[derive(Clone)]
pub(super) struct Network {
    pub(super) server: Arc<Server>,
    pub(super) is_up: Arc<AtomicBool>,
}

type Said = (Result<Verdict, MemoryError>, Timestamp);

impl Network {
    /// Sends a request, which arrives whether its caller waits or not.
    fn send(&self, batch: &Batch<'_, AnyAlgorithm>) -> oneshot::Receiver<Said> {
        let (tell, told) = oneshot::channel();
        let server = self.server.clone();
        let own = |check: &Check<'_, AnyAlgorithm>| {
            (check.limit.clone(), check.key.to_owned(), check.cost)
        };
        let checks: Vec<(Limit<AnyAlgorithm>, String, u64)> =
            batch.checks().iter().map(own).collect();
        let (op, id) = (batch.operation(), batch.reservation_id());
        let (there, back) =
            (server.up_to_ms(server.faults.way_ms), server.up_to_ms(server.faults.way_ms));
        let is_lost = server.happens(server.faults.lost_request);
        let is_reply_lost = server.happens(server.faults.lost_reply);
        tokio::spawn(async move {
            sleep(there).await;
            if is_lost {
                return;
            }
            let checks: Vec<_> =
                checks.iter().map(|(limit, key, cost)| Check { limit, key, cost: *cost }).collect();
            let batch = Batch::new(&checks).expect("distinct").op(op);
            let batch = id.map_or(batch, |id| batch.id(id));
            let said = (server.store.apply_now(&batch), server.clock.now());
            sleep(back).await;
            if !is_reply_lost {
                // A caller that went away does not read it.
                let _ = tell.send(said);
            }
        });
        told
    }
}

impl Store<AnyAlgorithm> for Network {
    type Error = NetworkError;

    async fn apply(&self, batch: &Batch<'_, AnyAlgorithm>) -> Result<Verdict, NetworkError> {
        let server = &self.server;
        if !self.is_up.load(Ordering::SeqCst) || server.happens(server.faults.unsent) {
            return Err(NetworkError::Failed(ErrorKind::Unavailable));
        }
        let deadline = Instant::now() + DEADLINE;
        let told = self.send(batch);
        let Ok(Ok((said, decided))) = timeout_at(deadline, told).await else {
            tokio::time::sleep_until(deadline).await;
            return Err(NetworkError::Failed(ErrorKind::Indeterminate));
        };
        if batch.operation() == Op::Acquire {
            // Settlements run in tasks of their own.
            let _ = DECIDED.try_with(|last| last.set(decided));
        }
        said.map_err(NetworkError::Refused)
    }
}
