//! [`FallbackBuilder`]: the settings of a [`Fallback`].

use std::num::NonZeroU64;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ratelimit_core::algorithm::{InMemory, Share};
use ratelimit_core::{Clock, ConfigError, Limits};
use ratelimit_memory::{MemoryStore, PreciseClock};

use super::breaker::Breakers;
use super::counts::OutageCounts;
use super::journal::Journal;
use super::known_ids::KnownIds;
use super::outage::{Outage, no_shares};
use super::{Fallback, SharedFallback};
use crate::observed::Observer;

/// Longer than any caller waits for an answer.
const LONGEST_DEADLINE: Duration = Duration::from_secs(3_600);
/// As good as never, and short enough to add to any time.
const LONGEST_PAUSE: Duration = Duration::from_secs(365 * 86_400);

/// What happens, when the store is back, to the charges of requests that were admitted locally
/// during the outage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnRecovery {
    /// They are charged to the store as far as they still count: see [`Fallback`].
    Charge,
    /// They are forgotten (the default).
    #[default]
    Forget,
}

/// The settings of a [`Fallback`] that is to be built: what [`Fallback::builder`] returns.
#[derive(Clone, Debug)]
pub struct FallbackBuilder<C = PreciseClock> {
    deadline: Duration,
    failures: u32,
    pause: Duration,
    nodes: Option<NonZeroU64>,
    at_least_one: bool,
    capacity: usize,
    on_recovery: OnRecovery,
    name: Box<str>,
    clock: C,
}

/// Those who hear of a fallback with this name: metrics and logs, by feature.
#[allow(clippy::vec_init_then_push, unused_mut, unused_variables, reason = "each is of a feature")]
fn observers(name: &str) -> Vec<Box<dyn Observer>> {
    let mut observers: Vec<Box<dyn Observer>> = Vec::new();
    #[cfg(feature = "metrics")]
    observers.push(Box::new(crate::metrics::Recorded::new(name)));
    #[cfg(feature = "tracing")]
    observers.push(Box::new(crate::traced::Spans::new()));
    observers
}

impl Fallback<()> {
    /// The settings of a fallback around a store.
    #[must_use]
    pub fn builder() -> FallbackBuilder {
        FallbackBuilder {
            deadline: Duration::from_millis(100),
            failures: 5,
            pause: Duration::from_secs(1),
            nodes: None,
            at_least_one: false,
            capacity: 1 << 17,
            on_recovery: OnRecovery::Forget,
            name: "store".into(),
            clock: PreciseClock::new(),
        }
    }
}

impl<C: Clock> FallbackBuilder<C> {
    /// How long the store may take for a decision: 100 ms unless it is set, at least 1 ms, at most
    /// an hour. What takes longer is decided without the store, and counts as a failure.
    ///
    /// Set the store's own deadline a little lower, where it has one: its error then reports
    /// whether the request was sent.
    #[must_use]
    pub fn deadline(self, deadline: Duration) -> Self {
        Self { deadline: deadline.clamp(Duration::from_millis(1), LONGEST_DEADLINE), ..self }
    }

    /// How many consecutive failures of a server open its circuit breaker: 5 unless it is set, at
    /// least 1. A call that is dropped before its deadline counts neither as a failure nor as a
    /// success.
    #[must_use]
    pub fn failures(self, failures: u32) -> Self {
        Self { failures: failures.max(1), ..self }
    }

    /// How long the circuit breaker stays open before a single call, the probe, tries the store
    /// again: 1 s unless it is set, at most a year.
    #[must_use]
    pub fn probe_after(self, pause: Duration) -> Self {
        Self { pause: pause.min(LONGEST_PAUSE), ..self }
    }

    /// How many nodes share each limit whose choice is
    /// [`OnOutage::Local`](ratelimit_core::OnOutage::Local): this node admits its share. A policy
    /// with such a limit needs it.
    #[must_use]
    pub fn nodes(self, nodes: NonZeroU64) -> Self {
        Self { nodes: Some(nodes), ..self }
    }

    /// Lets each node admit at least one of a local limit that is smaller than the number of
    /// [nodes](Self::nodes), which is an error otherwise. The limit is then shared as if there were
    /// only as many nodes as can share it. So all nodes together admit up to `nodes` divided by
    /// that number times the limit in an outage: of a limit of 4 per hour, 10 nodes admit up to 10.
    #[must_use]
    pub fn at_least_one(self) -> Self {
        Self { at_least_one: true, ..self }
    }

    /// The most keys that the local limits keep, the most ids that are in use without the store,
    /// and the most keys whose charges are kept for the recovery: 131,072 of each unless it is set.
    /// Above that, local keys share one state per limit ([`ratelimit_memory::Builder::capacity`]),
    /// and further charges are forgotten: also when the keys have more than 128 bytes on average,
    /// because charges are kept with their whole keys. A request under a new id is an error, or
    /// charged [without a record](ratelimit_core::Verdict::is_unrecorded) if the layer drew the id.
    #[must_use]
    pub fn capacity(self, keys: usize) -> Self {
        Self { capacity: keys.max(1), ..self }
    }

    /// What happens, when the store is back, to the charges of requests that were admitted locally:
    /// they are forgotten unless this is set.
    #[must_use]
    pub fn on_recovery(self, on_recovery: OnRecovery) -> Self {
        Self { on_recovery, ..self }
    }

    /// The name of the store in metrics and logs: `store` unless it is set.
    #[must_use]
    pub fn name(self, name: &str) -> Self {
        Self { name: name.into(), ..self }
    }

    /// Sets the clock of the local limits, such as a [`ManualClock`](ratelimit_core::ManualClock)
    /// in a test. Deadlines and the circuit breaker use tokio's time.
    #[must_use]
    pub fn clock<D: Clock>(self, clock: D) -> FallbackBuilder<D> {
        let Self { deadline, failures, pause, nodes, at_least_one, .. } = self;
        let Self { capacity, on_recovery, name, .. } = self;
        FallbackBuilder {
            deadline,
            failures,
            pause,
            nodes,
            at_least_one,
            capacity,
            on_recovery,
            name,
            clock,
        }
    }

    /// Wraps this store, for these limits.
    ///
    /// # Errors
    /// A limit without a choice; a local limit without the number of [nodes](Self::nodes), or whose
    /// share would admit nothing, unless each node admits [at least one](Self::at_least_one). The
    /// error names the limit.
    pub fn build<S, A>(self, store: S, limits: &Limits<A>) -> Result<Fallback<S, A, C>, ConfigError>
    where
        A: InMemory + Share + Clone + PartialEq + 'static,
    {
        let Self { deadline, failures, pause, nodes, at_least_one, .. } = self;
        let Self { capacity, on_recovery, name, clock, .. } = self;
        let local = MemoryStore::builder().capacity(capacity).clock(clock).build();
        let journal = (on_recovery == OnRecovery::Charge).then(|| Journal::new(capacity));
        let (ids, counts) = (KnownIds::new(capacity), OutageCounts::default());
        let shares = no_shares();
        let outage = Outage { local, shares, nodes, at_least_one, ids, counts, journal };
        outage.validate(limits)?;
        let breakers = Breakers::new(failures, [pause, deadline], &name, observers(&name));
        let charging = Mutex::default();
        let inner = SharedFallback { store, deadline, breakers, outage, charging };
        Ok(Fallback { inner: Arc::new(inner) })
    }
}
