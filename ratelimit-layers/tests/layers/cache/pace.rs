//! An attack on a store that is some milliseconds away: the calls that reach it are those that its
//! limit makes necessary, also where the limit refills about as fast as the store answers.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use ratelimit_core::algorithm::AnyState;
use ratelimit_core::store::{Batch, Op, SnapshotStore, WithSnapshot};
use ratelimit_core::{AnyAlgorithm, Clock, Limit, Store, Timestamp, Verdict};
use ratelimit_layers::DenialCache;
use ratelimit_memory::{MemoryError, MemoryStore};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::common::{ask, limit, operate};
use ratelimit_simulation::SimulatedClock;

const TASKS: u64 = 100;
const LASTS: Duration = Duration::from_secs(2);

/// A store that is so many milliseconds away, there and back, at least and at most.
#[derive(Debug)]
struct Far {
    clock: SimulatedClock,
    memory: MemoryStore<AnyAlgorithm, SimulatedClock>,
    limit: Limit<AnyAlgorithm>,
    way_ms: (u64, u64),
    attack: Mutex<Attack>,
}

impl Far {
    fn lock(&self) -> MutexGuard<'_, Attack> {
        self.attack.lock().expect("no panic")
    }

    /// Looks whether the state denies. Between two calls it only recovers.
    async fn look(&self) {
        if !operate(&self.memory, Op::Peek, &self.limit, "mallory", 1).await.allowed() {
            self.lock().denied_at = self.clock.now();
        }
    }

    async fn travel(&self) {
        let way_ms = fastrand::u64(self.way_ms.0..=self.way_ms.1);
        sleep(Duration::from_millis(way_ms)).await;
    }
}

impl Store<AnyAlgorithm> for Far {
    type Error = MemoryError;

    async fn apply(&self, batch: &Batch<'_, AnyAlgorithm>) -> Result<Verdict, MemoryError> {
        Ok(self.apply_with_snapshot(batch).await?.0)
    }
}

impl SnapshotStore<AnyAlgorithm> for Far {
    async fn apply_with_snapshot(
        &self,
        batch: &Batch<'_, AnyAlgorithm>,
    ) -> Result<WithSnapshot<AnyState>, MemoryError> {
        {
            let mut seen = self.lock();
            (seen.calls, seen.under_way) = (seen.calls + 1, seen.under_way + 1);
            seen.at_once = seen.at_once.max(seen.under_way);
        }
        self.travel().await;
        let decided = self.memory.apply_with_snapshot(batch).await;
        self.look().await;
        self.travel().await;
        self.lock().under_way -= 1;
        decided
    }
}

#[derive(Debug, Default)]
struct Attack {
    admitted: u64,
    calls: u64,
    under_way: u64,
    at_once: u64,
    /// The last time at which the state was seen to deny.
    denied_at: Timestamp,
    /// How many were denied by the cache though the state denied at no time between their call and
    /// its answer.
    early: u64,
    denied: u64,
    slowest: Duration,
}

/// Attacks a limit for two seconds: each task asks, and asks again after a pause, or at the end of
/// its wait.
async fn attack(words: &str, way_ms: (u64, u64), pause: Option<Duration>) -> Attack {
    let begin = Instant::now();
    let clock = SimulatedClock { base: begin, offset_us: 0, drift_ppm: 0 };
    let limit = limit("l", words);
    let memory = MemoryStore::builder().clock(clock).build();
    let far = Far { clock, memory, limit, way_ms, attack: Mutex::default() };
    let store: DenialCache<_, AnyAlgorithm, _> = DenialCache::builder().clock(clock).build(far);
    let (store, mut tasks) = (Arc::new(store), JoinSet::new());
    for _ in 0..TASKS {
        let store = Arc::clone(&store);
        tasks.spawn(async move {
            let far = store.store();
            while begin.elapsed() < LASTS {
                let asked = far.clock.now();
                far.look().await;
                let verdict = ask(&*store, &far.limit, "mallory", 1).await;
                let took_us = far.clock.now().saturating_us_since(asked);
                {
                    let mut seen = far.lock();
                    seen.slowest = seen.slowest.max(Duration::from_micros(took_us));
                    seen.admitted += u64::from(verdict.allowed());
                    seen.denied += u64::from(!verdict.allowed());
                    seen.early += u64::from(!verdict.allowed() && seen.denied_at < asked);
                }
                sleep(pause.unwrap_or_else(|| verdict.retry_after().unwrap_or_default())).await;
            }
        });
    }
    tasks.join_all().await;
    std::mem::take(&mut *store.store().lock())
}

#[tokio::test(start_paused = true)]
async fn where_a_limit_refills_about_as_fast_as_the_store_answers_the_calls_stay_near_what_is_due()
{
    // What the limit admits in that time; how much of it is admitted at least: with a burst of one,
    // a call at a time; and how many may pass while an answer is on its way.
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
        // Two waits, each for a call, of 50 ms in all; a call; and up to a millisecond by which
        // tokio's timer is late. No wait ends with a denial where a limit refills faster than the
        // store answers, so without that bound more would follow.
        let call_ms = 2 * way_ms.1;
        let slowest = Duration::from_millis((2 * call_ms).min(50) + call_ms + 1);
        assert!(seen.slowest <= slowest, "{what}");
    }
}
