//! [`DenialCache`]: a store around a store that answers requests which the inner store would deny.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ratelimit_core::{
    Algorithm, Batch, Clock, EntryStore, KeepsEntries, Limit, Now, Op, Policy, Snapshot,
    SnapshotStore, Source, Store, Timestamp, Verdict, WindowEntry, decide,
};
use ratelimit_memory::PreciseClock;

use crate::plain::acquires_plainly;

mod kept;

use kept::{Kept, KeptState, Key};

const DEFAULT_MAX_AGE: Duration = Duration::from_secs(1);
const DEFAULT_CAPACITY: usize = 1 << 16;

/// A store around a store that answers, without a call, the requests which the inner store would deny.
///
/// ```
/// use ratelimit_core::{Gcra, Limit, Limits, Policy, RateLimiter, Source};
/// use ratelimit_layers::DenialCache;
/// use ratelimit_redis::RedisStore;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let server = ratelimit_testkit::RedisServer::start()?;
/// # let url = server.url();
/// let redis = RedisStore::connect(&url).await?;
/// let limits = Limits::new([Limit::<Policy>::new("login", Gcra::new("1/m".parse()?, 1)?.into())?])?;
/// let limiter = RateLimiter::new(limits, DenialCache::new(redis));
///
/// assert!(limiter.check("mallory").await?.allowed());
/// assert_eq!(limiter.check("mallory").await?.source(), Source::Store); // denied by Redis
/// for _ in 0..1_000 {
///     let verdict = limiter.check("mallory").await?;
///     assert!(!verdict.allowed() && verdict.source() == Source::Cache);
/// }
/// assert_eq!(limiter.store().counts().asked, 2);
/// # Ok(())
/// # }
/// ```
///
/// # What it answers
///
/// When the store denies a request, the cache keeps the states that the store [saw](SnapshotStore). It steps them for each
/// further request, of any cost, at the time that the store would read now. If the step denies, that is the answer, and its
/// [source](Verdict::source) is [`Source::Cache`]; `remaining` and the waits are those that the store would give. If the step
/// admits, the store is asked. Under an attack on one key each process thus sends the store what is admitted, and at most one
/// denied request per `retry_after`, or per [maximum age](DenialCacheBuilder::max_age) if that is shorter.
///
/// The time is counted from the moment at which the denied request was sent, which is before the store read its clock. So a
/// denial ends at most one round trip early, when the store is asked, and never late.
///
/// A batch is answered if the states of all of its checks are kept and one of them denies: then the decision of each limit
/// is as of the last answer of the store, not that of the denying limit alone. Any other batch goes to the store.
///
/// It never answers:
///
/// - limits that [count attempts](ratelimit_core::Attempts), because each attempt is charged;
/// - [limits with leases](Algorithm::has_leases), because releasing a lease ends the wait of others;
/// - peeks, requests under an id, with metadata or at a given time, and all operations other than [`Op::Acquire`];
/// - what the store gives no [`Snapshot`] of: on Redis, logs and bucketed windows. A batch that spans slots has none either,
///   but is answered if requests about its parts have told all of its states.
///
/// # When a wait ends
///
/// All requests that arrive until the store's next answer are sent to the store. A store on Redis that merges, as it does by
/// default, makes at most two calls of them: one for the first request, one for those that wait for it (per 1,024 of
/// them).
///
/// # What it does not see
///
/// Refunds, resets, settlements and forced charges through this cache drop the keys that they name, and changed
/// parameters of a limit drop its states. What other processes charge cannot end a wait, but `remaining` may lag
/// behind it. What another process refunds, resets or settles, and what a server loses by a failover, shows
/// after the maximum age at the latest. The same holds for a clock of the server that jumps, and for one that runs faster
/// than the clock of this process: a wait is longer by no more than that difference within the maximum age.
///
/// # With other stores
///
/// It goes around a merging store on one server or on a cluster, and around a [`Fallback`](crate::Fallback), which then sees
/// the calls to the store alone. Within a `Fallback` its answers neither close nor open the circuit breaker. Put
/// `Metrics`, `Traced` and [`TopDenied`](crate::TopDenied) around it. Around a store that is chosen at run time it takes
/// `Arc<dyn DynSnapshotStore<Policy>>`.
#[derive(Debug)]
pub struct DenialCache<S, A: Algorithm = Policy, C = PreciseClock> {
    store: S,
    kept: Kept<A>,
    clock: C,
    asked: AtomicU64,
    answered: AtomicU64,
}

/// What a [`DenialCache`] has saved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheCounts {
    /// How many requests went to the store.
    pub asked: u64,
    /// How many requests the cache answered.
    pub answered: u64,
    /// How many keys have a state in the cache, including those that are too old and not yet removed.
    pub keys: usize,
}

/// The settings of a [`DenialCache`] that is to be built: what [`DenialCache::builder`] returns.
#[derive(Clone, Debug)]
pub struct DenialCacheBuilder<C = PreciseClock> {
    max_age: Duration,
    capacity: usize,
    clock: C,
}

impl DenialCache<()> {
    /// The settings of a cache around a store.
    #[must_use]
    pub fn builder() -> DenialCacheBuilder {
        DenialCacheBuilder {
            max_age: DEFAULT_MAX_AGE,
            capacity: DEFAULT_CAPACITY,
            clock: PreciseClock::new(),
        }
    }
}

impl<C: Clock> DenialCacheBuilder<C> {
    /// How long the cache answers by what the store said, from when the request was sent: 1 s unless it is set. It bounds how
    /// long a caller stays denied after another process has reset, refunded or settled its key.
    #[must_use]
    pub fn max_age(mut self, max_age: Duration) -> Self {
        self.max_age = max_age;
        self
    }

    /// The most keys whose states are kept: 65,536 unless it is set, at least 1. A key under several limits counts once per
    /// limit. Above that, the key that was kept first is dropped, and the store is asked about it again.
    #[must_use]
    pub fn capacity(mut self, keys: usize) -> Self {
        self.capacity = keys.max(1);
        self
    }

    /// Sets the clock that counts how long ago a request was sent, such as a
    /// [`ManualClock`](ratelimit_core::ManualClock) in a test. Only differences between its times matter.
    #[must_use]
    pub fn clock<D: Clock>(self, clock: D) -> DenialCacheBuilder<D> {
        DenialCacheBuilder { max_age: self.max_age, capacity: self.capacity, clock }
    }

    /// A cache around this store.
    #[must_use]
    pub fn build<S, A: Algorithm>(self, store: S) -> DenialCache<S, A, C> {
        let max_age_us = u64::try_from(self.max_age.as_micros()).unwrap_or(u64::MAX);
        DenialCache {
            store,
            kept: Kept::new(self.capacity, max_age_us),
            clock: self.clock,
            asked: AtomicU64::new(0),
            answered: AtomicU64::new(0),
        }
    }
}

impl<S, A: Algorithm> DenialCache<S, A> {
    /// A cache around this store, of 65,536 keys and a maximum age of one second.
    #[must_use]
    pub fn new(store: S) -> Self {
        DenialCache::builder().build(store)
    }
}

impl<S, A: Algorithm, C> DenialCache<S, A, C> {
    /// The wrapped store.
    #[must_use]
    pub const fn store(&self) -> &S {
        &self.store
    }

    /// What it has saved so far.
    #[must_use]
    pub fn counts(&self) -> CacheCounts {
        CacheCounts {
            asked: self.asked.load(Ordering::Relaxed),
            answered: self.answered.load(Ordering::Relaxed),
            keys: self.kept.len(),
        }
    }

    /// Forgets all that it knows, so that the store is asked about every key: for a program that learns of a reset
    /// elsewhere.
    pub fn forget(&self) {
        self.kept.clear();
    }
}

impl<S, A: Algorithm + Clone + PartialEq, C: Clock> DenialCache<S, A, C> {
    /// The verdict on a batch that cannot pass; `None` if the store is to be asked.
    fn answer(&self, batch: &Batch<'_, A>, keys: &[Key], local: Timestamp) -> Option<Verdict> {
        let mut states = Vec::with_capacity(keys.len());
        let mut now = Timestamp::ZERO;
        for (check, key) in batch.checks().iter().zip(keys) {
            let (time, state) = self.kept.get(*key, check.limit.algorithm(), local)?;
            // None is before its server's time of now, because the server read its clock after the request was sent. The
            // latest is before no server's: states of a batch across slots may come from several.
            now = now.max(time);
            states.push(state);
        }
        // What it writes is dropped: a request that would write goes to the store.
        let verdict = decide(batch, now, &mut Snapshot { now, states }).ok()?;
        (!verdict.allowed()).then(|| verdict.with_source(Source::Cache))
    }

    /// Keeps what the store saw.
    fn note(
        &self,
        batch: &Batch<'_, A>,
        keys: &[Key],
        sent: Timestamp,
        verdict: &Verdict,
        snapshot: Option<Snapshot<A::State>>,
    ) {
        let Some(Snapshot { now, states }) = snapshot else {
            if verdict.allowed() {
                self.kept.invalidate(keys);
            }
            return;
        };
        for ((check, key), state) in batch.checks().iter().zip(keys).zip(states) {
            let algorithm = check.limit.algorithm().clone();
            let kept = KeptState::new(algorithm, state, now, sent);
            if verdict.allowed() {
                self.kept.refresh(*key, kept);
            } else {
                self.kept.put(*key, kept);
            }
        }
    }
}

/// Drops keys when the operation that changes them ends, also by an error or because its caller goes away.
struct Dropping<'k, A: Algorithm> {
    kept: &'k Kept<A>,
    keys: Vec<Key>,
    /// Whether it can end the wait of a request that is under way.
    ends_waits: bool,
}

impl<A: Algorithm> Drop for Dropping<'_, A> {
    fn drop(&mut self) {
        if self.ends_waits {
            self.kept.invalidate(&self.keys);
        } else {
            self.kept.remove(&self.keys);
        }
    }
}

impl<S, A, C> Store<A> for DenialCache<S, A, C>
where
    S: SnapshotStore<A>,
    A: Algorithm + Clone + PartialEq,
    C: Clock,
{
    type Error = S::Error;

    async fn apply(&self, batch: &Batch<'_, A>) -> Result<Verdict, S::Error> {
        if batch.operation() == Op::Peek {
            self.asked.fetch_add(1, Ordering::Relaxed);
            return self.store.apply(batch).await;
        }
        let (kept, keys) = (&self.kept, self.kept.keys(batch));
        if !acquires_plainly(batch) {
            self.asked.fetch_add(1, Ordering::Relaxed);
            let ends_waits = batch.operation() != Op::Acquire;
            let _dropping = Dropping { kept, keys, ends_waits };
            return self.store.apply(batch).await;
        }
        let sent = self.clock.now();
        if let Some(verdict) = self.answer(batch, &keys, sent) {
            self.answered.fetch_add(1, Ordering::Relaxed);
            return Ok(verdict);
        }
        self.asked.fetch_add(1, Ordering::Relaxed);
        // It may be charged even if its answer is lost.
        let mut dropping = Dropping { kept, keys, ends_waits: false };
        let (verdict, snapshot) = self.store.apply_with_snapshot(batch).await?;
        let keys = std::mem::take(&mut dropping.keys);
        self.note(batch, &keys, sent, &verdict, snapshot);
        Ok(verdict)
    }
}

#[deny(clippy::missing_trait_methods)]
impl<S, A, C> EntryStore<A> for DenialCache<S, A, C>
where
    S: SnapshotStore<A> + EntryStore<A>,
    A: KeepsEntries + Clone + PartialEq,
    C: Clock,
{
    fn entries(
        &self,
        limit: &Limit<A>,
        key: &str,
        now: Now,
    ) -> impl Future<Output = Result<Vec<WindowEntry>, S::Error>> + Send {
        self.store.entries(limit, key, now)
    }
}
