//! [`DenialCache`]: wraps a store and rejects requests that it would deny, without calling it.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ratelimit_core::store::{Batch, LogStore, Op, RecordStore, Snapshot, SnapshotStore, decide};
use ratelimit_core::{Algorithm, AnyAlgorithm, Clock, Source, Store, Timestamp, Verdict};
use ratelimit_memory::PreciseClock;
use tokio::runtime::Handle;
use tokio::time::Instant;

use crate::OnDrop;
use crate::plain::acquires_anew;

mod kept;
mod rounds;

use kept::{DenialStates, KeptState, KeyGeneration};
use rounds::{OpenRounds, RoundMember, Turn};

/// How often a request waits at most: for calls that were sent before it came, and for the next
/// ones, whose answers are about times after it came. More would only delay: where a limit refills
/// faster than the store answers, no wait ends with a denial.
const MOST_WAITS: u32 = 2;
/// How far the local clock may go back as readings of several threads do; if it goes back further,
/// it was set.
const MOST_JITTER_US: u64 = 1_000;

/// Wraps a store and rejects requests that the store would deny, without calling it.
///
/// ```
/// use ratelimit_core::{Gcra, Limits, RateLimiter, Source};
/// use ratelimit_layers::DenialCache;
/// use ratelimit_redis::RedisStore;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let server = ratelimit_servers::RedisServer::start()?;
/// # let url = server.url();
/// let redis = RedisStore::connect(&url).await?;
/// let limits = Limits::builder().limit("login", Gcra::per_minute(1)).build()?;
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
/// When the store denies a request, or answers one that others wait for, the cache keeps the states
/// that the store [saw](SnapshotStore). It steps them for each further request, of any cost, at the
/// time that the store would read now. If the step denies, that is the answer, and its
/// [source](Verdict::source) is [`Source::Cache`]; `remaining` and the waits are those that the
/// store would give. If the step admits, the store is asked. During an attack on one key, each
/// process sends the store only the admitted requests, and one denied request per `retry_after` (or
/// per [maximum age](DenialCacheBuilder::max_age), if shorter), [however
/// many](#how-many-go-at-once) requests come at once.
///
/// The time is counted from the moment at which the denied request was sent, which is before the
/// store read its clock. So a denial ends at most one round trip early, when the store is asked,
/// and never late.
///
/// A batch is answered if the states of all of its checks are kept and one of them denies: then the
/// decision of each limit is as of the last answer of the store, not that of the denying limit
/// alone. Any other batch goes to the store.
///
/// It never answers:
///
/// - limits that [count attempts](ratelimit_core::Limit::count_attempts), because each attempt is
///   charged;
/// - [limits with leases](Algorithm::has_leases), because releasing a lease ends the wait of
///   others;
/// - limits that [look for records](ratelimit_core::Limit::overridable) of their callers: the store
///   decides each request by the record that stands, so that a raise or a block is seen at once;
/// - peeks, requests with metadata or at a given time, and all operations other than
///   [`Op::Acquire`];
/// - requests under an id, unless it was [drawn](Batch::settled_once) for this one request, as
///   `reserve` and HTTP layers draw one: an earlier request may have been admitted under an
///   id of the caller's, and its repetition is then admitted too;
/// - what the store gives no [`Snapshot`] of: on Redis, logs and bucketed windows. A batch that
///   spans slots has none either, but is answered if the states of all of its parts are known from
///   other requests.
///
/// # How many go at once
///
/// As many requests of the same checks as the kept states admit go to the store at once, and four
/// while no state is known. The first one that would not pass after them waits for their answers,
/// and so do all that come after it. When these have come, the states that they left decide, and
/// nearly always deny. This is the single flight of Go's `x/sync/singleflight`, for as many as may
/// pass.
///
/// A request waits at most twice, and for [50 ms](DenialCacheBuilder::max_wait) in all. If the
/// states admit it even then, as where a limit refills faster than the store answers, it goes to
/// the store if it also passes after those in flight. Otherwise it is denied, counting the requests
/// in flight as charged. This is the only case in which the answer may come one call too early. A
/// request whose states are not known by then, or too old, goes to the store. A limit whose burst
/// is smaller than what it refills during a call admits one burst per call while many requests
/// press.
///
/// Where the store's last answer about the same limits had no [`Snapshot`], none waits.
///
/// Waiting takes a Tokio runtime with its timer, as a store on Redis does. On no runtime, all
/// requests go to the store.
///
/// # Panics
///
/// A request that has to wait panics on a Tokio runtime whose timer is not enabled. With
/// [`max_wait`](DenialCacheBuilder::max_wait) at zero none waits.
///
/// # What it does not see
///
/// Refunds, resets, settlements and forced charges through this cache drop the keys that they name.
/// Changed parameters of a limit hold for its states at once, as in the store. What other processes
/// charge cannot end a wait, but `remaining` may lag behind it. What another process refunds,
/// resets or settles, and what a server loses by a failover, shows after the maximum age at the
/// latest. The same holds for a clock of the server that jumps, and for one that runs faster than
/// the clock of this process: a wait is longer by no more than that difference within the maximum
/// age.
///
/// # With other stores
///
/// It goes around a merging store on one server or on a cluster. Within a
/// [`Fallback`](crate::Fallback) its answers neither close nor open the circuit breaker. Put
/// `Metrics`, `Traced` and [`TopDenied`](crate::TopDenied) around it. Around a store that is chosen
/// at run time it takes an `Arc` of a [`dyn
/// DynSnapshotStore`](ratelimit_core::store::DynSnapshotStore).
pub struct DenialCache<S, A: Algorithm = AnyAlgorithm, C = PreciseClock> {
    store: S,
    kept: DenialStates<A>,
    rounds: OpenRounds<A>,
    max_wait: Duration,
    clock: C,
    /// The latest time of that clock, in microseconds.
    latest_us: AtomicU64,
    asked: AtomicU64,
    answered: AtomicU64,
}

impl<S: fmt::Debug, A: Algorithm, C> fmt::Debug for DenialCache<S, A, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("DenialCache");
        shown.field("store", &self.store).field("open_rounds", &self.rounds.len());
        shown.finish_non_exhaustive()
    }
}

/// What a [`DenialCache`] has saved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheCounts {
    /// How many requests went to the store.
    pub asked: u64,
    /// How many requests the cache answered.
    pub answered: u64,
    /// How many keys have a state in the cache, including those that are too old and not yet
    /// removed.
    pub keys: usize,
}

/// The settings of a [`DenialCache`] that is to be built: what [`DenialCache::builder`] returns.
#[derive(Clone, Debug)]
pub struct DenialCacheBuilder<C = PreciseClock> {
    max_age: Duration,
    max_wait: Duration,
    capacity: usize,
    clock: C,
}

impl DenialCache<()> {
    /// The settings of a cache around a store.
    #[must_use]
    pub fn builder() -> DenialCacheBuilder {
        DenialCacheBuilder {
            max_age: Duration::from_secs(1),
            // Half of the time that a `Fallback` gives its store: a request that waits and then
            // goes itself has the other half.
            max_wait: Duration::from_millis(50),
            capacity: 1 << 16,
            clock: PreciseClock::new(),
        }
    }
}

impl<C: Clock> DenialCacheBuilder<C> {
    /// How long the cache answers from a reply of the store, from when its request was sent: 1 s by
    /// default. It bounds how long a caller stays denied after another process has reset, refunded
    /// or settled its key.
    #[must_use]
    pub fn max_age(self, max_age: Duration) -> Self {
        Self { max_age, ..self }
    }

    /// How long a request [waits](DenialCache#how-many-go-at-once) for the answers to others: 50 ms
    /// unless it is set. Then it is answered, or goes to the store itself: it takes at most this
    /// and the store's own deadline. A [`Fallback`](crate::Fallback) around the cache needs a
    /// deadline longer than this, such as its default of 100 ms. Zero turns waiting off.
    #[must_use]
    pub fn max_wait(self, max_wait: Duration) -> Self {
        Self { max_wait, ..self }
    }

    /// The most keys whose states are kept: 65,536 unless it is set, at least 1. Keys are kept as
    /// hashes of 16 bytes, and states as they are in memory: a few numbers, or the entries of a log
    /// around a store that tells them. A key under several limits counts once per limit. Above
    /// that, the key that was kept first is dropped, and the store is asked about it again.
    #[must_use]
    pub fn capacity(self, keys: usize) -> Self {
        Self { capacity: keys.max(1), ..self }
    }

    /// Sets the clock that counts how long ago a request was sent, such as a
    /// [`ManualClock`](ratelimit_core::ManualClock) in a test. Only differences between its times
    /// matter.
    #[must_use]
    pub fn clock<D: Clock>(self, clock: D) -> DenialCacheBuilder<D> {
        let Self { max_age, max_wait, capacity, clock: _ } = self;
        DenialCacheBuilder { max_age, max_wait, capacity, clock }
    }

    /// A cache around this store.
    #[must_use]
    pub fn build<S, A: Algorithm>(self, store: S) -> DenialCache<S, A, C> {
        let max_age_us = u64::try_from(self.max_age.as_micros()).unwrap_or(u64::MAX);
        DenialCache {
            store,
            kept: DenialStates::new(self.capacity, max_age_us),
            rounds: OpenRounds::default(),
            max_wait: self.max_wait,
            clock: self.clock,
            latest_us: AtomicU64::new(0),
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

    /// Forgets all that it knows, so that the store is asked about every key: for a program that
    /// learns of a reset elsewhere.
    pub fn forget(&self) {
        self.kept.clear();
    }
}

impl<S, A: Algorithm + Clone + PartialEq + 'static, C: Clock> DenialCache<S, A, C> {
    /// The local time. A clock that went back drops all denials: their ages are unknown, as are
    /// those of requests in flight.
    fn now(&self) -> Timestamp {
        let latest_us = self.latest_us.load(Ordering::Acquire);
        let now = self.clock.now();
        if now.as_us().saturating_add(MOST_JITTER_US) < latest_us {
            self.latest_us.store(now.as_us(), Ordering::Release);
            self.kept.clear();
        } else if now.as_us() > latest_us.saturating_add(MOST_JITTER_US) {
            self.latest_us.fetch_max(now.as_us(), Ordering::AcqRel);
        }
        now
    }

    /// Waits until a batch may go to the store. Returns its keys and the local time then, and what
    /// it holds while it is in flight; or its answer.
    async fn turn(&self, batch: &Batch<'_, A>) -> Result<Going<'_, A>, Verdict> {
        let (mut waits_left, mut may_take) = (MOST_WAITS, self.max_wait);
        loop {
            // The keys first: if the clock has gone back by then, they are of an earlier
            // generation.
            let (keys, now) = (self.kept.keys(batch), self.now());
            let decided = self.kept.snapshot(&keys, now).and_then(|(mut left, is_fresh)| {
                Some((decide(batch, left.now, &mut left).ok()?, left, is_fresh))
            });
            let (left, is_fresh) = match decided {
                Some((verdict, _, true)) if !verdict.allowed() => {
                    return Err(verdict.with_source(Source::Cache));
                }
                // The states that are kept admit it, or are too old. This is what it would leave.
                Some((_, left, is_fresh)) => (Some(left), is_fresh),
                None => (None, false),
            };
            let is_silent = left.is_none() && self.kept.silent(batch).load(Ordering::Relaxed);
            // On no runtime there is no time to wait by.
            if is_silent || self.max_wait.is_zero() || Handle::try_current().is_err() {
                return Ok((keys, now, None));
            }
            let may_wait = waits_left > 0 && !may_take.is_zero();
            let ending = match self.rounds.turn(batch, &keys, left, may_wait) {
                Turn::Goes(under_way) => return Ok((keys, now, under_way)),
                Turn::Denied(verdict) if is_fresh => return Err(verdict.with_source(Source::Cache)),
                Turn::Denied(_) => return Ok((keys, now, None)),
                Turn::Waits(ending) => ending,
            };
            let begin = Instant::now();
            // Boxed, because few wait.
            Box::pin(self.rounds.wait(ending, may_take)).await;
            may_take = may_take.saturating_sub(begin.elapsed());
            waits_left -= 1;
        }
    }

    /// Keeps what the store saw.
    fn note(
        &self,
        batch: &Batch<'_, A>,
        (keys, sent, under_way): (&[KeyGeneration], Timestamp, Option<&RoundMember<'_, A>>),
        verdict: &Verdict,
        snapshot: Option<Snapshot<A::State>>,
    ) {
        let (silent, is_silent) = (self.kept.silent(batch), snapshot.is_none());
        if silent.load(Ordering::Relaxed) != is_silent {
            silent.store(is_silent, Ordering::Relaxed);
        }
        let Some(Snapshot { now, states }) = snapshot else {
            if verdict.allowed() {
                self.kept.invalidate(keys);
            }
            return;
        };
        let allowed = verdict.allowed();
        let is_wanted = !allowed || under_way.is_some_and(RoundMember::is_waited_for);
        for ((check, key), state) in batch.checks().iter().zip(keys).zip(states) {
            let (algorithm, kept) = (check.limit.algorithm(), KeptState { state, now, sent });
            self.kept.note(algorithm, *key, kept, allowed, is_wanted);
        }
    }
}

/// A batch that goes to the store: its keys, the local time, and what it holds while it is in
/// flight.
type Going<'c, A> = (Vec<KeyGeneration>, Timestamp, Option<RoundMember<'c, A>>);

#[deny(clippy::missing_trait_methods)]
impl<S: SnapshotStore<A>, A: Algorithm + Clone + PartialEq + 'static, C: Clock> Store<A>
    for DenialCache<S, A, C>
{
    type Error = S::Error;

    async fn apply(&self, batch: &Batch<'_, A>) -> Result<Verdict, S::Error> {
        let kept = &self.kept;
        if !acquires_anew(batch) {
            self.asked.fetch_add(1, Ordering::Relaxed);
            let keys = kept.keys(batch);
            let _dropping = OnDrop(|| match batch.operation() {
                Op::Peek => {}
                // No acquisition can end the wait of a request that is in flight.
                Op::Acquire => kept.remove(&keys),
                _ => kept.invalidate(&keys),
            });
            return self.store.apply(batch).await;
        }
        let (keys, sent, under_way) = match self.turn(batch).await {
            Ok(going) => going,
            Err(verdict) => {
                self.answered.fetch_add(1, Ordering::Relaxed);
                return Ok(verdict);
            }
        };
        self.asked.fetch_add(1, Ordering::Relaxed);
        // The store may charge a request and lose the answer. The kept states are up to date before
        // waiting requests wake.
        let dropping = OnDrop(|| kept.remove(&keys));
        let (verdict, snapshot) = self.store.apply_with_snapshot(batch).await?;
        std::mem::forget(dropping);
        // If the clock has gone back meanwhile, all keys have another generation from here on.
        self.now();
        self.note(batch, (&keys, sent, under_way.as_ref()), &verdict, snapshot);
        Ok(verdict)
    }

    fn report_counts(&self, report: &mut dyn FnMut(&'static str, u64)) {
        let CacheCounts { asked, answered, keys } = self.counts();
        report("ratelimit_cache_asked_total", asked);
        report("ratelimit_cache_answered_total", answered);
        report("ratelimit_cache_keys", keys as u64);
        self.store.report_counts(report);
    }

    fn server_of(&self, batch: &Batch<'_, A>) -> Option<u64> {
        self.store.server_of(batch)
    }
}

lists_logged!(
    DenialCache<S, A, C>,
    [A: Algorithm + Clone + PartialEq + 'static, S: SnapshotStore<A> + LogStore<A>, C: Clock],
    store
);
keeps_records!(
    DenialCache<S, A, C>,
    [A: Algorithm + Clone + PartialEq + 'static, S: SnapshotStore<A> + RecordStore<A>, C: Clock],
    store
);
