//! An attack on a store that is some milliseconds away: the calls that reach it are those that its limit makes necessary, also
//! where the limit refills about as fast as the store answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use ratelimit_core::{
    Batch, Clock, Limit, Op, Policy, PolicyState, SnapshotStore, Store, Timestamp, Verdict,
    WithSnapshot,
};
use ratelimit_layers::DenialCache;
use ratelimit_memory::{MemoryError, MemoryStore};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::common::{BEGIN, ask, limit, operate};

const TASKS: u64 = 200;
const LASTS: Duration = Duration::from_secs(2);

/// Tokio's time, which stands still while tasks run.
#[derive(Clone, Debug)]
struct Paused(Instant);

impl Clock for Paused {
    fn now(&self) -> Timestamp {
        BEGIN.saturating_add_us(u64::try_from(self.0.elapsed().as_micros()).unwrap_or(u64::MAX))
    }
}

/// A store that is so many milliseconds away, there and back, at least and at most.
#[derive(Debug)]
struct Far {
    clock: Paused,
    memory: MemoryStore<Policy, Paused>,
    limit: Limit<Policy>,
    way_ms: (u64, u64),
    calls: AtomicU64,
    under_way: AtomicU64,
    most_under_way: AtomicU64,
    /// The last time at which the state was seen to deny.
    denied_us: AtomicU64,
}

impl Far {
    /// Looks whether the state denies. Between two calls it only recovers.
    async fn look(&self) {
        if !operate(&self.memory, Op::Peek, &self.limit, "mallory", 1).await.allowed() {
            self.denied_us.fetch_max(self.clock.now().as_us(), SeqCst);
        }
    }

    async fn travel(&self) {
        let way_ms = fastrand::u64(self.way_ms.0..=self.way_ms.1);
        sleep(Duration::from_millis(way_ms)).await;
    }
}

impl Store<Policy> for Far {
    type Error = MemoryError;

    async fn apply(&self, batch: &Batch<'_, Policy>) -> Result<Verdict, MemoryError> {
        Ok(self.apply_with_snapshot(batch).await?.0)
    }
}

impl SnapshotStore<Policy> for Far {
    async fn apply_with_snapshot(
        &self,
        batch: &Batch<'_, Policy>,
    ) -> Result<WithSnapshot<PolicyState>, MemoryError> {
        self.calls.fetch_add(1, SeqCst);
        self.most_under_way.fetch_max(self.under_way.fetch_add(1, SeqCst) + 1, SeqCst);
        self.travel().await;
        let decided = self.memory.apply_with_snapshot(batch).await;
        self.look().await;
        self.travel().await;
        self.under_way.fetch_sub(1, SeqCst);
        decided
    }
}

#[derive(Debug, Default)]
struct Attack {
    admitted: u64,
    calls: u64,
    at_once: u64,
    /// How many were denied by the cache though the state denied at no time between their call and its answer.
    early: u64,
    denied: u64,
    slowest: Duration,
}

/// Attacks a limit for two seconds: each task asks, and asks again after a pause, or at the end of its wait.
async fn attack(words: &str, way_ms: (u64, u64), pause: Option<Duration>) -> Attack {
    let clock = Paused(Instant::now());
    let memory = MemoryStore::builder().clock(clock.clone()).build();
    let [calls, under_way, most_under_way, denied_us] = Default::default();
    let (own, limit) = (clock.clone(), limit("l", words));
    let far =
        Far { clock: own, memory, limit, way_ms, calls, under_way, most_under_way, denied_us };
    let store: DenialCache<_, Policy, _> = DenialCache::builder().clock(clock.clone()).build(far);
    let (store, begin) = (Arc::new(store), clock.0);
    let mut tasks = JoinSet::new();
    for _ in 0..TASKS {
        let (store, clock) = (Arc::clone(&store), clock.clone());
        tasks.spawn(async move {
            let (far, mut seen) = (store.store(), Attack::default());
            while begin.elapsed() < LASTS {
                let asked = clock.now();
                far.look().await;
                let verdict = ask(&*store, &far.limit, "mallory", 1).await;
                let took_us = clock.now().saturating_us_since(asked);
                seen.slowest = seen.slowest.max(Duration::from_micros(took_us));
                seen.admitted += u64::from(verdict.allowed());
                seen.denied += u64::from(!verdict.allowed());
                let denied_us = far.denied_us.load(SeqCst);
                seen.early += u64::from(!verdict.allowed() && denied_us < asked.as_us());
                sleep(pause.unwrap_or_else(|| verdict.retry_after().unwrap_or_default())).await;
            }
            seen
        });
    }
    let seen = tasks.join_all().await;
    let counted = |count: &AtomicU64| count.load(SeqCst);
    Attack {
        admitted: seen.iter().map(|seen| seen.admitted).sum(),
        calls: counted(&store.store().calls),
        at_once: counted(&store.store().most_under_way),
        early: seen.iter().map(|seen| seen.early).sum(),
        denied: seen.iter().map(|seen| seen.denied).sum(),
        slowest: seen.iter().map(|seen| seen.slowest).max().unwrap_or_default(),
    }
}

#[tokio::test(start_paused = true)]
async fn where_a_limit_refills_about_as_fast_as_the_store_answers_the_calls_stay_near_what_is_due()
{
    // What the limit admits in that time; how much of it is admitted at least: with a burst of one, a call at a time; and how
    // many may pass while an answer is on its way.
    for (words, way_ms, pause_ms, due, admitted, at_once) in [
        ("gcra 100/s burst 1", (2, 4), None, 201, 150, 1),
        ("gcra 100/s burst 100", (2, 4), Some(1), 300, 290, 100),
        ("gcra 100/s burst 100", (2, 4), None, 300, 290, 100),
        ("gcra 500/s burst 1", (1, 1), None, 1_001, 990, 1),
        ("gcra 500/s burst 1", (2, 4), None, 1_001, 300, 4),
        ("gcra 1000/s burst 8", (2, 4), None, 2_020, 1_990, 16),
        ("sliding-counter 100/s", (2, 4), None, 300, 200, 100),
        ("fixed-window 1/10ms", (2, 4), None, 202, 195, 1),
        ("gcra 100/s burst 1", (20, 40), None, 220, 80, 8),
    ] {
        fastrand::seed(7);
        let seen = attack(words, way_ms, pause_ms.map(Duration::from_millis)).await;
        let what = format!("{words}, {way_ms:?} ms away: {seen:?}");
        assert!(seen.calls <= due * 3 / 2, "{what}");
        assert!((admitted..=due).contains(&seen.admitted), "{what}");
        // Before a state is known, four go.
        assert!(seen.at_once <= at_once + 4, "{what}");
        assert!(seen.early <= seen.denied / 10, "{what}");
        // The longest wait, a call, and up to a millisecond by which tokio's timer is late.
        assert!(seen.slowest <= Duration::from_millis(50 + 2 * way_ms.1 + 1), "{what}");
    }
}
